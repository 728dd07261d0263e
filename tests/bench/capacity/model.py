"""Where a fleet of GPUs meets its first limit, reckoned from what was measured.

All is linear: so many units a second, each at its measured cost. `predict` in `measure` says how
far that is off. Costs are those of a unit that speaks; listening ones cost less. What a session
costs a GPU is not measured: `sessions_per_gpu` is an assumption of whoever asks.
"""

from __future__ import annotations

import math
from typing import Any, Final

import attrs

from runtime.settings.settings import CONNECTIONS_MAX, TEXTS_MAX

LOOP_SHARE_MAX: Final = 0.7
"""Of a core: one thread runs all sessions of a gateway, and above that its p99 grows quickly."""
SHARE_MAX: Final = 0.7
"""Of a disk's or a network's rate, and of memory: the rest is for bursts."""
P99_MS_MAX: Final = 500.0
"""A run that is later than that was not served: the machine was too busy, or the gateway."""
GB: Final = 1_000_000_000


@attrs.frozen(kw_only=True)
class Gateway:
    """The machine of one gateway.

    Attributes:
        network_gb_s: what its network takes each way, in gigabits a second.
        disk_mb_s: what its log disk writes, in megabytes a second.
        disk_gb: its size.
        memory_gb: its memory.
    """

    network_gb_s: float = 10.0
    disk_mb_s: float = 500.0
    disk_gb: float = 2000.0
    memory_gb: float = 16.0


@attrs.frozen(kw_only=True)
class Limit:
    """What one gateway has room for, by one resource.

    Attributes:
        name: the resource.
        cost: what a session takes of it.
        sessions: at once, at most.
    """

    name: str
    cost: str
    sessions: int


@attrs.frozen(kw_only=True)
class Fleet:
    """Machines with GPUs, and the gateways that they need.

    Attributes:
        machines, gpus: machines, and GPUs of all of them: a worker each.
        sessions: at once.
        gateways: as many as have room for them, and for the workers.
        log_gb_hour: logs of all sessions in an hour.
        network_gb_s: bits a second, into all gateways and out of them, whichever is more.
    """

    machines: int
    gpus: int
    sessions: int
    gateways: int
    log_gb_hour: int
    network_gb_s: float


@attrs.frozen(kw_only=True)
class Capacity:
    """The answer for one mode: limits of a gateway, the first first, and fleets."""

    mode: str
    limits: list[Limit]
    disk_hours: float
    fleets: list[Fleet]


def reckon(
    measured: dict[str, Any],
    *,
    mode: str,
    gpus: int,
    machines: int,
    sessions_per_gpu: int,
    gateway: Gateway,
) -> Capacity:
    """Reckon one mode.

    Args:
        measured: the evidence, as `Measured` is written.
        mode: `audio` or `video`.
        gpus: of a machine.
        machines: at most; the fleets are of one machine, eight, and these.
        sessions_per_gpu: at once, an assumption.
        gateway: its machine.
    """
    run = run_of(measured, mode)
    up, down = measured["client_bytes"][mode]
    came, left = up + run["from_worker_bytes"], down + run["to_worker_bytes"]
    wire, memory = max(came, left), measured["session_bytes"][mode]
    loop_us, recorder_us, log_bytes = run["loop_us"], run["recorder_us"], run["log_bytes"]
    limits = [
        Limit(
            name="the event loop's core",
            cost=f"{loop_us / 1e4:.2f} % of a core",
            sessions=int(LOOP_SHARE_MAX * 1e6 / loop_us),
        ),
        Limit(
            name="the recorder's core",
            cost=f"{recorder_us / 1e4:.2f} % of a core",
            sessions=int(LOOP_SHARE_MAX * 1e6 / recorder_us),
        ),
        Limit(
            name=f"network, {gateway.network_gb_s:g} Gbit/s each way",
            cost=f"{came / 1e3:.0f} kB/s in, {left / 1e3:.0f} kB/s out",
            sessions=int(SHARE_MAX * gateway.network_gb_s * GB / 8 / wire),
        ),
        Limit(
            name=f"log disk, {gateway.disk_mb_s:g} MB/s",
            cost=f"{log_bytes / 1e3:.0f} kB/s",
            sessions=int(SHARE_MAX * gateway.disk_mb_s * 1e6 / log_bytes),
        ),
        Limit(name="`connections_max`", cost="1 connection", sessions=CONNECTIONS_MAX),
        Limit(
            name=f"memory, {gateway.memory_gb:g} GB",
            cost=f"{memory / 1e6:.1f} MB",
            sessions=int(SHARE_MAX * gateway.memory_gb * GB / memory),
        ),
    ]
    limits.sort(key=lambda limit: limit.sessions)
    most = limits[0].sessions
    fleets = []
    for count in sorted({1, min(8, machines), machines}):
        workers = count * gpus
        sessions = workers * sessions_per_gpu
        fleets.append(
            Fleet(
                machines=count,
                gpus=workers,
                sessions=sessions,
                gateways=max(math.ceil(sessions / most), math.ceil(workers / TEXTS_MAX)),
                log_gb_hour=round(sessions * log_bytes * 3600 / GB),
                network_gb_s=round(sessions * wire * 8 / GB, 1),
            )
        )
    disk_hours = SHARE_MAX * gateway.disk_gb * GB / (most * log_bytes * 3600)
    return Capacity(mode=mode, limits=limits, disk_hours=round(disk_hours, 1), fleets=fleets)


def run_of(measured: dict[str, Any], mode: str) -> dict[str, Any]:
    """The run of a mode whose figures count: with workers, and the most sessions that it served.

    Where answers are late, units are done many at a time, and look cheaper than they are in time.
    """
    runs = [it for it in measured["runs"] if it["mode"] == mode and it["workers"]]
    served = [it for it in runs if it["p99_ms"] <= P99_MS_MAX and not it["missed"]]
    found: dict[str, Any] = max(served, key=lambda run: run["sessions"])
    return found


def tables(measured: dict[str, Any], capacities: list[Capacity]) -> list[str]:
    """Write the tables of docs/scaling.md, as Markdown: measured, limits, fleets."""
    runs = {(it["mode"], it["sessions"], bool(it["workers"])): it for it in measured["runs"]}
    costs = [
        "| sessions | in process | gateway | its event loop | its recorder | workers | p99 |",
        "|---|---|---|---|---|---|---|",
    ]
    for (mode, sessions, is_linked), run in runs.items():
        if is_linked:
            cpu = [runs[mode, sessions, False]["cpu_us"]]
            cpu += [run[f"{name}_us"] for name in ("cpu", "loop", "recorder", "worker")]
            told = " | ".join(f"{it / 1e3:.2f}" for it in cpu)
            costs.append(f"| {sessions} {mode} | {told} | {run['p99_ms']:.0f} |")
    limits = ["| a session that speaks | takes | a gateway has room for |", "|---|---|---|"]
    fleets = [
        "| mode | machines | GPUs | sessions | gateways | logs an hour | network, busier way |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in capacities:
        limits += [f"| {each.mode}: {it.name} | {it.cost} | {it.sessions} |" for it in each.limits]
        fleets += [
            f"| {each.mode} | {it.machines} | {it.gpus} | {it.sessions} | {it.gateways} "
            f"| {it.log_gb_hour} GB | {it.network_gb_s:g} Gbit/s |"
            for it in each.fleets
        ]
    return ["\n".join(table) + "\n" for table in (costs, limits, fleets)]
