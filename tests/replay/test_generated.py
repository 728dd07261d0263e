"""Generated sessions, recorded and replayed: what a client does is drawn, what holds is the same.

Each log must be sound, replay to the same bytes, and keep every rule that the referee knows. With
a model, the model runs again too. `tests.soak.sessions` does the same for longer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import anyio
import attrs
import pytest
from hypothesis import given

from protocol.values.effects import DropUnit, Interrupt, StartUnit
from protocol.values.events import UnitDone, UnitFailed
from recorder.format.format import Record
from recorder.read.reader import LogReader, read
from recorder.repair import verify
from recorder.write.logfile import FIN_FIELDS
from replay.rerun.full import replay_fully
from replay.rerun.logic import Replayer
from replay.rerun.report import FullReport
from runtime.model.backends.base import Backend
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.engine.backend import EngineBackend
from runtime.model.models import tiny_path
from tests.generated.clients import (
    ClientScript,
    client_scripts,
    draw_and_record,
    record_model,
    record_scripted,
    steady_backend,
)
from tests.project.sampling import sample
from tests.replay.test_logs import write_log
from tests.sessions.in_memory import on_virtual_time
from tests.sessions.referee import Referee

BATCH = 20
BATCHES = sample(range(0, 200, BATCH), range(0, 200, 5 * BATCH))
CHANGED = range(80, 400)
"""Sessions of which one is changed; the first with all kinds of records that are."""
MODEL_SESSIONS = sample(10, 4)
HYPOTHESIS_NUMBER = 1_000_000


@attrs.frozen(kw_only=True)
class Verdict:
    """What was found in a log.

    Attributes:
        problems: what is wrong, in words; empty for a good log.
        counts: what happened in it.
    """

    problems: tuple[str, ...]
    counts: Counter[str]


def judge(log: Path) -> Verdict:
    """Check a log: it is sound and finished, replays to the same, and keeps every rule."""
    checked = verify(log)
    problems = [] if checked.state == "finished" else [f"verify: {checked.state} {checked.damage}"]
    referee, replayer = Referee(), Replayer()
    counts: Counter[str] = Counter(sessions=1)
    with LogReader(log) as reader:
        for item in reader:
            step = replayer.feed(item)
            if step is None:
                continue
            referee.observe(step.event, step.effects)
            counts["events"] += 1
            counts["drops"] += sum(isinstance(e, DropUnit) for e in step.effects)
            counts["interrupts"] += sum(isinstance(e, Interrupt) for e in step.effects)
            counts["units"] += sum(isinstance(e, StartUnit) for e in step.effects)
            counts["failed"] += isinstance(step.event, UnitFailed)
            if isinstance(step.event, UnitDone):
                cut = step.event.result.cut
                counts["cut"] += cut is not None
                counts[f"cut_{cut.stage}" if cut else "uncut"] += 1
                counts["spoken"] += not step.event.result.is_listen
    referee.finish()
    report = replayer.report()
    if not report.identical or not report.finished or report.truncated:
        problems.append(f"replay: {report.divergence or report}")
    if replayer.session is not None and not replayer.session.is_finished:
        problems.append("the session is not finished at the end of its log")
    problems += [f"referee: {violation}" for violation in referee.violations]
    counts["seconds"] += report.span_ns // 1_000_000_000
    return Verdict(problems=tuple(problems), counts=counts)


def full_replay(log: Path, backend: Backend) -> FullReport:
    """Run a log's model again, on the event loop of the server and its clock being virtual."""
    reports = []

    async def body() -> None:
        with LogReader(log) as reader:
            reports.append(await replay_fully(reader.head.fields, reader, lambda _: backend))

    on_virtual_time(body)
    return reports[0]


def problems_of(log: Path) -> tuple[str, ...]:
    """What is wrong with a log, with its name."""
    return tuple(f"{log.name}: {problem}" for problem in judge(log).problems)


@pytest.mark.costly
@pytest.mark.parametrize("first", BATCHES)
def test_a_generated_session_replays(first: int, tmp_path: Path) -> None:
    """Some client's session cannot be replayed, or breaks a rule that no hand-made test tries."""
    for number in range(first, first + BATCH):
        for log in draw_and_record(number, tmp_path, record_scripted):
            assert not problems_of(log)
            report = full_replay(log, steady_backend(number))
            assert report.compared, report
            assert report.identical, report.first_divergence


