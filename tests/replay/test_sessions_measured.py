"""The measures of `antiphon recordings list`: columns, order, conditions, and what is read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recorder.format.format import SUFFIX
from recorder.read.reader import LogReader
from recorder.storage.remote import RemoteStore
from recorder.storage.store import Store
from replay.eval.evaluate import MEASURES, measure_logs, sum_up
from replay.library.sessions import list_command
from replay.shared.commands import counted, unwatched
from runtime import RUN
from tests.project.terminal import on_terminal
from tests.replay.exported import GOLDEN
from tests.replay.test_eval import folder
from tests.replay.test_eval import told as evaluated
from tests.replay.test_sessions import call, told

__all__ = ("folder",)


def names(folder: Path, *options: str) -> list[str]:
    return [log["recording_id"] for log in told(list_command, folder, *options)["logs"]]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count the logs that are opened to be read whole."""
    count = [0]
    init = LogReader.__init__

    def counted(self: LogReader, log: Any) -> None:
        count[0] += 1
        init(self, log)

    monkeypatch.setattr(LogReader, "__init__", counted)
    return lambda: count[0]


def test_a_measure_is_a_column(folder: Path) -> None:
    """An operator would have to look up each recording in the output of another command."""
    shown = call(list_command, folder, "--measure", "response_delay", "--measure", "unanswered")
    assert (shown.exit_code, shown.stderr) == (0, "")
    head, *rows, _ = (line.split() for line in shown.stdout.splitlines())
    assert head[:3] == ["recording", "response_delay", "unanswered"]
    assert head[3] == "session"
    values = {row[0]: row[1:3] for row in rows}
    assert (values["quick"], values["slow"]) == (["1.5", "0"], ["3.25", "0"])
    assert values["never"][0] == "1"  # of unanswered; it has no delay


def test_the_worst_are_listed_first(folder: Path) -> None:
    """The conversation to listen to would be anywhere in the list."""
    assert names(folder, "--sort", "response_delay") == ["slow", "quick", "never"]
    assert names(folder, "--sort", "response_delay", "--limit", "1") == ["slow"]
    assert names(folder, "--sort", "take_over_rate")[0] == "never"  # more is better
    by_none = names(folder, "--sort", "word_delay")
    assert by_none == names(folder)
    shown = call(list_command, folder, "--sort", "response_delay_worst").stdout
    assert shown.split()[:2] == ["recording", "response_delay_worst"]


@pytest.mark.parametrize(
    ("conditions", "found"),
    [
        (["response_delay > 2"], {"slow"}),
        (["response_delay > 1"], {"slow", "quick"}),
        (["response_delay > 1", "response_delay < 2"], {"quick"}),
        (["unanswered == 0", "response_delay_worst>=3.25"], {"slow"}),
        (["response_delay != 0"], {"slow", "quick"}),
        (["take_over_rate_count > 5"], set()),
        (["word_delay >= 0"], set()),
    ],
)
def test_all_conditions_must_hold(folder: Path, conditions: list[str], found: set[str]) -> None:
    """A recording without the measure would pass for a good or a bad one."""
    options = [option for condition in conditions for option in ("--where", condition)]
    body = told(list_command, folder, *options)
    assert {log["recording_id"] for log in body["logs"]} == found
    assert body["found_logs"] == len(found)
    assert counted(len(found), "session") in call(list_command, folder, *options).stdout


def test_json_has_the_named_measures_as_eval_does(folder: Path) -> None:
    """A script would have to know two forms of one number."""
    options = ("--measure", "response_delay_p90", "--where", "errors == 0", "--sort", "overlap")
    of_eval = {Path(it["log"]).name: it["measures"] for it in evaluated(folder)["recordings"]}
    logs = told(list_command, folder, *options)["logs"]
    assert len(logs) == 3
    for log in logs:
        measures = of_eval[log["recording_id"] + SUFFIX]
        named = {"response_delay", "errors", "overlap"} & measures.keys()
        assert log["measures"] == {name: measures[name] for name in named}


def test_nothing_is_measured_unless_asked(folder: Path, opened: Callable[[], int]) -> None:
    """A list of ten thousand recordings would take minutes."""
    body = told(list_command, folder)
    assert all("measures" not in log for log in body["logs"])
    call(list_command, folder)
    assert opened() == 0


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (("--measure", "errors"), 3),
        (("--measure", "errors", "--limit", "1"), 1),
        (("--measure", "errors", "--mode", "chat"), 0),
        (("--sort", "errors", "--limit", "1"), 3),
        (("--where", "errors > 0", "--limit", "1"), 3),
    ],
)
def test_only_what_is_needed_is_read(
    folder: Path, opened: Callable[[], int], options: tuple[str, ...], count: int
) -> None:
    """The measures of recordings that are not shown would be computed for nothing."""
    call(list_command, folder, *options)
    assert opened() == count


