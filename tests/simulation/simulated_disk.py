"""A disk in memory that fails as drawn, and a recorder that a simulation drives on virtual time.

`FaultyDisk` keeps the bytes of each file, so that logs can be read back. What it does: refuse to
create, run full (ENOSPC, often amid a block), break (EIO), write a part, fail to sync.

`SlowRecorder` does on virtual time what the recorder's thread does: it serves what waits, four
times a second. While the disk is slow it serves nothing, so that
clients wait for the log and readers pause, as behind a device that hangs.
"""

from __future__ import annotations

import errno
from pathlib import Path
from random import Random
from typing import Final

import anyio
import attrs

from recorder.write.files import Disk
from recorder.write.writer import Recorder, RecorderPolicy

TICK_S: Final = 0.25
"""As the recorder's own `tick_s`."""


@attrs.frozen(kw_only=True)
class DiskPlan:
    """What goes wrong with a disk while faults are on.

    Attributes:
        capacity_bytes: then it is full.
        create_fails: out of 1000.
        write_fails: likewise.
        short_writes: likewise; the rest is written next.
        sync_fails: likewise.
        slow: moments between which nothing is written, as (begin_s, end_s).
    """

    capacity_bytes: int = 1 << 40
    create_fails: int = 0
    write_fails: int = 0
    short_writes: int = 0
    sync_fails: int = 0
    slow: tuple[tuple[float, float], ...] = ()


class FaultyDisk(Disk):
    """A disk in memory.

    Attributes:
        files: what was written, by the log's name.
        faulty: names of the files that an error befell.
        is_sound: nothing fails any more.
    """

    def __init__(self, plan: DiskPlan, seed: str) -> None:
        self._plan = plan
        self._dice = Random(seed)
        self._open: dict[int, str] = {}
        self._descriptors = 0
        self._written = 0
        self.files: dict[str, bytearray] = {}
        self.faulty: set[str] = set()
        self.is_sound = False

    @property
    def open_files(self) -> int:
        """Files that are open."""
        return len(self._open)

    def create(self, path: Path) -> int:
        """Create a file that must not exist yet."""
        assert path.name not in self.files, "a log is created once"
        self._may_fail(self._plan.create_fails, path.name, errno.EACCES)
        self._descriptors += 1
        self._open[self._descriptors] = path.name
        self.files[path.name] = bytearray()
        return self._descriptors

    def write(self, descriptor: int, data: memoryview) -> int:
        """Append some of `data`."""
        name = self._open[descriptor]
        self._may_fail(self._plan.write_fails, name, errno.EIO)
        count = len(data)
        if not self.is_sound:
            left = self._plan.capacity_bytes - self._written
            if left <= 0:
                self._fail(name, errno.ENOSPC)
            count = min(count, left)
        if count > 1 and self._happens(self._plan.short_writes):
            count = 1 + self._dice.randrange(count - 1)
        self.files[name] += data[:count]
        self._written += count
        return count

    def sync(self, descriptor: int) -> None:
        """Do nothing, or fail."""
        self._may_fail(self._plan.sync_fails, self._open[descriptor], errno.EIO)

    def is_there(self, path: Path, descriptor: int, file_bytes: int = 0) -> bool:
        """Say that nobody removes files here."""
        return True

    def remove(self, path: Path, descriptor: int | None) -> None:
        """Refuse what no test here asks for."""
        raise NotImplementedError

    def mark_failed(self, descriptor: int) -> None:
        """Do nothing: no server goes on with these."""

    def sync_directory(self, path: Path) -> None:
        """Do nothing."""

    def close(self, descriptor: int) -> None:
        """Close the file."""
        del self._open[descriptor]

    def _happens(self, of_1000: int) -> bool:
        return not self.is_sound and self._dice.randrange(1000) < of_1000

    def _may_fail(self, of_1000: int, name: str, number: int) -> None:
        if self._happens(of_1000):
            self._fail(name, number)

    def _fail(self, name: str, number: int) -> None:
        self.faulty.add(name)
        raise OSError(number, errno.errorcode[number])


class SlowRecorder:
    """A recorder without threads, on virtual time.

    Args:
        disk: where to.
        plan: when it is slow.
        policy: how logs are kept.
    """

    def __init__(self, disk: FaultyDisk, plan: DiskPlan, policy: RecorderPolicy) -> None:
        self._disk, self._plan = disk, plan
        self.recorder = Recorder(policy, disk=disk, clock=anyio.current_time, inline=True)
        self.recorder._shared.serve_here = self._serve_unless_slow

    @property
    def is_slow(self) -> bool:
        """Whether nothing is written now."""
        now_s = anyio.current_time()
        return not self._disk.is_sound and any(a <= now_s < b for a, b in self._plan.slow)

    def _serve_unless_slow(self) -> None:
        if not self.is_slow:
            self.recorder._serve_called_up()

    async def run(self) -> None:
        """Serve what nobody has waited for, until cancelled."""
        while True:
            await anyio.sleep(TICK_S)
            if not self.is_slow:
                self.recorder._serve_aged()
