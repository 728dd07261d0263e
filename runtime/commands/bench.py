"""`antiphon dev bench engine`: how many sessions an engine serves, in batches and one at a time.

- Both modes alternate in this process on one model, so that other load affects both. A unit is
  missed if answered more than a second after it was due, or never: a session `BEHIND_S` late is
  abandoned with its remaining units. `busy_ms` is the CPU time of the engine's thread per unit,
  which hardly depends on other load: a core serves 1000 / `busy_ms` sessions.
- `run_rebuilt` measures how fast a session is rebuilt, in past units per second of the thread's CPU
  time. A unit is a second, so the figures are multiples of real time. The session is that of the
  load in slot 0, with one more unit that listens: it ends the turn, so no speech is decoded again.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import anyio
import attrs
import click
import numpy as np
import orjson
import simplejpeg
from attrs import AttrsInstance
from numpy.typing import NDArray
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from protocol.values import model as md
from protocol.values.limits import NS_PER_S

from ..media.sound import read_wav
from ..model import models
from ..model.backends.base import BackendError
from ..model.engine.backend import BATCH_MAX, EngineBackend
from ..net import process
from ..settings.settings import DEVICES, DTYPES
from .demo import sample

if TYPE_CHECKING:
    from ..model.backends.minicpmo.model import DuplexModel

# -- what the benches share ------------------------------------------------------------------------


JPEG_SIDE: Final = 448
JPEG_BYTES: Final = 20_000
"""A camera's picture of this size at a usual quality; this one comes close to it."""
MS: Final = 1000.0

Arrival = Literal["together", "spread"]
"""Sessions' units are due all at once, or spread over the second."""
_Samples = NDArray[np.float32]


@attrs.frozen(kw_only=True)
class Times:
    """Percentiles of durations in milliseconds; with few values, the highest is the maximum."""

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float


def sum_up(durations_ms: Sequence[float]) -> Times:
    """Sum up durations, at least one, by nearest rank: each figure is a measured one."""
    p50, p99, longest = np.percentile(durations_ms, (50, 99, 100), method="inverted_cdf")
    return Times(
        count=len(durations_ms),
        p50_ms=round(float(p50), 3),
        p99_ms=round(float(p99), 3),
        max_ms=round(float(longest), 3),
    )


@attrs.frozen(kw_only=True)
class Speech:
    """Speech in a loop; samples are 16 kHz mono, in [-1, 1]."""

    name: str
    samples: _Samples

    def second(self, number: int) -> bytes:
        """Cut out a second of the loop as float32 LE."""
        at = np.arange(number * md.INPUT_RATE_HZ, (number + 1) * md.INPUT_RATE_HZ)
        return self.samples[at % len(self.samples)].astype("<f4").tobytes()


def load_speech() -> Speech:
    """Return the recorded sample."""
    path = sample("demo.wav")
    return Speech(name=path.name, samples=np.frombuffer(read_wav(path), "<f4"))


def camera_frame(number: int) -> bytes:
    """Make a JPEG of about `JPEG_BYTES`: a constant scene with varying noise."""
    at = np.arange(JPEG_SIDE)
    scene = 110 + 60 * np.sin(at / 37)[:, None] * np.cos(at / 53)[None, :]
    noise = np.random.default_rng(number).normal(0, 8, (JPEG_SIDE, JPEG_SIDE, 3))
    picture = np.clip(scene[:, :, None] + noise, 0, 255).astype(np.uint8)
    data: bytes = simplejpeg.encode_jpeg(picture, quality=60)
    return data


def machine_facts() -> dict[str, str | int | float]:
    """Describe the machine; `load` is that of the last minute, this run's included."""
    return {
        "cores": os.cpu_count() or 0,
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "antiphon": version("antiphon"),
        "load": round(os.getloadavg()[0], 2),
    }


# -- printing -------------------------------------------------------------------------------------

Found = TypeVar("Found", bound=AttrsInstance)


class BenchError(click.ClickException):
    """The bench cannot continue; the text gives the reason in one line."""


