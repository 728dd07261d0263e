"""The command `fork`, and forks of a model that really hears."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest
from click.testing import CliRunner, Result

from recorder.read.reader import LogReader
from recorder.repair import verify
from replay.assess.run import look_at, run_forced
from replay.fork.change import Change, Forked
from replay.fork.command import fork_command, make_fork
from replay.rerun import environment
from replay.rerun.full import replay_fully
from replay.rerun.report import FullReport
from replay.shared.commands import unwatched
from runtime.media.sound import read_wav
from runtime.model.backends.base import Backend
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.scripted import ScriptedBackend, Step
from runtime.model.engine.backend import EngineBackend
from runtime.model.models import tiny_path
from tests.generated.clients import HELDOUT, Append, ClientScript, Close, Wait, record_model
from tests.replay.test_fork import OWN, events, results
from tests.replay.test_full import quick, record_session

QUESTION = HELDOUT / "005-what-time-is-it.flac"


def call(*arguments: object) -> Result:
    """Run the command; whatever happens, it must not end in a traceback."""
    result = CliRunner().invoke(fork_command, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    return result


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A session of 13 units; the command loads its model, which takes no time."""

    def instant(unit: Any, seed: int) -> Step:
        return attrs.evolve(quick(unit, seed), prefill_s=0, generate_s=0, finalize=Step().rollback)

    def load(name: str, slots: int | None, **_: object) -> Backend:
        assert (name, slots) == ("scripted", 1)
        return ScriptedBackend(instant)

    monkeypatch.setattr(environment, "load_backend", load)
    return record_session(tmp_path)


def test_a_fork_and_what_it_says(log: Path, tmp_path: Path) -> None:
    """One would get a file, and not what one has asked for."""
    result = call(log, "--at", 5, "--force-listen")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    made = Path(lines[0])
    assert (made.parent, verify(made).state) == (tmp_path, "finished")
    assert lines[1] == "a fork of rec-000001 at unit 5, by model scripted: 13 units"
    assert lines[3].startswith("differ from unit 5 on: 12 of 13 units")
    assert "second 5" in result.stdout


def test_json_of_a_fork(log: Path, tmp_path: Path) -> None:
    """A script could not find the fork, or what came of it."""
    out = tmp_path / "made" / "forks"
    arguments = ("--replace-audio", QUESTION, "--seed", 7, "--set", "temperature=0", "--out", out)
    body = json.loads(call(log, "--at", 3, "--json", *arguments).stdout)
    assert body.keys() == {
        *("log", "exit_code", "recording_id", "parent", "parent_seq", "unit", "model"),
        *("units", "prefix", "ended_early", "diff"),
    }
    assert (Path(body["log"]).parent, body["parent"], body["unit"]) == (out, "rec-000001", 3)
    assert body["diff"]["first"]["index"] == 3
    with LogReader(Path(body["log"])) as reader:
        config: Any = reader.head.fields["config"]
    assert config["fork"]["settings"] == {"temperature": 0}
    assert config["fork"]["replaced_audio"]["samples"] == len(read_wav(QUESTION)) // 4


@pytest.mark.parametrize(
    ("arguments", "exit_code", "why"),
    [
        (("--at", "99"), 2, "there is no unit 99"),
        (("--at", "2", "--set", "nope=1"), 2, "NAME=VALUE"),
        (("--at", "2", "--set", "temperature"), 2, "NAME=VALUE"),
        (("--at", "2", "--set", "temperature=9"), 2, "allowed is 0 to 2"),
        (("--at", "2", "--replace-audio", "nowhere.wav"), 2, "nowhere.wav"),
        (("--at", "2", "--out", str(QUESTION)), 2, "is a file"),
        (("--at", "2", "--out", str(QUESTION / "forks")), 2, "Not a directory"),
        (("--at", "-1"), 2, "--at"),
        ((), 2, "--at"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    arguments: tuple[str, ...], exit_code: int, why: str, log: Path
) -> None:
    """A mistake would end in a traceback, or in half a log."""
    before = sorted(log.parent.iterdir())
    result = call(log, *arguments)
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert why in result.stderr
    assert sorted(log.parent.iterdir()) == before


def test_a_log_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    """A wrong path or a file of something else would end in a traceback."""
    (tmp_path / "junk.session.zst").write_bytes(b"no log at all" * 50)
    for name in ("none.session.zst", "junk.session.zst", "."):
        result = call(tmp_path / name, "--at", 0)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)


def test_help_teaches() -> None:
    """One would have to read the source for what can be changed, and what an exit code means."""
    text = call("--help").stdout
    for part in ("Examples:", "Exit codes:", "listen_prob_scale", "    3  "):
        assert part in text


# -- with the embedded model ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> DuplexModel:
    """The embedded model."""
    return DuplexModel.load(tiny_path())


@pytest.fixture(scope="module")
def spoken(model: DuplexModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session of eight seconds, in which somebody asks and is answered."""
    second = (Append(samples=16_000), Wait(ms=1900))
    script = ClientScript(
        inits=('{"type": "session.init", "payload": {}}',), actions=(*second * 8, Close())
    )
    return record_model(script, model, tmp_path_factory.mktemp("spoken"), 1)[-1]


def fork(log: Path, change: Change, model: DuplexModel, folder: Path) -> tuple[Path, Forked]:
    """Fork with the embedded model, in real time."""
    load = partial(_load, model)
    make = partial(make_fork, log, change, folder, identity=OWN, load=load)
    return anyio.run(make)


def _load(model: DuplexModel, _name: str) -> Backend:
    return EngineBackend(model)


def full_replay(log: Path, model: DuplexModel) -> FullReport:
    """Run a log's model again."""
    with LogReader(log) as reader:
        load = partial(_load, model)
        return anyio.run(partial(replay_fully, reader.head.fields, reader, load))


def test_a_model_comes_to_where_it_was(model: DuplexModel, spoken: Path, tmp_path: Path) -> None:
    """What the model says in a fork would come from another state than the recorded one."""
    said = [made["index"] for made in results(spoken) if made.get("text")]
    assert said
    path, forked = fork(spoken, Change(at=said[0]), model, tmp_path)
    assert events(path) == events(spoken)
    assert (forked.prefix.held, forked.prefix.first) == (0, None)


def test_a_model_hears_another_question(model: DuplexModel, spoken: Path, tmp_path: Path) -> None:
    """What the model would have said to something else could not be asked."""
    at = len(results(spoken)) // 2
    path, _ = fork(spoken, Change(at=at, pcm=read_wav(QUESTION)), model, tmp_path)
    assert results(path, at) == results(spoken, at)
    assert results(path)[at]["input_hash"] != results(spoken)[at]["input_hash"]
    report = full_replay(path, model)
    assert report.identical, report.first_divergence


def test_a_model_is_held_to_what_it_said(model: DuplexModel, spoken: Path, tmp_path: Path) -> None:
    """With another prompt and seed, it would have said something else before, and gone on there."""
    last = max(made["index"] for made in results(spoken) if made.get("text"))
    change = Change(at=last + 1, seed=12345, settings={"temperature": 1.5, "top_k": 500})
    path, forked = fork(spoken, change, model, tmp_path)
    assert [made["decided_ids"] for made in results(path, last + 1)] == [
        made["decided_ids"] for made in results(spoken, last + 1)
    ]
    assert forked.prefix.held > 0
    report = full_replay(path, model)
    assert report.identical, report.first_divergence
    assert (report.units, report.units_held) == (len(results(path)), last + 1)
    row = anyio.run(run_forced, look_at(path), EngineBackend(model), unwatched)
    assert row.body["changed"] == []
