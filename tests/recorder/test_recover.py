"""Recovery: whatever happened to a log, what comes of it is sound, and nothing in it is made up."""

from __future__ import annotations

import fcntl
import tracemalloc
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recorder.format.encoding import RecordEncoder
from recorder.format.format import HEADER_BYTES, RECORD_VERSIONS, Record, Unreadable
from recorder.read.reader import LogReader
from recorder.read.scan import Damage
from recorder.repair import NotRecoverable, Survey, is_lost, recover, survey, verify
from recorder.write.logfile import FIN_FIELDS, Compressor, LogFile
from replay.rerun.folder import replay_log
from tests.golden.damage import HARMS
from tests.golden.logs import FOLDER
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

LOG: Final = make_log(sample_steps(samples=80))
OFFSETS: Final = block_offsets(LOG)


def items(log: bytes | Path) -> list[Record | Damage]:
    with LogReader(log) as reader:
        return list(reader)


RECORDS: Final = [item for item in items(LOG) if isinstance(item, Record)]
FIN: Final = RECORDS[-1]


@attrs.frozen
class Made:
    """A log that was recovered: what it holds, and what was said of it."""

    records: list[Record]
    survey: Survey

    @property
    def fin(self) -> Record:
        return self.records[-1]


def recovered(log: bytes, *, salvage: bool = False) -> Made | None:
    """Recover a log, and check what must always hold; None where it is sound already."""
    with TemporaryDirectory() as folder:
        source, target = Path(folder) / "a", Path(folder) / "b"
        source.write_bytes(log)
        found = survey(source, salvage=salvage)
        if found.is_sound:
            assert verify(source).state == "finished"
            return None
        reason = recover(source, target, found)
        assert source.read_bytes() == log
        report = verify(target)
        assert (report.state, report.has_seek_table) == ("finished", True)
        assert report.damage_count == 0
        records = items(target)
        assert survey(target).is_sound
    kept = [item for item in records if isinstance(item, Record)]
    assert len(kept) == len(records)
    assert [item.seq for item in kept] == list(range(len(kept)))
    assert kept[-1].fields["reason"] == reason
    return Made(kept, found)


def assert_only_written(made: Made, originals: list[Record]) -> None:
    """Check that each record is the original of its number, or says that it is lost."""
    for item in made.records[:-1]:
        assert is_lost(item) or item == originals[item.seq]
    assert not is_lost(made.fin)


# -- any damage -----------------------------------------------------------------------------------


@pytest.mark.parametrize("salvage", [False, True])
def test_a_log_cut_anywhere_keeps_its_whole_blocks(salvage: bool) -> None:
    """What a killed server had written would be lost, or half a record taken for a whole one."""
    ends = [*range(OFFSETS[1], OFFSETS[-1], 41), *OFFSETS[1:]]
    for end in ends:
        made = recovered(LOG[:end], salvage=salvage)
        assert made is not None or end == OFFSETS[-1]
        if made is None:
            continue
        whole = sum(at <= end for at in OFFSETS[1:])
        originals = [[0], [0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6]][whole - 1]
        assert made.records[:-1] == RECORDS[: len(originals)]
        assert made.fin.fields["reason"] == "recovered"
        assert made.survey.tail_bytes == end - OFFSETS[whole]
        assert made.survey.records_lost == 0


