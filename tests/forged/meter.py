"""What it costs to read a log: CPU and memory, each way of reading in a process of its own.

    python -m tests.forged.meter    stdin: ways and a path a line; stdout: what each cost, as JSON

A way of reading may raise what it documents. Anything else it raises, more than `LIMIT_CPU_S` or
more than `LIMIT_BYTES` is a fault, and so is a cost above what a file of its size may have.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import attrs

from recorder.format.format import RecorderError
from recorder.read.reader import LogReader
from recorder.read.scan import FileSource, Scanner
from recorder.repair import NotCompactable, compact, recover, survey, verify
from recorder.storage.listing import Listing, whole_bytes
from recorder.storage.store import Store
from replay.rerun.logic import replay
from replay.story.inspect import inspect
from replay.view.document import page_of

LIMIT_CPU_S: Final = 60
LIMIT_BYTES: Final = 8 << 30
FOLDER: Final = Path(__file__).parents[2]


@attrs.frozen(kw_only=True)
class Budget:
    """What reading may cost: so much for any file, and so much more for each byte of it.

    Attributes:
        cpu_s: for any file.
        cpu_s_per_mb: for a million bytes.
        mb: megabytes of memory for any file.
        mb_per_mb: more of them for a million bytes.
        mb_max: for a file of any size: some times the largest block.
    """

    cpu_s: float
    cpu_s_per_mb: float
    mb: float
    mb_per_mb: float
    mb_max: float

    def cpu_share(self, cost: Cost) -> float:
        """The part of its CPU that something took; above 1 is too much."""
        return cost.cpu_s / (self.cpu_s + self.cpu_s_per_mb * cost.file_bytes / 1e6)

    def memory_share(self, cost: Cost) -> float:
        """The part of its memory that something took."""
        return cost.mb / min(self.mb + self.mb_per_mb * cost.file_bytes / 1e6, self.mb_max)


@attrs.frozen(kw_only=True)
class Cost:
    """What one way of reading one log cost.

    Attributes:
        way: a key of `WAYS`.
        file_bytes: of the log.
        cpu_s: user and system time.
        mb: megabytes that the process grew by at most.
        fault: what it raised and should not; None where nothing.
    """

    way: str
    file_bytes: int
    cpu_s: float
    mb: float
    fault: str | None = None


# -- ways of reading -------------------------------------------------------------------------------


def _exhaust(items: Iterator[object]) -> None:
    deque(items, maxlen=0)


def _scan(log: Path) -> None:
    file = FileSource(log)
    _exhaust(iter(Scanner(file)))
    whole_bytes(file)


def _read(log: Path) -> None:
    with LogReader(log) as reader:
        _exhaust(iter(reader))


def _seek(log: Path) -> None:
    with LogReader(log) as reader:
        _exhaust(reader.at(3))


def _list(log: Path) -> None:
    listed = Listing(Store(log.parent)).refresh()
    assert [it.recording_id for it in listed] == [log.name.removesuffix(".session.zst")]


def _replay(log: Path) -> None:
    with LogReader(log) as reader:
        replay(reader, go_on=True)


def _inspect(log: Path) -> None:
    with LogReader(log) as reader:
        inspect(reader.head.fields, reader)


def _view(log: Path) -> None:
    with LogReader(log) as reader:
        _exhaust(page_of(reader.head.fields, reader, replayed=True, comparison=None))


def _recover(log: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        recover(log, Path(folder) / "a.session.zst", survey(log, salvage=True))


def _compact(log: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, suppress(NotCompactable):
        compact(log, Path(folder) / "a.session.zst")


WAYS: Final[MappingProxyType[str, Callable[[Path], object]]] = MappingProxyType(
    {
        "list": _list,
        "scan": _scan,
        "read": _read,
        "verify": verify,
        "seek": _seek,
        "replay": _replay,
        "inspect": _inspect,
        "view": _view,
        "recover": _recover,
        "compact": _compact,
    }
)
"""`list` is what a server does with each log of its folder."""

CHEAP: Final = Budget(cpu_s=0.5, cpu_s_per_mb=0, mb=128, mb_per_mb=0, mb_max=128)
"""Of the list: it looks at the two ends, whatever is between them."""
LINEAR: Final = Budget(cpu_s=3, cpu_s_per_mb=60, mb=400, mb_per_mb=4096, mb_max=1000)
"""Of all others: `recorder.format.format.Expansion` with a machine that is busy."""
BUDGETS: Final = {way: CHEAP if way == "list" else LINEAR for way in WAYS}


# -- measuring -------------------------------------------------------------------------------------


def measure(way: str, log: Path) -> Cost:
    """Read a log in one way, in a child; what it raises is in the cost."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            os.write(writing, json.dumps(_run(WAYS[way], log)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    _, status, used = os.wait4(child, 0)
    said: dict[str, Any] = {"fault": f"ended with status {status}", "mb": 0.0}
    if told:
        said = json.loads(told)
    return Cost(
        way=way,
        file_bytes=log.stat().st_size,
        cpu_s=round(said.get("cpu_s", used.ru_utime + used.ru_stime), 4),
        mb=round(said["mb"], 1),
        fault=said["fault"],
    )


def _run(work: Callable[[Path], object], log: Path) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_CPU_S, LIMIT_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    before_kib, began_s = _peak_kib(), time.process_time()
    fault = None
    try:
        work(log)
    except RecorderError:
        pass
    except BaseException as error:
        fault = f"{type(error).__name__}: {error}"[:300]
    cpu_s = time.process_time() - began_s
    return {"cpu_s": cpu_s, "mb": (_peak_kib() - before_kib) * 1024 / 1e6, "fault": fault}


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Meter:
    """A process that reads logs; use `metering`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def read(self, log: Path, ways: Iterable[str] = WAYS) -> list[Cost]:
        """Read a log in some ways; it must be the only one in its folder."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{','.join(ways)} {log}\n")
        self._process.stdin.flush()
        return [Cost(**each) for each in json.loads(self._process.stdout.readline())]


@contextmanager
def metering() -> Iterator[Meter]:
    """Have a process of its own, of one thread, that forks for each way of reading a log."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.forged.meter"],
        cwd=FOLDER,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Meter(process)
        assert process.stdin is not None
        process.stdin.close()


def main() -> None:
    """Measure the logs that are named on stdin."""
    for line in sys.stdin:
        ways, _, log = line.rstrip("\n").partition(" ")
        costs = [measure(way, Path(log)) for way in ways.split(",")]
        print(json.dumps([attrs.asdict(cost) for cost in costs]), flush=True)


if __name__ == "__main__":
    main()
