"""`antiphon dev bench`: the duration of a unit as a client sees it, of one session and of many.

A real server, real WebSockets, a unit a second. The server runs in its own process, with recording
on. Each client sends a second of speech and a picture every second, by the clock: clients are
spread evenly, or all at once, the worst case for a model that computes one unit at a time. A unit's
time runs from passing its append to the client's socket until its last frame (a listen, or the
speech's text and sound) is received and parsed; the server's own `wall_clock_ms` runs from the
unit's start to its result.

Times depend on the machine, so each is compared within the same run: a unit with its second, eight
sessions with one. `bench engine` measures the engine by itself. No limit fails.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import anyio
import attrs
import click
import orjson
from rich.console import Console
from rich.table import Table

from protocol.values.messages import Created, ErrorReport, Listen, QueueDone, Speech
from protocol.values.requests import Append, Init

from ..client.errors import ClientError
from ..client.session import ClientSession, connect
from ..model import models
from ..model.backends.base import BackendError
from ..model.engine.backend import BATCH_MAX, EngineBackend
from ..settings.settings import DEVICES, DTYPES
from . import bench_engine as engine
from . import interrupts
from .bench_engine import Speech as Recorded
from .server_process import model_option, served

if TYPE_CHECKING:
    from ..model.backends.minicpmo.model import DuplexModel


# -- antiphon dev bench engine ---------------------------------------------------------------------


ENGINE_SECONDS: Final = 10
ENGINE_SECONDS_MAX: Final = 90
"""A longer turn would fill the speech decoder's slot."""
SESSIONS: Final = "1,2,4,8,16"
SESSIONS_MAX: Final = 64
"""A full batch."""
FULL: Final = "full shape, random weights, no vocoder"

ARRIVALS: Final[tuple[engine.Arrival, ...]] = ("together", "spread")


@attrs.frozen(kw_only=True)
class Kinds:
    """The runs that are made: how requests are computed (`batched` always), and when they come."""

    modes: Sequence[engine.Mode] = engine.MODES
    arrivals: Sequence[engine.Arrival] = ARRIVALS


@attrs.frozen(kw_only=True)
class FullFacts:
    """Facts of the full shape.

    Attributes:
        layers_scale: factor on the language model's layers.
        slot_bytes: keys and values of a session, on the GPU.
        gpu_bytes_max: peak memory; None without a GPU.
        floor_ms: model.md's floor of a unit without pictures, for each count of sessions together.
        of_floor: the median of batched units that are due together, divided by the floor.
    """

    layers_scale: float
    slot_bytes: int
    gpu_bytes_max: int | None
    floor_ms: dict[int, float]
    of_floor: dict[int, float]


@attrs.frozen(kw_only=True)
class EngineBenchResult:
    """The results of one run; as JSON it is `attrs.asdict` of this.

    Attributes:
        attention: its method; on a GPU with the sizes of captured steps.
        seconds: units requested by each session.
        pictures: each unit shows so many.
        rebuilt: the speed of a rebuild.
        full: None unless the shape is the full one.
    """

    machine: dict[str, str | int | float]
    model: str
    device: str
    dtype: str
    attention: str
    doing: engine.Doing
    seconds: int
    pictures: int
    runs: list[engine.EngineRun]
    served: list[engine.Served]
    rebuilt: engine.Rebuilt
    full: FullFacts | None


def _counts(_context: click.Context, _option: click.Parameter, value: str) -> list[int]:
    try:
        counts = [int(word) for word in value.split(",")]
    except ValueError:
        counts = []
    if not counts or not all(1 <= count <= SESSIONS_MAX for count in counts):
        raise click.BadParameter(f"numbers from 1 to {SESSIONS_MAX} with commas between them")
    return counts


