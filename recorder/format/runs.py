"""Runs of a client's small frames, whose records are encoded together (`RecordEncoder`).

A client that sends sound in pieces of 20 ms sends fifty a second, and by themselves they cost ten
times what a second in one piece costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from .records import Record

FRAME_CHARS_MAX: Final = 8 << 10
"""Longer frames hold a tenth of a second or more."""
RECORDS_MAX: Final = 32
"""In a run: a part of a block, of which a quarter of a second of pieces takes a sixth."""
_PLAIN: Final = 2
"""Fields of a frame's record that has nothing but the frame, and its type."""


def runs(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Join records of small frames that follow each other; all others stand by themselves."""
    run = list[Record]()
    for record in records:
        is_small = _is_small(record)
        if run and not (is_small and len(run) < RECORDS_MAX):
            yield run
            run = []
        if is_small:
            run.append(record)
        else:
            yield [record]
    if run:
        yield run


def _is_small(record: Record) -> bool:
    if record.kind != "rx" or len(record.fields) > _PLAIN:
        return False
    frame = record.fields.get("frame")
    return isinstance(frame, str) and len(frame) <= FRAME_CHARS_MAX
