"""Recorded transcriptions, as the commands that read logs tell and change them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
from click.testing import CliRunner

from protocol.values import events as ev
from recorder.format.format import Record
from recorder.format.mapping import EVENT_KINDS, event_of
from recorder.read.reader import LogReader, read
from replay.rerun.folder import replay_log
from replay.shrink import SIMPLIFICATIONS, PendingAnswers
from runtime.cli import main
from tests.sessions.answering import regenerate

LOGS: Final = Path(__file__).parents[2] / "fixtures" / "logs"
NAMES: Final = sorted(path.name for path in LOGS.glob("v1-transcription*.session.zst"))
LOG: Final = LOGS / "v1-transcription.session.zst"
WORDS: Final = re.compile(r"[a-z]+-[0-9]+\.[0-9]+")
every_log = pytest.mark.parametrize("name", NAMES)


def antiphon(*arguments: str | Path, exit_code: int = 0) -> str:
    """Run a command as if it were typed; what it says."""
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == exit_code, result.output
    return result.output


def events_of(log: Path) -> list[ev.Event]:
    """The events of a log."""
    return [event_of(it.fields, it.at_ns) for it in read(log) if it.kind in EVENT_KINDS]


def texts_of(log: Path) -> list[str]:
    """What was answered, utterance by utterance."""
    frames = [json.loads(str(it.fields["frame"])) for it in read(log) if it.kind == "tx"]
    return [it["text"] for it in frames if it["type"] in {"transcription.done", "response.done"}]


@every_log
def test_a_session_is_inspected(name: str) -> None:
    """Whoever gets a log could not see what was heard, or why not."""
    told = json.loads(antiphon("recordings", "inspect", LOGS / name, "--json"))
    assert told["mode"] == "transcription"
    heard = [it["text"] for it in told["utterances"]]
    answered = [text for text in texts_of(LOGS / name) if text]
    assert [text for text in heard if text][: len(answered)] == answered
    assert all(it["chunks"] or it["outcome"] != "done" for it in told["utterances"])
    codes = [it["code"] for it in told["errors"]]
    sent = [json.loads(str(it.fields["frame"])) for it in read(LOGS / name) if it.kind == "tx"]
    told_as_ends = {"timeout", "backend_error", "server_shutdown"}
    assert codes == [it["code"] for it in sent if it["type"] == "error"][: len(codes)]
    assert len(codes) >= sum(
        it["type"] == "error" and it["code"] not in told_as_ends for it in sent
    )


@pytest.mark.costly
@pytest.mark.slow
@every_log
def test_a_session_is_shown_and_exported(name: str, tmp_path: Path) -> None:
    """A page or a file cannot be made of such a log, or has no words."""
    words = {word for text in texts_of(LOGS / name) for word in WORDS.findall(text)}
    page = tmp_path / "page.html"
    antiphon("recordings", "view", LOGS / name, "-o", page)
    assert page.stat().st_size > 10_000
    for suffix in ("srt", "vtt", "wav", "jsonl", "mcap"):
        out = tmp_path / f"out.{suffix}"
        antiphon("export", LOGS / name, "-o", out)
        if suffix in {"srt", "vtt", "jsonl"}:
            assert words <= set(WORDS.findall(out.read_text("utf-8")))


def test_the_user_s_sound_is_heard_again(tmp_path: Path) -> None:
    """An export of a transcription is silent."""
    out = tmp_path / "out.jsonl"
    antiphon("export", LOG, "-o", out)
    moments = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    samples = sum(it["samples"] for it in moments if it["kind"] == "sound")
    assert samples == int((0.5 + 1.5 + 12) * 16_000)


def test_two_sessions_are_compared() -> None:
    """Two versions of a model cannot be told apart by what they wrote."""
    same = json.loads(antiphon("diff", LOG, LOG, "--json"))
    assert (same["exit_code"], same["a"]["exchanges"]) == (0, 16)
    other = antiphon("diff", LOG, LOGS / "v1-transcription-fails.session.zst", exit_code=1)
    assert "chunk 0" in other
    assert "seconds" in other


def test_a_fork_is_refused_clearly() -> None:
    """A command for duplex sessions breaks amid a transcription."""
    said = antiphon("fork", LOG, "--at", "1", "--seed", "3", exit_code=2)
    assert "a transcription cannot be forked" in said


@every_log
def test_redacted_nothing_is_left_of_what_was_said(name: str, tmp_path: Path) -> None:
    """A log that is handed on gives away what somebody said."""
    out = tmp_path / "out.session.zst"
    antiphon("recordings", "redact", LOGS / name, "--output", out)
    assert replay_log(out).result == "identical"
    for record in read(out):
        plain = json.dumps(_plain(record.fields))
        assert not WORDS.findall(plain), record
        assert "whisper-9" not in plain
    before = [type(event) for event in events_of(LOGS / name)]
    assert [type(event) for event in events_of(out)] == before
    for event in events_of(out):
        if isinstance(event, ev.FrameReceived) and "audio" in str(event.frame):
            body: Any = _json(event.frame)
            if isinstance(body, dict) and len(str(body.get("audio"))) > 10:
                assert set(body["audio"]) <= {"A", "="}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _json(frame: object) -> Any:
    try:
        return json.loads(str(frame))
    except ValueError:
        return None


def test_sound_alone_can_be_taken_out(tmp_path: Path) -> None:
    """Who may not keep voices has to throw the texts away too."""
    out = tmp_path / "out.session.zst"
    antiphon("recordings", "redact", LOG, "--output", out, "--kind", "audio")
    assert texts_of(out) == texts_of(LOG)
    assert replay_log(out).result == "identical"


def test_a_part_of_a_transcription_cannot_be_taken_out(tmp_path: Path) -> None:
    """The words that were said in the part stand behind its end."""
    out = tmp_path / "out.session.zst"
    said = antiphon("recordings", "redact", LOG, "--output", out, "--to", "0.1", exit_code=2)
    assert "redacted to its end" in said
    assert not out.exists()


@pytest.mark.slow
@every_log
def test_simpler_events_make_a_log_that_replays(name: str, tmp_path: Path) -> None:
    """A log of a transcription cannot be made smaller, or is another session's then."""
    with LogReader(LOGS / name) as reader:
        head = reader.head.fields
    for number, simplify in enumerate(SIMPLIFICATIONS):
        out = tmp_path / f"{number}.session.zst"
        events = [simplify(event) for event in events_of(LOGS / name)]
        regenerate(out, head, events)
        assert replay_log(out).result == "identical"


