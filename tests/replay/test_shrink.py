"""Shrinking: what still fails gets small, and every log on the way is one that could have been."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.values import events as ev
from protocol.values.model import UnitResult
from recorder.read.reader import read
from recorder.repair import verify
from replay.rerun.logic import LogRegenerator, RegenerationError, replay
from replay.shrink import (
    CannotRunError,
    NoFailureError,
    PendingAnswers,
    Shrinker,
    build,
    command_fails,
    shape_of,
    shrink_command,
)
from tests.golden.logs import CHANGES
from tests.project.sampling import sample
from tests.replay.test_logs import OPENED
from tests.replay.test_remake import GOLDEN, events_of
from tests.sessions.answering import Answers, play, write_events
from tests.sessions.in_memory import append_frame, base64, close_frame, init_frame

ROOT = Path(__file__).parents[2]
QUIET = base64(bytes(64_000))
CHECK = """
import sys, zstandard
with open(sys.argv[1], "rb") as log:
    opened = zstandard.ZstdDecompressor().stream_reader(log, read_across_frames=True)
    sys.exit(7 if b"PLANTED" in opened.read() else 0)
"""
"""A command that fails on logs in which a unit says so."""


class Planted(Answers):
    """A model of whose units some say something else."""

    def __init__(self, *units: int) -> None:
        self._units = units

    def unit(self, index: int) -> UnitResult:
        """Say what a model makes of a unit."""
        text = "PLANTED" if index in self._units else f"unit {index}"
        pcm, ids = bytes(4800), tuple(range(9))
        return UnitResult(index=index, is_listen=False, text=text, pcm=pcm, decided_ids=ids)


def long_log(folder: Path, *units: int, count: int = 40) -> Path:
    """Record a session of some units, some of which are planted."""
    append = json.dumps({"type": "input.append", "input": {"audio": QUIET}})
    limits = attrs.evolve(OPENED.limits, session_s=10_000, context_tokens=10**6)
    frames = [init_frame(), *[append] * count, close_frame("enough")]
    events = play(frames, Planted(*units), attrs.evolve(OPENED, limits=limits))
    return write_events(folder, events)


def says(path: Path, *, times: int = 1) -> bool:
    """Whether planted text is in a log; the log must be sound, whatever else it is."""
    records = list(read(path))
    assert verify(path).exit_code == 0
    assert replay(records).identical
    texts = [event.result.text for event in events_of(records) if isinstance(event, ev.UnitDone)]
    return texts.count("PLANTED") >= times


def shrink(
    log: Path, folder: Path, fails: Callable[[Path], bool], *, runs_max: int = 300
) -> tuple[Shrinker, bool]:
    """Shrink a log; returns the search, and whether it came to its end."""
    folder.mkdir()
    search = Shrinker(log, folder, fails, runs_max=runs_max)
    search.begin()
    return search, search.run()


def names(path: Path) -> list[str]:
    """Name the events of a log."""
    return [type(event).__name__ for event in events_of(list(read(path)))]


SETTING_UP = ["ConnectionOpened", "SlotLeased", "FrameReceived", "BackendOpened"]


@pytest.mark.soak
def test_one_planted_failure_is_left_alone(tmp_path: Path) -> None:
    """A fixture would be as long as the session in which somebody saw the failure."""
    log = long_log(tmp_path, 200, count=300)
    assert shape_of(log).events > 900
    search, is_minimal = shrink(log, tmp_path / "made", says)
    assert is_minimal
    assert names(search.best) == [*SETTING_UP, "FrameReceived", "UnitDone"]
    assert search.runs < 80
    assert search.best.stat().st_size < 3000
    head = next(iter(read(search.best))).fields
    assert head["shrunk"] == {"recording": head["recording_id"], "events": shape_of(log).events}
    result = events_of(list(read(search.best)))[-1].result  # type: ignore[union-attr]
    assert (result.index, result.text, result.pcm, result.decided_ids) == (0, "PLANTED", b"", ())


def test_two_that_belong_together_are_kept(tmp_path: Path) -> None:
    """Half of what makes it fail would be thrown away, or none of what does not."""
    log = long_log(tmp_path, 9, 31)
    search, is_minimal = shrink(log, tmp_path / "made", lambda path: says(path, times=2))
    assert is_minimal
    unit = ["FrameReceived", "UnitDone", "FinalizeDone"]
    assert names(search.best) == [*SETTING_UP, *unit, *unit[:2]]


def test_the_same_again_gives_the_same(tmp_path: Path) -> None:
    """A fixture could not be made again by somebody else."""
    log = long_log(tmp_path, 5, count=12)
    first, _ = shrink(log, tmp_path / "one", says)
    second, _ = shrink(log, tmp_path / "two", says)
    assert first.best.read_bytes() == second.best.read_bytes()
    assert (first.runs, first.events, first.stage) == (second.runs, second.events, second.stage)


def test_it_stops_where_it_is_told_to(tmp_path: Path) -> None:
    """A slow command would run all night, or what was found so far be lost."""
    log = long_log(tmp_path, 30)
    search, is_minimal = shrink(log, tmp_path / "few", says, runs_max=6)
    assert (is_minimal, search.runs) == (False, 6)
    assert shape_of(search.best).events < shape_of(log).events
    assert says(search.best)
    runs: list[Path] = []

    def interrupted(path: Path) -> bool:
        runs.append(path)
        if len(runs) == 8:
            raise KeyboardInterrupt
        return says(path)

    folder = tmp_path / "interrupted"
    folder.mkdir()
    search = Shrinker(log, folder, interrupted, runs_max=300)
    search.begin()
    with pytest.raises(KeyboardInterrupt):
        search.run()
    assert says(search.best)
    assert shape_of(search.best).events < shape_of(log).events


def test_a_log_that_does_not_fail_is_an_error(tmp_path: Path) -> None:
    """Somebody would get a log that shows nothing."""
    log = long_log(tmp_path, count=3)
    with pytest.raises(NoFailureError, match="does not fail on the log"):
        shrink(log, tmp_path / "sound", says)
    with pytest.raises(NoFailureError, match="the failure is not in them"):
        shrink(log, tmp_path / "name", lambda path: path == log)


# -- candidates -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [path for path in GOLDEN if path.name.removeprefix("v1-").split(".")[0] not in CHANGES],
    ids=lambda path: path.name.split(".")[0],
)
def test_what_a_server_was_told_it_had_asked_for(path: Path) -> None:
    """An answer of a real session would be left out, or be given to another question."""
    asked, regenerator = PendingAnswers(), LogRegenerator()
    for event in events_of(list(read(path))):
        fitted = asked.fit(event)
        is_stale = isinstance(event, ev.TimerFired) and fitted is None
        assert fitted == event or is_stale
        asked.media |= {number: number for number in asked.note(regenerator.step(event).effects)}


@settings(max_examples=sample(60, 15), deadline=None)
@given(data=st.data())
def test_any_events_left_out_leave_a_session(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A fixture would hold what no server could ever record."""
    source = data.draw(st.sampled_from(GOLDEN))
    kept = data.draw(st.sets(st.integers(0, shape_of(source).events - 1)).map(lambda s: s | {0}))
    target = tmp_path_factory.mktemp("candidates") / source.name
    build(source, target, lambda place, event: event if place in kept else None, {})
    records = list(read(target))
    assert replay(records).identical
    assert verify(target).state == "finished"
    events = events_of(records)
    assert 1 <= len(events) <= len(kept)
    done = [event.result.index for event in events if isinstance(event, ev.UnitDone)]
    assert done == sorted(set(done))
    started = [
        record.fields["unit"]["index"]  # type: ignore[index,call-overload]
        for record in records
        if record.fields.get("type") == "StartUnit"
    ]
    assert set(done) <= set(started)
    assert sorted(started) == started  # a unit that was lost with its worker starts again
    assert list(dict.fromkeys(started)) == list(range(len(set(started))))


