"""A turn of chat on the model: what is fed, what is said, and what is exact bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from protocol.values.model import (
    ChatConfig,
    Content,
    Costs,
    Message,
    Picture,
    Role,
    Sound,
    SpeechConfig,
    Text,
    Turn,
    TurnChunk,
    TurnResult,
    Unit,
)
from runtime.model.backends.base import BackendError, ContextFull
from runtime.model.backends.minicpmo import chat as chat_module
from runtime.model.backends.minicpmo.chat import Answer, ChatTurn
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.runner import ModelRunner
from runtime.model.backends.minicpmo.sampling import Candidates, decide_chat, decide_chat_code
from runtime.model.backends.minicpmo.tokens import Tokens
from runtime.model.backends.minicpmo.work import Feed, Speak, Work
from runtime.model.engine.engine import BACKGROUND, Scheduler, Task
from tests.models import random_model
from tests.models.blocking import alone
from tests.models.random_model import SMALL, answer, opening, picture, sound, unit

TINY = Path(__file__).parents[3] / "fixtures" / "tiny"
SECOND_BYTES = 16_000 * 4
NOT_A_NUMBER = np.full(1600, np.nan, "<f4").tobytes()


def said(role: Role, *content: Content | str) -> Message:
    """A message."""
    parts = (Text(text=part) if isinstance(part, str) else part for part in content)
    return Message(role=role, content=tuple(parts))


def ask(*messages: Message, seed: int = 3, index: int = 0, **what: Any) -> Turn:
    """A turn whose answer is long, and spoken unless told otherwise."""
    config = {"max_new_tokens": 24, "temperature": 1.5, "length_penalty": 10.0}
    settings: dict[str, Any] = {
        "speech": SpeechConfig(),
        "max_slice_nums": 4,
        "use_image_id": True,
        "omni": False,
        "thinking": False,
        **{name: value for name, value in what.items() if name in attrs.fields_dict(Turn)},
    }
    config |= {name: value for name, value in what.items() if name not in settings}
    return Turn(
        index=index,
        messages=messages or (said("user", "the lazy dog"),),
        config=ChatConfig(**config),
        seed=seed,
        **settings,
    )


def facts(chunks: Sequence[TurnChunk], result: TurnResult) -> tuple[object, ...]:
    """All of an answer but its costs, which no two runs share."""
    return (*chunks, attrs.evolve(result, costs=Costs()))


@pytest.fixture(scope="module", autouse=True)
def short_speech() -> Iterator[None]:
    """Random weights speak on to the most codes that there may be: 4 seconds in place of 20."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_module, "CODES_MAX", 100)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DuplexModel:
    return random_model.load(tmp_path_factory.mktemp("model"), slots=8)


@pytest.fixture(scope="module")
def tiny() -> DuplexModel:
    return DuplexModel.load(TINY, slots=1)


def everything(number: int) -> tuple[Message, ...]:
    """A conversation with all there is, another one for each number."""
    return (
        said("user", "seven wizards", Picture(jpeg=picture(number, 300, 200))),
        said("assistant", "box five"),
        said("user", Sound(pcm=sound(number, 20_000 + 3000 * number)), "and then?"),
    )


# -- what is said ---------------------------------------------------------------------------------


def test_pieces_join_to_the_answer(model: DuplexModel) -> None:
    """A client that streams would show another text than one that does not."""
    _, chunks, result = answer(model, ask())
    assert result.text
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert [chunk.step for chunk in chunks] == list(range(len(chunks)))
    ids = [index for chunk in chunks for index in chunk.token_ids]
    assert model.tokens.decode(ids) == result.text


def test_text_goes_ahead_of_its_speech(model: DuplexModel) -> None:
    """A client would hear words before it reads them."""
    _, chunks, result = answer(model, ask(max_new_tokens=25))
    pending = 0
    for chunk in chunks:
        pending += len(chunk.token_ids)
        if chunk.pcm:
            assert not chunk.text
            assert len(chunk.pcm) == len(chunk.codec_ids) * 960 * 4 == 24_000 * 4
            assert pending >= 10
    assert sum(bool(chunk.pcm) for chunk in chunks) >= 2
    assert len(result.pcm) == (len(result.codec_ids) + 3) * 960 * 4


def test_it_stops_at_the_most_tokens_asked_for(model: DuplexModel) -> None:
    """Who asks for a short answer would get a long one."""
    filled, _, result = answer(model, ask(max_new_tokens=7, speech=None))
    assert (result.reason, result.generated_tokens) == ("length", 7)
    assert result.kv_length == filled.input_tokens + 7


def test_it_stops_where_the_context_ends(tmp_path: Path) -> None:
    """The model would overrun its memory in mid-answer."""
    small = random_model.load(tmp_path, SMALL, slots=1)
    long = ask(said("user", "x" * 210), speech=None, max_new_tokens=500, length_penalty=10.0)
    filled, _, result = answer(small, long)
    assert result.reason == "length"
    assert result.kv_length == 256
    assert result.generated_tokens == 256 - filled.input_tokens


