"""The command `antiphon eval`: its table, its JSON, conditions, exit codes and damaged logs."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from recorder.format.format import SUFFIX, Record
from recorder.read.reader import LogReader
from replay.assess.command import MODES, eval_command
from replay.cli import inspect_command
from replay.eval.condition import (
    COMPARISONS,
    PAIRED,
    STATISTICS,
    Condition,
    ConditionError,
    parse,
    parse_figure,
)
from replay.eval.evaluate import MEASURES, SETTINGS, measure_logs, sum_up
from replay.redact.redaction import redact_command
from replay.shared.commands import unwatched
from runtime import RUN
from tests.project.sampling import sample
from tests.project.terminal import on_terminal
from tests.replay.evaluated import Duplex, call, loud, told
from tests.replay.exported import GOLDEN
from tests.replay.test_logs import write_log

PAGE = Path(__file__).parents[2] / "docs" / "evaluate.md"


def record(folder: Path, name: str, delay_s: float) -> Path:
    """Write a conversation in which the model answers after a delay, or not at all."""
    session = Duplex()
    session.hear(1, loud((0.2, 0.8)))
    session.speak(1.25, 0)
    session.hear(2, loud())
    if delay_s:
        session.speak(0.8 + delay_s, 1, 1, "yes", ends=True)
    session.facts(9)
    path = folder / f"{name}{SUFFIX}"
    write_log(folder, session.records).rename(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three conversations: answered at once, late, and never."""
    for name, delay_s in (("quick", 1.5), ("never", 0), ("slow", 3.25)):
        record(tmp_path, name, delay_s)
    return tmp_path


def test_a_folder_is_summed_up(folder: Path) -> None:
    """An operator would have to listen to a thousand recordings."""
    result = call(folder)
    assert (result.exit_code, result.stderr) == (0, "")
    rows = {row.split()[0]: row.split()[1:] for row in result.stdout.splitlines() if row.strip()}
    assert rows["response_delay"] == ["s", "1.5", "1.5", "3.25", "3.25", "2", "slow"]
    assert rows["take_over_rate"] == ["share", "0.667", "1", "1", "0", "3", "never"]
    assert rows["unanswered"] == ["count", "1", "0", "1", "1", "3", "never"]
    assert "chat_response_delay" not in rows
    assert "3 recordings measured; 0:27 in all" in result.stdout


def test_the_worst_come_first(folder: Path) -> None:
    """The conversation to listen to would be anywhere in the list."""
    names = [Path(it["log"]).name.split(".")[0] for it in told(folder)["recordings"]]
    assert names == ["slow", "quick", "never"]
    body = told(folder, "--by", "take_over_rate")
    assert body["by"] == "take_over_rate"
    names = [Path(it["log"]).name.split(".")[0] for it in body["recordings"]]
    assert names == ["never", "quick", "slow"]
    shown = call(folder, "--by", "unanswered").stdout
    assert re.search(r"worst first, by unanswered \(count\):\n +1.000  \S+never", shown)
    assert "no recording has word_delay" in call(folder, "--by", "word_delay").stdout


def test_json_has_each_recording_and_where_its_worst_moment_is(folder: Path) -> None:
    """A script would have to read a table, and a person to seek."""
    body = told(folder)
    assert body.keys() == {"by", "recordings", "summary", "failed_conditions", "exit_code"}
    slow = body["recordings"][0]
    assert slow["measures"]["response_delay"] == {
        "value": 3.25,
        "count": 1,
        "p90": 3.25,
        "worst": 3.25,
        "worst_at_s": 0.8,
    }
    assert slow["measures"]["take_over_rate"] == {"value": 1, "count": 1}
    assert (slow["mode"], slow["dialect"], slow["duration_s"]) == ("audio", "realtime", 9)
    assert (slow["result"], slow["finished"], slow["speech_source"]) == ("measured", True, "energy")
    never = body["recordings"][2]["measures"]
    assert "response_delay" not in never
    summary = body["summary"]["response_delay"]
    assert (summary["unit"], summary["value"], summary["count"]) == ("s", 1.5, 2)
    assert body["exit_code"] == 0


