"""The time line as JSON lines: an object for each moment, without its sound or picture.

The first line is `session`, the last `end`. Each has its `kind`, and all but the first the time
`at_ms` at which it is heard, shown or said: milliseconds from the session's start.

| kind | more keys |
|---|---|
| `session` | `recording_id`, `model`, `mode`, `wall_ms` (Unix); null if unknown |
| `sound` | `voice`, `came_ms` (arrived or sent), `begin` and `samples` at `rate_hz`, `until_ms` |
| `words` | `voice`, `came_ms`, `until_ms` (null without sound), `text`, `response_id` |
| `picture` | `bytes` of the JPEG file |
| `end` | `finished`: the log has its end; `damage_count` |
| any other | `text`: its details; see `moments.NoteKind` |

`transcribed` is true where a transcriber wrote the words down, and absent else.
"""

from __future__ import annotations

import json
from typing import Any, BinaryIO

from protocol.values.limits import NS_PER_MS
from runtime.measures.placing import RATE_HZ, Sound

from ..rerun.environment import model_of
from ..shared.fields import below, typed
from .moments import Moment, Note, Picture, Words
from .timeline import Timeline


def write_jsonl(timeline: Timeline, file: BinaryIO) -> None:
    """Write the time line."""
    head = timeline.head
    _write(
        file,
        kind="session",
        recording_id=typed(head, "recording_id", str),
        model=model_of(head),
        mode=typed(below(head, "config"), "mode", str),
        wall_ms=typed(head, "wall_ms", int),
    )
    for moment in timeline:
        _write(file, **_line(moment))
    _write(
        file,
        kind="end",
        at_ms=_ms(timeline.duration_ns),
        finished=timeline.story.end.finished,
        damage_count=timeline.story.damage_count,
    )


def _line(moment: Moment) -> dict[str, Any]:
    at_ms = _ms(moment.begin_ns)
    match moment:
        case Sound():
            return {
                "kind": "sound",
                "at_ms": at_ms,
                "voice": moment.voice,
                "came_ms": _ms(moment.at_ns),
                "until_ms": _ms(moment.end_ns),
                "begin": moment.begin,
                "samples": moment.end - moment.begin,
                "rate_hz": RATE_HZ[moment.voice],
            }
        case Words():
            return {
                "kind": "words",
                "at_ms": at_ms,
                "voice": moment.voice,
                "came_ms": _ms(moment.at_ns),
                "until_ms": None if moment.end_ns is None else _ms(moment.end_ns),
                "text": moment.text,
                "response_id": moment.response_id,
                **({"transcribed": True} if moment.is_transcribed else {}),
            }
        case Picture():
            return {"kind": "picture", "at_ms": at_ms, "bytes": len(moment.jpeg)}
        case Note():
            return {"kind": moment.kind, "at_ms": at_ms, "text": moment.text}


def _ms(at_ns: int) -> float:
    return round(at_ns / NS_PER_MS, 3)


def _write(file: BinaryIO, **fields: object) -> None:
    file.write(json.dumps(fields).encode() + b"\n")  # in ASCII: a log can hold lone surrogates
