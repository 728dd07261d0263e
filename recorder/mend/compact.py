"""Compaction: a finished log rewritten in fewer bytes, with the same records.

    log -> its records as they are stored -> FLAC, larger blocks, zstd 19 -> read back and compared

Rules: only a finished and sound log is compacted. Records keep their content, versions and numbers;
the packing of blobs and the records per block change, and `fin` gets the field `compacted` on the
old log. 16-bit samples become FLAC where the bytes come back equal and fewer. All records are
compared; the caller puts the new log in place. One damaged bit costs up to 1 MiB, some seconds,
against 256 KiB before. Memory holds one block of each log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Final

import attrs
import zstandard

from ..format.blobs import EXACT_16, RAW, cut_of, pack_flac
from ..format.chain import FIN_FIELDS
from ..format.compression import LEVEL, Compressor
from ..format.encoding import Framed, to_json
from ..format.errors import LogUnsound, RecorderError
from ..format.expansion import Expansion
from ..format.format import (
    COMPACT_VERSION,
    HEADER_BYTES,
    MIB,
    Piece,
    frame_record,
    split_records,
    unpack_header,
)
from ..format.records import Fields, Record
from ..read.decoding import StoredRecord, decode, parse
from ..read.reader import LogReader, no_record
from ..read.scan import Block, Damage, FileSource, Scanner
from ..read.verify import verify
from ..write.lock import is_held
from .rewrite import Rewriter, StoredCosts

KEPT_BLOCK_BYTES: Final = MIB
"""Block size. Four times as much saves 0.3 %, but one bad bit would cost half a minute."""
COMPACTED: Final = "compacted"
"""The field of `fin` that describes the log before compaction."""

Watch = Callable[[int], None]
"""Takes the number of bytes of the log processed since the last call."""


class NotCompactable(RecorderError):  # noqa: N818
    """The log cannot be compacted now."""


@attrs.frozen(kw_only=True)
class Compacted:
    """The result of compacting a log; `flac_blobs` is the number of blobs repacked as FLAC."""

    before_bytes: int
    after_bytes: int
    blocks: int
    records: int
    flac_blobs: int


def is_compact(path: Path) -> bool:
    """Whether the log is already compacted; `FormatError` if it is no log, or `OSError`."""
    with path.open("rb") as file:
        return unpack_header(file.read(HEADER_BYTES)).version >= COMPACT_VERSION


def compact(source: Path, target: Path, *, watch: Watch = lambda _: None) -> Compacted:
    """Rewrite `source` as the new file `target` in fewer bytes, and compare the two.

    Raises:
        NotCompactable: the log is being written, has no end, or is damaged.
        LogUnsound: the new log differs: the source changed meanwhile.
        OSError: a file cannot be read or written, or `target` exists.
    """
    _check(source)
    file = FileSource(source)
    try:
        before_bytes = file.size()
        compressor = Compressor(is_live=False)
        with Rewriter(
            target, compressor=compressor, block_bytes=KEPT_BLOCK_BYTES, version=COMPACT_VERSION
        ) as writer:
            packer = _Packer()
            end = 0
            expansion = Expansion(file.size)
            for block in _blocks(file, expansion):
                found = _records(block)
                packed = [(it.record, packer.repack(it)) for it in found if it.record.kind != "fin"]
                writer.make_room(sum(framed.framed_bytes for _, framed in packed))
                for record, framed in packed:
                    writer.put(record, framed)
                if found[-1].record.kind == "fin":
                    fin = _fin_fields(found[-1], before_bytes, expansion)
                    writer.finish(fin, found[-1].record.at_ns)
                watch(block.end - end)
                end = block.end
            watch(before_bytes - end)
            blocks, records = writer.blocks, writer.next_seq
    finally:
        file.close()
    _compare(source, target)
    return Compacted(
        before_bytes=before_bytes,
        after_bytes=target.stat().st_size,
        blocks=blocks,
        records=records,
        flac_blobs=packer.flac_blobs,
    )


def _check(source: Path) -> None:
    if is_held(source):
        raise NotCompactable("it is being written: its server is at work")
    report = verify(source)
    if report.state == "open":
        raise NotCompactable("it has no end: `antiphon recordings recover` gives it one")
    if report.state == "damaged":
        raise NotCompactable("it is damaged: `antiphon recordings recover` keeps what is good")
    if report.state == "unreadable":
        raise NotCompactable(str(report.detail))


def _blocks(file: FileSource, expansion: Expansion) -> Iterator[Block]:
    for item in Scanner(file, expansion):
        if not isinstance(item, Block):
            raise LogUnsound("the log changed while it was compacted")
        yield item


def _records(block: Block) -> list[StoredRecord]:
    framed = list(split_records(block.payload, block.header.n_records))
    return [parse(*parts) for parts in framed[block.header.has_head_copy :]]


def _fin_fields(stored: StoredRecord, file_bytes: int, expansion: Expansion) -> Fields:
    said = decode(stored, no_record, expansion).fields
    before = {name: said[name] for name in sorted(FIN_FIELDS - {"counts"})}
    kept = {name: value for name, value in said.items() if name not in FIN_FIELDS}
    return {**kept, COMPACTED: {"file_bytes": file_bytes, **before}}


class _Packer:
    """Repacks the blobs of records, and counts those that became FLAC."""

    def __init__(self) -> None:
        self.flac_blobs = 0
        self._costs: Final = StoredCosts()
        self._estimate: Final = zstandard.ZstdCompressor(level=LEVEL)

    def repack(self, stored: StoredRecord) -> Framed:
        table, blobs = list[list[int]](), list[tuple[int, Piece]]()
        for entry, start in zip(stored.table, stored.starts, strict=True):
            if len(entry) != 3:
                table.append(list(entry))
                continue
            codec, length, stored_len = entry
            codec, blob = self._pack(codec, stored.area[start : start + stored_len])
            table.append([codec, length, len(blob)])
            blobs.append((codec, blob))
        record = stored.record
        header = {
            "at_ns": record.at_ns,
            "blobs": table,
            "fields": record.fields,  # still encoded
            "kind": record.kind,
            "seq": record.seq,
            "version": stored.version,
        }
        area_bytes = sum(len(blob) for _, blob in blobs)
        json_header = to_json(header)
        head = frame_record(json_header, area_bytes)
        return Framed(
            pieces=[head, *(piece for codec, blob in blobs for piece in _pieces(codec, blob))],
            framed_bytes=len(head) + area_bytes,
            cost=self._costs.of(stored, json_header),
            has_samples=any(codec != RAW for codec, _ in blobs),
        )

    def _pack(self, codec: int, stored: memoryview) -> tuple[int, Piece]:
        if codec != EXACT_16:
            return codec, stored
        packed = pack_flac(stored)
        if packed is None or len(packed.stored) >= len(self._estimate.compress(stored)):
            return codec, stored
        self.flac_blobs += 1
        return packed.codec, packed.stored


def _pieces(codec: int, blob: Piece) -> Iterator[Piece]:
    """Split a blob where its bytes start to compress differently."""
    cut = cut_of(codec, len(blob))
    if cut:
        yield blob[:cut]
    yield blob[cut:]


def _compare(source: Path, target: Path) -> None:
    """Check that both logs hold the same, except for `fin`'s file fields; else `LogUnsound`."""
    if verify(target).state != "finished":
        raise LogUnsound("the compacted log came out unsound")
    with LogReader(source) as before, LogReader(target) as after:
        for old, new in zip_longest(before, after):
            if _said(old) != _said(new):
                raise LogUnsound("the compacted log came out different")


def _said(item: Record | Damage | None) -> object:
    if not isinstance(item, Record) or item.kind != "fin":
        return item
    of_file = FIN_FIELDS | {COMPACTED}
    fields = {name: value for name, value in item.fields.items() if name not in of_file}
    return attrs.evolve(item, fields=fields)
