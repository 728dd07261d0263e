"""Moonshine writes down what it hears: what was given stays, and the end gives the rest."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import attrs
import numpy as np
import pytest
import soundfile

from protocol.values.model import INPUT_RATE_HZ, UNIT_BYTES, UNIT_SAMPLES, Chunk
from runtime.model.backends.moonshine import SEGMENT_S, MoonshineTranscript
from runtime.model.models import MOONSHINE, ModelUnusableError, check_model, load_backend
from runtime.serve import serve_command
from runtime.settings.settings import NO_TRANSCRIBER, Settings

HELDOUT = Path(__file__).parents[3] / "fixtures" / "speech" / "heldout"
QUIET = bytes(UNIT_BYTES)
LOUD = np.full(UNIT_SAMPLES, 0.1, "<f4").tobytes()


@attrs.define
class Readings:
    """What a model reads, one segment after the other, and how long each was, in bytes."""

    texts: list[str]
    sizes: list[int] = attrs.Factory(list)
    is_busy: bool = False

    async def read(self, pcm: bytes) -> list[str]:
        self.sizes.append(len(pcm))
        return self.texts.pop(0).split()


def chunks(*seconds: bytes, utterance: int = 0, ends: bool = True) -> list[Chunk]:
    """An utterance; its last second ends it."""
    last = len(seconds) - 1
    return [
        Chunk(utterance=utterance, index=n, pcm=pcm, is_last=ends and n == last, seed=0)
        for n, pcm in enumerate(seconds)
    ]


def given(owner: Any, *calls: Chunk) -> list[str]:
    """What each second gives."""
    transcript = MoonshineTranscript(owner)

    async def body() -> list[str]:
        return [(await transcript.run(call)).text for call in calls]

    return anyio.run(body)


def test_words_are_given_once_two_readings_agree_on_them() -> None:
    """A word that was cut in two, or misheard, would stand in what was already sent."""
    owner = Readings(["You", "what tie", "What time is", "What time is it", "What time is it?"])
    texts = given(owner, *chunks(QUIET, LOUD, LOUD, LOUD, QUIET))
    assert texts == ["", "", "What", " time is", " it?"]


def test_what_was_given_is_not_taken_back() -> None:
    """A client would show a word twice, or lose the ones after it."""
    owner = Readings(["it was a c", "It was a cat", "It is a cat on", "It is a cat on a mat."])
    texts = given(owner, *chunks(LOUD, LOUD, LOUD, QUIET))
    assert texts == ["", "It was a", "", " cat on a mat."]
    fewer = Readings(["one two three f", "one two three four", "two three four five"])
    assert given(fewer, *chunks(LOUD, LOUD, QUIET)) == ["", "one two three", " four five"]


def test_only_what_ends_is_read_while_others_wait() -> None:
    """With many sessions all would be written down late."""
    owner = Readings(["hello there"], is_busy=True)
    assert given(owner, *chunks(LOUD, LOUD, LOUD, QUIET)) == ["", "", "", "hello there"]


def test_a_long_utterance_is_read_in_segments() -> None:
    """Each reading would take longer than the one before, or words between two would be lost."""
    seconds = [LOUD] * 40
    owner = Readings(["word"] * 40)
    given(owner, *chunks(*seconds, QUIET))
    assert max(owner.sizes) <= SEGMENT_S * UNIT_BYTES
    assert len(owner.sizes) < 30
    whole = [size for size, after in pairwise([*owner.sizes, 0]) if after < size]
    assert 40 * UNIT_BYTES <= sum(whole) <= 41 * UNIT_BYTES


def test_speech_at_an_utterances_end_belongs_to_the_next() -> None:
    """Its first word would be lost, or stand at the end of what was said before."""
    last = np.zeros(UNIT_SAMPLES, "<f4")
    last[-4000:] = 0.1
    owner = Readings(["a", "a b", "c"])
    first = chunks(LOUD, last.tobytes())
    given(owner, *first, *chunks(LOUD, utterance=1, ends=False))
    end, begin = owner.sizes[1], owner.sizes[2] - UNIT_BYTES
    assert 0 < begin < UNIT_BYTES
    assert abs(end + begin - 2 * UNIT_BYTES) < UNIT_BYTES
    quiet = Readings(["a", "a b", "c"])
    given(quiet, *chunks(LOUD, QUIET), *chunks(LOUD, utterance=1, ends=False))
    assert quiet.sizes[2] == UNIT_BYTES


def test_the_model_writes_down_speech_that_it_does_not_know() -> None:
    """The same sound gives the same words: an evaluation could not be repeated."""
    pytest.importorskip("moonshine_voice")
    sound, rate = soundfile.read(HELDOUT / "005-what-time-is-it.flac", dtype="float32")
    assert rate == INPUT_RATE_HZ
    sound = np.pad(sound, (8000, -(len(sound) + 8000) % UNIT_SAMPLES + UNIT_SAMPLES)).astype("<f4")
    seconds = [it.tobytes() for it in sound.reshape(-1, UNIT_SAMPLES)]

    async def body() -> list[str]:
        backend: Any = load_backend(MOONSHINE, 2)
        found = []
        for slot in range(2):
            transcript = await backend.transcribe(slot=slot)
            found.append("".join([(await transcript.run(it)).text for it in chunks(*seconds)]))
            await transcript.release()
        await backend.aclose()
        return found

    assert anyio.run(body) == ["What time is it?"] * 2


def test_who_lacks_the_package_is_told_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was given `--transcriber moonshine` would end in a traceback."""
    check_model(MOONSHINE)
    monkeypatch.setitem(sys.modules, "moonshine_voice", None)
    with pytest.raises(ModelUnusableError, match=r"needs the extra 'words'"):
        load_backend(MOONSHINE, 1)


@pytest.mark.parametrize(
    ("asked", "where", "found"),
    [
        (None, "open installed", MOONSHINE),
        (None, "open", None),
        (None, "installed", None),
        ("tiny", "open installed", "tiny"),
        (NO_TRANSCRIBER, "open installed", None),
        (NO_TRANSCRIBER, "installed", None),
    ],
)
def test_words_are_written_down_for_who_opens_the_console(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    asked: str | None,
    where: str,
    found: str | None,
) -> None:
    """Who tries it out would find recordings without a word of theirs."""
    monkeypatch.setattr(serve_command, "has_moonshine", lambda: "installed" in where)
    settings = serve_command._with_words(Settings(transcriber=asked), opens="open" in where)
    assert settings.transcriber == found
    assert ("pip install" in capsys.readouterr().err) == (where == "open")
