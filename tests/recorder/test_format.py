"""Block headers, framing and stuffing: what is packed is unpacked, anything else is refused."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from recorder.format.format import (
    CHAIN_START,
    FORMAT_VERSIONS,
    HEADER_BYTES,
    MARK,
    PAYLOAD_BYTES_MAX,
    BlockHeader,
    FormatError,
    chain_of,
    frame_record,
    pack_header,
    split_records,
    stuff,
    unpack_header,
    unstuff,
)

HEADERS = st.builds(
    BlockHeader,
    first_seq=st.integers(0, 2**62),
    mono_ns=st.integers(0, 2**63 - 1),
    n_records=st.integers(2, 1000),
    compressed_len=st.integers(1, 2**20),
    uncompressed_len=st.integers(8000, 2**20),
    payload_crc=st.integers(0, 2**32 - 1),
    chain=st.binary(min_size=16, max_size=16),
    has_head_copy=st.booleans(),
    is_stuffed=st.booleans(),
    version=st.sampled_from(FORMAT_VERSIONS),
)
SAMPLE = BlockHeader(
    first_seq=7,
    mono_ns=8,
    n_records=9,
    compressed_len=10,
    uncompressed_len=1000,
    payload_crc=11,
    chain=bytes(range(16)),
)


@given(HEADERS)
def test_header_round_trips(header: BlockHeader) -> None:
    """A header that reads back otherwise loses its block."""
    packed = pack_header(header)
    assert len(packed) == HEADER_BYTES
    assert unpack_header(packed) == header


def test_header_bytes_are_those_of_the_document() -> None:
    """Logs written by one release must read in the next: the layout is fixed."""
    fields = struct.pack("<II4sBBHQQIIII", 0x184D2A53, 60, b"ANTL", 1, 0, 0, 7, 8, 9, 10, 1000, 11)
    head = fields + bytes(range(16))
    assert pack_header(SAMPLE) == head + struct.pack("<I", zlib.crc32(head))


def test_every_flipped_bit_of_a_header_is_seen() -> None:
    """A flipped length or seq would put records where they were not."""
    packed = pack_header(SAMPLE)
    for bit in range(8 * len(packed)):
        bad = bytearray(packed)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            unpack_header(bytes(bad))


@pytest.mark.parametrize(
    ("offset", "layout", "value"),
    [
        (12, "<B", 0),
        (12, "<B", 3),
        (13, "<B", 4),
        (14, "<H", 1),
        (16, "<Q", 2**63),
        (32, "<I", 0),
        (32, "<I", 126),
        (36, "<I", 0),
        (36, "<I", 2**32 - 1),
        (40, "<I", PAYLOAD_BYTES_MAX + 1),
    ],
)
def test_limits_hold_even_under_a_sound_crc(offset: int, layout: str, value: int) -> None:
    """A forged header must not make a reader allocate gigabytes or read another version wrong."""
    head = bytearray(pack_header(SAMPLE)[:-4])
    struct.pack_into(layout, head, offset, value)
    with pytest.raises(FormatError):
        unpack_header(bytes(head) + struct.pack("<I", zlib.crc32(head)))


@given(st.binary(max_size=200))
@example(MARK + bytes(HEADER_BYTES - len(MARK)))
def test_garbage_is_no_header(data: bytes) -> None:
    """Garbage must be refused as damage, not crash a reader."""
    with pytest.raises(FormatError):
        unpack_header(data)


def test_chain_depends_on_history_header_and_bytes() -> None:
    """A block taken from another log, or put in another place, must not fit the chain."""
    base = chain_of(CHAIN_START, SAMPLE, b"x")
    other = BlockHeader(
        first_seq=8, mono_ns=8, n_records=9, compressed_len=10, uncompressed_len=99, payload_crc=1
    )
    chains = {base, chain_of(base, SAMPLE, b"x"), chain_of(CHAIN_START, SAMPLE, b"y")}
    assert len({*chains, chain_of(CHAIN_START, other, b"x")}) == 4


@given(st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=20)), max_size=5))
def test_records_round_trip_through_framing(parts: list[tuple[bytes, bytes]]) -> None:
    """Framing that loses count would mix one record's blobs into the next."""
    payload = b"".join(frame_record(head, len(area)) + area for head, area in parts)
    found = [(header, bytes(area)) for header, area in split_records(payload, len(parts))]
    assert found == parts


@given(st.binary(max_size=60), st.integers(0, 5))
def test_split_refuses_what_does_not_add_up(payload: bytes, count: int) -> None:
    """Any payload either splits exactly or is refused, with one kind of error."""
    try:
        parts = list(split_records(payload, count))
    except FormatError:
        return
    assert b"".join(frame_record(head, len(area)) + area for head, area in parts) == payload


PLANTED = st.lists(
    st.one_of(
        st.sampled_from([MARK, MARK[:-1], b"\0", b"L", MARK[:5], MARK[5:]]), st.binary(max_size=3)
    )
).map(b"".join)


@given(PLANTED)
@example(MARK[:-1] + b"\0L")
def test_stuffing_is_exact_and_leaves_no_mark(payload: bytes) -> None:
    """A client that sends a block inside its audio must not get it read as one of ours."""
    stuffed = stuff(payload)
    assert MARK not in stuffed
    assert unstuff(stuffed) == payload
