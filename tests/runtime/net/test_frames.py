"""Frame boundaries and the decoder, against the codec that they stand for."""

from __future__ import annotations

import struct
import tracemalloc
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from wsproto.connection import SERVER, Connection
from wsproto.events import BytesMessage, CloseConnection, Ping, Pong, TextMessage

from protocol.values.frames import TEXT_BYTES_MIN, Utf8Text
from runtime.net.limits import FRAGMENT_BYTES_MIN, FRAGMENT_COST
from runtime.net.websocket import FrameScanner, message_of, text_frames, tune
from tests.network.transport import CLOSE, CONTINUATION, PING, PONG, TEXT, raw_frame

BINARY = 0x2
LIMIT = 500
HEAD_BYTES_MAX = 14
"""The longest header (RFC 6455, 5.2)."""


class Frame(NamedTuple):
    """A frame of a client."""

    opcode: int
    payload: bytes
    fin: bool

    @property
    def data(self) -> bytes:
        return raw_frame(self.opcode, self.payload, fin=self.fin)


@st.composite
def messages(draw: st.DrawFn) -> list[Frame]:
    """One message in fragments of any size, with control frames between."""
    sizes = draw(
        st.lists(st.sampled_from([0, 1, 7, 125, 126, 300, 499, 500]), min_size=1, max_size=4)
    )
    frames = []
    for i, size in enumerate(sizes):
        opcode = CONTINUATION if i else draw(st.sampled_from([TEXT, BINARY]))
        frames.append(Frame(opcode, b"x" * size, i == len(sizes) - 1))
        control = draw(st.sampled_from([None, None, PING, PONG]))
        if control is not None:
            frames.append(Frame(control, b"p" * draw(st.sampled_from([0, 5, 125])), True))
    return frames


streams = st.lists(messages(), max_size=5).map(lambda found: [it for one in found for it in one])


def walk(data: bytes, sizes: list[int], scanner: FrameScanner, cost_max: float = 1e9) -> bytes:
    """Feed `data` in pieces as `Intake` does, and return what passed."""
    passed, rest, at = b"", b"", 0
    for size in [*sizes, len(data)]:
        rest, at = rest + data[at : at + size], at + size
        while rest:
            end, passes, cost = scanner.run(rest, 0, cost_max)
            assert cost <= cost_max
            passed += rest[:end] if passes else b""
            rest = rest[end:]
            if not end:
                assert len(rest) < HEAD_BYTES_MAX
                break
    return passed


def decoded(data: bytes) -> tuple[list[int], list[type]]:
    """What wsproto makes of it: the sizes of whole messages, and the control frames."""
    connection = Connection(SERVER)
    connection.receive_data(data)
    whole, controls, size = [], [], 0
    for event in connection.events():
        if isinstance(event, TextMessage | BytesMessage):
            size += len(event.data)
            if event.message_finished:
                whole.append(size)
                size = 0
        else:
            controls.append(type(event))
    return whole, controls


def sizes_of(frames: list[Frame]) -> list[int]:
    """The payloads of the messages."""
    sizes, size = [], 0
    for frame in frames:
        if frame.opcode < CLOSE:
            size += len(frame.payload)
            if frame.fin:
                sizes.append(size)
                size = 0
    return sizes


@given(streams, st.lists(st.integers(1, 400)), st.sampled_from([1.0, 1.5, 3.0, 1e9]))
def test_what_keeps_to_the_limit_passes_as_it_came(
    frames: list[Frame], sizes: list[int], cost_max: float
) -> None:
    """A message would be damaged by where the network, or its rate, happened to cut it."""
    data = b"".join(frame.data for frame in frames)
    scanner = FrameScanner(10 * LIMIT)
    assert walk(data, sizes, scanner, cost_max) == data
    assert scanner.finished == len(sizes_of(frames))
    assert not scanner.is_too_big


