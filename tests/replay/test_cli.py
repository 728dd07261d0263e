"""The commands `replay`, `verify` and `inspect`: exit codes, JSON keys, errors of one line."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from recorder.format.format import HEADER_BYTES, MARK, Record
from replay.cli import inspect_command, replay_command
from replay.library.keep import verify_command
from replay.library.text import summary_lines
from replay.rerun import environment
from replay.rerun.folder import find_logs, replay_logs, size_of
from replay.shared.commands import print_all
from runtime import RUN
from runtime.cli import main
from runtime.model.backends.base import Backend
from runtime.model.backends.scripted import ScriptedBackend, Speaks, Step
from tests.replay.test_full import echo_records, quick, record_session
from tests.replay.test_logs import Scene, busy_scene, renumbered, write_log

REPORT_KEYS = {
    *("records", "events", "effects", "frames", "states", "states_of_old", "units", "span_ns"),
    *("finished", "truncated", "divergence", "damage", "damage_count"),
    *("recorded_by", "replayed_by"),
}
SUMMARY_KEYS = {"log", "result", "exit_code", "elapsed_ms", "times_real_time"}


def call(command: click.Command, *arguments: object) -> Result:
    """Run a command; whatever happens, it must not end in a traceback."""
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    return result


def told(command: click.Command, *arguments: object) -> Any:
    """Run a command with --json; return the object it prints, which says the exit code too."""
    result = call(command, *arguments, "--json")
    body = json.loads(result.stdout)
    assert body.get("exit_code", 0) == result.exit_code
    return body


@pytest.fixture(scope="module")
def busy_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("busy"), busy_scene().records)


def with_wrong_frame(records: Sequence[Record]) -> tuple[int, list[Record]]:
    """Change a word of a sent frame; return which and all records."""
    seq = next(r.seq for r in records if r.kind == "tx" and r.seq > 60)
    fields = {**records[seq].fields, "frame": str(records[seq].fields["frame"]) + "\ud800"}
    wrong = attrs.evolve(records[seq], fields=fields)
    return seq, [*records[:seq], wrong, *records[seq + 1 :]]


def damaged(path: Path, folder: Path, block: int) -> Path:
    """Copy a log with one bit of a block's payload flipped."""
    data = bytearray(path.read_bytes())
    at = -1
    for _ in range(block + 1):
        at = data.index(MARK, at + 1)
    data[at + HEADER_BYTES + 9] ^= 1
    copy = folder / path.name
    copy.write_bytes(data)
    return copy


# -- replay ---------------------------------------------------------------------------------------


def test_replay_of_a_sound_log(busy_path: Path) -> None:
    """A script could not tell that a log replays, or how fast."""
    body = told(replay_command, busy_path)
    assert body.keys() == REPORT_KEYS | SUMMARY_KEYS
    assert (body["result"], body["exit_code"], body["finished"]) == ("identical", 0, True)
    assert body["times_real_time"] > 1
    text = call(replay_command, busy_path)
    assert text.stdout.startswith("identical\n")
    assert "times real time" in text.stdout


def test_replay_of_an_unfinished_log(tmp_path: Path) -> None:
    """The log of a killed server would fail, or would seem to be complete."""
    scene = Scene()
    scene.activate()
    scene.unit(1)
    path = write_log(tmp_path, scene.records[:-1])
    body = told(replay_command, path)
    assert (body["result"], body["finished"]) == ("identical", False)
    text = call(replay_command, path)
    assert (text.exit_code, "which has no fin" in text.stdout) == (0, True)


def test_replay_explains_a_divergence(tmp_path: Path) -> None:
    """A log that came out otherwise would end with exit code 0, or without saying where."""
    seq, records = with_wrong_frame(busy_scene().records)
    path = write_log(tmp_path, records)
    body = told(replay_command, path)
    assert (body["result"], body["exit_code"]) == ("diverged", 1)
    assert body["divergence"].keys() == {
        *("kind", "seq", "record", "at_ns", "unit", "field", "recorded", "came_out"),
        *("cause", "snr_db"),
    }
    assert body["divergence"]["seq"] == seq
    text = call(replay_command, path)
    assert text.exit_code == 1
    assert f"diverged at record {seq}" in text.stdout
    assert "\\ud800" in text.stdout


