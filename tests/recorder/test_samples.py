"""Logs to test with: a disk in memory that can fail, small records, and the bytes of a log.

The other recorder tests import from here; what is tested here is that the samples are worth it.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pybase64

from recorder.format.format import HEADER_BYTES, Fields, Record, unpack_header
from recorder.read.reader import end_of_blocks
from recorder.read.scan import BytesSource
from recorder.write.files import Disk
from recorder.write.logfile import Compressor, LogFile

PATH = Path("/logs/sample.session.zst")
SESSION: Fields = {"config": {"temperature": 0.7}, "seed": 1, "voice": b"v" * 100}


class MemoryDisk(Disk):
    """Files in memory; `failing` names operations that raise, `write_max` makes writes short."""

    def __init__(self, *, write_max: int = 1 << 30) -> None:
        self.files: dict[Path, bytearray] = {}
        self.failing: set[str] = set()
        self.write_max = write_max
        self.calls: list[str] = []
        self.wrote = threading.Event()
        self.synced: Callable[[], object] = bool
        self.hold = threading.Event()
        self.hold.set()
        self._open: dict[int, Path] = {}

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failing:
            raise OSError(errno.ENOSPC, f"no {name}")

    def create(self, path: Path) -> int:
        self._call("create")
        if path in self.files:
            raise FileExistsError(errno.EEXIST, "exists", str(path))
        self.files[path] = bytearray()
        descriptor = 100 + len(self.calls)
        self._open[descriptor] = path
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        self.hold.wait(20)
        self._call("write")
        taken = data[: self.write_max]
        self.files[self._open[descriptor]] += taken
        self.wrote.set()
        return len(taken)

    def sync(self, descriptor: int) -> None:
        assert descriptor in self._open
        self._call("sync")
        self.synced()

    def is_there(self, path: Path, descriptor: int, file_bytes: int = 0) -> bool:
        """Say that nobody removes files here."""
        return True

    def remove(self, path: Path, descriptor: int | None) -> None:
        """Refuse what no test here asks for."""
        raise NotImplementedError

    def mark_failed(self, descriptor: int) -> None:
        """Do nothing: no server goes on with these."""

    def sync_directory(self, path: Path) -> None:
        assert path == PATH.parent
        self._call("sync_directory")

    def close(self, descriptor: int) -> None:
        del self._open[descriptor]
        self._call("close")

    @property
    def open_files(self) -> int:
        return len(self._open)

    def data(self, path: Path = PATH) -> bytes:
        return bytes(self.files[path])


def record(kind: str, seq: int, **fields: object) -> Record:
    return Record(kind=kind, seq=seq, at_ns=1000 * seq, fields=fields)  # type: ignore[arg-type]


def pcm(samples: int, seed: int = 0) -> bytes:
    """PCM as a model makes it: float32 LE that no 16-bit value gives."""
    noise = np.random.default_rng(seed).normal(scale=0.1, size=samples)
    return noise.astype("<f4").tobytes()


def sample_steps(samples: int = 100) -> list[list[Record]]:
    """Three blocks after the head: frames in, a unit out, a second that names its blob."""
    heard, made = pcm(samples, 1), pcm(samples, 2)
    frame = '{"type":"append","audio":"' + pybase64.b64encode_as_string(heard) + '","n":1}'
    delta = '{"type":"delta","audio":"' + pybase64.b64encode_as_string(made) + '"}'
    return [
        [record("rx", 1, frame=frame), record("event", 2, name="UnitStarted", frame=1)],
        [record("unit", 3, index=0, pcm=made, text="so"), record("tx", 4, frame=delta, ordinal=0)],
        [record("unit", 5, index=1, pcm=made, text=""), record("mark", 6, by="human", at=0.1)],
    ]


def make_log(steps: Iterable[list[Record]], *, fin: bool = True) -> bytes:
    """Write a log in memory, one block a step."""
    disk = MemoryDisk()
    file = LogFile(PATH, disk=disk, compressor=Compressor())
    file.create()
    head = Record(kind="session", seq=0, at_ns=0, fields=SESSION)
    last = 0
    for step in ([head], *steps):
        last = [written.last_seq for written in file.write(step)][-1]
    if fin:
        list(file.write([record("fin", last + 1, reason="closed")]))
    file.close()
    return disk.data()


def block_offsets(log: bytes) -> list[int]:
    """Where the blocks of a sound log start; the last is where they end: at its seek table."""
    end = end_of_blocks(BytesSource(log))
    offsets = [0]
    while offsets[-1] < end:
        header = unpack_header(log[offsets[-1] : offsets[-1] + HEADER_BYTES])
        offsets.append(offsets[-1] + HEADER_BYTES + header.compressed_len)
    return offsets


def test_sample_log_has_five_blocks() -> None:
    """The damage tests would prove nothing on a log of one block."""
    log = make_log(sample_steps())
    assert len(block_offsets(log)) == 6
    assert len(log) < 4000


def test_short_writes_give_the_same_file() -> None:
    """A disk that takes a few bytes at a time would leave holes in every log."""
    disks = [MemoryDisk(), MemoryDisk(write_max=7)]
    for disk in disks:
        file = LogFile(PATH, disk=disk, compressor=Compressor())
        file.create()
        list(file.write([Record(kind="session", seq=0, at_ns=0, fields=SESSION)]))
        list(file.write(sample_steps()[0]))
        file.close()
    assert disks[0].data() == disks[1].data()
