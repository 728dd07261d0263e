"""Recovery: a valid log made from the intact records of a damaged one.

    damaged log -> survey: which records are good -> their blocks, copied -> fin -> verified

Rules: good blocks are copied; a block with a bad record is rewritten without it. Nothing is
invented: the new log ends where records are lost, or, when salvaging, a `mark` (`is_lost`) replaces
each lost record, so that others keep their numbers and a replay knows where to stop. A block that
does not chain ends the log too. `fin` has the reason `recovered` if records are missing, else its
own; its field `recovered` holds the details. Memory: two numbers per damage, and one block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import attrs

from ..format.blobs import RAW
from ..format.chain import FIN_FIELDS
from ..format.compression import Compressor
from ..format.encoding import Framed
from ..format.errors import LogUnsound, RecorderError
from ..format.format import BLOCK_BYTES, HEADER_BYTES, frame_record, split_records
from ..format.records import Fields, Record, Value
from ..read.decoding import parse
from ..read.places import unit_index
from ..read.reader import LogReader
from ..read.scan import Block, Damage, FileSource, Scanner
from ..read.verify import verify
from ..write.lock import is_held
from .rewrite import Rewriter, StoredCosts

RECOVERED: Final = "recovered"
"""The reason in `fin` of a log with missing records, and the field with the details."""
LOST: Final[Fields] = {"by": "recover", "what": "lost"}
"""The fields of a mark that replaces a lost record."""
LOST_MAX: Final = 1 << 20
"""Limit on marks, as is one per byte of the file: a header can claim any number."""

Parts: TypeAlias = tuple[bytes, memoryview]
"""A record's JSON header and its blobs."""
Watch = Callable[[int], None]
"""Takes the number of bytes read since the last call; the log is read twice."""


class NotRecoverable(RecorderError):  # noqa: N818
    """The log cannot be recovered, or needs no recovery now."""


@attrs.frozen(kw_only=True)
class Survey:
    """The intact records of a log.

    Attributes:
        kept: `seq` ranges of the records to keep, in order, start and stop; without `fin`.
        records_lost: known to be lost, or after the end that is kept.
        tail_bytes: of an incomplete block at its end.
        units: last kept unit's index plus one; 0 if there is none.
        fin: the caller's fields of `fin`; None if it is lost or left out.
        fin_ns: `at_ns` of `fin`.
        is_sound: no damage, nothing missing.
    """

    kept: tuple[tuple[int, int], ...]
    records: int
    records_lost: int
    damage_count: int
    tail_bytes: int
    units: int
    fin: Fields | None
    fin_ns: int | None
    is_sound: bool


@attrs.frozen(kw_only=True)
class Recovered:
    """A recovered log: the survey of its source, its size, and the reason in its `fin`."""

    survey: Survey
    file_bytes: int
    reason: Value


def is_lost(record: Record) -> bool:
    """Whether a record is a mark that replaces a lost record."""
    return record.kind == "mark" and record.fields == LOST


def survey(path: Path, *, salvage: bool = False, watch: Watch = lambda _: None) -> Survey:
    """Find the intact records of a log; with `salvage`, also those after lost records.

    Raises:
        NotRecoverable: it is being written, or a newer version wrote it.
        Unreadable: no session record is left.
        OSError: it cannot be read.
    """
    if is_held(path):
        raise NotRecoverable("it is being written: its server is at work")
    tally = _Tally(salvage=salvage)
    with LogReader(path) as reader:
        left_bytes = reader.tail_bytes
        for item in reader:
            tally.note(item)
            watch(left_bytes - reader.tail_bytes)
            left_bytes = reader.tail_bytes
        tail_bytes = reader.tail_bytes
    is_whole = tally.damage_count == 0 and tail_bytes == 0 and tally.fin is not None
    is_sound = is_whole and verify(path).state == "finished"
    return tally.survey(tail_bytes=tail_bytes, is_sound=is_sound)


def recover(
    source: Path, target: Path, found: Survey, *, watch: Watch = lambda _: None
) -> Recovered:
    """Write the intact records that `survey` found as a new file `target`, and verify it.

    Raises:
        NotRecoverable: too many consecutive records are lost to be marked.
        LogUnsound: the new log is invalid: the source changed meanwhile.
        OSError: the disk refused, or `target` exists.
    """
    file = FileSource(source)
    try:
        fin = _fin_fields(found, file.size())
        compressor = Compressor()
        with Rewriter(target, compressor=compressor, block_bytes=BLOCK_BYTES) as writer:
            copier = _Copier(source=file, found=found, writer=writer)
            end = 0
            for item in Scanner(file):
                if isinstance(item, Block):
                    copier.take(item)
                    watch(item.end - end)
                    end = item.end
            watch(file.size() - end)
            writer.finish(fin, writer.at_ns if found.fin_ns is None else found.fin_ns)
    finally:
        file.close()
    report = verify(target)
    if report.state != "finished" or report.records != found.records + copier.marks + 1:
        raise LogUnsound(f"{source.name} changed while it was recovered")
    return Recovered(survey=found, file_bytes=target.stat().st_size, reason=fin["reason"])