def test_replay_stops_at_damage_unless_told(tmp_path: Path, busy_path: Path) -> None:
    """Damage would pass as sound, or nothing beyond it could be seen."""
    path = damaged(busy_path, tmp_path, 5)
    body = told(replay_command, path)
    assert (body["result"], body["exit_code"], body["damage_count"]) == ("damaged", 2, 1)
    further = told(replay_command, path, "--go-on")
    assert further["exit_code"] == 2
    assert further["records"] >= body["records"]
    assert "damage at byte" in call(replay_command, path).stdout


@pytest.mark.parametrize("command", [replay_command, verify_command, inspect_command])
def test_what_cannot_be_read_is_one_line(command: click.Command, tmp_path: Path) -> None:
    """A wrong path or a file of something else would end in a traceback."""
    junk = tmp_path / "junk.session.zst"
    junk.write_bytes(b"no log at all" * 50)
    (tmp_path / "empty.session.zst").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "none.session.zst", tmp_path / "folder"):
        result = call(command, path)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    for path in (junk, tmp_path / "empty.session.zst"):
        result = call(command, path)
        assert result.exit_code == 2
        assert (result.stdout + result.stderr).count("\n") <= 2


# -- replay --full --------------------------------------------------------------------------------


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ScriptedBackend:
    """What the commands load as any model: the script of `record_session`, taking no time."""

    def instant(unit: Any, seed: int) -> Step:
        return attrs.evolve(quick(unit, seed), prefill_s=0, generate_s=0, finalize=Step().rollback)

    made = ScriptedBackend(instant)

    def load(name: str, slots: int | None, **_: object) -> Backend:
        assert (name, slots) == ("scripted", 1)
        return made

    monkeypatch.setattr(environment, "load_backend", load)
    return made


def test_full_replay(tmp_path: Path, backend: ScriptedBackend) -> None:
    """A server's own log could not be run again from the command line."""
    path = record_session(tmp_path)
    body = told(replay_command, path, "--full")
    assert (body["result"], body["exit_code"], body["units"]) == ("identical", 0, 13)
    assert body.keys() == SUMMARY_KEYS | {
        *("model", "environment", "fingerprint", "compared", "logits_changed"),
        *("units", "units_held", "units_changed", "changed", "turns", "turns_changed"),
        *("chunks", "chunks_changed"),
        *("divergence", "recorded", "renewed"),
    }
    assert body["recorded"].keys() == body["renewed"].keys() == REPORT_KEYS
    text = call(replay_command, path, "--full")
    environment = "environment as recorded: backend scripted; version 1\n"
    assert (text.exit_code, text.stdout.startswith(environment + "identical\n")) == (0, True)
    assert not backend.held_slots


def test_full_replay_of_another_model(tmp_path: Path, backend: ScriptedBackend) -> None:
    """A model that says something else would pass, or one would not see what."""
    path = record_session(tmp_path)
    same = backend.script

    def other(unit: Any, seed: int) -> Step:
        step = same(unit, seed)
        if unit.index != 3 or step.speech is None:
            return step
        return attrs.evolve(step, speech=Speaks(text=step.speech.text, pcm=step.speech.pcm[4:]))

    backend.script = other
    body = told(replay_command, path, "--full")
    assert (body["result"], body["exit_code"]) == ("diverged", 1)
    assert (body["divergence"]["unit"], body["divergence"]["kind"]) == (3, "model")
    assert (body["divergence"]["field"], body["units_changed"]) == ("pcm[0]", 1)
    text = call(replay_command, path, "--full").stdout
    assert "dB above the difference" in text
    assert "what the client would have received differs" in text


