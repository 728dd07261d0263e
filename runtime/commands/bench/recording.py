"""The cost of recording: CPU and bytes per unit, and how long a `Send` waits for the log.

A real `Session` gets the events of a talkative video session; the real `Journal` and `Recorder`
keep the results. Without server and model, only the log's CPU is measured: the journal's calls in
the session's task, and the recorder's thread.

- `busy`: unit after unit, as fast as possible, in turns with other formats (`recording_formats`).
  The baseline is lines of JSON, without blocks, checksums or chain.
- `paced`: a unit a second per session, as in service, with cold caches and low clocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, cast

import anyio
import attrs

from recorder.format.records import Fields
from recorder.keep.store import Store
from recorder.write.log import SessionLog
from recorder.write.writer import Recorder

from ...session.identity import Identity, SystemIdentities
from ...session.journal import OpenLog
from .material import Speech, Times, sum_up
from .recording_formats import FormatName, JsonLines, Mcap, UnitFormat, Wav
from .recording_session import Kept, Talker, TalkUnit, make_unit

TURNS: Final = 5
A_TURN: Final = 40
"""Units per turn of each format, so that other load affects all; in all a second of work each."""
WARM_UP_UNITS: Final = 10
UNITS_MADE: Final = 40
"""Different units; they repeat after twice as much as the recorder remembers of a log."""
RECORDER_THREAD: Final = "antiphon-recorder"


@attrs.frozen(kw_only=True)
class Cost:
    """CPU milliseconds per unit, in the session's task and in the recorder's thread."""

    session_ms: float
    thread_ms: float
    total_ms: float


@attrs.frozen(kw_only=True)
class Paced:
    """Sessions at one unit a second each; `send_wait` is from append to written."""

    sessions: int
    cost: Cost
    send_wait: Times


@attrs.frozen(kw_only=True)
class FormatResult:
    """The cost of another format, and the log's divided by it.

    Attributes:
        keeps_every_byte: the records can be restored from it.
        cost: CPU in the busy run.
        file_bytes: per unit, in its files.
        plain_bytes: the same uncompressed; 0 without compression.
    """

    name: FormatName
    keeps_every_byte: bool
    cost: Cost
    file_bytes: int
    plain_bytes: int
    of_cost: float
    of_file_bytes: float


@attrs.frozen(kw_only=True)
class RecordingResult:
    """The cost of recording.

    Attributes:
        unit_bytes: content of a unit.
        of_baseline: `busy` divided by `baseline`, in CPU.
        file_bytes: per unit, in the log.
        baseline_file_bytes: per unit, in the baseline's file.
        plain_bytes: the same as lines of JSON, uncompressed.
        formats: all others, the baseline first.
        paced: with one session and with many.
    """

    unit_bytes: dict[str, int]
    busy: Cost
    baseline: Cost
    of_baseline: float
    file_bytes: int
    baseline_file_bytes: int
    plain_bytes: int
    formats: list[FormatResult]
    paced: list[Paced]


async def measure_recording(
    speech: Speech, folder: Path, *, seconds: int, sessions_many: int
) -> RecordingResult:
    """Measure the busy runs, and paced runs of one and many sessions; `folder` takes the logs."""
    units = [make_unit(speech, number) for number in range(UNITS_MADE)]
    busy, file_bytes, formats = await _run_busy(units, folder)
    baseline = formats[0]
    paced = [
        await _run_paced(units, folder, sessions=sessions, seconds=seconds)
        for sessions in (1, sessions_many)
    ]
    append = units[0].append
    return RecordingResult(
        unit_bytes={
            "pcm_in": len(append.pcm),
            "jpeg_in": sum(map(len, append.frames)),
            "frame_in": len(units[0].frame),
            "pcm_out": len(units[0].pcm),
        },
        busy=busy,
        baseline=baseline.cost,
        of_baseline=baseline.of_cost,
        file_bytes=file_bytes,
        baseline_file_bytes=baseline.file_bytes,
        plain_bytes=baseline.plain_bytes,
        formats=formats,
        paced=paced,
    )


# -- the recorder -------------------------------------------------------------------------------


def _open_in(recorder: Recorder, folder: Path, identity: Identity) -> OpenLog:
    path = Store(folder).path(identity.recording_id)
    fields: Fields = {"recording_id": identity.recording_id, "schema": {"machine": 1}}
    return lambda on_failure: recorder.open(path, fields, at_ns=0, on_failure=on_failure)


@contextmanager
def _recorder() -> Iterator[tuple[Recorder, Callable[[], int]]]:
    """Run a recorder; with it a clock of its thread's CPU, in nanoseconds."""
    with Recorder() as recorder:
        threads = [thread for thread in threading.enumerate() if thread.name == RECORDER_THREAD]
        assert len(threads) == 1
        identity = threads[0].ident
        assert identity is not None
        clock = time.pthread_getcpuclockid(identity)
        yield recorder, partial(time.clock_gettime_ns, clock)


