"""The seek table at a log's end: as zstd's seekable format has it, checked, and used to jump.

`parse` reads a table by the published bytes of the format, and shares nothing with the code.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final

import anyio
import attrs
import pytest
import zstandard

from recorder.format import format as seektable
from recorder.format.encoding import REMEMBERED_BYTES, BlobMemory, RecordEncoder
from recorder.format.format import HEADER_BYTES, BlockSizes, Record
from recorder.read.reader import LogReader
from recorder.read.scan import BytesSource, Damage, Scanner
from recorder.repair import verify
from recorder.storage.store import Store
from recorder.write.writer import Recorder, RecorderPolicy
from tests.golden.logs import record as record_scene
from tests.golden.scenes import DUPLEX_SCENES
from tests.recorder.test_listing import summary_of
from tests.recorder.test_samples import block_offsets, make_log, pcm, record, sample_steps

LOG: Final = make_log(sample_steps(samples=80))
TABLE_AT: Final = block_offsets(LOG)[-1]
BLOCKS: Final = 40


def long_log() -> bytes:
    """A log of many blocks, two records each; every second one holds a unit."""
    steps = []
    for block in range(BLOCKS):
        seq = 1 + 2 * block
        result = {"index": block // 2, "pcm": pcm(300, seed=block)}
        kind = record("unit", seq, result=result) if block % 2 else record("mark", seq)
        steps.append([kind, record("event", seq + 1, name=f"number {seq + 1}")])
    return make_log(steps)


LONG: Final = long_log()


def items(log: bytes) -> list[Record | Damage]:
    with LogReader(log) as reader:
        return list(reader)


ALL: Final = items(LONG)
LAST: Final = len(ALL) - 1


def parse(log: bytes) -> list[tuple[int, int]]:
    """Read the table at the end of a file: the lengths of each frame, compressed and not.

    By the seekable format, version 0.1.0: a skippable frame with magic 0x184D2A5E, in it an entry
    for each frame and a footer of nine bytes: how many, a descriptor, the magic 0x8F92EAB1.
    """
    frames, descriptor, magic = struct.unpack("<IBI", log[-9:])
    assert magic == 0x8F92EAB1
    assert descriptor >> 7 == 0, "no checksums, so entries are of eight bytes"
    assert descriptor & 0b0111_1100 == 0, "reserved bits are zero"
    size = frames * 8 + 9
    assert struct.unpack("<II", log[-size - 8 : -size]) == (0x184D2A5E, size)
    return list(struct.iter_unpack("<II", log[-size:-9]))  # type: ignore[arg-type]


def frames_of(log: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield each frame that the table names, and how long its content is."""
    at = 0
    for compressed, uncompressed in parse(log):
        yield log[at : at + compressed], uncompressed
        at += compressed
    assert at == len(log) - 8 - 8 * len(parse(log)) - 9, "the table starts where frames end"


# -- the bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("log", [LOG, LONG], ids=["short", "long"])
def test_a_reader_of_the_seekable_format_finds_every_frame(log: bytes) -> None:
    """Other tools would jump into the middle of something, and decompress rubbish."""
    content = b""
    for frame, length in frames_of(log):
        if frame.startswith(b"\x53\x2a\x4d\x18"):
            assert (len(frame), length) == (68, 0)
            continue
        piece = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
        assert len(piece) == length
        content += piece
    with zstandard.ZstdDecompressor().stream_reader(log, read_across_frames=True) as stream:
        assert stream.read() == content


def test_a_server_s_log_has_one(tmp_path: Path) -> None:
    """What the tests write has a table, and what a server writes has none."""
    path = record_scene(DUPLEX_SCENES["realtime-audio"], tmp_path)
    report = verify(path)
    assert (report.state, report.has_seek_table) == ("finished", True)
    assert len(list(frames_of(path.read_bytes()))) == 2 * report.blocks


