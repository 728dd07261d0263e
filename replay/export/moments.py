"""The moments of a session's time line: plain values, the same for every format.

Times are nanoseconds of the session's clock, 0 at its start. Sound lies on the grid of its own rate
(`runtime.measures.placing`). PCM is float32 LE, mono.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import attrs

from runtime.measures.placing import Sound, Voice


class TooLongError(ValueError):
    """A session is longer than the sound that a format can hold."""


class NoDatasetError(ValueError):
    """A session has no seconds for a trainer; the message says why."""


NAMES: Final[Mapping[Voice, str]] = {"user": "User", "model": "Model"}


@attrs.frozen(kw_only=True)
class Words:
    """Text as it came, spaces included; it arrived from the user, or was sent to them, at `at_ns`.

    `begin_ns`: when its sound begins; without one, `at_ns`, or the end of the sound that it
    transcribes. `end_ns`: when its sound is over; None without one. `response_id`: the model's
    turn; pieces of one turn are joined without a separator. `is_transcribed`: another model wrote
    it down.
    """

    voice: Voice
    at_ns: int
    begin_ns: int
    end_ns: int | None
    text: str
    response_id: str = ""
    is_transcribed: bool = False

    @property
    def speaker(self) -> str:
        """Who says it, for people."""
        return f"{NAMES[self.voice]} (transcribed)" if self.is_transcribed else NAMES[self.voice]


@attrs.frozen(kw_only=True)
class Picture:
    """A picture from the user: a JPEG file, from `begin_ns` until the next."""

    begin_ns: int
    jpeg: bytes


NoteKind = Literal[
    "queued",
    "queue_update",
    "queue_done",
    "created",
    "listen",
    "paused",
    "resumed",
    "interrupted",
    "going_away",
    "prefilled",
    "response",
    "error",
    "closed",
    "force_listen",
    "shortened",
    "dropped",
    "unheard",
    "close",
    "damage",
    "mark",
]
"""Notes up to `closed` are the server's messages; see `protocol.values.messages`.

`force_listen`: the user cuts the model short; `shortened`: a client's message was refused, and the
log keeps its length, hash and start; `dropped`: a second of input was lost to newer input;
`unheard`: words that were sent and, cut short, not heard; `close`: the WebSocket was closed;
`damage`: some of the log is lost here; `mark`: an annotation of the running session.
"""


@attrs.frozen(kw_only=True)
class Note:
    """Another event of the session, with its details."""

    begin_ns: int
    kind: NoteKind
    text: str = ""


Moment = Sound | Words | Picture | Note