def test_it_goes_on_to_the_fewest_tokens_asked_for(model: DuplexModel) -> None:
    """`min_new_tokens` would be believed to be in force."""
    short = ask(speech=None, length_penalty=0.1, temperature=0)
    long = ask(speech=None, length_penalty=0.1, temperature=0, min_new_tokens=9)
    _, _, result = answer(model, short)
    assert result.generated_tokens < 9
    _, _, result = answer(model, long)
    assert result.generated_tokens >= 9


def test_an_ending_is_counted_but_not_fed(model: DuplexModel) -> None:
    """Token counts would not be those of the documents, or an ending would be shown as text."""
    ends = ask(speech=None, length_penalty=0.1, temperature=0)
    filled, chunks, result = answer(model, ends)
    fed = sum(len(chunk.token_ids) for chunk in chunks)
    assert result.reason == "turn_end"
    assert result.generated_tokens == fed + 1
    assert result.kv_length == filled.input_tokens + fed


def test_without_a_voice_the_words_are_the_same(
    model: DuplexModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that lost its voice would answer otherwise, or not at all."""
    aloud = answer(model, ask())[2]
    monkeypatch.setattr(model.runner, "vocoder", None)
    _, chunks, result = answer(model, ask())
    assert result.text == aloud.text
    assert not result.pcm
    assert not any(chunk.pcm or chunk.codec_ids for chunk in chunks)


def test_the_draws_are_keyed_by_seed_and_turn(model: DuplexModel) -> None:
    """An answer could not be given again, or two turns of a session would be alike by chance."""
    first = facts(*answer(model, ask())[1:])
    assert facts(*answer(model, ask())[1:]) == first
    texts = [
        answer(model, ask(speech=None, **key))[2].text
        for key in ({}, {"seed": 4}, {"index": 1}, {"seed": 4, "index": 1})
    ]
    assert len(set(texts)) == 4


def test_speech_goes_on_where_the_decoder_starts_over(tmp_path: Path) -> None:
    """A long answer would stop the speech decoder at the end of its slot."""
    small = random_model.load(tmp_path, SMALL, slots=1)
    _, chunks, result = answer(small, ask(max_new_tokens=45))
    assert result.reason == "length"
    codes = [code for chunk in chunks for code in chunk.codec_ids] + list(result.codec_ids)
    assert len(codes) > 0
    assert small.runner.tts.capacity == 256 < len(codes) + result.generated_tokens


# -- what is exact --------------------------------------------------------------------------------


def whole(turn: ChatTurn, asked: Turn, chunks: list[TurnChunk]) -> Any:
    """A turn from first to last, as one generator."""
    for place in range(turn.measure(asked)):
        yield from turn.see(place)
    yield from turn.prefill()
    result = yield from turn.generate(chunks.append)
    turn.release()
    return result


@pytest.mark.soak  # `test_engine_chat.py` has chats and sessions at once.
def test_a_turn_is_the_same_alone_and_in_company(model: DuplexModel) -> None:
    """What one client is told would depend on who else is served (B8)."""
    short = said("user", "the lazy dog")  # Two prompts of one length meet in a batch.
    asked = [everything(0), everything(1), (short,), (short,)]
    turns = [ask(*asked[n], seed=n, max_new_tokens=15 + n) for n in range(4)]
    expected = [facts(*answer(model, turn)[1:]) for turn in turns]
    chunks: list[list[TurnChunk]] = [[] for _ in turns]
    done: list[Any] = []
    scheduler = Scheduler(model.compute, batch_max=16)

    def add(steps: Any, due: float, keep: Callable[[Any], None]) -> None:
        def ended(result: Any, error: BaseException | None) -> None:
            assert error is None, error
            keep(result)

        scheduler.add(Task(steps=steps, deadline_ns=due, done=ended))

    sessions = [model.session(opening(n), slot=4 + n) for n in range(3)]
    for session in sessions:
        alone(session.open(), model.compute)
    results: dict[int, TurnResult] = {}
    for place, turn in enumerate(turns):
        steps = whole(model.chat(slot=place), turn, chunks[place])
        add(steps, BACKGROUND, lambda result, at=place: results.__setitem__(at, result))
    for index in range(3):
        for number, session in enumerate(sessions):
            second: Unit = unit(index, number)
            add(session.unit(second, None), 1e9, done.append)
        while len(done) < 3 * (index + 1):
            scheduler.turn(0)
        for session in sessions:
            alone(session.finalize(index, interrupted=False), model.compute)
    while not scheduler.is_idle:
        scheduler.turn(0)
    for session in sessions:
        session.release()
    assert [facts(chunks[n], results[n]) for n in range(4)] == expected
    assert scheduler.tally.largest > 3


@pytest.mark.parametrize("at", [0, 3, 12])
def test_a_cut_is_made_again_where_it_was(model: DuplexModel, at: int) -> None:
    """A replay would answer on where the session was interrupted."""
    turn, chunks = model.chat(slot=0), list[TurnChunk]()
    turn.measure(ask())
    alone(turn.prefill(), model.compute)
    told = 0

    def emit(chunk: TurnChunk) -> None:
        nonlocal told
        chunks.append(chunk)
        told += len(chunk.token_ids)
        if told >= at:
            turn.interrupt()

    if at == 0:
        turn.interrupt()
    result = alone(turn.generate(emit), model.compute)
    turn.release()
    assert result.reason == "interrupted"
    assert result.cut is not None
    assert at <= result.cut <= at + 1
    assert not result.pcm
    _, again, repeated = answer(model, ask(), cut=result.cut)
    assert facts(again, repeated) == facts(chunks, result)


def wiped(model: DuplexModel, slot: int) -> bool:
    stores = (model.runner.llm, model.runner.tts, model.runner.audio)
    return not any(s.keys[:, slot].any() or s.values[:, slot].any() for s in stores)


def test_a_released_turn_leaves_nothing_behind(model: DuplexModel) -> None:
    """What one client said would lie in memory while another is served (B8)."""
    turn = model.chat(slot=2)
    for place in range(turn.measure(ask(*everything(1)))):
        alone(turn.see(place), model.compute)
    alone(turn.prefill(), model.compute)
    alone(turn.generate(lambda _: None), model.compute)
    assert not wiped(model, 2)
    turn.release()
    assert wiped(model, 2)
    turn.release()
    with pytest.raises(BackendError, match="out of order"):
        turn.measure(ask())


@pytest.mark.parametrize("kind", [Feed, Speak])
def test_a_turn_that_fails_leaves_the_slot_empty(
    model: DuplexModel, kind: type[Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next client on that slot would get half a conversation of another (B8)."""
    real, left = ModelRunner.compute, 3

    def failing(self: ModelRunner, works: Sequence[Work]) -> list[Any]:
        nonlocal left
        out = real(self, works)
        left -= isinstance(works[0], kind)
        if left == 0:
            raise RuntimeError("the device failed")
        return out

    monkeypatch.setattr(ModelRunner, "compute", failing)
    turn = model.chat(slot=1)
    turn.measure(ask(said("user", "the lazy dog " * 60)))

    def both() -> Any:
        yield from turn.prefill()
        yield from turn.generate(lambda _: None)

    with pytest.raises(BackendError, match="failed"):
        alone(both(), model.compute)
    assert left == 0
    assert wiped(model, 1)


def test_what_does_not_fit_is_refused_before_anything_is_fed(model: DuplexModel) -> None:
    """A conversation that is too long would be half fed and then fail (B10)."""
    turn = model.chat(slot=1)
    with pytest.raises(ContextFull, match="8191"):
        turn.measure(ask(said("user", "x" * 9000)))
    turn.release()
    assert wiped(model, 1)


@pytest.mark.parametrize("content", [Picture(jpeg=b"no picture"), Sound(pcm=NOT_A_NUMBER)])
def test_broken_media_is_an_error_of_the_turn(model: DuplexModel, content: Content) -> None:
    """A client's broken file would look like a fault of the server."""
    with pytest.raises(BackendError, match=r"cannot be decoded|malformed"):
        answer(model, ask(said("user", content)))


# -- the rules of deciding ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokens(tiny: DuplexModel) -> Tokens:
    return tiny.tokens


def decided(tokens: Tokens, scores: dict[int, float], *before: int, **config: Any) -> int:
    """What is decided greedily of some logits; all others are far below."""
    logits = np.full(tokens.size + 5, -100.0)
    for index, value in scores.items():
        logits[index] = value
    settings = {"temperature": 0.0, "repetition_penalty": 1.0, **config}
    spoken = settings.pop("spoken", False)
    config = ChatConfig(**settings)
    return decide_chat(Candidates(values=logits), before, 0.5, config, tokens, spoken=spoken)


def test_repetition_divides_above_zero_and_multiplies_below(tokens: Tokens) -> None:
    """A penalty would make what was said likelier where its logit is negative."""
    assert decided(tokens, {1: 3.0, 2: 2.9}, 1, repetition_penalty=1.05) == 2  # 3 / 1.05 = 2.857
    assert decided(tokens, {1: 3.0, 2: 2.8}, 1, repetition_penalty=1.05) == 1
    assert decided(tokens, {1: -2.0, 2: -2.05}, 1, repetition_penalty=1.05) == 2  # -2.1
    assert decided(tokens, {1: -2.0, 2: -2.2}, 1, repetition_penalty=1.05) == 1


def test_repetition_is_penalised_once_and_over_128_tokens(tokens: Tokens) -> None:
    """A long answer could not use common words any more."""
    assert decided(tokens, {1: 3.0, 2: 2.8}, 1, 1, 1, 1, repetition_penalty=1.05) == 1
    old = [1, *[3] * 127]
    assert decided(tokens, {1: 3.0, 2: 2.9}, *old, repetition_penalty=1.05) == 2
    assert decided(tokens, {1: 3.0, 2: 2.9}, *old, 3, repetition_penalty=1.05) == 1


def test_length_penalty_makes_endings_less_likely(tokens: Tokens) -> None:
    """More of it would make answers shorter."""
    for end in tokens.endings:
        assert decided(tokens, {end: 3.0, 2: 2.0}, length_penalty=1.4) == end  # 2.14
        assert decided(tokens, {end: 3.0, 2: 2.0}, length_penalty=1.6) == 2  # 1.875
        assert decided(tokens, {end: -3.0, 2: -4.0}, length_penalty=1.2) == end  # -3.6
        assert decided(tokens, {end: -3.0, 2: -4.0}, length_penalty=1.4) == 2  # -4.2


def test_what_cannot_be_spoken_is_forbidden_in_speech_alone(tokens: Tokens) -> None:
    """It would try to say a picture mark aloud; or it could never end."""
    bad = tokens.ids.image
    assert decided(tokens, {bad: 3.0, 2: 2.0}) == bad
    assert decided(tokens, {bad: 3.0, 2: 2.0}, spoken=True) == 2
    for end in tokens.endings:
        assert decided(tokens, {end: 3.0, 2: 2.0}, spoken=True) == end
    assert decided(tokens, {tokens.size + 2: 3.0, 2: 2.0}) == 2


def test_draws_keep_to_top_k_and_top_p(tokens: Tokens) -> None:
    """Settings of the client would be ignored."""
    logits = np.full(tokens.size, -50.0)
    logits[[5, 6, 7]] = np.log([0.5, 0.3, 0.2])
    hot = ChatConfig(temperature=1.0, top_p=1.0, repetition_penalty=1.0)

    def drawn(draw: float, config: ChatConfig) -> int:
        own = Candidates(values=logits.copy())
        return decide_chat(own, (), draw, config, tokens, spoken=False)

    assert [drawn(u, hot) for u in (0.1, 0.6, 0.95)] == [5, 6, 7]
    assert drawn(0.99, attrs.evolve(hot, top_k=2)) == 6
    assert drawn(0.99, attrs.evolve(hot, top_p=0.7)) == 6
    assert drawn(0.99, attrs.evolve(hot, top_p=0.4)) == 5


def test_codes_are_penalised_as_often_as_they_occur() -> None:
    """Speech would hang on one sound."""
    logits = np.full(10, -50.0)
    logits[[3, 4]] = 0.8 * np.array([2.0, 1.85])  # After the temperature: 2 and 1.85.
    assert decide_chat_code(logits.copy(), (), 0.0) == 3
    assert decide_chat_code(logits.copy(), (3,), 0.0) == 3  # 1.905
    assert decide_chat_code(logits.copy(), (3, 3), 0.0) == 4  # 1.814
    assert decide_chat_code(logits.copy(), (3, 3, *[5] * 16), 0.0) == 3


# -- speech ---------------------------------------------------------------------------------------


def test_ten_tokens_are_spoken_together(
    model: DuplexModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The speech decoder would be fed otherwise than it was trained."""
    spoken: list[tuple[int, bool]] = []
    real = chat_module.Speaker.speak

    def noted(self: Any, text: Sequence[Any], tell: Any, *, last: bool) -> Any:
        spoken.append((len(text), last))
        return real(self, text, tell, last=last)

    monkeypatch.setattr(chat_module, "CODES_MAX", 30)
    monkeypatch.setattr(chat_module.Speaker, "speak", noted)
    answer(model, ask(max_new_tokens=23))
    assert spoken == [(10, False), (10, False), (3, True)]
    spoken.clear()
    answer(model, ask(max_new_tokens=20))
    assert spoken == [(10, False), (10, True)]


def test_thoughts_are_not_spoken(tiny: DuplexModel) -> None:
    """A model that may think would think aloud."""
    answer = Answer(
        runner=tiny.runner,
        tokens=tiny.tokens,
        turn=ask(thinking=True),
        slot=0,
        length=0,
        stop=lambda _: False,
        emit=lambda _: None,
        speaker=None,
    )
    chat = tiny.tokens.chat
    ids = [5, chat.think, 6, 7, chat.think_end, 8]
    assert None not in ids
    assert [answer.is_spoken(index or 0) for index in ids] == [True, *[False] * 4, True]