@click.command("engine")
@click.option("--model", default="tiny", show_default=True, help="tiny, or a checkpoint's folder.")
@click.option("--shape", type=click.Choice(["full"]), help="Random weights in the published shape.")
@click.option("--random-weights", is_flag=True, help="Required with --shape full.")
@click.option("--layers-scale", type=click.FloatRange(0.01, 1.0), default=1.0, show_default=True)
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
    shape: str | None,
    random_weights: bool,
    layers_scale: float,
    sessions: list[int],
    seconds: int,
    doing: engine.Doing,
    pictures: bool,
    due: engine.Arrival | Literal["both"],
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
    """
    if (shape is not None) != random_weights:
        raise click.UsageError("--shape full and --random-weights go together")
    frames = (engine.camera_frame(0),) if pictures else ()
    load = engine.Load(speech=engine.load_speech(), seconds=seconds, doing=doing, frames=frames)
    kinds = Kinds(
        modes=engine.MODES[:1] if batched_only else engine.MODES,
        arrivals=ARRIVALS if due == "both" else (due,),
    )
    try:
        if shape is None:
            loaded = models.load_checkpoint(
                model, None, slots_max=SESSIONS_MAX, device=device, dtype=dtype, exact=deterministic
            )
        else:
            model, loaded = FULL, _full(layers_scale, dtype, exact=deterministic)
            load = attrs.evolve(load, tokens_max=engine.SPEAKING_TOKENS)
        if deterministic:
            models.require_deterministic(model, loaded.info)
    except (models.ModelUnknownError, models.ModelUnusableError, BackendError) as error:
        raise engine.BenchError(str(error)) from error
    runs, served = measure_engine(loaded, load, sessions, kinds=kinds)
    rebuilt = interrupts.run(engine.run_rebuilt, _backend(loaded, "batched"), load)
    keys = loaded.machine.llm.keys
    found = EngineBenchResult(
        machine=engine.machine_facts(),
        model=model,
        device=str(keys.device),
        dtype=str(keys.dtype).removeprefix("torch."),
        attention=loaded.machine.attention,
        doing=doing,
        seconds=seconds,
        pictures=len(frames),
        runs=runs,
        served=served,
        rebuilt=rebuilt,
        full=full_facts(loaded, runs, load, layers_scale) if shape is not None else None,
    )
    engine.print_found(found, _show_engine, as_json=as_json, options=orjson.OPT_NON_STR_KEYS)


def _full(layers_scale: float, dtype: str | None, *, exact: bool) -> DuplexModel:
    from ..model.backends.minicpmo.device import DeviceError, pick_device, pick_dtype, plan
    from ..model.backends.minicpmo.model import GPU_GIB, full_config, random_model

    try:
        device = pick_device("cuda", prefer_cuda=True)
    except DeviceError as error:
        text = f"--shape full needs a GPU with about {GPU_GIB} GiB, and torch finds none here"
        raise engine.BenchError(text) from error
    config, what = full_config(layers_scale), pick_dtype(dtype, device)
    slots = min(SESSIONS_MAX, models.slots_that_fit(plan(config, what), device))
    return random_model(
        config, models.tiny_path(), slots=slots, device=device, dtype=what, exact=exact
    )


# -- measuring -----------------------------------------------------------------------------------


def measure_engine(
    model: DuplexModel,
    load: engine.Load,
    counts: list[int],
    *,
    kinds: Kinds = Kinds(),
    show: Callable[[str], None] = engine.print_progress,
) -> tuple[list[engine.EngineRun], list[engine.Served]]:
    """Measure a loaded model; return the runs, `counts` sessions first, and the number served."""

    def measure(case: engine.Case, what: engine.Load = load) -> engine.EngineRun:
        return interrupts.run(engine.run_engine, _backend(model, case.mode), what, case)

    runs: list[engine.EngineRun] = []
    served: list[engine.Served] = []
    show("warming up")
    measure(
        engine.Case(mode="batched", arrival="spread", sessions=1), attrs.evolve(load, seconds=1)
    )
    for arrival in kinds.arrivals:
        searches = {mode: engine.Search(counts, model.info.slots) for mode in kinds.modes}
        mine: list[engine.EngineRun] = []
        while any(search.next_count() is not None for search in searches.values()):
            for mode, search in searches.items():
                count = search.next_count()
                if count is None:
                    continue
                run = measure(engine.Case(mode=mode, arrival=arrival, sessions=count))
                verdict = "served" if run.is_served else "not served"
                show(f"{count} sessions, {arrival}, {mode}: {verdict}, {run.busy_ms} ms CPU a unit")
                search.note(count, is_served=run.is_served)
                mine.append(run)
        runs += mine
        served.append(engine.judge(arrival, mine, searches))
    return runs, served


def _backend(model: DuplexModel, mode: engine.Mode) -> EngineBackend:
    return EngineBackend(model, batch_max=BATCH_MAX if mode == "batched" else 1)


def full_facts(
    model: DuplexModel, runs: list[engine.EngineRun], load: engine.Load, layers_scale: float
) -> FullFacts:
    """The facts of the full shape."""
    from ..model.backends.minicpmo.model import floor_ms, gpu_bytes

    p50_ms = {
        run.sessions: run.latency.p50_ms
        for run in runs
        if run.mode == "batched" and run.arrival == "together" and not load.frames
    }
    floors = {count: floor_ms(load.doing, count) for count in p50_ms}
    return FullFacts(
        layers_scale=layers_scale,
        slot_bytes=model.machine.slot_bytes,
        gpu_bytes_max=gpu_bytes(),
        floor_ms=floors,
        of_floor={count: round(p50_ms[count] / floors[count], 2) for count in p50_ms},
    )


# -- for people ----------------------------------------------------------------------------------


def _show_engine(console: Console, found: EngineBenchResult) -> None:
    where = f"{found.device}, {found.dtype}, {found.attention}"
    console.print(
        f"{found.model} on {where}, {found.doing}, {found.seconds} units a session"
        f"{', each with a picture' * found.pictures}"
    )
    console.print(engine.machine_line(found.machine), "\n", highlight=False)
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
    console.print(engine.table(("sessions", "due", "way", *figures), rows, left=3, whole=0))
    for each in found.served:
        console.print(_served_line(each), highlight=False)
    single = next((run for run in found.runs if run.sessions == 1), None)
    if single is not None:
        stages = ", ".join(f"{name} {ms:.1f}" for name, ms in single.stages_ms.items())
        console.print(f"A single unit, ms by stage: {stages}", highlight=False)
    rebuilt = found.rebuilt
    console.print(
        f"A session of {rebuilt.units} units is rebuilt at {rebuilt.exact:.0f} times real time, in "
        f"long prefills at {rebuilt.fast:.0f}, with all its speech at {rebuilt.voiced:.0f}",
        highlight=False,
    )
    if found.full is not None:
        _show_full(console, found.full)


def _served_line(each: engine.Served) -> str:
    at_least = "at least " if each.is_bounded else ""
    line = f"Due {each.arrival}: {at_least}{each.batched} sessions in batches"
    if each.single is not None:
        line += f", {each.single} one at a time"
    line += ", with under 1% of units missed"
    if each.single is not None:
        line += f": {each.ratio or '-'} times; by CPU time a unit {each.busy_ratio} times"
    return line


def _show_full(console: Console, full: FullFacts) -> None:
    used = f"{full.gpu_bytes_max / 1e9:.1f} GB" if full.gpu_bytes_max is not None else "no GPU"
    console.print(
        f"A session's keys and values: {full.slot_bytes / 1e6:.0f} MB; most in use: {used}",
        highlight=False,
    )
    for count, floor in full.floor_ms.items():
        console.print(
            f"{count} sessions: floor {floor:.1f} ms, the median unit is "
            f"{full.of_floor[count]:.1f} times that",
            highlight=False,
        )


# -- antiphon dev bench ----------------------------------------------------------------------------


INSTRUCTIONS: Final = "Answer what you hear and see."
SESSIONS_WAIT_S: Final = 60.0
"""For opening all sessions; a prompt takes a small part of a second."""
ANSWERS_WAIT_S: Final = 10.0
"""For the remaining answers after the last unit; then it counts as unanswered."""
OFFSET_S: Final = 3
"""Offset in seconds of each client's speech to the one before."""