def test_it_is_made_in_the_recorder_s_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session's task would stand still while the table of hours of it is made."""
    threads: list[str] = []
    make = BlockSizes.table

    def table(sizes: BlockSizes) -> bytes:
        threads.append(threading.current_thread().name)
        return make(sizes)

    monkeypatch.setattr(BlockSizes, "table", table)
    with Recorder(RecorderPolicy()) as recorder:
        log = recorder.open(tmp_path / "a.session.zst", {"seed": 1}, at_ns=0)
        log.append(record("mark", 1))
        anyio.run(partial(log.finish, {"reason": "client"}, at_ns=2000))
    assert len(threads) == 1
    assert threads[0] != threading.current_thread().name
    assert verify(tmp_path / "a.session.zst").has_seek_table


def test_a_log_of_too_many_blocks_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads a log of weeks would have to hold its table in memory."""
    monkeypatch.setattr(seektable, "BLOCKS_MAX", 4)
    log = make_log(sample_steps())
    report = verify(log)
    assert (report.state, report.blocks, report.has_seek_table) == ("finished", 5, False)


# -- what is wrong with one -----------------------------------------------------------------------


def test_a_log_cut_within_its_table_is_finished() -> None:
    """A full disk at the very end would make a whole session look damaged."""
    for end in range(TABLE_AT, len(LOG)):
        report = verify(LOG[:end])
        assert (report.state, report.has_seek_table) == ("finished", False)
        assert report.tail_bytes == end - TABLE_AT
        assert items(LOG[:end]) == items(LOG)


@pytest.mark.slow
def test_every_flipped_bit_of_it_is_seen() -> None:
    """A table that is wrong in one entry leads others astray, and `verify` says all is well."""
    for bit in range(8 * TABLE_AT, 8 * len(LOG)):
        bad = bytearray(LOG)
        bad[bit // 8] ^= 1 << bit % 8
        found = items(bytes(bad))
        assert [item for item in found if isinstance(item, Record)] == items(LOG)
        (damage,) = (item for item in found if isinstance(item, Damage))
        in_magic = bit // 8 < TABLE_AT + 4
        assert damage.reason == ("header" if in_magic else "seek")
        assert verify(bytes(bad)).state == "damaged"


def test_that_of_another_log_is_seen() -> None:
    """Two files put together wrongly would pass."""
    other = make_log(sample_steps(samples=90))
    forged = LOG[:TABLE_AT] + other[block_offsets(other)[-1] :]
    assert [item.reason for item in items(forged) if isinstance(item, Damage)] == ["seek"]


def test_damage_before_it_is_not_its_fault() -> None:
    """One rotten block would be reported twice."""
    bad = bytearray(LONG)
    bad[block_offsets(LONG)[7] + 80] ^= 1
    reasons = [item.reason for item in items(bytes(bad)) if isinstance(item, Damage)]
    assert reasons == ["payload"]


# -- jumping --------------------------------------------------------------------------------------


def without_table(log: bytes) -> bytes:
    return log[: block_offsets(log)[-1]]


def lying(log: bytes) -> bytes:
    """Give a log a table that adds up and leads nowhere."""
    at = block_offsets(log)
    lengths = [after - before - HEADER_BYTES for before, after in pairwise(at)]
    lengths[0], lengths[1] = lengths[0] - 1, lengths[1] + 1
    sizes = BlockSizes()
    for length in lengths:
        sizes.add(length, 1)
    return log[: at[-1]] + sizes.table()


JUMPS: Final = {"with a table": LONG, "without": without_table(LONG), "lying": lying(LONG)}


@pytest.mark.parametrize("log", JUMPS.values(), ids=JUMPS)
def test_reading_from_a_record_is_reading_all_and_skipping(log: bytes) -> None:
    """Who looks at the middle of a session would see another part of it, or miss a record."""
    expected = items(log)
    with LogReader(log) as reader:
        for seq in (*range(LAST + 1), 5, 0):
            found = [item for item in reader.at(seq) if isinstance(item, Record)]
            assert found == [it for it in expected if isinstance(it, Record) and it.seq >= seq]
        assert list(reader.at(LAST + 1)) == []
        assert reader.is_finished


def test_jumping_past_damage() -> None:
    """One rotten block would make all jumps behind it miss."""
    at = block_offsets(LONG)
    for spot in (at[9] + 20, at[9] + 80):
        bad = bytearray(LONG)
        bad[spot] ^= 1
        expected = [item for item in items(bytes(bad)) if isinstance(item, Record)]
        with LogReader(bytes(bad)) as reader:
            for seq in range(LAST + 1):
                found = [item for item in reader.at(seq) if isinstance(item, Record)]
                assert found == [item for item in expected if item.seq >= seq]


def test_blobs_that_begin_and_end_alike_are_all_remembered() -> None:
    """Of sounds between two silences only the last was known again, and the others stored twice."""
    memory = BlobMemory(REMEMBERED_BYTES)
    blobs = [bytes(50_000) + bytes([number]) * 50_000 + bytes(50_000) for number in range(3)]
    places = [(number, 0) for number in range(3)]
    assert [memory.find_or_keep(*it) for it in zip(blobs, places, strict=True)] == [None] * 3
    assert [memory.find_or_keep(blob, (9, 9)) for blob in blobs] == places


def test_blobs_of_earlier_blocks_are_found_after_a_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that names what an earlier one holds could not be read alone."""
    steps = [[record("mark", 1 + seq, sound=pcm(300, seed=seq % 3))] for seq in range(9)]
    apart = make_log(steps)
    memory = BlobMemory(REMEMBERED_BYTES)
    monkeypatch.setattr(RecordEncoder, "forget", lambda it: setattr(it, "_memory", memory))
    log = make_log(steps)
    assert len(log) < len(apart), "each sound is stored once"
    expected = items(log)
    with LogReader(log) as reader:
        for seq in range(len(expected)):
            assert list(reader.at(seq)) == expected[seq:]


