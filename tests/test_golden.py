"""Golden logs are read and replayed for ever, and say what their readable twins say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, get_args

import pytest

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.records import RECORD_NAMES
from recorder.format.format import SUFFIX, Record
from recorder.format.mapping import EVENT_KINDS, event_of
from recorder.read.scan import Damage
from recorder.repair import State, verify
from replay.rerun.folder import replay_log
from tests.golden.logs import (
    CHANGES,
    FOLDER,
    HARMS,
    SCENES,
    frozen,
    hash_of,
    items,
    made,
    twin,
    twin_path,
)
from tests.project.sampling import sample

LOGS: Final = sorted(FOLDER.glob(f"*{SUFFIX}"))
LOGS_MIN: Final = 40
DIALECTS: Final = {
    *("realtime", "duplex-v1", "legacy-duplex", "legacy-chat", "opening"),
    *("transcription", "transcription-responses", "live", "openai"),
    *("openai-transcription", "vllm-omni"),
}
NOT_RECORDED: Final = {"RecordingFailed", "Flooded", "ForgetRecording"}
"""That a log cannot be written, not as fast as its client sends, or is not wanted."""


def state_of(path: Path) -> State:
    """What a golden log's name says of it."""
    name = path.name.removesuffix(SUFFIX).removeprefix("v1-")
    if name.startswith("damaged-"):
        return "damaged"
    return "open" if name in HARMS else "finished"


def names_in_logs(kind: str) -> set[str]:
    """Name all that stands in a field of the golden logs' records."""
    records = [item for path in LOGS for item in items(path) if isinstance(item, Record)]
    return {str(record.fields.get(kind)) for record in records if kind in record.fields}


def test_there_is_one_for_every_scene() -> None:
    """A golden log is lost, and nobody notices that it no longer replays."""
    wanted = {f"v1-{name}{SUFFIX}" for name in (*SCENES, *CHANGES, *HARMS)}
    assert {path.name for path in LOGS} >= wanted
    assert len(LOGS) >= LOGS_MIN
    assert {path.name for path in FOLDER.iterdir()} == {
        name for path in LOGS for name in (path.name, twin_path(path).name)
    }


def test_none_is_ever_written_again() -> None:
    """A change of behaviour takes the logs of yesterday with it, and every test is green."""
    assert {path.name: hash_of(path) for path in LOGS} == frozen()


def test_they_show_all_that_can_happen() -> None:
    """What no golden log holds can change its meaning with every test green."""
    known = {RECORD_NAMES[cls] for cls in (*get_args(ev.Event), *get_args(ef.Effect))}
    assert known - names_in_logs("type") == NOT_RECORDED
    assert names_in_logs("dialect") == DIALECTS
    assert names_in_logs("mode") >= {"video", "audio", "chat", "transcription"}


@pytest.mark.whole
@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_it_replays(path: Path) -> None:
    """An update of the server makes recordings of yesterday worthless."""
    state = state_of(path)
    assert verify(path).state == state
    outcome = replay_log(path)
    assert outcome.divergence is None
    assert outcome.logic is not None
    assert outcome.result == ("damaged" if state == "damaged" else "identical")
    assert outcome.logic.finished is (state == "finished")


@pytest.mark.whole
@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_it_says_what_its_twin_says(path: Path) -> None:
    """A log is read as something that nobody has written."""
    assert twin(items(path)) == twin_path(path).read_text()


@pytest.mark.whole
@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_the_events_in_it_are_whole(path: Path) -> None:
    """An event loses a field on its way through the log."""
    found = items(path)
    events = [item for item in found if isinstance(item, Record) and item.kind in EVENT_KINDS]
    assert events
    for item in events:
        assert event_of(item.fields, item.at_ns).at_ns == item.at_ns


def replayed_renamed(*options: str, logs: Sequence[Path] = LOGS) -> dict[str, str]:
    """Replay golden logs with other names in the product; gives the result of each."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.golden.renaming", *options, *map(str, logs)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    return {line.split()[0]: line.split()[1] for line in ran.stdout.splitlines()}


def test_a_log_knows_no_name_of_an_event_an_effect_or_a_value() -> None:
    """No class or attribute could ever be called what it is, for the sake of recordings."""
    wanted = {"damaged": "damaged", "open": "identical", "finished": "identical"}
    assert replayed_renamed() == {path.name: wanted[state_of(path)] for path in LOGS}


@pytest.mark.parametrize("name", sample(["SetTimer", "UnitResult.kv_length"], ["SetTimer"]))
def test_a_name_that_reaches_logs_is_noticed(name: str) -> None:
    """The test above would be green whatever stands in records."""
    found = replayed_renamed("--broken", "--only", name, logs=LOGS[:: sample(1, 2)])
    assert list(found.values()).count("diverged") > LOGS_MIN


@pytest.mark.parametrize("name", HARMS)
def test_a_harmed_log_is_read_past_its_harm(name: str) -> None:
    """What a crash or a rotten disk left of a log could not be used."""
    path = FOLDER / f"v1-{name}{SUFFIX}"
    whole = {item.seq: item for item in items(FOLDER / f"v1-{HARMS[name][0]}{SUFFIX}")}
    found = items(path)
    kept = [item for item in found if isinstance(item, Record)]
    assert len(kept) < len(whole) or any(isinstance(item, Damage) for item in found)
    assert len(kept) >= len(whole) // 3
    assert all(item == whole[item.seq] for item in kept)
    assert replay_log(path, go_on=True).result == replay_log(path).result


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENES)
def test_a_scene_gives_the_same_log_twice(name: str) -> None:
    """Something that is no event reaches a session: a clock, an id, an order of a set."""
    assert made(name) == made(name)
