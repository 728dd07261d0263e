"""A log's summary for listings, read only from its head and tail, so that all logs cost the same.

Rules: a log with `fin` at its end is `finished`, whatever damage precedes it (`verify` finds it). A
log without is `crashed`, or `open` while its writer holds it; without a session record it is
`unreadable`. Without `fin`, duration and units come from the last records in the tail. Values'
types are checked; content beyond `ENDS_COST_MAX` at either end counts as damaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal

import attrs

from protocol.values.records import derive_id

from ..format.errors import FormatError, RecorderError
from ..format.expansion import Expansion
from ..format.format import BLOCK_BYTES, HEAD_BYTES_MAX, HEADER_BYTES, MARK, MIB, unpack_header
from ..format.records import Fields, Record, Value
from ..read.reader import end_of_blocks, find_head, records_of, unit_index
from ..read.scan import Source, load_block
from .store import LogInfo

State = Literal["open", "finished", "crashed", "unreadable"]
"""`open`: being written; `crashed`: its writer died, or its disk failed, before its end."""

START_BYTES: Final = HEAD_BYTES_MAX + BLOCK_BYTES
"""The first block, and usually the second: the session record and its copy."""
ENDS_COST_MAX: Final = 16 * MIB
"""Expansion limit of either end: 0.1 s of work, four times the largest session record."""
TRIES_MAX: Final = 64
"""Invalid blocks skipped at either end: a crash damages one or two, a bad disk some."""
FIN_BYTES: Final = 8 << 10
"""`fin` and its header take some hundred bytes."""
TAIL_BYTES: Final = BLOCK_BYTES + MIB // 8
"""A block is usually smaller than `BLOCK_BYTES`, so the last complete one is in here."""
TEXT_CHARS_MAX: Final = 256
"""Names of modes, dialects, keys and reasons are shorter, and usually a model's folder is."""
WALL_MS_MAX: Final = 253_402_300_799_999
"""The end of the year 9999, the limit of calendar libraries."""
_NS_PER_MS: Final = 1_000_000


@attrs.frozen(kw_only=True)
class Summary:
    """A log as it is listed; None where its file does not say.

    Attributes:
        session_id: as the session's client and the server's log know it.
        began_ms: Unix milliseconds of the session's start.
        duration_ms: from the start to the last record.
        dialect: the wire protocol; only in logs with `fin`.
        owner: the name of the client's key; empty without one.
        model: as the server was told to load it.
        chunks: seconds transcribed; only in logs with `fin`.
        modified_ms: Unix milliseconds when it last grew.
    """

    recording_id: str
    session_id: str | None = None
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

    def is_named(self, name: str) -> bool:
        """Whether `name` is an id of the recording or session; `rt_` and its start in 000.

        A 002 client's own name is not known here.
        """
        started = None if self.began_ms is None else f"rt_{self.began_ms}"
        duplex = derive_id("duplex", self.recording_id, 0)
        return name in {self.recording_id, self.session_id, started, duplex}

    @property
    def listed_ms(self) -> int:
        """The sort key of a listing: the session's start, or else the file's last growth."""
        return self.modified_ms if self.began_ms is None else self.began_ms


def summarize(info: LogInfo) -> Summary:
    """Summarize a log, never as `open`; only an unreadable file (`OSError`) makes it raise."""
    known = Summary(
        recording_id=info.recording_id,
        state="unreadable",
        file_bytes=info.file_bytes,
        modified_ms=info.modified_ns // _NS_PER_MS,
    )
    source = info.open()
    try:
        head, _ = find_head(_Start(source), _ends_expansion(), tries_max=TRIES_MAX)
        known = _with_head(known, head.fields)
        ends = _ends_expansion()
        last = next(_last_blocks(source, FIN_BYTES, ends), None)
        if last is not None and last[0].kind == "fin":  # the only record of its block
            return _with_fin(known, last[0])
        return _with_tail(known, source, ends)
    except RecorderError:
        return known
    finally:
        source.close()