def test_the_same_folder_gives_the_same_bytes(tmp_path: Path) -> None:
    """Two evaluations could not be compared by a tool."""
    logs = sorted(GOLDEN.glob(f"*{SUFFIX}"))
    some = {GOLDEN / f"v1-damaged-twice{SUFFIX}", *logs[::8]}
    for log in sample(set(logs), some):
        (tmp_path / log.name).symlink_to(log)
    for flags in ([], ["--json"]):
        one, other = call(tmp_path, *flags), call(tmp_path, *flags)
        assert one.stdout_bytes == other.stdout_bytes
        assert one.exit_code == 2


def test_a_damaged_log_stops_no_other(folder: Path) -> None:
    """One bad block, and a night's evaluation is lost; or its gaps count as silence."""
    before = told(folder)["summary"]
    shutil.copy(GOLDEN / f"v1-damaged-twice{SUFFIX}", folder)
    (folder / f"empty{SUFFIX}").touch()
    result = call(folder, folder / f"missing{SUFFIX}")
    assert result.exit_code == 2
    assert "3 recordings measured, 1 damaged, 2 unreadable" in result.stdout
    named = [line.split(": ")[0].rpartition("/")[2] for line in result.stderr.splitlines()]
    assert named == [f"{name}{SUFFIX}" for name in ("empty", "missing", "v1-damaged-twice")]
    body = told(folder)
    results = {it["log"].rpartition("/")[2].split(".")[0]: it for it in body["recordings"]}
    assert results["v1-damaged-twice"]["result"] == "damaged"
    assert results["v1-damaged-twice"]["measures"]
    assert "measures" not in results["empty"]
    assert results["empty"]["error"]
    assert body["summary"] == before


@pytest.mark.parametrize(
    ("name", "field", "is_too_large"),
    [("v1-realtime-chat", "generated_tokens", True), ("v1-barge-in", "at_ms", False)],
)
def test_a_forged_number_stops_no_other(
    folder: Path, name: str, field: str, *, is_too_large: bool
) -> None:
    """One log of a stranger, and a night's evaluation is lost."""
    with LogReader(GOLDEN / f"{name}{SUFFIX}") as reader:
        records = [
            reader.head,
            *(it for it in reader if isinstance(it, Record) and it.kind != "fin"),
        ]
    forged = [attrs.evolve(it, fields=_forged(it.fields, field)) for it in records]
    write_log(folder, list({it.seq: it for it in forged}.values())).rename(folder / f"big{SUFFIX}")
    result = call(folder)
    assert f"{3 + (not is_too_large)} recordings measured" in result.stdout
    assert ("too large" in result.stderr) is is_too_large
    assert result.exit_code == (2 if is_too_large else 0)


def _forged(value: Any, field: str) -> Any:
    if isinstance(value, dict):
        return {k: 10**400 if k == field else _forged(v, field) for k, v in value.items()}
    return value


def test_names_that_cannot_be_printed_are_written_as_escapes(folder: Path) -> None:
    """A file name that is not UTF-8 would end in a traceback, or colour the terminal."""
    for name in (b"slow\xff", b"slow\x1b[31m"):
        target = os.fsencode(folder) + b"/" + name + SUFFIX.encode()
        shutil.copy(folder / f"slow{SUFFIX}", target)
        Path(os.fsdecode(os.fsencode(folder) + b"/no" + name + SUFFIX.encode())).touch()
    result = call(folder)
    assert r"/slow\udcff.session.zst" in result.stdout
    assert r"/slow\x1b[31m.session.zst" in result.stdout
    assert r"/noslow\udcff.session.zst: " in result.stderr


