"""`antiphon eval --model`: a model run over recordings, compared, kept and taken up again."""

from __future__ import annotations

import functools
import json
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner

from protocol.values.model import Opening
from recorder.format.format import SUFFIX
from recorder.read.reader import LogReader, read
from recorder.repair import verify
from recorder.write.files import PART_PREFIX
from replay.assess.command import Mode, as_recorded
from replay.assess.run import Results, Run, content_of
from replay.eval.evaluate import sum_up
from replay.library.sessions import list_command
from replay.redact.redaction import redact_command
from replay.rerun import full
from replay.rerun.logic import replay
from replay.shared.commands import UnusableError
from runtime import RUN
from runtime.model.backends.base import BackendError, BackendGone
from runtime.model.backends.scripted import ScriptedBackend
from runtime.model.engine.backend import EngineBackend
from tests.generated.clients import ClientScript, draw_and_record, record_model
from tests.project.sampling import sample
from tests.project.terminal import on_terminal
from tests.replay.assessed import SECONDS, Planted, configured, record_talks, run_on, tiny
from tests.replay.evaluated import call, told
from tests.replay.exported import GOLDEN

COUNT = 4
WILD = range(2, sample(9, 7))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sessions of the embedded model."""
    made = tmp_path_factory.mktemp("talks")
    assert len(record_talks(made, COUNT, tiny(1))) == COUNT
    return made


@pytest.fixture
def logs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.zst"))


# -- the same weights -----------------------------------------------------------------------------


# `test_interruptions_and_failures_change_nothing` compares the model with itself in mode `forced`.
@pytest.mark.parametrize(
    "flags", sample([("open",), ("forced", "--baseline", "tiny")], [("open",)])
)
def test_a_model_differs_from_itself_by_nothing(logs: list[Path], flags: tuple[str, ...]) -> None:
    """Each comparison would start with differences that come from the tool."""
    some = sample(logs, logs[:2])
    one = call(*some, "--model", "tiny", "--json", "--jobs", 1, "--mode", *flags)
    body = json.loads(one.stdout)
    found = body["comparison"].values()
    assert (one.exit_code, len(body["recordings"]), len(found) > 10) == (0, len(some), True)
    for each in found:
        assert (each["difference"], each["low"], each["high"], each["p"]) == (0, 0, 0, 1)
        assert each["value"] == each["baseline"]
    assert (body["mode"], body["model"], body["deterministic"]) == (flags[0], "tiny", True)
    many = call(*some, "--model", "tiny", "--json", "--jobs", len(some), "--mode", *flags)
    assert many.stdout == one.stdout


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Mode], Run]:
    """Runs the model over all recordings, once in each mode, and keeps the results."""

    @functools.cache
    def run(mode: Mode) -> Run:
        out = tmp_path_factory.mktemp("whole")
        return run_on(sorted(folder.glob("*.zst")), mode, EngineBackend(tiny()), out=out)

    return run


def test_a_session_played_again_is_the_recording(
    logs: list[Path], whole: Callable[[Mode], Run]
) -> None:
    """The measures would be of a session that could not have been."""
    done = whole("open")
    for log, row in zip(logs, done.measured, strict=True):
        made = Path(row.body["made"])
        assert verify(made).exit_code == 0
        with LogReader(made) as reader, LogReader(log) as recorded:
            assert replay(reader).identical
            parent = recorded.head.fields["recording_id"]
            assert reader.head.fields["parent"]["recording"] == row.body["parent"] == parent
        assert row.body["parted"] == {"units": SECONDS, "first": None, "elsewhere": 0}


def test_where_a_model_parts_from_the_recording(logs: list[Path], tmp_path: Path) -> None:
    """What follows from one decision would count as many."""
    other = Planted(EngineBackend(tiny()), "free", opens=configured(force_listen_count=0))
    done = run_on(logs, "open", other, out=tmp_path)
    for log, row in zip(logs, done.measured, strict=True):
        before, after = _ids(log), _ids(Path(row.body["made"]))
        apart = [at for at in range(SECONDS) if before[at] != after[at]]
        assert row.body["parted"] == {
            "units": SECONDS,
            "first": apart[0],
            "elsewhere": len(apart) - 1,
        }
        assert apart[0] < 3 <= len(apart)


def _ids(log: Path) -> list[Any]:
    found: list[Any] = [record.fields["result"] for record in read(log) if record.kind == "unit"]
    return [(result["decided_ids"], result.get("codec_ids")) for result in found]


@pytest.fixture(scope="module")
def wild(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Sessions of clients that interrupt, flood, pause and vanish, of a model that fails."""
    made, model = tmp_path_factory.mktemp("wild"), tiny(1)
    for number in WILD:
        draw_and_record(number, made, partial(_record_wild, model), audio_s_max=6)
    return sorted(made.glob("*.zst"))


