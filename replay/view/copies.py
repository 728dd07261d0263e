"""A redacted copy of a log, as a server sends it: the log, or its page.

The log is read twice, as `antiphon recordings redact` does; the copy is made block by block, and is
no file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import cast

from recorder.format.records import Fields, Record
from recorder.read.reader import LogReader
from recorder.read.scan import Damage, OpenSource

from ..redact.policy import KINDS, Kind, Policy
from ..redact.redaction import RedactError, Redaction, rehearse
from ..rerun.remake import head_record, pieces_of
from .document import page_of

__all__ = ("KINDS", "RedactError", "log_without", "page_without")

Open = Callable[[], OpenSource]
Make = Callable[[Fields, Iterable[Record | Damage]], Iterator[bytes]]


def log_without(open_: Open, kinds: Collection[str]) -> Make:
    """Return what makes a log without these kinds of content (`policy.KINDS`) of both sides.

    It raises `RedactError` if the log is damaged, or the session takes another course.
    """
    return partial(_log_of, open_, _policy(kinds))


def page_without(open_: Open, kinds: Collection[str]) -> Make:
    """Return what makes the page of such a log."""
    return partial(_page_of, open_, _policy(kinds))


def _policy(kinds: Collection[str]) -> Policy:
    return Policy(kinds=frozenset(cast("Collection[Kind]", kinds)))


def _head_of(open_: Open, policy: Policy, head: Fields) -> Record:
    with LogReader(open_()) as reader:
        return head_record(rehearse(head, reader, policy).head)


def _log_of(
    open_: Open, policy: Policy, head: Fields, items: Iterable[Record | Damage]
) -> Iterator[bytes]:
    first = _head_of(open_, policy, head)
    yield from pieces_of(chain([first], Redaction(policy).records(items)))


def _page_of(
    open_: Open, policy: Policy, head: Fields, items: Iterable[Record | Damage]
) -> Iterator[bytes]:
    first = _head_of(open_, policy, head)
    yield from page_of(first.fields, chain([first], Redaction(policy).records(items)))
