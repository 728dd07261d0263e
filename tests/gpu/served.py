"""Real clients of a real server: `python -m tests.gpu.served`.

It serves the published shape with random weights, in a process of its own; the sessions see and
hear, and speak in every unit. A unit is late if it is answered more than a second after its last
sample was sent, or never. Then it replays a session of each load with the model, and rebuilds one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import attrs

import antiphon
from protocol.values.messages import Listen, Speech
from protocol.values.model import DuplexConfig
from protocol.values.requests import Append, Init
from runtime.commands.bench.material import Times, camera_frame, load_speech, machine_facts, sum_up
from runtime.commands.server_process import RUN, served
from tests.evidence import made
from tests.gpu.backend import install

ROOT: Final = Path(__file__).parents[2]
MS: Final = 1000.0
DUE_MS: Final = 1000.0
WAIT_S: Final = 3.0
"""For what was not answered when the last unit was sent; what is not by then is late."""
SPEAKING: Final = DuplexConfig(
    force_listen_count=0,
    listen_prob_scale=0.0,
    length_penalty=10.0,
    max_new_speak_tokens_per_chunk=9,
)
"""Eight tokens a unit: the one that begins it, and seven of text."""


@attrs.frozen(kw_only=True)
class Load:
    """So many sessions, whose units end all at once or spread over the second."""

    sessions: int
    seconds: int
    is_spread: bool

    def late_s(self, number: int) -> float:
        """How much later in its second a session's unit ends."""
        return number / self.sessions if self.is_spread else 0.0


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
    speech, frame = load_speech(), camera_frame(0)
    init = Init(instructions="Answer what you hear and see.", config=SPEAKING)
    sent: dict[str, float] = {}

    async def listen(call: Any) -> None:
        async for event in call:
            if isinstance(event, Listen) or (isinstance(event, Speech) and event.pcm):
                delay_ms = (anyio.current_time() - sent.pop(event.input_id)) * MS
                found.append((delay_ms, isinstance(event, Speech)))

    async with (
        antiphon.connect(url, mode="video", init=init) as call,
        anyio.create_task_group() as own,
    ):
        own.start_soon(listen, call)
        for index in range(load.seconds):
            await anyio.sleep_until(began_s + load.late_s(number) + index)
            name, pcm = str(index), speech.second(index + 3 * number)
            sent[name] = anyio.current_time()
            await call.raw.append(Append(pcm=pcm, frames=(frame,), input_id=name))
        await anyio.sleep(WAIT_S)
        own.cancel_scope.cancel()


async def measure(url: str, load: Load, lead_s: float) -> Found:
    """Run a load; sessions have `lead_s` to be opened."""
    answers: list[tuple[float, bool]] = []
    began_s = anyio.current_time() + lead_s
    async with anyio.create_task_group() as tasks:
        for number in range(load.sessions):
            tasks.start_soon(talk, url, load, number, began_s, answers)
    units = load.sessions * load.seconds
    in_time = sum(delay_ms <= DUE_MS for delay_ms, _ in answers)
    return Found(
        load=load,
        units=units,
        late=units - in_time,
        latency=sum_up([delay_ms for delay_ms, _ in answers]),
        spoken=round(sum(spoke for _, spoke in answers) / len(answers), 3),
    )


@asynccontextmanager
async def server(folder: Path, slots: int, model: str, *flags: str) -> AsyncIterator[str]:
    """Serve; `PYTHONPATH` is that of this process."""
    words = ("--slots", str(slots), "--no-pages", *flags)
    async with served(model, folder, *words) as url:
        yield url


def replayed(logs: Path, flags: tuple[str, ...]) -> dict[str, Any]:
    """Replay the longest log of a folder with the model."""
    log = max(logs.rglob("*.session.zst"), key=lambda path: path.stat().st_size)
    done = subprocess.run(
        [*RUN, "replay", "--full", "--json", *flags, str(log)],
        capture_output=True,
        text=True,
        check=False,
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
    runs: list[Found] = []
    with tempfile.TemporaryDirectory(prefix="antiphon-gpu-") as name:
        folder = Path(name)
        async with server(folder, max(counts), options.model, *flags) as url:
            for count in counts:
                for is_spread in (True, False):
                    load = Load(sessions=count, seconds=options.seconds, is_spread=is_spread)
                    found = await measure(url, load, 1 + 0.1 * count)
                    print(found, flush=True)
                    runs.append(found)
        replay = replayed(folder, ()) if options.replay else None
        print(replay, flush=True)
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
        path = (str(install(Path(name))), str(ROOT), os.environ.get("PYTHONPATH", ""))
        os.environ["PYTHONPATH"] = os.pathsep.join(path)
        found = anyio.run(partial(run, options))
    text = json.dumps(found, indent=1, default=attrs.asdict) + "\n"
    (options.out / f"{options.name}.json").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
