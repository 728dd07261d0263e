"""How much of the product one second of sound passes, and one response of `openai`.

    python -m tests.project.path_length [--json]

A server with the scripted model and a recording runs twice in a process of its own, its calls
counted by Python's profiler in all threads: once for `ROUNDS` seconds (or responses), once for
twice as many. The difference, divided by `ROUNDS`, is what one more of them costs: files,
functions, calls, and calls from one file into another. What happens once a session is not in it.
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import attrs
import numpy as np
from websockets.sync.client import ClientConnection, connect

ROOT: Final = Path(__file__).parents[2]
PRODUCT: Final = tuple(f"{ROOT}/{name}/" for name in ("protocol", "recorder", "runtime", "replay"))
ROUNDS: Final = 8
WAIT_S: Final = 60


@attrs.frozen
class PathLength:
    """What one round passes.

    Attributes:
        changes: calls from one file of the product into another one.
    """

    files: int
    functions: int
    calls: float
    changes: float


# -- in the server's process ----------------------------------------------------------------------


def serve(found: str, *arguments: str) -> None:
    """Run `antiphon serve` with all calls counted; they are written to a file at its end."""
    calls, changes = Counter[str](), Counter[str]()
    last = threading.local()

    def count(frame: FrameType, what: str, _: object) -> None:
        name = frame.f_code.co_filename
        if what == "call" and name.startswith(PRODUCT):
            calls[f"{name}:{frame.f_code.co_qualname}"] += 1
            if getattr(last, "file", name) != name:
                changes[name] += 1
            last.file = name

    from runtime.cli import main

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        main(["serve", *arguments], standalone_mode=False)
    finally:
        sys.setprofile(None)
        Path(found).write_text(json.dumps([calls, changes.total()]))


# -- its clients ----------------------------------------------------------------------------------


def _send(client: ClientConnection, kind: str, **fields: Any) -> None:
    client.send(json.dumps({"type": kind, **fields}))


def _until(client: ClientConnection, *kinds: str) -> None:
    while json.loads(client.recv(WAIT_S))["type"] not in kinds:
        pass


def speak(url: str, seconds: int) -> None:
    """Send so many seconds to `realtime`, each when the one before it is answered."""
    sound = base64.b64encode(np.full(16_000, 0.01, "<f4").tobytes()).decode()
    with connect(f"{url}/v1/realtime?mode=audio", max_size=None) as client:
        _send(client, "session.init", payload={"system_prompt": "be brief"})
        _until(client, "session.created")
        for _ in range(seconds):
            _send(client, "input.append", input={"audio": sound})
            _until(client, "response.output.delta")
        _send(client, "session.close")
        _until(client, "session.closed")


def respond(url: str, responses: int) -> None:
    """Ask `openai` for so many responses, each to a second of sound."""
    sound = base64.b64encode(np.full(24_000, 300, "<i2").tobytes()).decode()
    with connect(f"{url}/v1/realtime?model=scripted", max_size=None) as client:
        audio = {"input": {"turn_detection": None}}
        _send(client, "session.update", session={"type": "realtime", "audio": audio})
        _until(client, "session.updated")
        for _ in range(responses):
            _send(client, "input_audio_buffer.append", audio=sound)
            _send(client, "input_audio_buffer.commit")
            _send(client, "response.create")
            _until(client, "response.done")


ROUTES: Final[dict[str, Callable[[str, int], None]]] = {
    "a second of sound": speak,
    "a response of openai": respond,
}


def counted(talk: Callable[[str, int], None], rounds: int) -> tuple[Counter[str], int]:
    """Serve one conversation of so many rounds; return the calls by function, and the changes."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        code = f"import sys; from {__name__} import serve; serve(*sys.argv[1:])"
        if __name__ == "__main__":
            code = code.replace("__main__", "tests.project.path_length")
        options = ("--port", "0", "--model", "scripted", "--record", folder)
        command = (sys.executable, "-c", code, str(found), *options)
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                said = [process.stdout.readline().strip() for _ in range(3)]
                url = next(line.split()[-1] for line in said if "ws://" in line)
                talk(url.removesuffix("/v1/realtime"), rounds)
            finally:
                process.terminate()
        calls, changes = json.loads(found.read_text())
        return Counter(calls), changes


def measure(talk: Callable[[str, int], None]) -> PathLength:
    """Measure what one round passes."""
    few, few_changes = counted(talk, ROUNDS)
    many, many_changes = counted(talk, 2 * ROUNDS)
    passed = {name: many[name] - few[name] for name in many}
    often = [name for name, calls in passed.items() if calls >= ROUNDS // 2]
    return PathLength(
        files=len({name.partition(":")[0] for name in often}),
        functions=len(often),
        calls=round(sum(passed[name] for name in often) / ROUNDS),
        changes=round((many_changes - few_changes) / ROUNDS),
    )


def main() -> None:
    """Print what each route passes."""
    parser = argparse.ArgumentParser(
        description=__doc__, prog="python -m tests.project.path_length"
    )
    parser.add_argument("--json", action="store_true")
    found = {name: attrs.asdict(measure(talk)) for name, talk in ROUTES.items()}
    if parser.parse_args().json:
        print(json.dumps(found))
        return
    for name, length in found.items():
        print(f"{name}: " + ", ".join(f"{value} {key}" for key, value in length.items()))


if __name__ == "__main__":
    main()
