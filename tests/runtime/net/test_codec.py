"""Text that is kept as bytes, against wsproto's own way with it."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from wsproto.connection import SERVER, Connection
from wsproto.events import BytesMessage, CloseConnection, TextMessage

from protocol.values.utf8 import TEXT_BYTES_MIN, Utf8Text
from runtime.net.codec import BytewiseDecoder, message_of
from runtime.net.frames import text_frames
from tests.network.transport import CONTINUATION, TEXT, raw_frame

BINARY = 0x2
PIECE_BYTES = 262_144

cuts = st.lists(st.integers(1, 9), max_size=8)


def received(opcode: int, pieces: list[bytes], *, bytewise: bool) -> object:
    """Let a message come in fragments, each in its own read, and join it as trio-websocket does.

    Returns:
        The message, or the close that answers what is none.
    """
    connection = Connection(SERVER)
    if bytewise:
        connection._proto._message_decoder = BytewiseDecoder()
    parts: list[str | bytes] = []
    for i, piece in enumerate(pieces):
        fin = i == len(pieces) - 1
        connection.receive_data(raw_frame(CONTINUATION if i else opcode, piece, fin=fin))
        for event in connection.events():
            if isinstance(event, CloseConnection):
                return event
            assert isinstance(event, TextMessage | BytesMessage), event
            parts.append(event.data)
    empty = parts[0][:0]
    joined = empty.join(parts)  # type: ignore[arg-type]
    return message_of(joined) if bytewise else joined


def split(data: bytes, sizes: list[int]) -> list[bytes]:
    ends = [0]
    for size in sizes:
        ends.append(min(len(data), ends[-1] + size))
    return [data[a:b] for a, b in zip(ends, [*ends[1:], len(data)], strict=True)]


@given(st.text(), cuts)
@example("a\U0001f600b", [2, 1, 1])
def test_text_is_what_it_would_be(text: str, sizes: list[int]) -> None:
    """An accent that falls between two packets would end a session, or be mangled."""
    pieces = split(text.encode(), sizes)
    assert received(TEXT, pieces, bytewise=True) == text


@given(st.binary(), cuts)
@example(b"\xc3", [1])
@example(b"\xed\xa0\x80", [])
def test_what_is_no_utf8_is_refused_as_before(data: bytes, sizes: list[int]) -> None:
    """Broken text would reach a session, where nothing looks for it any more (RFC 6455, 8.1)."""
    pieces = split(data, sizes)
    assert received(TEXT, pieces, bytewise=True) == received(TEXT, pieces, bytewise=False)
    assert received(BINARY, pieces, bytewise=True) == data


@pytest.mark.parametrize("size", [TEXT_BYTES_MIN - 1, TEXT_BYTES_MIN])
def test_only_large_text_that_is_not_ascii_stays_bytes(size: int) -> None:
    """Every session would meet a kind of message that only hostile ones need."""
    data = b"x" * (size - 4) + "\U0001f600".encode()
    is_large = size >= TEXT_BYTES_MIN
    got = received(TEXT, [data], bytewise=True)
    assert got == (Utf8Text(data) if is_large else data.decode())
    assert received(TEXT, [b"x" * size], bytewise=True) == "x" * size


def test_emojis_cost_no_more_memory_than_letters() -> None:
    """One client could take four gigabytes of the server with a dozen messages that it allows."""

    def peak(piece: bytes) -> int:
        connection = Connection(SERVER)
        connection._proto._message_decoder = BytewiseDecoder()
        parts = []
        tracemalloc.start()
        for i in range(32):
            first = (i == 31) << 7 | (CONTINUATION if i else TEXT)
            connection.receive_data(struct.pack("!BBQI", first, 0xFF, len(piece), 0) + piece)
            parts += [event.data for event in connection.events()]  # type: ignore[union-attr]
        got = message_of("".join(parts))
        highest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(got) == 32 * len(piece)
        return highest

    letters = b"x" * PIECE_BYTES
    emoji = "\U0001f600".encode() + letters[4:]
    assert peak(emoji) < 2 * peak(letters)


@given(st.lists(st.text()))
@example(["x" * size for size in (0, 125, 126, 65_535, 65_536)])
@example(["\U0001f600" * 16_384])
def test_text_is_sent_as_wsproto_sends_it(texts: list[str]) -> None:
    """A client would read another message, or close with an error."""
    codec = Connection(SERVER)
    assert text_frames(texts) == b"".join(codec.send(TextMessage(data=text)) for text in texts)
