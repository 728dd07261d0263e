"""Damage: every bit and every byte of a log, and nothing wrong is ever accepted."""

from __future__ import annotations

import os
import random
import subprocess
import tracemalloc
import zlib
from pathlib import Path
from shutil import which

import attrs
import numpy as np
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from recorder.format.encoding import RecordEncoder
from recorder.format.format import (
    HEADER_BYTES,
    MARK,
    LogDamaged,
    Record,
    Unreadable,
    chain_of,
    frame_record,
    pack_header,
    unpack_header,
)
from recorder.read.reader import KEPT_BYTES_MAX, LogReader, read
from recorder.read.scan import Damage
from recorder.repair import verify
from recorder.write.logfile import Compressor, LogFile
from tests.recorder.test_samples import (
    PATH,
    SESSION,
    MemoryDisk,
    block_offsets,
    make_log,
    pcm,
    record,
    sample_steps,
)

LOG = make_log(sample_steps(samples=80))
OFFSETS = block_offsets(LOG)
HEAD = Record(kind="session", seq=0, at_ns=0, fields=SESSION)


def items(log: bytes) -> tuple[list[Record], list[Damage]]:
    with LogReader(log) as reader:
        found = list(reader)
    records = [item for item in found if isinstance(item, Record)]
    return records, [item for item in found if isinstance(item, Damage)]


RECORDS = items(LOG)[0]
BLOCK_OF = {0: 0, 1: 1, 2: 1, 3: 2, 4: 2, 5: 3, 6: 3, 7: 4}
"""Record 5 holds a blob of block 2 again: a block stands without the others."""


def assert_only_block_is_lost(log: bytes, block: int) -> None:
    """Check that all records of other blocks are read, and no other than were written."""
    records, damage = items(log)
    assert damage, "damage went unseen"
    kept = [item for item in RECORDS if BLOCK_OF[item.seq] != block]
    if block == 0:
        kept.insert(0, HEAD)
    assert records == kept


def test_what_is_written_is_read() -> None:
    """The whole point of a log."""
    assert RECORDS[0] == HEAD
    assert RECORDS[1:-1] == [item for step in sample_steps(samples=80) for item in step]
    assert RECORDS[-1].fields["reason"] == "closed"
    assert items(LOG)[1] == []


@pytest.mark.costly
@pytest.mark.parametrize("cut", range(len(OFFSETS) - 1))
def test_truncation_at_every_byte_keeps_whole_blocks(cut: int) -> None:
    """A killed server leaves such a file: all complete blocks must read, without any alarm."""
    expected = [item for item in RECORDS if BLOCK_OF[item.seq] < cut]
    for end in range(OFFSETS[cut], OFFSETS[cut + 1]):
        if cut == 0:
            with pytest.raises(Unreadable):
                LogReader(LOG[:end])
            assert verify(LOG[:end]).state == "unreadable"
            continue
        records, damage = items(LOG[:end])
        assert (records, damage) == (expected, [])
        report = verify(LOG[:end])
        assert (report.state, report.exit_code) == ("open", 0)
        assert report.tail_bytes == end - OFFSETS[cut]


@pytest.mark.costly
@pytest.mark.parametrize("block", range(len(OFFSETS) - 1))
def test_flipped_bits_lose_one_block(block: int) -> None:
    """One rotten bit must cost one block, be reported, and never read as something else.

    Each byte of the log with one of its bits, drawn by a fixed seed; all bits of the headers.
    """
    rng = random.Random(block)
    for at in range(OFFSETS[block], OFFSETS[block + 1]):
        in_header = at < OFFSETS[block] + HEADER_BYTES
        for bit in range(8) if in_header and block == 2 else [rng.randrange(8)]:
            bad = bytearray(LOG)
            bad[at] ^= 1 << bit
            assert_only_block_is_lost(bytes(bad), block)


