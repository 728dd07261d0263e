"""What the gateway bench exchanges: a second of sound and a picture in, a second of speech out.

All contenders answer with the same bytes, and none of them twice in a row. A contender says which
it is; a pattern says how units come; see `measure`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

import attrs
import orjson

from protocol.wire.codec import encode_base64
from runtime.commands.bench.material import Speech, camera_frame, load_speech, output_second

Contender = Literal["antiphon", "recorded", "echo", "websockets"]
"""Our server without and with recording, the echo on its transport, and the other library."""
CONTENDERS: Final[tuple[Contender, ...]] = ("antiphon", "recorded", "echo", "websockets")
Pace = Literal["flat", "spread", "together", "slow"]
"""Flat out; or a unit a second: spread over it, all at once, or spread and arriving slowly."""

UNITS_MADE: Final = 16
"""Different units; of 3 MB in all, so that they do not all stay in a core's cache."""
TEXT: Final = "so the answer to it is"
METRICS: Final[Mapping[str, object]] = MappingProxyType(
    {
        "kv_cache_length": 1234,
        "prefill_ms": 60.0,
        "generate_ms": 300.0,
        "wall_clock_ms": 360.0,
        "cost_llm_ms": 200.0,
        "cost_tts_ms": 60.0,
        "cost_token2wav_ms": 40.0,
        "n_tokens": 12,
        "n_tts_tokens": 25,
        "vision_slices": 1,
        "vision_tokens": 64,
        "dropped_units": 0,
        "recording": "off",
    }
)
"""What a delta of ours says beside its content; the yardsticks say as much."""
QUEUE_DONE: Final = '{"type":"session.queue_done"}'
CREATED: Final = '{"type":"session.created"}'
"""What the yardsticks say, so that one client can talk to all."""


@attrs.frozen(kw_only=True)
class Pattern:
    """How units come.

    Attributes:
        name: of it.
        sessions: at once.
        units: of each of them.
        pace: when.
        has_picture: a unit is a picture too, not sound alone.
    """

    name: str
    sessions: int
    units: int
    pace: Pace
    has_picture: bool = True


@attrs.frozen(kw_only=True)
class Plan:
    """What is measured.

    Attributes:
        patterns: run in every round, against every contender.
        memory: what a session's memory is measured by, on a server that is fresh but for `first`.
        first: makes a server load what it loads once.
        capacity: of many sessions, recorded, once at the end.
        settle_s: for sessions to end and their logs to be finished, before the next are measured.
    """

    patterns: tuple[Pattern, ...]
    memory: Pattern
    first: Pattern
    capacity: tuple[Pattern, ...]
    settle_s: float = 0.4


PATTERNS: Final = (
    Pattern(name="1 flat out", sessions=1, units=240, pace="flat"),
    Pattern(name="8 flat out", sessions=8, units=40, pace="flat"),
    Pattern(name="sound alone", sessions=1, units=240, pace="flat", has_picture=False),
    Pattern(name="20 spread", sessions=20, units=4, pace="spread"),
    Pattern(name="8 slowly", sessions=8, units=4, pace="slow"),
    Pattern(name="100 together", sessions=100, units=3, pace="together"),
)
CAPACITY_S: Final = 10


def make_plan(names: tuple[str, ...], sessions: int) -> Plan:
    """Make the plan of the command.

    Args:
        names: of the patterns; none: all of them.
        sessions: of the last run; 0 leaves it out.
    """
    many = Pattern(name=f"{sessions} spread", sessions=sessions, units=CAPACITY_S, pace="spread")
    return Plan(
        patterns=tuple(each for each in PATTERNS if not names or each.name in names),
        memory=Pattern(name="memory", sessions=100, units=2, pace="spread"),
        first=Pattern(name="first", sessions=1, units=8, pace="flat"),
        capacity=(attrs.evolve(many, name=f"{many.name}, sound", has_picture=False), many)
        if sessions
        else (),
    )


@attrs.frozen(kw_only=True)
class Exchange:
    """A unit: what a client sends, and the PCM that it gets.

    Attributes:
        frame: the message with a picture.
        frame_of_sound: the same without it.
        pcm: float32 LE, 24 kHz mono, a second.
    """

    frame: str
    frame_of_sound: str
    pcm: bytes


def make_exchanges(count: int = UNITS_MADE) -> list[Exchange]:
    """Make units, the same at each run and no two alike."""
    speech = load_speech()
    return [_make(speech, number) for number in range(count)]


def _make(speech: Speech, number: int) -> Exchange:
    audio = encode_base64(speech.second(number, gain=0.8 + 0.0007 * number))
    frames = [encode_base64(camera_frame(number))]

    def message(**rest: object) -> str:
        return orjson.dumps({"type": "input.append", "input": {"audio": audio, **rest}}).decode()

    return Exchange(
        frame=message(video_frames=frames),
        frame_of_sound=message(),
        pcm=output_second(speech, number),
    )


def deltas(input_id: str, pcm: bytes) -> tuple[bytes, bytes]:
    """Write the answer to a unit as plainly as can be: a text delta, then an audio delta.

    Args:
        input_id: of the unit.
        pcm: float32 LE.
    """
    head = {"type": "response.output.delta", "session_id": "sess_0123456789ab"}
    ids = {"response_id": "resp_0123456789ab", "input_id": input_id}
    text = {**head, "kind": "text", **ids, "text": TEXT, "metrics": dict(METRICS)}
    audio = encode_base64(pcm)
    sound = {**head, "kind": "audio", **ids, "audio": audio, "metrics": dict(METRICS)}
    return orjson.dumps(text), orjson.dumps(sound)
