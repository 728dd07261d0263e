"""What a log costs: `python -m tests.bench.recording --help`.

**Recording.** A real `Session` gets the events of a talkative video session; the real `Journal` and
`Recorder` keep the results. Without server and model, only the log's CPU is measured: the journal's
calls in the session's task, and the recorder's thread.

- `busy`: unit after unit, as fast as possible, in turns with other formats (`formats`).
- `paced`: a unit a second per session, as in service, with cold caches and low clocks.

**Replay.** A log of a server's session is replayed by the user's command in its own process. The
replay's own measure counts from opening the log; the process's includes Python's start.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import anyio
import attrs
import click
import orjson
from rich.console import Console
from rich.table import Table

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.model import Costs, Finalized, Opened, UnitResult
from protocol.values.requests import Append, Init
from protocol.wire.dialects.realtime import REALTIME
from recorder.format.format import Fields, Record
from recorder.storage.store import Store
from recorder.write.log import SessionLog
from recorder.write.writer import Recorder
from runtime import RUN
from runtime.commands.bench import (
    BenchError,
    Speech,
    Times,
    camera_frame,
    load_speech,
    machine_facts,
    machine_line,
    print_found,
    print_progress,
    sum_up,
    table,
)
from runtime.commands.demo import served
from runtime.net import process
from runtime.net.connection import Ready
from runtime.session.journal import Journal, OpenLog
from runtime.session.setup import Identity, SystemIdentities
from tests.bench.formats import FormatName, JsonLines, Mcap, UnitFormat, Wav
from tests.bench.gateway.material import input_second, output_second
from tests.bench.units import SECONDS, SECONDS_MAX, SESSIONS_MANY, measure_units

# -- a session without server or model ------------------------------------------------------------

TOKENS: Final = 12
CODES: Final = 25


@attrs.frozen(kw_only=True)
class TalkUnit:
    """A second: its sound and picture, the frame that carries them, and the answer."""

    append: Append
    frame: str
    pcm: bytes


def make_unit(speech: Speech, number: int) -> TalkUnit:
    """Make a second that differs from all others."""
    append = Append(pcm=input_second(speech, number), frames=(camera_frame(number),))
    return TalkUnit(
        append=append, frame=REALTIME.encode_request(append), pcm=output_second(speech, number)
    )


BEGIN: Final = REALTIME.encode_request(Init(instructions="be brief"))


class Talker:
    """A session and its journal, fed with a server's events; counts CPU, and waits for the log."""

    def __init__(
        self,
        open_log: OpenLog,
        identity: Identity,
        *,
        endpoint: ev.Endpoint = "realtime",
        begin: str = BEGIN,
    ) -> None:
        """`begin`: the client's first message, in the dialect of `endpoint`."""
        self.cpu_ns = 0
        self.waits_ms: list[float] = []
        self._began_ns = time.monotonic_ns()
        self._journal = Journal(open_log, on_failure=_fail)
        self._index = -1
        self._kv_length = 40
        limits = ev.SessionLimits(
            session_s=3600,
            init_wait_s=30,
            cleanup_wait_s=10,
            context_tokens=1 << 30,
            models=("bench",),
        )
        opened = ev.ConnectionOpened(
            recording_id=identity.recording_id,
            created_ms=identity.created_ms,
            mode="video" if endpoint == "realtime" else "audio",
            endpoint=endpoint,
            label="bench" if endpoint == "openai" else "",
            seed=identity.seed,
            limits=limits,
            recording="on",
        )
        self._journal.append_event(opened)
        self._session, effects = Session.open(opened)
        self._journal.append_effects(self._session, opened, effects)
        self._post(ev.SlotLeased, lease=1, slot=0)
        self._post(ev.FrameReceived, frame=begin)
        self.cpu_ns = 0

    def hear(self, frame: str) -> None:
        """Hear a piece of a second."""
        self._post(ev.FrameReceived, frame=frame)

    async def unit(self, unit: TalkUnit) -> None:
        """Hear, answer and finalize a second, and wait until the answer may be sent."""
        self._index += 1
        effects, _ = self._post(ev.FrameReceived, frame=unit.frame)
        for decode in [effect for effect in effects if isinstance(effect, ef.DecodeMedia)]:
            pcm = unit.append.pcm if decode.kind == "second" else b""
            effects, _ = self._post(ev.MediaDecoded, media=decode.media, pcm=pcm)
        assert any(isinstance(effect, ef.StartUnit) for effect in effects)
        result = self._result(unit)
        began_ns = time.perf_counter_ns()
        _, ready = self._post(ev.UnitDone, result=result)
        await ready()
        self.waits_ms.append((time.perf_counter_ns() - began_ns) / 1e6)
        kv_length = self._kv_length = self._kv_length + 2
        done = Finalized(index=self._index, kv_length=kv_length, fed_ids=(7, 8), cost_us=37_000)
        self._post(ev.FinalizeDone, finalized=done)

    def _result(self, unit: TalkUnit) -> UnitResult:
        self._kv_length += 70 + TOKENS
        return UnitResult(
            index=self._index,
            is_listen=False,
            text="so the answer to it is",
            pcm=unit.pcm,
            kv_length=self._kv_length,
            decided_ids=tuple(range(100, 100 + TOKENS)),
            fed_ids=tuple(range(100, 100 + TOKENS)),
            codec_ids=tuple((self._index * 37 + code * 91) % 6561 for code in range(CODES)),
            input_hash="5" * 32,
            logits_hash="7" * 32,
            margin=1.25,
            vision_slices=1,
            vision_tokens=64,
            costs=Costs(prefill_us=60_000, generate_us=300_000, llm_us=200_000, wall_us=360_000),
        )

    def _post(self, kind: type[Any], **fields: object) -> tuple[tuple[ef.Effect, ...], Ready]:
        event = kind(at_ns=time.monotonic_ns() - self._began_ns, **fields)
        before_ns = time.thread_time_ns()
        self._journal.append_event(event, is_step=True)
        self.cpu_ns += time.thread_time_ns() - before_ns
        effects = self._session.step(event)
        before_ns = time.thread_time_ns()
        ready = self._journal.append_effects(self._session, event, effects)
        self.cpu_ns += time.thread_time_ns() - before_ns
        if ef.OpenBackend in map(type, effects):
            return self._post(ev.BackendOpened, lease=1, opened=Opened(prompt_length=40))
        return effects, ready

    async def finish(self) -> None:
        """End the log."""
        await self._journal.finish(time.monotonic_ns() - self._began_ns, {"reason": "client"})


