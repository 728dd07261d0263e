"""The description of a session: plain values, the same for text and JSON.

Times are nanoseconds of the session's clock, 0 at its start. `inspect` collects them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import attrs
from cattrs import unstructure

from protocol.values.state import State

from .absences import Absence
from .exchanges import Exchange, Outcome


@attrs.frozen(kw_only=True)
class StateSpan:
    """A state, and when it was entered."""

    state: State
    at_ns: int


UtteranceOutcome = Outcome | Literal["done"]
"""The result of an utterance; `pending`: its end was not heard, or not yet."""


@attrs.frozen(kw_only=True)
class UtteranceStory:
    """One utterance of a transcription, from the start of its first chunk in the model.

    Attributes:
        index: counts the session's utterances; those without sound are not given to the model.
        done_ns: when its last chunk was heard, or failed, if recorded.
        chunks: seconds that the model heard, with the silence at the end.
        kv_length: tokens in the KV cache after its last chunk.
        longest_us: the longest time of a chunk, by the backend's clock.
    """

    index: int
    started_ns: int
    done_ns: int | None = None
    outcome: UtteranceOutcome = "pending"
    chunks: int = 0
    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    kv_length: int | None = None
    longest_us: int = 0


@attrs.frozen(kw_only=True)
class Drop:
    """A second of input that was lost to newer input (B7), from the record `seq`."""

    at_ns: int
    ordinal: int
    input_id: str
    seq: int = attrs.field(default=0, eq=False)


MoveReason = Literal["lost", "drained", "restarted"]


@attrs.frozen(kw_only=True)
class Move:
    """A move to another slot (B11), from the record `seq`.

    Attributes:
        why: the worker was lost or drained, or the server was started again.
        to_ns: when the session went on; None if it did not.
        steps: units or seconds that the model was fed again; 0 if there were none.
        exact: each was fed as recorded; else in long prefills.
    """

    at_ns: int
    why: MoveReason
    to_ns: int | None = None
    steps: int = 0
    exact: bool = True
    seq: int = attrs.field(default=0, eq=False)


@attrs.frozen(kw_only=True)
class ErrorSent:
    """An `error` that the client was sent, in the record `seq`."""

    at_ns: int
    code: str
    message: str
    seq: int = attrs.field(default=0, eq=False)


@attrs.frozen(kw_only=True)
class ShortenedFrame:
    """A refused message of which the log keeps length, hash (128 bits in hex) and start.

    `told` is a description, with the part that is kept.
    """

    at_ns: int
    size_bytes: int
    blake2b: str
    told: str


@attrs.frozen(kw_only=True)
class Mark:
    """A mark; `by` is the name of its author's key.

    `is_later`: it was written after the session, next to the log (`recorder.storage.marks`).
    """

    at_ns: int
    text: str
    by: str | None
    is_later: bool = False


@attrs.frozen(kw_only=True)
class Playback:
    """What a client said of its playback.

    Attributes:
        played_ms: milliseconds of the session's speech that it had played.
        behind_ms: milliseconds that it had not: spoken before, and not played.
    """

    at_ns: int
    played_ms: int
    behind_ms: int
    seq: int = attrs.field(default=0, eq=False)


@attrs.frozen(kw_only=True)
class Said:
    """What the user said, as the server's transcriber wrote it down.

    Attributes:
        start_ms, end_ms: where it was said, in milliseconds of the client's sound.
        is_whole: no more words of the same came.
    """

    at_ns: int
    start_ms: int
    end_ms: int
    text: str
    is_whole: bool = attrs.field(default=False, eq=False)


@attrs.frozen(kw_only=True)
class End:
    """The end of a session; the close is of the WebSocket, and None unless the server closed it.

    `reason` is one word, None if the log has no end; `finished`: the log has its `fin`.
    """

    reason: str | None = None
    close_code: int | None = None
    close_reason: str | None = None
    finished: bool = False


@attrs.frozen(kw_only=True)
class Inspection:
    """One session; lists are in order.

    Attributes:
        session_id: as its client and the server's log know it.
        model: None if the log does not name it.
        mode: None if its first event is lost.
        wall_ms: Unix milliseconds of its start.
        duration_ns: from its start to its last record.
        states: from QUEUED on.
        shortened: the client's refused frames that are kept shortened.
        fields_ignored: the client's fields without a meaning in its dialect.
        damage_count: of the log; with damage the values have gaps.
        diverged_seq: the record from which the machine differs and the states are unknown.
    """

    recording_id: str | None
    session_id: str | None
    model: str | None
    mode: str | None
    dialect: str | None
    seed: int | None
    wall_ms: int | None
    duration_ns: int
    states: tuple[StateSpan, ...]
    frames_received: int
    shortened: tuple[ShortenedFrame, ...]
    frames_sent: int
    fields_ignored: int
    units: tuple[Exchange, ...]
    turns: tuple[Exchange, ...]
    utterances: tuple[UtteranceStory, ...]
    drops: tuple[Drop, ...]
    moves: tuple[Move, ...]
    absences: tuple[Absence, ...]
    playback: tuple[Playback, ...]
    said: tuple[Said, ...]
    errors: tuple[ErrorSent, ...]
    marks: tuple[Mark, ...]
    end: End
    records: int
    damage_count: int
    diverged_seq: int | None


def to_json(inspection: Inspection) -> dict[str, Any]:
    """Write an inspection as plain values, for JSON."""
    plain: dict[str, Any] = unstructure(inspection)
    for kind, names in _TOLD.items():
        told = [{"cut": one.get("stopped"), **one} for one in plain[kind]]
        plain[kind] = [{name: one[name] for name in names} for one in told]
    return plain


_TOLD: Final[Mapping[str, tuple[str, ...]]] = {
    "units": (
        *("index", "started_ns", "done_ns", "finalized_ns", "outcome", "forced", "frames"),
        *("text", "audio_ms", "end_of_turn", "cut", "kv_length", "costs"),
    ),
    "turns": (
        *("index", "started_ns", "prefilled_ns", "done_ns", "outcome", "input_tokens"),
        *("generated_tokens", "text", "audio_ms", "kv_length", "costs", "calls"),
    ),
    "drops": ("at_ns", "ordinal", "input_id"),
    "playback": ("at_ns", "played_ms", "behind_ms"),
    "said": ("at_ns", "start_ms", "end_ms", "text"),
    "errors": ("at_ns", "code", "message"),
}
"""The fields shown of each."""