def _record_wild(model: Any, script: ClientScript, folder: Path, number: int) -> list[Path]:
    return record_model(script, model, folder, number)


@pytest.mark.parametrize("mode", ["open", "forced"])
def test_interruptions_and_failures_change_nothing(wild: list[Path], mode: Mode) -> None:
    """A recording with a barge-in would differ from itself."""
    done = run_on(wild, mode, EngineBackend(tiny()))
    baseline = as_recorded(done.measured)
    if mode == "open":
        found = sum_up(done.measured, None, baseline).comparison
        assert found is not None
        assert {(it.difference, it.unpaired) for it in found.paired.values()} == {(0, 0)}
        return
    summary = sum_up(done.measured).summary
    assert (summary["decision_agreement"].value, summary["units_elsewhere"].value) == (1, 0)
    assert summary["decisions"].value > 10


# -- baselines ------------------------------------------------------------------------------------


def test_an_earlier_run_is_a_baseline(folder: Path, tmp_path: Path) -> None:
    """The old model would have to be run again for each new one."""
    first = told(folder, "--model", "tiny", "--mode", "open", "--out", tmp_path)
    body = told(folder, "--baseline", first["kept"])
    assert (body["mode"], body["baseline"]) == ("closed", first["kept"])
    assert {it["recordings"] for it in body["comparison"].values()} <= set(range(1, COUNT + 1))
    assert body["comparison"]["take_over_rate"]["recordings"] == COUNT
    assert all(it["p"] == 1 for it in body["comparison"].values())


def test_folders_are_paired_by_path(folder: Path, tmp_path: Path) -> None:
    """One conversation would be compared with another."""
    names = sorted(path.name for path in folder.iterdir())
    for name in names[:3]:
        shutil.copy(folder / name, tmp_path / name)
    shutil.copy(folder / names[0], tmp_path / names[1])
    body = told(tmp_path, "--baseline", folder)
    assert body["comparison"]["errors"]["recordings"] == 3
    own = {Path(row["log"]).name: row.get("differences") for row in body["recordings"]}
    assert set(own[names[0]].values()) == set(own[names[2]].values()) == {0}
    assert any(own[names[1]].values())


def test_recordings_of_one_name_are_not_paired_by_it(folder: Path, tmp_path: Path) -> None:
    """Each copy of a recording would be compared with the same one."""
    name = sorted(folder.iterdir())[0]
    for copy in ("a", "b"):
        shutil.copy(name, tmp_path / f"{copy}{SUFFIX}")
    assert told(tmp_path, "--baseline", folder)["comparison"] == {}
    (tmp_path / f"b{SUFFIX}").unlink()
    assert told(tmp_path, "--baseline", folder)["comparison"]["errors"]["recordings"] == 1


# -- kept, and taken up again ---------------------------------------------------------------------


class LostModel(Planted):
    """A model that is lost after some sessions; it counts them."""

    def __init__(self, backend: EngineBackend, lives: int = 1000) -> None:
        super().__init__(backend, "none")
        self.info = backend.info
        self.lives, self.opened = lives, 0

    async def open(self, opening: Opening, *, slot: int) -> Any:
        if self.opened == self.lives:
            raise BackendGone("killed")
        self.opened += 1
        return await super().open(opening, slot=slot)


