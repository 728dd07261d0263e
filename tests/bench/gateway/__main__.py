"""The options and the tables; see `measure` for what is measured and how."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from runtime.commands.bench import machine_facts, print_found, print_progress
from runtime.net import process
from tests.bench.gateway.child import GatewayBenchError
from tests.bench.gateway.material import PATTERNS, Plan, make_plan
from tests.bench.gateway.measure import GatewayResult, Row, Run, measure_gateway

ROUNDS: Final = 7
ROUNDS_MAX: Final = 101
SESSIONS: Final = 500
SESSIONS_MAX: Final = 2000
"""Each has a socket at either end, and a server has 2048 slots."""
KB: Final = 1000


@click.command("gateway")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--rounds",
    type=click.IntRange(1, ROUNDS_MAX),
    default=ROUNDS,
    show_default=True,
    help="How often each pattern is run against each server; figures are medians.",
)
@click.option(
    "--sessions",
    type=click.IntRange(0, SESSIONS_MAX),
    default=SESSIONS,
    show_default=True,
    help="Recorded sessions on one core, a unit a second each, at the end; 0 leaves them out.",
)
@click.option(
    "--pattern",
    "names",
    multiple=True,
    type=click.Choice([pattern.name for pattern in PATTERNS]),
    help="Only this one; may be given again.",
)
@click.option(
    "--recording",
    "is_recording",
    is_flag=True,
    help="Only what recording costs, in each protocol: five rounds take five minutes.",
)
def gateway_command(
    *, as_json: bool, rounds: int, sessions: int, names: tuple[str, ...], is_recording: bool
) -> None:
    """Measure what the server adds to a unit: CPU, latency and memory, without a model.

    Beside it stand an echo on the same transport, and the same work written straight on another
    library. Seven rounds take about ten minutes, on a machine that does nothing else meanwhile.
    """
    if find_spec("uvloop") is None:
        text = "the bench needs uvloop, for its yardstick: pip install uvloop"
        raise GatewayBenchError(text)
    plan = make_plan(names, sessions, is_recording=is_recording)
    print_found(process.run(_run, rounds, plan), show, as_json=as_json)


async def _run(rounds: int, plan: Plan) -> GatewayResult:
    with tempfile.TemporaryDirectory(prefix="antiphon-bench-") as name:
        return await measure_gateway(
            Path(name), plan, rounds=rounds, machine=machine_facts(), tell=print_progress
        )


# -- for people ---------------------------------------------------------------------------------


def show(console: Console, found: GatewayResult) -> None:
    """Print tables.

    Args:
        console: where to.
        found: what was found.
    """
    facts = ", ".join(f"{name} {value}" for name, value in found.machine.items())
    console.print(f"Medians of {found.rounds} rounds; {facts}\n")
    console.print("A unit, by how units come; in brackets in terms of websockets", _rows(found))
    if found.stages_us:
        console.print("A recorded unit by stage, CPU us", _stages(found))
        console.print("Memory a session, kB", _memory(found))
    if found.capacity:
        console.print("Many sessions on one core", _capacity(found.capacity))
    console.print(f"{found.load_was_bound} runs in which the load was late or busy itself")


def _table(first: str, *columns: str) -> Table:
    table = Table(box=SIMPLE)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _rows(found: GatewayResult) -> Table:
    table = _table("", "", "CPU us", "loop", "rec.", "p50 ms", "p99 ms", "recording us")
    pattern = ""
    for row in found.rows:
        of = row.of_websockets
        table.add_row(
            row.pattern if row.pattern != pattern else "",
            row.contender,
            f"{row.cpu_us:.0f} ({of['cpu']:.2f})",
            f"{row.loop_us:.0f}",
            f"{row.recorder_us:.0f}",
            f"{row.p50_ms:.1f} ({of['p50']:.1f})",
            f"{row.p99_ms:.1f} ({of['p99']:.1f})",
            _recording(found, row),
        )
        pattern = row.pattern
    return table


def _recording(found: GatewayResult, row: Row) -> str:
    """What recording costs; in terms of ours without it, and of the yardstick with it."""
    if row.contender != "recorded":
        return ""
    of_ours = found.recorded_of_antiphon[row.pattern]
    recording_us = found.recording_us[row.pattern]
    return f"{recording_us:.0f} ({of_ours:.2f}, {found.recorded_of_logged[row.pattern]:.2f})"


def _stages(found: GatewayResult) -> Table:
    table = _table("", "us")
    for stage, spent_us in found.stages_us.items():
        table.add_row(stage, f"{spent_us:.0f}")
    return table


def _memory(found: GatewayResult) -> Table:
    table = _table("", *found.memory_bytes)
    for name, sizes in (("idle", found.memory_bytes), ("busy", found.busy_bytes)):
        table.add_row(name, *(f"{size / KB:.0f}" for size in sizes.values()))
    return table


def _capacity(runs: list[Run]) -> Table:
    table = _table("", "", "units", "missed", "CPU us", "p50 ms", "p99 ms", "max ms")
    for run in runs:
        times = run.latency
        table.add_row(
            run.pattern,
            run.contender,
            f"{run.units}",
            f"{run.missed}",
            f"{run.cpu_us:.0f}",
            f"{times.p50_ms:.2f}",
            f"{times.p99_ms:.2f}",
            f"{times.max_ms:.2f}",
        )
    return table


if __name__ == "__main__":
    gateway_command()
