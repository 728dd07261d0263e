"""Runs of a client's small frames, whose records are encoded together (`RecordEncoder`).

A client that sends sound in pieces of 20 ms sends fifty a second, and by themselves they cost ten
times what a second in one piece costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from .records import RECORD_OVERHEAD_BYTES, Record

FRAME_CHARS_MAX: Final = 16 << 10
"""Longer frames hold more than a tenth of a second."""
RUN_BYTES_MAX: Final = 128 << 10
"""Of a run, which must fit into a block; a second and a half of float32 samples."""
RECORDS_MAX: Final = 64
"""In a run: more than a second of pieces of 20 ms."""
_PLAIN: Final = {"type", "frame"}
"""The fields of a frame's record that has nothing but the frame."""


def runs(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Join records of small frames that follow each other; all others stand by themselves."""
    run, run_bytes = list[Record](), 0
    for record in records:
        chars = _chars(record)
        is_small = chars is not None and chars <= FRAME_CHARS_MAX
        size = RECORD_OVERHEAD_BYTES + (chars or 0)
        if run and (not is_small or run_bytes + size > RUN_BYTES_MAX or len(run) == RECORDS_MAX):
            yield run
            run, run_bytes = [], 0
        if is_small:
            run.append(record)
            run_bytes += size
        else:
            yield [record]
    if run:
        yield run


def _chars(record: Record) -> int | None:
    """The length of a client's text, if its record has nothing else."""
    frame = record.fields.get("frame") if record.kind == "rx" else None
    is_plain = isinstance(frame, str) and record.fields.keys() == _PLAIN
    return len(frame) if is_plain and isinstance(frame, str) else None
