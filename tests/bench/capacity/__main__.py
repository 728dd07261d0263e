"""`python -m tests.bench.capacity`: where a fleet meets its first limit; `--measure` its inputs."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import click
import orjson

from runtime.commands.bench import print_progress
from runtime.net import process
from tests.bench.capacity.measure import MODES, Measured, measure
from tests.bench.capacity.model import Gateway, reckon, tables
from tests.bench.gateway.child import ROOT

EVIDENCE: Final = ROOT / "docs" / "evidence" / "capacity.json"
SESSIONS: Final = (15, 30, 60, 120)
SECONDS: Final = 12
DEFAULT: Final = Gateway()


@click.command("capacity")
@click.option("--gpus", type=click.IntRange(1, 64), default=8, show_default=True, help="A machine.")
@click.option(
    "--machines", type=click.IntRange(1, 10_000), default=64, show_default=True, help="At most."
)
@click.option(
    "--sessions-per-gpu",
    type=click.IntRange(1, 1024),
    default=32,
    show_default=True,
    help="At once: an assumption; an H200 computed 48 of random weights in time.",
)
@click.option("--network-gb-s", type=float, default=DEFAULT.network_gb_s, show_default=True)
@click.option("--disk-mb-s", type=float, default=DEFAULT.disk_mb_s, show_default=True)
@click.option("--disk-gb", type=float, default=DEFAULT.disk_gb, show_default=True)
@click.option("--memory-gb", type=float, default=DEFAULT.memory_gb, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--measure",
    "is_measured",
    is_flag=True,
    help=f"Measure again first, for ten minutes, into {EVIDENCE.relative_to(ROOT)}.",
)
def capacity_command(
    *,
    gpus: int,
    machines: int,
    sessions_per_gpu: int,
    network_gb_s: float,
    disk_mb_s: float,
    disk_gb: float,
    memory_gb: float,
    as_json: bool,
    is_measured: bool,
) -> None:
    """Reckon what gateways a fleet of GPUs needs, and what limits one of them first."""
    if is_measured:
        body = attrs.asdict(process.run(_measure))
        EVIDENCE.write_bytes(orjson.dumps(body, option=orjson.OPT_INDENT_2) + b"\n")
    found: dict[str, Any] = orjson.loads(EVIDENCE.read_bytes())
    gateway = Gateway(
        network_gb_s=network_gb_s, disk_mb_s=disk_mb_s, disk_gb=disk_gb, memory_gb=memory_gb
    )
    ask = partial(
        reckon,
        found,
        gpus=gpus,
        machines=machines,
        sessions_per_gpu=sessions_per_gpu,
        gateway=gateway,
    )
    capacities = [ask(mode=mode) for mode in MODES]
    if as_json:
        body = {each.mode: attrs.asdict(each) for each in capacities}
        click.echo(orjson.dumps(body, option=orjson.OPT_INDENT_2))
    else:
        click.echo("\n".join(tables(found, capacities)), nl=False)


async def _measure() -> Measured:
    with tempfile.TemporaryDirectory(prefix="antiphon-bench-") as name:
        return await measure(Path(name), sessions=SESSIONS, seconds=SECONDS, tell=print_progress)


if __name__ == "__main__":
    capacity_command()
