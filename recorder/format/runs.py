"""Runs of a client's small frames, whose records are encoded together (`RecordEncoder`).

A client that sends sound in pieces of 20 ms sends fifty a second, and by themselves they cost ten
times what a second in one piece costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from .records import Record

FRAME_CHARS_MAX: Final = 16 << 10
"""Longer frames hold more than a tenth of a second."""
CHARS_MAX: Final = 128 << 10
"""Of a run, which must fit into a block; a second and a half of float32 samples."""
_PLAIN: Final = 2
"""Fields of a frame's record that has nothing but the frame, and its type."""


def runs(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Join records of small frames that follow each other; all others stand by themselves."""
    run, chars = list[Record](), 0
    for record in records:
        size = _chars(record)
        if run and (size > FRAME_CHARS_MAX or chars + size > CHARS_MAX):
            yield run
            run, chars = [], 0
        if size > FRAME_CHARS_MAX:
            yield [record]
        else:
            run.append(record)
            chars += size
    if run:
        yield run


def _chars(record: Record) -> int:
    """The characters of a frame's record; of all others more than a run may have."""
    frame = record.fields.get("frame") if record.kind == "rx" else None
    if not isinstance(frame, str) or len(record.fields) > _PLAIN:
        return CHARS_MAX + 1
    return len(frame)