def test_every_bit_of_a_tiny_log() -> None:
    """The same, with no bit left out."""
    log = make_log([[record("mark", 1, by="x")]], fin=False)
    second = block_offsets(log)[1]
    for bit in range(8 * len(log)):
        bad = bytearray(log)
        bad[bit // 8] ^= 1 << bit % 8
        records, damage = items(bytes(bad))
        assert damage
        kept = [HEAD, record("mark", 1, by="x")] if bit // 8 < second else [HEAD]
        assert records == kept
        assert verify(bytes(bad)).exit_code == 1


@pytest.mark.parametrize("block", range(1, 5))
def test_missing_block_is_reported(block: int) -> None:
    """A log with a piece cut out must not look whole."""
    log = LOG[: OFFSETS[block]] + LOG[OFFSETS[block + 1] :]
    if block == 4:
        assert [item.reason for item in items(log)[1]] == ["seek"]
        assert verify(LOG[: OFFSETS[block]]).state == "open"
        return
    assert_only_block_is_lost(log, block)
    assert {"gap", "chain"} <= {item.reason for item in items(log)[1]}


def test_missing_bytes_lose_one_block() -> None:
    """Bytes cut out of a block must not take the next block with them."""
    for start in range(OFFSETS[2], OFFSETS[3] - 10, 7):
        assert_only_block_is_lost(LOG[:start] + LOG[start + 10 :], 2)


def test_missing_bytes_near_the_end_are_no_open_log() -> None:
    """A block that seems to run past the end, with another after it, is damage and not a tail."""
    log = make_log([[record("rx", 1, frame=np.random.default_rng(0).bytes(2000))]])
    at = block_offsets(log)
    records, damage = items(log[: at[1] + 100] + log[at[2] :])
    assert [item.seq for item in records] == [0, 2]
    assert [item.reason for item in damage] == ["payload"]


def test_repeated_and_swapped_blocks_are_refused() -> None:
    """Replaying a block twice would feed a unit twice."""
    second = LOG[OFFSETS[1] : OFFSETS[2]]
    third = LOG[OFFSETS[2] : OFFSETS[3]]
    repeated = LOG[: OFFSETS[2]] + second + LOG[OFFSETS[2] :]
    records, damage = items(repeated)
    assert records == RECORDS
    assert [item.reason for item in damage] == ["order"]
    swapped = LOG[: OFFSETS[1]] + third + second + LOG[OFFSETS[3] :]
    records, damage = items(swapped)
    assert all(item in RECORDS for item in records)
    assert {"gap", "chain", "order"} <= {item.reason for item in damage}


def test_block_of_another_log_breaks_the_chain() -> None:
    """A sound block put in from elsewhere must be seen."""
    steps = sample_steps(samples=80)
    steps[0][1] = record("event", 2, name="Forged", frame=1)
    other = make_log(steps)
    at = block_offsets(other)
    forged = LOG[: OFFSETS[1]] + other[at[1] : at[2]] + LOG[OFFSETS[2] :]
    assert "chain" in {item.reason for item in items(forged)[1]}
    assert verify(forged).state == "damaged"


def test_both_session_records_lost_is_unreadable() -> None:
    """Without its session record no log can be replayed; guessing would be worse."""
    bad = bytearray(LOG)
    for offset in OFFSETS[:2]:
        bad[offset + HEADER_BYTES + 5] ^= 1
    with pytest.raises(Unreadable):
        LogReader(bytes(bad))
    assert verify(bytes(bad)).state == "unreadable"
    assert verify(bytes(bad)).exit_code == 2
    with LogReader(LOG) as sound, LogReader(bytes(bad[:20]) + LOG[20:]) as cured:
        assert (sound.head_source, cured.head_source) == ("first", "first")


def test_head_comes_from_the_second_block() -> None:
    """The session record is needed to read anything: it must survive the first block."""
    bad = bytearray(LOG)
    bad[HEADER_BYTES + 5] ^= 1
    with LogReader(bytes(bad)) as reader:
        assert (reader.head, reader.head_source) == (HEAD, "second")
        assert next(item for item in reader if isinstance(item, Record)) == HEAD
    assert verify(bytes(bad)).head_source == "second"


@given(st.binary(max_size=300))
@example(b"")
@example(MARK)
@example(MARK * 20)
def test_random_bytes_are_unreadable(data: bytes) -> None:
    """Any file at all may be given to `verify`; it must answer, not crash."""
    assert verify(data).state == "unreadable"


EDITS = st.lists(
    st.tuples(st.integers(0, len(LOG)), st.integers(0, 40), st.binary(max_size=40)), max_size=4
)


@given(EDITS)
def test_mutated_logs_give_only_written_records(edits: list[tuple[int, int, bytes]]) -> None:
    """Whatever happens to a file, each record that is read was written, and in order."""
    log = LOG
    for at, removed, added in edits:
        log = log[:at] + added + log[at + removed :]
    verify(log)
    try:
        records, _ = items(log)
    except Unreadable:
        return
    assert [item for item in RECORDS if item in records] == records


def test_block_inside_audio_is_never_taken_for_one_of_ours() -> None:
    """A client that sends blocks as media must not forge records where a header rots."""
    evil = make_log([[record("mark", 1, by="evil")], [record("mark", 4, by="evil")]], fin=False)
    media = np.random.default_rng(0).bytes(2000) + evil
    log = make_log([[record("rx", 1, frame=media)], [record("mark", 2, by="human")]])
    assert log.count(MARK) == 4
    assert items(log)[0][1].fields["frame"] == media
    at = block_offsets(log)[1]
    for byte in range(at, at + HEADER_BYTES):
        bad = bytearray(log)
        bad[byte] ^= 1
        assert [item.seq for item in items(bytes(bad))[0]] == [0, 2, 3]


def with_payload(payload: bytes, **changes: object) -> bytes:
    """Forge a sound block 1 for `LOG` around a payload."""
    compressed = zstandard.ZstdCompressor().compress(payload)
    sizes: dict[str, object] = {
        "compressed_len": len(compressed),
        "uncompressed_len": len(payload),
        "payload_crc": zlib.crc32(compressed),
    }
    header = unpack_header(LOG[OFFSETS[1] : OFFSETS[1] + HEADER_BYTES])
    header = attrs.evolve(header, **(sizes | changes))  # type: ignore[arg-type]
    before = unpack_header(LOG[:HEADER_BYTES]).chain
    header = attrs.evolve(header, chain=chain_of(before, header, compressed))
    return LOG[: OFFSETS[1]] + pack_header(header) + compressed


def test_lying_lengths_do_not_allocate() -> None:
    """A file of some bytes must not make a reader allocate what it claims to hold."""
    bomb = with_payload(bytes(64 << 20), uncompressed_len=1 << 16)
    tracemalloc.start()
    assert {item.reason for item in items(bomb)[1]} == {"payload"}
    _, allocated_bytes_max = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert allocated_bytes_max < 4 << 20
    raw = zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 100)
    header = unpack_header(with_payload(b"x" * 100)[OFFSETS[1] :][:HEADER_BYTES])
    header = attrs.evolve(header, compressed_len=len(raw), payload_crc=zlib.crc32(raw))
    unsized = LOG[: OFFSETS[1]] + pack_header(header) + raw
    assert {item.reason for item in items(unsized)[1]} == {"payload"}


