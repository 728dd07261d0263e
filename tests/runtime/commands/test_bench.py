"""`antiphon dev bench engine`: it measures both ways, searches soundly, and says what it found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from protocol.values.model import UNIT_BYTES
from protocol.wire.media import check_frame
from runtime.cli import main
from runtime.commands import bench
from runtime.commands.bench import (
    ARRIVALS,
    MODES,
    NEAR,
    Arrival,
    Case,
    Doing,
    EngineBenchResult,
    EngineRun,
    Load,
    Mode,
    Search,
    Served,
    Times,
    camera_frame,
    judge,
    load_speech,
    measure_engine,
    sum_up,
)
from runtime.model.backends.minicpmo.model import DuplexModel
from tests.gpu.virtual import run_virtual
from tests.models.random_model import SMALL, write_checkpoint

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), SMALL)


def run(mode: Mode, sessions: int, missed: int = 0, busy_ms: float = 1.0) -> EngineRun:
    """A run as it might have been."""
    times = Times(count=100, p50_ms=1.0, p99_ms=2.0, max_ms=3.0)
    return EngineRun(
        mode=mode,
        arrival="together",
        sessions=sessions,
        units=100,
        missed=missed,
        latency=times,
        latency_finalized=times,
        stages_ms={},
        tokens_mean=1.0,
        spoken=1.0,
        busy_ms=busy_ms,
        batch_mean=1.0,
    )


def cases_on_a_virtual_clock(model: DuplexModel, load: Load) -> list[EngineRun]:
    """What `measure_engine` runs with one session, on the clock of `tests.gpu`."""
    cases = [Case(mode=mode, arrival=it, sessions=1) for it in ARRIVALS for mode in MODES]
    return [run_virtual(model, load, case) for case in cases]


@pytest.mark.costly
@pytest.mark.parametrize("clock", ["wall", "virtual"])
@pytest.mark.parametrize("doing", ["speaking", "listening"])
def test_every_unit_does_what_it_is_to_do(checkpoint: Path, doing: Doing, clock: str) -> None:
    """The figures would be of sessions that listen, and promise too many of those that speak."""
    load = Load(speech=load_speech(), seconds=1 if clock == "wall" else 2, doing=doing)
    model = DuplexModel.load(checkpoint, slots=1)
    if clock == "wall":
        runs, served = measure_engine(model, load, [1], show=lambda _: None)
        assert [each.arrival for each in served] == list(ARRIVALS)
    else:
        runs = cases_on_a_virtual_clock(model, load)
    assert {(run.arrival, run.mode) for run in runs} == {
        (arrival, mode) for arrival in ARRIVALS for mode in MODES
    }
    for each in runs:
        assert each.spoken == (doing == "speaking")
        assert each.latency.count <= each.units == load.seconds
        assert each.latency.p50_ms <= each.latency_finalized.p50_ms
        assert each.busy_ms > 0
        assert each.batch_mean >= 1
        assert set(each.stages_ms) == {"prefill", "llm", "tts", "token2wav"}
        assert (each.stages_ms["tts"] > 0) == (doing == "speaking")


def told_and_shown(checkpoint: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Run the command for one session of a second; its JSON, and what a person reads."""
    words = ["dev", "bench", "engine", "--model", str(checkpoint), "--device", "cpu"]
    words += ["--seconds", "1", "--sessions", "1", *options]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "SESSIONS_MAX", 1)
        told = CliRunner().invoke(main, [*words, "--json"])
        shown = CliRunner().invoke(main, words)
    assert told.exit_code == shown.exit_code == 0, told.output
    body: dict[str, Any] = json.loads(told.stdout)
    return body, shown.stdout


def test_the_command_prints_what_it_measured(checkpoint: Path) -> None:
    """A script could not read the figures, or a person not the table."""
    body, shown = told_and_shown(checkpoint)
    assert set(body) == {field.name for field in attrs.fields(EngineBenchResult)}
    assert (body["device"], body["dtype"]) == ("cpu", "float32")
    assert body["attention"] == "sdpa, row by row"
    assert body["rebuilt"]["units"] == 2
    assert min(body["rebuilt"][name] for name in ("exact", "fast", "voiced")) > 0
    assert "Due together: " in shown
    assert "Rebuilding a session of 2 s: " in shown


