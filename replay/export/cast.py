"""The conversation as text that types itself: an asciicast of version 2, for `asciinema play`.

A JSON object, then a line `[seconds, "o", text]` for each piece of output, as both voices are
heard; other notes stand in lines of their own. Only a user's questions have words.
"""

from __future__ import annotations

import json
from typing import BinaryIO, Final

from protocol.values.limits import NS_PER_S

from .captions import plain
from .moments import Note, NoteKind, Picture, Words
from .timeline import Timeline

WIDTH: Final = 100
HEIGHT: Final = 30
NEW_LINE: Final = "\r\n"
TOLD: Final[frozenset[NoteKind]] = frozenset(
    {
        *("queued", "queue_done", "created", "paused", "resumed", "interrupted", "going_away"),
        *("error", "closed", "force_listen", "dropped", "unheard", "close", "damage", "mark"),
        "shortened",
    }
)
"""Notes of interest to a reader; a listen each second is not."""


def write_cast(timeline: Timeline, file: BinaryIO) -> None:
    """Write the conversation."""
    wall_ms, name = timeline.head.get("wall_ms"), timeline.head.get("recording_id")
    head: dict[str, object] = {"version": 2, "width": WIDTH, "height": HEIGHT}
    if isinstance(wall_ms, int):
        head["timestamp"] = wall_ms // 1000
    if isinstance(name, str):
        head["title"] = plain(name)
    file.write(json.dumps(head).encode() + b"\n")
    turn: tuple[str, str] | None = None
    has_pictures = False
    for moment in timeline:
        at_ns, text = moment.begin_ns, ""
        match moment:
            case Words():
                goes_on = turn == (moment.voice, moment.response_id) and moment.voice == "model"
                turn = (moment.voice, moment.response_id)
                start = "" if goes_on else _line(at_ns, f"{moment.speaker}: ")
                text = start + plain(moment.text)
            case Note(kind=kind) if kind in TOLD:
                said = f": {plain(moment.text)}" if moment.text else ""
                turn, text = None, _line(at_ns, f"({kind.replace('_', ' ')}{said})")
            case Picture() if not has_pictures:
                has_pictures = True
                turn, text = None, _line(at_ns, "(the user shows pictures)")
        if text:
            _write(file, at_ns, text)
    _write(file, timeline.duration_ns, NEW_LINE)


def _line(at_ns: int, text: str) -> str:
    return f"{NEW_LINE if at_ns else ''}[{at_ns / NS_PER_S:7.3f}] {text}"


def _write(file: BinaryIO, at_ns: int, text: str) -> None:
    file.write(json.dumps([round(at_ns / NS_PER_S, 6), "o", text]).encode() + b"\n")