@pytest.mark.parametrize(
    "payload", [bytes(24), b"\xff" * 100, frame_record(b"{}", 0) * 3, frame_record(b"", 0) * 4]
)
def test_sound_block_of_unsound_records_is_damage(payload: bytes) -> None:
    """A writer with a bug must not crash the reader or smuggle records in."""
    records, damage = items(with_payload(payload, n_records=3))
    assert records == [HEAD]
    assert {item.reason for item in damage} >= {"record"}


def test_record_in_another_place_is_refused() -> None:
    """A record under another `seq` would answer for one that it is not."""
    encoded = b"".join(RecordEncoder().encode(record("mark", 9)).pieces)
    records, damage = items(with_payload(encoded, n_records=1, has_head_copy=False))
    assert records == [HEAD]
    assert [(item.reason, item.first_seq) for item in damage] == [("record", 1)]


def test_read_stops_at_damage_unless_told_to_go_on(tmp_path: Path) -> None:
    """Replay over a hole would blame the model for it."""
    bad = bytearray(LOG)
    bad[OFFSETS[2] + HEADER_BYTES] ^= 1
    path = tmp_path / "a.session.zst"
    path.write_bytes(bad)
    found: list[Record] = []
    with pytest.raises(LogDamaged, match="payload"):
        found.extend(read(path))
    damage: list[Damage] = []
    assert [item.seq for item in read(path, on_damage=damage.append)] == [0, 1, 2, 5, 6, 7]
    assert [(item.reason, item.first_seq, item.records) for item in damage] == [("payload", 3, 2)]