@attrs.frozen(kw_only=True)
class UnitsResult:
    """The results of one run.

    Attributes:
        arrival: when in the second their units come.
        speaking_share: share of the answered units in which the model spoke.
        dropped: units dropped by a late server (B7).
        latency: at the clients.
        latency_listening: of listening units; None if there were none.
        latency_speaking: of speaking units; None if there were none.
        server: by the server, without queues and network.
        p50_of_second: the median as a part of the unit's second.
    """

    sessions: int
    arrival: engine.Arrival
    units: int
    answered: int
    speaking_share: float
    dropped: int
    latency: engine.Times
    latency_listening: engine.Times | None
    latency_speaking: engine.Times | None
    server: engine.Times
    p50_of_second: float
    p99_of_second: float


# -- the clients --------------------------------------------------------------------------------


async def measure_units(
    url: str, speech: Recorded, *, sessions: int, seconds: int, arrival: engine.Arrival
) -> UnitsResult:
    """Measure the units of clients, one a second; `BenchError`: a session fails or ends early."""
    begin = anyio.Event()
    frame = engine.shown_frame()
    clients = [
        _Client(
            units=[
                Append(
                    pcm=speech.second(second + OFFSET_S * number),
                    frames=(frame,),
                    input_id=str(second),
                )
                for second in range(seconds)
            ],
            begin=begin,
            late_s=number / sessions if arrival == "spread" else 0.0,
        )
        for number in range(sessions)
    ]
    async with anyio.create_task_group() as tasks:
        for client in clients:
            tasks.start_soon(client.run, url)
        with anyio.move_on_after(SESSIONS_WAIT_S) as setting_up:
            for client in clients:
                await client.is_ready.wait()
        begin.set()
        if setting_up.cancelled_caught:
            tasks.cancel_scope.cancel()
    if setting_up.cancelled_caught:
        raise engine.BenchError(f"{sessions} sessions were not set up within {SESSIONS_WAIT_S:g} s")
    failure = next((client.failure for client in clients if client.failure), None)
    if failure is not None:
        raise engine.BenchError(f"a session of {sessions} failed: {failure}")
    return _sum_up(clients, sessions=sessions, arrival=arrival)


