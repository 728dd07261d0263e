"""The word error of the model's own voice: a known text, and a transcriber by script."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from protocol.values.model import Chunk
from replay.assess.run import measure_with, own_voice, speech_segments, word_errors, words_of
from replay.export.timeline import Words
from replay.redact.redaction import redact_command
from replay.rerun.full import Loading
from replay.shared.commands import unwatched
from runtime.measures.conversation import Ratio
from runtime.measures.talk import Sound
from runtime.model.backends.scripted import ScriptedBackend
from runtime.model.backends.scripted_chat import Transcribed
from tests.replay.evaluated import Duplex, call, loud
from tests.replay.test_logs import write_log
from tests.sessions.in_memory import on_virtual_time

LOUD = loud((0.1, 0.9))


def spoken(folder: Path, *pieces: tuple[str, float]) -> Path:
    """Record a session whose model says texts, each with so many seconds of sound."""
    talk = Duplex()
    for index, (text, seconds) in enumerate(pieces):
        talk.hear(index + 1, LOUD)
        talk.speak(index + 1.2, index, seconds, text)
    talk.at(round((len(pieces) + 3) * 1e9))
    talk.finish()
    return write_log(folder, talk.records)


class Writer:
    """Writes the next text for each second with sound, and keeps how the seconds were given."""

    def __init__(self, *texts: str) -> None:
        self._texts: Iterator[str] = iter(texts)
        self.chunks: list[tuple[int, int, bool]] = []

    def __call__(self, chunk: Chunk) -> Transcribed:
        self.chunks.append((chunk.utterance, chunk.index, chunk.is_last))
        is_loud = bool(np.frombuffer(chunk.pcm, "<f4").any())
        return Transcribed(text=next(self._texts, "") if is_loud else "")


def error_of(log: Path, script: Writer) -> Ratio | None:
    """Measure a log by a scripted transcriber."""
    found: list[Ratio | None] = []

    async def body() -> None:
        scores = await own_voice(log, ScriptedBackend(transcription=script))
        found.append(scores.get("own_voice_word_error"))  # type: ignore[arg-type]

    on_virtual_time(body)
    return found[0]


@pytest.mark.parametrize(
    ("said", "wrote", "errors"),
    [
        ("", "", 0),
        ("one two three", "one two three", 0),
        ("One, two. Three!", "one two three", 0),
        ("one two three", "one three", 1),
        ("one two three", "one two two three", 1),
        ("one two three", "one four three", 1),
        ("one two three", "", 3),
        ("one two three", "a b c d", 4),
        ("don’t stop", "don't stop", 0),
        ("你好 hello", "你们好 hello", 1),
    ],
)
def test_errors_are_counted_by_word(said: str, wrote: str, errors: int) -> None:
    """Punctuation would be an error, or a word left out two."""
    assert word_errors(words_of(said), words_of(wrote)) == errors


def test_what_is_heard_is_compared_with_what_was_said(tmp_path: Path) -> None:
    """Words of one turn that cross a second would be errors, or words without sound."""
    log = spoken(tmp_path, ("Hello there, ", 1), ("my friend.", 1))
    assert error_of(log, script := Writer("hello th", "ere my", " fiend")) == Ratio(1, 4)
    assert [index for _, index, _ in script.chunks] == [0, 1, 2, 3]
    assert [is_last for *_, is_last in script.chunks] == [False, False, False, True]
    assert error_of(log, Writer("hello ", "there my ", "friend")) == Ratio(0, 4)
    assert error_of(log, Writer()) == Ratio(4, 4)


def test_a_model_that_only_writes_has_no_voice(tmp_path: Path) -> None:
    """It would have an error of 100 %."""
    assert error_of(spoken(tmp_path, ("Hello there", 0)), Writer("hello")) is None


def test_long_speech_is_several_utterances(tmp_path: Path) -> None:
    """It would outgrow the transcriber's context."""
    log = spoken(tmp_path, *[(f"w{index} ", 1.0) for index in range(31)])
    assert error_of(log, script := Writer(*[f"w{index} " for index in range(32)])) is not None
    assert script.chunks[29] == (0, 29, True)
    assert script.chunks[30] == (1, 0, False)


def test_speech_is_parted_at_gaps() -> None:
    """Two answers minutes apart would be one utterance, with the silence between."""

    def moments(*pieces: tuple[float, str]) -> Sequence[Sound | Words]:
        found: list[Sound | Words] = []
        for begin_s, response in pieces:
            begin, pcm = round(begin_s * 24_000), bytes(4 * 24_000)
            sound = Sound(voice="model", at_ns=0, begin=begin, pcm=pcm, response_id=response)
            at = {"at_ns": 0, "begin_ns": sound.begin_ns, "end_ns": sound.end_ns}
            found += [sound, Words(voice="model", text=f"{begin_s:g} ", **at)]
        return found

    found = [*speech_segments(moments((0, "a"), (1.4, "b"), (2.9, "b"), (5, "b"), (6.5, "")))]
    assert [it.text for it in found] == ["0 1.4 2.9 5 ", "6.5 "]
    assert len(found[0].pcm) == 6 * 24_000 * 4


def test_the_command_measures_with_a_transcriber(tmp_path: Path) -> None:
    """The measure would be asked for in CI, and silently not be there."""
    log = spoken(tmp_path, ("Hello there", 1))
    condition = ("--fail-if", "own_voice_word_error > 0.5")
    done = call(log, "--transcriber", "scripted", *condition, "--json")
    body = json.loads(done.stdout)
    assert done.exit_code == 1
    assert body["transcriber"] == "scripted"
    assert body["summary"]["own_voice_word_error"]["count"] == 2
    assert body["failed_conditions"] == ["own_voice_word_error > 0.5 (it is 3)"]
    without = call(log, *condition)
    assert without.exit_code == 2
    assert "needs a --transcriber" in without.stderr
    assert "own_voice_word_error" not in call(log, "--json").stdout


@pytest.mark.parametrize("kind", ["audio", "text"])
def test_a_redacted_voice_is_not_judged(kind: str, tmp_path: Path) -> None:
    """Its silence would be an error of 100 %."""
    log, out = spoken(tmp_path, ("Hello there", 1)), tmp_path / "redacted.session.zst"
    options = ["--output", str(out), "--kind", kind]
    CliRunner().invoke(redact_command, [str(log), *options], catch_exceptions=False)
    assert error_of(log, Writer("hello")) == Ratio(1, 2)
    assert error_of(out, Writer("hello")) is None


def test_a_transcriber_that_fails_is_named(tmp_path: Path) -> None:
    """A recording without a figure would look like one without a voice."""
    log = spoken(tmp_path, ("Hello there", 1))
    backend = ScriptedBackend(transcription=lambda _: Transcribed(fault="fail"))
    found: list[tuple[str, str]] = []

    async def body() -> None:
        (row,) = await measure_with(Loading("x"), [log], lambda _: backend, unwatched)
        found.append((row.result, row.error))
        assert "own_voice_word_error" not in row.scores

    on_virtual_time(body)
    assert found[0][0] == "failed"
    assert "transcriber" in found[0][1]
