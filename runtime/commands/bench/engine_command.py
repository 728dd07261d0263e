"""`antiphon bench engine`: the command and its tables; `engine` has the measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Literal

import attrs
import click
import orjson
from rich.console import Console

from ...model.backends.base import BackendError
from ...model.engine.backend import BATCH_MAX, EngineBackend
from ...model.models import (
    ModelUnknownError,
    ModelUnusableError,
    load_checkpoint,
    require_deterministic,
    slots_that_fit,
    tiny_path,
)
from ...settings.settings import DEVICES, DTYPES
from .. import interrupts
from .engine import (
    MODES,
    SPEAKING_TOKENS,
    Case,
    Doing,
    EngineRun,
    Load,
    Mode,
    Rebuilt,
    Search,
    Served,
    judge,
    run_engine,
    run_rebuilt,
    run_virtual,
)
from .material import (
    Arrival,
    BenchError,
    camera_frame,
    load_speech,
    machine_facts,
    machine_line,
    print_found,
    table,
    tell,
)

if TYPE_CHECKING:
    from ...model.backends.minicpmo.model import DuplexModel

SECONDS: Final = 10
SECONDS_MAX: Final = 90
"""A longer turn would fill the speech decoder's slot."""
SESSIONS: Final = "1,2,4,8,16"
SESSIONS_MAX: Final = 64
"""A full batch."""
FULL: Final = "full shape, random weights, no vocoder"
Clock = Literal["wall", "cpu"]

ARRIVALS: Final[tuple[Arrival, ...]] = ("together", "spread")


