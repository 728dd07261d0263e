"""A client's text, byte for byte: no `str` is made of a large message that is not ASCII.

wsproto checks that text is UTF-8 piece by piece, and trio-websocket joins what it makes of the
pieces; one emoji would widen the whole. So where a piece is not ASCII, what is passed on has a
character for each byte (Latin-1), and `message_of` makes of the joined message what it is.
"""

from __future__ import annotations

from wsproto.frame_protocol import Frame, MessageDecoder

from protocol.utf8 import TEXT_BYTES_MIN, Utf8Text


class BytewiseDecoder(MessageDecoder):
    """Checks text and passes it on with a character for each byte."""

    def process_frame(self, frame: Frame) -> Frame:
        """Check a piece of a message, and say what is to be passed on.

        Raises:
            ParseFailed: it is not UTF-8, or no piece of a message at all.
        """
        checked = super().process_frame(frame)
        assert isinstance(frame.payload, bytes)
        if not isinstance(checked.payload, str) or frame.payload.isascii():
            return checked
        return checked._replace(payload=frame.payload.decode("latin-1"))


def message_of(joined: str | bytes) -> str | bytes | Utf8Text:
    """Make a message of what `BytewiseDecoder` passed on.

    Args:
        joined: all its pieces.

    Returns:
        A text as `str`, but as UTF-8 where it is large and not ASCII; a binary message as it is.
    """
    if isinstance(joined, bytes) or joined.isascii():
        return joined
    data = joined.encode("latin-1")
    return Utf8Text(data) if len(data) >= TEXT_BYTES_MIN else data.decode()