@given(streams, st.lists(st.integers(1, 400)))
def test_a_message_above_the_limit_never_reaches_the_codec_and_controls_do(
    frames: list[Frame], sizes: list[int]
) -> None:
    """A huge message would be held in memory, or the close after it be taken for garbage."""
    scanner = FrameScanner(LIMIT)
    closing = [*frames, Frame(CLOSE, b"\x03\xe8", True)]
    passed = walk(b"".join(frame.data for frame in closing), sizes, scanner)
    expected = []
    for size in sizes_of(frames):
        if size > LIMIT:
            break
        expected.append(size)
    whole, controls = decoded(passed)
    assert whole == expected
    assert scanner.finished == len(expected)
    assert scanner.is_too_big == (len(expected) < len(sizes_of(frames)))
    kinds = {PING: Ping, PONG: Pong}
    wanted = [kinds[frame.opcode] for frame in frames if frame.opcode in kinds]
    assert controls == [*wanted, CloseConnection]


@given(streams, st.data())
def test_what_is_missing_is_missing(frames: list[Frame], data: st.DataObject) -> None:
    """A reader that waits for more than comes would hear the end of a message never."""
    for frame in frames:
        scanner = FrameScanner(10 * LIMIT)
        cut = data.draw(st.integers(0, len(frame.data)))
        rest = frame.data[scanner.run(frame.data[:cut], 0, 1e9).end :]
        header_cut = len(rest) == len(frame.data)
        assert scanner.missing_bytes == (1 if header_cut else max(len(rest), 1))


@given(streams)
def test_a_fragment_is_a_part_of_a_message(frames: list[Frame]) -> None:
    """A browser that fragments would be slowed down; one that floods with fragments would not."""
    data = b"".join(frame.data for frame in frames)
    cost = sum(
        FRAGMENT_COST if not frame.fin and len(frame.payload) >= FRAGMENT_BYTES_MIN else 1.0
        for frame in frames
    )
    assert FrameScanner(10 * LIMIT).run(data, 0, 1e9).cost == pytest.approx(cost)


@pytest.mark.parametrize(("size", "cost"), [(0, 5.0), (FRAGMENT_BYTES_MIN, 1 + 4 * FRAGMENT_COST)])
def test_a_small_fragment_costs_as_much_as_a_message(size: int, cost: float) -> None:
    """Fragments of no bytes stopped the event loop: each cost an eighth of what it took."""
    frames = [Frame(CONTINUATION if i else TEXT, b"x" * size, i == 4) for i in range(5)]
    data = b"".join(frame.data for frame in frames)
    assert FrameScanner(1 << 20).run(data, 0, 1e9).cost == cost


def test_the_size_is_known_before_the_payload_comes() -> None:
    """A frame of 100 MB would have to be received before it is refused."""
    scanner = FrameScanner(LIMIT)
    head = raw_frame(TEXT, b"x" * (LIMIT + 1))[: -LIMIT - 1]
    assert walk(head, [], scanner) == b""
    assert scanner.is_too_big


def test_a_size_of_63_bits_is_only_a_number() -> None:
    """One header could make the server ask for all its memory."""
    scanner = FrameScanner(LIMIT)
    assert walk(b"\x81\xff" + b"\x7f" + b"\xff" * 7 + b"mask" + b"x" * 50, [], scanner) == b""
    assert scanner.is_too_big


@given(st.binary(max_size=200), st.lists(st.integers(1, 50)))
def test_bytes_made_by_chance_are_walked_over(data: bytes, sizes: list[int]) -> None:
    """Some bytes that nobody thought of would raise in the reader, or be kept for ever."""
    assert data.startswith(walk(data, sizes, FrameScanner(1 << 62))[: len(data)])


@pytest.mark.parametrize(
    "data", [b"\x81\x05Hello", b"\xc1\x80abcd", b"\x83\x80abcd", b"\x09\x80abcd"]
)
def test_what_is_no_frame_is_left_to_the_codec(data: bytes) -> None:
    """The client would wait for an answer to what we do not even show to the codec."""
    assert walk(data + b"more of it", [3], FrameScanner(LIMIT)) == data + b"more of it"


PIECE_BYTES = 262_144

cuts = st.lists(st.integers(1, 9), max_size=8)


def received(opcode: int, pieces: list[bytes], *, bytewise: bool) -> object:
    """Let a message come in fragments, each in its own read, and join it as trio-websocket does.

    Returns:
        The message, or the close that answers what is none.
    """
    connection = Connection(SERVER)
    if bytewise:
        tune(connection)
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
        tune(connection)
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