def test_an_answer_that_nobody_asked_for_goes(tmp_path: Path) -> None:
    """A log would tell the result of a unit that was never started."""
    log = long_log(tmp_path, count=3)
    place = names(log).index("UnitDone") - 1
    target = tmp_path / "out.session.zst"
    build(log, target, lambda at, event: None if at == place else event, {})
    units = [e.result for e in events_of(list(read(target))) if isinstance(e, ev.UnitDone)]
    assert [(unit.index, unit.text) for unit in units] == [(0, "unit 1"), (1, "unit 2")]


def test_media_go_with_the_frame_that_they_came_in(tmp_path: Path) -> None:
    """A picture that was left out would be answered by what became of another."""
    picture = base64(b"\xff\xd8\xff\xc0\x00\x0b\x08\x00\x08\x00\x08\x01\x01\x11\x00")
    shown = append_frame(video_frames=[picture])
    log = write_events(tmp_path, play([init_frame(), shown, shown, shown]))
    frames = [at for at, name in enumerate(names(log)) if name == "FrameReceived"]
    target = tmp_path / "out.session.zst"
    build(log, target, lambda at, event: None if at == frames[1] else event, {})
    events = events_of(list(read(target)))
    assert [event.media for event in events if isinstance(event, ev.MediaDecoded)] == [0, 1]
    assert sum(isinstance(event, ev.UnitDone) for event in events) == 2


def test_a_damaged_log_is_no_source(tmp_path: Path) -> None:
    """What was lost to damage would be made up."""
    log = long_log(tmp_path, count=2)
    data = bytearray(log.read_bytes())
    data[-250] ^= 1
    log.write_bytes(data)
    with pytest.raises(RegenerationError, match="damaged"):
        shape_of(log)


# -- commands -------------------------------------------------------------------------------------