@given(script=client_scripts())
def test_whatever_a_client_does_replays(script: ClientScript) -> None:
    """As above; what fails is shrunk to the client that does the least."""
    with tempfile.TemporaryDirectory() as folder:
        logs = record_scripted(script, Path(folder), HYPOTHESIS_NUMBER)
        assert logs
        assert not [problem for log in logs for problem in problems_of(log)]


def test_the_same_number_makes_the_same_log(tmp_path: Path) -> None:
    """A session that failed once could not be made again."""
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
        for number in range(5):
            draw_and_record(number, folder, record_scripted)
    logs = [{log.name: log.read_bytes() for log in folder.iterdir()} for folder in folders]
    assert logs[0] == logs[1]


def spoil(record: Record) -> Record:
    """Change what a record says, so that it could still have been written."""
    fields = dict(record.fields)
    match record.kind:
        case "tx":
            fields["frame"] = str(fields["frame"]).replace("session", "sessi0n", 1)
        case "finalize":
            fields = {"type": "FinalizeFailed", "index": 0}
        case "state":
            fields["digest"] = "0" * 32
    return attrs.evolve(record, fields=fields)


def without_sums(record: Record) -> Record:
    """Take from `fin` what the recorder adds to it."""
    if record.kind != "fin":
        return record
    fields = {name: value for name, value in record.fields.items() if name not in FIN_FIELDS}
    return attrs.evolve(record, fields=fields)


@pytest.mark.parametrize("kind", ["tx", "finalize", "state"])
def test_a_changed_log_is_found_out(kind: str, tmp_path: Path) -> None:
    """The judge passes whatever it is shown, and all tests here are green for nothing."""
    log = next(
        log
        for number in CHANGED
        for log in draw_and_record(number, tmp_path, record_scripted)
        if kind in {record.kind for record in read(log)}
    )
    assert not problems_of(log)
    records = [without_sums(record) for record in read(log)]
    place = next(place for place, record in enumerate(records) if record.kind == kind)
    changed = tmp_path / "changed"
    changed.mkdir()
    assert not problems_of(write_log(changed, records))
    records[place] = spoil(records[place])
    changed = tmp_path / "again"
    changed.mkdir()
    assert problems_of(write_log(changed, records))


# -- with the embedded model ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> DuplexModel:
    """The embedded model; without it, nothing of what is promised of full replay is shown."""
    try:
        return DuplexModel.load(tiny_path())
    except OSError as error:
        pytest.fail(f"the embedded model is missing: {error}")


@pytest.fixture(scope="module")
def model_logs(model: DuplexModel, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Sessions of the embedded model."""
    folder = tmp_path_factory.mktemp("tiny")
    record = partial(_record_with, model)
    return [
        log
        for number in range(MODEL_SESSIONS)
        for log in draw_and_record(number, folder, record, audio_s_max=14)
    ]


def _record_with(model: DuplexModel, script: ClientScript, folder: Path, number: int) -> list[Path]:
    return record_model(script, model, folder, number)


def test_a_model_computes_its_sessions_again(model: DuplexModel, model_logs: list[Path]) -> None:
    """Asked why it said that, the model says something else."""
    assert len(model_logs) >= MODEL_SESSIONS
    units = 0

    async def run(log: Path) -> FullReport:
        with LogReader(log) as reader:
            return await replay_fully(
                reader.head.fields, reader, lambda _: EngineBackend(model), model="tiny"
            )

    for log in model_logs:
        assert not problems_of(log)
        report = anyio.run(run, log, backend="trio")
        assert report.compared, report.environment
        assert report.identical, (log.name, report.first_divergence)
        units += report.units
    assert units >= 3 * MODEL_SESSIONS


def test_the_sessions_are_worth_replaying(model_logs: list[Path]) -> None:
    """Nothing but silence was replayed."""
    counts = sum((judge(log).counts for log in model_logs), Counter())
    for name in ("spoken", "cut", "failed", "drops", "interrupts"):
        assert counts[name] > 0, counts


@pytest.mark.soak
def test_another_process_computes_it_too(model_logs: list[Path]) -> None:
    """It was the process that made the session, and not what is in the log."""
    log = max(model_logs, key=lambda path: judge(path).counts["spoken"])
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    command = [sys.executable, "-P", "-c", "from runtime.cli import main; main()"]
    done = subprocess.run(
        [*command, "replay", str(log), "--full", "--model", "tiny", "--json"],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": seed},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    body = json.loads(done.stdout)
    assert body["result"] == "identical"
    assert body["units"] > 0
