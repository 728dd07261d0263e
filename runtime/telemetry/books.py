"""The instruments of the meters of one mode, with labels resolved once, not for each event.

A series that exists from the start, at 0, shows its first rise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Self, get_args

import attrs

from protocol.values.effects import MediaKind
from protocol.values.errors import ErrorCode
from protocol.values.events import Endpoint
from protocol.values.messages import EndReason
from protocol.values.modes import OF_MODE, Mode, Work

from . import catalogue as c
from .instruments import Count, Instruments, Spread

STAGES: Final = ("prefill", "generate", "llm", "tts", "token2wav", "finalize")
UNIT_OUTCOMES: Final = ("listen", "speech", "cut", "failed", "ended")
TURN_STAGES: Final = ("prefill", "first", "end")
TURN_OUTCOMES: Final = ("turn_end", "length", "interrupted", "failed", "ended")
CHUNK_OUTCOMES: Final = ("heard", "failed", "context_full", "ended")
TOKEN_KINDS: Final = ("text", "speech", "picture", "prompt")
LEAVINGS: Final = ("left", "cancelled", "refused")
BROKEN_OFF: Final = "broken_off"
"""The end of a session without a reason: a bug of ours, or a hard stop."""


@attrs.frozen(kw_only=True)
class UnitBooks:
    """Of duplex sessions; see the metrics of the same names."""

    outcomes: Mapping[str, Count]
    dropped: Count
    late: Count
    answer_s: Spread
    wait_s: Spread
    barrier_s: Spread
    wall_s: Spread
    stages: Mapping[str, Spread]
    interrupts: Count
    rollbacks: Mapping[str, Count]
    finalizes_failed: Count


@attrs.frozen(kw_only=True)
class TurnBooks:
    """Of chats; see the metrics of the same names."""

    outcomes: Mapping[str, Count]
    stages: Mapping[str, Spread]


@attrs.frozen(kw_only=True)
class ChunkBooks:
    """Of transcriptions; see the metrics of the same names."""

    outcomes: Mapping[str, Count]
    chunk_s: Spread
    utterances: Count


@attrs.frozen(kw_only=True)
class Books:
    """Of all sessions of one mode, with books of their work; see the metrics of the same names."""

    opened: Mapping[str, Count]
    ended: Mapping[str, Count]
    session_s: Spread
    frames_received: Count
    frames_sent: Count
    received_bytes: Count
    sent_bytes: Count
    sends_failed: Count
    resumed: Count
    errors: Mapping[str, Count]
    media_decoded: Mapping[str, Count]
    media_rejected: Mapping[str, Count]
    media_s: Mapping[str, Spread]
    recordings_failed: Count
    queue_wait_s: Spread
    queue_left: Mapping[str, Count]
    slot_s: Spread
    release_s: Spread
    open_s: Spread
    opens_failed: Count
    backends_lost: Count
    rebuilds: Mapping[str, Count]
    rebuild_s: Spread
    rebuilt_s: Count
    speech_s: Count
    tokens: Mapping[str, Count]
    kv_tokens: Spread
    work: UnitBooks | TurnBooks | ChunkBooks

    @classmethod
    def of(cls, made: Instruments, mode: Mode) -> Self:
        """Make the instruments of a mode."""
        count, spread, kinds = made.count, made.spread, get_args(MediaKind)
        return cls(
            opened={at: count(c.SESSIONS_OPENED, mode, at) for at in get_args(Endpoint)},
            ended={
                reason: count(c.SESSIONS_ENDED, mode, reason)
                for reason in (*get_args(EndReason), BROKEN_OFF)
            },
            session_s=spread(c.SESSION_SECONDS, mode),
            frames_received=count(c.FRAMES_RECEIVED, mode),
            frames_sent=count(c.FRAMES_SENT, mode),
            received_bytes=count(c.RECEIVED_BYTES, mode),
            sent_bytes=count(c.SENT_BYTES, mode),
            sends_failed=count(c.SENDS_FAILED, mode),
            resumed=count(c.RESUMED, mode),
            errors={code.value: count(c.ERRORS, code.value) for code in ErrorCode},
            media_decoded={kind: count(c.MEDIA, kind, "decoded") for kind in kinds},
            media_rejected={kind: count(c.MEDIA, kind, "rejected") for kind in kinds},
            media_s={kind: spread(c.MEDIA_SECONDS, kind) for kind in kinds},
            recordings_failed=count(c.RECORDINGS_FAILED, mode),
            queue_wait_s=spread(c.QUEUE_WAIT_SECONDS, mode),
            queue_left={how: count(c.QUEUE_LEFT, mode, how) for how in LEAVINGS},
            slot_s=spread(c.SLOT_SECONDS, mode),
            release_s=spread(c.RELEASE_SECONDS),
            open_s=spread(c.OPEN_SECONDS),
            opens_failed=count(c.OPENS_FAILED),
            backends_lost=count(c.BACKENDS_LOST, mode),
            rebuilds={how: count(c.REBUILDS, how) for how in ("done", "failed")},
            rebuild_s=spread(c.REBUILD_SECONDS),
            rebuilt_s=count(c.REBUILT_SECONDS),
            speech_s=count(c.SPEECH_SECONDS, mode),
            tokens={kind: count(c.TOKENS, kind) for kind in TOKEN_KINDS},
            kv_tokens=spread(c.SESSION_KV_TOKENS, mode),
            work=_WORK[OF_MODE[mode].work](made, mode),
        )


def _unit_books(made: Instruments, mode: Mode) -> UnitBooks:
    count, spread = made.count, made.spread
    return UnitBooks(
        outcomes={outcome: count(c.UNITS, mode, outcome) for outcome in UNIT_OUTCOMES},
        dropped=count(c.UNITS_DROPPED, mode),
        late=count(c.UNITS_LATE, mode),
        answer_s=spread(c.UNIT_ANSWER_SECONDS, mode),
        wait_s=spread(c.UNIT_WAIT_SECONDS, mode),
        barrier_s=spread(c.UNIT_BARRIER_SECONDS, mode),
        wall_s=spread(c.UNIT_SECONDS, mode),
        stages={stage: spread(c.UNIT_STAGE_SECONDS, stage) for stage in STAGES},
        interrupts=count(c.INTERRUPTS, mode),
        rollbacks={how: count(c.ROLLBACKS, how) for how in ("done", "failed")},
        finalizes_failed=count(c.FINALIZES_FAILED),
    )


def _turn_books(made: Instruments, _mode: Mode) -> TurnBooks:
    return TurnBooks(
        outcomes={outcome: made.count(c.TURNS, outcome) for outcome in TURN_OUTCOMES},
        stages={stage: made.spread(c.TURN_STAGE_SECONDS, stage) for stage in TURN_STAGES},
    )


def _chunk_books(made: Instruments, _mode: Mode) -> ChunkBooks:
    return ChunkBooks(
        outcomes={outcome: made.count(c.CHUNKS, outcome) for outcome in CHUNK_OUTCOMES},
        chunk_s=made.spread(c.CHUNK_SECONDS),
        utterances=made.count(c.UTTERANCES),
    )


_WORK: Final[Mapping[Work, Callable[[Instruments, Mode], UnitBooks | TurnBooks | ChunkBooks]]] = {
    "unit": _unit_books,
    "turn": _turn_books,
    "chunk": _chunk_books,
}
