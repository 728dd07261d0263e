"""A command that is broken off: by Ctrl-C, by a pipe that is closed, by a full disk."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner

from runtime import RUN
from runtime.cli import main
from tests.golden.logs import FOLDER
from tests.live.servers import live_server

ROOT = Path(__file__).parents[3]
WAIT_S = 60
LOG = str(FOLDER / "v1-realtime-video.session.zst")
FULL = Path("/dev/full")


def run(*arguments: str, stdout: int) -> subprocess.CompletedProcess[str]:
    """Run a command of which the stdout is given."""
    return subprocess.run(
        (*RUN, *arguments),
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        check=False,
    )


@pytest.mark.parametrize(
    "interrupt", [KeyboardInterrupt(), BaseExceptionGroup("tasks", [KeyboardInterrupt()])]
)
def test_an_interrupt_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch, interrupt: BaseException
) -> None:
    """A script would take a replay that somebody stopped for one that diverged."""

    def stop(*_: object, **__: object) -> None:
        raise interrupt

    monkeypatch.setattr("replay.rerun.folder.replay_logs", stop)
    stopped = CliRunner().invoke(main, ("replay", LOG))
    assert (stopped.exit_code, stopped.stderr.split()) == (130, ["interrupted"])


def test_what_breaks_of_itself_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of ours would pass for a full disk, or for an interrupt."""

    def fail(*_: object, **__: object) -> None:
        raise BaseExceptionGroup("tasks", [ValueError("ours")])

    monkeypatch.setattr("replay.rerun.folder.replay_logs", fail)
    assert isinstance(CliRunner().invoke(main, ("replay", LOG)).exception, ExceptionGroup)


def test_a_full_disk_is_told_of_a_task_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """`antiphon transcribe FILE | head` would end in a traceback."""

    def fail(*_: object, **__: object) -> None:
        raise ExceptionGroup("tasks", [OSError(errno.ENOSPC, "No space left on device")])

    monkeypatch.setattr("runtime.cli._give_up_stdout", lambda: None)
    monkeypatch.setattr("replay.rerun.folder.replay_logs", fail)
    told = CliRunner().invoke(main, ("replay", LOG))
    assert (told.exit_code, told.stderr) == (2, "Error: stdout: No space left on device\n")


def test_a_stdout_that_was_never_open_is_no_failure() -> None:
    """A job that is started without one would end in a traceback, whatever it did."""
    closed = subprocess.run(
        ("sh", "-c", 'exec "$@" >&-', "sh", *RUN, "replay", LOG),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert (closed.returncode, closed.stderr) == (0, "")


@pytest.mark.soak  # it runs pytest in an interpreter of its own, for what every CI does.
def test_tests_need_no_terminal(tmp_path: Path) -> None:
    """In a background job, where SIGINT is ignored, tests that send one would hang."""
    ignored = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    ignored += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    tests = "tests/replay/test_shrink.py::test_an_interrupted_search_leaves_its_best"
    # A folder of its own: else it ends by removing what whole runs before it left behind.
    where = f"--basetemp={tmp_path / 'tests'}"
    command = (sys.executable, "-c", ignored, "-m", "pytest", "-q", "-n", "0", where, tests)
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:
        try:
            assert process.wait(WAIT_S) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


ARGUMENTS = [
    ("recordings", "inspect", LOG),
    ("replay", LOG, "--json"),
    ("recordings", "view", LOG, "--output", "-"),
    ("export", LOG, "--to", "jsonl", "--output", "-"),
    ("--help",),
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=[it[0] for it in ARGUMENTS])
def test_who_has_seen_enough_is_told_no_more(arguments: tuple[str, ...]) -> None:
    """A look at the start of an answer ends in a complaint, or as if a replay had diverged."""
    reader, writer = os.pipe()
    os.close(reader)
    broken = run(*arguments, stdout=writer)
    os.close(writer)
    assert (broken.returncode, broken.stderr) == (128 + signal.SIGPIPE, "")


SPEECH: Final = str(ROOT / "fixtures" / "speech" / "demo.wav")
WITH_A_SERVER: Final = {
    "talk": ("talk", SPEECH, "--fast", "--reply", "{folder}/reply.wav"),
    "talk --json": ("talk", SPEECH, "--fast", "--reply", "{folder}/reply.wav", "--json"),
    "chat": ("chat", "hello"),
    "chat --json": ("chat", "hello", "--json"),
    "transcribe": ("transcribe", SPEECH, "--model", "scripted"),
    "transcribe --json": ("transcribe", SPEECH, "--model", "scripted", "--json"),
    "workers list": ("workers", "list"),
}
"""Commands that print while tasks of theirs run."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live_server("--no-record") as server:
        yield server.url


@pytest.mark.parametrize("command", WITH_A_SERVER)
def test_who_has_heard_enough_is_told_no_more(command: str, url: str, tmp_path: Path) -> None:
    """`antiphon talk FILE | head -1` ends in 160 lines of tracebacks of its tasks."""
    words = [word.format(folder=tmp_path) for word in WITH_A_SERVER[command]]
    reader, writer = os.pipe()
    os.close(reader)
    broken = run(*words, "--url", url, stdout=writer)
    os.close(writer)
    assert (broken.returncode, broken.stderr) == (128 + signal.SIGPIPE, "")


SERVERS: Final = {
    "serve": ("serve", "--port", "0", "--no-record", "--model", "scripted"),
    "demo": ("demo", "--fast", "--model", "scripted", "--record", "{folder}"),
}


@pytest.mark.parametrize("command", SERVERS)
def test_a_server_that_nobody_reads_ends_quietly(command: str, tmp_path: Path) -> None:
    """The same of what serves; a demo stops its server too."""
    words = [word.format(folder=tmp_path) for word in SERVERS[command]]
    reader, writer = os.pipe()
    os.close(reader)
    broken = run(*words, stdout=writer)
    os.close(writer)
    assert (broken.returncode, broken.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.skipif(not FULL.exists(), reason="there is no full device")
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=[it[0] for it in ARGUMENTS])
def test_a_full_disk_is_one_line(arguments: tuple[str, ...]) -> None:
    """A report that was not written ends in a traceback, or as if a replay had diverged."""
    with FULL.open("w") as full:
        untold = run(*arguments, stdout=full.fileno())
    assert untold.returncode == 2
    assert untold.stderr == "Error: stdout: No space left on device\n"
