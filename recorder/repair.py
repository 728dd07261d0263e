"""Logs verified, recovered and compacted: written again from the stored records of others.

    damaged log -> survey: which records are good -> their blocks, copied -> fin -> verified
    finished log -> its records as they are stored -> FLAC, larger blocks, zstd 19 -> compared

Rules:
- Verifying: an intact log without `fin` is open, which is not a fault. Any damage makes it damaged;
  without a session record it is unreadable. `fin` must name the previous block's chain and the
  right counts, and a seek table must match the log.
- Records keep their content, versions and numbers. Blocks are copied whole where possible, and
  rechained; otherwise their records go into new blocks. The session record, its copy, `fin` and the
  seek table are as in any log. The file is new; syncing its directory is left to the caller that
  renames it. Memory holds one block of each log, and two numbers per damage.
- Recovery: nothing is invented. A block with a bad record is rewritten without it. The new log ends
  where records are lost, or, when salvaging, a `mark` (`is_lost`) replaces each lost one, so that
  others keep their numbers and a replay knows where to stop. A block that does not chain ends the
  log too. `fin` has the reason `recovered` if records are missing, else its own; its field
  `recovered` holds the details.
- Compaction: only a finished and sound log is compacted. The packing of blobs and the records per
  block change, and `fin` gets the field `compacted` on the old log. 16-bit samples become FLAC if
  the bytes come back equal and fewer. All records are compared; the caller puts the new log in
  place. One damaged bit costs up to 1 MiB, some seconds, against 384 KiB before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import zip_longest
from pathlib import Path
from typing import Final, Literal, Self, TypeAlias

import attrs
import orjson
import zstandard

from .format import format as layout
from .format.encoding import (
    EXACT_16,
    HEADER,
    RAW,
    Framed,
    RecordEncoder,
    cut_of,
    pack_flac,
    to_json,
)
from .read.reader import (
    PART_VALUES,
    HeadSource,
    LogReader,
    StoredRecord,
    decode,
    no_record,
    parse,
    unit_index,
)
from .read.scan import Block, Damage, FileSource, Scanner
from .write.files import Disk, is_held
from .write.logfile import FIN_FIELDS, LEVEL, Batch, Chain, Compressor, Frame

# -- verifying -------------------------------------------------------------------------------------


State = Literal["finished", "open", "damaged", "unreadable"]

DAMAGE_KEPT: Final = 100
"""Damages listed one by one; further ones are only counted."""
_EXIT_CODES: Final[dict[State, int]] = {"finished": 0, "open": 0, "damaged": 1, "unreadable": 2}


@attrs.define(kw_only=True)
class Report:
    """The result of verifying a log.

    Attributes:
        records: read, the session record counted once.
        first_seq: `seq` of the first record read; None without records.
        damage: the first `DAMAGE_KEPT`.
        damage_count: all damages.
        fin_ok: whether `fin` has the right chain and counts, None without `fin`.
        head_source: the block that the session record came from, None if lost.
        units: `unit` records read.
        last_tx_ordinal: `ordinal` of the last `tx` read; None without one.
        tail_bytes: of an incomplete block at the end, ignored.
        has_seek_table: the log ends with a valid one.
        detail: why it is unreadable, else None.
    """

    state: State
    blocks: int = 0
    records: int = 0
    first_seq: int | None = None
    last_seq: int | None = None
    damage: tuple[Damage, ...] = ()
    damage_count: int = 0
    fin_ok: bool | None = None
    head_source: HeadSource | None = None
    units: int = 0
    last_tx_ordinal: int | None = None
    tail_bytes: int = 0
    has_seek_table: bool = False
    detail: str | None = None

    @property
    def exit_code(self) -> int:
        """Exit code of `antiphon recordings verify`: 0 intact, 1 damaged, 2 unreadable."""
        return _EXIT_CODES[self.state]


def verify(log: Path | bytes) -> Report:
    """Read and judge a whole log, a path or its bytes; only `OSError` is raised."""
    try:
        reader = LogReader(log)
    except layout.Unreadable as error:
        return Report(state="unreadable", detail=str(error))
    report, counts, fin = Report(state="open"), Counter[str](), None
    with reader:
        before_item = before_fin = reader.last_chain, reader.blocks
        for item in reader:
            before_fin = before_item if fin is None else before_fin
            if isinstance(item, Damage):
                report.damage_count += 1
                report.damage += (item,) if len(report.damage) < DAMAGE_KEPT else ()
            else:
                counts[item.kind] += 1
                fin = item.fields if item.kind == "fin" else fin
                report.last_seq = item.seq
                report.first_seq = item.seq if report.first_seq is None else report.first_seq
                ordinal = item.fields.get("ordinal")
                if item.kind == "tx" and isinstance(ordinal, int):
                    report.last_tx_ordinal = ordinal
            before_item = reader.last_chain, reader.blocks
        if fin is not None:
            counted = {kind: count for kind, count in counts.items() if kind != "fin"}
            chain, blocks = before_fin
            expected = (counted, None if chain is None else chain.hex(), blocks)
            report.fin_ok = (fin.get("counts"), fin.get("chain"), fin.get("blocks")) == expected
            report.state = "finished"
        if report.damage_count or report.fin_ok is False:
            report.state = "damaged"
        report.blocks, report.records, report.units = reader.blocks, counts.total(), counts["unit"]
        report.head_source, report.tail_bytes = reader.head_source, reader.tail_bytes
        report.has_seek_table = reader.has_seek_table
    return report


Watch = Callable[[int], None]
"""Takes the number of bytes of the log processed since the last call; recovery reads it twice."""

# -- rewriting -------------------------------------------------------------------------------------


_ROOM: Final = bytes(layout.HEADER_BYTES)
_LENGTH_AT: Final = {3: 1, PART_VALUES: 3}
"""Where an entry of a blob table says the length, by its number of values."""
LENGTHS_MAX: Final = 1 << 16
"""Number of blob lengths remembered to cost references, which come soon."""


class StoredCosts:
    """Costs of reading the stored records of a log in sequence."""

    def __init__(self) -> None:
        self._lengths: dict[tuple[int, ...], int] = {}

    def of(self, stored: StoredRecord, header: bytes) -> int:
        """Return the cost of the next record without its bytes; `header` is its new JSON."""
        if len(self._lengths) > LENGTHS_MAX:
            self._lengths.clear()
        cost = layout.header_cost(header)
        for index, entry in enumerate(stored.table):
            at = _LENGTH_AT.get(len(entry))
            length = self._lengths.get(entry, 0) if at is None else entry[at]
            self._lengths[stored.record.seq, index] = length
            cost += length
        return cost


class Rewriter:
    """A log being rewritten; use it as a context manager.

    `next_seq`: `seq` that the next record must have. `at_ns`: of the last record. `version`: format
    version of blocks not copied; at least that of copied blocks.

    `OSError`: the file exists, or the disk refused; also from each writing method.
    """

    def __init__(self, path: Path, compressor: Compressor, block_bytes: int, version: int) -> None:
        self.version = version
        self.next_seq = 0
        self.at_ns = 0
        self._compressor: Final = compressor
        self._block_bytes: Final = block_bytes
        self._disk: Final = Disk()
        self._chain: Final = Chain()
        self._batch: Batch | None = None
        self._descriptor: Final = self._disk.create(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._disk.close(self._descriptor)

    @property
    def wants_head_copy(self) -> bool:
        """Whether the next block is the second, which must repeat the session record."""
        return self._chain.blocks + (self._batch is not None) == 1

    def put(self, record: layout.Record, framed: Framed | None = None) -> None:
        """Write a record, with others in a block; `RecordInvalid` if it cannot be stored.

        `framed`: its bytes, if it is encoded already.
        """
        assert record.seq == self.next_seq, "records come in order"
        framed = RecordEncoder().encode(record) if framed is None else framed
        self.make_room(framed.framed_bytes)
        self._batch = batch = self._batch or Batch()
        batch.records.append(record)
        batch.framed.append(framed)
        batch.payload_bytes += framed.framed_bytes
        self.next_seq, self.at_ns = record.seq + 1, record.at_ns
        if record.kind == "session":
            self._flush()

    def make_room(self, size_bytes: int) -> None:
        """Begin a block for records that name each other's blobs, if this one has no room."""
        batch = self._batch
        if batch is not None and batch.payload_bytes + size_bytes > self._block_bytes:
            self._flush()

    def copy(
        self, header: layout.BlockHeader, compressed: bytes, kinds: Sequence[str], last_ns: int
    ) -> None:
        """Copy a block of records of `kinds`; it has a head copy exactly if `wants_head_copy`.

        `last_ns` is `at_ns` of its last record.
        """
        self._flush()
        self.version = max(self.version, header.version)
        assert header.first_seq == self.next_seq, "records come in order"
        assert header.has_head_copy is (self._chain.blocks == 1), "the head has its place"
        block = bytearray(_ROOM) + compressed
        frame = Frame(block, header.uncompressed_len, header.is_stuffed)
        self._write_bytes(self._chain.link(header, frame))
        self._chain.counts.update(kinds)
        self.next_seq, self.at_ns = header.next_seq, last_ns

    def finish(self, fields: layout.Fields, at_ns: int) -> None:
        """Write `fin`, with the recorder's fields, and the seek table; sync all to the device."""
        self._flush()
        fields = {**fields, **self._chain.fin_fields()}
        self.put(layout.Record(kind="fin", seq=self.next_seq, at_ns=at_ns, fields=fields))
        self._flush()
        self._write_bytes(self._chain.table())
        self._disk.sync(self._descriptor)

    def _flush(self) -> None:
        batch, self._batch = self._batch, None
        if batch is None:
            return
        pieces, has_samples, cost = self._chain.begin(batch)
        frame = self._compressor.compress(pieces, has_samples=has_samples, cost=cost)
        self._write_bytes(self._chain.block(batch, frame, self.version))

    def _write_bytes(self, data: bytes | bytearray) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._disk.write(self._descriptor, rest) :]