def test_full_replay_in_another_environment(tmp_path: Path, backend: ScriptedBackend) -> None:
    """What another machine makes would be held against the model."""
    path = record_session(tmp_path)
    backend.info = attrs.evolve(backend.info, fingerprint={"backend": "scripted", "version": "2"})
    body = told(replay_command, path, "--full")
    assert (body["result"], body["exit_code"], body["compared"]) == ("not_comparable", 3, False)
    assert body["environment"] == [{"name": "version", "recorded": "1", "here": "2"}]
    assert "--anyway" in call(replay_command, path, "--full").stdout
    assert told(replay_command, path, "--full", "--anyway")["exit_code"] == 0


def test_full_replay_of_an_older_arithmetic(tmp_path: Path, backend: ScriptedBackend) -> None:
    """A log from before an upgrade would be held against the model."""
    path = record_session(tmp_path)
    fingerprint = {**backend.info.fingerprint, "numerics": "2"}
    backend.info = attrs.evolve(backend.info, fingerprint=fingerprint)
    body = told(replay_command, path, "--full")
    assert (body["result"], body["exit_code"], body["compared"]) == ("not_comparable", 3, False)
    assert body["environment"] == [{"name": "numerics", "recorded": "1", "here": "2"}]
    assert "numerics: recorded 1, here 2" in call(replay_command, path, "--full").stdout


def test_full_replay_without_the_model(tmp_path: Path) -> None:
    """A log of a model that is not here would end in a traceback."""
    path = write_log(tmp_path, echo_records())
    result = call(replay_command, path, "--full", "--model", "nobody")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (3, "", 1)
    assert "nobody" in result.stderr


@pytest.mark.parametrize(
    "flags",
    [*(("--full", "--go-on"), ("--full", "--jobs", "2")), *(("--anyway",), ("--model", "x"))],
)
def test_replay_refuses_flags_that_mean_nothing(flags: tuple[str, ...], busy_path: Path) -> None:
    """A flag would be taken and do nothing."""
    assert call(replay_command, busy_path, *flags).exit_code == 2


# -- several logs ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, busy_path: Path) -> Path:
    """A sound log, an open one, one that diverges, a damaged one, and one that is none."""
    made = tmp_path_factory.mktemp("several")
    records = busy_scene().records
    for name, kept in {"b-open": records[:-1], "c-wrong": with_wrong_frame(records)[1]}.items():
        (made / "written").mkdir(exist_ok=True)
        write_log(made / "written", kept).rename(made / f"{name}.session.zst")
    (made / "written").rmdir()
    (made / "below").mkdir()
    damaged(busy_path, made / "below", 5)
    (made / "a-sound.session.zst").write_bytes(busy_path.read_bytes())
    (made / "d-junk.session.zst").write_bytes(b"no log at all" * 50)
    (made / "notes.txt").write_text("no log")
    return made


def names_of(bodies: Sequence[Any]) -> dict[str, str]:
    """Return each log's result by its name."""
    return {Path(body["log"]).name.partition(".")[0]: body["result"] for body in bodies}


def test_a_folder_is_replayed_log_by_log(folder: Path) -> None:
    """A damaged log would stop the others, or a script could not tell which one differs."""
    result = call(replay_command, folder, "--json")
    bodies = json.loads(result.stdout)
    assert names_of(bodies) == {
        "a-sound": "identical",
        "b-open": "identical",
        "c-wrong": "diverged",
        "d-junk": "unreadable",
        "rec-000001": "damaged",
    }
    assert result.exit_code == max(body["exit_code"] for body in bodies) == 2
    assert [body["log"] for body in bodies] == sorted(body["log"] for body in bodies)
    for body in bodies:
        whole = body.keys() == SUMMARY_KEYS | REPORT_KEYS
        assert whole or body.keys() == SUMMARY_KEYS | {"error"}