def print_progress(text: str) -> None:
    """Print progress on standard error."""
    click.echo(f"bench: {text}", err=True)


def print_found(found: Found, show: Callable[[Console, Found], None], *, as_json: bool) -> None:
    """Print results by `show`, or as JSON of `attrs.asdict`."""
    if as_json:
        options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        click.echo(orjson.dumps(attrs.asdict(found), option=options), nl=False)
    else:
        show(process.stdout_console(), found)


def machine_line(facts: Mapping[str, object]) -> str:
    """Name the facts of `machine_facts` in one line."""
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, whole: int = 1
) -> Table:
    """Make a table; the first `left` columns are aligned left, the first `whole` never wrapped."""
    made = Table(box=SIMPLE)
    for place, column in enumerate(columns):
        made.add_column(column, justify="left" if place < left else "right", no_wrap=place < whole)
    for row in rows:
        made.add_row(*row)
    return made


# -- the measurement -------------------------------------------------------------------------------


Mode = Literal["batched", "single"]
Doing = Literal["speaking", "listening"]

MODES: Final[tuple[Mode, ...]] = ("batched", "single")
MISSED_SHARE: Final = 0.01
"""A unit in a hundred may be late."""
DUE_S: Final = 1.0
BEHIND_S: Final = 5.0
"""Five units would wait by then, and the server drops older ones (B7)."""
LEAD_S: Final = 0.2
"""From opening all sessions to the first unit."""
NEAR: Final = 8
"""The highest served and lowest failed count end an eighth apart: less than runs differ."""
INSTRUCTIONS: Final = "Answer what you hear."
OFFSET_S: Final = 3
"""Offset in seconds of each session's input to the one before."""


@attrs.frozen(kw_only=True)
class Load:
    """The activity of each session, with units of `speech` one a second.

    Attributes:
        doing: `speaking` makes the model speak in every unit, `listening` listen.
        tokens_max: maximum tokens fed by a speaking unit.
        frames: JPEG files that each unit shows.
        instructions: said before the first unit; long ones fill the context.
    """

    speech: Speech
    seconds: int
    doing: Doing = "speaking"
    tokens_max: int = 19
    frames: tuple[bytes, ...] = ()
    instructions: str = INSTRUCTIONS

    def opening(self, number: int) -> md.Opening:
        """The settings of session `number`."""
        config = md.DuplexConfig(
            force_listen_count=0,
            listen_prob_scale=0.0,
            length_penalty=10.0,
            max_new_speak_tokens_per_chunk=self.tokens_max + 1,
        )
        return md.Opening(
            instructions=self.instructions, voice=md.Voice(), config=config, seed=number
        )

    def unit(self, number: int, index: int) -> md.Unit:
        """A unit of session `number`."""
        pcm = self.speech.second(index + OFFSET_S * number)
        must_listen = self.doing == "listening"
        return md.Unit(index=index, pcm=pcm, frames=self.frames, force_listen=must_listen)


@attrs.frozen(kw_only=True)
class Case:
    """What is run: how requests are computed, when units are due, and the number of sessions."""

    mode: Mode
    arrival: Arrival
    sessions: int

    def late(self, number: int) -> float:
        """How much later in its second a session's unit is due than the first one's, in seconds."""
        return number / self.sessions if self.arrival == "spread" else 0.0


@attrs.frozen(kw_only=True)
class EngineRun(Case):
    """The results of one run.

    Attributes:
        missed: units answered more than a second late, or never.
        latency: from due to answered.
        latency_finalized: from due to finalized: a client's wait if answers were sent after it.
        stages_ms: the median time of each stage, including other sessions' work.
        tokens_mean: text tokens fed per unit.
        spoken: share of the answered units that spoke.
        busy_ms: CPU time of the engine's thread per unit.
    """

    units: int
    missed: int
    latency: Times
    latency_finalized: Times
    stages_ms: dict[str, float]
    tokens_mean: float
    spoken: float
    busy_ms: float
    batch_mean: float

    @property
    def is_served(self) -> bool:
        """Whether under 1 % of the units were missed."""
        return self.missed < MISSED_SHARE * self.units


