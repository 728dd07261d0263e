"""A log's records while they are written: as JSON lines, or as server-sent events.

Each line is an object: `{"type": "record", "seq", "at_ns", "kind", "fields"}`, `{"type": "damage",
...}`, now and then `{"type": "alive"}`, and at last `{"type": "end", "state"}` with a listing's
state. Bytes are `{"$bytes": 64000}`, and base64 in a frame `<64000 bytes>`; on request bytes are
`{"$base64": ...}` and frames are verbatim.

The lines come from the file: a slow client loses nothing and delays neither the session nor its
log. Memory is bounded by a block of the log and the client's unsent lines. Threads read and encode.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import anyio
import anyio.to_thread
import attrs
import pybase64

from recorder.format.errors import Unreadable
from recorder.format.records import FRAME_KINDS, Record, Value
from recorder.format.spans import extract
from recorder.keep.store import LogInfo
from recorder.keep.summary import State
from recorder.read.reader import LogReader
from recorder.read.scan import Damage

from .streaming import Write

POLL_S: Final = 0.25
"""A block is written at most so long after its first record: more polls find nothing."""
ALIVE_S: Final = 15.0
"""A proxy drops a connection that is silent for half a minute or more."""
BATCH_BYTES: Final = 256 * 1024
"""About the bytes of one write; a record is never split."""
BATCH_ITEMS: Final = 256
"""Records read in one go, so that skipping thousands does not hold a thread."""


@attrs.frozen(kw_only=True)
class Telling:
    """How a log is sent: from `from_seq`, as server-sent events with `seq` as id or JSON lines."""

    from_seq: int = 0
    with_blobs: bool = False
    as_events: bool = False

    @property
    def media_type(self) -> str:
        """The answer's media type."""
        return "text/event-stream" if self.as_events else "application/x-ndjson"

    def line(self, told: Mapping[str, object], seq: int | None = None) -> bytes:
        """Format one object."""
        text = json.dumps(told)  # in ASCII: a log can hold lone surrogates
        if not self.as_events:
            return f"{text}\n".encode()
        name = "" if seq is None else f"id: {seq}\n"
        return f"{name}data: {text}\n\n".encode()


async def tell(info: LogInfo, telling: Telling, write: Write) -> None:
    """Send a log to its end, or until cancelled; raises `OSError` if it becomes unreadable."""
    in_thread = partial(anyio.to_thread.run_sync, abandon_on_cancel=True)
    tail = _Tail(info, telling)
    told_s = anyio.current_time()
    try:
        while not tail.is_over:
            piece = await in_thread(tail.read)
            now_s = anyio.current_time()
            if piece is None and now_s - told_s >= ALIVE_S:
                piece = telling.line({"type": "alive"})
            if piece:
                await write(piece)
                told_s = now_s
            elif piece is None and not tail.is_over:
                await anyio.sleep(POLL_S)
    finally:
        tail.close()


class _Tail:
    """A log that is sent; used by one thread at a time."""

    def __init__(self, info: LogInfo, telling: Telling) -> None:
        self._info = info
        self._telling = telling
        self._reader: LogReader | None = None
        self._items: Iterator[Record | Damage] | None = None
        self._was_held = True
        self.is_over = False

    def close(self) -> None:
        """Close the log."""
        if self._reader is not None:
            self._reader.close()

    def read(self) -> bytes | None:
        """The next lines: empty after skipped records, None if nothing is there now."""
        if self._items is None:
            # Ask whether the log is being written before the read, so that its last records are
            # seen.
            self._was_held = self._is_held()
            self._items = self._begin()
        lines: list[bytes] = []
        size = 0
        for _ in range(BATCH_ITEMS):
            item = next(self._items, None)
            if item is None:
                self._items = None
                return b"".join(lines) or self._pause()
            lines.append(self._tell(item))
            size += len(lines[-1])
            if size >= BATCH_BYTES or self.is_over:
                break
        return b"".join(lines)

    def _is_held(self) -> bool:
        try:
            return self._info.is_held()
        except FileNotFoundError:  # it was removed: the open file can still be read
            return False

    def _begin(self) -> Iterator[Record | Damage]:
        if self._reader is None:
            try:
                self._reader = LogReader(self._info.open())
            except (Unreadable, FileNotFoundError):  # or its head is not written yet
                return iter(())
            if self._telling.from_seq:
                return self._reader.at(self._telling.from_seq)
        return iter(self._reader)

    def _pause(self) -> bytes | None:
        """At the end of the file: None if the log is being written, else the last line."""
        if self._was_held:
            return None
        if self._reader is None:
            return self._end("unreadable")
        return self._end("finished" if self._reader.is_finished else "crashed")

    def _end(self, state: State) -> bytes:
        self.is_over = True
        return self._telling.line({"type": "end", "state": state})

    def _tell(self, item: Record | Damage) -> bytes:
        if isinstance(item, Damage):
            return self._telling.line({"type": "damage", **attrs.asdict(item)})
        line = self._telling.line(_told(item, self._telling.with_blobs), item.seq)
        return line + self._end("finished") if item.kind == "fin" else line


def _told(record: Record, with_blobs: bool) -> dict[str, object]:
    fields = dict(record.fields)
    frame = fields.get("frame")
    if record.kind in FRAME_KINDS and isinstance(frame, str) and not with_blobs:
        fields["frame"] = _elided(frame)
    return {
        "type": "record",
        "seq": record.seq,
        "at_ns": record.at_ns,
        "kind": record.kind,
        "fields": _plain(fields, with_blobs),
    }


def _elided(frame: str) -> str:
    """Replace the base64 in a frame by its length; JSON stays JSON."""
    return "".join(
        piece if isinstance(piece, str) else f"<{len(piece)} bytes>" for piece in extract(frame)
    )


def _plain(value: Value, with_blobs: bool) -> object:
    if isinstance(value, bytes):
        if with_blobs:
            return {"$base64": pybase64.b64encode_as_string(value)}
        return {"$bytes": len(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item, with_blobs) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item, with_blobs) for item in value]
    return value
