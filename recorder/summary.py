"""What a listing says of a log, from its head and its tail alone: all logs cost the same.

Rules: a log with `fin` at its end is `finished`, however much is damaged before that, which is for
`verify` to say. One without is `crashed`, or `open` while its writer holds it; one without a
session record is `unreadable`. The duration of a log without `fin` is that of its last record, and
its units are counted by the last one that is found in its tail.

What stands in a log is not believed to be of the right type, and costs no more than
`ENDS_COST_MAX`, whatever the file holds: what is beyond that counts as damaged. It writes and keeps
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import attrs

from protocol.digest import derive_id, session_id_of

from .errors import FormatError, RecorderError
from .expansion import Expansion
from .format import BLOCK_BYTES, HEAD_BYTES_MAX, HEADER_BYTES, MARK, MIB, unpack_header
from .lock import is_held
from .places import end_of_blocks, records_of, unit_index
from .reader import find_head
from .records import Fields, Record, Value
from .scan import FileSource, Source, load_block
from .store import LogInfo

State = Literal["open", "finished", "crashed", "unreadable"]
"""`open`: it is being written; `crashed`: its writer died, or its disk failed, before its end."""

START_BYTES: Final = HEAD_BYTES_MAX + BLOCK_BYTES
"""The first block, and mostly the second: where the session record and its copy are."""
ENDS_COST_MAX: Final = 16 * MIB
"""What may be made of either end, see `recorder.expansion`: a tenth of a second of work, and four
times what the largest session record takes."""
TRIES_MAX: Final = 64
"""Blocks that are no blocks, at either end: a crash damages one or two, a bad disk some."""
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
        session_id: of the session that is recorded, as its client and the server's log know it.
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
        """Whether a session or its recording goes by a name; `rt_` and its start in 000.

        The name that a client of 002 gave itself is not known here.
        """
        started = None if self.began_ms is None else f"rt_{self.began_ms}"
        duplex = derive_id("duplex", self.recording_id, 0)
        return name in {self.recording_id, self.session_id, started, duplex}

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
    source = FileSource(info.path)
    try:
        head, _ = find_head(_Start(source), _ends_expansion(), tries_max=TRIES_MAX)
        known = _with_head(known, head.fields)
        ends = _ends_expansion()
        fin = _fin(source, ends)
        return _with_tail(known, source, ends) if fin is None else _with_fin(known, fin)
    except RecorderError:
        return known
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


def _ends_expansion() -> Expansion:
    return Expansion(int, allowance=ENDS_COST_MAX)


# -- the head -----------------------------------------------------------------------------------


@attrs.frozen
class _Start:
    """The start of a log."""

    log: Source

    def size(self) -> int:
        return min(self.log.size(), START_BYTES)

    def read(self, offset: int, count: int) -> bytes:
        return self.log.read(offset, min(count, max(0, START_BYTES - offset)))


def _with_head(known: Summary, fields: Fields) -> Summary:
    config = fields.get("config")
    said: Fields = config if isinstance(config, dict) else {}
    began_ms = _count(fields.get("wall_ms"))
    return attrs.evolve(
        known,
        began_ms=began_ms if began_ms is not None and began_ms <= WALL_MS_MAX else None,
        session_id=session_id_in(fields),
        mode=_text(said.get("mode")),
        owner=_text(said.get("owner")) or "",
        model=_text(said.get("model")),
    )


def session_id_in(head: Fields) -> str | None:
    """Read which session a head is of; of old ones it is made of the recording's id.

    Args:
        head: the fields of the log's `session` record.
    """
    recording_id = _text(head.get("recording_id"))
    derived = None if recording_id is None else session_id_of(recording_id)
    return _text(head.get("session_id")) or derived


def _text(value: Value) -> str | None:
    """Take a short text that any terminal may be shown."""
    if isinstance(value, str) and len(value) <= TEXT_CHARS_MAX and value.isprintable():
        return value
    return None


def _count(value: Value) -> int | None:
    """Take a count of up to 63 bits, which is what an index can hold."""
    return value if type(value) is int and 0 <= value < 1 << 63 else None


# -- the tail -----------------------------------------------------------------------------------


def _fin(source: Source, expansion: Expansion) -> Record | None:
    """Find `fin`: it has the last block to itself."""
    for records in _last_blocks(source, FIN_BYTES, expansion):
        return records[0] if records[0].kind == "fin" else None
    return None


def _last_blocks(source: Source, window_bytes: int, expansion: Expansion) -> Iterator[list[Record]]:
    """Yield the records of the blocks that start within the last bytes of a log, last block first.

    They are without their blobs; blocks without a sound record are passed by.
    """
    end = end_of_blocks(source)
    start = max(0, end - window_bytes)
    data = source.read(start, end - start)
    found, tries = data.rfind(MARK), 0
    while found >= 0 and tries < TRIES_MAX:
        try:
            records = list(records_of(load_block(source, start + found, expansion), expansion))
        except FormatError:  # damaged, or not whole yet
            records = []
        if records:
            yield records
        else:
            tries += 1
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


def _with_tail(known: Summary, source: Source, expansion: Expansion) -> Summary:
    """Say what the last records of a log say; no more is read than up to the last unit."""
    known = attrs.evolve(known, state="crashed")
    for records in _last_blocks(source, TAIL_BYTES, expansion):
        last = records[-1]
        if known.duration_ms is None:
            if last.kind == "fin":  # before a seek table that is not whole
                return _with_fin(known, last)
            known = attrs.evolve(known, duration_ms=last.at_ns // _NS_PER_MS)
        units = [unit for record in records if (unit := unit_index(record)) is not None]
        if units:
            return attrs.evolve(known, units=units[-1] + 1)
    return known
