"""The messages of a link, what a session's log holds with the call that it belongs to; its frames.

    frame   := kind:1 byte, then a record (`Ask`, `Rebuild`, `Answer`) or JSON (all others)
    Ask     { call, session, slot, cut, effect }      to the worker
    Rebuild { call, session, exact, past }            to the worker: past units to be fed again
    Cancel  { call, session }                         to the worker: the answer is not awaited
    Answer  { call, session, event }                  from the worker
    Failed  { call, session, why, text }              from the worker
    Speaks  { speaks }                                from the worker: `BackendInfo.speaks` changed
    Heartbeat                                         from both ends

- Effects ask, events answer, as the same records with the same blobs that a log has; their `at_ns`
  is 0. A record's PCM is not rearranged: nothing here compresses it.
- `session` is the gateway's number of what it opened: the `lease` of `OpenBackend`.
- Openings and turns go through one stream (`SETUP`). Their blobs (voices, pictures) cross once: a
  later record names an earlier one. Both ends forget all when the sender restarts `seq` at 0.
- All that arrives is checked: what no sender of ours writes is a `LinkError`.
- Records that stand for themselves, those of every unit, are written and read in C (`write_record`,
  `read_record`): a unit and its answer take 63 µs of CPU, both ends, in place of 134. The bytes are
  those of `recorder.format.encoding`, whose own code does the same value by value. What is unusual
  (long or broken text, numbers that JSON does not hold, a reference to another record) is left to
  that code: both functions return None.

Frames, on one connection: pieces of many streams, urgent ones first. Without IO.

    piece := stream:u32 length:u32 bytes      length: 1 to 65536; its highest bit: the frame's last

- A frame is the bytes of one message. The frames of a stream arrive in their order; those of
  different streams take turns, piece by piece, so that a large one delays no other.
- Stream 0 is urgent: all that waits there goes before the next piece of any other.
- Both ends hold each other to the bounds of a link, below: a broken one is a `LinkError`.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import attrs
import orjson

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.model import PAST_UNITS_MAX, Cut, PastUnit
from recorder.format import format as records
from recorder.format import mapping
from recorder.format.encoding import RAW, RecordEncoder
from recorder.format.format import (
    MIB,
    RECORD_BYTES_MAX,
    UNPACKED_BYTES_MAX,
    Expansion,
    FormatError,
    Piece,
    RecorderError,
    frame_record,
    split_records,
)
from recorder.read.reader import StoredRecord, decode, parse

# -- frames ----------------------------------------------------------------------------------------

PIECE_BYTES_MAX: Final = 64 << 10
"""A unit's sound is one piece. Large frames take turns after each."""
WRITE_BYTES: Final = 2 * PIECE_BYTES_MAX
"""Pieces of one write: a unit's answer, with its head. Urgent frames wait for one write."""
FRAME_BYTES_MAX: Final = RECORD_BYTES_MAX
"""A frame holds one record; the largest is a turn with all pictures and sound that fit a chat."""
PARTIAL_BYTES_MAX: Final = 2 * FRAME_BYTES_MAX
"""Frames that have not arrived whole: one turn of that size, and units of all other sessions."""
PARTIAL_FRAMES_MAX: Final = 2048
"""One a session; a worker has 1024 slots at most."""
OUTBOX_BYTES_MAX: Final = 2 * FRAME_BYTES_MAX
"""Frames that wait for the other end: a session has one call at a time, so more is a standstill."""
READ_BYTES: Final = 256 << 10
"""A unit and its head in one read."""
SHARED_BYTES_MAX: Final = 32 * MIB
"""Blobs of openings and turns that both ends keep: a dozen voices of 30 s, or a chat's pictures."""
SHARED_RECORDS_MAX: Final = 1024
"""Openings and turns that both ends keep with them: each takes kilobytes, however short it is."""

