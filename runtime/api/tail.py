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
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence, Sized
from contextlib import aclosing
from functools import partial
from typing import Final, Generic, TypeVar

import anyio
import anyio.to_thread
import attrs
import pybase64

from recorder.format.encoding import extract
from recorder.format.format import FRAME_KINDS, Record, Unreadable, Value
from recorder.read.reader import LogReader
from recorder.read.scan import Damage
from recorder.storage.listing import State
from recorder.storage.store import LogInfo

from .requests import Write

P = TypeVar("P", bound=Sized)
"""A piece of what is sent: bytes or text."""
Item = Record | Damage

POLL_S: Final = 0.25
"""The recorder's tick, after which blocks are written that no answer needs."""
ALIVE_S: Final = 15.0
"""A proxy drops a connection that is silent for half a minute or more."""
BATCH_BYTES: Final = 256 * 1024
"""About the bytes of one write; a record is never split."""
BATCH_ITEMS: Final = 256
"""Records read in one go, so that skipping thousands does not hold a thread."""


@attrs.frozen(kw_only=True)
class TailFormat:
    """How a log is sent: from `from_seq`, as server-sent events with `seq` as id or JSON lines."""

    from_seq: int = 0
    with_blobs: bool = False
    as_events: bool = False

    @property
    def media_type(self) -> str:
        """The answer's media type."""
        return "text/event-stream" if self.as_events else "application/x-ndjson"

    def line(self, message: Mapping[str, object], seq: int | None = None) -> bytes:
        """Format one object."""
        text = json.dumps(message)  # in ASCII: a log can hold lone surrogates
        if not self.as_events:
            return f"{text}\n".encode()
        name = "" if seq is None else f"id: {seq}\n"
        return f"{name}data: {text}\n\n".encode()

    def lines(self, item: Item) -> tuple[bytes]:
        """Format a record or damage."""
        if isinstance(item, Damage):
            return (self.line({"type": "damage", **attrs.asdict(item)}),)
        return (self.line(_record_json(item, self.with_blobs), item.seq),)


async def send_log(info: LogInfo, form: TailFormat, write: Write) -> None:
    """Send a log to its end, or until cancelled; raises `OSError` if it becomes unreadable."""
    tail = Tail(info, form.lines, from_seq=form.from_seq)
    sent_s = anyio.current_time()
    async with aclosing(follow(tail)) as batches:
        async for lines in batches:
            now_s = anyio.current_time()
            if not lines and now_s - sent_s >= ALIVE_S:
                lines = [form.line({"type": "alive"})]  # noqa: PLW2901 - sent instead
            if lines:
                await write(b"".join(lines))
                sent_s = now_s
    await write(form.line({"type": "end", "state": tail.state}))


async def follow(tail: Tail[P]) -> AsyncGenerator[list[P]]:
    """Yield the pieces of a log, a batch at a time, to its end; empty now and then.

    It closes the tail. `OSError`: the log becomes unreadable.
    """
    in_thread = partial(anyio.to_thread.run_sync, abandon_on_cancel=True)
    try:
        while tail.state is None:
            pieces = await in_thread(tail.read)
            yield pieces or []
            if pieces is None and tail.state is None:
                await anyio.sleep(POLL_S)
    finally:
        tail.close()


class Tail(Generic[P]):
    """A log while it is written; used by one thread at a time.

    Args:
        pieces_of: makes what is sent of a record or damage; called in a thread.
        from_seq: the first record.

    Attributes:
        state: at the log's end, its state in a listing; None before.
    """

    def __init__(
        self, info: LogInfo, pieces_of: Callable[[Item], Sequence[P]], *, from_seq: int = 0
    ) -> None:
        self._info = info
        self._pieces_of = pieces_of
        self._from_seq = from_seq
        self._reader: LogReader | None = None
        self._items: Iterator[Item] | None = None
        self._was_held = True
        self.state: State | None = None

    def close(self) -> None:
        """Close the log."""
        if self._reader is not None:
            self._reader.close()

    def read(self) -> list[P] | None:
        """The next pieces; None if nothing is there now."""
        if self._items is None:
            # Ask whether the log is being written before the read, so that its last records are
            # seen.
            self._was_held = self._is_held()
            self._items = self._begin()
        pieces: list[P] = []
        size = 0
        for _ in range(BATCH_ITEMS):
            item = next(self._items, None)
            if item is None:
                self._items = None
                if not pieces:
                    self._pause()
                return pieces or None
            made = self._pieces_of(item)
            pieces += made
            size += sum(map(len, made))
            if isinstance(item, Record) and item.kind == "fin":
                self.state = "finished"
            if size >= BATCH_BYTES or self.state is not None:
                break
        return pieces

    def _is_held(self) -> bool:
        try:
            return self._info.is_held()
        except FileNotFoundError:  # it was removed: the open file can still be read
            return False

    def _begin(self) -> Iterator[Item]:
        if self._reader is None:
            try:
                self._reader = LogReader(self._info.open())
            except (Unreadable, FileNotFoundError):  # or its head is not written yet
                return iter(())
            if self._from_seq:
                return self._reader.at(self._from_seq)
        return iter(self._reader)

    def _pause(self) -> None:
        """At the end of the file: the log is over, unless it is being written."""
        if self._was_held:
            return
        if self._reader is None:
            self.state = "unreadable"
        else:
            self.state = "finished" if self._reader.is_finished else "crashed"


def _record_json(record: Record, with_blobs: bool) -> dict[str, object]:
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