def test_redacted_recordings_are_counted(folder: Path) -> None:
    """Measures would be missing, and nothing would say why."""
    log, redacted = next(folder.glob("slow*")), folder / f"redacted{SUFFIX}"
    CliRunner().invoke(redact_command, [str(log), "--output", str(redacted)])
    result = call(redacted)
    assert result.exit_code == 0
    assert "1 redacted: without the user's speech" in result.stdout
    assert told(redacted)["recordings"][0]["lost"] == ["speech", "words"]


def test_nothing_to_measure_is_an_error(tmp_path: Path) -> None:
    """A wrong path would pass as a good model."""
    result = call(tmp_path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"no *{SUFFIX} in it" in result.stderr
    assert call().exit_code == 2
    assert "--definitions" in call().stderr


# -- conditions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("conditions", "exit_code"),
    [
        (["take_over_rate < 0.9"], 1),
        (["take_over_rate<0.6"], 0),
        (["response_delay > 2"], 0),
        (["response_delay_p90 > 2"], 1),
        (["response_delay_count != 2"], 0),
        (["response_delay_recordings == 2"], 1),
        (["unanswered >= 1", "errors > 0"], 1),
        (["errors > 0", "take_over_rate_worst <= 0"], 1),
        (["word_delay > 1"], 2),
        (["word_delay > 1", "unanswered > 0"], 1),
    ],
)
def test_a_condition_decides_the_exit_code(
    folder: Path, conditions: list[str], exit_code: int
) -> None:
    """A CI job would pass whatever the model does."""
    flags = [flag for condition in conditions for flag in ("--fail-if", condition)]
    result = call(folder, *flags)
    assert result.exit_code == exit_code
    assert ("condition holds: " in result.stdout) is (exit_code == 1)
    assert ("no recording has word_delay" in result.stderr) is ("word_delay > 1" in conditions)
    as_json = call(folder, *flags, "--json")
    assert ("condition holds: " in as_json.stderr) is (exit_code == 1)
    body = told(folder, *flags)
    assert body["exit_code"] == exit_code
    assert len(body["failed_conditions"]) == (exit_code == 1)


def test_a_condition_that_holds_is_not_hidden_by_a_damaged_log(folder: Path) -> None:
    """The worse news would be lost: that a model has become worse."""
    (folder / f"empty{SUFFIX}").touch()
    assert call(folder, "--fail-if", "unanswered > 0").exit_code == 1
    assert call(folder, "--fail-if", "unanswered > 1").exit_code == 2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "such as 'take_over_rate < 0.9'"),
        ("take_over_rate", "such as 'take_over_rate < 0.9'"),
        ("take_over_rat < 1", "did you mean take_over_rate?"),
        ("zzz < 1", "'zzz' is not a measure, see antiphon eval --definitions"),
        ("errors_p95 > 1", "'errors_p95' is not a measure"),
        ("errors =< 1", "'=<' is not a comparison: < <= > >= == !="),
        ("errors > nan", "'nan' is not a number"),
        ("errors > inf", "'inf' is not a number"),
        ("errors > 1e999", "'1e999' is not a number"),
        ("errors > 1 or 1", "such as"),
        ("__import__('os') > 1", "is not a measure"),
        ("errors > " + "9" * 300, "such as"),
        ("errors > ٣", "'٣' is not a number"),
    ],
)
def test_a_bad_condition_is_explained(folder: Path, text: str, complaint: str) -> None:
    """A misspelt gate would be no gate."""
    result = call(folder, "--fail-if", text)
    assert (result.exit_code, result.stdout) == (2, "")
    assert complaint in " ".join(result.stderr.split())


