"""A log of a newer server is not comparable, and a divergence names the software of both sides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
from click.testing import CliRunner

from protocol.machine.core import Peer, Step
from protocol.machine.session import Session
from protocol.values import behaviour
from protocol.values.behaviour import NEWEST
from protocol.values.errors import ErrorCode, LocalProtocolError
from protocol.values.events import ConnectionOpened
from recorder.format.format import Record
from recorder.format.mapping import MACHINE_SCHEMA
from recorder.read.reader import LogReader
from replay.cli import replay_command
from replay.rerun import logic
from replay.rerun.folder import replay_log
from replay.rerun.logic import HERE
from tests.golden.logs import FOLDER, SCENES
from tests.golden.logs import record as record_scene
from tests.replay.test_logs import write_log
from tests.runtime.session.test_journal import OPENED

OLD = FOLDER / "v1-realtime-queue-left.session.zst"


def records_of(path: Path) -> list[Record]:
    """Read a sound log up to its end."""
    with LogReader(path) as reader:
        records = [item for item in reader if isinstance(item, Record)]
    return [record for record in records if record.kind != "fin"]


def changed(record: Record, **fields: Any) -> Record:
    """A record with other fields."""
    return attrs.evolve(record, fields={**record.fields, **fields})


def newer(how: str) -> list[Record]:
    """A golden log as a newer server might have written it."""
    head, opened, *rest = records_of(OLD)
    if how == "behaviour":
        return [head, changed(opened, behaviour=NEWEST + 1, unheard_of=True), *rest]
    return [changed(head, schema={"machine": MACHINE_SCHEMA + 1}), opened, *rest]


@pytest.mark.parametrize("how", ["behaviour", "schema"])
def test_a_newer_log_is_not_comparable(tmp_path: Path, how: str) -> None:
    """An older server calls a sound recording diverged, and somebody hunts a bug that is none."""
    path = write_log(tmp_path, newer(how))
    outcome = replay_log(path)
    assert (outcome.result, outcome.exit_code) == ("not_comparable", 3)
    assert outcome.divergence is None
    told = CliRunner().invoke(replay_command, [str(path)])
    assert told.exit_code == 3
    assert "recorded by a newer version" in told.output
    assert f"behaviour {NEWEST}" in told.output


def test_a_divergence_names_both_sides(tmp_path: Path) -> None:
    """Whoever reads of a divergence cannot tell whose behaviour it is."""
    head, opened, *rest = records_of(OLD)
    software = changed(head, software={"antiphon": "0.0.7"})
    path = write_log(tmp_path, [software, changed(opened, seed=7), *rest])
    told = CliRunner().invoke(replay_command, [str(path), "--json"])
    assert told.exit_code == 1
    body = json.loads(told.output)
    assert body["recorded_by"] == {"software": "0.0.7", "behaviour": 0, "schema": 1}
    assert body["replayed_by"] == attrs.asdict(HERE)
    text = CliRunner().invoke(replay_command, [str(path)]).output
    assert "recorded by antiphon 0.0.7, behaviour 0, schema 1" in text
    assert f"replayed by antiphon {HERE.software}" in text


def test_a_log_without_a_number_has_behaviour_0() -> None:
    """Its attribute is left out, as any that has its default."""
    report = replay_log(OLD).logic
    assert report is not None
    assert report.recorded_by.behaviour == 0
    assert report.recorded_by.software


def test_the_machine_refuses_a_behaviour_that_it_does_not_know() -> None:
    """A fork or a shrunk copy of a newer log silently takes another course."""
    newer: ConnectionOpened = attrs.evolve(OPENED, behaviour=NEWEST + 1)
    with pytest.raises(LocalProtocolError, match=f"known are 0 to {NEWEST}"):
        Session.open(newer)


# -- a change, planted ----------------------------------------------------------------------------

LOUDER: Final = NEWEST + 1
"""What a change of `protocol.values.behaviour` would be."""


@contextmanager
def changed_product() -> Iterator[None]:
    """Be a later version, whose errors end with an exclamation mark since `LOUDER`."""
    send_error = Peer.send_error

    def louder(peer: Peer, code: ErrorCode, message: str) -> None:
        send_error(peer, code, f"{message}!" if peer.step.behaves(LOUDER) else message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(behaviour, "NEWEST", LOUDER)
        patch.setattr(logic, "HERE", attrs.evolve(HERE, behaviour=LOUDER))
        patch.setattr(Peer, "send_error", louder)
        yield


def errors_in(path: Path) -> list[str]:
    """Read the errors that were sent."""
    bodies = [json.loads(str(it.fields["frame"])) for it in records_of(path) if it.kind == "tx"]
    return [body["error"]["message"] for body in bodies if body["type"] == "error"]


def test_old_logs_take_the_old_branch_and_new_sessions_the_new_one(tmp_path: Path) -> None:
    """A change could not be made without losing the recordings of yesterday."""
    old = FOLDER / "v1-realtime-mistakes.session.zst"
    with changed_product():
        new = record_scene(SCENES["realtime-mistakes"], tmp_path)
        assert replay_log(old).result == "identical"
        assert replay_log(new).result == "identical"
    assert [f"{message}!" for message in errors_in(old)] == errors_in(new) != []
    assert replay_log(new).result == "not_comparable"
    found = [it.fields.get("behaviour", 0) for it in (records_of(old)[1], records_of(new)[1])]
    assert found == [0, LOUDER]


def test_a_change_without_a_number_is_noticed() -> None:
    """Golden logs would be no use."""
    with changed_product(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "behaves", lambda _step, _change: True)
        outcome = replay_log(FOLDER / "v1-realtime-mistakes.session.zst")
    assert outcome.divergence is not None
    assert outcome.divergence.record == "tx Send"