@attrs.frozen(kw_only=True)
class Kinds:
    """The runs that are made: how requests are computed (`batched` always), and when they come."""

    modes: Sequence[Mode] = MODES
    arrivals: Sequence[Arrival] = ARRIVALS


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
        clock: `wall`, or `cpu` for the CPU time of the engine's thread.
        attention: its method; on a GPU with the sizes of captured steps.
        seconds: units requested by each session.
        pictures: each unit shows so many.
        rebuilt: the speed of a rebuild.
        full: None unless the shape is the full one.
    """

    machine: dict[str, str | int | float]
    model: str
    clock: Clock
    device: str
    dtype: str
    attention: str
    doing: Doing
    seconds: int
    pictures: int
    runs: list[EngineRun]
    served: list[Served]
    rebuilt: Rebuilt
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
@click.option("--random-weights", is_flag=True, help="Needed with --shape, to say that you know.")
@click.option("--layers-scale", type=click.FloatRange(0.01, 1.0), default=1.0, show_default=True)
@click.option("--sessions", callback=_counts, default=SESSIONS, show_default=True)
@click.option(
    "--seconds", type=click.IntRange(1, SECONDS_MAX), default=SECONDS, show_default=True,
    help="Units a session; it takes up to 40 runs of so many seconds.",
)  # fmt: skip
@click.option(
    "--doing",
    type=click.Choice(["speaking", "listening"]),
    default="speaking",
    show_default=True,
    help="What every unit does.",
)
@click.option("--pictures", is_flag=True, help="Show a picture in every unit.")
@click.option(
    "--due",
    type=click.Choice(["both", *ARRIVALS]),
    default="both",
    show_default=True,
    help="Sessions' units come all at once, or spread over the second.",
)
@click.option(
    "--batched-only", is_flag=True, help="Leave out one request at a time: half the time."
)
@click.option(
    "--clock",
    type=click.Choice(["wall", "cpu"]),
    default="wall",
    show_default=True,
    help="cpu: time passes only while the engine computes, as on a machine that does nothing else.",
)
@click.option("--device", type=click.Choice(DEVICES), help="As of `antiphon serve`.")
@click.option("--dtype", type=click.Choice(DTYPES), help="As of `antiphon serve`.")
@click.option("--deterministic", is_flag=True, help="As of `antiphon serve`: what it costs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def engine_command(
    *,
    model: str,
    shape: str | None,
    random_weights: bool,
    layers_scale: float,
    sessions: list[int],
    seconds: int,
    doing: Doing,
    pictures: bool,
    due: Arrival | Literal["both"],
    batched_only: bool,
    clock: Clock,
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
    frames = (camera_frame(0),) if pictures else ()
    load = Load(speech=load_speech(), seconds=seconds, doing=doing, frames=frames)
    kinds = Kinds(
        modes=MODES[:1] if batched_only else MODES,
        arrivals=ARRIVALS if due == "both" else (due,),
    )
    try:
        if shape is None:
            loaded = load_checkpoint(
                model, None, slots_max=SESSIONS_MAX, device=device, dtype=dtype, exact=deterministic
            )
        else:
            model, loaded = FULL, _full(layers_scale, dtype, exact=deterministic)
            load = attrs.evolve(load, tokens_max=SPEAKING_TOKENS)
        if deterministic:
            require_deterministic(model, loaded.info)
    except (ModelUnknownError, ModelUnusableError, BackendError) as error:
        raise BenchError(str(error)) from error
    runs, served = bench(loaded, load, sessions, clock, kinds=kinds)
    rebuilt = interrupts.run(run_rebuilt, _backend(loaded, "batched"), load)
    keys = loaded.machine.llm.keys
    found = EngineBenchResult(
        machine=machine_facts(),
        model=model,
        clock=clock,
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
    print_found(found, _show, as_json=as_json, options=orjson.OPT_NON_STR_KEYS)


def _full(layers_scale: float, dtype: str | None, *, exact: bool) -> DuplexModel:
    from ...model.backends.minicpmo.device import DeviceError, pick_device, pick_dtype
    from ...model.backends.minicpmo.full import GPU_GIB, full_config, random_model
    from ...model.backends.minicpmo.plan import plan

    try:
        device = pick_device("cuda", prefer_cuda=True)
    except DeviceError as error:
        text = f"--shape full needs a GPU with about {GPU_GIB} GiB, and torch finds none here"
        raise BenchError(text) from error
    config, what = full_config(layers_scale), pick_dtype(dtype, device)
    slots = min(SESSIONS_MAX, slots_that_fit(plan(config, what), device))
    return random_model(config, tiny_path(), slots=slots, device=device, dtype=what, exact=exact)


# -- measuring -----------------------------------------------------------------------------------


def bench(
    model: DuplexModel,
    load: Load,
    counts: list[int],
    clock: Clock = "wall",
    *,
    kinds: Kinds = Kinds(),
    say: Callable[[str], None] = tell,
) -> tuple[list[EngineRun], list[Served]]:
    """Measure a loaded model; return the runs, `counts` sessions first, and the number served."""

    def measure(case: Case, what: Load = load) -> EngineRun:
        if clock == "cpu":
            return run_virtual(model, what, case)
        return interrupts.run(run_engine, _backend(model, case.mode), what, case)

    runs: list[EngineRun] = []
    served: list[Served] = []
    say("warming up")
    measure(Case(mode="batched", arrival="spread", sessions=1), attrs.evolve(load, seconds=1))
    for arrival in kinds.arrivals:
        searches = {mode: Search(counts, model.info.slots) for mode in kinds.modes}
        mine: list[EngineRun] = []
        while any(search.next_count() is not None for search in searches.values()):
            for mode, search in searches.items():
                count = search.next_count()
                if count is None:
                    continue
                run = measure(Case(mode=mode, arrival=arrival, sessions=count))
                verdict = "served" if run.is_served else "not served"
                say(f"{count} sessions, {arrival}, {mode}: {verdict}, {run.busy_ms} ms CPU a unit")
                search.note(count, is_served=run.is_served)
                mine.append(run)
        runs += mine
        served.append(judge(arrival, mine, searches))
    return runs, served


def _backend(model: DuplexModel, mode: Mode) -> EngineBackend:
    return EngineBackend(model, batch_max=BATCH_MAX if mode == "batched" else 1)


def full_facts(
    model: DuplexModel, runs: list[EngineRun], load: Load, layers_scale: float
) -> FullFacts:
    """The facts of the full shape."""
    from ...model.backends.minicpmo.full import floor_ms, gpu_bytes

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


def _show(console: Console, found: EngineBenchResult) -> None:
    where = f"{found.device}, {found.dtype}, {found.attention}"
    console.print(
        f"{found.model} on {where}, {found.doing}, {found.seconds} units a session, "
        f"{'each with a picture, ' * found.pictures}by the {found.clock} clock"
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
        f"A session of {rebuilt.units} units is rebuilt at {rebuilt.exact:.0f} times real time, in "
        f"long prefills at {rebuilt.fast:.0f}, with all its speech at {rebuilt.voiced:.0f}",
        highlight=False,
    )
    if found.full is not None:
        _show_full(console, found.full)


def _served_line(each: Served) -> str:
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