async def _run_busy(
    units: Sequence[TalkUnit], folder: Path
) -> tuple[Cost, int, list[FormatResult]]:
    """Keep units in the log and in all other formats, some in each at a time."""
    formats: list[UnitFormat] = [JsonLines(folder), Mcap(folder), Wav(folder)]
    others = [_FormatRun(each) for each in formats]
    with _recorder() as (recorder, thread_ns):
        identity = SystemIdentities().draw()
        talker = Talker(_open_in(recorder, folder, identity), identity)
        runs: list[Talker | _FormatRun] = [talker, *others]
        await _keep(runs, units[:WARM_UP_UNITS])
        began_bytes, began_ns = recorder.statistics.file_bytes, thread_ns()
        talker.cpu_ns = 0
        for other in others:
            other.begin()
        for turn in range(TURNS):
            await _keep(runs, [units[(turn * A_TURN + n) % len(units)] for n in range(A_TURN)])
        busy = _cost(talker.cpu_ns, thread_ns() - began_ns, TURNS * A_TURN)
        file_bytes = (recorder.statistics.file_bytes - began_bytes) // (TURNS * A_TURN)
        await talker.finish()
    return busy, file_bytes, [other.finish(busy, file_bytes) for other in others]


async def _keep(runs: Sequence[Talker | _FormatRun], units: Sequence[TalkUnit]) -> None:
    for run in runs:
        for unit in units:
            await run.unit(unit)


async def _run_paced(
    units: Sequence[TalkUnit], folder: Path, *, sessions: int, seconds: int
) -> Paced:
    with _recorder() as (recorder, thread_ns):
        identities = SystemIdentities()
        talkers = []
        for _ in range(sessions):
            identity = identities.draw()
            talkers.append(Talker(_open_in(recorder, folder, identity), identity))
        began_ns = thread_ns()
        async with anyio.create_task_group() as tasks:
            for number, talker in enumerate(talkers):
                tasks.start_soon(_pace, talker, units, seconds, number / sessions)
        spent_ns = thread_ns() - began_ns
        for talker in talkers:
            await talker.finish()
    return Paced(
        sessions=sessions,
        cost=_cost(sum(talker.cpu_ns for talker in talkers), spent_ns, sessions * seconds),
        send_wait=sum_up([ms for talker in talkers for ms in talker.waits_ms]),
    )


async def _pace(talker: Talker, units: Sequence[TalkUnit], seconds: int, late_s: float) -> None:
    began_s = anyio.current_time() + late_s
    for number in range(seconds):
        await anyio.sleep_until(began_s + number)
        await talker.unit(units[number % len(units)])


def _cost(session_ns: int, thread_ns: int, units: int) -> Cost:
    return Cost(
        session_ms=round(session_ns / 1e6 / units, 4),
        thread_ms=round(thread_ns / 1e6 / units, 4),
        total_ms=round((session_ns + thread_ns) / 1e6 / units, 4),
    )


# -- other formats ------------------------------------------------------------------------------


class _FormatRun:
    """A session whose records another format keeps."""

    def __init__(self, kept_in: UnitFormat) -> None:
        self._format: Final = kept_in
        self._kept = Kept()
        self._talker = Talker(lambda _: cast("SessionLog", self._kept), SystemIdentities().draw())
        self._spent_ns = self._began_bytes = 0

    def begin(self) -> None:
        """Measure from here."""
        self._talker.cpu_ns = self._spent_ns = self._format.plain_bytes = 0
        self._began_bytes = self._format.file_bytes()

    async def unit(self, unit: TalkUnit) -> None:
        """Keep a unit."""
        await self._talker.unit(unit)
        before_ns = time.thread_time_ns()
        self._format.write(self._kept.records)
        self._spent_ns += time.thread_time_ns() - before_ns
        self._kept.records.clear()

    def finish(self, busy: Cost, file_bytes: int) -> FormatResult:
        """Close the files, and compare the log with them."""
        units = TURNS * A_TURN
        cost = _cost(self._talker.cpu_ns, self._spent_ns, units)
        own_bytes = (self._format.file_bytes() - self._began_bytes) // units
        self._format.close()
        return FormatResult(
            name=self._format.name,
            keeps_every_byte=self._format.keeps_every_byte,
            cost=cost,
            file_bytes=own_bytes,
            plain_bytes=self._format.plain_bytes // units,
            of_cost=round(busy.total_ms / cost.total_ms, 3),
            of_file_bytes=round(file_bytes / own_bytes, 3),
        )
