"""What the gateway bench exchanges: a second of sound and a picture in, a second of speech out.

All contenders answer with the same bytes, and none of them twice in a row. A contender says which
it is; a pattern says how units come; see `measure`. A second may come in pieces, as float32 in a
conversation that is answered by speech, or as PCM16 to be transcribed, which is answered by words;
or as a client of OpenAI's APIs sends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

import attrs
import numpy as np
import numpy.typing as npt
import orjson
import soxr

from protocol.values.model import INPUT_RATE_HZ, OUTPUT_RATE_HZ, SAMPLE_BYTES
from protocol.wire.codec import encode_base64
from runtime.commands.bench import Speech, camera_frame, load_speech

Contender = Literal["antiphon", "recorded", "echo", "websockets", "logged"]
"""Our server without and with recording, the echo on its transport, and the other library without
and with a log of JSON lines."""
CONTENDERS: Final[tuple[Contender, ...]] = ("antiphon", "recorded", "echo", "websockets", "logged")
Coding = Literal["float32", "pcm16", "openai", "live"]
CODINGS: Final[tuple[Coding, ...]] = ("float32", "pcm16")
"""Of the sound that all contenders take."""
OPENAI: Final[tuple[Coding, ...]] = ("openai", "live")
"""Its Realtime and Live APIs: PCM16 at 24 kHz, which only our server takes."""
Pace = Literal["flat", "spread", "together", "slow"]
"""Flat out; or a unit a second: spread over it, all at once, or spread and arriving slowly."""

PCM16_MAX: Final = 32767
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
PATHS: Final[Mapping[Coding, str]] = MappingProxyType(
    {
        "float32": "/v1/realtime?mode=video",
        "pcm16": "/v1/realtime?mode=transcription",
        "openai": "/v1/realtime?model=bench",
        "live": "/v1/live/sessions",
    }
)
"""Where sound of a coding goes."""
END: Final = " "
"""Ends the message that completes a unit: how the echo, which reads nothing, knows it."""


@attrs.frozen(kw_only=True)
class Pattern:
    """How units come.

    Attributes:
        name: of it.
        sessions: at once.
        units: of each of them.
        pace: when.
        has_picture: a unit is a picture too, not sound alone.
        pieces: messages a unit, with a pause between them unless it goes flat out.
        coding: of the sound.
        contenders: that are measured.
    """

    name: str
    sessions: int
    units: int
    pace: Pace
    has_picture: bool = True
    pieces: int = 1
    coding: Coding = "float32"
    contenders: tuple[Contender, ...] = CONTENDERS


@attrs.frozen(kw_only=True)
class Plan:
    """What is measured.

    Attributes:
        patterns: run in every round, against every contender.
        memory: what a session's memory is measured by, on a server that is fresh but for `first`;
            None: neither that nor the stages are measured.
        first: makes a server load what it loads once.
        capacity: of many sessions, recorded, once at the end.
        settle_s: for sessions to end and their logs to be finished, before the next are measured.
    """

    patterns: tuple[Pattern, ...]
    memory: Pattern | None
    first: Pattern
    capacity: tuple[Pattern, ...]
    settle_s: float = 0.4


SPREAD: Final = Pattern(name="20 spread", sessions=20, units=4, pace="spread")
PATTERNS: Final = (
    Pattern(name="1 flat out", sessions=1, units=240, pace="flat"),
    Pattern(name="8 flat out", sessions=8, units=40, pace="flat"),
    Pattern(name="sound alone", sessions=1, units=240, pace="flat", has_picture=False),
    SPREAD,
    Pattern(name="8 slowly", sessions=8, units=4, pace="slow"),
    Pattern(name="100 together", sessions=100, units=3, pace="together"),
    *(
        Pattern(
            name=f"{1000 // pieces} ms of {coding}",
            sessions=20,
            units=4,
            pace="spread",
            has_picture=False,
            pieces=pieces,
            coding=coding,
        )
        for coding in CODINGS
        for pieces in (1, 10, 50)
    ),
)
PIECES: Final = attrs.evolve(SPREAD, name="20 ms pieces", has_picture=False, pieces=50)
RECORDING: Final = (
    *(
        attrs.evolve(each, contenders=("antiphon", "recorded", "logged"))
        for each in (SPREAD, PIECES)
    ),
    *(
        attrs.evolve(PIECES, name=coding, coding=coding, contenders=("antiphon", "recorded"))
        for coding in OPENAI
    ),
)
"""For what recording costs: ours without and with it, next to the other that records."""
CAPACITY_S: Final = 10
PIECES_PART: Final = 60
"""Percent of the last run's sessions that send pieces of 20 ms: 300 of 500."""


