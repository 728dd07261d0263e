"""What a second of a session costs in counts: at a unit a second time goes into being woken."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Final

import anyio
import attrs
import pytest

from recorder.write.log import Loop, SessionLog
from recorder.write.writer import Durability, Recorder, RecorderPolicy
from runtime.commands.bench import load_speech
from runtime.session.setup import SystemIdentities
from tests.bench.gateway.load import CHOICE, START
from tests.bench.gateway.material import Coding, make_exchanges
from tests.bench.recording import BEGIN, Talker, make_unit
from tests.project.sampling import ONE_LOOP
from tests.recorder.test_samples import PATH, MemoryDisk, record

pytestmark = pytest.mark.anyio

SESSIONS: Final = 8
SECONDS: Final = 8
TICK_S: Final = RecorderPolicy().tick_s
PARTS: Final = 40
"""Of a second: when ticks come, and units of the sessions."""
BEGINNINGS: Final = {"openai": CHOICE["openai"][0].decode(), "live": START.decode()}
UNITS: Final = [make_unit(load_speech(), number) for number in range(4)]


class HandOvers(deque[SessionLog]):
    """The logs that are called up; counts them."""

    count = 0

    def append(self, log: SessionLog) -> None:
        """Take a log."""
        self.count += 1
        super().append(log)


def talkers(recorder: Recorder, sessions: int, coding: Coding = "float32") -> list[Talker]:
    """Begin sessions."""
    found = []
    for number in range(sessions):
        path = PATH.with_name(f"{number}.session.zst")
        open_log = partial(recorder.open, path, {}, at_ns=0)
        found.append(
            Talker(
                lambda failed, it=open_log: it(on_failure=failed),
                SystemIdentities().draw(),
                endpoint="realtime" if coding == "float32" else coding,
                begin=BEGINNINGS.get(coding, BEGIN),
            )
        )
    return found


@pytest.mark.parametrize(("durability", "syncs"), [("none", 0), ("interval", 1), ("unit", 1)])
@pytest.mark.parametrize("late", [0, 1, 3])
@pytest.mark.parametrize("anyio_backend", ONE_LOOP)
async def test_a_second_of_a_session_is_one_block(
    durability: Durability, syncs: int, late: int
) -> None:
    """What no client waits for is written for itself, and each unit wakes a cold thread again.

    `late`: how much the units are off their second, by turns.
    """
    disk, now_s = MemoryDisk(), 0.0
    policy = RecorderPolicy(durability=durability)
    with Recorder(policy, disk=disk, clock=lambda: now_s, inline=True) as recorder:
        sessions = talkers(recorder, SESSIONS)
        handed_over = recorder._shared.ready_logs = HandOvers()

        async def second(number: int) -> None:
            nonlocal now_s
            for part in range(PARTS):
                now_s = number + part / PARTS
                for place, talker in enumerate(sessions):
                    if part == PARTS // 2 + place + late * (number % 2):
                        await talker.unit(UNITS[number % len(UNITS)])
                if part % round(PARTS * TICK_S) == 0:
                    recorder._serve_aged()

        await second(0)
        handed_over.count, blocks = 0, recorder.statistics.blocks
        records = sum(log.next_seq for log in recorder._logs)
        disk.calls.clear()
        for number in range(1, SECONDS):
            await second(number)
        units = SESSIONS * (SECONDS - 1)
        records = sum(log.next_seq for log in recorder._logs) - records
        assert 9 * units <= records <= 9.2 * units
        assert recorder.statistics.blocks - blocks == units
        assert handed_over.count == units
        assert disk.calls.count("write") == units
        assert disk.calls.count("sync") <= syncs * units * 1.2
        for talker in sessions:
            await talker.finish()


@pytest.mark.parametrize(("coding", "records"), [("float32", 6), ("openai", 9), ("live", 9)])
async def test_a_second_in_pieces_is_one_block(coding: Coding, records: int) -> None:
    """Each piece of 25 ms would wake the thread, or be a block of its own.

    `records`: of a second, besides those of its pieces.
    """
    disk, now_s = MemoryDisk(), 0.0
    frames = make_exchanges(1)[0].pieces(PARTS, coding)
    last = attrs.evolve(UNITS[0], frame=frames.pop())
    with Recorder(disk=disk, clock=lambda: now_s, inline=True) as recorder:
        sessions = talkers(recorder, SESSIONS, coding)
        handed_over = recorder._shared.ready_logs = HandOvers()

        async def second(number: int) -> None:
            nonlocal now_s
            for part in range(PARTS):
                now_s = number + part / PARTS
                for place, talker in enumerate(sessions):
                    heard = (part - place) % PARTS
                    if number == 0 and part < place:
                        continue
                    if heard < len(frames):
                        talker.hear(frames[heard])
                    else:
                        await talker.unit(last)
                if part % round(PARTS * TICK_S) == 0:
                    recorder._serve_aged()

        await second(0)
        await second(1)
        handed_over.count, blocks = 0, recorder.statistics.blocks
        before = sum(log.next_seq for log in recorder._logs)
        disk.calls.clear()
        for number in range(2, SECONDS):
            await second(number)
        units = SESSIONS * (SECONDS - 2)
        pieces = PARTS * (2 if coding == "openai" else 1)  # each is searched for speech
        found = sum(log.next_seq for log in recorder._logs) - before
        assert found <= units * (pieces + records)
        assert recorder.statistics.blocks - blocks == units
        assert handed_over.count == units
        assert disk.calls.count("write") == units
        for talker in sessions:
            await talker.finish()


async def test_what_no_answer_follows_is_written_at_the_next_tick() -> None:
    """Who follows a recording hears a muted user a second late."""
    now_s, disk = 0.0, MemoryDisk()
    with Recorder(disk=disk, clock=lambda: now_s, inline=True) as recorder:
        log = recorder.open(PATH, {}, at_ns=0)
        log.append(record("tx", 1, frame="a", ordinal=0), urgent=True)
        policy, seq, written = RecorderPolicy(), 2, []
        while now_s < policy.age_s_max + 1:
            now_s += policy.tick_s
            log.append(record("mark", seq))
            recorder._serve_aged()
            written.append(log.written_seq == seq)
            seq += 1
    waited = round(policy.age_s_max / policy.tick_s) - 1
    assert written == [False] * waited + [True] * (len(written) - waited)


async def test_a_unit_wakes_the_thread_once_and_the_loop_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each further waking costs as much as packing a unit's sound."""
    wakes, loop_wakes = 0, 0
    with Recorder(RecorderPolicy(tick_s=1000.0), disk=MemoryDisk()) as recorder:
        (talker,) = talkers(recorder, 1)
        await talker.unit(UNITS[0])
        shared, run = recorder._shared, Loop._run
        bell = shared.wakeup_lock

        class Bell:
            """Counts how often the thread is woken."""

            locked, release = bell.locked, bell.release

            def acquire(self, timeout: float = -1) -> bool:
                nonlocal wakes
                is_rung = bell.acquire(timeout=timeout)
                wakes += 1
                return is_rung

        def ran(loop: Loop) -> None:
            nonlocal loop_wakes
            loop_wakes += 1
            run(loop)

        monkeypatch.setattr(shared, "wakeup_lock", Bell())
        monkeypatch.setattr(Loop, "_run", ran)
        with anyio.fail_after(20):
            for number in range(SECONDS):
                await talker.unit(UNITS[number % len(UNITS)])
        assert wakes <= SECONDS + 1
        assert loop_wakes <= SECONDS
        monkeypatch.undo()
        await talker.finish()
