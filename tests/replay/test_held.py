"""Forks whose first units were held to their parent's replay as any other log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from rich.console import Console

from protocol.values.model import Unit
from recorder.format.records import Record
from recorder.read.reader import LogReader, read
from replay.fork.change import Change
from replay.library.text import full_lines
from replay.rerun.full import held_units, replay_fully
from replay.rerun.logic import replay
from replay.rerun.report import FullReport
from replay.shared.commands import print_all
from runtime.model.backends.scripted import ScriptedBackend, Speaks, Step
from runtime.model.backends.scripted_tone import tone
from tests.replay.test_fork import fork, full_replay
from tests.replay.test_full import Echo, echo_records, quick, record_session
from tests.replay.test_logs import write_log
from tests.sessions.in_memory import on_virtual_time

SEED = Change(at=9, seed=3, settings={"temperature": 0.2})


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A session of 13 units, one of them interrupted."""
    return record_session(tmp_path)


def head_of(log: Path) -> Any:
    """Give the fields of a log's head."""
    with LogReader(log) as reader:
        return reader.head.fields


def told(report: FullReport) -> str:
    """Say what people are told."""
    console = Console(width=200)
    with console.capture() as capture:
        print_all(console, full_lines(report, 1.0))
    return capture.get()


def replay_records(records: list[Record], backend: Any) -> FullReport:
    """Run records' model again, on virtual time."""
    reports = []

    async def body() -> None:
        head = records[0].fields
        reports.append(await replay_fully(head, records, lambda _: backend, anyway=True))

    on_virtual_time(body)
    return reports[0]


@pytest.mark.parametrize("at", [1, 5, 9, 12])
def test_a_held_fork_replays(log: Path, at: int) -> None:
    """What a fork shows of another seed or prompt could not be shown again."""
    path, forked = fork(log, attrs.evolve(SEED, at=at), ScriptedBackend(quick))
    assert forked.prefix.held > 0 or at == 1
    report = full_replay(path, ScriptedBackend(quick))
    assert report.identical, report.first_divergence
    assert (report.units, report.units_held, report.units_changed) == (13, at, 0)
    assert f"{at} of 13 units were held to the recording that this is a fork of" in told(report)


def test_a_fork_of_a_held_fork_replays(log: Path) -> None:
    """One could ask a question of a fork once, and never again."""
    first, _ = fork(log, attrs.evolve(SEED, at=4), ScriptedBackend(quick))
    second, forked = fork(first, Change(at=10, force_listen=True), ScriptedBackend(quick))
    assert (forked.parent, held_units(head_of(second))) == ("fork-1", 10)
    report = full_replay(second, ScriptedBackend(quick))
    assert (report.identical, report.units_held) == (True, 10), report.first_divergence


def test_a_fork_of_another_model_replays(log: Path) -> None:
    """Whatever another model would have said could not be shown again."""

    def other(unit: Unit, seed: int) -> Step:
        return Step(speech=Speaks(text=f"other {unit.index}", pcm=tone(1, seed, samples=2400)))

    def backend() -> ScriptedBackend:
        made = ScriptedBackend(other, context_limit=4000)
        made.info = attrs.evolve(made.info, fingerprint={"backend": "other"})
        return made

    path, _ = fork(log, Change(at=7, model="other"), backend())
    report = full_replay(path, backend())
    assert (report.identical, report.units_held) == (True, 7), report.first_divergence


def test_a_model_that_was_not_forced_is_not_held(tmp_path: Path) -> None:
    """Units that the model made by itself would be taken for such as somebody else decided."""
    log = write_log(tmp_path, echo_records())
    path, _ = fork(log, Change(at=4, seed=5), Echo(), anyway=True)
    report = full_replay(path, Echo())
    assert (report.identical, report.units_held) == (True, 0), report.first_divergence


def test_without_a_change_nothing_is_held(log: Path) -> None:
    """A regression in the first units would be overlooked as not judged."""
    path, _ = fork(log, Change(at=5, force_listen=True), ScriptedBackend(quick))
    report = full_replay(path, ScriptedBackend(quick))
    assert (held_units(head_of(path)), report.units_held) == (0, 0)
    assert "held" not in told(report)


@pytest.mark.parametrize(
    ("unit", "fields", "is_noticed"),
    [(2, {"kv_length": 1}, True), (9, {"text": "no"}, True), (2, {"text": "no"}, False)],
)
def test_what_is_the_model_s_own_is_judged(
    log: Path, unit: int, fields: dict[str, Any], is_noticed: bool
) -> None:
    """A held fork would be identical whatever the model makes of it."""
    path, _ = fork(log, SEED, ScriptedBackend(quick))
    records = list(read(path))
    for place, record in enumerate(records):
        if record.kind == "unit" and record.fields["result"]["index"] == unit:  # type: ignore[index,call-overload]
            result: Any = record.fields["result"]
            records[place] = attrs.evolve(
                record, fields={**record.fields, "result": {**result, **fields}}
            )
    report = replay_records(records, ScriptedBackend(quick))
    assert report.divergence is None or report.divergence.unit == unit
    assert (report.divergence is not None, report.units_changed) == (is_noticed, is_noticed)


def test_a_head_that_does_not_say_it_is_found_out(log: Path) -> None:
    """Holding would be what every log gets, and a full replay would prove nothing."""
    path, _ = fork(log, SEED, ScriptedBackend(quick))
    records = list(read(path))
    config: Any = records[0].fields["config"]
    head = {**records[0].fields, "config": {**config, "fork": {"is_held": False}}}
    records[0] = attrs.evolve(records[0], fields=head)
    report = replay_records(records, ScriptedBackend(quick))
    assert (report.identical, report.units_held) == (False, 0)
    assert replay(records).identical
