"""What a unit makes of what the model decides (docs/model.md, "A session"); with random weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from protocol.values.model import DuplexConfig, Finalized, Unit
from runtime.model.backends.minicpmo import unit as unit_module
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.tokens import ControlIds
from runtime.model.backends.minicpmo.vocoder import LOOKAHEAD
from tests.models import random_model
from tests.models.blocking import BlockingSession
from tests.models.random_model import CODES, Open, opening, unit

FRAME_BYTES = 960 * 4
SPEAKS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DuplexModel:
    return random_model.load(tmp_path_factory.mktemp("model"), slots=1)


@pytest.fixture(scope="module")
def ids(model: DuplexModel) -> ControlIds:
    return model.tokens.ids


@pytest.fixture
def start(model: DuplexModel) -> Iterator[Open]:
    """Opens a session that is released at the test's end."""
    with random_model.opener(model, SPEAKS) as open_one:
        yield open_one


def run(session: BlockingSession, what: list[Unit]) -> None:
    for each in what:
        session.run_unit(each)
        session.finalize(each.index, interrupted=False)


def units(count: int) -> list[Unit]:
    return [unit(index, SPEAKS) for index in range(count)]


def script(monkeypatch: pytest.MonkeyPatch, *tokens: int) -> None:
    """Let the model decide these ids, one after the other."""
    left = iter(tokens)
    monkeypatch.setattr(unit_module.sampling, "decide", lambda *_, **__: next(left))


def word(model: DuplexModel) -> int:
    """A token of text."""
    return model.tokens.encode("lazy")[-1]


def test_the_first_units_listen(start: Open) -> None:
    """The model would talk before the session has settled."""
    session = start(opening(SPEAKS, force_listen_count=3))
    for each in units(3):
        result = session.run_unit(each)
        assert result.is_listen
        assert result.fed_ids == ()
        session.finalize(each.index, interrupted=False)


