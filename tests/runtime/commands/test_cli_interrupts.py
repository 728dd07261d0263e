"""Ctrl-C at the place where each command spends its time: real processes, real signals."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Final

import pytest
import soundfile

from recorder.repair import verify
from runtime import RUN
from tests.golden.logs import FOLDER
from tests.network.peers import create, hear, peer
from tests.project.terminal import on_terminal

ROOT: Final = Path(__file__).parents[3]
LOG: Final = str(FOLDER / "v1-realtime-many-units.session.zst")
WAIT_S: Final = 60
"""Until a command is where it is interrupted: imports of torch on a busy machine."""
END_S: Final = 60
"""Until an interrupted command has ended on a busy machine; what is waited for in these tests never
comes, so that any end shows that it was interrupted."""
SLOW: Final = "any(time.sleep(0.05) for _ in range(12_000)) or sys.exit('woke up')"
"""In place of what may take long. Python handles a signal that comes just before a sleep after it,
so each is short."""


@contextmanager
def command(*words: str, before: str = "", folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a folder; `before` is Python that runs first."""
    code = f"import sys, time\n{before}\nfrom runtime.cli import main; main()"
    process = subprocess.Popen(
        (sys.executable, "-P", "-c", code, *words),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def ends(process: subprocess.Popen[str]) -> None:
    """Press Ctrl-C, and see that the command ends as interrupted, in a line."""
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(END_S) == 130, process.communicate()
    assert process.stderr is not None
    said = process.stderr.read()
    assert "Traceback" not in said
    assert said.endswith("\ninterrupted\n") or "interrupted before anything was found" in said


def until(text: str, stream: Iterator[str] | None) -> None:
    """Read lines until one holds a text."""
    assert stream is not None
    assert any(text in line for line in stream)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A file that is never read to its end."""
    path = tmp_path / "long.session.zst"
    os.mkfifo(path)
    return path


def wait_for_reader(process: subprocess.Popen[str]) -> None:
    """Wait until a command, or a process of its own, waits for the other end of a pipe.

    The pipe is left closed: opened, it would be read to its end, and the command be over.
    """
    give_up = time.monotonic() + WAIT_S
    while not any(map(_opens_a_pipe, _session_of(process.pid))):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up
        time.sleep(0.02)


def _session_of(leader: int) -> Iterator[Path]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(folder.name)) == leader:
                yield folder


def _opens_a_pipe(folder: Path) -> bool:
    """Whether a process's main thread is where the kernel has it wait for a pipe's other end."""
    with suppress(OSError):
        return (folder / "wchan").read_text() == "wait_for_partner"
    return False


READERS: Final = (
    "recordings verify FILE",
    "recordings inspect FILE",
    "replay FILE",
    f"replay --jobs 2 FILE {LOG}",
    "replay --full FILE",
    "recordings view FILE",
    f"diff {LOG} FILE",
    "fork FILE --at 1",
    "export FILE --to wav --output kept",
    "dev play FILE --port 0",
    "recordings redact FILE --output new.session.zst",
    "dev shrink FILE --output new.session.zst -- false",
    "talk FILE",
    "chat hello --image FILE",
    "transcribe FILE",
    "keys list --file FILE",
    "serve --config FILE",
)


@pytest.mark.parametrize("line", READERS)
def test_a_file_that_is_read_for_long(line: str, pipe: Path, tmp_path: Path) -> None:
    """A large file, or one on a slow disk, would be read to its end first."""
    kept = tmp_path / "kept"
    kept.write_text("good")
    words = [str(pipe) if word == "FILE" else word for word in line.split()]
    with command(*words, folder=tmp_path) as process:
        wait_for_reader(process)
        ends(process)
    assert kept.read_text() == "good"
    assert sorted(tmp_path.iterdir()) == [kept, pipe]


def ask(folder: Path) -> Path:
    """Write a second of silence."""
    path = folder / "ask.wav"
    soundfile.write(path, [0.0] * 16_000, 16_000)
    return path


CLIENTS: Final = ("talk ask.wav", "chat hello", "transcribe ask.wav")


@pytest.mark.parametrize("line", CLIENTS)
def test_a_server_that_says_nothing(line: str, tmp_path: Path) -> None:
    """A port that takes connections and never answers would be waited for."""
    ask(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(WAIT_S)
        url = f"ws://127.0.0.1:{silent.getsockname()[1]}"
        with command(*line.split(), "--url", url, folder=tmp_path) as process:
            connection, _ = silent.accept()
            with connection:
                ends(process)


@pytest.mark.parametrize("line", CLIENTS)
def test_a_name_server_that_says_nothing(line: str, tmp_path: Path) -> None:
    """A network that is down would be waited for, for as long as the system asks for names."""
    ask(tmp_path)
    slow = (
        f"import socket; socket.getaddrinfo = lambda *_, **__: print('asked', flush=True) or {SLOW}"
    )
    words = (*line.split(), "--url", "ws://antiphon.example")
    with command(*words, before=slow, folder=tmp_path) as process:
        until("asked", process.stdout)
        ends(process)


@pytest.mark.parametrize("line", ["talk ask.wav --json", "chat hello --json"])
def test_a_server_that_answers_no_goodbye(line: str, tmp_path: Path) -> None:
    """A server that hangs amid a session would be waited for."""
    ask(tmp_path)
    done: list[Callable[[], object]] = []

    def answer(websocket) -> None:  # type: ignore[no-untyped-def]
        create(websocket, "turn_based" if line.startswith("chat") else "full_duplex")
        hear(websocket)
        done.append(websocket.close)
        asks = started.get(timeout=WAIT_S)
        os.killpg(asks.pid, signal.SIGINT)
        asks.wait(END_S)

    started: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
    with peer(answer) as url, command(*line.split(), "--url", url, folder=tmp_path) as process:
        started.put(process)
        assert process.wait(WAIT_S) == 130, process.communicate()
    assert done


@pytest.mark.parametrize(
    "line", [f"replay --full {LOG}", f"eval --mode forced --model x {LOG}", f"fork {LOG} --at 3"]
)
def test_a_model_that_loads(line: str, tmp_path: Path) -> None:
    """Gigabytes of weights would be read first, for nothing."""
    slow = "import replay.rerun.full as it\n"
    slow += f"it.load_backend = lambda *_, **__: print('loads', flush=True) or {SLOW}"
    words = (*line.split(), *(("--out", ".") if line.startswith("fork") else ()))
    with command(*words, before=slow, folder=tmp_path) as process:
        until("loads", process.stdout)
        ends(process)
    assert not list(tmp_path.iterdir())


def test_an_engine_that_loads(tmp_path: Path) -> None:
    """The same of what computes: torch itself takes seconds."""
    words = ("dev", "bench", "engine", "--sessions", "1")
    with command(*words, folder=tmp_path) as process:
        until("warming up", process.stderr)
        ends(process)


def test_a_demo(tmp_path: Path) -> None:
    """A script would take a demo that was stopped for one that failed."""
    with command("demo", "--model", "scripted", "--json", folder=tmp_path) as process:
        until("listen", process.stdout)
        ends(process)
    assert not (tmp_path / "demo" / "reply.wav").exists()
    (log,) = (tmp_path / "demo").glob("*.session.zst")
    assert verify(log).state == "finished"  # killed amid the conversation, it would be crashed


def test_a_demo_that_still_loads(tmp_path: Path) -> None:
    """A server that loads its model would be waited for."""
    with command("demo", folder=tmp_path) as process:
        give_up = time.monotonic() + WAIT_S
        while not (tmp_path / "demo" / "server.log").exists():
            assert time.monotonic() < give_up
            time.sleep(0.02)
        ends(process)


def test_a_bench(tmp_path: Path) -> None:
    """The prompt would come back minutes later, or with the exit code of a failure."""
    with command("dev", "bench", "engine", "--sessions", "1", folder=tmp_path) as process:
        until("warming up", process.stderr)
        ends(process)


def test_a_task_that_was_about_to_start(tmp_path: Path) -> None:
    """Python would warn of it after the last line, as the process ends."""
    early = (
        "from anyio._backends._trio import TaskGroup\n"
        "def start(tasks, function, *args, **kwargs):\n"
        "    waiting = function(*args)\n"
        "    print('about to start', flush=True)\n"
        "    time.sleep(600)\n"
        "TaskGroup.start_soon = start"
    )
    words = ("chat", "hello", "--url", "ws://127.0.0.1:1")
    with command(*words, before=early, folder=tmp_path) as process:
        until("about to start", process.stdout)
        ends(process)


def test_the_bar_of_a_full_replay(tmp_path: Path) -> None:
    """It would stand at 0 until the model is done, as if the command hung."""
    log = tmp_path / "log.session.zst"
    shutil.copy(LOG, log)
    words = (*RUN, "replay", "--full", "--anyway", "--model", "scripted", str(log))
    text = on_terminal(words)
    assert 0 <= text.find("loading model") < text.find("replay ")
    assert "21/21" in text
