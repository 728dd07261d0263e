"""Generated transcriptions, recorded and replayed; and what is true of all that clients heard."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from protocol.values import effects as ef
from protocol.values import events as ev
from recorder.read.reader import LogReader
from recorder.repair import verify
from replay.rerun.logic import Replayer
from tests.generated.clients import SeededDice
from tests.generated.transcription import (
    TranscriptionScript,
    backend_of,
    record,
    script_of,
    transcription_scripts,
)
from tests.replay.test_generated import full_replay

BATCH = 10
BATCHES = range(0, 80, BATCH)
HYPOTHESIS_NUMBER = 2_000_000
DELTAS = ("transcription.delta", "response.text.delta")
DONES = ("transcription.done", "response.done")
COMMITS = ("input_audio_buffer.commit", "response.create")
CHOICES = ("session.update", "session.create")
FIRST = (*CHOICES, *COMMITS)
BY_COMMIT = "a model chosen by a commit"


class Audit:
    """One session, judged event by event."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self._running: tuple[int, int] | None = None
        self._last = (-1, 0)
        self._said = ""
        self._fed = 0
        self._is_released = False
        self._lost: tuple[int, int] | None = None
        self._is_chosen = False

    def observe(self, event: ev.Event, effects: tuple[ef.Effect, ...]) -> None:
        """Take a step."""
        self.counts[type(event).__name__] += 1
        if isinstance(event, ev.BackendLost) and self._running is not None:
            self._lost = self._running
        if isinstance(event, ev.ChunkDone | ev.ChunkFailed | ev.BackendLost):
            self._running = None
        if isinstance(event, ev.SlotLeased):
            self._is_released = False
        if isinstance(event, ev.ChunkDone):
            self._fed += event.result.prompt_tokens
        if isinstance(event, ev.FrameReceived) and not self._is_chosen:
            self._choose(event.frame, effects)
        for effect in effects:
            match effect:
                case ef.RunChunk(chunk=chunk):
                    self._start((chunk.utterance, chunk.index))
                case ef.Send(frame=frame):
                    self._hear(json.loads(frame))
                case ef.Release(condemn=condemn):
                    self._release(condemn)

    def _choose(self, frame: object, effects: tuple[ef.Effect, ...]) -> None:
        """The first choice counts; the first commit without one takes the server's only model."""
        sent = [json.loads(effect.frame) for effect in effects if isinstance(effect, ef.Send)]
        body = parsed(frame)
        if any(each["type"] == "error" for each in sent) or body.get("type") not in FIRST:
            return
        self._is_chosen = True
        self.counts[BY_COMMIT] += body["type"] in COMMITS

    def _start(self, which: tuple[int, int]) -> None:
        """Chunks run one at a time, utterance after utterance, second after second."""
        if self._running is not None or self._is_released:
            self.problems.append(f"chunk {which} begins amid {self._running}, or after the end")
        number, index = self._last
        goes_on = which == (number, index + 1) or which == self._lost
        self._lost = None
        if not goes_on and not (which[0] > number and which[1] == 0):
            self.problems.append(f"chunk {which} after {self._last}")
        self._running, self._last = which, which

    def _hear(self, body: dict[str, Any]) -> None:
        if body["type"] in DELTAS:
            self._said += body["delta"]
            self.counts["deltas"] += 1
        elif body["type"] in DONES:
            usage = body["usage"]
            if body["text"] != self._said:
                self.problems.append(f"done {body['text']!r} after {self._said!r}")
            if usage["prompt_tokens"] != self._fed:
                self.problems.append(f"usage {usage}, {self._fed} were fed")
            self._said, self._fed = "", 0
            self.counts["dones"] += 1
        elif body["type"] == "error":
            self.counts[f"error {body['code']}"] += 1
            if body["code"] == "model_not_validated":
                self.problems.append("a commit did not take the server's only model")

    def _release(self, condemn: bool) -> None:
        if self._is_released:
            self.problems.append("the slot is given up twice (B5)")
        if self._running is not None and not condemn:
            self.problems.append(f"the slot is given up amid {self._running} (B4)")
        self._is_released = True


def parsed(frame: object) -> dict[str, Any]:
    """Give a frame's fields; none where it is no JSON object."""
    try:
        body = json.loads(str(frame))
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def judge(log: Path) -> Audit:
    """Check a log: it is sound and finished, replays to the same, and keeps every rule."""
    audit, replayer = Audit(), Replayer()
    checked = verify(log)
    if checked.state != "finished":
        audit.problems.append(f"verify: {checked.state} {checked.damage}")
    with LogReader(log) as reader:
        for item in reader:
            step = replayer.feed(item)
            if step is not None:
                audit.observe(step.event, step.effects)
    report = replayer.report()
    if not report.identical or not report.finished or report.truncated:
        audit.problems.append(f"replay: {report.divergence or report}")
    if replayer.session is None or not replayer.session.is_finished:
        audit.problems.append("the session is not finished at the end of its log")
    audit.counts["states"] += report.states
    return audit


def recorded(first: int, folder: Path) -> Iterator[tuple[int, Path]]:
    """Record a batch of clients."""
    for number in range(first, first + BATCH):
        for log in record(script_of(SeededDice("transcription", number)), folder, number):
            yield number, log


@pytest.mark.costly
@pytest.mark.parametrize("first", BATCHES)
def test_a_generated_transcription_replays(first: int, tmp_path: Path) -> None:
    """Some client's transcription cannot be replayed, or breaks a rule that no other test tries."""
    for number, log in recorded(first, tmp_path):
        audit = judge(log)
        assert not audit.problems, (number, audit.problems)
        report = full_replay(log, backend_of(number))
        assert report.compared, report
        assert report.identical, (number, report.first_divergence)
        assert report.chunks == audit.counts["ChunkDone"]


@given(script=transcription_scripts())
def test_whatever_a_client_does_replays(script: TranscriptionScript) -> None:
    """As above; what fails is shrunk to the client that does the least."""
    with tempfile.TemporaryDirectory() as folder:
        logs = record(script, Path(folder), HYPOTHESIS_NUMBER)
        assert logs
        assert not [problem for log in logs for problem in judge(log).problems]


def test_the_sessions_are_worth_replaying(tmp_path: Path) -> None:
    """Nothing but silence was replayed."""
    counts: Counter[str] = Counter()
    for first in BATCHES:
        for _, log in recorded(first, tmp_path):
            counts += judge(log).counts
    wanted = {"deltas", "dones", "ChunkFailed", "BackendLost", "states", "Draining", "DrainBegan"}
    wanted |= {f"error {code}" for code in ("context_full", "inference_error", "invalid_json")}
    assert not wanted - counts.keys(), counts
    assert counts[BY_COMMIT] > 0


def test_the_same_number_makes_the_same_log(tmp_path: Path) -> None:
    """A session that failed once could not be made again."""
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
        assert list(recorded(0, folder))
    logs = [{log.name: log.read_bytes() for log in folder.iterdir()} for folder in folders]
    assert logs[0] == logs[1]