def plain(done: Run) -> str:
    """All that was measured, whichever folder it is kept in."""
    rows = [(row.log, row.result, row.error, row.duration_ns, row.body) for row in done.measured]
    assert done.folder is not None
    return json.dumps(rows, default=str).replace(str(done.folder.parent), "kept")


@pytest.mark.parametrize("mode", sample(["open", "forced"], ["open"]))
def test_a_killed_run_goes_on(
    logs: list[Path], tmp_path: Path, whole: Callable[[Mode], Run], mode: Mode
) -> None:
    """A night's run would start again, or count what it has not done."""
    with pytest.raises(UnusableError, match="is lost: killed"):
        run_on(logs, mode, LostModel(EngineBackend(tiny()), 3), jobs=2, out=tmp_path)
    survivor = LostModel(EngineBackend(tiny()))
    done = run_on(logs, mode, survivor, out=tmp_path)
    assert done.found + survivor.opened == COUNT
    assert 1 <= done.found <= 3
    assert plain(done) == plain(whole(mode))
    rested = LostModel(EngineBackend(tiny()), 0)
    assert run_on(logs, mode, rested, out=tmp_path).found == COUNT


def test_a_result_that_cannot_be_read_is_made_again(
    logs: list[Path], tmp_path: Path, whole: Callable[[Mode], Run]
) -> None:
    """Half a file of a full disk would end each later run, or count as a result."""
    kept = whole("open").folder
    assert kept is not None
    copied = Path(shutil.copytree(kept, tmp_path / kept.name))
    endless = '{"duration_ns": Infinity, "body": {"result": "measured"}, "scores": {}}'
    spoilt = ["", endless, '{"duration_ns": 1, "body": {}, "scores": {"errors": [1, 2]}}']
    spoilt.append(spoilt[-1].replace("errors", "take_over_rate").replace("2", "0"))
    begun = copied / f"{PART_PREFIX}killed" / f"open-{content_of(logs[0])}.session.zst"
    begun.parent.mkdir()
    begun.write_bytes(b"a log that was begun")
    for log, text in zip(logs, spoilt, strict=False):
        (copied / f"{content_of(log)}.json").write_text(text)
    model = LostModel(EngineBackend(tiny()))
    done = run_on(logs, "open", model, out=tmp_path)
    assert (model.opened, done.found) == (len(spoilt), COUNT - len(spoilt))
    assert plain(done) == plain(whole("open"))
    assert not begun.parent.exists()