def test_answers_are_fitted_to_their_questions() -> None:
    """Where events are left out, a result of a chunk that nobody asked for is stepped."""
    done = next(it for it in events_of(LOG) if isinstance(it, ev.ChunkDone))
    asked = PendingAnswers()
    assert asked.fit(done) is None
    asked.numbers |= {"utterance": 4, "chunk": 2}
    fitted = asked.fit(done)
    assert isinstance(fitted, ev.ChunkDone)
    assert (fitted.result.utterance, fitted.result.index) == (4, 2)
    assert asked.fit(done) is None
    asked.numbers |= {"utterance": 5, "chunk": 0}
    failed = ev.ChunkFailed(at_ns=0, utterance=0, index=0)
    assert asked.fit(failed) == attrs.evolve(failed, utterance=5, index=0)


def test_what_a_session_has_no_use_for_is_left_out() -> None:
    """Each log of a conversation would name the limits of a transcription."""
    (opened,) = [
        it for it in read(LOGS / "v1-realtime-video.session.zst") if is_of(it, "ConnectionOpened")
    ]
    limits = opened.fields["limits"]
    assert isinstance(limits, dict)
    assert not {"models", "audio_bytes"} & limits.keys()


def is_of(record: Record, name: str) -> bool:
    """Whether a record holds an event of a class."""
    return record.kind == "event" and record.fields.get("type") == name
