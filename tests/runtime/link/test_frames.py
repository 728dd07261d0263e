"""Frames: what goes in comes out, however it is split, and what is no frame is refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.link import messages
from runtime.link.messages import URGENT, Inbox, LinkError, Outbox

LAST = 1 << 31
STREAMS = st.integers(0, 5)
SIZES = st.one_of(st.integers(1, 40), st.sampled_from([64 << 10, (64 << 10) + 1, 200_000]))
FRAMES = st.lists(st.tuples(STREAMS, SIZES), max_size=12)


def body(number: int, size: int) -> bytes:
    """A frame that is told from all others of a test."""
    return (number.to_bytes(2, "big") * (size // 2 + 1))[:size]


def drain(outbox: Outbox) -> bytes:
    taken = []
    while piece := outbox.take():
        taken.append(b"".join(piece))
    return b"".join(taken)


def of_stream(found: list[tuple[int, bytes]], stream: int) -> list[bytes]:
    return [frame for number, frame in found if number == stream]


@given(FRAMES, st.lists(st.integers(1, 100_000), min_size=1, max_size=20))
def test_frames_survive_any_split(given_: list[tuple[int, int]], cuts: list[int]) -> None:
    """Each stream keeps its order and its bytes."""
    outbox, inbox = Outbox(), Inbox()
    put = [(stream, body(number, size)) for number, (stream, size) in enumerate(given_)]
    for stream, frame in put:
        outbox.put(stream, [frame[:7], b"", frame[7:]])
    assert outbox.bytes == sum(len(frame) for _, frame in put)
    sent, found, at, turn = drain(outbox), [], 0, 0
    while at < len(sent):
        step = cuts[turn % len(cuts)]
        found += [(number, bytes(frame)) for number, frame in inbox.feed(sent[at : at + step])]
        at, turn = at + step, turn + 1
    assert outbox.bytes == 0
    assert len(found) == len(put)
    for stream in range(6):
        assert of_stream(found, stream) == of_stream(put, stream)


def test_urgent_frames_overtake_a_large_one() -> None:
    """An interrupt would wait for a conversation of 100 MB."""
    outbox = Outbox()
    outbox.put(1, [bytes(1_000_000)])
    first = outbox.take()
    outbox.put(URGENT, [b"cut"])
    second = outbox.take()
    assert [bytes(first[0][:4]), bytes(second[0][:4])] == [b"\x01\0\0\0", b"\0\0\0\0"]


def test_streams_take_turns() -> None:
    """A unit would wait for another session's pictures."""
    outbox, inbox = Outbox(), Inbox()
    outbox.put(1, [bytes(1_000_000)])
    outbox.put(2, [b"unit"])
    found = [stream for stream, _ in inbox.feed(drain(outbox))]
    assert found == [2, 1]


def test_an_outbox_is_bounded() -> None:
    """A peer that reads nothing would fill the memory."""
    outbox = Outbox(100)
    outbox.put(1, [bytes(90)])
    with pytest.raises(LinkError, match="90 bytes wait for it, at most 100"):
        outbox.put(2, [bytes(11)])
    drain(outbox)
    outbox.put(2, [bytes(101)])


@given(st.binary(max_size=200))
def test_garbage_is_frames_or_an_error(data: bytes) -> None:
    """It would raise what no reader expects, or take memory that it did not send."""
    inbox = Inbox(1000)
    try:
        found = list(inbox.feed(data))
    except LinkError:
        return
    assert sum(len(frame) + 8 for _, frame in found) <= len(data)


@pytest.mark.parametrize("length", [0, LAST, messages.PIECE_BYTES_MAX + 1, LAST - 1])
def test_a_piece_of_a_wrong_size_is_refused(length: int) -> None:
    """Its length would be memory."""
    with pytest.raises(LinkError, match="a piece of"):
        list(Inbox().feed(struct.pack("<II", 3, length)))


def test_a_frame_that_grows_too_large_is_refused() -> None:
    """Pieces would add up without end."""
    inbox = Inbox(1000)
    list(inbox.feed(struct.pack("<II", 3, 600) + bytes(600)))
    with pytest.raises(LinkError, match="a frame of more than 1000 bytes"):
        list(inbox.feed(struct.pack("<II", 3, 600)))


def test_too_many_frames_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream would hold a frame that never ends."""
    monkeypatch.setattr(messages, "PARTIAL_FRAMES_MAX", 3)
    inbox = Inbox()
    for stream in range(3):
        list(inbox.feed(struct.pack("<II", stream, 1) + b"x"))
    with pytest.raises(LinkError, match="4 frames of 4 bytes have begun"):
        list(inbox.feed(struct.pack("<II", 3, 1)))


def test_too_many_bytes_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many half frames would be more than any frame."""
    monkeypatch.setattr(messages, "PARTIAL_BYTES_MAX", 1000)
    inbox = Inbox()
    list(inbox.feed(struct.pack("<II", 1, 600) + bytes(600)))
    with pytest.raises(LinkError, match="2 frames of 1200 bytes have begun"):
        list(inbox.feed(struct.pack("<II", 2, 600)))