class _Client:
    """One session; its appends and answers are named by number."""

    def __init__(self, *, units: list[Append], begin: anyio.Event, late_s: float) -> None:
        self.is_ready = anyio.Event()
        self.failure: str | None = None
        self.latency_ms: dict[int, float] = {}
        self.server_ms: dict[int, float] = {}
        self.spoken: set[int] = set()
        self.dropped = 0
        self.units = units
        self._begin = begin
        self._late_s = late_s
        self._sent_ns: list[int] = []
        self._all_answered = anyio.Event()

    async def run(self, url: str) -> None:
        """Hold the session to its end."""
        try:
            async with connect(url, mode="video") as session, anyio.create_task_group() as tasks:
                async for message in session:
                    if isinstance(message, Listen | Speech):
                        self._take(message)
                    elif isinstance(message, QueueDone):
                        await session.init(Init(instructions=INSTRUCTIONS))
                    elif isinstance(message, Created):
                        tasks.start_soon(self._send, session)
                    elif isinstance(message, ErrorReport):
                        self.failure = f"{message.message} ({message.code})"
                tasks.cancel_scope.cancel()
        except* ClientError as errors:
            self.failure = self.failure or _first(errors)
        if not self._all_answered.is_set() and not self._sent_ns:
            self.failure = self.failure or "the server ended it at once"
        self.is_ready.set()

    async def _send(self, session: ClientSession) -> None:
        self.is_ready.set()
        await self._begin.wait()
        began_s = anyio.current_time() + self._late_s
        for number, unit in enumerate(self.units):
            await anyio.sleep_until(began_s + number)
            self._sent_ns.append(time.perf_counter_ns())
            await session.append(unit)
        with anyio.move_on_after(ANSWERS_WAIT_S):
            await self._all_answered.wait()
        await session.close()

    def _take(self, message: Listen | Speech) -> None:
        """Note a frame of a unit's answer; the last one counts."""
        number = int(message.input_id)
        self.latency_ms[number] = (time.perf_counter_ns() - self._sent_ns[number]) / 1e6
        self.server_ms[number] = message.metrics.wall_clock_ms
        self.dropped = message.metrics.dropped_units
        if isinstance(message, Speech):
            self.spoken.add(number)
        is_silent = not message.metrics.n_tts_tokens  # it listens, or speaks without a sound
        is_whole = is_silent or (isinstance(message, Speech) and bool(message.pcm))
        if is_whole and len(self.latency_ms) == len(self.units):
            self._all_answered.set()


def _first(errors: BaseExceptionGroup[Exception]) -> str:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)


def _sum_up(clients: list[_Client], *, sessions: int, arrival: engine.Arrival) -> UnitsResult:
    listening: list[float] = []
    speaking: list[float] = []
    for client in clients:
        for number, latency_ms in client.latency_ms.items():
            (speaking if number in client.spoken else listening).append(latency_ms)
    if not (listening or speaking):
        raise engine.BenchError("no unit was answered")
    latency = engine.sum_up([*listening, *speaking])
    return UnitsResult(
        sessions=sessions,
        arrival=arrival,
        units=sum(len(client.units) for client in clients),
        answered=latency.count,
        speaking_share=round(len(speaking) / latency.count, 3),
        dropped=sum(client.dropped for client in clients),
        latency=latency,
        latency_listening=engine.sum_up(listening) if listening else None,
        latency_speaking=engine.sum_up(speaking) if speaking else None,
        server=engine.sum_up([ms for client in clients for ms in client.server_ms.values()]),
        p50_of_second=round(latency.p50_ms / 1000, 4),
        p99_of_second=round(latency.p99_ms / 1000, 4),
    )


# -- the command ----------------------------------------------------------------------------------