HELLO_BYTES_MAX: Final = 64 << 10
"""A greeting has 300 bytes, a worker's description some kilobytes."""
HELLO_WAIT_S: Final = 10.0
"""For TLS and the greeting, which compute nothing; a worker that still loads does not greet."""
HEARTBEAT_S: Final = 1.0
"""Between heartbeats: a thousandth of a core for hundreds of links."""
SILENT_HEARTBEATS_MAX: Final = 5
"""Beats of our own without a byte from the other end. An event loop that stands still so long
cannot serve units of a second. Counted in beats, so that our own pause is not taken for theirs."""
TEXT_CHARS_MAX: Final = 500
"""Of the other end's words that we show: an error is one line."""

LINKS_MAX: Final = 64
"""Gateways of one worker: each may hold a frame."""
GREETINGS_MAX: Final = 64
"""Connections of one worker that have not greeted: each may hold `HELLO_BYTES_MAX`."""

URGENT: Final = 0
"""The stream of what must overtake: heartbeats, interrupts."""
_HEAD: Final = struct.Struct("<II")
_LAST: Final = 1 << 31
Frame = bytearray | memoryview
"""The bytes of a frame that came; never empty."""


class LinkError(Exception):
    """The other end broke the protocol, or left; the text says how, in one line."""


class LinkRefused(LinkError):  # noqa: N818 - names say what happened
    """One end refuses the other: a wrong token, another version; a retry changes nothing."""


class LinkLeft(LinkError):  # noqa: N818 - names say what happened
    """The other end left in the middle of the greeting, as a health check does."""