# -- recovery --------------------------------------------------------------------------------------


RECOVERED: Final = "recovered"
"""The reason in `fin` of a log with missing records, and the field with the details."""
LOST: Final[layout.Fields] = {"by": "recover", "what": "lost"}
"""The fields of a mark that replaces a lost record."""
LOST_MAX: Final = 1 << 20
"""Limit on marks, as is one per byte of the file: a header can claim any number."""

Parts: TypeAlias = tuple[bytes, memoryview]
"""A record's JSON header and its blobs."""


class NotRecoverable(layout.RecorderError):
    """The log cannot be recovered, or needs no recovery now."""


@attrs.define(kw_only=True)
class Survey:
    """The intact records of a log, noted while it is read.

    Attributes:
        salvage: records after lost ones are kept too.
        kept: `seq` ranges of the records to keep, in order, start and stop; without `fin`.
        tail_bytes: of an incomplete block at its end.
        units: last kept unit's index plus one; 0 without units.
        fin: the caller's fields of `fin`; None if it is lost or left out.
        fin_ns: `at_ns` of `fin`.
        is_sound: no damage, nothing missing.
    """

    salvage: bool
    kept: list[tuple[int, int]] = attrs.field(factory=list)
    records: int = 0
    damage_count: int = 0
    tail_bytes: int = 0
    units: int = 0
    fin: layout.Fields | None = None
    fin_ns: int | None = None
    is_sound: bool = False
    _reach: int = attrs.field(default=0, init=False)
    _breaks_chain: bool = attrs.field(default=False, init=False)
    _is_over: bool = attrs.field(default=False, init=False)

    @property
    def records_lost(self) -> int:
        """Records known to be lost, or after the end that is kept."""
        return self._reach - self.records

    def note(self, item: layout.Record | Damage) -> None:
        """Take the next record, or damage."""
        if isinstance(item, Damage):
            self._note_damage(item)
            return
        next_seq = self.kept[-1][1] if self.kept else 0
        if item.seq == next_seq:  # the head comes from either block that still has it
            self._is_over |= self._breaks_chain and item.seq > 0
        else:
            self._is_over |= not self.salvage
        self._breaks_chain = False
        is_fin = item.kind == "fin"
        self._reach = max(self._reach, item.seq + (not is_fin))
        if is_fin and not self._is_over:
            self.fin, self.fin_ns = _own_fields(item), item.at_ns
        elif not self._is_over:
            start = self.kept.pop()[0] if self.kept and item.seq == next_seq else item.seq
            self.kept.append((start, item.seq + 1))
            self.records += 1
            unit = unit_index(item)
            self.units = self.units if unit is None else unit + 1

    def _note_damage(self, damage: Damage) -> None:
        if damage.reason == "version":
            raise NotRecoverable(f"a newer version wrote it: {damage.detail}")
        self.damage_count += 1
        self._breaks_chain |= damage.reason == "chain"
        if damage.first_seq is not None:
            self._reach = max(self._reach, damage.first_seq + damage.records)


