"""Frames on one connection: pieces of many streams, urgent ones first. Without IO.

    piece := stream:u32 length:u32 bytes      length: 1 to 65536; its highest bit: the frame's last

- A frame is the bytes of one message. The frames of a stream arrive in their order; those of
  different streams take turns, piece by piece, so that a large one delays no other.
- Stream 0 is urgent: all that waits there goes before the next piece of any other.
- Both ends hold each other to the bounds of a link, below: a broken one is a `LinkError`.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Final

from recorder.format.format import MIB, RECORD_BYTES_MAX, Piece

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
BEAT_S: Final = 1.0
"""Between heartbeats: a thousandth of a core for hundreds of links."""
SILENT_BEATS_MAX: Final = 5
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
