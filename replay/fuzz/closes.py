"""The judgement of a connection's close: its code must be documented, and fit."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Final

import attrs

from protocol.machine.core import CLOSE_CODES
from protocol.values.errors import (
    CLOSE_INTERNAL_ERROR,
    CLOSE_INVALID_FRAME,
    CLOSE_MEANINGS,
    CLOSE_NORMAL,
    CLOSE_TOO_BIG,
    CLOSE_TRY_LATER,
)
from protocol.values.messages import Closed
from protocol.values.state import Course, State
from runtime.commands.schema.notes import END_CLOSES

from .case import Finding
from .internals import sign_of
from .report import SHOWN_CHARS

ABNORMAL: Final = 1006
"""The server went without a close."""
TRANSPORT_CLOSES: Final = (1002, 1007, CLOSE_TOO_BIG)
"""Codes of the WebSocket layer for invalid frames, which the server does not see."""


@attrs.frozen(kw_only=True)
class Before:
    """The connection before its end.

    Attributes:
        is_default: the model makes no errors.
        spoiled: the codes that unparsable frames of the client may cause.
        admission_error: an error said that there is no place.
        goodbye: the session's last message, or None.
        is_silent: the dialect has no message for a session's end.
    """

    state: State
    course: Course
    is_default: bool
    spoiled: Set[int]
    admission_error: bool
    goodbye: Closed | None
    is_silent: bool = False


def wrong_with(code: int, reason: str, before: Before) -> Iterator[Finding]:
    """The findings in a close; `code` is 1006 where there was none."""
    sign = sign_of(reason)
    if sign:
        yield _finding("internals", f"a close with {sign}", reason)
    state, is_ours = before.state, code in before.spoiled
    if code not in CLOSE_MEANINGS:
        what = "no close" if code == ABNORMAL else f"close {code}"
        yield _finding("crash" if code == ABNORMAL else "close", f"{what} in {state}", reason)
    elif code == CLOSE_INTERNAL_ERROR and before.is_default:
        yield _finding("crash", f"close {code} in {state}", reason)
    elif code in (CLOSE_INVALID_FRAME, CLOSE_TOO_BIG) and not is_ours:
        yield _finding("close", f"close {code} without such a frame", reason)
    elif code == CLOSE_TRY_LATER and not before.admission_error:
        yield _finding("close", f"close {code} without an error before", reason)
    elif before.goodbye is not None:
        end = before.goodbye.reason
        due = END_CLOSES.get(end) or (CLOSE_CODES.get(end, CLOSE_NORMAL),)
        if code not in due and not is_ours:  # 000 has one reason for all failures
            yield _finding("close", f"close {code} after {end}", reason)
    elif _owes_a_goodbye(code, reason, before):
        yield _finding("close", f"close {code} in ACTIVE without session.closed", reason)


def _owes_a_goodbye(code: int, reason: str, before: Before) -> bool:
    """Whether `session.closed` was due; 003 has none for a silent client."""
    is_silent = before.course is Course.TRANSCRIPTION and (code, reason) == (CLOSE_NORMAL, "idle")
    says = before.state is State.ACTIVE and before.course is not Course.REQUEST
    return says and code not in TRANSPORT_CLOSES and not (is_silent or before.is_silent)


def _finding(kind: str, label: str, reason: str) -> Finding:
    return Finding(kind=kind, label=label, detail=reason[:SHOWN_CHARS])