@given(
    st.sampled_from(sorted(MEASURES)),
    st.sampled_from(["", *STATISTICS]),
    st.sampled_from(sorted(COMPARISONS)),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", " ", "  "]),
)
def test_every_condition_is_read(
    measure: str, statistic: str, comparison: str, number: float, space: str
) -> None:
    """A measure could not be named, or a number be another."""
    name = f"{measure}_{statistic}" if statistic else measure
    text = f"{name}{space}{comparison}{space}{number!r}"
    assert parse(text) == Condition(
        text=text,
        measure=measure,
        statistic=statistic or "value",
        comparison=comparison,
        number=number,
    )


@given(st.text(max_size=40))
def test_any_other_text_is_refused(text: str) -> None:
    """A text of another kind would end in a traceback, or be run."""
    with suppress(ConditionError):
        assert parse(text).measure in MEASURES


# -- definitions ----------------------------------------------------------------------------------


def test_definitions_are_printed() -> None:
    """A number would be believed without knowing what it is."""
    result = call("--definitions")
    assert result.exit_code == 0
    for measure in MEASURES.values():
        assert f"{measure.name} ({measure.unit}, " in result.stdout
        assert measure.definition in result.stdout
    assert all(setting in result.stdout for setting in SETTINGS)
    body = told("--definitions")
    assert list(body["measures"]) == list(MEASURES)
    assert body["settings"] == list(SETTINGS)


def test_the_page_has_all_options_of_a_model() -> None:
    """A mode or a statistic would be found by reading the code."""
    page = PAGE.read_text("utf-8")
    options = {option for param in eval_command.params for option in param.opts if "--" in option}
    assert {it for it in options if f"`{it}`" not in page and f"{it} " not in page} == set()
    assert all(f"| {mode} |" in page for mode in MODES)
    assert all(f"`.{statistic}`" in page for statistic in PAIRED)
    assert all(f"*{verdict}*" in page for verdict in ("worse", "better", "other"))


def test_the_page_s_commands_are_read() -> None:
    """A reader would copy a condition that does not exist."""
    conditions = re.findall(r"--(?:fail-if|where) '([^']+)'", PAGE.read_text("utf-8"))
    figures = re.findall(r"--(?:measure|sort) (\w+)", PAGE.read_text("utf-8"))
    assert len(figures) > 1
    for figure in figures:
        parse_figure(figure)
    assert len(conditions) > 1
    for condition in conditions:
        parse(condition)


# -- many -----------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_sound(folder: Path) -> None:
    """A folder of a thousand recordings would not fit."""
    log = next(folder.glob("slow*"))
    sum_up(measure_logs([log] * 3, unwatched))
    tracemalloc.start()
    try:
        held = []
        for count in (5, 20):
            done = sum_up(measure_logs([log] * count, unwatched))
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
            del done
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held[1] - held[0] < 15 * 16_000
    assert peak < 16 << 20


def test_progress_is_shown_on_a_terminal(folder: Path) -> None:
    """Minutes would pass without a sign."""
    shown = on_terminal((*RUN, "eval", str(folder)), columns=200)
    assert re.search("^eval ", shown)
    assert "take_over_rate" in shown


@pytest.mark.parametrize("columns", [72, 200])
def test_the_table_fits_its_terminal(folder: Path, columns: int) -> None:
    """Numbers would be cut off, or the names of measures."""
    command = (*RUN, "eval", str(folder))
    lines = on_terminal(command, columns=columns, has_bars=False).splitlines()
    assert max(map(len, lines[:15])) <= columns
    assert lines[0].split()[:3] == ["measure", "unit", "value"]
    assert ("worst in" in lines[0]) is (columns == 200)
    names = {line.split()[0] for line in lines if line}
    assert {"response_delay", "fdb_v1_5_response_latency"} <= names


def test_inspect_has_the_same_measures(folder: Path) -> None:
    """A recording would have one response delay here and another there."""
    log = sorted(folder.glob("*.zst"))[0]
    result = CliRunner().invoke(inspect_command, [str(log), "--json"])
    (row,) = told(log)["recordings"]
    assert json.loads(result.stdout)["measures"] == row["measures"]
    assert len(row["measures"]) > 3
