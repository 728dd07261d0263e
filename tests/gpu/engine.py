"""How many sessions a model serves, and where the time of their units goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from runtime.commands import interrupts
from runtime.commands.bench import (
    ARRIVALS,
    SPEAKING_TOKENS,
    Arrival,
    Doing,
    Kinds,
    Load,
    camera_frame,
    load_speech,
    measure_engine,
    run_rebuilt,
)
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.engine.backend import EngineBackend

from .profiled import kernels, stages

STAGED: Final = (1, 16, 48)
"""Sessions whose requests are timed one kind at a time, for `STAGED_UNITS` each."""
STAGED_UNITS: Final = 3
PROFILED: Final = 16
REBUILT: Final = (("speaking omni", 60), ("listening audio", 600))
"""Seconds of a session that is rebuilt."""
LOADS: Final = ("speaking audio", "speaking omni", "listening audio", "listening omni")

Say = Callable[[str, object], None]


def loads(seconds: int) -> Iterator[tuple[str, Load]]:
    """What sessions do, by a name: each listens or speaks, with a picture in every unit or not."""
    speech, frame = load_speech(), camera_frame(0)
    doings: tuple[Doing, ...] = ("speaking", "listening")
    for doing in doings:
        for frames in ((), (frame,)):
            load = Load(speech=speech, seconds=seconds, doing=doing, frames=frames)
            load = attrs.evolve(load, tokens_max=SPEAKING_TOKENS)
            yield f"{doing} {'omni' if frames else 'audio'}", load


def served(
    model: DuplexModel,
    counts: Sequence[int],
    seconds: int,
    say: Say,
    *,
    names: Sequence[str],
    arrivals: Sequence[Arrival] = ARRIVALS,
    words: int = 0,
) -> list[dict[str, Any]]:
    """Search the most sessions for the loads of some names, after so many more words each."""
    found = []
    for name, usual in loads(seconds):
        if name not in names:
            continue
        load = attrs.evolve(usual, instructions=usual.instructions + " listen" * words)
        kinds = Kinds(modes=("batched",), arrivals=arrivals)
        runs, best = measure_engine(model, load, list(counts), kinds=kinds, show=lambda _: None)
        for run in runs:
            late = f"{run.missed} of {run.units} late"
            times = f"p50 {run.latency.p50_ms:.0f}, p99 {run.latency.p99_ms:.0f} ms"
            say(f"{name}, {run.sessions} {run.arrival}", f"{times}, {late}, {run.stages_ms}")
        say(f"{name}, served", {each.arrival: each.batched for each in best})
        found.append({"load": name, "runs": runs, "served": best})
    return found


def rebuilt(model: DuplexModel, say: Say) -> list[dict[str, Any]]:
    """Rebuild a session that spoke for a minute, and one that listened for ten."""
    found = []
    for wanted, seconds in REBUILT:
        (load,) = (load for name, load in loads(seconds) if name == wanted)
        speed = interrupts.run(run_rebuilt, EngineBackend(model), load)
        say(f"{wanted}, rebuilt", speed)
        found.append({"load": wanted, "rebuilt": speed})
    return found


def staged(model: DuplexModel, say: Say) -> list[dict[str, Any]]:
    """Time the requests of units by kind."""
    found = []
    for name, load in loads(STAGED_UNITS):
        if name != "speaking omni":
            continue
        for count in (count for count in STAGED if count <= model.info.slots):
            _, spent = stages(model, load, count)
            for kind, each in spent.items():
                answers = each.answers / each.calls
                wall, cpu = each.wall_ms / each.calls, each.cpu_ms / each.calls
                say(
                    f"{name}, {count}, {kind}",
                    f"{each.calls} of {answers:.1f}: {wall:.2f} ms, {cpu:.2f} of CPU",
                )
            found.append({"load": name, "sessions": count, "spent": spent})
    return found


def profiled(model: DuplexModel, out: Path) -> None:
    """Write what torch's profiler finds in a unit of one session, and of many."""
    (load,) = (load for name, load in loads(1) if name == "speaking omni")
    for count in (1, min(PROFILED, model.info.slots)):
        (out / f"kernels-{count}.txt").write_text(kernels(model, load, count), "utf-8")
