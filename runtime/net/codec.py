"""Faster decoders of wsproto for one connection: unmasking, and text that is not ASCII.

- `tune` replaces the two decoders of a connection's codec. A test checks the private names:
  `Connection._proto`, its `_frame_decoder` and `_message_decoder`, and the `_masking_key` of
  `FrameDecoder.masker`.
- Unmasking works on eight bytes at a time.
- wsproto checks UTF-8 piece by piece, and trio-websocket joins the decoded pieces; one emoji would
  widen the whole string. So a piece that is not ASCII is passed on with a character for each byte
  (Latin-1), and `message_of` decodes the joined message.
"""

from __future__ import annotations

import numpy as np
from wsproto.connection import Connection
from wsproto.frame_protocol import Frame, FrameDecoder, MessageDecoder, XorMaskerSimple

from protocol.values.utf8 import TEXT_BYTES_MIN, Utf8Text


def tune(connection: Connection) -> None:
    """Give a server's connection our decoders, before it has read a frame."""
    codec = connection._proto
    before = codec._frame_decoder
    codec._frame_decoder = FastFrameDecoder(before.client, before.extensions)
    codec._frame_decoder.buffer = before.buffer
    codec._message_decoder = BytewiseDecoder()


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


class FastFrameDecoder(FrameDecoder):
    """Unmasks with `FastMasker`."""

    def parse_header(self) -> bool:
        """Read a frame's header, once it is complete."""
        is_whole = super().parse_header()
        if is_whole and isinstance(self.masker, XorMaskerSimple):
            self.masker = FastMasker(self.masker._masking_key)  # type: ignore[assignment]
        return is_whole


class BytewiseDecoder(MessageDecoder):
    """Checks text and passes it on with a character for each byte."""

    def process_frame(self, frame: Frame) -> Frame:
        """Check a piece of a message; raises `ParseFailed` if it is not UTF-8 or no piece."""
        checked = super().process_frame(frame)
        assert isinstance(frame.payload, bytes)
        if not isinstance(checked.payload, str) or frame.payload.isascii():
            return checked
        return checked._replace(payload=frame.payload.decode("latin-1"))


def message_of(joined: str | bytes) -> str | bytes | Utf8Text:
    """The message of `BytewiseDecoder`'s joined pieces: `str`, UTF-8 if large, or binary."""
    if isinstance(joined, bytes) or joined.isascii():
        return joined
    data = joined.encode("latin-1")
    return Utf8Text(data) if len(data) >= TEXT_BYTES_MIN else data.decode()
