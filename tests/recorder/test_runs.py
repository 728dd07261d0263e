"""Runs: small frames that share a blob read back as they were, and cost less."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from recorder.format import encoding
from recorder.format.encoding import (
    FRAME_CHARS_MAX,
    RECORDS_MAX,
    RUN_BYTES_MAX,
    RecordEncoder,
    runs,
)
from recorder.format.format import (
    BLOCK_BYTES,
    HEAD_BYTES_MAX,
    Expansion,
    FormatError,
    Record,
    split_records,
)
from recorder.read.reader import PART_VALUES, LogReader, SplitBlobCache, StoredRecord, decode, parse
from recorder.read.scan import Block, BytesSource, Scanner
from recorder.repair import compact, recover, survey, verify
from recorder.write.logfile import Compressor, LogFile
from tests.forged.logs import record as forged
from tests.golden.versions import IN_PIECES
from tests.recorder.test_samples import (
    PATH,
    SESSION,
    MemoryDisk,
    block_offsets,
    make_log,
    pcm,
    record,
)
from tests.sessions.in_memory import base64

LONG = "x" * (FRAME_CHARS_MAX + 1)
PIECE = '{"type":"input.append","input":{"audio":"%s"}}'


def piece(seq: int, sound: bytes, frame: str = PIECE) -> Record:
    return record("rx", seq, type="FrameReceived", frame=frame % base64(sound))


PIECES = [piece(seq, pcm(320, seed=seq)) for seq in range(1, 51)]
"""A second in pieces of 20 ms."""


def stored(records: Sequence[Record]) -> dict[int, StoredRecord]:
    """Encode records as a log does, and parse them again."""
    encoder, found = RecordEncoder(), dict[int, StoredRecord]()
    for run in runs(records):
        for framed in encoder.encode_run(run) if len(run) > 1 else [encoder.encode(run[0])]:
            ((header, area),) = split_records(b"".join(framed.pieces), 1)
            one = parse(header, area)
            found[one.record.seq] = one
    return found


def read(found: dict[int, StoredRecord], seq: int) -> Record:
    return decode(found[seq], found.__getitem__, Expansion(int))


SOUND = st.binary(min_size=1, max_size=90) | st.integers(64, 400).map(pcm)
FRAMES = st.one_of(
    SOUND.map(lambda sound: PIECE % base64(sound)),
    st.tuples(SOUND, SOUND).map(lambda two: (PIECE % base64(two[0])) + (PIECE % base64(two[1]))),
    st.text(st.characters(exclude_categories=()), max_size=90),
    st.tuples(
        SOUND, st.sampled_from(["\ud800", "a" * 4200, "\n" * 4200, "x" * 9000, PIECE % "AA" * 40])
    ).map(lambda it: (PIECE % base64(it[0])) + it[1]),
    st.sampled_from([LONG, PIECE % "A" * 9, "\ud800", ""]),
)


@given(st.lists(FRAMES | st.sampled_from([None, b"\x00"]), min_size=1, max_size=60))
@example([PIECE % base64(pcm(64))] * 32 + ["{}"])
@example([PIECE % base64(bytes(1280))] * 3)
@example(["\ud800" + PIECE % base64(pcm(64))] * 3)
def test_any_frames_read_back(frames: list[str | bytes | None]) -> None:
    """A byte of a client that comes back changed makes every replay of its session wrong."""
    records = [record("rx", seq, type="FrameReceived", frame=it) for seq, it in enumerate(frames)]
    found = stored(records)
    assert [read(found, seq) for seq in reversed(range(len(frames)))] == records[::-1]


@given(st.lists(SOUND, min_size=2, max_size=RECORDS_MAX), st.sampled_from(["", "a" * 4200, "é"]))
def test_what_is_encoded_once_for_a_run_is_what_each_record_would_have(
    sounds: list[bytes], note: str
) -> None:
    """A log's bytes would depend on how a client's messages were read."""
    frame = PIECE.replace("{", f'{{"note":"{note}",', 1)
    records = [piece(seq, sound, frame) for seq, sound in enumerate(sounds)]
    quick = RecordEncoder().encode_run(records)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "_split_as", lambda *_: None)
        assert quick == RecordEncoder().encode_run(records)


def test_records_are_taken_as_they_are_needed() -> None:
    """A fork or a copy of a log would otherwise hold the whole log in memory."""
    taken = list[int]()

    def records() -> Iterator[Record]:
        for seq in range(1000):
            taken.append(seq)
            yield record("mark", seq, name="x") if seq % 8 == 0 else piece(seq, pcm(320, seed=seq))

    for number, run in enumerate(runs(records())):
        assert len(taken) <= run[-1].seq + 2, number


def test_other_long_text_takes_no_part_of_the_sound() -> None:
    """A client's long text would shift the sound of all messages behind it."""
    frames = [PIECE.replace("{", '{"note":"%s",' % ("hello, " * 700), 1), PIECE, PIECE + "\ud800"]
    records = [piece(seq, pcm(320, seed=seq), frames[seq % 3]) for seq in range(12)]
    found = stored(records)
    assert [read(found, seq) for seq in range(12)] == records
    assert {len(entry) for one in found.values() for entry in one.table} == {3, PART_VALUES}


