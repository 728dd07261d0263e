"""`antiphon bench`: the costs of a unit, a replay and a recording, measured in one run.

Times depend on the machine, so each is compared within the same run: a unit with its second, eight
sessions with one, a replay with real time, recording with a simpler format; see `units`, `replay`,
`recording`. `bench engine`, `gateway` and `streaming` are further benches. No limit fails.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

import attrs
import click
from rich.console import Console
from rich.table import Table

from ...model.models import MODELS
from .. import interrupts
from ..server_process import served
from .engine_command import engine_command
from .material import Arrival, Times, load_speech, machine_facts
from .output import machine_line, print_found, table, tell
from .recording import RecordingResult, measure_recording
from .recording_formats import FormatName
from .replay import ReplayResult, measure_replay
from .streaming_command import streaming_command
from .units import UnitsResult, measure_units

SESSIONS_MANY: Final = 8
RUNS: Final[tuple[tuple[int, Arrival], ...]] = (
    (1, "spread"),
    (SESSIONS_MANY, "spread"),
    (SESSIONS_MANY, "together"),
)
SECONDS: Final = 20
SECONDS_MAX: Final = 200
"""Longer sessions would reach the server's own limit."""
LOGS: Final = "*.session.zst"
FORMAT_NAMES: Final[dict[FormatName, str]] = {
    "json_lines": "JSON lines, zstd",
    "mcap": "MCAP, zstd",
    "wav": "16-bit WAV, JSON",
}


@attrs.frozen(kw_only=True)
class Bench:
    """The results of one run; `latency_ratio` is eight sessions' latency divided by one's."""

    machine: dict[str, str | int | float]
    model: str
    speech: str
    seconds: int
    units: list[UnitsResult]
    latency_ratio: dict[str, dict[str, float]]
    replay: ReplayResult
    recording: RecordingResult


@click.group("bench", invoke_without_command=True)
@click.pass_context
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--model",
    type=click.Choice(MODELS),
    default="tiny",
    show_default=True,
    help="What is served: the embedded trained model, or a script that computes nothing.",
)
@click.option(
    "--seconds",
    type=click.IntRange(2, SECONDS_MAX),
    default=SECONDS,
    show_default=True,
    help="Units of each session; there are five runs of so many seconds.",
)
def bench_command(ctx: click.Context, *, as_json: bool, model: str, seconds: int) -> None:
    """Measure units, replay and recording, and print what they cost in terms of each other.

    It takes about two minutes, and wants a machine that does nothing else meanwhile. `bench engine`
    measures the model's engine by itself instead: how many sessions it serves; `bench streaming`
    live transcription.
    """
    if ctx.invoked_subcommand is not None:
        return
    print_found(interrupts.run(_run, model, seconds), _show, as_json=as_json)


bench_command.add_command(engine_command)
bench_command.add_command(streaming_command)


async def _run(model: str, seconds: int) -> Bench:
    speech = load_speech()
    with tempfile.TemporaryDirectory(prefix="antiphon-bench-") as name:
        folder = Path(name)
        units: list[UnitsResult] = []
        tell(f"starting a server with the {model} model")
        async with served(model, folder, "--slots", str(SESSIONS_MANY)) as url:
            for sessions, arrival in RUNS:
                tell(f"{sessions} sessions, {arrival}, for {seconds} s")
                units.append(
                    await measure_units(
                        url, speech, sessions=sessions, seconds=seconds, arrival=arrival
                    )
                )
        tell("replaying the first of them")
        replay = await measure_replay(_first_log(folder))
        tell("recording, without a server")
        recording = await measure_recording(
            speech, folder, seconds=seconds, sessions_many=SESSIONS_MANY
        )
    return Bench(
        machine=machine_facts(),
        model=model,
        speech=speech.name,
        seconds=seconds,
        units=units,
        latency_ratio={run.arrival: _ratio(run, units[0]) for run in units[1:]},
        replay=replay,
        recording=recording,
    )


def _first_log(folder: Path) -> Path:
    """Find the first session's log: names begin with the time."""
    return min(folder.glob(LOGS))


def _ratio(many: UnitsResult, one: UnitsResult) -> dict[str, float]:
    return {
        "p50": round(many.latency.p50_ms / one.latency.p50_ms, 2),
        "p99": round(many.latency.p99_ms / one.latency.p99_ms, 2),
        "server_p50": round(many.server.p50_ms / one.server.p50_ms, 2),
        "server_p99": round(many.server.p99_ms / one.server.p99_ms, 2),
    }


# -- for people ---------------------------------------------------------------------------------


def _show(console: Console, found: Bench) -> None:
    facts = machine_line(found.machine)
    console.print(f"{found.model} model, {found.seconds} s of {found.speech} a session; {facts}\n")
    console.print("A unit, p50 / p99 in ms", _units_table(found))
    replay = found.replay
    console.print(f"Logic replay of {replay.session_s:.1f} s: {replay.result}")
    console.print(_replay_table(replay))
    console.print("Recording a unit", _recording_table(found.recording))
    console.print("The same at full speed, in other formats", _formats_table(found.recording))


def _both(times: Times | None) -> str:
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
    return table(["", *names], rows)


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