class Outbox:
    """Frames that wait to be sent; `bytes_max` bounds their sum."""

    def __init__(self, bytes_max: int = OUTBOX_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._streams: OrderedDict[int, deque[_Cut]] = OrderedDict()
        self.bytes = 0

    def put(self, stream: int, frame: Sequence[Piece]) -> None:
        """Add a frame, in parts; `LinkError` if too much waits already."""
        cut = _Cut(frame)
        assert 0 < cut.left <= FRAME_BYTES_MAX
        if self.bytes and self.bytes + cut.left > self._bytes_max:
            raise LinkError(f"{self.bytes} bytes wait for it, at most {self._bytes_max}")
        self.bytes += cut.left
        self._streams.setdefault(stream, deque()).append(cut)

    def take(self) -> list[Piece]:
        """Take the next piece with its head; empty where nothing waits."""
        if not self._streams:
            return []
        stream = URGENT if URGENT in self._streams else next(iter(self._streams))
        frames = self._streams[stream]
        frame = frames[0]
        length, piece = frame.take(PIECE_BYTES_MAX)
        self.bytes -= length
        if frame.left:
            self._streams.move_to_end(stream)
            return [_HEAD.pack(stream, length), *piece]
        frames.popleft()
        if frames:
            self._streams.move_to_end(stream)
        else:
            del self._streams[stream]
        return [_HEAD.pack(stream, length | _LAST), *piece]


class _Cut:
    """A frame's parts that are not sent yet."""

    def __init__(self, parts: Sequence[Piece]) -> None:
        self._parts = deque(memoryview(part) for part in parts if len(part))
        self.left = sum(map(len, self._parts))

    def take(self, bytes_max: int) -> tuple[int, list[Piece]]:
        """Cut off up to `bytes_max` bytes: their number, and the bytes."""
        pieces: list[Piece] = []
        room = bytes_max
        while room and self._parts:
            part = self._parts.popleft()
            if len(part) > room:
                self._parts.appendleft(part[room:])
                part = part[:room]
            pieces.append(part)
            room -= len(part)
        self.left -= bytes_max - room
        return bytes_max - room, pieces


class Inbox:
    """Joins pieces to frames; `frame_bytes_max` may change while it is used."""

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._head = bytearray()
        self._stream = self._left = 0
        self._is_last = False
        self._partial: dict[int, bytearray] = {}
        self._partial_bytes = 0

    def feed(self, data: Piece) -> Iterator[tuple[int, Frame]]:
        """Take bytes as they come, and yield each whole frame with its stream.

        It must be exhausted before the next call. A frame is valid as long as `data`. `LinkError`:
        they are not frames, or too large.
        """
        at, view = 0, memoryview(data)
        while at < len(data):
            if not self._left:
                wanted = _HEAD.size - len(self._head)
                self._head += view[at : at + wanted]
                at += wanted
                if len(self._head) == _HEAD.size:
                    self._begin(*_HEAD.unpack(self._head))
                    self._head.clear()
                continue
            part = view[at : at + self._left]
            at += len(part)
            self._left -= len(part)
            frame = self._add(part)
            if frame is not None:
                yield self._stream, frame

    def _add(self, part: memoryview) -> Frame | None:
        """Take a part of a piece, and return the frame that it completes."""
        is_whole = self._is_last and not self._left
        frame = self._partial.get(self._stream)
        if frame is None and is_whole:  # most are: no copy
            self._partial_bytes -= len(part)
            return part
        if frame is None:
            frame = self._partial[self._stream] = bytearray()
        frame += part
        if not is_whole:
            return None
        self._partial_bytes -= len(frame)
        return self._partial.pop(self._stream)

    def _begin(self, stream: int, length: int) -> None:
        """Check a piece's head, before any memory is taken for it."""
        self._stream, self._is_last = stream, bool(length & _LAST)
        self._left = length & ~_LAST
        if not 1 <= self._left <= PIECE_BYTES_MAX:
            raise LinkError(f"a piece of {self._left} bytes, not 1 to {PIECE_BYTES_MAX}")
        self._partial_bytes += self._left
        if len(self._partial.get(stream, b"")) + self._left > self.frame_bytes_max:
            raise LinkError(f"a frame of more than {self.frame_bytes_max} bytes")
        frames = len(self._partial) + (stream not in self._partial)
        if self._partial_bytes > PARTIAL_BYTES_MAX or frames > PARTIAL_FRAMES_MAX:
            raise LinkError(
                f"{frames} frames of {self._partial_bytes} bytes have begun, at most"
                f" {PARTIAL_FRAMES_MAX} of {PARTIAL_BYTES_MAX}"
            )


# -- messages --------------------------------------------------------------------------------------

SETUP: Final = 1
"""The stream of openings and turns, in their order: their blobs refer to each other."""
_FIRST: Final = 1
"""Added to a session's number, from 1: its own stream."""

Why = Literal["error", "context_full", "refused", "gone", "device_lost", "broke"]
"""Which error a call raised: a `BackendError` by its class; `broke`: any other exception."""


_ASK: Final = ord("A")
_ANSWER: Final = ord("E")
_REBUILD: Final = ord("R")
HEADER_BYTES_MAX: Final = 64 << 10
"""Of a unit's record, whose longest part is its token ids."""
UNIT_BYTES_MAX: Final = 16 * MIB
"""A unit with its pictures."""
INT_MAX: Final = float(1 << 63)
"""A larger int is read as a float here."""
_FRAMING: Final = struct.Struct("<II")
_KEYS: Final = frozenset({"at_ns", "blobs", "fields", "kind", "seq", "version"})
_SCALARS: Final = frozenset({int, str, bool, type(None)})


@attrs.frozen(kw_only=True)
class Ask:
    """Perform an effect; `call` 0 wants no answer. `cut`: where to stop a unit or a turn."""

    call: int
    session: int
    effect: ef.Effect
    slot: int = 0
    cut: Cut | None = None


@attrs.frozen(kw_only=True)
class Rebuild:
    """Feed 1 to `PAST_UNITS_MAX` past units again; see `Rebuilds`."""

    call: int
    session: int
    exact: bool
    past: tuple[PastUnit, ...]


@attrs.frozen(kw_only=True)
class Cancel:
    """Cancel a call, if it is still in flight."""

    call: int
    session: int


@attrs.frozen(kw_only=True)
class Answer:
    """What a call came to, or a piece of a turn."""

    call: int
    session: int
    event: ev.Event


@attrs.frozen(kw_only=True)
class Failed:
    """A call failed."""

    call: int
    session: int
    why: Why
    text: str


@attrs.frozen(kw_only=True)
class Speaks:
    """The model speaks, or gives only text from now on."""

    speaks: bool


@attrs.frozen(kw_only=True)
class Heartbeat:
    """The sender is there."""


Message = Ask | Rebuild | Cancel | Answer | Failed | Speaks | Heartbeat

_PLAIN: Final[dict[type[Any], int]] = {
    Cancel: ord("C"),
    Failed: ord("F"),
    Speaks: ord("S"),
    Heartbeat: ord("B"),
}
_CLASSES: Final = {kind: cls for cls, kind in _PLAIN.items()}


def stream_of(message: Message) -> int:
    """The stream that a message takes."""
    match message:
        case Ask(effect=ef.OpenBackend() | ef.StartTurn()):
            return SETUP
        case Heartbeat() | Speaks() | Ask(effect=ef.Interrupt()):
            return URGENT
    return session_stream(message.session)


def session_stream(session: int) -> int:
    """The stream of a session's own messages."""
    return session + _FIRST


class Sender:
    """Encodes the messages of one end; each must be sent, in the order of its stream."""

    def __init__(self) -> None:
        self._shared = RecordEncoder(memory_bytes_max=SHARED_BYTES_MAX, packs_samples=False)
        self._shared_bytes = self._seq = 0
        self._single = RecordEncoder(packs_samples=False)

    def encode(self, message: Message, stream: int | None = None) -> list[Piece]:
        """Encode a message for its stream, in parts; `RecordInvalid`: too large for a record."""
        match message:
            case Ask():
                fields: records.Fields = {
                    "call": message.call,
                    "session": message.session,
                    "slot": message.slot,
                    "cut": None if message.cut is None else mapping.plain_of(message.cut),
                    "effect": mapping.whole_effect(message.effect),
                }
                is_shared = (stream_of(message) if stream is None else stream) == SETUP
                return [bytes([_ASK]), *self._record("effect", fields, is_shared=is_shared)]
            case Rebuild():
                return [
                    bytes([_REBUILD]),
                    *self._record("effect", mapping.plain_of(message), is_shared=False),
                ]
            case Answer():
                kind, event = mapping.event_record(message.event)
                fields = {"call": message.call, "session": message.session, "event": event}
                return [bytes([_ANSWER]), *self._record(kind, fields, is_shared=False)]
        return [bytes([_PLAIN[type(message)]]) + orjson.dumps(mapping.plain_of(message))]

    def _record(self, kind: str, fields: records.Fields, *, is_shared: bool) -> list[Piece]:
        if not is_shared:
            if (pieces := write_record(kind, fields)) is not None:
                return pieces
            self._single.forget()
            return self._single.encode(
                records.Record(kind=kind, seq=0, at_ns=0, fields=fields)
            ).pieces
        if self._shared_bytes > SHARED_BYTES_MAX or self._seq == SHARED_RECORDS_MAX:
            self._shared.forget()
            self._shared_bytes = self._seq = 0
        made = self._shared.encode(records.Record(kind=kind, seq=self._seq, at_ns=0, fields=fields))
        self._seq += 1
        self._shared_bytes += made.framed_bytes
        return made.pieces


class Receiver:
    """Decodes the messages of the other end."""

    def __init__(self) -> None:
        self._shared: list[StoredRecord] = []
        self._shared_bytes = 0

    def decode(self, stream: int, frame: Frame) -> Message:
        """Decode a frame, and keep no part of its memory; `LinkError` if it is invalid."""
        kind = frame[0]
        try:
            if kind == _ASK:
                return _ask(self._fields(stream, frame))
            if kind == _ANSWER:
                return _answer(self._fields(stream, frame))
            if kind == _REBUILD:
                return _rebuild(self._fields(stream, frame))
            cls = _CLASSES.get(kind)
            if cls is None:
                raise LinkError(f"a message of the unknown kind {kind}")
            message: Message = mapping.value_of(cls, orjson.loads(memoryview(frame)[1:]))
        except (RecorderError, mapping.MappingError, ValueError, KeyError, TypeError) as error:
            raise LinkError(f"a message of kind {kind} is invalid: {error}") from error
        return message

    def _fields(self, stream: int, frame: Frame) -> records.Fields:
        if stream == SETUP:
            frame = bytearray(frame)  # it is kept
        elif (fields := read_record(memoryview(frame)[1:])) is not None:
            return fields
        ((header, area),) = split_records(memoryview(frame)[1:], 1)
        stored = parse(header, area)
        if stream == SETUP:
            self._keep(stored, len(frame))
        return decode(stored, self._earlier, _expansion()).fields

    def _keep(self, stored: StoredRecord, frame_bytes: int) -> None:
        """Keep a record whose blobs later ones may name; one with `seq` 0 drops all before."""
        if stored.record.seq == 0:
            self._shared, self._shared_bytes = [], 0
        is_full = self._shared_bytes > SHARED_BYTES_MAX or len(self._shared) == SHARED_RECORDS_MAX
        if stored.record.seq != len(self._shared) or is_full:
            raise LinkError(f"record {stored.record.seq} is not the one that is due")
        self._shared.append(stored)
        self._shared_bytes += frame_bytes

    def _earlier(self, seq: int) -> StoredRecord:
        if not 0 <= seq < len(self._shared):
            raise FormatError(f"there is no record {seq} to refer to")
        return self._shared[seq]


def _expansion() -> Expansion:
    """What one record may unpack to, with the blobs that it refers to."""
    return Expansion(lambda: 0, allowance=UNPACKED_BYTES_MAX)


def _ask(fields: records.Fields) -> Ask:
    cut = fields["cut"]
    return Ask(
        call=_number(fields["call"]),
        session=_number(fields["session"]),
        slot=_number(fields["slot"]),
        cut=None if cut is None else mapping.value_of(Cut, _mapping(cut)),
        effect=mapping.effect_of(_mapping(fields["effect"])),
    )


def _answer(fields: records.Fields) -> Answer:
    return Answer(
        call=_number(fields["call"]),
        session=_number(fields["session"]),
        event=mapping.event_of(_mapping(fields["event"]), 0),
    )


def _rebuild(fields: records.Fields) -> Rebuild:
    made = mapping.value_of(Rebuild, fields)
    if not 1 <= len(made.past) <= PAST_UNITS_MAX:
        raise LinkError(f"{len(made.past)} past units, not 1 to {PAST_UNITS_MAX}")
    return made


def _number(value: records.Value) -> int:
    if type(value) is not int or value < 0:
        raise LinkError(f"a {type(value).__name__} where a number is due")
    return value


def _mapping(value: records.Value) -> records.Fields:
    if not isinstance(value, dict):
        raise LinkError(f"a {type(value).__name__} where an object is due")
    return value


# -- records that stand for themselves ------------------------------------------------------------


class _NeedsRecordEncoder(Exception):  # noqa: N818 - names say what happened
    """The value is for the recorder's own code."""


def write_record(kind: str, fields: records.Fields) -> list[Piece] | None:
    """Encode a record with `seq` 0, in parts; no key may start with `$`."""
    blobs: list[bytes] = []

    def blob(value: object) -> dict[str, int]:
        if type(value) is not bytes:
            raise TypeError
        blobs.append(value)
        return {records.BLOB: len(blobs) - 1}

    if not _is_finite(fields):
        return None
    try:
        body = orjson.dumps(fields, default=blob)
    except orjson.JSONEncodeError:
        return None
    header = orjson.dumps(
        {
            "at_ns": 0,
            "blobs": [(RAW, len(each), len(each)) for each in blobs],
            "fields": orjson.Fragment(body),
            "kind": kind,
            "seq": 0,
            "version": records.RECORD_VERSIONS[kind],
        }
    )
    blob_bytes = sum(map(len, blobs))
    if len(header) > HEADER_BYTES_MAX or blob_bytes > UNIT_BYTES_MAX:
        return None
    return [frame_record(header, blob_bytes), *blobs]


def _is_finite(fields: Mapping[str, records.Value]) -> bool:
    """Whether JSON holds all floats; none is in a list."""
    for item in fields.values():
        kind = type(item)
        if kind is float and not math.isfinite(item):  # type: ignore[arg-type]
            return False
        if kind is dict and not _is_finite(item):  # type: ignore[arg-type]
            return False
    return True


def read_record(record: memoryview) -> records.Fields | None:
    """Decode the fields of one record with `seq` 0, which are checked as any of a peer."""
    if len(record) < _FRAMING.size:
        return None
    header_bytes, blob_bytes = _FRAMING.unpack_from(record)
    start = _FRAMING.size + header_bytes
    if header_bytes > HEADER_BYTES_MAX or start + blob_bytes != len(record):
        return None
    try:
        header = orjson.loads(record[_FRAMING.size : start])
        if type(header) is not dict or header.keys() != _KEYS or type(header["fields"]) is not dict:
            return None
        kind = header["kind"]
        if type(kind) is not str or kind not in records.RECORD_VERSIONS:
            return None
        numbers = [header["seq"], header["at_ns"], header["version"]]
        if numbers != [0, 0, records.RECORD_VERSIONS[kind]] or set(map(type, numbers)) != {int}:
            return None
        blobs = _blobs(header["blobs"], record[start:])
        fields: records.Fields = _filled(header["fields"], blobs, 0)
    except (orjson.JSONDecodeError, _NeedsRecordEncoder):
        return None
    return fields


def _blobs(table: object, area: memoryview) -> list[bytes]:
    """Cut the blobs, which must fill the area."""
    if type(table) is not list:
        raise _NeedsRecordEncoder
    blobs, at = [], 0
    for entry in table:
        if type(entry) is not list or len(entry) != 3 or set(map(type, entry)) != {int}:
            raise _NeedsRecordEncoder
        codec, length, stored_length = entry
        if length < 0 or (codec, stored_length) != (RAW, length):
            raise _NeedsRecordEncoder
        blobs.append(bytes(area[at : at + length]))
        at += length
    if at != len(area):
        raise _NeedsRecordEncoder
    return blobs


def _filled(value: Any, blobs: list[bytes], depth: int) -> Any:
    """Put the blobs in their places."""
    kind = type(value)
    if kind is dict:
        if depth > records.NESTING_MAX:
            raise _NeedsRecordEncoder
        if records.BLOB in value:
            return _blob(value, blobs)
        for key, item in value.items():
            if key.startswith(records.RESERVED):
                raise _NeedsRecordEncoder
            if type(item) not in _SCALARS:
                value[key] = _filled(item, blobs, depth + 1)
    elif kind is list:
        if depth > records.NESTING_MAX:
            raise _NeedsRecordEncoder
        if not set(map(type, value)) <= {int}:
            return [_filled(item, blobs, depth + 1) for item in value]
    elif kind is float and abs(value) >= INT_MAX:
        raise _NeedsRecordEncoder
    return value


def _blob(value: dict[str, Any], blobs: list[bytes]) -> bytes:
    index = value[records.BLOB]
    if len(value) != 1 or type(index) is not int or not 0 <= index < len(blobs):
        raise _NeedsRecordEncoder
    return blobs[index]
