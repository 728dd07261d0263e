"""The examples do what they say: those that need only Antiphon are run, the others are parsed.

`examples/livekit_agent.py` and `examples/pipecat_pipeline.py` need packages of others: they were
run by hand with the versions that they name, and `tests/soak/clients.py` runs the same classes.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import wave
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from recorder.read.reader import LogReader
from recorder.storage.store import Store
from replay.rerun.logic import replay
from runtime import RUN
from runtime.cli import main
from runtime.model import models
from runtime.model.models import ModelUnknownError, ModelUnusableError, check_model, load_backend
from tests.live.servers import LiveServer, live_server
from tests.project.example_packages import EXAMPLES, install, run_with

ROOT: Final = Path(__file__).parents[1]
SPEECH: Final = ROOT / "fixtures" / "speech" / "demo.wav"
QUESTION: Final = ROOT / "fixtures" / "speech" / "heldout" / "005-what-time-is-it.flac"
"""Understood over a telephone too."""
LOUD: Final = 500
"""A 16-bit sample of speech."""


def loud_s(path: Path) -> float:
    """Seconds of a WAV file that are not silent."""
    with wave.open(str(path)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        return float((np.abs(samples.astype(np.int32)) > LOUD).sum() / file.getframerate())


def antiphon(*words: str, folder: Path, **also: str) -> subprocess.CompletedProcess[str]:
    """Run a command."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), **also}
    return subprocess.run(
        (*RUN, *words), cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


# -- a model of one's own -------------------------------------------------------------------------


def test_an_installed_model_talks_and_its_recording_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package's model could be named, and would not run, or not be comparable."""
    install(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    logs = tmp_path / "logs"
    with live_server(
        "--record", str(logs), model="backend:parrot", run=run_with(tmp_path)
    ) as server:
        url = server.url.removesuffix("/v1/realtime")
        done = antiphon("talk", str(SPEECH), "--url", url, "--fast", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert loud_s(tmp_path / "demo.reply.wav") > 0.3
    (log,) = Store(logs).logs()
    full = antiphon("replay", "--full", str(log.path), folder=tmp_path, PYTHONPATH=path)
    assert full.returncode == 0, full.stdout + full.stderr
    assert "model backend:parrot: " in full.stdout


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("backend:parot", "packages are .*parrot; did you mean parrot"),
        ("backend:", "packages are .*parrot"),
    ],
)
def test_an_unknown_backend_names_those_that_are_there(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator could not tell a mistyped name from a package that is not installed."""
    install(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for call in (check_model, load_backend):
        with pytest.raises(ModelUnknownError, match=says):
            call(name)


def test_a_name_that_no_package_offers_is_refused() -> None:
    """A name could import a module that nobody offered as a model."""
    with pytest.raises(ModelUnknownError, match="backends of installed packages are "):
        check_model("backend:os")


@pytest.mark.parametrize(
    ("loads", "name", "says"),
    [
        ("parrot:load", "backend:parrot:loud", "backend:parrot:loud: a parrot has no checkpoint"),
        ("parrot:nothing", "backend:parrot", "AttributeError: module 'parrot' has no attribute"),
        ("nowhere:load", "backend:parrot", "ModuleNotFoundError: No module named 'nowhere'"),
        ("builtins:dict", "backend:parrot", "backend:parrot: "),
    ],
)
def test_a_backend_that_cannot_be_made_is_one_line(
    loads: str, name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator would be shown a traceback out of a package of others."""
    install(tmp_path, loads)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelUnusableError, match=re.escape(says)):
        load_backend(name)


def test_what_is_made_must_be_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server would start, and fail at its first session."""

    class Entry:
        def load(self) -> Any:
            return lambda *_, **__: object()

    monkeypatch.setattr(models, "installed_backend", lambda name: (Entry(), ""))
    with pytest.raises(ModelUnusableError, match="it made a object, which is not a Backend"):
        load_backend("backend:parrot")


# -- a telephone ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, Path]]:
    """A server whose model speaks; `tests/test_readme.py` has the embedded one hear the caller."""
    folder = tmp_path_factory.mktemp("recordings")
    with live_server("--record", str(folder), "--served-model-name", "tiny") as server:
        yield server, folder


def test_a_telephone_calls(server: tuple[LiveServer, Path], tmp_path: Path) -> None:
    """A gateway of telephones that was begun with the example would hear nothing."""
    live, logs = server
    answer = tmp_path / "answer.wav"
    url = live.url.removesuffix("/v1/realtime")
    command = (sys.executable, str(EXAMPLES / "phone.py"), str(QUESTION), str(answer))
    called = subprocess.run(
        (*command, "--url", url, "--pace", "4"), capture_output=True, text=True, check=False
    )
    assert called.returncode == 0, called.stderr
    assert called.stdout.strip()
    assert loud_s(answer) > 0.3
    (log,) = Store(logs).logs()
    with LogReader(log.path) as reader:
        assert replay(reader).identical


def test_a_telephone_without_a_server_says_so(tmp_path: Path) -> None:
    """A user would search a traceback of fifty lines for what is wrong."""
    command = (sys.executable, str(EXAMPLES / "phone.py"), str(QUESTION), str(tmp_path / "a.wav"))
    called = subprocess.run(
        (*command, "--url", "ws://127.0.0.1:1"), capture_output=True, text=True, check=False
    )
    assert called.returncode == 1
    assert called.stderr.startswith("cannot connect to ws://127.0.0.1:1/v1/realtime?model=tiny: ")
    assert called.stderr.endswith("Start one with: antiphon serve --model tiny\n")


# -- files of others ------------------------------------------------------------------------------


def test_a_workflow_evaluates(tmp_path: Path) -> None:
    """A build that copied it would fail for its own sake, or never."""
    workflow: dict[str, Any] = yaml.safe_load((EXAMPLES / "evaluate.yml").read_text())
    assert workflow["env"] == {"RECORDINGS": "recordings"}
    (job,) = workflow["jobs"].values()
    ran = [step["run"] for step in job["steps"] if "run" in step]
    assert ran.pop(0).startswith("pip install antiphon")
    codes = {"v1-duplex-v1-audio": [0, 0], "v1-live-fork": [0, 1], "v1-damaged-payload": [2, 2]}
    for name, wanted in codes.items():
        folder = tmp_path / name
        (folder / "recordings").mkdir(parents=True)
        log = ROOT / "fixtures" / "logs" / f"{name}.session.zst"
        (folder / "recordings" / log.name).write_bytes(log.read_bytes())
        words = [shlex.split(line.replace("$RECORDINGS", "recordings"))[1:] for line in ran]
        with chdir(folder):
            done = [CliRunner().invoke(main, each) for each in words]
        assert [each.exit_code for each in done] == wanted, [each.output for each in done]
    kept = {path.name for path in (tmp_path / "v1-live-fork").iterdir()}
    assert kept == {"recordings", "conversations.xml", "conversations.html"}


def test_a_cluster_of_two_is_asked_for() -> None:
    """The script would name flags that there are not; `make soak` runs such a cluster."""
    script = (EXAMPLES / "ray_placement" / "cluster.sh").read_text()
    assert subprocess.run(("sh", "-n"), input=script, text=True, check=False).returncode == 0
    (line,) = (line for line in script.splitlines() if line.startswith("antiphon "))
    command, *words = shlex.split(line)[1:]
    serve = main.get_command(click.Context(main), command)
    assert serve is not None
    given = serve.make_context("serve", words).params
    assert (given["placement"], given["workers_wanted"]) == ("ray:127.0.0.1:6379", 2)


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.name)
def test_an_example_compiles(path: Path) -> None:
    """A program for packages that are not installed here would not even be one."""
    compile(path.read_text(), path.name, "exec")