def test_a_part_of_the_runs_can_be_chosen(checkpoint: Path) -> None:
    """Half of the short time on a GPU would go into other runs."""
    options = ("--batched-only", "--due", "spread", "--pictures")
    body, shown = told_and_shown(checkpoint, *options)
    assert body["pictures"] == 1
    assert [(run["arrival"], run["mode"]) for run in body["runs"]] == [("spread", "batched")]
    (served,) = body["served"]
    assert served["batched"] == 1
    assert [served[name] for name in ("single", "ratio", "busy_ratio")] == [None] * 3
    assert "each with a picture" in shown
    assert "sessions in batches: at least 1, with under 1% of units missed\n" in shown


@pytest.mark.parametrize("counts", ["", "1,x", "0", "1000"])
def test_counts_that_are_none_are_refused(counts: str) -> None:
    """A typing error would end in a traceback after the model was loaded."""
    done = CliRunner().invoke(main, ["dev", "bench", "engine", "--sessions", counts])
    assert done.exit_code == 2
    assert "numbers from 1 to 64" in done.output


@given(
    limit=st.integers(0, 70),
    counts=st.lists(st.integers(1, 64), min_size=1, max_size=5),
    most=st.integers(1, 64),
)
def test_the_search_finds_the_limit(limit: int, counts: list[int], most: int) -> None:
    """The number of sessions that are promised would be one that is not served."""
    search, tried = Search(counts, most), []
    while (count := search.next_count()) is not None:
        assert 1 <= count <= most
        assert count not in tried
        tried.append(count)
        search.note(count, is_served=count <= limit)
    assert search.served <= limit
    if search.failed is None:
        assert search.served == most
    else:
        assert limit < search.failed <= search.served + max(1, search.served // NEAR)


def test_a_unit_in_a_hundred_is_too_many() -> None:
    """A count would be called served whose callers hear gaps."""
    assert run("batched", 1, missed=0).is_served
    assert not run("batched", 1, missed=1).is_served


def test_the_ways_are_compared_at_the_same_count() -> None:
    """Batches would look better for having been measured at more sessions."""
    arrival: Arrival = "together"
    runs = [run("batched", 1, busy_ms=9.0), run("single", 1, busy_ms=8.0)]
    runs += [run("batched", 4, busy_ms=3.0), run("single", 4, 100, busy_ms=9.0)]
    runs += [run("batched", 8, busy_ms=1.0)]
    searches: dict[Mode, Search] = {mode: Search([1, 4, 8], 8) for mode in MODES}
    for each in runs:
        searches[each.mode].note(each.sessions, is_served=each.is_served)
    found = judge(arrival, runs, searches)
    assert (found.batched, found.single, found.ratio, found.busy_ratio) == (8, 1, 8.0, 3.0)
    assert found.is_bounded


def test_where_nothing_is_served_there_is_no_ratio() -> None:
    """A slow machine would end the bench in a division by zero."""
    runs = [run("batched", 1, 100), run("single", 1, 100)]
    searches: dict[Mode, Search] = {mode: Search([1], 8) for mode in MODES}
    for each in runs:
        searches[each.mode].note(each.sessions, is_served=each.is_served)
    found = judge("spread", runs, searches)
    assert (found.batched, found.ratio, found.is_bounded) == (0, None, False)


def test_the_keys_are_documented() -> None:
    """A reader of the JSON has to guess what a figure is."""
    text = (ROOT / "docs" / "performance.md").read_text("utf-8")
    classes = (EngineBenchResult, EngineRun, Served)
    names = {field.name for cls in classes for field in attrs.fields(cls)}
    assert sorted(name for name in names if f"`{name}`" not in text) == []


def test_times_are_summed_up_by_rank() -> None:
    """A percentile is a time that no unit took."""
    assert sum_up([3.0, 1.0, 2.0]) == Times(count=3, p50_ms=2.0, p99_ms=3.0, max_ms=3.0)
    assert sum_up([float(number) for number in range(1, 201)]).p99_ms == 198.0


def test_seconds_follow_each_other() -> None:
    """Clients say the same second over and over, and the log stores it once."""
    speech = load_speech()
    seconds = [speech.second(number) for number in range(30)]
    assert {len(second) for second in seconds} == {UNIT_BYTES}
    joined = np.frombuffer(b"".join(seconds), "<f4")
    assert (joined[: len(speech.samples)] == speech.samples).all()


def test_a_camera_s_frames_differ_and_are_whole() -> None:
    """The server refuses them, or the log stores one."""
    frames = [camera_frame(number) for number in range(3)]
    assert len(set(frames)) == 3
    for frame in frames:
        check_frame("$", frame)