def test_processes_find_the_same(folder: Path) -> None:
    """What is found would depend on how many processes looked."""
    alone = json.loads(call(replay_command, folder, "--json").stdout)
    shared = json.loads(call(replay_command, folder, "--json", "--jobs", "2").stdout)
    for body in (*alone, *shared):
        del body["elapsed_ms"], body["times_real_time"]
    assert alone == shared


def test_a_table_shows_what_is_wrong_first(folder: Path) -> None:
    """One would look for the one log that differs among hundreds that do not."""
    text = call(replay_command, folder).stdout
    names = ("d-junk", "below/rec-000001", "c-wrong", "a-sound", "b-open")
    places = [text.index(f"\n{name} ") for name in names]
    assert places == sorted(places)
    assert text.index("(tx Send)") < text.index("a-sound") < text.index("no fin")
    assert "5 logs: 2 identical, 1 diverged, 1 damaged, 1 unreadable" in text.splitlines()[-1]


def test_logs_far_apart_are_named_from_the_root(folder: Path) -> None:
    """`a/x` would be looked for in the current folder."""
    (found,) = replay_logs([folder / "a-sound.session.zst"], lambda _: None)
    apart = [attrs.evolve(found, log=f"/{name}/x.session.zst") for name in "ab"]
    written = io.StringIO()
    print_all(Console(file=written), summary_lines(apart, 1.0))
    text = written.getvalue()
    assert "\n/a/x " in text
    assert "\n/b/x " in text


@pytest.mark.parametrize(
    ("names", "exit_code"),
    [(("a-sound", "b-open"), 0), (("a-sound", "c-wrong"), 1), (("d-junk", "a-sound"), 2)],
)
def test_the_worst_log_decides(folder: Path, names: tuple[str, ...], exit_code: int) -> None:
    """CI would be green though a log differs."""
    logs = [folder / f"{name}.session.zst" for name in names]
    assert call(replay_command, *logs).exit_code == exit_code
    assert call(replay_command, *logs, logs[0]).exit_code == exit_code