def test_a_forced_listen_ends_an_open_turn(
    model: DuplexModel, start: Open, ids: ControlIds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a barge-in the model would go on with its old sentence."""
    session, text = start(), word(model)
    script(monkeypatch, ids.speak, text, ids.chunk_eos, ids.speak, text, ids.chunk_eos)
    run(session, units(1))
    result = session.run_unit(unit(1, SPEAKS, force_listen=True))
    assert result.is_listen
    assert result.end_of_turn
    assert (result.decided_ids, result.fed_ids) == ((ids.listen,), (ids.turn_eos,))
    assert session.finalize(1, interrupted=False).fed_ids == (ids.listen, ids.unit_end)
    spoken = session.run_unit(unit(2, SPEAKS))
    assert len(spoken.codec_ids) <= 25
    assert len(spoken.pcm) == len(spoken.codec_ids) * FRAME_BYTES  # A new turn, with its silence.


def test_a_forced_listen_between_turns_feeds_nothing(start: Open) -> None:
    """A turn that nobody began would end."""
    result = start().run_unit(unit(0, SPEAKS, force_listen=True))
    assert result.is_listen
    assert not result.end_of_turn
    assert result.fed_ids == ()


def test_a_listen_in_an_open_turn_becomes_tts_bos(
    model: DuplexModel, start: Open, ids: ControlIds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn would end without `turn_eos`."""
    session, text = start(), word(model)
    script(monkeypatch, ids.speak, text, ids.chunk_eos, ids.listen, ids.turn_eos, ids.listen)
    run(session, units(1))
    result = session.run_unit(unit(1, SPEAKS))
    assert result.decided_ids == (ids.listen, ids.turn_eos, ids.listen)
    assert result.fed_ids == (ids.tts_bos, ids.turn_eos)
    assert result.end_of_turn
    assert not result.is_listen
    assert session.finalize(1, interrupted=False).fed_ids == (ids.listen, ids.unit_end)


def test_a_listen_after_a_turns_end_keeps_what_was_said(
    model: DuplexModel, start: Open, ids: ControlIds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last words of a turn would be swallowed."""
    session, text = start(), word(model)
    script(monkeypatch, ids.speak, text, text, ids.turn_eos, ids.listen)
    result = session.run_unit(unit(0, SPEAKS))
    assert result.text == model.tokens.decode([text, text])
    assert result.end_of_turn
    assert not result.is_listen
    assert len(result.pcm) == (LOOKAHEAD + len(result.codec_ids)) * FRAME_BYTES


def test_a_listen_between_turns_listens(
    start: Open, ids: ControlIds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model would speak where it decided to listen."""
    script(monkeypatch, ids.listen)
    result = start().run_unit(unit(0, SPEAKS))
    assert result.is_listen
    assert (result.text, result.pcm, result.fed_ids) == ("", b"", ())


@pytest.mark.parametrize("name", ["chunk_eos", "chunk_tts_eos"])
def test_terminators_are_fed_by_finalize(
    model: DuplexModel, start: Open, ids: ControlIds, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The context would not say how a unit ended."""
    end = getattr(ids, name)
    session = start()
    script(monkeypatch, ids.speak, word(model), end)
    result = session.run_unit(unit(0, SPEAKS))
    assert result.fed_ids == (ids.speak, word(model))
    done = session.finalize(0, interrupted=False)
    assert done == Finalized(
        index=0, kv_length=result.kv_length + 2, fed_ids=(end, ids.unit_end), cost_us=done.cost_us
    )


def test_an_interrupted_unit_ends_with_chunk_eos(start: Open, ids: ControlIds) -> None:
    """The context would hold an answer that nobody heard the end of."""
    session = start()
    session.run_unit(unit(0, SPEAKS))
    assert session.finalize(0, interrupted=True).fed_ids == (ids.chunk_eos, ids.unit_end)


def test_the_first_token_is_neither_text_nor_speech(
    model: DuplexModel, start: Open, ids: ControlIds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client would be shown one word too many."""
    session, text = start(), word(model)
    script(monkeypatch, text, text, ids.speak, ids.tts_bos, text, ids.chunk_eos)
    asked: list[int] = []
    opening_rows = model.runner.parts.tts.opening

    def watched(spoken: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
        asked.extend(token for token, _ in spoken)
        return opening_rows(spoken)

    monkeypatch.setattr(model.runner.parts.tts, "opening", watched)
    result = session.run_unit(unit(0, SPEAKS))
    assert result.text == model.tokens.decode([text, text])
    assert asked == [text, ids.speak, ids.tts_bos, text]


def test_a_unit_without_text_still_speaks(
    start: Open, ids: ControlIds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Amid a long word the sound would stop for a second."""
    session = start()
    script(monkeypatch, ids.speak, ids.chunk_eos)
    result = session.run_unit(unit(0, SPEAKS))
    assert result.text == ""
    assert len(result.codec_ids) == 25


def test_nineteen_tokens_at_most(
    start: Open, ids: ControlIds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A babbling model would hold up every other session."""
    script(monkeypatch, *[ids.speak] * 30)
    result = start().run_unit(unit(0, SPEAKS))
    assert result.fed_ids == (ids.speak,) * 19
    assert result.decided_ids == (*result.fed_ids, ids.chunk_eos)


@pytest.mark.parametrize(("most", "fed"), [(2, 1), (3, 2), (20, 19)])
def test_a_chunks_tokens_are_bounded_as_asked(
    start: Open, ids: ControlIds, monkeypatch: pytest.MonkeyPatch, most: int, fed: int
) -> None:
    """A client that asks for short chunks would get long ones."""
    script(monkeypatch, *[ids.speak] * 30)
    result = start(max_new_speak_tokens_per_chunk=most).run_unit(unit(0, SPEAKS))
    assert len(result.fed_ids) == fed


def test_twenty_eight_characters_at_most(
    model: DuplexModel, start: Open, ids: ControlIds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More text would be shown than a second of speech can say."""
    letter, session = model.tokens.encode("x")[0], start()
    script(monkeypatch, ids.speak, *model.tokens.encode(" the" * 6), *[letter] * 30)
    result = session.run_unit(unit(0, SPEAKS))
    assert len(result.text) == 27
    assert len(result.decided_ids) == len(result.fed_ids) + 1
    assert result.decided_ids[-1] == letter
    assert session.finalize(0, interrupted=False).fed_ids == (ids.chunk_eos, ids.unit_end)


def test_a_token_rejected_after_turn_eos_leaves_the_turn_ended(
    model: DuplexModel, start: Open, ids: ControlIds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next listen would be rewritten, and the model never be silent again."""
    letter, session = model.tokens.encode("x")[0], start()
    ended = (*model.tokens.encode(" the" * 6), *[letter] * 3, ids.turn_eos)
    script(monkeypatch, ids.speak, *ended, letter, ids.listen)
    result = session.run_unit(unit(0, SPEAKS))
    assert result.fed_ids == (ids.speak, *ended)
    assert result.decided_ids == (*result.fed_ids, letter)
    assert result.end_of_turn
    session.finalize(0, interrupted=False)
    assert session.run_unit(unit(1, SPEAKS)).is_listen


def test_history_holds_what_was_decided(
    model: DuplexModel, start: Open, ids: ControlIds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repetition would be penalised other than in the public code."""
    text, histories = word(model), list[tuple[int, ...]]()
    left = iter((ids.speak, text, ids.chunk_eos, ids.listen, ids.chunk_eos, ids.chunk_eos))

    def decide(_logits: object, history: tuple[int, ...], *_: object, **__: object) -> int:
        histories.append(history)
        return next(left)

    monkeypatch.setattr(unit_module.sampling, "decide", decide)
    session = start()
    run(session, [*units(2), unit(2, SPEAKS, force_listen=True), unit(3, SPEAKS)])
    assert histories[0] == ()
    assert histories[-1] == (ids.speak, text, ids.listen)


def test_speech_is_a_second_amid_a_turn_and_flushed_at_its_end(
    model: DuplexModel, start: Open, ids: ControlIds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that plays units back to back would stutter, drift, or miss the last word."""
    text = word(model)
    chunk = (ids.speak, text, ids.chunk_eos)
    script(monkeypatch, *chunk, *chunk, ids.speak, text, ids.turn_eos, ids.listen)
    session, results = start(), []
    for each in units(3):
        results.append(session.run_unit(each))
        session.finalize(each.index, interrupted=False)
    assert [result.end_of_turn for result in results] == [False, False, True]
    first, middle, _ = results
    assert len(first.pcm) == len(first.codec_ids) * FRAME_BYTES
    assert len(middle.codec_ids) == 25
    assert len(middle.pcm) == 25 * FRAME_BYTES
    codes = sum(len(result.codec_ids) for result in results)
    frames = sum(len(result.pcm) for result in results) // FRAME_BYTES
    assert frames == LOOKAHEAD + codes
    assert all(code < CODES - 1 for result in results for code in result.codec_ids)


def test_silent_sessions_have_text_only(start: Open) -> None:
    """A client without loudspeakers would pay for speech."""
    session = start(generate_audio=False)
    results = [session.run_unit(unit(0, SPEAKS))]
    assert "".join(result.text for result in results)
    assert all(result.pcm == b"" and result.codec_ids == () for result in results)


def test_a_unit_that_must_speak_does_not_begin_with_listening(
    model: DuplexModel, start: Open, ids: ControlIds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that asks for a response would get none, or one that ends at once for ever."""
    left, scales = iter([ids.speak, word(model), ids.chunk_eos] * 2), list[float]()

    def decide(  # type: ignore[no-untyped-def]
        _logits: object, _history: object, _draws: object, config: DuplexConfig, *_, **__
    ):
        scales.append(config.listen_prob_scale)
        return next(left)

    monkeypatch.setattr(unit_module.sampling, "decide", decide)
    session = start(opening(SPEAKS, listen_prob_scale=2.0))
    forced = session.run_unit(unit(0, SPEAKS, force_speak=True))
    session.finalize(0, interrupted=False)
    session.run_unit(unit(1, SPEAKS))
    assert scales == [0.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert not forced.is_listen
    assert forced.input_hash != unit_module.input_hash(unit(0, SPEAKS))