def _own_fields(fin: layout.Record) -> dict[str, layout.Value]:
    """The fields of `fin` that are not the recorder's."""
    return {name: value for name, value in fin.fields.items() if name not in FIN_FIELDS}


def is_lost(record: layout.Record) -> bool:
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
        raise NotRecoverable("a server is writing it")
    found = Survey(salvage=salvage)
    with LogReader(path) as reader:
        for item in reader.watched(watch):
            found.note(item)
        found.tail_bytes = reader.tail_bytes
    is_whole = not found.damage_count and not found.tail_bytes and found.fin is not None
    found.is_sound = is_whole and verify(path).state == "finished"
    return found


def recover(
    source: Path, target: Path, found: Survey, *, watch: Watch = lambda _: None
) -> layout.Value:
    """Write the intact records that `survey` found as a new file `target`, and verify it.

    Returns the reason in its `fin`.

    Raises:
        NotRecoverable: too many consecutive records are lost to be marked.
        LogUnsound: the new log is invalid: the source changed meanwhile.
        OSError: the disk refused, or `target` exists.
    """
    with (
        closing(FileSource(source)) as file,
        Rewriter(target, Compressor(), layout.BLOCK_BYTES, layout.FORMAT_VERSION) as writer,
    ):
        fin = _fin_fields(found, file.size())
        copier = _Copier(source=file, found=found, writer=writer)
        end = 0
        for item in Scanner(file):
            if isinstance(item, Block):
                copier.take(item)
                watch(item.end - end)
                end = item.end
        watch(file.size() - end)
        writer.finish(fin, writer.at_ns if found.fin_ns is None else found.fin_ns)
    report = verify(target)
    if report.state != "finished" or report.records != found.records + copier.marks + 1:
        raise layout.LogUnsound(f"{source.name} changed while it was recovered")
    return fin["reason"]