@attrs.frozen
class Answer:
    """One answered unit: times from due, times of the four stages, and fed tokens."""

    answered_ms: float
    finalized_ms: float
    stages_us: tuple[int, int, int, int]
    tokens: int
    is_spoken: bool

    @classmethod
    def of(cls, result: md.UnitResult, answered_ms: float, finalized_ms: float) -> Answer:
        """Take the values to sum up from a result."""
        costs = result.costs
        return cls(
            answered_ms,
            finalized_ms,
            (costs.prefill_us, costs.llm_us, costs.tts_us, costs.token2wav_us),
            len(result.fed_ids),
            not result.is_listen,
        )


async def run_engine(backend: EngineBackend, load: Load, case: Case) -> EngineRun:
    """Have sessions request units, and measure; the backend needs a slot for each session."""
    answers: list[Answer] = []
    opened = [await backend.open(load.opening(n), slot=n) for n in range(case.sessions)]
    before = backend.engine.statistics
    began_s = anyio.current_time() + LEAD_S

    async def ask(number: int) -> None:
        for index in range(load.seconds):
            due_s = began_s + case.late(number) + index
            await anyio.sleep_until(due_s)
            if anyio.current_time() - due_s > BEHIND_S:
                return
            result = await opened[number].run(load.unit(number, index))
            answered_s = anyio.current_time()
            await opened[number].finalize(index, interrupted=False)
            finalized_s = anyio.current_time()
            answers.append(Answer.of(result, (answered_s - due_s) * MS, (finalized_s - due_s) * MS))

    async with anyio.create_task_group() as tasks:
        for number in range(case.sessions):
            tasks.start_soon(ask, number)
    after = backend.engine.statistics
    for session in opened:
        await session.release()
    turns = max(1, after.turns - before.turns)
    return sum_up_run(
        case,
        answers,
        units=case.sessions * load.seconds,
        cpu_ns=after.cpu_ns - before.cpu_ns,
        batch_mean=(after.answers - before.answers) / turns,
    )


def sum_up_run(
    case: Case, answers: Sequence[Answer], *, units: int, cpu_ns: int, batch_mean: float
) -> EngineRun:
    """Sum up the units of a run; see `EngineRun` for the arguments."""
    if not answers:
        raise BenchError("no unit was answered")
    in_time = sum(answer.answered_ms <= DUE_S * MS for answer in answers)
    stages = np.median([answer.stages_us for answer in answers], axis=0) / MS
    names = ("prefill", "llm", "tts", "token2wav")
    return EngineRun(
        **attrs.asdict(case),
        units=units,
        missed=units - in_time,
        latency=sum_up([answer.answered_ms for answer in answers]),
        latency_finalized=sum_up([answer.finalized_ms for answer in answers]),
        stages_ms={name: round(float(ms), 2) for name, ms in zip(names, stages, strict=True)},
        tokens_mean=round(float(np.mean([answer.tokens for answer in answers])), 2),
        spoken=round(float(np.mean([answer.is_spoken for answer in answers])), 3),
        busy_ms=round(cpu_ns / 1e6 / len(answers), 3),
        batch_mean=round(batch_mean, 2),
    )


# -- how many ----------------------------------------------------------------------------------


