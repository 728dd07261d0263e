"""A client's WebSocket frames: their boundaries, their unmasking, and text that is not ASCII.

The codec (wsproto) hides the size of a message in progress, and reads a message above the limit to
its end. So its bytes are scanned here first (RFC 6455, 5.2): the messages and fragments, the size
of the one in progress, and whether it will exceed the limit, by its header. The data frames of that
message, and all later ones, do not reach the codec; control frames do, for the closing handshake.
The codec reports invalid frames to the peer: from there on all bytes pass. `FrameScanner` is pure
and keeps no bytes.

`text_frames` writes a server's messages: wsproto makes two copies more of each.

`tune` replaces the decoder of frames in a connection's codec, by private names
(`tests/test_private_names.py`):

- Unmasking works on eight bytes at a time.
- The pieces of an unfinished message are ours, to be told and to be let go of.
- wsproto decodes text, and trio-websocket joins the decoded pieces; one emoji would widen the whole
  string. So a piece that is not ASCII is passed on with a character for each byte (Latin-1), once
  it is known to be UTF-8, and `message_of` decodes the joined message.
"""

from __future__ import annotations

from codecs import IncrementalDecoder, getincrementaldecoder
from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
from wsproto.connection import Connection
from wsproto.frame_protocol import (
    CloseReason,
    Frame,
    FrameDecoder,
    Opcode,
    ParseFailed,
    XorMaskerSimple,
)

from protocol.values.utf8 import TEXT_BYTES_MIN, Utf8Text

from .limits import FRAGMENT_BYTES_MIN, FRAGMENT_COST

_FIN: Final = 0x80
_WHOLE_TEXT: Final = 0x81
_RESERVED: Final = 0x70
_OPCODE: Final = 0x0F
_CONTROL: Final = 0x08
_MASKED: Final = 0x80
_SIZE: Final = 0x7F
_OPCODES: Final = frozenset({0x0, 0x1, 0x2, 0x8, 0x9, 0xA})
_TWO_BYTES: Final = 126
_EIGHT_BYTES: Final = 127
_MASK_BYTES: Final = 4
CONTROL_BYTES_MAX: Final = 125
"""RFC 6455, 5.5: longer ones are invalid."""


class Run(NamedTuple):
    """A run of bytes of which all pass or none does, up to `end`; empty if more bytes are needed.

    `cost` counts the messages that began in it; a fragment is a part of one.
    """

    end: int
    passes: bool
    cost: float


class Whole(NamedTuple):
    """A text message in a single frame: its payload, masked, and where the frame ends.

    `end` may lie beyond the bytes that are here.
    """

    mask: bytes
    start: int
    end: int