def make_plan(names: tuple[str, ...], sessions: int, *, is_recording: bool = False) -> Plan:
    """Make the plan of the command.

    Args:
        names: of the patterns; none: all of them.
        sessions: of the last run; 0 leaves it out.
        is_recording: measure only what recording costs.
    """
    many = Pattern(name=f"{sessions} spread", sessions=sessions, units=CAPACITY_S, pace="spread")
    sound = attrs.evolve(many, name=f"{many.name}, sound", has_picture=False)
    few = max(1, sessions * PIECES_PART // 100)
    pieces = attrs.evolve(sound, name=f"{few} spread, 20 ms", sessions=few, pieces=50)
    capacity = (many,) if is_recording else (sound, many, pieces)
    return Plan(
        patterns=tuple(
            each
            for each in (RECORDING if is_recording else PATTERNS)
            if not names or each.name in names
        ),
        memory=None if is_recording else attrs.evolve(SPREAD, name="memory", sessions=100),
        first=Pattern(name="first", sessions=1, units=8, pace="flat"),
        capacity=capacity if sessions else (),
    )


@attrs.frozen(kw_only=True)
class Exchange:
    """A unit: what a client sends, and the PCM that it gets.

    Attributes:
        frame: the message with a picture.
        sound: a second at 16 kHz, -1 to 1.
        pcm: float32 LE, 24 kHz mono, a second.
    """

    frame: str
    sound: npt.NDArray[np.float32]
    pcm: bytes

    def pieces(self, count: int, coding: Coding = "float32") -> list[str]:
        """Write the messages of a second of sound, in so many pieces; the last one has `END`."""
        if coding == "float32":
            pcm = self.sound.tobytes()
        else:
            is_heard, sound = coding == "pcm16", self.sound
            sound = sound if is_heard else soxr.resample(sound, INPUT_RATE_HZ, OUTPUT_RATE_HZ)
            pcm = (sound * PCM16_MAX).clip(-PCM16_MAX, PCM16_MAX).astype("<i2").tobytes()
        step = len(pcm) // count
        texts = [
            _append(encode_base64(pcm[at : at + step]), coding) for at in range(0, len(pcm), step)
        ]
        return [*texts[:-1], texts[-1] + END]


def make_exchanges(count: int = UNITS_MADE) -> list[Exchange]:
    """Make units, the same at each run and no two alike."""
    speech = load_speech()
    return [_make(speech, number) for number in range(count)]


def output_second(speech: Speech, number: int) -> bytes:
    """Make a second of model speech: float32 LE, 24 kHz mono, all different."""
    samples = np.frombuffer(speech.second(number), "<f4")
    pcm = _scaled(soxr.resample(samples, INPUT_RATE_HZ, OUTPUT_RATE_HZ), 0.9 + 0.0007 * number)
    return pcm[: OUTPUT_RATE_HZ * SAMPLE_BYTES].ljust(OUTPUT_RATE_HZ * SAMPLE_BYTES, b"\0")


def input_second(speech: Speech, number: int) -> bytes:
    """Make a second of a user's speech: float32 LE, 16 kHz mono, all different."""
    return _scaled(np.frombuffer(speech.second(number), "<f4"), 0.8 + 0.0007 * number)


def _scaled(samples: npt.NDArray[np.float32], gain: float) -> bytes:
    """As a browser's, samples are not whole 16-bit steps."""
    return (samples * np.float32(gain)).astype("<f4").tobytes()


def _make(speech: Speech, number: int) -> Exchange:
    sound = input_second(speech, number)
    frames = [encode_base64(camera_frame(number))]
    return Exchange(
        frame=_append(encode_base64(sound), "float32", video_frames=frames) + END,
        sound=np.frombuffer(sound, "<f4"),
        pcm=output_second(speech, number),
    )


def _append(audio: str, coding: Coding, **rest: object) -> str:
    match coding:
        case "float32":
            body: dict[str, object] = {"type": "input.append", "input": {"audio": audio, **rest}}
        case "live":
            body = {"type": "session.input_audio.append", "audio": audio}
        case _:
            body = {"type": "input_audio_buffer.append", "audio": audio}
    return orjson.dumps(body).decode()


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


def words(number: int) -> bytes:
    """Write the answer to a second that is transcribed, as plainly as can be."""
    return orjson.dumps({"type": "transcription.delta", "delta": f"{TEXT} {number}"})