SESSIONS_MANY: Final = 8
RUNS: Final[tuple[tuple[int, engine.Arrival], ...]] = (
    (1, "spread"),
    (SESSIONS_MANY, "spread"),
    (SESSIONS_MANY, "together"),
)
SECONDS: Final = 20
SECONDS_MAX: Final = 200
"""Longer sessions would reach the server's own limit."""


@attrs.frozen(kw_only=True)
class Bench:
    """The results of one run; `latency_ratio` is eight sessions' latency divided by one's."""

    machine: dict[str, str | int | float]
    model: str
    speech: str
    seconds: int
    units: list[UnitsResult]
    latency_ratio: dict[str, dict[str, float]]


@click.group("bench", invoke_without_command=True)
@click.pass_context
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@model_option
@click.option(
    "--seconds",
    type=click.IntRange(2, SECONDS_MAX),
    default=SECONDS,
    show_default=True,
    help="Units per session; there are three runs of this many seconds.",
)
def bench_command(ctx: click.Context, *, as_json: bool, model: str, seconds: int) -> None:
    """Measure how long a server takes for a unit: with one session, and with eight.

    It takes a minute and a half, and wants a machine that does nothing else meanwhile. A unit of
    `scripted` takes 3.7 ms of CPU for its tones and pauses; `python -m tests.bench.gateway`
    measures a server whose model answers at once. `bench engine` measures the model's engine by
    itself instead: how many sessions it serves.
    """
    if ctx.invoked_subcommand is not None:
        return
    engine.print_found(interrupts.run(_run, model, seconds), _show, as_json=as_json)


bench_command.add_command(engine_command)


async def _run(model: str, seconds: int) -> Bench:
    version("torch")  # Raises here, and not in the server's process, where the extra is missing.
    speech = engine.load_speech()
    with tempfile.TemporaryDirectory(prefix="antiphon-bench-") as name:
        units: list[UnitsResult] = []
        engine.print_progress(f"starting a server with the {model} model")
        async with served(model, Path(name), "--slots", str(SESSIONS_MANY)) as url:
            for sessions, arrival in RUNS:
                engine.print_progress(f"{sessions} sessions, {arrival}, for {seconds} s")
                units.append(
                    await measure_units(
                        url, speech, sessions=sessions, seconds=seconds, arrival=arrival
                    )
                )
    return Bench(
        machine=engine.machine_facts(),
        model=model,
        speech=speech.name,
        seconds=seconds,
        units=units,
        latency_ratio={run.arrival: _ratio(run, units[0]) for run in units[1:]},
    )


def _ratio(many: UnitsResult, one: UnitsResult) -> dict[str, float]:
    return {
        "p50": round(many.latency.p50_ms / one.latency.p50_ms, 2),
        "p99": round(many.latency.p99_ms / one.latency.p99_ms, 2),
        "server_p50": round(many.server.p50_ms / one.server.p50_ms, 2),
        "server_p99": round(many.server.p99_ms / one.server.p99_ms, 2),
    }


# -- for people ---------------------------------------------------------------------------------


def _show(console: Console, found: Bench) -> None:
    facts = engine.machine_line(found.machine)
    console.print(f"{found.model} model, {found.seconds} s of {found.speech} a session; {facts}\n")
    console.print("A unit, p50 / p99 in ms", _units_table(found))


def _both(times: engine.Times | None) -> str:
    return "-" if times is None else f"{times.p50_ms:.1f} / {times.p99_ms:.1f}"


def _units_table(found: Bench) -> Table:
    runs = found.units
    ratios = [found.latency_ratio.get(run.arrival) for run in runs]
    ratios[0] = None
    rows: list[tuple[str, ...]] = [
        ("as a client sees it", *(_both(run.latency) for run in runs)),
        ("  listening", *(_both(run.latency_listening) for run in runs)),
        ("  speaking", *(_both(run.latency_speaking) for run in runs)),
        ("in the model", *(_both(run.server) for run in runs)),
        (
            "part of its second",
            *(f"{run.p50_of_second:.1%} / {run.p99_of_second:.1%}" for run in runs),
        ),
        (
            "times that of one session",
            *(f"{ratio['p50']:.2f} / {ratio['p99']:.2f}" if ratio else "" for ratio in ratios),
        ),
        ("units answered", *(f"{run.answered} of {run.units}" for run in runs)),
        ("  of them spoken", *(f"{run.speaking_share:.0%}" for run in runs)),
    ]
    names = [f"{run.sessions} {run.arrival}" if run.sessions > 1 else "1 session" for run in runs]
    return engine.table(["", *names], rows)