def as_of_now(summary: Summary, info: LogInfo) -> Summary:
    """Set `open` on the summary of a log that is being written."""
    if summary.state == "finished":
        return summary
    try:
        return attrs.evolve(summary, state="open") if info.is_held() else summary
    except OSError:  # gone meanwhile, or not readable: unchanged
        return summary


def whole_bytes(source: Source) -> int:
    """Return the end of the last complete block, up to which a growing log may be served."""
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
                found = data.rfind(MARK, 0, found)  # truncated in its header
                continue
            after = offset + HEADER_BYTES + header.compressed_len
            return after if after <= size else offset
        end = start
    return 0


def _ends_expansion() -> Expansion:
    return Expansion(int, allowance=ENDS_COST_MAX)


# -- the head -----------------------------------------------------------------------------------


@attrs.frozen
class _Start:
    log: Source

    def size(self) -> int:
        return min(self.log.size(), START_BYTES)

    def read(self, offset: int, count: int) -> bytes:
        return self.log.read(offset, min(count, max(0, START_BYTES - offset)))


def _with_head(known: Summary, fields: Fields) -> Summary:
    found = fields.get("config")
    config: Fields = found if isinstance(found, dict) else {}
    began_ms = _count(fields.get("wall_ms"))
    named: dict[str, Any] = {name: _text(config.get(name)) for name in ("mode", "model")}
    return attrs.evolve(
        known,
        began_ms=began_ms if began_ms is not None and began_ms <= WALL_MS_MAX else None,
        session_id=session_id_in(fields),
        owner=_text(config.get("owner")) or "",
        **named,
    )


def session_id_in(head: Fields) -> str | None:
    """Return the session id in a head's fields, if it is a short text."""
    return _text(head.get("session_id"))


def _text(value: Value) -> str | None:
    """Accept a short text that is safe on any terminal."""
    if isinstance(value, str) and len(value) <= TEXT_CHARS_MAX and value.isprintable():
        return value
    return None


def _count(value: Value) -> int | None:
    """Accept a count of up to 63 bits, the range of the index."""
    return value if type(value) is int and 0 <= value < 1 << 63 else None


# -- the tail -----------------------------------------------------------------------------------


def _last_blocks(source: Source, window_bytes: int, expansion: Expansion) -> Iterator[list[Record]]:
    """Yield the records of blocks in a log's last bytes, last block first; blobs unresolved."""
    end = end_of_blocks(source)
    start = max(0, end - window_bytes)
    data = source.read(start, end - start)
    found, tries = data.rfind(MARK), 0
    while found >= 0 and tries < TRIES_MAX:
        try:
            records = list(records_of(load_block(source, start + found, expansion), expansion))
        except FormatError:  # damaged or incomplete
            records = []
        if records:
            yield records
        else:
            tries += 1
        found = data.rfind(MARK, 0, found)


def _with_fin(known: Summary, fin: Record) -> Summary:
    fields = fin.fields
    found: dict[str, Any] = {name: _text(fields.get(name)) for name in ("dialect", "reason")}
    found |= {name: _count(fields.get(name)) for name in ("units", "turns", "chunks")}
    duration_ms = fin.at_ns // _NS_PER_MS
    return attrs.evolve(known, state="finished", duration_ms=duration_ms, **found)


def _with_tail(known: Summary, source: Source, expansion: Expansion) -> Summary:
    """Fill in from the last records, back to the last unit's."""
    known = attrs.evolve(known, state="crashed")
    for records in _last_blocks(source, TAIL_BYTES, expansion):
        last = records[-1]
        if known.duration_ms is None:
            if last.kind == "fin":  # before an incomplete seek table
                return _with_fin(known, last)
            known = attrs.evolve(known, duration_ms=last.at_ns // _NS_PER_MS)
        units = [unit for record in records if (unit := unit_index(record)) is not None]
        if units:
            return attrs.evolve(known, units=units[-1] + 1)
    return known