def test_results_are_of_one_model_mode_and_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new checkpoint would be given the results of the old one."""
    info = ScriptedBackend().info
    other = attrs.evolve(info, fingerprint={"weights": "other"})
    names = []
    for mode, each in (("open", info), ("forced", info), ("open", other)):
        with Results(tmp_path, mode, each) as results:
            names.append(results.name)
    monkeypatch.setattr("replay.assess.run.version", lambda _: "other")
    with Results(tmp_path, "open", info) as results:
        names.append(results.name)
    assert len(set(names)) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


# -- what is not measured -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["open", "forced"])
def test_what_cannot_be_judged_is_named(folder: Path, tmp_path: Path, mode: str) -> None:
    """A chat, a redacted or a damaged log would stop a folder, or be missing without a word."""
    named = sorted(folder.iterdir())[0]
    shutil.copy(named, tmp_path / f"good{SUFFIX}")
    shutil.copy(GOLDEN / f"v1-damaged-payload{SUFFIX}", tmp_path)
    shutil.copy(GOLDEN / f"v1-chat-cut{SUFFIX}", tmp_path)
    (tmp_path / f"empty{SUFFIX}").touch()
    hidden = tmp_path / f"hidden{SUFFIX}"
    CliRunner().invoke(redact_command, [str(named), "--kind", "audio", "--output", str(hidden)])
    assert hidden.is_file()
    junit = tmp_path / "eval.xml"
    result = call(tmp_path, "--mode", mode, "--model", "tiny", "--junit", junit)
    assert result.exit_code == 2
    lines = dict(line.rpartition("/")[2].split(": ", 1) for line in result.stderr.splitlines())
    assert set(lines) == {
        f"{name}{SUFFIX}" for name in ("v1-damaged-payload", "v1-chat-cut", "empty", "hidden")
    }
    assert lines[f"hidden{SUFFIX}"] == "skipped: redacted: the user's sound is not in it"
    assert lines[f"v1-chat-cut{SUFFIX}"].startswith("skipped: mode chat")
    assert lines[f"v1-damaged-payload{SUFFIX}"].startswith("damaged: a model that missed an input")
    assert "1 recording measured, 2 skipped, 1 damaged, 1 unreadable" in result.stdout
    suite = ET.parse(junit).getroot()
    counts = {name: suite.get(name) for name in ("tests", "skipped", "errors")}
    assert counts == {"tests": "5", "skipped": "2", "errors": "2"}


def test_skipped_logs_are_no_failure(tmp_path: Path) -> None:
    """A folder with one chat could never pass."""
    shutil.copy(GOLDEN / f"v1-chat-cut{SUFFIX}", tmp_path)
    assert call(tmp_path, "--mode", "open", "--model", "scripted").exit_code == 0


class Failing(Planted):
    """A model that fails to open its second session."""

    opened = 0

    async def open(self, opening: Opening, *, slot: int) -> Any:
        self.opened += 1
        if self.opened == 2:
            raise BackendError("a bug")
        return await super().open(opening, slot=slot)


def test_a_model_that_fails_is_named(logs: list[Path]) -> None:
    """One session on which a new model breaks would hide all others."""
    done = run_on(logs[:3], "forced", Failing(EngineBackend(tiny()), "fails"), jobs=1)
    results = [(row.result, row.error) for row in done.measured]
    assert results == [("measured", ""), ("failed", "failed: a bug"), ("measured", "")]


def test_a_model_that_is_not_there(folder: Path) -> None:
    """A misspelt name would be a traceback, after the recordings were read."""
    result = call(folder, "--mode", "open", "--model", "tinny")
    assert result.exit_code == 2
    assert "the model 'tinny' cannot be loaded: unknown model" in result.stderr


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--model", "tiny"), "need --mode open or forced"),
        (("--jobs", "2"), "need --mode open or forced"),
        (("--mode", "open"), "--mode open needs --model"),
        (("--mode", "forced", "--model", "tiny", "--baseline", "."), "--baseline must be a model"),
        (("--fail-if", "errors.p < 0.1"), "needs a --baseline"),
        (("--mode", "forced", "--model", "x", "--fail-if", "decisions.p < 1"), "needs a --basel"),
    ],
)
def test_options_that_do_not_go_together(flags: tuple[str, ...], complaint: str) -> None:
    """An option would be ignored without a word."""
    result = call(GOLDEN, *flags)
    assert (result.exit_code, complaint in result.stderr) == (2, True)


@pytest.mark.parametrize("flag", ["--where", "--measure"])
def test_a_list_of_recordings_has_no_baseline(flag: str) -> None:
    """A condition would never hold, without a word."""
    value = "errors.p < 0.1" if flag == "--where" else "errors.p"
    result = CliRunner().invoke(list_command, [str(GOLDEN), flag, value])
    assert (result.exit_code, "there is no baseline here" in result.stderr) == (2, True)


# -- reports --------------------------------------------------------------------------------------


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `--model other` a model that may speak at once."""

    def load(name: str, slots: int | None, **_: object) -> Any:
        backend = EngineBackend(tiny(slots or 1))
        if name == "tiny":
            return backend
        return Planted(backend, name, opens=configured(force_listen_count=0))

    monkeypatch.setattr(full, "load_backend", load)


