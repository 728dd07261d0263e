"""Where a log that lost its writer ends, so that another one can go on with it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ..format.chain import Chain, LogEnd
from ..format.errors import LogDamaged
from ..format.format import split_records
from ..format.records import Fields
from .decoding import parse
from .scan import Damage, FileSource, Scanner

RESTARTED: Final[Fields] = {"by": "server", "what": "restarted"}
"""The fields of the mark from which another server goes on."""


def end_of(path: Path) -> LogEnd:
    """Read a log to its last whole block.

    Raises:
        LogDamaged: it is damaged, or over; or holds no more than its head, which the next block
            would repeat.
        OSError: it cannot be read.
    """
    chain, file_bytes, next_seq = Chain(), 0, 0
    source = FileSource(path)
    try:
        for item in Scanner(source):
            if isinstance(item, Damage):
                raise LogDamaged(f"{path.name} at {item.offset}: {item.reason}, {item.detail}")
            records = list(split_records(item.payload, item.header.n_records))
            for parts in records[item.header.has_head_copy :]:
                chain.counts[parse(*parts).record.kind] += 1
            chain.follow(item.header)
            file_bytes, next_seq = item.end, item.header.next_seq
    finally:
        source.close()
    if chain.counts["fin"]:
        raise LogDamaged(f"{path.name} is over")
    if chain.blocks < 2:
        raise LogDamaged(f"{path.name} holds no more than its head")
    return LogEnd(file_bytes=file_bytes, next_seq=next_seq, chain=chain)