def test_no_run_is_longer_than_a_block(tmp_path: Path) -> None:
    """Thousands of empty messages would be one block that no reader accepts."""
    for frame in ("{}", ""):
        records = [record("rx", seq, type="FrameReceived", frame=frame) for seq in range(1, 20_001)]
        assert max(map(len, runs(records))) <= RECORDS_MAX
        path = tmp_path / f"{len(frame)}.session.zst"
        path.write_bytes(make_log([records]))
        report = verify(path)
        assert (report.state, report.records) == ("finished", len(records) + 2)
        source = BytesSource(path.read_bytes())
        blocks = [it for it in Scanner(source, Expansion(source.size)) if isinstance(it, Block)]
        assert max(len(block.payload) for block in blocks) <= BLOCK_BYTES + HEAD_BYTES_MAX


@pytest.mark.parametrize(("more", "blocks"), [(0, 1), (1, 2)])
def test_a_block_may_be_full_to_its_last_byte(more: int, blocks: int) -> None:
    """A log would have a block more, or one that is too large."""
    draw, encoder = Random(0), RecordEncoder()
    first, other = (record("mark", seq, sound=draw.randbytes(100_000)) for seq in (1, 2))
    left = BLOCK_BYTES - sum(encoder.encode(each).framed_bytes for each in (first, other))
    second = record("mark", 2, sound=draw.randbytes(100_000 + left + more))
    file = LogFile(PATH, disk=MemoryDisk(), compressor=Compressor())
    file.create()
    list(file.write([Record(kind="session", seq=0, at_ns=0, fields=SESSION)]))
    assert len(list(file.write([first, second]))) == blocks


def test_a_second_in_pieces_takes_few_blobs() -> None:
    """Fifty pieces a second would be packed, hashed and compressed one by one."""
    found = stored(PIECES)
    own = [entry for one in found.values() for entry in one.table if len(entry) == 3]
    assert len(own) == 1
    assert all(len(one.table[-1]) == PART_VALUES for one in found.values())
    assert len(make_log([PIECES])) < 0.95 * len(make_log([[each] for each in PIECES]))


def test_only_plain_frames_of_the_client_are_joined() -> None:
    """What carries more than its frame would lose it."""
    others = [
        record("tx", 2, type="Send", ordinal=0, frame=PIECE % base64(pcm(320))),
        record("rx", 4, type="FrameReceived", frame=PIECE % base64(pcm(320)), has_room=False),
        record("rx", 6, type="FrameReceived", frame=LONG),
        record("rx", 8, type="FrameReceived", frame=None),
    ]
    records = sorted([*others, *PIECES[::2][:5]], key=lambda it: it.seq)
    assert [len(run) for run in runs(records)] == [1] * 9
    long = [piece(seq, pcm(3000)) for seq in range(1, 21)]
    found = list(runs(PIECES + long))
    assert [each for run in found for each in run] == PIECES + long
    sizes = [sum(len(str(each.fields["frame"])) for each in run) for run in found]
    assert len(found) == 4
    assert max(sizes) <= RUN_BYTES_MAX


def test_a_log_of_runs(tmp_path: Path) -> None:
    """A log with runs must be read from any record on, verified and compacted as any other."""
    steps = [PIECES[:20], [record("mark", 21)], PIECES[21:23]]
    path, small = tmp_path / "a.session.zst", tmp_path / "b.session.zst"
    path.write_bytes(make_log(steps))
    assert verify(path).state == "finished"
    wanted = [each for step in steps for each in step]
    for seq in (1, 2, 19, 20, 21, 23):
        with LogReader(path) as reader:
            found = [it for it in reader.at(seq) if isinstance(it, Record) and it.kind != "fin"]
        assert found == wanted[seq - 1 :]
    compact(path, small)
    with LogReader(small) as reader:
        assert len([*reader]) == len(wanted) + 2
    with LogReader(small) as reader:
        assert [it for it in reader if isinstance(it, Record)][1:-1] == wanted