class FrameScanner:
    """Scans the bytes of one client, with messages of at most `message_bytes_max` in all frames.

    `finished`: messages that have passed whole. `passed_bytes`: of the payload of the message in
    progress; `message_bytes`: as its frames announced it. `is_too_big`: a message above the limit
    came; no data pass now.
    """

    def __init__(self, message_bytes_max: int) -> None:
        self._message_bytes_max = message_bytes_max
        self._left = 0
        self._is_data = False
        self._is_last = True
        self._is_dropped = False
        self._is_lost = False
        self.finished = 0
        self.passed_bytes = 0
        self.message_bytes = 0
        self.is_too_big = False

    @property
    def missing_bytes(self) -> int:
        """The least bytes until the next action; 1 or more."""
        return max(self._left, 1)

    def whole(self, data: bytes, at: int, bytes_max: int) -> Whole | None:
        """The message at a place in `data`, where the last run ended; `skip` takes it.

        None for anything but a text message of one frame and at most `bytes_max`.
        """
        is_amid = self._left or not self._is_last or self._is_lost or self.is_too_big
        if is_amid or len(data) < at + 2 or data[at] != _WHOLE_TEXT or not data[at + 1] & _MASKED:
            return None
        start, size = _payload_at(data, at)
        if start > len(data) or size > min(bytes_max, self._message_bytes_max):
            return None
        if start - at != _payload_start(size):
            return None
        return Whole(data[start - _MASK_BYTES : start], start, start + size)

    def skip(self) -> None:
        """Count a whole message, whose bytes are not scanned."""
        self.finished += 1

    def run(self, data: bytes, at: int, cost_max: float) -> Run:
        """Scan from `at`, where the last run ended, for at most `cost_max` (1 or more) messages."""
        start, end, cost = at, len(data), 0.0
        if self._is_lost:
            return Run(end, True, cost)
        if self._left:
            at = self._walk(at, end)
            if self._left or self._is_dropped:
                return Run(at, not self._is_dropped, cost)
        while at + 2 <= end:
            first, second = data[at], data[at + 1]
            body, size = _payload_at(data, at)
            if not _is_frame(first, second, size):
                self._is_lost = True
                return Run(end, True, cost)
            if body > end:
                break
            is_counted = first & (_FIN | _CONTROL) or size < FRAGMENT_BYTES_MIN
            frame_cost = 1.0 if is_counted else FRAGMENT_COST
            if cost + frame_cost > cost_max:
                break
            is_dropped = not first & _CONTROL and (
                self.is_too_big or self.message_bytes + size > self._message_bytes_max
            )
            if is_dropped and at > start:
                break
            self.is_too_big = self.is_too_big or is_dropped
            cost += frame_cost
            at = self._begin(first, size, is_dropped=is_dropped, body=body, end=end)
            if is_dropped:
                return Run(at, False, cost)
        return Run(at, True, cost)

    def _begin(self, first: int, size: int, *, is_dropped: bool, body: int, end: int) -> int:
        self._left = size
        self._is_data = not first & _CONTROL
        self._is_dropped = is_dropped
        if self._is_data:
            self._is_last = bool(first & _FIN)
            self.message_bytes += size
        return self._walk(body, end)

    def _walk(self, at: int, end: int) -> int:
        """Go on within a frame, and count a message that ends in it."""
        size = min(self._left, end - at)
        self._left -= size
        if self._is_data and not self._is_dropped:
            self.passed_bytes += size
            if self._is_last and not self._left:
                self.finished += 1
                self.passed_bytes = 0
                self.message_bytes = 0
        return at + size


def _payload_at(data: bytes, at: int) -> tuple[int, int]:
    """Where the payload of a masked frame begins, and its size, if its header has come whole."""
    start, size = at + 2, data[at + 1] & _SIZE
    if size >= _TWO_BYTES:
        width = 2 if size == _TWO_BYTES else 8
        size = int.from_bytes(data[start : start + width], "big")
        start += width
    return start + _MASK_BYTES, size


def payload_in(data: bytes, end: int) -> bytes:
    """Unmask the payload of the frame at the beginning of `data`, as far as `end`."""
    start, _ = _payload_at(data, 0)
    return bytes(FastMasker(data[start - _MASK_BYTES : start]).process(data[start:end]))


def _payload_start(size: int) -> int:
    """Where the payload of a masked frame of that size begins: sizes have one form (5.2)."""
    width = 0 if size < _TWO_BYTES else 2 if size < 1 << 16 else 8
    return 2 + width + _MASK_BYTES


def _is_frame(first: int, second: int, size: int) -> bool:
    """Whether it is a valid header of a client's frame; `size` counts only if it has come whole."""
    if first & _RESERVED or first & _OPCODE not in _OPCODES or not second & _MASKED:
        return False
    return not first & _CONTROL or (first & _FIN != 0 and size <= CONTROL_BYTES_MAX)


def text_frames(texts: Iterable[str]) -> bytes:
    """Write text messages as a server sends them, a frame each.

    `UnicodeEncodeError`: a text is not Unicode.
    """
    parts: list[bytes] = []
    for text in texts:
        payload = text.encode()
        size = len(payload)
        if size < _TWO_BYTES:
            parts += (bytes((_WHOLE_TEXT, size)), payload)
        elif size < 1 << 16:
            parts += (bytes((_WHOLE_TEXT, _TWO_BYTES)), size.to_bytes(2, "big"), payload)
        else:
            parts += (bytes((_WHOLE_TEXT, _EIGHT_BYTES)), size.to_bytes(8, "big"), payload)
    return b"".join(parts)