@pytest.mark.slow
@given(st.integers(0, 8 * len(LOG) - 1), st.booleans())
@settings(max_examples=5 * settings.default.max_examples)
def test_any_flipped_bit_costs_one_block(bit: int, salvage: bool) -> None:
    """One rotten bit would cost the whole session, or put something false into it."""
    bad = bytearray(LOG)
    bad[bit // 8] ^= 1 << bit % 8
    made = recovered(bytes(bad), salvage=salvage)
    assert made is not None
    assert_only_written(made, RECORDS)
    block = sum(at <= bit // 8 for at in OFFSETS) - 1
    first = (0, 1, 3, 5, 7, 8)[block]
    lost = range(first, (1, 3, 5, 7, 8, 8)[block])
    if block in (0, 4, 5):  # the head is in the second block too, and fin is made again
        assert made.records[:-1] == RECORDS[:-1]
        return
    if not salvage:
        assert made.records[:-1] == RECORDS[:first]
        assert made.fin.fields["reason"] == "recovered"
        return
    # Nothing follows what block 3 held, so that no mark is needed to keep numbers.
    marked = list(lost) if block < 3 else []
    assert [item.seq for item in made.records if is_lost(item)] == marked
    assert made.survey.records_lost == len(lost)


EDITS = st.lists(
    st.tuples(st.integers(0, len(LOG)), st.integers(0, 600), st.binary(max_size=40)),
    min_size=1,
    max_size=4,
)


@given(EDITS, st.booleans())
@settings(max_examples=3 * settings.default.max_examples)
def test_whatever_happened_nothing_is_made_up(
    edits: list[tuple[int, int, bytes]], salvage: bool
) -> None:
    """A log that was recovered from a rotten disk would tell of things that never were."""
    log = LOG
    for at, removed, added in edits:
        log = log[:at] + added + log[at + removed :]
    try:
        made = recovered(log, salvage=salvage)
    except Unreadable:
        return
    if made is not None:
        assert_only_written(made, RECORDS)
        if not salvage:
            assert made.records[:-1] == RECORDS[: len(made.records) - 1]


def test_blocks_that_moved() -> None:
    """A block in another place would be replayed there."""
    pieces = [LOG[a:b] for a, b in pairwise(OFFSETS)]
    for order in ([0, 2, 1, 3, 4], [0, 1, 1, 2, 3, 4], [0, 1, 3, 4], [0, 1, 2, 2, 4], [1, 2, 3, 4]):
        for salvage in (False, True):
            made = recovered(b"".join(pieces[number] for number in order), salvage=salvage)
            assert made is not None
            assert_only_written(made, RECORDS)


def test_a_block_of_another_session_ends_it() -> None:
    """What somebody else said would stand in the log, and be believed."""
    steps = sample_steps(samples=80)
    steps[0][1] = record("event", 2, name="Forged", frame=1)
    other = make_log(steps)
    at = block_offsets(other)
    forged = LOG[: OFFSETS[2]] + other[at[2] : at[3]] + LOG[OFFSETS[3] :]
    for salvage in (False, True):
        made = recovered(forged, salvage=salvage)
        assert made is not None
        assert made.records[:-1] == RECORDS[:3]


def test_a_wrong_copy_of_the_head_is_put_right() -> None:
    """A log would stay damaged though each of its records is there."""
    disk = MemoryDisk()
    file = LogFile(PATH, disk=disk, compressor=Compressor())
    file.create()
    list(file.write([RECORDS[0]]))
    other = Record(kind="session", seq=0, at_ns=0, fields={**SESSION, "seed": 2})
    file._chain._head = b"".join(RecordEncoder().encode(other).pieces)
    list(file.write(RECORDS[1:3]))
    list(file.write([record("fin", 3, reason="closed")]))
    log = disk.data()
    assert [item.reason for item in items(log) if isinstance(item, Damage)] == ["head"]
    made = recovered(log)
    assert made is not None
    assert made.records[:-1] == RECORDS[:3]
    assert made.fin.fields["reason"] == "closed"


# -- what is said of it ---------------------------------------------------------------------------


def test_fin_says_what_was_done() -> None:
    """Nobody could tell a log that was recovered from one that is as it was written."""
    made = recovered(LOG[: OFFSETS[3] + 50])
    assert made is not None
    said = {name: value for name, value in made.fin.fields.items() if name not in FIN_FIELDS}
    assert said == {
        "reason": "recovered",
        "units": 0,
        "recovered": {
            "file_bytes": OFFSETS[3] + 50,
            "tail_bytes": 50,
            "damage": 0,
            "records_lost": 0,
        },
    }
    assert made.fin.at_ns == RECORDS[4].at_ns
    bad = bytearray(LOG)
    bad[OFFSETS[2] + 90] ^= 1
    salvaged = recovered(bytes(bad), salvage=True)
    assert salvaged is not None
    told = salvaged.fin.fields["recovered"]
    assert isinstance(told, dict)
    assert (told["reason"], told["records_lost"], told["damage"]) == ("closed", 2, 1)
    assert salvaged.fin.at_ns == FIN.at_ns


def test_a_log_that_lost_nothing_keeps_its_reason() -> None:
    """How a session ended would be forgotten for a flipped bit in its seek table."""
    made = recovered(LOG[:-3])
    assert made is not None
    assert made.fin.fields["reason"] == "closed"
    assert made.survey.records_lost == 0


def test_bytes_that_are_sound_stay_what_they_are() -> None:
    """Recovering a log of an old version would rewrite it."""
    made_bytes = bytearray()
    with TemporaryDirectory() as folder:
        source, target = Path(folder) / "a", Path(folder) / "b"
        source.write_bytes(LOG[: OFFSETS[4]])
        recover(source, target, survey(source))
        made_bytes += target.read_bytes()
    at = block_offsets(bytes(made_bytes))
    for block in range(4):
        frame = slice(at[block] + HEADER_BYTES, at[block + 1])
        assert made_bytes[frame] == LOG[OFFSETS[block] + HEADER_BYTES : OFFSETS[block + 1]]


# -- logs of servers ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HARMS)
def test_a_harmed_golden_log_replays_once_recovered(name: str, tmp_path: Path) -> None:
    """A recording that was damaged could never be replayed again, not even up to the damage."""
    source = FOLDER / f"v1-{name}.session.zst"
    target = tmp_path / "a.session.zst"
    made = survey(source)
    recover(source, target, made)
    assert verify(target).state == "finished"
    outcome = replay_log(target)
    assert outcome.result == "identical"
    assert outcome.logic is not None
    assert outcome.logic.records == made.records + 1
    salvaged = tmp_path / "b.session.zst"
    found = survey(source, salvage=True)
    recover(source, salvaged, found)
    assert verify(salvaged).state == "finished"
    is_whole = not any(is_lost(item) for item in items(salvaged) if isinstance(item, Record))
    assert replay_log(salvaged).result == ("identical" if is_whole else "damaged")
    assert found.records >= made.records


# -- what is refused ------------------------------------------------------------------------------


def test_a_log_that_is_being_written_is_refused(tmp_path: Path) -> None:
    """A running session would be declared dead, and half of it kept as all of it."""
    path = tmp_path / "a.session.zst"
    path.write_bytes(LOG[: OFFSETS[2]])
    with path.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(NotRecoverable, match="a server is writing it"):
            survey(path)
    assert not survey(path).is_sound


def test_a_newer_version_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An old program would cut all that it does not know out of a new log."""
    path = tmp_path / "a.session.zst"
    with monkeypatch.context() as newer:
        newer.setitem(RECORD_VERSIONS, "unit", 2)  # type: ignore[arg-type]
        path.write_bytes(make_log(sample_steps()))
    with pytest.raises(NotRecoverable, match="unit record of version 2"):
        survey(path)


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    """The recovered log of yesterday would be gone."""
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_bytes(LOG[: OFFSETS[3]])
    target.write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        recover(source, target, survey(source))
    assert target.read_bytes() == b"precious"


def test_marks_for_records_that_were_never_there_are_bounded(tmp_path: Path) -> None:
    """A header of a few bytes that claims a number would fill the disk with marks."""
    far = [[record("mark", 1)], [record("mark", 1 << 40)]]
    path = tmp_path / "a"
    path.write_bytes(make_log(far, fin=False))
    with pytest.raises(NotRecoverable, match="consecutive records are lost"):
        recover(path, tmp_path / "b", survey(path, salvage=True))


def test_memory_is_that_of_a_block(tmp_path: Path) -> None:
    """To recover a long session a machine would need its size in memory."""
    noise = np.random.default_rng(0)
    steps = [[record("rx", seq, frame=noise.bytes(100_000))] for seq in range(1, 200)]
    steps[50] = [record("unit", 51, pcm=pcm(100))]
    path = tmp_path / "a"
    path.write_bytes(make_log(steps, fin=False)[:-9])
    tracemalloc.start()
    recover(path, tmp_path / "b", survey(path))
    _, bytes_max = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.stat().st_size > 19_000_000
    assert bytes_max < 18 << 20, "blocks that the reader keeps for references are 16 MiB of it"
