"""A power cut at any moment: what each durability promises is there, and nothing else is read.

`Device` is a disk in memory that knows what a cut would leave: the bytes that were synced, and of
those after them whatever pages a file system happened to write, of a name that was not synced
perhaps nothing. What a killed process leaves is in `test_crash`: all of it, under any durability.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final, Literal, get_args

import anyio
import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from recorder.format.format import Record
from recorder.repair import verify
from recorder.write.writer import Durability, Recorder, RecorderPolicy
from tests.recorder.test_faults import records_of, round_of
from tests.recorder.test_samples import PATH, SESSION, MemoryDisk, record
from tests.recorder.test_torn import PAGE_BYTES

DURABILITIES: Final[tuple[Durability, ...]] = get_args(Durability)
POLICY: Final = RecorderPolicy()
LOST_S_MAX: Final = POLICY.age_s_max + POLICY.tick_s
"""What an operator is told that a cut may cost where there are syncs at an interval."""


class Device(MemoryDisk):
    """A disk that can lose what was not synced."""

    def __init__(self) -> None:
        super().__init__()
        self._synced_bytes = 0
        self._has_name = False

    def sync(self, descriptor: int) -> None:
        """Sync the one file."""
        super().sync(descriptor)
        self._synced_bytes = len(self.files[PATH])

    def is_there(self, path: Path, descriptor: int, file_bytes: int = 0) -> bool:
        """Say that nobody removes files here."""
        return True

    def remove(self, path: Path, descriptor: int | None) -> None:
        """Refuse what no test here asks for."""
        raise NotImplementedError

    def sync_directory(self, path: Path) -> None:
        """Sync its name."""
        super().sync_directory(path)
        self._has_name = True

    def after_cut(self, grown: float, pages: frozenset[int]) -> bytes:
        """Give what is left.

        Args:
            grown: the share of what was not synced by which the file had grown.
            pages: of these, counted from the first, those that were written; the others are zeros.
        """
        if not self._has_name:
            return b""
        written = self.data()
        left = bytearray(written[: self._synced_bytes])
        end = self._synced_bytes + int(grown * (len(written) - self._synced_bytes))
        while len(left) < end:
            page = len(left) // PAGE_BYTES
            piece = written[len(left) : min(end, (page + 1) * PAGE_BYTES)]
            is_written = page - self._synced_bytes // PAGE_BYTES in pages
            left += piece if is_written else bytes(len(piece))
        return bytes(left)


# -- a session until the cut -----------------------------------------------------------------------

Move = Literal["unit", "words", "wait", "finish"]


@attrs.define
class Lived:
    """What was told as written until the cut, and when.

    Attributes:
        written: all records, in order.
        told: when a client was told of each, by its number; seconds.
        unit_seq: the last of a unit that was told of, -1 without one.
        is_finished: the log was said to be.
        now_s: the cut.
    """

    written: list[Record] = attrs.field(
        factory=lambda: [Record(kind="session", seq=0, at_ns=0, fields=SESSION)]
    )
    told: dict[int, float] = attrs.field(factory=dict)
    unit_seq: int = -1
    is_finished: bool = False
    now_s: float = 0.0

    def promised(self, durability: Durability) -> int:
        """The last record that a durability says is on the device; -1 where none is."""
        if self.is_finished:
            return len(self.written) - 1
        if durability == "none":
            return -1
        old = [seq for seq, told_s in self.told.items() if told_s <= self.now_s - LOST_S_MAX]
        return max([-1, *old, self.unit_seq if durability == "unit" else -1])


async def live(moves: list[Move], device: Device, durability: Durability) -> Lived:
    """Record a session, a move after the other; time passes in ticks of the recorder."""
    lived = Lived()
    policy = attrs.evolve(POLICY, durability=durability)
    recorder = Recorder(policy, disk=device, clock=lambda: lived.now_s, inline=True)
    log = recorder.open(PATH, SESSION, at_ns=0)
    await log.written(0)
    lived.told[0] = lived.now_s
    for number, move in enumerate(moves):
        if move == "wait":
            lived.now_s += POLICY.tick_s
            recorder._serve_aged()
            continue
        if move == "finish":
            await log.finish({"reason": "closed"}, at_ns=99)
            lived.is_finished = True
            break
        made = round_of(number) if move == "unit" else [record("tx", 0, frame=f"words {number}")]
        made = [attrs.evolve(one, seq=seq) for seq, one in enumerate(made, log.next_seq)]
        lived.written += made
        log.append(*made, urgent=True)
        await log.written(log.next_seq - 1)
        lived.told[log.next_seq - 1] = lived.now_s
        if move == "unit":
            lived.unit_seq = log.next_seq - 1
    return lived


def cut(
    moves: list[Move], durability: Durability, grown: float, pages: frozenset[int]
) -> tuple[Lived, bytes]:
    """Record a session on a device that loses its power."""
    device = Device()
    lived = anyio.run(partial(live, moves, device, durability), backend="trio")
    return lived, device.after_cut(grown, pages)


MOVES: Final = st.lists(
    st.sampled_from([*get_args(Move)[:3], "wait", "wait"]), min_size=1, max_size=24
)


@given(
    moves=st.builds(lambda body, end: [*body, *end], MOVES, st.sampled_from([[], ["finish"]])),
    durability=st.sampled_from(DURABILITIES),
    grown=st.floats(0, 1),
    pages=st.frozensets(st.integers(0, 8), max_size=6),
)
@example(["unit"] * 3, "unit", 0.0, frozenset())
@example(["unit", "words", *["wait"] * 5], "unit", 0.0, frozenset())
@example(["words", *["wait"] * 5, "words"], "interval", 0.7, frozenset({0}))
@example(["unit"] * 9, "none", 1.0, frozenset({1}))
@example(["unit", "finish"], "none", 0.0, frozenset())
def test_a_power_cut_leaves_what_was_promised(
    moves: list[Move], durability: Durability, grown: float, pages: frozenset[int]
) -> None:
    """An operator who pays for syncs finds that a power cut has cost more than was said."""
    lived, left = cut(moves, durability, grown, pages)
    records, _ = records_of(left)
    seqs = [item.seq for item in records if item.kind != "fin"]
    assert [item for item in records if item.kind != "fin"] == [lived.written[at] for at in seqs]
    promised = lived.promised(durability)
    assert seqs[: promised + 1] == list(range(promised + 1))
    if lived.is_finished:
        assert verify(left).state == "finished"
    elif verify(left).exit_code == 0:
        assert seqs == list(range(len(seqs))), "a hole looks sound"


@pytest.mark.parametrize(("durability", "kept"), [("none", 0), ("interval", 1), ("unit", 4)])
def test_a_power_cut_costs_what_was_not_synced(durability: Durability, kept: int) -> None:
    """A device that never loses anything would prove every promise."""
    moves: list[Move] = ["wait", "wait", "wait", "wait", "wait", "unit", "words"]
    _, left = cut(moves, durability, 0.0, frozenset())
    assert len(records_of(left)[0]) == kept
