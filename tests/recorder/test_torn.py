"""What power cuts and file systems make of a log: torn, out of order, twice, empty, full of zeros.

What single bits and bytes do is in `test_recorder_reader`. Here whole blocks and pages move.
"""

from __future__ import annotations

from itertools import pairwise, takewhile
from pathlib import Path
from typing import Final

import attrs
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st

from recorder.format.format import HEADER_BYTES, Record, Unreadable
from recorder.read.reader import LogReader
from recorder.repair import Report, verify
from replay.rerun.logic import replay
from runtime.cli import main
from tests.recorder.test_samples import block_offsets, make_log, record

LOGS: Final = Path(__file__).parents[2] / "fixtures" / "logs"
QUEUE_LOG: Final = LOGS / "v1-realtime-queue.session.zst"
MANY_UNITS_LOG: Final = LOGS / "v1-realtime-many-units.session.zst"
BLOCKS: Final = 12
PAGE_BYTES: Final = 4096
"""What a file system writes or loses at once."""


def make(seed: int, blocks: int = BLOCKS) -> bytes:
    """A log of some pages, of which no record repeats within it or in one of another seed."""
    noise = np.random.default_rng(seed)
    steps = [
        [
            record("rx", 2 * number + 1, frame=noise.bytes(1 + number * 97)),
            record("tx", 2 * number + 2, frame=f"{seed} {number}", ordinal=number),
        ]
        for number in range(blocks)
    ]
    return make_log(steps)


def records_of(log: bytes) -> list[Record]:
    """What is read, damage or not; nothing where the log cannot be read at all."""
    try:
        with LogReader(log) as reader:
            return [item for item in reader if isinstance(item, Record)]
    except Unreadable:
        return []


LOG: Final = make(0)
OFFSETS: Final = block_offsets(LOG)
PIECES: Final = tuple(LOG[a:b] for a, b in pairwise(OFFSETS))
RECORDS: Final = records_of(LOG)
OTHER: Final = make(1, blocks=2 * BLOCKS)


def assert_nothing_wrong_is_read(log: bytes) -> Report:
    """Check that what is read was written, once and in order, and that no damage looks sound."""
    records = records_of(log)
    assert [item for item in RECORDS if item in records] == records
    report = verify(log)
    if report.exit_code == 0:
        assert LOG.startswith(log[: len(log) - report.tail_bytes])
        assert records == RECORDS[: len(records)]
    return report


@attrs.frozen
class Torn:
    """What was done to a log; its `repr` is the example that failed."""

    pieces: tuple[int, ...]
    cut: int
    zeros: int


TORN = st.builds(
    Torn,
    pieces=st.lists(st.integers(0, len(PIECES) - 1), max_size=2 * len(PIECES)).map(tuple),
    cut=st.integers(0, 600),
    zeros=st.integers(0, 3 * PAGE_BYTES),
)


@given(TORN)
@example(Torn(tuple(range(len(PIECES))), 0, 1))
@example(Torn(tuple(range(len(PIECES))), 0, HEADER_BYTES - 1))
@example(Torn((0, 1, 2, 3), 30, PAGE_BYTES))
@example(Torn((0, 1, 2, 2, 3), 0, 0))
@example(Torn((1, 0, 2), 0, 0))
@example(Torn((1, 2, 3), 10, 5))
def test_blocks_in_any_order_are_no_other_session(torn: Torn) -> None:
    """Blocks that were written twice, in another order or not at all are replayed as they lie."""
    whole = b"".join(PIECES[number] for number in torn.pieces)
    assert_nothing_wrong_is_read(whole[: len(whole) - torn.cut] + bytes(torn.zeros))


@pytest.mark.parametrize("zeros", [1, 11, 12, HEADER_BYTES, PAGE_BYTES, 100 * PAGE_BYTES])
@pytest.mark.parametrize("cut", [1, 40, 300])
def test_a_tail_of_zeros_is_damage_and_costs_nothing_before_it(zeros: int, cut: int) -> None:
    """A file that grew before its bytes were written hides that something was lost."""
    for end in (OFFSETS[7], OFFSETS[7] - cut):
        kept = [item for item in RECORDS if item in records_of(LOG[:end])]
        report = assert_nothing_wrong_is_read(LOG[:end] + bytes(zeros))
        assert records_of(LOG[:end] + bytes(zeros)) == kept
        is_tail = end < OFFSETS[7] and end + zeros < OFFSETS[7]  # a block that is not whole yet
        assert report.state == ("open" if is_tail else "damaged")


@given(st.lists(st.integers(0, len(LOG) // PAGE_BYTES), max_size=4))
def test_lost_pages_cost_their_blocks_alone(pages: list[int]) -> None:
    """A power cut may leave holes anywhere in what was not synced."""
    holed = bytearray(LOG)
    for page in pages:
        end = min(len(LOG), (page + 1) * PAGE_BYTES)
        holed[page * PAGE_BYTES : end] = bytes(end - page * PAGE_BYTES)
    assert_nothing_wrong_is_read(bytes(holed))
    hit = {
        number
        for number in range(len(PIECES))
        if holed[OFFSETS[number] : OFFSETS[number + 1]] != PIECES[number]
    }
    if not {0, 1} <= hit:  # one of the two session records is left
        lost = [item for item in RECORDS if _block_of(item) in hit and item.seq]
        assert records_of(bytes(holed)) == [item for item in RECORDS if item not in lost]


def _block_of(item: Record) -> int:
    return 0 if item.seq == 0 else min((item.seq + 1) // 2, len(PIECES) - 1)


@pytest.mark.parametrize("end", [OFFSETS[3], OFFSETS[3] - 20, len(LOG)])
def test_two_logs_in_one_file_are_not_one_session(end: int) -> None:
    """The second session's frames are shown as the first one's, and nobody is warned."""
    joined = LOG[:end] + OTHER
    assert verify(joined).state == "damaged"
    with LogReader(joined) as reader:
        before = list(takewhile(lambda item: isinstance(item, Record), reader))
    assert before == RECORDS[: len(before)]
    assert len(before) == len(records_of(LOG[:end]))


@pytest.mark.parametrize("keeps_fin", [True, False])
def test_a_replay_ends_where_another_log_begins(keeps_fin: bool) -> None:
    """One session's events are stepped in the middle of another's."""
    first, second = (path.read_bytes() for path in (QUEUE_LOG, MANY_UNITS_LOG))
    if not keeps_fin:
        first = first[: block_offsets(first)[-2]]
    with LogReader(first) as reader:
        alone = replay(reader)
    with LogReader(first + second) as reader:
        together = replay(reader)
    assert alone.divergence is None
    assert together.divergence is None
    assert together.damage
    assert (together.events, together.effects) == (alone.events, alone.effects)


@pytest.mark.parametrize("data", [b"", bytes(PAGE_BYTES), LOG[: OFFSETS[1] - 1]], ids=len)
def test_a_log_without_a_head_is_told_of(data: bytes, tmp_path: Path) -> None:
    """A server that was killed at once, or whose disk was full, leaves what no tool takes."""
    path = tmp_path / "a.session.zst"
    path.write_bytes(data)
    for command in ("recordings verify", "replay", "recordings inspect"):
        done = CliRunner().invoke(main, [*command.split(), str(path)])
        assert done.exit_code == 2
        assert isinstance(done.exception, SystemExit)
        if command == "recordings verify":
            assert done.stdout.startswith("state: unreadable\n")
        else:
            assert len(done.stderr.splitlines()) == 1