def _fin_fields(found: Survey, file_bytes: int) -> Fields:
    told: dict[str, Value] = {
        "file_bytes": file_bytes,
        "tail_bytes": found.tail_bytes,
        "damage": found.damage_count,
        "records_lost": found.records_lost,
    }
    if found.fin is None:
        return {"reason": RECOVERED, "units": found.units, RECOVERED: told}
    if found.records_lost:
        told["reason"] = found.fin.get("reason")
        return {**found.fin, "reason": RECOVERED, RECOVERED: told}
    return {**found.fin, RECOVERED: told}


@attrs.define(kw_only=True)
class _Tally:
    salvage: bool
    kept: list[tuple[int, int]] = attrs.field(factory=list)
    records: int = 0
    reach: int = 0
    damage_count: int = 0
    units: int = 0
    fin: Fields | None = None
    fin_ns: int | None = None
    breaks_chain: bool = False
    is_over: bool = False

    def note(self, item: Record | Damage) -> None:
        if isinstance(item, Damage):
            self._note_damage(item)
            return
        self._judge(item)
        self.breaks_chain = False
        if item.kind == "fin":
            self.reach = max(self.reach, item.seq)
            if not self.is_over:
                self.fin = {k: v for k, v in item.fields.items() if k not in FIN_FIELDS}
                self.fin_ns = item.at_ns
            return
        self.reach = max(self.reach, item.seq + 1)
        if not self.is_over:
            self._keep(item)

    def survey(self, *, tail_bytes: int, is_sound: bool) -> Survey:
        return Survey(
            kept=tuple(self.kept),
            records=self.records,
            records_lost=self.reach - self.records,
            damage_count=self.damage_count,
            tail_bytes=tail_bytes,
            units=self.units,
            fin=self.fin,
            fin_ns=self.fin_ns,
            is_sound=is_sound,
        )

    @property
    def next_seq(self) -> int:
        return self.kept[-1][1] if self.kept else 0

    def _note_damage(self, damage: Damage) -> None:
        if damage.reason == "version":
            raise NotRecoverable(f"a newer version wrote it: {damage.detail}")
        self.damage_count += 1
        self.breaks_chain |= damage.reason == "chain"
        if damage.first_seq is not None:
            self.reach = max(self.reach, damage.first_seq + damage.records)

    def _judge(self, record: Record) -> None:
        """End the log where records are lost, and before a block that does not chain."""
        if record.seq == self.next_seq:
            # The head comes from either block that still has it.
            self.is_over |= self.breaks_chain and record.seq > 0
        else:
            self.is_over |= not self.salvage

    def _keep(self, record: Record) -> None:
        if self.kept and self.kept[-1][1] == record.seq:
            self.kept[-1] = (self.kept[-1][0], record.seq + 1)
        else:
            self.kept.append((record.seq, record.seq + 1))
        self.records += 1
        unit = unit_index(record)
        self.units = self.units if unit is None else unit + 1


@attrs.define(kw_only=True)
class _Copier:
    source: FileSource
    found: Survey
    writer: Rewriter
    marks: int = 0
    _head: bytes | None = None
    _costs: StoredCosts = attrs.field(factory=StoredCosts, init=False)

    def take(self, block: Block) -> None:
        """Write the kept records of a block."""
        header = block.header
        self.writer.version = max(self.writer.version, header.version)
        wanted = [seq for seq in range(header.first_seq, header.next_seq) if self._is_kept(seq)]
        if not wanted:
            return
        framed = list(split_records(block.payload, header.n_records))
        copy = framed.pop(0) if header.has_head_copy else None
        if copy is not None and self.writer.next_seq == 0:
            self._put(copy)
        if header.first_seq == 0:
            self._head = framed[0][0] + bytes(framed[0][1])
        self._fill(wanted[0])
        is_whole = len(wanted) == len(framed) and wanted[0] > 0  # the writer needs the head itself
        is_head = copy is None or copy[0] + bytes(copy[1]) == self._head
        has_place = header.has_head_copy is self.writer.wants_head_copy
        if is_whole and is_head and has_place:
            self._copy(block, framed)
            return
        for seq in wanted:
            self._fill(seq)
            self._put(framed[seq - header.first_seq])

    def _is_kept(self, seq: int) -> bool:
        at = bisect_right(self.found.kept, seq, key=lambda kept: kept[0]) - 1
        return at >= 0 and seq < self.found.kept[at][1]

    def _copy(self, block: Block, framed: Sequence[Parts]) -> None:
        records = [parse(*parts).record for parts in framed]
        compressed = self.source.read(block.offset + HEADER_BYTES, block.header.compressed_len)
        kinds = [record.kind for record in records]
        self.writer.copy(block.header, compressed, kinds, records[-1].at_ns)

    def _put(self, parts: Parts) -> None:
        header, area = parts
        if self._head is None:
            self._head = header + bytes(area)
        stored = parse(header, area)
        start = frame_record(header, len(area))
        framed = Framed(
            pieces=[start, area],
            framed_bytes=len(start) + len(area),
            cost=self._costs.of(stored, header),
            has_samples=any(len(entry) == 3 and entry[0] != RAW for entry in stored.table),
        )
        self.writer.put(stored.record, framed)

    def _fill(self, next_seq: int) -> None:
        lost = next_seq - self.writer.next_seq
        if lost > min(LOST_MAX, self.source.size()):
            raise NotRecoverable(f"{lost} records are lost at once: no log can be salvaged")
        for seq in range(self.writer.next_seq, next_seq):
            self.writer.put(Record(kind="mark", seq=seq, at_ns=self.writer.at_ns, fields=LOST))
            self.marks += 1
