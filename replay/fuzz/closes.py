"""The end of a connection, held to what went before it: its code must be documented, and fit."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Final

import attrs

from protocol.core import CLOSE_CODES
from protocol.errors import (
    CLOSE_INTERNAL_ERROR,
    CLOSE_INVALID_FRAME,
    CLOSE_MEANINGS,
    CLOSE_NORMAL,
    CLOSE_TOO_BIG,
    CLOSE_TRY_LATER,
)
from protocol.messages import Closed
from protocol.state import Course, State
from runtime.schema.notes import END_CLOSES

from .case import Finding
from .internals import sign_of
from .shown import SHOWN_CHARS

ABNORMAL: Final = 1006
"""The server went without a close."""
TRANSPORT_CLOSES: Final = (1002, 1007, CLOSE_TOO_BIG)
"""What the WebSocket itself says of frames that are none, before the server hears of them."""


@attrs.frozen(kw_only=True)
class Before:
    """What is known when a connection ends.

    Attributes:
        state: where the session stood.
        course: what it was for.
        is_default: the model does nothing wrong.
        spoiled: the codes that frames beyond repair may bring about, of those that were sent.
        admission_error: an error said that there is no place.
        goodbye: the session's last message; None where there was none.
    """

    state: State
    course: Course
    is_default: bool
    spoiled: Set[int]
    admission_error: bool
    goodbye: Closed | None


def wrong_with(code: int, reason: str, before: Before) -> Iterator[Finding]:
    """Say what is wrong with a close.

    Args:
        code: of the close; 1006 where there was none.
        reason: of it.
        before: what went before.
    """
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
        if code not in due and not is_ours:  # 000 has one word for all that goes wrong
            yield _finding("close", f"close {code} after {end}", reason)
    elif _owes_a_goodbye(code, reason, before):
        yield _finding("close", f"close {code} in ACTIVE without session.closed", reason)


def _owes_a_goodbye(code: int, reason: str, before: Before) -> bool:
    """Whether the session was to say that it is over; 003 has no word for a client's silence."""
    is_silent = before.course is Course.TRANSCRIPTION and (code, reason) == (CLOSE_NORMAL, "idle")
    says = before.state is State.ACTIVE and before.course is not Course.REQUEST
    return says and code not in TRANSPORT_CLOSES and not is_silent


def _finding(kind: str, label: str, reason: str) -> Finding:
    return Finding(kind=kind, label=label, detail=reason[:SHOWN_CHARS])
