"""How many sessions a model serves, and where the time of their units goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import anyio
import attrs
import torch

from runtime.commands.bench import (
    ARRIVALS,
    Arrival,
    Case,
    Doing,
    Load,
    Search,
    camera_frame,
    load_speech,
    run_engine,
    run_rebuilt,
)
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.engine.backend import EngineBackend
from runtime.net import process

from .profiled import kernels, stages

SPEAKING_TOKENS: Final = 8
"""Tokens fed in a speaking unit: the one that begins it, and 7 of text."""
STAGED: Final = (1, 16, 48)
"""Sessions whose requests are timed one kind at a time, for `STAGED_UNITS` each."""
STAGED_UNITS: Final = 3
PROFILED: Final = 16
REBUILT: Final = (("speaking omni", 60),)
"""Seconds of a session that is rebuilt."""
REBUILT_EXACTLY: Final = "exactly, of"
"""Before what it took."""
LOADS: Final = ("speaking audio", "speaking omni", "listening audio", "listening omni")
GROWN_S: Final = (60, 300)
"""Seconds after which is measured what a session takes, ..."""
GROWN: Final = 4
"""... of so many, ..."""
SPEAKS_EVERY: Final = 3
"""... which speak in one unit of so many."""

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
) -> Iterator[dict[str, Any]]:
    """Search the most sessions for the loads of some names, after so many more words each.

    Each run is found as soon as it is made, with the most that were served so far.
    """
    for name, usual in loads(seconds):
        if name not in names:
            continue
        load = attrs.evolve(usual, instructions=usual.instructions + " listen" * words)
        backend, first = EngineBackend(model), Case(mode="batched", arrival="spread", sessions=1)
        process.run(run_engine, backend, attrs.evolve(load, seconds=1), first)
        for arrival in arrivals:
            search = Search(counts, model.info.slots)
            while (count := search.next_count()) is not None:
                case = Case(mode="batched", arrival=arrival, sessions=count)
                run = process.run(run_engine, backend, load, case)
                search.note(count, is_served=run.is_served)
                yield {"load": name, "run": run, "served": search.served}
                late = f"{run.missed} of {run.units} late"
                times = f"p50 {run.latency.p50_ms:.0f}, p99 {run.latency.p99_ms:.0f} ms"
                say(f"{name}, {count} {arrival}", f"{times}, {late}, {run.stages_ms}")


def grown(model: DuplexModel, say: Say) -> dict[str, dict[str, float]]:
    """What a session takes after some time, in MB: its pages, its encoder, and its voice.

    Of slots that do not share their memory, pages are not counted.
    """
    runner = model.runner

    def taken() -> dict[str, float]:
        stores = {"llm": runner.llm, "tts": runner.tts}
        held = {
            name: store.slot_bytes * store.slots * (store.positions - store.free) / store.positions
            for name, store in stores.items()
        }
        own = torch.cuda.memory_allocated() if runner.llm.keys.is_cuda else 0
        return {**held, "voice": float(own)}

    async def grow(load: Load, count: int) -> dict[str, dict[str, float]]:
        backend, before, found = EngineBackend(model), taken(), dict[str, dict[str, float]]()
        opened = [await backend.open(load.opening(number), slot=number) for number in range(count)]

        async def go_on(number: int, begin: int, end: int) -> None:
            for index in range(begin, end):
                must_listen = index % SPEAKS_EVERY > 0
                unit = attrs.evolve(load.unit(number, index), force_listen=must_listen)
                await opened[number].run(unit)
                await opened[number].finalize(index, interrupted=False)

        for begin, end in pairwise((0, *GROWN_S)):
            async with anyio.create_task_group() as tasks:
                for number in range(count):
                    tasks.start_soon(go_on, number, begin, end)
            each = {name: (size - before[name]) / count for name, size in taken().items()}
            each |= {"audio": runner.audio.slot_bytes}
            each |= {"all": sum(each.values())}
            found[str(end)] = {name: round(size / 1e6, 1) for name, size in each.items()}
            say(f"a session after {end} s, MB", {"s": end, **found[str(end)]})
        for session in opened:
            await session.release()
        return found

    (load,) = (load for name, load in loads(GROWN_S[-1]) if name == "speaking audio")
    count = min(GROWN, runner.llm.positions // runner.llm.capacity)
    return process.run(grow, load, count)


def rebuilt(model: DuplexModel, say: Say) -> list[dict[str, Any]]:
    """Rebuild a session that spoke for a minute."""
    found = []
    for wanted, seconds in REBUILT:
        (load,) = (load for name, load in loads(seconds) if name == wanted)
        speed = process.run(run_rebuilt, EngineBackend(model), load)
        say(f"{wanted}, rebuilt", speed)
        say(f"{REBUILT_EXACTLY} {wanted}, {seconds} s, s", round(speed.units / speed.exact, 2))
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
