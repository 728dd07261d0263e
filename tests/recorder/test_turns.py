"""The law between logs: whatever others hold back, a log with little to write is written soon.

`Clocked` is a disk of a finite rate on a clock of its own, which only writing moves. The recorder's
thread is played by the test, round by round.
"""

from __future__ import annotations

import os
from typing import Final

import pytest

from recorder.format.format import MIB, LogFailed, Record
from recorder.read.reader import LogReader
from recorder.repair import verify
from recorder.write.log import SessionLog
from recorder.write.writer import QUANTUM_BYTES, Recorder, RecorderPolicy
from tests.recorder.test_samples import PATH, MemoryDisk, record

DISK_BYTES_PER_S: Final = 10 * MIB
FLOODERS: Final = 24
FLOOD: Final = os.urandom(4 * MIB)
UNIT: Final = os.urandom(100 << 10)
SECONDS: Final = 12
POLICY: Final = RecorderPolicy(durability="none", session_backlog_bytes_max=64 * MIB)


class Clocked(MemoryDisk):
    """A disk in memory that takes so many bytes a second of its own clock; it keeps only some."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def write(self, descriptor: int, data: memoryview) -> int:
        """Take all, in its time."""
        self.now_s += len(data) / DISK_BYTES_PER_S
        return super().write(descriptor, data)


class Played:
    """A recorder whose thread is the test."""

    def __init__(self) -> None:
        self.disk = Clocked()
        self.failures: list[LogFailed] = []
        self.recorder = Recorder(POLICY, disk=self.disk, inline=True)
        self.recorder._shared.serve_here = lambda: None

    def open(self, name: str) -> SessionLog:
        """Open a log."""
        path = PATH.with_name(f"{name}.session.zst")
        return self.recorder.open(path, {}, at_ns=0, on_failure=self.failures.append)

    def put(self, log: SessionLog, data: bytes) -> int:
        """Append a record that is waited for; gives its seq."""
        log.append(record("rx", log.next_seq, frame=data), urgent=True)
        return log.next_seq - 1

    def wait_s(self, log: SessionLog, seq: int) -> float:
        """Serve until a record is written; gives how long the disk took."""
        began_s = self.disk.now_s
        while log.written_seq < seq:
            self.recorder._serve_a_round()
        return self.disk.now_s - began_s


def test_a_small_record_overtakes_what_others_hold_back() -> None:
    """Every call stutters for as long as it takes to write what others have sent."""
    played = Played()
    floods = [played.open(f"flood-{n}") for n in range(FLOODERS)]
    honest = played.open("honest")
    for log in floods:
        played.put(log, FLOOD)
    wait_s = played.wait_s(honest, played.put(honest, UNIT))
    assert wait_s < 2 * len(UNIT) / DISK_BYTES_PER_S
    assert min(log.backlog_bytes for log in floods) > MIB


def test_an_honest_log_waits_for_a_constant_and_is_never_given_up() -> None:
    """With one adversary an honest session's unit is late by more the more the adversary sends."""
    played = Played()
    honest = played.open("honest")
    floods = [played.open(f"flood-{n}") for n in range(FLOODERS)]

    def flood() -> None:
        for log in floods:
            if log.backlog_bytes < 2 * len(FLOOD):
                played.put(log, FLOOD)

    waits = []
    for second in range(SECONDS):
        while played.disk.now_s < second:
            flood()
            played.recorder._serve_a_round()
            for path in played.disk.files:  # what was written is of no more use
                if "flood" in path.name:
                    played.disk.files[path].clear()
        flood()
        waits.append(played.wait_s(honest, played.put(honest, UNIT)))
    constant_s = (2 * len(UNIT) + 2 * QUANTUM_BYTES) / DISK_BYTES_PER_S
    assert max(waits) <= constant_s, waits
    assert played.failures == []


def test_all_that_is_held_back_is_written_in_the_end() -> None:
    """A log in debt would never be served again, and its end would be lost."""
    played = Played()
    logs = [played.open(f"log-{n}") for n in range(4)]
    seqs = [played.put(log, FLOOD) for log in logs for _ in range(3)]
    played.recorder._serve_called_up()
    played.recorder.close()
    assert [log.written_seq for log in logs] == seqs[2::3]
    assert [log.backlog_bytes for log in logs] == [0] * 4
    for log in logs:
        with LogReader(played.disk.data(log.path)) as reader:
            records = [item for item in reader if isinstance(item, Record)]
        assert [item.fields["frame"] for item in records if item.kind == "rx"] == [FLOOD] * 3


@pytest.mark.parametrize("rounds", [2, 4, 6, 8])
def test_a_log_that_is_given_up_amid_a_record_is_readable(rounds: int) -> None:
    """What was recorded before would be lost with what was not."""
    played = Played()
    log, other = played.open("log"), played.open("other")
    played.put(log, b"first")
    played.recorder._serve_called_up()
    played.put(log, FLOOD)
    for _ in range(rounds):
        played.put(other, UNIT)
        played.recorder._serve_a_round()
    log.abandon("seen enough")
    played.recorder._serve_called_up()
    assert log.backlog_bytes == 0
    assert verify(played.disk.data(log.path)).state == "open"
    assert played.disk.open_files == 1
    played.recorder.close()
    assert verify(played.disk.data(other.path)).last_seq == rounds


def test_who_holds_less_than_its_share_is_not_full() -> None:
    """All callers would wait, two seconds each, for what one of them sends."""
    policy = RecorderPolicy(total_backlog_bytes_max=8 * MIB, durability="none")
    with Recorder(policy, disk=MemoryDisk(), inline=True) as recorder:
        recorder._shared.serve_here = lambda: None
        names = [PATH.with_name(f"{n}.session.zst") for n in range(8)]
        logs = [recorder.open(name, {}, at_ns=0) for name in names]
        logs[0].append(record("rx", 1, frame=bytes(8 * MIB)))
        logs[1].append(record("rx", 1, frame=bytes(MIB // 2)))
        assert [log.is_full for log in logs] == [True] + [False] * 7
        logs[1].append(record("rx", 2, frame=bytes(MIB // 2)))
        assert [log.is_full for log in logs] == [True, True] + [False] * 6