# -- the decoder for wsproto -----------------------------------------------------------------------


def tune(connection: Connection) -> ClientFrames:
    """Give a server's connection our decoder, before it has read a frame."""
    decoder = connection._proto._frame_decoder = ClientFrames(client=False)
    return decoder


class FastMasker:
    """The mask of RFC 6455, 5.3, eight bytes at a time, over a payload in pieces."""

    def __init__(self, masking_key: bytes | bytearray) -> None:
        self._key = bytes(masking_key)

    def process(self, data: bytes | bytearray | memoryview) -> bytearray:
        """Mask or unmask the next piece; in place, if it is a `bytearray`."""
        masked = data if isinstance(data, bytearray) else bytearray(data)
        words = len(masked) // 8
        if words:
            view = np.frombuffer(masked, dtype=np.uint64, count=words)
            np.bitwise_xor(view, np.frombuffer(self._key * 2, dtype=np.uint64), out=view)
        for i in range(words * 8, len(masked)):
            masked[i] ^= self._key[i % 4]
        turn = len(masked) % 4
        self._key = self._key[turn:] + self._key[:turn]
        return masked


class ClientFrames(FrameDecoder):
    """Unmasks with `FastMasker`, checks text, and gives a message's pieces once all are here.

    `pieces`: those of the message in progress; whoever ends the connection clears them.
    """

    def __init__(self, *, client: bool) -> None:
        super().__init__(client)
        self.pieces = deque[bytes]()
        self._opcode: Opcode | None = None
        self._text: IncrementalDecoder | None = None
        self._is_whole = False

    def parse_header(self) -> bool:
        """Read a frame's header, once it is complete."""
        is_whole = super().parse_header()
        if is_whole and isinstance(self.masker, XorMaskerSimple):
            self.masker = FastMasker(self.masker.process(bytearray(4)))  # type: ignore[assignment]
        return is_whole

    def process_buffer(self) -> Frame | None:
        """Return a control frame, or a piece of a whole message, or None; `ParseFailed`."""
        while not self._is_whole:
            frame = super().process_buffer()
            if frame is None or frame.opcode.iscontrol():
                return frame
            self._hold(frame)
        opcode, self._opcode = self._opcode or Opcode.CONTINUATION, None
        payload = self.pieces.popleft()
        self._is_whole = bool(self.pieces)
        if self._text is not None and not payload.isascii():
            payload = payload.decode("latin-1").encode()
        return Frame(opcode, payload, frame_finished=True, message_finished=not self.pieces)

    def _hold(self, frame: Frame) -> None:
        """Check a piece of the message in progress, and keep it."""
        if (frame.opcode is Opcode.CONTINUATION) != (self._opcode is not None):
            raise ParseFailed(f"unexpected {frame.opcode!r}")
        if self._opcode is None:
            self._opcode = frame.opcode
            self._text = getincrementaldecoder("utf-8")() if frame.opcode is Opcode.TEXT else None
        assert isinstance(frame.payload, bytes)
        self._is_whole = frame.frame_finished and bool(frame.message_finished)
        if self._text is not None:
            try:
                self._text.decode(frame.payload, self._is_whole)
            except UnicodeDecodeError as error:
                why = CloseReason.INVALID_FRAME_PAYLOAD_DATA
                raise ParseFailed(str(error), why) from None
        self.pieces.append(frame.payload)


def message_of(joined: str | bytes) -> str | bytes | Utf8Text:
    """The message of `ClientFrames`' joined pieces: `str`, UTF-8 if large, or binary."""
    if isinstance(joined, bytes) or joined.isascii():
        return joined
    data = joined.encode("latin-1")
    return Utf8Text(data) if len(data) >= TEXT_BYTES_MIN else data.decode()