def _fin_fields(found: Survey, file_bytes: int) -> layout.Fields:
    recovered: dict[str, layout.Value] = {
        "file_bytes": file_bytes,
        "tail_bytes": found.tail_bytes,
        "damage": found.damage_count,
        "records_lost": found.records_lost,
    }
    if found.fin is None:
        return {"reason": RECOVERED, "units": found.units, RECOVERED: recovered}
    if found.records_lost:
        recovered["reason"] = found.fin.get("reason")
        return {**found.fin, "reason": RECOVERED, RECOVERED: recovered}
    return {**found.fin, RECOVERED: recovered}


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
        framed = block.parts()
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
        start, size = block.offset + layout.HEADER_BYTES, block.header.compressed_len
        kinds = [record.kind for record in records]
        self.writer.copy(block.header, self.source.read(start, size), kinds, records[-1].at_ns)

    def _put(self, parts: Parts) -> None:
        header, area = parts
        if self._head is None:
            self._head = header + bytes(area)
        stored = parse(header, area)
        start = layout.frame_record(header, len(area))
        has_samples = any(len(entry) == 3 and entry[0] != RAW for entry in stored.table)
        size, cost = len(start) + len(area), self._costs.of(stored, header)
        self.writer.put(stored.record, Framed([start, area], size, cost, has_samples))

    def _fill(self, next_seq: int) -> None:
        lost = next_seq - self.writer.next_seq
        if lost > min(LOST_MAX, self.source.size()):
            raise NotRecoverable(f"{lost} consecutive records are lost: the log cannot be salvaged")
        for seq in range(self.writer.next_seq, next_seq):
            at_ns = self.writer.at_ns
            self.writer.put(layout.Record(kind="mark", seq=seq, at_ns=at_ns, fields=LOST))
            self.marks += 1


# -- compaction ------------------------------------------------------------------------------------


KEPT_BLOCK_BYTES: Final = layout.MIB
"""Block size. Four times as much saves 0.3 %, but one bad bit would cost half a minute."""
COMPACTED: Final = "compacted"
"""The field of `fin` that describes the log before compaction."""


class NotCompactable(layout.RecorderError):
    """The log cannot be compacted now."""


@attrs.frozen(kw_only=True)
class Compacted:
    """The result of compacting a log; `flac_blobs` is the number of blobs repacked as FLAC."""

    before_bytes: int
    after_bytes: int
    flac_blobs: int


def is_compact(path: Path) -> bool:
    """Whether the log is already compacted; `FormatError` if it is not a log, or `OSError`."""
    with path.open("rb") as file:
        head = file.read(layout.HEADER_BYTES)
    if not head.startswith(layout.MARK):
        raise layout.FormatError("this is not a recording")
    return layout.unpack_header(head).version >= layout.COMPACT_VERSION