def test_a_damaged_log_is_named_and_stops_no_other(folder: Path) -> None:
    """One bad block, and there is no list; or its gaps count as silence."""
    shutil.copy(GOLDEN / f"v1-damaged-twice{SUFFIX}", folder)
    (folder / f"empty{SUFFIX}").touch()
    result = call(list_command, folder, "--measure", "response_delay")
    assert result.exit_code == 0
    assert "5 sessions" in result.stdout
    complaints = dict(sorted(line.split(": ", 1) for line in result.stderr.splitlines()))
    assert [Path(log).name for log in complaints] == [f"empty{SUFFIX}", f"v1-damaged-twice{SUFFIX}"]
    assert "measured with gaps" in complaints[str(folder / f"v1-damaged-twice{SUFFIX}")]


def test_a_log_that_goes_meanwhile_stops_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention removes a log, and the list ends in a traceback."""
    find = Store.find

    def find_late(self: Store, recording_id: str) -> Any:
        info = find(self, recording_id)
        if recording_id == "slow":
            return None
        if recording_id == "quick":
            self.path(recording_id).unlink()
        return info

    monkeypatch.setattr(Store, "find", find_late)
    result = call(list_command, folder, "--sort", "unanswered")
    assert result.exit_code == 0
    assert "slow: it was removed in the meantime" in result.stderr
    assert f"quick{SUFFIX}: No such file or directory" in result.stderr
    assert [row.split()[0] for row in result.stdout.splitlines()][1] == "never"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--measure", "response_delai"), "did you mean response_delay?"),
        (("--sort", "zzz"), "'zzz' is not a measure, see antiphon eval --definitions"),
        (("--sort", "errors_p95"), "'errors_p95' is not a measure; did you mean errors?"),
        (("--where", "response_delay"), "is not a measure, a comparison and a number"),
        (("--where", "response_delay ~ 1"), "is not a measure, a comparison and a number"),
        (("--where", "take_over_rat < 1"), "did you mean take_over_rate?"),
        (("--measure", "x" * 10_000), "is not a measure"),
    ],
)
def test_a_wrong_name_is_explained(folder: Path, options: tuple[str, str], complaint: str) -> None:
    """A misspelt condition would find nothing, and look like good news."""
    result = call(list_command, folder, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert complaint in " ".join(result.stderr.split())
    assert len(result.stderr) < 1_000


def test_stored_logs_are_measured(folder: Path, tmp_path: Path) -> None:
    """Measures of recordings in a store would need a copy of them."""
    (tmp_path / "stored").mkdir()
    store = RemoteStore.open((tmp_path / "stored").as_uri())
    for log in Store(folder).logs():
        assert store.put(log)
    options = ("--sort", "response_delay", "--measure", "overlap")
    here = {it["recording_id"]: it["measures"] for it in told_logs(folder, *options)}
    there = {it["recording_id"]: it["measures"] for it in told_logs(store.url, *options)}
    assert list(here) == list(there)
    assert here == there
    assert here["slow"]["response_delay"]["value"] == 3.25


def told_logs(place: object, *options: str) -> list[dict[str, Any]]:
    """List a place, and return the logs."""
    logs: list[dict[str, Any]] = told(list_command, place, *options)["logs"]  # type: ignore[arg-type]
    return logs


def test_a_narrow_terminal_keeps_the_measure(folder: Path) -> None:
    """The column that was asked for would be the one that has no room."""
    options = ("--measure", "fdb_v1_5_response_latency", "--measure", "barge_in_stop_latency")
    command = (*RUN, "recordings", "list", str(folder), *options)
    lines = on_terminal(command, columns=48, has_bars=False).splitlines()
    assert lines[0].split() == ["recording", "fdb_v1_5_response_latency"]
    assert "barge_in_stop_latency" in " ".join(lines)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some logs of `fixtures/logs`, of every kind."""
    folder = tmp_path_factory.mktemp("golden")
    for log in sorted(GOLDEN.glob(f"*{SUFFIX}"))[::6]:
        shutil.copy(log, folder)
    return folder


@pytest.fixture(scope="module")
def values(golden: Path) -> dict[str, dict[str, float]]:
    """Their measures as `antiphon eval` has them."""
    done = sum_up(measure_logs(sorted(golden.glob(f"*{SUFFIX}")), unwatched))
    return {
        Path(row.log).name.removesuffix(SUFFIX): {name: it.value for name, it in row.own.items()}
        for row in done.rows
    }


@pytest.mark.soak
@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from(sorted(MEASURES)), st.sampled_from([0.0, 0.5, 1.0, 3.0]))
def test_any_measure_sorts_and_chooses(
    golden: Path, values: dict[str, dict[str, float]], measure: str, number: float
) -> None:
    """A measure would be sorted by the direction of another."""
    sign = 1 if MEASURES[measure].better == "higher" else -1
    order = [values[name].get(measure) for name in names(golden, "--sort", measure)]
    assert len(order) == len(values)
    have = [value for value in order if value is not None]
    assert order == [*have, *[None] * (len(order) - len(have))]
    assert have == sorted(have, key=lambda value: sign * value)
    chosen = names(golden, "--where", f"{measure} > {number}")
    assert set(chosen) == {
        name for name, own in values.items() if measure in own and own[measure] > number
    }