def test_a_command_is_run_on_a_log(tmp_path: Path) -> None:
    """A log would be shrunk by what its command did not say."""
    log = tmp_path / "a log"
    log.write_text("x")

    def fails(*words: str, **options: Any) -> bool:
        return command_fails(log, words, **{"exit_code": None, "timeout_s": 20, **options})

    assert fails("sh", "-c", 'test "$1" != "$0"', str(log))
    assert not fails("sh", "-c", 'test "$0" = "$1"', str(log))
    assert fails("sh", "-c", "exit 3", "{}")
    assert fails("sh", "-c", "exit 3", exit_code=3)
    assert not fails("sh", "-c", "exit 4", exit_code=3)
    assert not fails("sh", "-c", "test -f '{}'")
    began = time.monotonic()
    assert not fails("sh", "-c", "sleep 60 & wait", timeout_s=0.1)
    assert time.monotonic() - began < 20
    with pytest.raises(CannotRunError, match="No such file"):
        fails("no-such-command")


def call(*arguments: object) -> Result:
    """Run the command; it must not end in a traceback."""
    result = CliRunner().invoke(shrink_command, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_the_command_writes_a_fixture(tmp_path: Path) -> None:
    """Somebody with a failing command would not get a small log of it."""
    log, small = long_log(tmp_path, 2, count=4), tmp_path / "small.session.zst"
    check = tmp_path / "check.py"
    check.write_text(CHECK)
    result = call(log, "--output", small, "--exit-code", 7, "--json", "--", sys.executable, check)
    body = json.loads(result.stdout)
    assert body.keys() == {
        *("log", "output", "events_before", "events", "bytes_before", "bytes", "runs"),
        *("minimal", "interrupted", "elapsed_s"),
    }
    assert (result.exit_code, body["minimal"], body["events"]) == (0, True, 6)
    assert says(small)
    again = call(log, "--output", small, "--", sys.executable, check)
    assert (again.exit_code, again.stderr) == (2, f"Error: {small}: it exists: give another name\n")


def test_what_the_command_says(tmp_path: Path) -> None:
    """A script could not tell a small log from none, nor a person what is in it."""
    log, small = long_log(tmp_path, count=1), tmp_path / "small.session.zst"
    told = call(log, "--output", small, "--", "false")
    assert told.exit_code == 0
    assert "events became 1," in told.stdout
    assert "event ConnectionOpened" in told.stdout
    for path, command, exit_code, words in (
        (log, "true", 1, "the command does not fail on the log"),
        (log, "no-such-command", 2, "no-such-command: No such file"),
        (tmp_path / "none", "false", 2, "there is no recording none"),
    ):
        refused = call(path, "--output", tmp_path / "other.session.zst", "--", command)
        assert (refused.exit_code, refused.stderr.count("\n")) == (exit_code, 1)
        assert words in refused.stderr
    assert not (tmp_path / "other.session.zst").exists()


def test_an_output_that_cannot_be_written_is_told_before_the_search(tmp_path: Path) -> None:
    """Minutes of work would be lost to a letter in the name of a folder."""
    log, small, ran = long_log(tmp_path, count=1), tmp_path / "no" / "small", tmp_path / "ran"
    result = call(log, "--output", small, "--", "sh", "-c", f"touch {ran}; exit 1")
    told = f"Error: {small}: there is no folder {small.parent}\n"
    assert (result.exit_code, result.stderr) == (2, told)
    assert not ran.exists()


def test_what_was_found_is_kept_where_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minutes of work would be lost to a file that somebody else made meanwhile."""
    log, small = long_log(tmp_path, count=1), tmp_path / "small.session.zst"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = call(log, "--output", small, "--", "sh", "-c", f"echo theirs > {small}; exit 1")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith(
        f"Error: {small}: it exists: give another name; it was kept as "
    )
    kept = Path(result.stderr.split()[-1])
    assert (verify(kept).exit_code, shape_of(kept).events) == (0, 1)
    assert small.read_text() == "theirs\n"
    assert sorted(tmp_path.glob("antiphon-*")) == [kept.parent]


def test_an_interrupted_search_leaves_its_best(tmp_path: Path) -> None:
    """Whoever lost patience would have waited for nothing."""
    log, small = long_log(tmp_path, count=20), tmp_path / "small.session.zst"
    ready, count = tmp_path / "ready", tmp_path / "count"
    os.mkfifo(ready)
    # It fails at once three times, then it takes for ever: in that run the search is interrupted.
    script = f"echo >> {count}; test $(wc -l < {count}) -lt 4 || {{ echo > {ready}; sleep 60; }}"
    script += "; exit 1"
    words = [
        sys.executable,
        "-c",
        "from runtime.cli import main; main()",
        "dev",
        "shrink",
        str(log),
    ]
    words += ["--output", str(small), "--", "sh", "-c", script]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        descriptor = os.open(ready, os.O_RDONLY | os.O_NONBLOCK)
        assert select.select([descriptor], [], [], 60)[0]
        os.close(descriptor)
        os.kill(process.pid, signal.SIGINT)
        told, _ = process.communicate(timeout=30)
    assert (process.returncode, "interrupted" in told) == (130, True)
    assert shape_of(small).events < shape_of(log).events
    assert verify(small).exit_code == 0
