"""Real clients of a real server: `python -m tests.gpu.served`.

It serves the published shape with random weights, in a process of its own; the sessions see and
hear, and speak in every unit. A unit is late if it is answered more than a second after its last
sample was sent, or never. With `--replay` it replays the longest log with the model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

import anyio
import attrs

import antiphon
from protocol.values.messages import Listen, Speech
from protocol.values.requests import Append, Init
from runtime import RUN, SOURCE_TREE
from runtime.commands.bench import (
    DUE_S,
    MS,
    Arrival,
    Case,
    Times,
    camera_frame,
    load_speech,
    machine_facts,
    sum_up,
)
from runtime.commands.bench import Load as Said
from runtime.commands.demo import served
from tests.gpu.backend import install
from tests.gpu.engine import SPEAKING_TOKENS
from tests.project.evidence import keep, made

WAIT_S: Final = 3.0
"""For what was not answered when the last unit was sent; what is not by then is late."""


@attrs.frozen(kw_only=True)
class Load:
    """So many sessions, whose units end all at once or spread over the second."""

    sessions: int
    seconds: int
    is_spread: bool

    @property
    def case(self) -> Case:
        """When units are due, as in the engine's bench."""
        arrival: Arrival = "spread" if self.is_spread else "together"
        return Case(mode="batched", arrival=arrival, sessions=self.sessions)

    @property
    def said(self) -> Said:
        """What each session hears, sees and does, as in the engine's bench."""
        frames = (camera_frame(0),)
        return Said(
            speech=load_speech(), seconds=self.seconds, tokens_max=SPEAKING_TOKENS, frames=frames
        )


@attrs.frozen(kw_only=True)
class Found:
    """What the clients saw.

    Attributes:
        late: units answered more than a second after their last sample was sent, or never.
        latency: from that to the answer; its sound comes with it.
        spoken: share of the answers that spoke.
    """

    load: Load
    units: int
    late: int
    latency: Times
    spoken: float


async def talk(url: str, load: Load, number: int, began_s: float, found: list[Any]) -> None:
    """Have one session; `found` gets each answer's delay in ms, and whether it spoke."""
    said = load.said
    opening = said.opening(number)
    init = Init(instructions=opening.instructions, config=opening.config)
    sent: dict[str, float] = {}
    is_over = anyio.Event()

    async def listen(call: Any) -> None:
        answered = 0
        async for event in call:
            if isinstance(event, Listen) or (isinstance(event, Speech) and event.pcm):
                delay_ms = (anyio.current_time() - sent.pop(event.input_id)) * MS
                found.append((delay_ms, isinstance(event, Speech)))
                answered += 1
                if answered == load.seconds:
                    is_over.set()

    async with (
        antiphon.connect(url, mode="video", init=init) as call,
        anyio.create_task_group() as own,
    ):
        own.start_soon(listen, call)
        for index in range(load.seconds):
            await anyio.sleep_until(began_s + load.case.late(number) + index)
            name, unit = str(index), said.unit(number, index)
            sent[name] = anyio.current_time()
            await call.raw.append(Append(pcm=unit.pcm, frames=unit.frames, input_id=name))
        with anyio.move_on_after(WAIT_S):
            await is_over.wait()
        own.cancel_scope.cancel()


async def measure(url: str, load: Load, lead_s: float) -> Found:
    """Run a load; sessions have `lead_s` to be opened."""
    answers: list[tuple[float, bool]] = []
    began_s = anyio.current_time() + lead_s
    async with anyio.create_task_group() as tasks:
        for number in range(load.sessions):
            tasks.start_soon(talk, url, load, number, began_s, answers)
    units = load.sessions * load.seconds
    in_time = sum(delay_ms <= DUE_S * MS for delay_ms, _ in answers)
    return Found(
        load=load,
        units=units,
        late=units - in_time,
        latency=sum_up([delay_ms for delay_ms, _ in answers]),
        spoken=round(sum(spoke for _, spoke in answers) / len(answers), 3),
    )


def replayed(logs: Path) -> dict[str, Any]:
    """Replay the longest log of a folder with the model."""
    log = max(logs.rglob("*.session.zst"), key=lambda path: path.stat().st_size)
    done = subprocess.run(
        [*RUN, "replay", "--full", "--json", str(log)], capture_output=True, text=True, check=False
    )
    try:
        body = json.loads(done.stdout)
    except json.JSONDecodeError:
        return {"failed": done.stdout[-500:] + done.stderr[-500:]}
    kept = ("result", "units", "elapsed_ms", "divergence", "environment", "exit_code")
    return {key: body[key] for key in kept if key in body}


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Serve each load, and replay."""
    counts = [int(count) for count in options.sessions.split(",")]
    flags = ("--deterministic",) * options.deterministic + ("--isolate",) * options.isolate
    words = ("--slots", str(max(counts)), "--no-pages", *flags)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="antiphon-gpu-") as name:
        folder = Path(name)
        async with served(options.model, folder, *words) as url:
            for count in counts:
                for is_spread in (True, False):
                    load = Load(sessions=count, seconds=options.seconds, is_spread=is_spread)
                    found = await measure(url, load, 1 + 0.1 * count)
                    print(found, flush=True)
                    runs.append(attrs.asdict(found))
        replay = replayed(folder) if options.replay else None
    return {"machine": machine_facts(), "flags": flags, "runs": runs, "replay": replay}


def main() -> None:
    """Serve, measure, and write what was found."""
    parser = argparse.ArgumentParser(description="clients of a server on a GPU")
    parser.add_argument("--model", default="backend:full")
    parser.add_argument("--sessions", default="1,16,32")
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--isolate", action="store_true", help="the model in its own process")
    parser.add_argument("--replay", action="store_true", help="one log, with the model")
    parser.add_argument("--out", type=made, default=Path())
    parser.add_argument("--name", default="served")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="antiphon-backend-") as name:
        path = (str(install(Path(name))), str(SOURCE_TREE), os.environ.get("PYTHONPATH", ""))
        os.environ["PYTHONPATH"] = os.pathsep.join(path)
        found = anyio.run(run, options)
    keep(found, options.out, options.name)


if __name__ == "__main__":
    main()