def _fail() -> None:
    raise AssertionError("the log failed")


class Kept:
    """A log in memory, with the interface that `Journal` uses."""

    is_full = False
    steps_of_all = 0
    failure = None

    def __init__(self) -> None:
        self.records: list[Record] = []

    def append(self, *records: Record, urgent: bool) -> None:
        """Take records."""
        self.records += records

    async def written(self, seq: int) -> None:
        """Wait for nothing."""

    async def finish(self, fields: Fields, *, at_ns: int) -> None:
        """Wait for nothing."""


# -- recording ------------------------------------------------------------------------------------

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
            "jpeg_in": sum(len(each) for each in append.frames if isinstance(each, bytes)),
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


# -- replay ---------------------------------------------------------------------------------------

RUNS: Final = 3
"""The median counts."""


@attrs.frozen(kw_only=True)
class ReplayResult:
    """The duration of logic replay of a log.

    Attributes:
        result: `identical`, or the replay's other verdict.
        elapsed_ms: median, opening the log included.
        times_real_time: `session_s` divided by it.
        process_ms: median with the start of a process.
        times_real_time_process: `session_s` divided by it.
    """

    session_s: float
    units: int
    events: int
    result: str
    elapsed_ms: float
    times_real_time: float
    process_ms: float
    times_real_time_process: float


async def measure_replay(log: Path) -> ReplayResult:
    """Replay a log several times; `BenchError` if it cannot be replayed."""
    reports = []
    processes_ms = []
    for _ in range(RUNS):
        began_ns = time.perf_counter_ns()
        done = await anyio.run_process(
            [*RUN, "replay", str(log), "--json"], check=False, stderr=subprocess.STDOUT
        )
        processes_ms.append((time.perf_counter_ns() - began_ns) / 1e6)
        try:
            reports.append(orjson.loads(done.stdout))
        except orjson.JSONDecodeError:
            said = done.stdout.decode(errors="replace").strip()
            raise BenchError(f"a log of this run cannot be replayed: {said}") from None
    report = reports[0]
    session_s = report["span_ns"] / 1e9
    elapsed_ms = statistics.median(each["elapsed_ms"] for each in reports)
    process_ms = statistics.median(processes_ms)
    return ReplayResult(
        session_s=round(session_s, 3),
        units=report["units"],
        events=report["events"],
        result=report["result"],
        elapsed_ms=round(elapsed_ms, 3),
        times_real_time=round(1000 * session_s / elapsed_ms, 1),
        process_ms=round(process_ms, 3),
        times_real_time_process=round(1000 * session_s / process_ms, 1),
    )


# -- the command ----------------------------------------------------------------------------------

