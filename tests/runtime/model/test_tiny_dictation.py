"""The recipe of `tiny`'s pen: what training lays out is what a transcription feeds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.tiny.recipe.dictation import PATIENCE, Dictation, compose, word_ends, written
from fixtures.tiny.recipe.dictation_batches import grouped, lay, stack
from fixtures.tiny.recipe.layout import AUDIO, IGNORE
from fixtures.tiny.recipe.phrases import PHRASES
from fixtures.tiny.recipe.sounds import noise_pool
from fixtures.tiny.recipe.timeline import RATE, World
from protocol.values.model import UNIT_SAMPLES
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.state import EMBEDDED
from tests.bench.tiny.score_transcripts import Written, word_error, writing_down
from tests.bench.tiny.staging import known_phrases, read_speech, together
from tests.runtime.model.test_tiny_recipe import noisy

ROOT = Path(__file__).parents[3]
HELDOUT = ROOT / "fixtures" / "speech" / "heldout"


@pytest.fixture(scope="module")
def model() -> DuplexModel:
    return DuplexModel.load(ROOT / "fixtures" / "tiny")


@pytest.fixture(scope="module")
def world() -> World:
    rng = np.random.default_rng(1)
    known = {phrase: [noisy(phrase, rng)] for phrase in PHRASES}
    marks = {}
    for text in (*PHRASES, "no"):
        count = len(text.split())
        marks[text] = tuple((place + 1) / count for place in range(count))
    return World(
        known=known, unknown=[noisy("no", rng)], noises=noise_pool(3), units={}, marks=marks
    )


def test_layout_is_what_a_transcription_feeds(model: DuplexModel) -> None:
    """The model would be trained on another sequence than it is run on."""
    item = known_phrases(HELDOUT)[0]
    pcm = np.concatenate([read_speech(HELDOUT, item)] * 2)
    (results,) = together(model, [writing_down(model, pcm)])
    fed, decided = list[int](), list[int]()
    for result in results:
        fed += [AUDIO if index == EMBEDDED else index for index in result.fed_ids]
        fed += result.token_ids[:-1]
        decided += result.token_ids
    sound = np.zeros(len(results) * UNIT_SAMPLES, np.float32)
    texts = tuple(result.text for result in results)
    assert any(texts)
    rows = lay(model.tokens, Dictation(pcm=sound, texts=texts))
    assert rows.ids == fed
    assert [label for label in rows.labels if label != IGNORE] == decided


@given(seed=st.integers(0, 2**32))
@settings(max_examples=40)
def test_an_utterance_is_a_function_of_its_seed_and_ends_in_silence(
    world: World, seed: int
) -> None:
    """Training could not be run again, or would be on other sound than the server sends."""
    dictation = compose(world, np.random.default_rng(seed))
    again = compose(world, np.random.default_rng(seed))
    assert np.array_equal(dictation.pcm, again.pcm)
    assert dictation.texts == again.texts
    assert len(dictation.pcm) == dictation.seconds * RATE
    assert np.abs(dictation.pcm).max() <= 1.0
    assert not dictation.pcm[-RATE:].any()
    text = "".join(dictation.texts)
    assert text == text.strip()
    assert set(text.split(" ")) <= {"", "no", *(w for phrase in PHRASES for w in phrase.split())}


def test_a_word_waits_for_its_end_and_a_little_more() -> None:
    """Words would be asked for that nobody could have heard."""
    words = word_ends("what time is it", (0.3, 0.6, 0.9, 1.0), 0.5, 2.5)
    assert [word for word, _ in words] == ["what", "time", "is", "it"]
    assert [end_s for _, end_s in words] == pytest.approx([1.1, 1.7, 2.3, 2.5])
    rng = np.random.default_rng(0)
    for _ in range(50):
        texts = written(words, 5, rng)
        assert "".join(texts) == "what time is it"
        count = 0
        for second, text in enumerate(texts):
            count += len(text.split())
            heard = second + 1 - PATIENCE[0]
            assert all(end_s <= heard for _, end_s in words[:count])
        sure = [end_s for _, end_s in words if end_s + PATIENCE[1] < 2.0]
        assert len("".join(texts[:2]).split()) >= len(sure)


def test_words_that_would_come_too_late_are_written_at_the_end() -> None:
    """The last words of an utterance would never be asked for."""
    assert written([("no", 1.9), ("way", 2.4)], 2, np.random.default_rng(0)) == ("", "no way")


def test_utterances_of_one_length_share_a_batch(model: DuplexModel, world: World) -> None:
    """Padding would fill the batches, or sounds of two lengths could not be stacked."""
    drawn = [compose(world, np.random.default_rng(seed)) for seed in range(20)]
    groups = list(grouped(drawn))
    assert sum(len(group) for group in groups) == 20
    for group in groups:
        batch = stack(model.tokens, group)
        assert batch.pcm.shape == (len(group), group[0].seconds * RATE)
        assert ((batch.ids == AUDIO).sum(1) == 10 * group[0].seconds).all()
        decided = (batch.labels != IGNORE).sum(1)
        for place, dictation in enumerate(group):
            tokens = sum(len(model.tokens.encode(text)) for text in dictation.texts)
            assert decided[place] == tokens + dictation.seconds


def test_errors_are_counted_in_words() -> None:
    """The score of transcripts would flatter, or be worse than it is."""
    said = ("what", "time", "is", "it")
    cases = {
        said: 0,
        (): 4,
        ("what", "is", "it"): 1,
        ("what", "a", "time", "is", "it"): 1,
        ("what", "time", "was", "it"): 1,
        ("it", "is", "time", "what"): 4,
    }
    for wrote, errors in cases.items():
        assert Written(said=said, wrote=wrote).errors == errors, wrote
    transcripts = [Written(said=said, wrote=wrote) for wrote in cases]
    assert word_error(transcripts) == sum(cases.values()) / (4 * len(cases))
