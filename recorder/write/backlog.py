"""What a log holds back: records that are to be made blocks, and blocks that are to be written.

Every call is made under the lock of all logs (`log.Shared`).
"""

from __future__ import annotations

from collections import deque
from typing import Final

import attrs

from ..format.format import MIB
from ..format.records import Record
from .logfile import Block

MADE_HERE_BYTES_MAX: Final = MIB // 2
"""Made by the thread that appends, in some 3 ms at most; a unit's records have 0.4 MB."""
HEARD_TICKS: Final = 2
"""Ticks of the recorder's thread until it makes what a client sent, if no append did."""
REST_TICKS: Final = 5
"""The same for other records: they can wait for the next second's."""
OF_THE_RECORDER: Final = frozenset({"session", "fin"})
"""The kinds of record that the recorder's thread makes: it creates and closes the file."""


@attrs.frozen(kw_only=True)
class Taken:
    """Work of a log: blocks to be written, or else records to be made blocks."""

    blocks: list[Block]
    records: list[Record]
    size_bytes: int


@attrs.define
class Backlog:
    """One log's backlog; records are in order, and blocks come before all records."""

    _records: deque[tuple[Record, int]] = attrs.field(factory=deque, init=False)
    _records_bytes: int = attrs.field(default=0, init=False)
    _blocks: list[Block] = attrs.field(factory=list, init=False)
    _blocks_bytes: int = attrs.field(default=0, init=False)
    _heard_ns: int | None = attrs.field(default=None, init=False)
    _ticks: int = attrs.field(default=0, init=False)

    @property
    def first_seq(self) -> int | None:
        """`seq` of the first record that is in no block; None without one."""
        return self._records[0][0].seq if self._records else None

    def add(self, record: Record, size: int) -> None:
        """Take the next record."""
        self._records.append((record, size))
        self._records_bytes += size
        if self._heard_ns is None and record.kind == "rx":
            self._heard_ns = record.at_ns

    @property
    def is_small(self) -> bool:
        """Whether the thread that appends can make blocks of all records."""
        kinds = {self._records[0][0].kind, self._records[-1][0].kind}
        return self._records_bytes <= MADE_HERE_BYTES_MAX and not kinds & OF_THE_RECORDER

    def is_aged(self, age_ns: int) -> bool:
        """Whether a client's message was this long in it when the last record came."""
        return self._heard_ns is not None and self._records[-1][0].at_ns - self._heard_ns >= age_ns

    def tick(self) -> bool:
        """Count a tick of the recorder's thread; whether the records have waited long enough."""
        self._ticks += 1
        return self._ticks >= (REST_TICKS if self._heard_ns is None else HEARD_TICKS)

    def records(self) -> Taken:
        """Take all records, to put the blocks of them."""
        taken = [record for record, _ in self._records]
        size, self._records_bytes = self._records_bytes, 0
        self._records.clear()
        self._rest()
        return Taken(blocks=[], records=taken, size_bytes=size)

    def put(self, blocks: list[Block], size: int) -> None:
        """Take the blocks of records of a size."""
        self._blocks += blocks
        self._blocks_bytes += size

    def take(self, bytes_max: float) -> Taken:
        """Take the blocks, or else records up to `bytes_max`, at least one."""
        blocks, size = self._blocks, self._blocks_bytes
        self._blocks, self._blocks_bytes = [], 0
        records = list[Record]()
        while not blocks and self._records:
            record, record_bytes = self._records[0]
            if records and size + record_bytes > bytes_max:
                break
            self._records.popleft()
            self._records_bytes -= record_bytes
            records.append(record)
            size += record_bytes
        if not self._records:
            self._rest()
        return Taken(blocks=blocks, records=records, size_bytes=size)

    def _rest(self) -> None:
        self._heard_ns, self._ticks = None, 0
