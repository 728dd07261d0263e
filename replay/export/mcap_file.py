"""MCAP, which Foxglove shows and many readers read: sound, pictures and text as Foxglove has them.

| topic | schema | holds |
|---|---|---|
| `/user/audio`, `/model/audio` | `foxglove.RawAudio` | sounds, 16 bits at the voice's rate |
| `/user/image` | `foxglove.CompressedImage` | a JPEG file as it came |
| `/user/text`, `/model/text` | `foxglove.Log` | words |
| `/session` | `foxglove.Log` | other notes; the kind of note is the `name` |

A message's `log_time` is when it is heard, shown or said, `publish_time` when it arrived or was
sent; both are Unix time if the log has the session's start. The metadata record `session` names the
recording. Foxglove supports only 16-bit sound: the log keeps every byte.

Messages are JSON with their schemas in the file, which needs no generated code. In zstd chunks that
is a sixth more than raw bytes (74 against 63 kB for a second of both voices and a 20 kB picture).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, BinaryIO, Final

import numpy as np
import orjson
import pybase64
from mcap.well_known import MessageEncoding, SchemaEncoding
from mcap.writer import Writer

from protocol.values.limits import NS_PER_MS, NS_PER_S
from protocol.values.model import SAMPLE_BYTES
from runtime.measures.placing import RATE_HZ, Sound

from ..shared.fields import below
from .captions import plain
from .mixer import to_pcm16
from .moments import Moment, Note, NoteKind, Picture, Words
from .timeline import Timeline

START_NS_MAX: Final = 1 << 63
"""Unix time in the year 2262. MCAP has 64 bits for a time, a log 63 for its own."""
TIME_NS_MAX: Final = (1 << 64) - 1

_TIME: Final[Mapping[str, object]] = {
    "type": "object",
    "title": "time",
    "properties": {
        "sec": {"type": "integer", "minimum": 0},
        "nsec": {"type": "integer", "minimum": 0, "maximum": NS_PER_S - 1},
    },
}
_TEXT: Final[Mapping[str, object]] = {"type": "string"}
_COUNT: Final[Mapping[str, object]] = {"type": "integer", "minimum": 0}
_BYTES: Final[Mapping[str, object]] = {"type": "string", "contentEncoding": "base64"}
_LEVELS: Final = ("UNKNOWN", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
_LEVEL: Final[Mapping[str, object]] = {
    "title": "foxglove.LogLevel",
    "oneOf": [{"title": name, "const": number} for number, name in enumerate(_LEVELS)],
}

RAW_AUDIO: Final = "foxglove.RawAudio"
IMAGE: Final = "foxglove.CompressedImage"
LOG: Final = "foxglove.Log"
SCHEMAS: Final[Mapping[str, Mapping[str, object]]] = {
    RAW_AUDIO: {
        "timestamp": _TIME,
        "data": _BYTES,
        "format": _TEXT,
        "sample_rate": _COUNT,
        "number_of_channels": _COUNT,
    },
    IMAGE: {"timestamp": _TIME, "frame_id": _TEXT, "data": _BYTES, "format": _TEXT},
    LOG: {
        "timestamp": _TIME,
        "level": _LEVEL,
        "message": _TEXT,
        "name": _TEXT,
        "file": _TEXT,
        "line": _COUNT,
    },
}
"""The fields of each schema, by Foxglove's name; all are required."""
TOPICS: Final[Mapping[str, str]] = {
    "/user/audio": RAW_AUDIO,
    "/model/audio": RAW_AUDIO,
    "/user/image": IMAGE,
    "/user/text": LOG,
    "/model/text": LOG,
    "/session": LOG,
}
_SEVERITIES: Final[Mapping[NoteKind, str]] = {
    "error": "ERROR",
    "damage": "ERROR",
    "shortened": "WARNING",
    "dropped": "WARNING",
    "unheard": "WARNING",
    "going_away": "WARNING",
}


def write_mcap(timeline: Timeline, file: BinaryIO) -> None:
    """Write the session."""
    writer = Writer(file)
    writer.start(library=f"antiphon {version('antiphon')}")
    schemas = {
        name: writer.register_schema(name, SchemaEncoding.JSONSchema, _schema(name))
        for name in SCHEMAS
    }
    channels = {
        topic: writer.register_channel(topic, MessageEncoding.JSON, schemas[schema])
        for topic, schema in TOPICS.items()
    }
    start_ns = _start_ns(timeline)
    writer.add_metadata("session", _facts(timeline))
    for number, moment in enumerate(timeline):
        log_time = min(start_ns + moment.begin_ns, TIME_NS_MAX)
        topic, body = _message(moment, log_time)
        came_ns = moment.at_ns if isinstance(moment, Sound | Words) else moment.begin_ns
        writer.add_message(
            channels[topic],
            log_time=log_time,
            data=orjson.dumps(body),
            publish_time=start_ns + came_ns,
            sequence=number,
        )
    writer.finish()  # type: ignore[no-untyped-call]


def _start_ns(timeline: Timeline) -> int:
    wall_ms = timeline.head.get("wall_ms")
    start_ns = wall_ms * NS_PER_MS if isinstance(wall_ms, int) else 0
    return start_ns if 0 <= start_ns <= START_NS_MAX else 0


def _schema(name: str) -> bytes:
    fields = SCHEMAS[name]
    body = {"title": name, "type": "object", "properties": fields, "required": list(fields)}
    return orjson.dumps(body)


def _facts(timeline: Timeline) -> dict[str, str]:
    facts = {
        "recording_id": timeline.head.get("recording_id"),
        "model": below(timeline.head, "config").get("model"),
        "wall_ms": timeline.head.get("wall_ms"),
    }
    return {name: plain(str(fact)) for name, fact in facts.items() if fact is not None}


def _message(moment: Moment, at_ns: int) -> tuple[str, dict[str, Any]]:
    seconds, ns = divmod(at_ns, NS_PER_S)
    time = {"timestamp": {"sec": seconds, "nsec": ns}}
    match moment:
        case Sound(voice=voice, pcm=pcm):
            samples = np.frombuffer(pcm, "<f4", count=len(pcm) // SAMPLE_BYTES)
            sound = {
                "data": pybase64.b64encode_as_string(to_pcm16(samples).astype("<i2").tobytes()),
                "format": "pcm-s16",
                "sample_rate": RATE_HZ[voice],
                "number_of_channels": 1,
            }
            return f"/{voice}/audio", time | sound
        case Picture(jpeg=jpeg):
            data = pybase64.b64encode_as_string(jpeg)
            return "/user/image", time | {"frame_id": "camera", "data": data, "format": "jpeg"}
        case Words(voice=voice, text=text):
            name = f"{voice}, transcribed" if moment.is_transcribed else voice
            return f"/{voice}/text", time | _log("INFO", name, text)
        case Note(kind=kind, text=text):
            return "/session", time | _log(_SEVERITIES.get(kind, "INFO"), kind, text or kind)


def _log(level: str, name: str, text: str) -> dict[str, Any]:
    message = text.encode(errors="replace").decode()  # JSON in UTF-8 holds no lone surrogates
    return {
        "level": _LEVELS.index(level),
        "message": message,
        "name": name,
        "file": "",
        "line": 0,
    }