def test_the_golden_log_has_parts() -> None:
    """A golden log without parts would not show that logs with parts stay readable."""
    source, parts = BytesSource(IN_PIECES.read_bytes()), 0
    for block in Scanner(source, Expansion(source.size)):
        assert isinstance(block, Block)
        for header, area in split_records(block.payload, block.header.n_records):
            parts += len((parse(header, area).table or ((),))[-1]) == PART_VALUES
    assert parts == 100


@pytest.mark.parametrize(
    ("kind", "blobs"),
    [
        ("event", [[0, 3, 3], [5, 0, 0, 3]]),
        ("rx", [[0, 3, 3], [5, 0, 1, 3]]),
        ("rx", [[0, 3, 3], [5, 0, 4, 0]]),
        ("rx", [[0, 3, 3], [5, 1, 0, 3]]),
        ("rx", [[0, 3, 3], [6, 0, 0, 3]]),
        ("rx", [[0, 3, 3], [5, 0, -1, 2]]),
        ("rx", [[0, 3, 3], [5, 0, 0]]),
        ("rx", [[0, 3, 3], [5, 0, 0, 3, 0]]),
    ],
)
def test_what_is_no_part_is_refused(kind: str, blobs: list[list[int]]) -> None:
    """A forged log would show bytes that its writer never had."""
    data = forged(kind, 5, {"frame": {"$blob": 1}}, blobs=blobs, area=b"abc")
    ((header, area),) = split_records(data, 1)

    def read_it() -> None:
        one = parse(header, area)
        decode(one, {5: one}.__getitem__, Expansion(int))

    with pytest.raises(FormatError):
        read_it()


def test_compacted_runs_stay_in_one_block(tmp_path: Path) -> None:
    """A part of another block's blob is lost with it, and dear to read."""
    steps = [
        [piece(seq, pcm(320, seed=seq)) for seq in range(at, at + 25)] for at in range(1, 2000, 25)
    ]
    path, small = tmp_path / "a.session.zst", tmp_path / "b.session.zst"
    path.write_bytes(make_log(steps))
    compact(path, small)
    source, blocks = BytesSource(small.read_bytes()), 0
    for block in Scanner(source, Expansion(source.size)):
        assert isinstance(block, Block)
        blocks += 1
        for header, area in list(split_records(block.payload, block.header.n_records)):
            for entry in parse(header, area).table:
                assert len(entry) == 3 or entry[0] >= block.header.first_seq
    assert blocks > 3


def test_a_log_of_runs_is_recovered_but_for_its_broken_block(tmp_path: Path) -> None:
    """A broken block would take other blocks' sound along."""
    path, mended = tmp_path / "a.session.zst", tmp_path / "b.session.zst"
    log = bytearray(make_log([PIECES[:20], PIECES[20:40], PIECES[40:]]))
    log[block_offsets(bytes(log))[3] - 9] ^= 1
    path.write_bytes(log)
    recover(path, mended, survey(path, salvage=True))
    assert verify(mended).state == "finished"
    with LogReader(mended) as reader:
        kept = [it for it in reader if isinstance(it, Record) and it.kind == "rx"]
    assert kept == PIECES[:20] + PIECES[40:]


def test_a_large_blob_is_not_kept_for_its_parts() -> None:
    """A forged log of kilobytes would hold hundreds of megabytes in its reader."""
    last, asked = SplitBlobCache(), list[int]()

    def unpack(size: int) -> bytes:
        asked.append(size)
        return bytes(size)

    for size in (1000, 1000, BLOCK_BYTES + 1, BLOCK_BYTES + 1, 1000):
        assert len(last.of((5, size), lambda size=size: unpack(size))) == size
    assert asked == [1000, BLOCK_BYTES + 1, BLOCK_BYTES + 1]


def test_a_part_is_charged_as_what_it_is() -> None:
    """Thousands of parts of one large blob must not be unpacked for each of them."""
    found = stored(PIECES)
    expansion, last = Expansion(int), SplitBlobCache()
    for seq in found:
        decode(found[seq], found.__getitem__, expansion, last)
    assert expansion.spent == 2 * len(PIECES) * 1280