def test_a_log_that_grows_is_followed_from_anywhere(tmp_path: Path) -> None:
    """Who joins a running session would be told of it from its start, or of nothing new."""
    at = block_offsets(LONG)
    path = tmp_path / "a.session.zst"
    path.write_bytes(LONG[: at[11]])
    with LogReader(path) as reader:
        seen = list(reader.at(18))
        for start in range(at[11], len(LONG), 3001):
            with path.open("ab") as file:
                file.write(LONG[start : start + 3001])
            seen += reader
    assert seen == ALL[18:]


@attrs.define
class Counted:
    """A source that counts what is read of it."""

    source: BytesSource
    read_bytes: int = 0

    def size(self) -> int:
        return self.source.size()

    def read(self, offset: int, count: int) -> bytes:
        data = self.source.read(offset, count)
        self.read_bytes += len(data)
        return data

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("has_table", [True, False])
def test_a_jump_reads_little(has_table: bool) -> None:
    """To look at the last second of an hour all of it would be read."""
    units = [[record("unit", 1 + n, result={"index": n, "pcm": pcm(4000, n)})] for n in range(100)]
    log = make_log(units) if has_table else without_table(make_log(units))
    reader = LogReader(log)
    counted = Counted(BytesSource(log))
    reader._source = counted  # type: ignore[assignment]
    reader._scanner = Scanner(counted)  # type: ignore[misc]
    assert len(list(reader.at(100))) == 2
    assert counted.read_bytes < len(log) / 30


def test_listings_look_past_it(tmp_path: Path) -> None:
    """The end of a long session would be hidden behind its table, and it would count as crashed."""
    path = Store(tmp_path).path("a")
    path.write_bytes(make_log([[record("mark", 1 + number)] for number in range(1500)]))
    assert len(parse(path.read_bytes())) == 3004
    assert (summary_of(path).state, summary_of(path).reason) == ("finished", "closed")
    path.write_bytes(path.read_bytes()[:-1])
    assert (summary_of(path).state, summary_of(path).reason) == ("finished", "closed")
