"""zstd frames for the payloads of blocks: any zstd tool decompresses them.

Rules: a payload comes in pieces. Where one of them is packed PCM, each large piece is compressed in
zstd blocks of its own: sign and exponent of samples shrink to a third, their noise and a JPEG not
at all, and what is mixed shares one code. A frame never holds the mark that starts a block. Before
it there is room for the block's header, so that nothing is copied to be written with it.

It knows neither records nor files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import attrs
import zstandard

from .errors import RecordInvalid
from .format import HEADER_BYTES, MARK, Piece, stuff

_ROOM: Final = bytes(HEADER_BYTES)
LEVEL: Final = 3
"""zstd's level while live, for text."""
LEVELS_INSTEAD: Final = (1, 2, 4, 5, 6)
"""Tried in turn where even a stuffed payload's frame at `LEVEL` holds the mark: one in 2**96."""
LEVEL_KEPT: Final = 19
"""For logs that are compacted: thirty times as slow, and worth a few hundredths of a log."""
APART_BYTES_MIN: Final = 4 << 10
"""A shorter piece shares a zstd block with its neighbours: what it would save, a block costs."""
_SAMPLES: Final = zstandard.ZstdCompressionParameters.from_level(
    1, strategy=zstandard.STRATEGY_FAST, hash_log=10, min_match=7, write_content_size=True
)
"""Where there are samples. They hardly repeat, what is won is their entropy: half the time of level
3, and apart in blocks a smaller frame. Of four times as small a table tones come out larger."""


@attrs.frozen
class Frame:
    """A payload, compressed.

    Attributes:
        block: `HEADER_BYTES` to be filled in, and the zstd frame.
        payload_bytes: what it decompresses to.
        is_stuffed: that is stuffed, see `recorder.format`.
    """

    block: bytearray
    payload_bytes: int
    is_stuffed: bool

    @property
    def data(self) -> memoryview:
        """The zstd frame alone."""
        return memoryview(self.block)[HEADER_BYTES:]


class Compressor:
    """Makes zstd frames for any number of logs; one thread only.

    Args:
        is_live: quickly; else as small as can be.
    """

    def __init__(self, *, is_live: bool = True) -> None:
        self._text: Final = _zstd(LEVEL if is_live else LEVEL_KEPT)
        samples = zstandard.ZstdCompressor(compression_params=_SAMPLES)
        # Level 19 sees repeats in noise that are none, and then its frame is the larger one.
        self._samples: Final = (samples,) if is_live else (samples, self._text)

    def compress(self, pieces: Iterable[Piece], *, has_samples: bool) -> Frame:
        """Compress a payload.

        Args:
            pieces: of the payload, split where the kind of bytes changes.
            has_samples: some of them are packed PCM.

        Raises:
            RecordInvalid: no level of zstd gives a frame without the mark.
        """
        runs = list(_join_short(pieces)) if has_samples else [b"".join(pieces)]
        size = sum(map(len, runs))
        if has_samples:
            block = min((_compress_apart(it, runs, size) for it in self._samples), key=len)
        else:
            block = _with_room([self._text.compress(runs[0])])
        if not _has_mark(block):
            return Frame(block, size, is_stuffed=False)
        stuffed = stuff(b"".join(runs))
        for level in (LEVEL, *LEVELS_INSTEAD):
            block = _with_room([_zstd(level).compress(stuffed)])
            if not _has_mark(block):
                return Frame(block, len(stuffed), is_stuffed=True)
        raise RecordInvalid("no level of zstd gives a frame without the block mark")


def _compress_apart(
    compressor: zstandard.ZstdCompressor, runs: Iterable[Piece], size: int
) -> bytearray:
    """Compress a payload with a zstd block for each run."""
    stream = compressor.compressobj(size=size)
    chunks = []
    for run in runs:
        chunks.append(stream.compress(run))
        chunks.append(stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    chunks.append(stream.flush(zstandard.COMPRESSOBJ_FLUSH_FINISH))
    return _with_room(chunks)


def _with_room(chunks: list[bytes]) -> bytearray:
    return bytearray().join([_ROOM, *chunks])


def _has_mark(block: bytearray) -> bool:
    return block.rfind(MARK, HEADER_BYTES) >= 0  # half the cost of `in`


def _zstd(level: int) -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(level=level, write_checksum=False, write_content_size=True)


def _join_short(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the long pieces, and between them the short ones joined."""
    short: list[Piece] = []
    for piece in pieces:
        if len(piece) < APART_BYTES_MIN:
            short.append(piece)
            continue
        if short:
            yield b"".join(short)
            short.clear()
        yield piece
    if short:
        yield b"".join(short)
