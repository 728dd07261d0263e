"""Session logs of a forger who computes correct checksums and chains: how they are put together.

`forged_bombs` says what is put into them, `forged_drawn` draws them at random, and `forged_meter`
measures what it costs to read them. It reads nothing, but for the blocks of a log to which a seek
table is to fit.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from functools import cache
from typing import Any, Final

import attrs
import zstandard

from recorder.format.format import (
    CHAIN_START,
    BlockHeader,
    BlockSizes,
    chain_of,
    frame_record,
    pack_header,
)
from recorder.read.scan import Block, BytesSource, Scanner

Json = Any


@attrs.frozen(kw_only=True)
class Part:
    """A block to be sealed, or bytes between blocks.

    Attributes:
        payload: of a block; None for bytes that stand there as they are.
        raw: those bytes, or the zstd frame where it is not to be that of the payload.
        changes: of its header, beside what follows from the payload.
    """

    payload: bytes | None = None
    raw: bytes | None = None
    n_records: int = 1
    first_seq: int = 0
    changes: dict[str, Any] = attrs.field(factory=dict)


def record(
    kind: str, seq: int, fields: Json, *, blobs: Json = (), area: bytes = b"", version: int = 1
) -> bytes:
    """Frame a record; every field may be a lie."""
    header = {
        "at_ns": 1000 * seq if isinstance(seq, int) else 0,
        "blobs": list(blobs),
        "fields": fields,
        "kind": kind,
        "seq": seq,
        "version": version,
    }
    return framed(json.dumps(header, sort_keys=True).encode(), area)


def framed(header: bytes, area: bytes = b"") -> bytes:
    """Frame any header."""
    return frame_record(header, len(area)) + area


HEAD: Final = record("session", 0, {"config": {}, "wall_ms": 1})


def head(text: bytes = HEAD) -> Part:
    """The first block."""
    return Part(payload=text)


def second(payload: bytes = b"", n_records: int = 0) -> Part:
    """The second block, with a copy of the head."""
    mark = b"" if payload else record("mark", 1, {"text": "x"})
    return Part(
        payload=HEAD + mark + payload,
        n_records=1 + bool(mark) + n_records,
        first_seq=1,
        changes={"has_head_copy": True},
    )


@cache
def _compressor(level: int) -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(level=level, write_content_size=True)


@cache
def squeezed(payload: bytes) -> bytes:
    """Compress as far as zstd can, which is a thousandth of the size for what repeats."""
    return _compressor(3).compress(payload)


def seal(parts: Iterable[Part]) -> bytes:
    """Write parts as a log, each block with sound checksums and a sound chain."""
    log, chain = bytearray(), CHAIN_START
    for part in parts:
        if part.payload is None:
            log += part.raw or b""
            continue
        frame = squeezed(part.payload) if part.raw is None else part.raw
        header = BlockHeader(
            **{
                "first_seq": part.first_seq,
                "mono_ns": 1000 * part.first_seq % (1 << 63),
                "n_records": part.n_records,
                "compressed_len": len(frame),
                "uncompressed_len": len(part.payload),
                "payload_crc": zlib.crc32(frame),
                **part.changes,
            }
        )
        chain = chain_of(chain, header, frame)
        log += pack_header(attrs.evolve(header, chain=chain)) + frame
    return bytes(log)


def table_for(log: bytes) -> bytes:
    """Give the seek table that fits a log."""
    sizes = BlockSizes()
    for item in Scanner(BytesSource(log)):
        if isinstance(item, Block):
            sizes.add(item.header.compressed_len, item.header.uncompressed_len)
    return sizes.table()