def test_reading_goes_on_while_the_log_grows(tmp_path: Path) -> None:
    """Watching a live session must show each block once, and never half of one."""
    path = tmp_path / "a.session.zst"
    path.write_bytes(LOG[: OFFSETS[1]])
    seen: list[Record | Damage] = []
    with LogReader(path) as reader:
        for start in range(OFFSETS[1], len(LOG), 97):
            with path.open("ab") as file:
                file.write(LOG[start : start + 97])
            seen += list(reader)
    assert seen == RECORDS


def test_a_log_that_is_cut_while_it_is_read_ends_there(tmp_path: Path) -> None:
    """A request for it would be an error of the server's own."""
    path = tmp_path / "cut.session.zst"
    path.write_bytes(LOG)
    with LogReader(path) as reader:
        records = iter(reader)
        assert next(records) == RECORDS[0]
        os.truncate(path, OFFSETS[0] + 1)
        assert list(records) == []


def test_old_blobs_are_read_from_the_file_again() -> None:
    """A blob named long after must not be kept in memory meanwhile, nor be lost."""
    disk = MemoryDisk()
    file = LogFile(PATH, disk=disk, compressor=Compressor())
    file.create()
    blob = pcm(300)
    noise = np.random.default_rng(0)
    filler = KEPT_BYTES_MAX // 3
    steps = [
        [HEAD],
        [record("unit", 1, pcm=blob)],
        *([record("event", seq, data=noise.bytes(60), text="x" * filler)] for seq in range(2, 7)),
        [record("unit", 7, pcm=blob)],
    ]
    for step in steps:
        list(file.write(step))
    records, damage = items(disk.data())
    assert damage == []
    assert records[-1].fields["pcm"] == blob


def test_a_stock_zstd_decompresses_a_log(tmp_path: Path) -> None:
    """Users must be able to look into a recording without this program, years later."""
    decompressor = zstandard.ZstdDecompressor()
    with decompressor.stream_reader(LOG, read_across_frames=True) as stream:
        text = stream.read()
    assert text.count(b'"kind":"session"') == 2
    assert b'"kind":"fin"' in text
    if which("zstd"):
        path = tmp_path / "a.session.zst"
        path.write_bytes(LOG)
        done = subprocess.run(["zstd", "-dc", str(path)], capture_output=True, check=True)
        assert done.stdout == text


def test_verify_counts(tmp_path: Path) -> None:
    """An operator asks `verify` how far a session got."""
    path = tmp_path / "a.session.zst"
    path.write_bytes(LOG)
    report = verify(path)
    assert (report.state, report.exit_code, report.fin_ok) == ("finished", 0, True)
    assert (report.blocks, report.records, report.first_seq, report.last_seq) == (5, 8, 0, 7)
    assert (report.units, report.last_tx_ordinal) == (2, 0)


def test_wrong_fin_is_damage() -> None:
    """A `fin` that does not fit its log means that something before it is not what was written."""
    disk = MemoryDisk()
    file = LogFile(PATH, disk=disk, compressor=Compressor())
    file.create()
    for step in ([HEAD], [record("mark", 1)]):
        list(file.write(step))
    file._chain.last = bytes(16)
    list(file.write([record("fin", 2, reason="closed")]))
    assert verify(disk.data()).fin_ok is False
    assert verify(disk.data()).state == "damaged"
    assert {item.reason for item in items(LOG + LOG[OFFSETS[3] :])[1]} >= {"order"}


def test_block_after_fin_is_damage() -> None:
    """Nothing may be slipped in after the end."""
    disk = MemoryDisk()
    file = LogFile(PATH, disk=disk, compressor=Compressor())
    file.create()
    for step in ([HEAD], [record("fin", 1)], [record("mark", 2)]):
        list(file.write(step))
    records, damage = items(disk.data())
    assert [item.kind for item in records] == ["session", "fin"]
    assert [item.reason for item in damage] == ["fin"]