class Search:
    """A search for the highest count up to `most`: `counts` in order, doubled, then bisected."""

    def __init__(self, counts: Sequence[int], most: int) -> None:
        self._counts = sorted({count for count in counts if count <= most})
        self._most = most
        self.served = 0
        self.failed: int | None = None

    def next_count(self) -> int | None:
        """The next count to try; None at the end of the search."""
        if self.failed is None:
            further = [count for count in self._counts if count > self.served]
            if further:
                return further[0]
            return min(2 * max(1, self.served), self._most) if self.served < self._most else None
        middle = (self.served + self.failed) // 2
        is_near = self.failed - self.served <= max(1, self.served // NEAR)
        return None if is_near or middle == 0 else middle

    def note(self, count: int, *, is_served: bool) -> None:
        """Take a result."""
        if is_served:
            self.served = max(self.served, count)
        else:
            self.failed = count if self.failed is None else min(self.failed, count)


@attrs.frozen(kw_only=True)
class Served:
    """The most sessions with under 1% of units missed, for one arrival.

    Attributes:
        single: one request at a time; None if that was not run.
        ratio: `batched` divided by `single`; None if there is no `single`, or it is 0.
        busy_ratio: CPU time per unit of single divided by batched, at the largest count of both.
        is_bounded: the search ended at its highest count, so more may be possible.
    """

    arrival: Arrival
    batched: int
    single: int | None
    ratio: float | None
    busy_ratio: float | None
    is_bounded: bool


def judge(arrival: Arrival, runs: Sequence[EngineRun], searches: dict[Mode, Search]) -> Served:
    """Sum up the runs of one arrival."""
    batched, single = searches["batched"], searches.get("single")
    return Served(
        arrival=arrival,
        batched=batched.served,
        single=None if single is None else single.served,
        ratio=round(batched.served / single.served, 2) if single and single.served else None,
        busy_ratio=None if single is None else _busy_ratio(runs),
        is_bounded=batched.failed is None,
    )


def _busy_ratio(runs: Sequence[EngineRun]) -> float:
    busy = {(run.mode, run.sessions): run.busy_ms for run in runs}
    counts = ({run.sessions for run in runs if run.mode == mode} for mode in MODES)
    both = max(set.intersection(*counts))
    return round(busy["single", both] / max(1e-3, busy["batched", both]), 2)


# -- rebuilding -----------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Rebuilt:
    """Units rebuilt per second of CPU time.

    Attributes:
        units: of the session.
        exact: unit by unit, as recorded.
        fast: in long prefills.
        voiced: exact, with a turn that is open from the first unit on: all its speech again.
    """

    units: int
    exact: float
    fast: float
    voiced: float


async def run_rebuilt(backend: EngineBackend, load: Load) -> Rebuilt:
    """Run a session, and rebuild it in each way; the backend is idle otherwise."""
    past = await _past(backend, load)
    voiced = [attrs.evolve(one, is_voiced=True) for one in past[:-1]]
    return Rebuilt(
        units=len(past),
        exact=await _speed(backend, load, past, exact=True),
        fast=await _speed(backend, load, past, exact=False),
        voiced=await _speed(backend, load, voiced, exact=True),
    )


async def _past(backend: EngineBackend, load: Load) -> list[md.PastUnit]:
    session, past = await backend.open(load.opening(0), slot=0), []
    for index in range(load.seconds + 1):
        unit = load.unit(0, index)
        if index == load.seconds:
            unit = attrs.evolve(unit, force_listen=True)
        result = attrs.evolve(await session.run(unit), pcm=b"")
        await session.finalize(index, interrupted=False)
        past.append(md.PastUnit(unit=unit, result=result, interrupted=False))
    await session.release()
    return past


async def _speed(
    backend: EngineBackend, load: Load, past: Sequence[md.PastUnit], *, exact: bool
) -> float:
    session = await backend.open(load.opening(0), slot=0)
    began_ns = backend.engine.statistics.cpu_ns
    for begin in range(0, len(past), md.PAST_UNITS_MAX):
        await session.rebuild(past[begin : begin + md.PAST_UNITS_MAX], exact=exact)
    await session.release()  # The engine has then counted all that came before.
    return round(len(past) * NS_PER_S / (backend.engine.statistics.cpu_ns - began_ns), 1)


# -- antiphon dev bench engine ---------------------------------------------------------------------


ENGINE_SECONDS: Final = 10
ENGINE_SECONDS_MAX: Final = 90
"""A longer turn would fill the speech decoder's slot."""
SESSIONS: Final = "1,2,4,8,16"
SESSIONS_MAX: Final = 64
"""A full batch."""

ARRIVALS: Final[tuple[Arrival, ...]] = ("together", "spread")


@attrs.frozen(kw_only=True)
class EngineBenchResult:
    """The results of one run; as JSON it is `attrs.asdict` of this.

    Attributes:
        attention: its method; on a GPU with the sizes of captured steps.
        seconds: units requested by each session.
        pictures: each unit shows so many.
        rebuilt: the speed of a rebuild.
    """

    machine: dict[str, str | int | float]
    model: str
    device: str
    dtype: str
    attention: str
    doing: Doing
    seconds: int
    pictures: int
    runs: list[EngineRun]
    served: list[Served]
    rebuilt: Rebuilt


def _counts(_context: click.Context, _option: click.Parameter, value: str) -> list[int]:
    try:
        counts = [int(word) for word in value.split(",")]
    except ValueError:
        counts = []
    if not counts or not all(1 <= count <= SESSIONS_MAX for count in counts):
        raise click.BadParameter(f"numbers from 1 to {SESSIONS_MAX} with commas between them")
    return counts


@click.group("bench")
def bench_command() -> None:
    """Measure a part of the server: the model's engine."""


@bench_command.command("engine")
@click.option("--model", default="tiny", show_default=True, help="tiny, or a checkpoint's folder.")
@click.option("--sessions", callback=_counts, default=SESSIONS, show_default=True)
@click.option(
    "--seconds",
    type=click.IntRange(1, ENGINE_SECONDS_MAX),
    default=ENGINE_SECONDS,
    show_default=True,
    help="Units per session; there are up to 40 runs of this many seconds.",
)
@click.option(
    "--doing",
    type=click.Choice(["speaking", "listening"]),
    default="speaking",
    show_default=True,
    help="What the model does in every unit.",
)
@click.option("--pictures", is_flag=True, help="Show a picture in every unit.")
@click.option(
    "--due",
    type=click.Choice(["both", *ARRIVALS]),
    default="both",
    show_default=True,
    help="Whether the sessions' units arrive together or spread over the second.",
)
@click.option(
    "--batched-only",
    is_flag=True,
    help="Skip the runs with one request at a time, which take half the time.",
)
@click.option("--device", type=click.Choice(DEVICES), help="As for `antiphon serve`.")
@click.option("--dtype", type=click.Choice(DTYPES), help="As for `antiphon serve`.")
@click.option("--deterministic", is_flag=True, help="As for `antiphon serve`, to measure its cost.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def engine_command(
    *,
    model: str,
    sessions: list[int],
    seconds: int,
    doing: Doing,
    pictures: bool,
    due: Arrival | Literal["both"],
    batched_only: bool,
    device: str | None,
    dtype: str | None,
    deterministic: bool,
    as_json: bool,
) -> None:
    """Measure how many sessions the engine serves: in batches, and one request at a time.

    Both run in turns on one model, so that what else the machine does meets both. Counts go up
    until 1% of the units come more than a second late. `busy_ms`, the CPU time of a unit, is what
    can be compared on a machine that does something else as well.

    \b
    Exit codes:
      0  measured
      1  the model cannot be loaded, or failed
      2  an option that cannot be used
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
    frames = (camera_frame(0),) if pictures else ()
    load = Load(speech=load_speech(), seconds=seconds, doing=doing, frames=frames)
    modes = MODES[:1] if batched_only else MODES
    arrivals = ARRIVALS if due == "both" else (due,)
    try:
        loaded = models.load_checkpoint(
            model, None, slots_max=SESSIONS_MAX, device=device, dtype=dtype, exact=deterministic
        )
        if deterministic:
            models.require_deterministic(model, loaded.info)
    except (models.ModelUnknownError, models.ModelUnusableError, BackendError) as error:
        raise BenchError(str(error)) from error
    runs, served = measure_engine(loaded, load, sessions, modes=modes, arrivals=arrivals)
    rebuilt = process.run(run_rebuilt, _backend(loaded, "batched"), load)
    keys = loaded.runner.llm.keys
    found = EngineBenchResult(
        machine=machine_facts(),
        model=model,
        device=str(keys.device),
        dtype=str(keys.dtype).removeprefix("torch."),
        attention=loaded.runner.attention,
        doing=doing,
        seconds=seconds,
        pictures=len(frames),
        runs=runs,
        served=served,
        rebuilt=rebuilt,
    )
    print_found(found, _show_engine, as_json=as_json)


# -- measuring -----------------------------------------------------------------------------------


def measure_engine(
    model: DuplexModel,
    load: Load,
    counts: list[int],
    *,
    modes: Sequence[Mode] = MODES,
    arrivals: Sequence[Arrival] = ARRIVALS,
    show: Callable[[str], None] = print_progress,
) -> tuple[list[EngineRun], list[Served]]:
    """Measure a loaded model; return the runs, `counts` sessions first, and the number served."""

    def measure(case: Case, what: Load = load) -> EngineRun:
        return process.run(run_engine, _backend(model, case.mode), what, case)

    runs: list[EngineRun] = []
    served: list[Served] = []
    show("warming up")
    measure(Case(mode="batched", arrival="spread", sessions=1), attrs.evolve(load, seconds=1))
    for arrival in arrivals:
        searches = {mode: Search(counts, model.info.slots) for mode in modes}
        mine: list[EngineRun] = []
        while any(search.next_count() is not None for search in searches.values()):
            for mode, search in searches.items():
                count = search.next_count()
                if count is None:
                    continue
                run = measure(Case(mode=mode, arrival=arrival, sessions=count))
                verdict = "served" if run.is_served else "not served"
                show(f"sessions {count}, {arrival}, {mode}: {verdict}, {run.busy_ms} ms CPU a unit")
                search.note(count, is_served=run.is_served)
                mine.append(run)
        runs += mine
        served.append(judge(arrival, mine, searches))
    return runs, served


def _backend(model: DuplexModel, mode: Mode) -> EngineBackend:
    return EngineBackend(model, batch_max=BATCH_MAX if mode == "batched" else 1)


# -- for people ----------------------------------------------------------------------------------


def _show_engine(console: Console, found: EngineBenchResult) -> None:
    where = f"{found.device}, {found.dtype}, {found.attention}"
    console.print(
        f"{found.model} on {where}, {found.doing}, units a session: {found.seconds}"
        f"{', each with a picture' * found.pictures}"
    )
    console.print(machine_line(found.machine), "\n", highlight=False)
    figures = ("p50 ms", "p99 ms", "finalized p50", "missed", "batch", "CPU ms a unit")
    rows = [
        (
            str(run.sessions),
            run.arrival,
            run.mode,
            f"{run.latency.p50_ms:.0f}",
            f"{run.latency.p99_ms:.0f}",
            f"{run.latency_finalized.p50_ms:.0f}",
            f"{run.missed} of {run.units}",
            f"{run.batch_mean:.1f}",
            f"{run.busy_ms:.1f}",
        )
        for run in found.runs
    ]
    console.print(table(("sessions", "due", "way", *figures), rows, left=3, whole=0))
    for each in found.served:
        console.print(_served_line(each), highlight=False)
    single = next((run for run in found.runs if run.sessions == 1), None)
    if single is not None:
        stages = ", ".join(f"{name} {ms:.1f}" for name, ms in single.stages_ms.items())
        console.print(f"A single unit, ms by stage: {stages}", highlight=False)
    rebuilt = found.rebuilt
    console.print(
        f"Rebuilding a session of {rebuilt.units} s: {rebuilt.exact:.0f} times real time, in "
        f"long prefills {rebuilt.fast:.0f}, with all its speech {rebuilt.voiced:.0f}",
        highlight=False,
    )


def _served_line(each: Served) -> str:
    at_least = "at least " if each.is_bounded else ""
    line = f"Due {each.arrival}: sessions in batches: {at_least}{each.batched}"
    if each.single is not None:
        line += f", {each.single} one at a time"
    line += ", with under 1% of units missed"
    if each.single is not None:
        line += f": {each.ratio or '-'} times; by CPU time a unit {each.busy_ratio} times"
    return line