def test_several_logs_replay_fully(
    tmp_path: Path, backend: ScriptedBackend, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model would be loaded for each log, or one that is not here would stop the others."""
    log, loaded = record_session(tmp_path), list[str]()
    other = attrs.evolve(busy_scene().records[0], fields={"config": {"model": "gone"}})
    (tmp_path / "other").mkdir()
    write_log(tmp_path / "other", [other, *busy_scene().records[1:]])

    def load(name: str, slots: int | None, **_: object) -> Backend:
        loaded.append(name)
        if name == "gone":
            raise ValueError("no such model")
        return backend

    monkeypatch.setattr(environment, "load_backend", load)
    result = call(
        replay_command, log, log.parent, folder / "d-junk.session.zst", "--full", "--json"
    )
    bodies = json.loads(result.stdout)
    assert [body["result"] for body in bodies] == ["identical", "not_comparable", "unreadable"]
    assert (result.exit_code, loaded) == (2, ["scripted", "gone"])
    assert "no such model" in bodies[1]["error"]
    text = call(replay_command, log, tmp_path / "other", "--full")
    assert (text.exit_code, "1 identical, 1 not comparable" in text.stdout) == (3, True)


# -- progress -------------------------------------------------------------------------------------


def test_progress_adds_up_to_the_logs(folder: Path) -> None:
    """A bar would stop short of its end, or run over it."""
    logs = find_logs([folder])
    for jobs in (1, 2):
        told: list[int] = []
        assert len(list(replay_logs(logs, told.append, jobs=jobs))) == len(logs)
        assert sum(told) == sum(map(size_of, logs))


# -- verify and inspect ---------------------------------------------------------------------------


def test_verify(tmp_path: Path, busy_path: Path) -> None:
    """A script could not tell a sound log from an open or a damaged one."""
    assert told(verify_command, busy_path)["state"] == "finished"
    open_log = write_log(tmp_path, busy_scene().records[:40])
    body = told(verify_command, open_log)
    assert (body["state"], body["exit_code"]) == ("open", 0)
    (tmp_path / "bad").mkdir()
    body = told(verify_command, damaged(busy_path, tmp_path / "bad", 4))
    assert (body["state"], body["exit_code"]) == ("damaged", 1)
    assert body["damage_count"] == len(body["damage"]) >= 1
    assert call(verify_command, busy_path).stdout.startswith("state: finished\n")


def test_inspect(tmp_path: Path, busy_path: Path) -> None:
    """One could not see what happened in a session."""
    body = told(inspect_command, busy_path)
    assert {"states", "duration_ns", "units", "drops", "errors", "end"} <= body.keys()
    assert [span["state"] for span in body["states"]] == [
        *("QUEUED", "CONNECTED", "ACTIVE", "CLOSED")
    ]
    assert len(body["units"]) == 27
    text = call(inspect_command, busy_path).stdout
    assert "QUEUED 0.000 s > CONNECTED" in text
    assert "ended: client" in text
    assert len(text.splitlines()) < 60
    (tmp_path / "bad").mkdir()
    gaps = call(inspect_command, damaged(busy_path, tmp_path / "bad", 9))
    assert (gaps.exit_code, "gaps" in gaps.stdout) == (0, True)


@pytest.mark.parametrize("wall_ms", [10**17, -(10**17)])
def test_a_time_that_no_calendar_has_is_not_told(tmp_path: Path, wall_ms: int) -> None:
    """A page of the session would show no facts at all: a browser knows no such time."""
    records = busy_scene().records
    head = {**records[0].fields, "wall_ms": wall_ms}
    log = write_log(tmp_path, [attrs.evolve(records[0], fields=head), *records[1:]])
    assert told(inspect_command, log)["wall_ms"] is None


def test_text_of_a_log_is_not_markup(tmp_path: Path) -> None:
    """A client could colour, hide or break what an operator sees."""
    records = busy_scene().records
    head = {**records[0].fields, "recording_id": "[red]\x1b[31m", "config": {"model": "[/]"}}
    odd = [attrs.evolve(records[0], fields=head), *records[1:]]
    text = call(inspect_command, write_log(tmp_path, renumbered(odd))).stdout
    assert "[red]" in text
    assert "\x1b" not in text
    assert "[/]" in text


def test_text_that_is_no_unicode_is_shown(tmp_path: Path) -> None:
    """What a broken client sent as text ends what would show it in a traceback."""
    records = busy_scene().records
    fin = attrs.evolve(records[-1], fields={**records[-1].fields, "reason": "\ud800"})
    log = write_log(tmp_path, [*records[:-1], fin])
    (tmp_path / "sound").mkdir()
    shown = call(main, "diff", log, write_log(tmp_path / "sound", records))
    assert (shown.exit_code, "    in A    \\ud800\n" in shown.stdout) == (1, True)


@pytest.mark.parametrize("command", [replay_command, verify_command, inspect_command])
def test_help_teaches_exit_codes(command: click.Command) -> None:
    """One would have to read the source for what an exit code means."""
    text = call(command, "--help").stdout
    assert "\nExit codes:" in text.replace("  Exit", "Exit")
    assert "    2  " in text


# -- processes that share the logs ----------------------------------------------------------------


WAIT_S = 60


def test_jobs_end_with_the_command(tmp_path: Path) -> None:
    """CI that stops a replay waits for ever: its processes hold the output open."""
    logs = [tmp_path / "begun.session.zst", tmp_path / "waits.session.zst"]
    for log in logs:
        os.mkfifo(log)
    replay = subprocess.Popen(
        [*RUN, "replay", "--jobs", "2", *map(str, logs)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    with logs[0].open("wb"):  # a process has opened it too; nobody ever writes to the other
        replay.send_signal(signal.SIGTERM)
    replay.communicate(timeout=WAIT_S)
    assert replay.returncode == -signal.SIGTERM