LOGS: Final = "*.session.zst"
FORMAT_NAMES: Final[dict[FormatName, str]] = {
    "json_lines": "JSON lines, zstd",
    "mcap": "MCAP, zstd",
    "wav": "16-bit WAV, JSON",
}


@attrs.frozen(kw_only=True)
class Bench:
    """The results of one run."""

    machine: dict[str, str | int | float]
    speech: str
    seconds: int
    replay: ReplayResult
    recording: RecordingResult


@click.command("recording")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--model", default="tiny", show_default=True, help="Of the server whose log is replayed."
)
@click.option(
    "--seconds",
    type=click.IntRange(2, SECONDS_MAX),
    default=SECONDS,
    show_default=True,
    help="Units of each session; there are three runs of so many seconds.",
)
def recording_command(*, as_json: bool, model: str, seconds: int) -> None:
    """Measure recording and replay: CPU and bytes a unit, next to simpler formats.

    It takes about two minutes, and wants a machine that does nothing else meanwhile.
    """
    print_found(process.run(_run, model, seconds), _show, as_json=as_json)


async def _run(model: str, seconds: int) -> Bench:
    speech = load_speech()
    with tempfile.TemporaryDirectory(prefix="antiphon-bench-") as name:
        folder = Path(name)
        print_progress(f"a session of {seconds} s with the {model} model, to be replayed")
        async with served(model, folder) as url:
            await measure_units(url, speech, sessions=1, seconds=seconds, arrival="spread")
        print_progress("replaying it")
        replay = await measure_replay(_first_log(folder))
        print_progress("recording, without a server")
        recording = await measure_recording(
            speech, folder, seconds=seconds, sessions_many=SESSIONS_MANY
        )
    return Bench(
        machine=machine_facts(),
        speech=speech.name,
        seconds=seconds,
        replay=replay,
        recording=recording,
    )


def _first_log(folder: Path) -> Path:
    """Find the first session's log: names begin with the time."""
    return min(folder.glob(LOGS))


# -- for people -----------------------------------------------------------------------------------


def _show(console: Console, found: Bench) -> None:
    facts = machine_line(found.machine)
    console.print(f"{found.seconds} s of {found.speech} a session; {facts}\n")
    replay = found.replay
    console.print(f"Logic replay of {replay.session_s:.1f} s: {replay.result}")
    console.print(_replay_table(replay))
    console.print("Recording a unit", _recording_table(found.recording))
    console.print("The same at full speed, in other formats", _formats_table(found.recording))


def _both(times: Times | None) -> str:
    return "-" if times is None else f"{times.p50_ms:.1f} / {times.p99_ms:.1f}"


def _replay_table(replay: ReplayResult) -> Table:
    rows: list[tuple[str, ...]] = [
        ("the replay", f"{replay.elapsed_ms:.0f}", f"{replay.times_real_time:.0f}"),
        ("with a process", f"{replay.process_ms:.0f}", f"{replay.times_real_time_process:.0f}"),
    ]
    return table(["", "ms", "times real time"], rows)


def _recording_table(found: RecordingResult) -> Table:
    costs = [found.busy, *(paced.cost for paced in found.paced)]
    rows: list[tuple[str, ...]] = [
        ("CPU ms a unit", *(f"{cost.total_ms:.2f}" for cost in costs)),
        ("  session's task", *(f"{cost.session_ms:.2f}" for cost in costs)),
        ("  recorder's thread", *(f"{cost.thread_ms:.2f}" for cost in costs)),
        ("send waits, ms", "", *(_both(paced.send_wait) for paced in found.paced)),
    ]
    paced = [f"{each.sessions} a second" for each in found.paced]
    return table(["", "full speed", *paced], rows)


def _formats_table(found: RecordingResult) -> Table:
    formats = found.formats
    rows: list[tuple[str, ...]] = [
        ("kB a unit", *(f"{size / 1000:.0f}" for size in _sizes(found))),
        ("  the log's relative to it", "1", *(f"{each.of_file_bytes:.2f}" for each in formats)),
        (
            "CPU ms a unit",
            *(f"{cost.total_ms:.2f}" for cost in (found.busy, *(each.cost for each in formats))),
        ),
        ("  the log's relative to it", "1", *(f"{each.of_cost:.2f}" for each in formats)),
        ("keeps every byte", "yes", *("yes" if it.keeps_every_byte else "no" for it in formats)),
    ]
    return table(["", "log", *(FORMAT_NAMES[each.name] for each in formats)], rows)


def _sizes(found: RecordingResult) -> list[int]:
    return [found.file_bytes, *(each.file_bytes for each in found.formats)]


if __name__ == "__main__":
    recording_command(prog_name="python -m tests.bench.recording")
