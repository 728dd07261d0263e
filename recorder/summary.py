"""What a listing says of a log, from its head and its tail alone: all logs cost the same.

Rules: a log with `fin` at its end is `finished`, however much is damaged before that, which is for
`verify` to say. One without is `crashed`, or `open` while its writer holds it; one without a
session record is `unreadable`. The duration of a log without `fin` is that of its last record, and
its units are counted by the last one that is found in its tail.

What stands in a log is not believed to be of the right type. It writes and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final, Literal

import attrs

from .errors import FormatError, RecorderError
from .format import BLOCK_BYTES, HEADER_BYTES, MARK, MIB, unpack_header
from .lock import is_held
from .places import end_of_blocks, records_of, unit_index
from .reader import LogReader
from .records import Fields, Record, Value
from .scan import Block, FileSource, Source, load_block
from .store import LogInfo

State = Literal["open", "finished", "crashed", "unreadable"]
"""`open`: it is being written; `crashed`: its writer died, or its disk failed, before its end."""

FIN_BYTES: Final = 8 << 10
"""`fin` and its header take some hundred bytes."""
TAIL_BYTES: Final = 2 * BLOCK_BYTES
"""A block is mostly smaller than `BLOCK_BYTES`, so the last one that is whole is in here."""
TEXT_CHARS_MAX: Final = 256
"""Names of modes, dialects, keys and reasons are shorter, and mostly a model's folder is."""
WALL_MS_MAX: Final = 253_402_300_799_999
"""The end of the year 9999: no calendar goes on from there."""
_NS_PER_MS: Final = 1_000_000


@attrs.frozen(kw_only=True)
class Summary:
    """A log, as it is listed. What its file does not say is None.

    Attributes:
        recording_id: its name.
        state: in one word.
        began_ms: Unix milliseconds of the session's start.
        duration_ms: from there to its last record.
        mode: what was asked for.
        dialect: the wire protocol; a log without `fin` does not say.
        owner: the name of the key that it came with; empty where there was none.
        model: as the server was told to load it.
        reason: why the session ended.
        units: seconds of input that were begun.
        turns: of chat.
        chunks: seconds that a transcription heard; a log without `fin` does not say.
        file_bytes: its size.
        modified_ms: Unix milliseconds when it last grew.
    """

    recording_id: str
    state: State
    began_ms: int | None = None
    duration_ms: int | None = None
    mode: str | None = None
    dialect: str | None = None
    owner: str = ""
    model: str | None = None
    reason: str | None = None
    units: int | None = None
    turns: int | None = None
    chunks: int | None = None
    file_bytes: int
    modified_ms: int

    @property
    def listed_ms(self) -> int:
        """What a listing sorts by: when the session began, or else when the file last grew."""
        return self.modified_ms if self.began_ms is None else self.began_ms


def summarize(info: LogInfo) -> Summary:
    """Read what a listing says of a log, which is never `open`; no content makes it raise.

    Raises:
        OSError: the file is gone, or cannot be read.
    """
    known = Summary(
        recording_id=info.recording_id,
        state="unreadable",
        file_bytes=info.file_bytes,
        modified_ms=info.modified_ns // _NS_PER_MS,
    )
    try:
        with LogReader(info.path) as reader:
            known = _with_head(known, reader.head.fields)
    except RecorderError:
        return known
    source = FileSource(info.path)
    try:
        fin = _fin(source)
        if fin is not None:
            return _with_fin(known, fin)
        tail = _tail(source)
        if tail and tail[-1].kind == "fin":  # before a seek table that is not whole
            return _with_fin(known, tail[-1])
        return _with_tail(known, tail)
    finally:
        source.close()


def as_of_now(summary: Summary, info: LogInfo) -> Summary:
    """Say `open` of a log that has no end yet; all else stands in its file.

    Args:
        summary: of the log, as `summarize` gave it.
        info: the log.
    """
    if summary.state == "finished":
        return summary
    try:
        return attrs.evolve(summary, state="open") if is_held(info.path) else summary
    except OSError:  # gone meanwhile, or not ours to read: as it was
        return summary


def whole_bytes(source: Source) -> int:
    """Say where the last block that is whole ends: what may be handed out of a log that grows.

    Args:
        source: the log.
    """
    size = source.size()
    end = size
    while end > 0:
        start = max(0, end - MIB)
        data = source.read(start, min(size, end + HEADER_BYTES) - start)
        found = data.rfind(MARK, 0, end - start + len(MARK) - 1)
        while found >= 0:
            offset = start + found
            try:
                header = unpack_header(data[found : found + HEADER_BYTES])
            except FormatError:
                found = data.rfind(MARK, 0, found)  # cut off amid its header
                continue
            after = offset + HEADER_BYTES + header.compressed_len
            return after if after <= size else offset
        end = start
    return 0


# -- the head -----------------------------------------------------------------------------------


def _with_head(known: Summary, fields: Fields) -> Summary:
    config = fields.get("config")
    said: Fields = config if isinstance(config, dict) else {}
    began_ms = _count(fields.get("wall_ms"))
    return attrs.evolve(
        known,
        began_ms=began_ms if began_ms is not None and began_ms <= WALL_MS_MAX else None,
        mode=_text(said.get("mode")),
        owner=_text(said.get("owner")) or "",
        model=_text(said.get("model")),
    )


def _text(value: Value) -> str | None:
    """Take a short text that any terminal may be shown."""
    if isinstance(value, str) and len(value) <= TEXT_CHARS_MAX and value.isprintable():
        return value
    return None


def _count(value: Value) -> int | None:
    """Take a count of up to 63 bits, which is what an index can hold."""
    return value if type(value) is int and 0 <= value < 1 << 63 else None


# -- the tail -----------------------------------------------------------------------------------


def _fin(source: Source) -> Record | None:
    """Find `fin`: it has the last block to itself."""
    for block in _last_blocks(source, FIN_BYTES):
        for record in records_of(block):
            return record if record.kind == "fin" else None
    return None


def _tail(source: Source) -> list[Record]:
    """Read the records in the tail of a log, in order; without their blobs."""
    blocks = list(_last_blocks(source, TAIL_BYTES))
    return [record for block in reversed(blocks) for record in records_of(block)]


def _last_blocks(source: Source, window_bytes: int) -> Iterator[Block]:
    """Yield the sound blocks that start within the last bytes of a log, the last one first."""
    end = end_of_blocks(source)
    start = max(0, end - window_bytes)
    data = source.read(start, end - start)
    found = data.rfind(MARK)
    while found >= 0:
        with suppress(FormatError):  # damaged, or not whole yet
            yield load_block(source, start + found)
        found = data.rfind(MARK, 0, found)


def _with_fin(known: Summary, fin: Record) -> Summary:
    said = fin.fields
    return attrs.evolve(
        known,
        state="finished",
        duration_ms=fin.at_ns // _NS_PER_MS,
        dialect=_text(said.get("dialect")),
        reason=_text(said.get("reason")),
        units=_count(said.get("units")),
        turns=_count(said.get("turns")),
        chunks=_count(said.get("chunks")),
    )


def _with_tail(known: Summary, tail: list[Record]) -> Summary:
    if not tail:
        return attrs.evolve(known, state="crashed")
    units = [unit for record in tail if (unit := unit_index(record)) is not None]
    return attrs.evolve(
        known,
        state="crashed",
        duration_ms=tail[-1].at_ns // _NS_PER_MS,
        units=units[-1] + 1 if units else None,
    )