def compact(source: Path, target: Path, *, watch: Watch = lambda _: None) -> Compacted:
    """Rewrite `source` as the new file `target` in fewer bytes, and compare the two.

    Raises:
        NotCompactable: the log is being written, has no end, or is damaged.
        LogUnsound: the new log differs: the source changed meanwhile.
        OSError: a file cannot be read or written, or `target` exists.
    """
    _check(source)
    packer, compressor = _Packer(), Compressor(is_live=False)
    with (
        closing(FileSource(source)) as file,
        Rewriter(target, compressor, KEPT_BLOCK_BYTES, layout.COMPACT_VERSION) as writer,
    ):
        before_bytes, end, expansion = file.size(), 0, layout.Expansion(file.size)
        for block in Scanner(file, expansion):
            if not isinstance(block, Block):
                raise layout.LogUnsound("the log changed while it was compacted")
            found = [parse(*parts) for parts in block.own_parts()]
            packed = [(it.record, packer.repack(it)) for it in found if it.record.kind != "fin"]
            writer.make_room(sum(framed.framed_bytes for _, framed in packed))
            for record, framed in packed:
                writer.put(record, framed)
            if found[-1].record.kind == "fin":
                fin = decode(found[-1], no_record, expansion)
                before = {name: fin.fields[name] for name in sorted(FIN_FIELDS - {"counts"})}
                about = {COMPACTED: {"file_bytes": before_bytes, **before}}
                writer.finish({**_own_fields(fin), **about}, fin.at_ns)
            watch(block.end - end)
            end = block.end
        watch(before_bytes - end)
    _compare(source, target)
    after_bytes = target.stat().st_size
    return Compacted(
        before_bytes=before_bytes, after_bytes=after_bytes, flac_blobs=packer.flac_blobs
    )


def _check(source: Path) -> None:
    if is_held(source):
        raise NotCompactable("a server is writing it")
    report = verify(source)
    if report.state == "open":
        raise NotCompactable("it has no end; `antiphon recordings recover` writes one")
    if report.state == "damaged":
        raise NotCompactable("it is damaged; `antiphon recordings recover` keeps what can be read")
    if report.state == "unreadable":
        raise NotCompactable(str(report.detail))


class _Packer:
    """Repacks the blobs of records, and counts those that became FLAC."""

    def __init__(self) -> None:
        self.flac_blobs = 0
        self._costs: Final = StoredCosts()
        self._estimate: Final = zstandard.ZstdCompressor(level=LEVEL)

    def repack(self, stored: StoredRecord) -> Framed:
        table, blobs = list[list[int]](), list[tuple[int, layout.Piece]]()
        for entry, start in zip(stored.table, stored.starts, strict=True):
            if len(entry) != 3:
                table.append(list(entry))
                continue
            codec, length, stored_len = entry
            codec, blob = self._pack(codec, stored.area[start : start + stored_len])
            table.append([codec, length, len(blob)])
            blobs.append((codec, blob))
        area_bytes = sum(len(blob) for _, blob in blobs)
        fields = to_json(stored.record, stored.record.fields)  # still packed
        record, entries = stored.record, orjson.dumps(table)
        kind = record.kind.encode()
        header = HEADER % (record.at_ns, entries, fields, kind, record.seq, stored.version)
        head = layout.frame_record(header, area_bytes)
        pieces = [head, *(piece for codec, blob in blobs for piece in _pieces(codec, blob))]
        has_samples = any(codec != RAW for codec, _ in blobs)
        return Framed(pieces, len(head) + area_bytes, self._costs.of(stored, header), has_samples)

    def _pack(self, codec: int, stored: memoryview) -> tuple[int, layout.Piece]:
        if codec != EXACT_16:
            return codec, stored
        packed = pack_flac(stored)
        if packed is None or len(packed.stored) >= len(self._estimate.compress(stored)):
            return codec, stored
        self.flac_blobs += 1
        return packed.codec, packed.stored


def _pieces(codec: int, blob: layout.Piece) -> Iterator[layout.Piece]:
    """Split a blob where its bytes start to compress differently."""
    cut = cut_of(codec, len(blob))
    if cut:
        yield blob[:cut]
    yield blob[cut:]


def _compare(source: Path, target: Path) -> None:
    """Check that both logs hold the same, except for `fin`'s file fields; else `LogUnsound`."""
    if verify(target).state != "finished":
        raise layout.LogUnsound("the compacted log is damaged")
    with LogReader(source) as before, LogReader(target) as after:
        for old, new in zip_longest(before, after):
            if _comparable(old) != _comparable(new):
                raise layout.LogUnsound("the compacted log differs from the original")


def _comparable(item: layout.Record | Damage | None) -> object:
    if not isinstance(item, layout.Record) or item.kind != "fin":
        return item
    of_file = FIN_FIELDS | {COMPACTED}
    fields = {name: value for name, value in item.fields.items() if name not in of_file}
    return attrs.evolve(item, fields=fields)