@pytest.mark.usefixtures("other")
def test_a_build_fails_by_a_difference(folder: Path, tmp_path: Path) -> None:
    """A regression would be a number in a report that does not fail."""
    page, how = tmp_path / "page.html", ("--mode", "open", "--model", "other")
    condition = "time_to_first_audio.difference < -0.5"
    keep = ("--out", tmp_path / "runs")
    result = call(folder, *how, *keep, "--fail-if", condition, "--html", page, "--by", "overlap")
    assert result.exit_code == 1
    assert f"condition holds: {condition} (it is -" in result.stdout
    assert "compared with recorded, 4 sessions in both" in result.stdout
    row = next(line.split() for line in result.stdout.splitlines() if "time_to_first" in line)
    assert row[:2] == ["time_to_first_audio", "s"]
    shown = page.read_text("utf-8")
    assert f"<h2>Compared with recorded; sessions in both: {COUNT}</h2>" in shown
    assert "worst first by the difference of overlap" in shown
    assert shown.count(f"antiphon recordings view {tmp_path / 'runs'}") == COUNT
    body = told(folder, *how, *keep, "--by", "overlap")
    apart = [row["differences"]["overlap"] for row in body["recordings"]]
    assert apart == sorted(apart, reverse=True)
    assert apart[0] != apart[-1]
    passing = call(folder, *how, *keep, "--fail-if", "time_to_first_audio.low > 0")
    assert passing.exit_code == 0


@pytest.mark.parametrize("columns", [72, 200])
def test_the_comparison_fits_its_terminal(folder: Path, columns: int) -> None:
    """Intervals would be cut off, or the names of measures."""
    command = (*RUN, "eval", str(folder), "--baseline", str(folder))
    lines = on_terminal(command, columns=columns, has_bars=False).splitlines()
    at = next(at for at, line in enumerate(lines) if line.split()[:1] == ["measure"] and at > 5)
    assert lines[at].split()[-4:] == (
        ["difference", "low", "high", "p"] if columns == 72 else ["low", "high", "p", "pairs"]
    )
    rows = lines[at + 1 : at + 26]
    assert max(map(len, rows)) <= columns
    assert {"response_delay", "fdb_v1_take_over_rate"} <= {row.split()[0] for row in rows if row}


def test_progress_is_shown_on_a_terminal(folder: Path) -> None:
    """A night would pass without a sign."""
    log = sorted(folder.iterdir())[0]
    shown = on_terminal((*RUN, "eval", str(log), "--mode", "open", "--model", "tiny"), columns=200)
    assert "loading model" in shown
    assert "tiny" in shown


# -- a suite of its own ---------------------------------------------------------------------------


@pytest.fixture
def suite(folder: Path, tmp_path: Path) -> Path:
    """What the embedded model did, as what is expected."""
    made = tmp_path / "suite"
    result = call(folder, "--record-suite", made)
    assert result.exit_code == 0, result.output
    return made


def test_the_embedded_model_passes_its_own_suite(suite: Path) -> None:
    """A retrained model could answer later, or not at all, and be shipped."""
    for how in ((), ("--mode", "open", "--model", "tiny")):
        result = call("--suite", suite, "--json", *how)
        cases = json.loads(result.stdout)["cases"]
        assert result.exit_code == 0, cases
        assert len(cases) > 1
        assert not any(it["skipped"] for it in cases)


def test_a_model_that_does_not_answer_fails_it(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suite would pass any model."""

    def load(name: str, slots: int | None, **_: object) -> Any:
        return Planted(
            EngineBackend(tiny(slots or 1)), name, opens=configured(force_listen_count=99)
        )

    monkeypatch.setattr(full, "load_backend", load)
    xml = tmp_path / "cases.xml"
    result = call("--suite", suite, "--mode", "open", "--model", "mute", "--junit", xml)
    assert result.exit_code == 1
    assert "is not answered" in result.output
    assert b"<failure" in xml.read_bytes()
