"""The recipe of `tiny`: what training lays out is what the engine feeds."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fixtures.tiny.recipe import asides, chat, chat_batches, clock, labels, shelf
from fixtures.tiny.recipe.chat_phrases import ALIASES, HOURS, STRANGE, STRANGE_ANSWER, all_texts
from fixtures.tiny.recipe.layout import AUDIO, IGNORE, PICTURE, lay_out
from fixtures.tiny.recipe.lesson import Lesson
from fixtures.tiny.recipe.mouth import Spoken, lay_out_chat
from fixtures.tiny.recipe.phrases import PHRASES, SEEING, SIGHTS, UNKNOWN, UNKNOWN_HELDOUT, says
from fixtures.tiny.recipe.render import ACCENTS, HELDOUT_VARIANTS, VARIANTS, Rendering
from fixtures.tiny.recipe.sights import SIZES, picture
from fixtures.tiny.recipe.sounds import noise_pool
from fixtures.tiny.recipe.tasks import TASKS, draw_task
from fixtures.tiny.recipe.timeline import Knobs, Session, Turn, World, compose
from fixtures.tiny.recipe.vocabulary import MERGED, make_tokenizer
from fixtures.tiny.recipe.voice import Answer
from protocol.values.model import (
    UNIT_SAMPLES,
    DuplexConfig,
    Opening,
    Picture,
    Sound,
    Tool,
    ToolCall,
    ToolResult,
    Unit,
    UnitResult,
    Voice,
)
from runtime.model.backends.minicpmo.chat import Speaker
from runtime.model.backends.minicpmo.logits import CodeLogits
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.tokens import Tokens
from runtime.model.backends.minicpmo.work import Speak
from runtime.model.backends.tool_calls import CallStream
from tests.bench.tiny import score_tools
from tests.bench.tiny.score_chat import UNKNOWN as ADMITTED
from tests.bench.tiny.staging import known_phrases, read_manifest, stage_phrase
from tests.models.blocking import open_session
from tests.models.random_model import answer

ROOT = Path(__file__).parents[3]
TINY = ROOT / "fixtures" / "tiny"
HELDOUT = ROOT / "fixtures" / "speech" / "heldout"
FRAME = (ROOT / "fixtures" / "speech" / "frame.jpg").read_bytes()


class Steady:
    """Randomness that never cuts."""

    def random(self) -> float:
        return 0.99


def answer_of(chunks: Sequence[tuple[int, ...]]) -> Answer:
    """An answer of which only the text matters."""
    silent = np.zeros(0, np.float32)
    return Answer(text="", chunks=tuple(chunks), codes=(), begins=(), pcm=silent)


def run(
    model: DuplexModel, pcm: NDArray[np.float32], *, every: int
) -> tuple[list[UnitResult], list[int]]:
    """Play sound; gives the results, and all that was fed, as `layout` marks it."""
    ids = model.tokens.ids
    opening = Opening(instructions="Be brief.", voice=Voice(), config=DuplexConfig(), seed=1)
    session = open_session(model, opening)
    image = (ids.image, *[PICTURE] * 64, ids.image_end)
    fed, results = list(session.opened.fed_ids), []
    for index, second in enumerate(pcm.reshape(-1, UNIT_SAMPLES)):
        shown = index % every == 0
        unit = Unit(
            index=index, pcm=second.astype("<f4").tobytes(), frames=(FRAME,) if shown else ()
        )
        results.append(session.run_unit(unit))
        fed += [ids.unit, *(image if shown else ()), *[AUDIO] * 10, *results[-1].fed_ids]
        fed += session.finalize(index, interrupted=False).fed_ids
    session.release()
    return results, fed


def chunks_of(results: Sequence[UnitResult], tokens: Tokens) -> list[tuple[int, ...]]:
    """The text tokens of the units that speak."""
    return [
        tuple(index for index in result.fed_ids if index not in tokens.control)
        for result in results
        if not result.is_listen
    ]


def item_of(phrase: str) -> int:
    """The place of a phrase's first rendering in the manifest."""
    phrases = [item.phrase for item in known_phrases(HELDOUT)]
    return phrases.index(phrase)


def laid(
    pcm: NDArray[np.float32],
    turns: tuple[Turn, ...],
    answers: dict[str, Answer],
    tokens: Tokens,
    *,
    every: int,
) -> tuple[list[int], list[int], list[tuple[int, str, int]]]:
    """A planned session, laid out."""
    units = len(pcm) // UNIT_SAMPLES
    frames = tuple(0 if index % every == 0 else None for index in range(units))
    ids, wanted, spoken = lay_out(
        Session(pcm=pcm, forced=3, turns=turns, frames=frames),
        answers,
        tokens,
        instructions="Be brief.",
        reference_rows=0,
        rng=Steady(),  # type: ignore[arg-type]
    )
    return ids.tolist(), wanted[wanted != IGNORE].tolist(), spoken


@pytest.fixture(scope="module")
def model() -> DuplexModel:
    return DuplexModel.load(TINY)


def test_layout_is_what_the_engine_feeds(model: DuplexModel) -> None:
    """The model would be trained on another sequence than it is run on."""
    place = item_of("tell me a joke")
    item, tokens = known_phrases(HELDOUT)[place], model.tokens
    pcm, end = stage_phrase(HELDOUT, item, place=0)
    results, fed = run(model, pcm, every=2)
    chunks = chunks_of(results, tokens)
    assert len(chunks) > 1
    first = next(result.index for result in results if not result.is_listen)
    turn = Turn(
        phrase=item.phrase,
        says=item.phrase,
        end_s=end / 16_000,
        ready=first,
        first=first,
        kept=len(chunks),
    )
    ids, asked, spoken = laid(pcm, (turn,), {item.phrase: answer_of(chunks)}, tokens, every=2)
    assert ids == fed
    assert asked.count(tokens.ids.speak) == len(chunks)
    assert asked.count(tokens.ids.turn_eos) == 1
    assert [chunk for _, _, chunk in spoken] == list(range(len(chunks)))


def test_layout_of_a_barge_in_is_what_the_engine_feeds(model: DuplexModel) -> None:
    """It would be trained to stop in another way than the engine stops."""
    items, tokens = known_phrases(HELDOUT), model.tokens
    one, other = items[item_of("tell me a joke")], items[item_of("find my keys")]
    pcm, _ = stage_phrase(HELDOUT, one, place=0)
    first = next(r.index for r in run(model, pcm, every=99)[0] if not r.is_listen)
    later, _ = stage_phrase(HELDOUT, other, place=0, lead_s=0.0)
    pcm = np.concatenate([pcm[: (first + 1) * UNIT_SAMPLES], later])
    results, fed = run(model, pcm, every=99)
    stopped = results[first + 1]
    assert stopped.fed_ids == (tokens.ids.turn_eos,)
    assert (stopped.end_of_turn, stopped.text) == (True, "")
    again = next(r.index for r in results[first + 2 :] if not r.is_listen)
    chunks = chunks_of(results, tokens)
    turns = tuple(
        Turn(phrase="", says=key, end_s=0.0, ready=begin, first=begin, kept=kept, style=style)
        for key, begin, kept, style in (
            ("one", first, 1, "barge"),
            ("other", again, len(chunks) - 2, ""),
        )
    )
    answers = {"one": answer_of([chunks[0], (1,)]), "other": answer_of(chunks[2:])}
    assert laid(pcm, turns, answers, tokens, every=99)[0] == fed


def test_no_phrase_begins_another() -> None:
    """The model could not know when a phrase has ended."""
    for phrase in PHRASES:
        others = [*PHRASES, *UNKNOWN, *UNKNOWN_HELDOUT]
        assert not any(o != phrase and o.startswith(phrase + " ") for o in others)


def test_heldout_voices_are_not_trained_on() -> None:
    """The scores would flatter."""
    assert not set(VARIANTS) & set(HELDOUT_VARIANTS)
    trained = {f"{accent}+{variant}" for accent in ACCENTS for variant in VARIANTS}
    assert not trained & {item.voice for item in read_manifest(HELDOUT)}
    assert not set(UNKNOWN) & set(UNKNOWN_HELDOUT)


def test_heldout_answers_are_those_of_the_recipe() -> None:
    """The scores would ask for other answers than training taught."""
    for item in read_manifest(HELDOUT):
        assert item.answer == PHRASES.get(item.phrase, "")


def test_registry_draws_every_task() -> None:
    """A skill would be forgotten at the next training."""
    rng = np.random.default_rng(1)
    assert {draw_task(rng) for _ in range(500)} == set(TASKS)


def test_sessions_are_a_function_of_the_generator() -> None:
    """Training could not be run again."""
    world = World(known={}, unknown=[], noises=noise_pool(3), units={})
    knobs = attrs.evolve(Knobs(), quiet=True, events=0.5, units=6)
    one, other = (compose(world, knobs, np.random.default_rng(4)) for _ in range(2))
    assert np.array_equal(one.pcm, other.pcm)
    assert one.turns == other.turns == ()
    assert np.abs(one.pcm).max() <= 1.0


def noisy(text: str, rng: np.random.Generator) -> Rendering:
    """A rendering that is noise."""
    pcm = rng.uniform(-1, 1, 14_000).astype(np.float32)
    return Rendering(text=text, voice="", speed=1, pitch=1, pcm=pcm)


@pytest.fixture(scope="module")
def world() -> World:
    rng = np.random.default_rng(1)
    return World(
        known={phrase: [noisy(phrase, rng)] for phrase in PHRASES},
        unknown=[noisy("no", rng)],
        noises=noise_pool(3),
        units=dict.fromkeys(all_texts(), 3),
        sights=tuple(SIGHTS),
    )


@pytest.mark.costly
@pytest.mark.parametrize("task", TASKS)
def test_turns_never_overlap(world: World, task: str) -> None:
    """Training would ask for two answers at once."""
    for seed in range(10):
        turns = compose(world, TASKS[task].knobs, np.random.default_rng(seed)).turns
        for before, after in pairwise(turns):
            assert before.free <= after.first


def test_barge_in_stops_an_answer(world: World) -> None:
    """Training would teach to talk on, or to stop for nothing."""
    styles = []
    for seed in range(10):
        session = compose(world, TASKS["barge"].knobs, np.random.default_rng(seed))
        for turn in session.turns:
            styles.append(turn.style)
            unit = turn.first + turn.kept  # The one that gives up, or the one after the answer.
            spoken = [min(s.end_s, unit + 1) - max(s.start_s, unit) for s in session.said]
            assert turn.style != "barge" or max(spoken) > 0.2
    assert {"", "barge"} <= set(styles)


def test_sight_is_answered_from_the_picture_that_is_shown(world: World) -> None:
    """Training would teach the wrong colour."""
    asked = 0
    for seed in range(20):
        session = compose(world, TASKS["sight"].knobs, np.random.default_rng(seed))
        for turn in session.turns:
            seen = [frame for frame in session.frames[: turn.first + 1] if frame is not None]
            sight = world.sights[seen[-1]] if seen else None
            assert turn.says == says(turn.phrase, sight)
            asked += turn.phrase == SEEING
    assert asked > 10


def test_pictures_are_of_their_size_and_kind() -> None:
    """The eye would learn colours that people do not call so."""
    rng = np.random.default_rng(2)
    reds = [picture("red", size, rng) for size in SIZES]
    assert [image.shape for image in reds] == [(h, w, 3) for w, h in SIZES]
    for image in reds:
        red, green, blue = image.reshape(-1, 3).mean(0)
        assert red > 1.5 * max(green, blue)


def test_labels_of_the_ear_follow_what_is_said(world: World) -> None:
    """The ear would be trained on shifted labels."""
    session = compose(world, Knobs(units=12, known=1.0, unknown=0.0), np.random.default_rng(5))
    first = session.said[0]
    row = int((first.start_s + first.end_s) * 5)
    assert labels.speaking(session)[row] == 1
    assert labels.speaking(session)[0] == 0
    ended = labels.ended(session, list(PHRASES))
    assert ended[int(first.end_s * 10) + 5] == 1 + list(PHRASES).index(first.text)
    assert ended[row - 2] == 0


# -- a clock in a session -------------------------------------------------------------------------


def test_a_session_with_a_clock_is_laid_out_as_the_engine_feeds_it(model: DuplexModel) -> None:
    """It would be trained in another layout than the one in which it calls."""
    tokens, offered = model.tokens, Tool(name="clock")
    items, slots = known_phrases(HELDOUT), tokens.slots
    assert slots is not None
    pcm, _ = stage_phrase(HELDOUT, items[item_of(clock.TIME)], place=0)
    opening = Opening(
        instructions="Be brief.", voice=Voice(), config=DuplexConfig(), seed=1, tools=(offered,)
    )
    session, results, calls, notes = open_session(model, opening), list[UnitResult](), [], {5: "no"}
    fed = list(session.opened.fed_ids)
    for index, second in enumerate(pcm.reshape(-1, UNIT_SAMPLES)):
        planned = asides.ClockSession(session=quiet(pcm), calls=tuple(calls), notes=notes)
        inputs = asides.inputs_of(planned, index)
        unit = Unit(index=index, pcm=second.astype("<f4").tobytes(), inputs=inputs)
        results.append(session.run_unit(unit))
        made = session.finalize(index, interrupted=False)
        for part in slots.head((), (AUDIO,) * 10, inputs, is_seen=False):
            fed += part
        fed += (*results[-1].fed_ids, *made.fed_ids)
        assert made.silent is not None
        if made.silent.spans:
            calls.append(asides.Call(unit=index, due=index + 2, text="nine o'clock"))
    assert len(calls) == 1
    chunks = chunks_of(results, tokens)
    first = next(result.index for result in results if not result.is_listen)
    turn = Turn(phrase=clock.TIME, says="it", end_s=0.0, ready=first, first=first, kept=len(chunks))
    ids, labels = asides.lay_out_with_clock(
        asides.ClockSession(session=quiet(pcm, turn), calls=tuple(calls), notes=notes),
        {"it": answer_of(chunks)},
        tokens,
        instructions="Be brief.",
        tools=(offered,),
    )
    assert ids.tolist() == fed
    assert (labels == slots.ids["<tool_call>"]).sum() == 1
    assert (labels == tokens.ids.turn_eos).sum() == 1


def quiet(pcm: NDArray[np.float32], *turns: Turn) -> Session:
    """A planned session of some sound."""
    frames = (None,) * (len(pcm) // UNIT_SAMPLES)
    return Session(pcm=pcm, forced=3, turns=turns, frames=frames)


def test_a_call_of_the_clock_is_planned_where_it_is_asked_for(world: World) -> None:
    """Training would teach calls that nothing asked for, or hours before their result."""
    told, speaking = {asides.told(hour) for hour in HOURS} | {STRANGE}, 0
    units = {**world.units, **dict.fromkeys(told, 2)}
    timed = attrs.evolve(world, units=units)
    for seed in range(12):
        planned = asides.compose_with_clock(timed, Knobs(), np.random.default_rng(seed))
        turns = [turn for turn in planned.session.turns if turn.says in told]
        assert len(turns) == len(planned.calls)
        for turn, call in zip(turns, planned.calls, strict=True):
            assert turn.phrase in (clock.TIME, asides.TIMER)
            assert call.unit < call.due <= turn.first
            said = [it for it in planned.session.turns if it.says == asides.TIMER]
            speaking += any(it.first == call.unit for it in said)
    assert speaking


# -- chat -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lesson(model: DuplexModel, world: World) -> Lesson:
    """What the stages share, with answers of one code a token and pictures that were seen."""
    parts, tokens = model.runner.parts, model.tokens
    texts = {key: tokens.encode(text) for key, text in all_texts().items()}
    silent = np.zeros(0, np.float32)
    answers = {
        key: Answer(
            text=all_texts()[key],
            chunks=(tuple(ids),),
            codes=tuple(range(1, 1 + 3 * len(ids))),
            begins=tuple(range(0, 3 * len(ids), 3)),
            pcm=silent,
        )
        for key, ids in texts.items()
    }
    shown = torch.zeros(len(world.sights), 64, int(parts.config.llm.hidden_size))
    return Lesson(
        parts=parts,
        front=parts.front_end,
        world=world,
        answers=answers,
        tokens=tokens,
        seed=1,
        shown=shown,
    )


def turns(world: World, count: int) -> list[chat.Asked]:
    """Turns of chat, each from its own generator."""
    texts = all_texts()
    return [chat.compose(world, texts, np.random.default_rng(seed)) for seed in range(count)]


def test_chat_is_laid_out_as_the_engine_feeds_it(model: DuplexModel, lesson: Lesson) -> None:
    """The model would be asked in chat in another form than it was trained in."""
    for asked in turns(lesson.world, 12):
        laid = chat_batches.lay(lesson, asked)
        prompt = len(laid.ids) - len(laid.answer)
        fed = answer(model, attrs.evolve(asked.turn, max_slice_nums=1), cut=0)[0].fed_ids
        assert [min(index, 0) or index for index in fed] == [
            -1 if index < 0 else index for index in laid.ids[:prompt]
        ]
        assert laid.labels[: prompt - 1] == [IGNORE] * (prompt - 1)
        assert laid.labels[prompt - 1 : -1] == laid.answer == laid.ids[prompt:]
        ids, speech = model.tokens.ids, asked.turn.speech is not None
        heard = any(isinstance(p, Sound) for m in asked.turn.messages for p in m.content)
        assert (fed[-1] == ids.tts_bos) == asked.aloud == (speech or heard)
        assert laid.labels[-1] in model.tokens.endings


def test_chat_is_answered_from_what_was_asked_last(world: World) -> None:
    """Training would teach the wrong answers."""
    keys = set()
    for asked in turns(world, 60):
        keys.add(asked.says)
        shown = [p for m in asked.turn.messages for p in m.content if isinstance(p, Picture)]
        assert len(shown) == len(asked.pictures)
        assert asked.turn.messages[-1].role == "user"
        if asked.says.startswith(SEEING):
            sight = world.sights[asked.pictures[-1]] if asked.pictures else None
            assert asked.says == says(SEEING, sight)
    assert STRANGE in keys
    assert len(keys & set(PHRASES)) > 5


def test_what_is_strange_is_no_phrase(world: World) -> None:
    """It would be taught not to know what it knows."""
    composer = chat.Composer(world=world, rng=np.random.default_rng(3))
    told = {composer.strange() for _ in range(300)}
    assert not told & {*PHRASES, *ALIASES, ""}
    assert len(told) > 200


def test_an_answer_of_chat_is_spoken_as_the_engine_speaks_it(
    model: DuplexModel, lesson: Lesson, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The speech decoder would be fed another sequence than it was trained on."""
    key = "what can you do"
    answer, parts = lesson.answers[key], model.runner.parts
    ids = model.tokens.encode(answer.text)
    states = torch.randn(len(ids), int(parts.config.llm.hidden_size))
    spoken = Spoken(key=key, chunk=0, states=states)
    lines = lay_out_chat(lesson, spoken, answer, np.random.default_rng(0))
    codes = iter([label for label in lines.labels if label != IGNORE])
    monkeypatch.setattr(
        "runtime.model.backends.minicpmo.chat.decide_chat_code", lambda *_: next(codes)
    )
    vocoder = model.runner.vocoder
    assert vocoder is not None
    speaker = Speaker(
        parts=parts,
        vocoder=vocoder,
        voice="any",
        slot=0,
        capacity=4096,
        is_cut=lambda: False,
        key=(0, 0),
    )
    text, rows = list(zip(ids, states, strict=True)), []
    for piece, last in ((text[:10], False), (text[10:], True)):
        steps = speaker.speak(piece, lambda *_: None, last=last)
        work = next(steps)
        with contextlib.suppress(StopIteration):
            while True:
                if isinstance(work, Speak):
                    rows.append(work.rows)
                    work = steps.send(CodeLogits(torch.zeros(parts.config.tts.num_audio_tokens)))
                else:
                    work = steps.send((np.zeros(0, np.float32), None))
    assert torch.equal(torch.cat(rows), lines.rows)
    assert next(codes, None) is None


def test_a_tool_is_taught_as_it_is_offered_and_called(model: DuplexModel, lesson: Lesson) -> None:
    """Its calls would be no calls, or be learnt from another prompt than it is given."""
    texts, kinds = all_texts(), set()
    for seed in range(60):
        clocked = clock.compose_clocked(lesson.world, texts, np.random.default_rng(seed))
        turn, says = clocked.asked.turn, clocked.text
        laid = chat_batches.lay(lesson, clocked.asked, says)
        assert laid.answer == model.tokens.encode(says or texts[clocked.asked.says])
        assert turn.tools
        has_clock = any(tool.name == clock.CLOCK for tool in turn.tools)
        if turn.messages[-1].role == "tool":
            (part,) = turn.messages[-1].content
            assert isinstance(part, ToolResult)
            assert (says, has_clock) == (f"It is {part.output}.", True)
            kinds.add("told")
        elif says == clock.CALL_TEXT:
            assert has_clock
            stream = CallStream(turn.tools)
            assert stream.add(says) + stream.end() == ""
            assert stream.calls == [ToolCall(name=clock.CLOCK, arguments="{}")]
            kinds.add("called")
        else:
            assert says in (None, texts[clock.TIME])
            kinds.add("clock, other question" if has_clock else "no clock")
        if seed < 6:
            fed = answer(model, turn, cut=0)[0].fed_ids
            prompt = len(laid.ids) - len(laid.answer)
            assert [min(index, 0) or index for index in fed] == [
                -1 if index < 0 else index for index in laid.ids[:prompt]
            ]
    assert kinds == {"told", "called", "clock, other question", "no clock"}


def test_what_it_says_of_strange_things_is_what_the_scores_ask() -> None:
    """The scores would ask for another sentence than training taught."""
    assert STRANGE_ANSWER == ADMITTED
    assert tuple(f"{hour} o'clock" for hour in score_tools.HOURS) == HOURS


def test_ids_of_the_tokenizer_stay_where_they_were() -> None:
    """Weights and recordings of an earlier version would mean other words."""
    tokenizer = make_tokenizer()
    placed = {"<|endoftext|>": 600, "<unit>": 601, "<|im_end|>": 608, "<focus>": 618}
    placed |= {"<think>": 619, "<|tts_eos|>": 623, "</focus>": 624}
    assert {name: tokenizer.token_to_id(name) for name in placed} == placed
    assert MERGED == 600
    assert tokenizer.encode("I do not know that.").ids == model_ids()


def model_ids() -> list[int]:
    """What the tokenizer beside the weights makes of the same text."""
    return Tokens(TINY).encode("I do not know that.")


def test_a_stage_is_trained_again_when_its_recipe_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The shelf would hand out weights that the recipe no longer makes."""
    learnt = {"ear": "a", "eye": "b", "mind": "c", "pen": "d", "mouth": "e", "hand": "f"}
    keys = {name: shelf.key(name, (1, 2), learnt) for name in shelf.RECIPES}
    assert len(set(keys.values())) == len(shelf.RECIPES) == 8
    assert shelf.key("ear", (1, 3), learnt) != keys["ear"]
    assert shelf.key("mind", (1, 2), {**learnt, "eye": "x"}) != keys["mind"]
    recipe = tmp_path / "recipe"
    shutil.copytree(shelf.RECIPE, recipe)
    shutil.copy(TINY / "config.json", tmp_path)
    monkeypatch.setattr(shelf, "RECIPE", recipe)
    assert shelf.key("mind", (1, 2), learnt) == keys["mind"]
    (recipe / "chat.py").write_text("# changed")
    assert shelf.key("mind", (1, 2), learnt) != keys["mind"]
    assert shelf.key("ear", (1, 2), learnt) == keys["ear"]


def test_the_shelf_gives_back_what_was_put_there(lesson: Lesson, tmp_path: Path) -> None:
    """A training that was taken up again would go on from other weights."""
    before = shelf.digest(lesson.parts, ("llm.",))
    shelf.put(tmp_path / "mind.pt", lesson, ("llm.",), {"loss": 0.5, "seconds": 3})
    norm = lesson.parts.llm.model.norm.weight
    with torch.no_grad():
        norm.add_(1.0)
    assert shelf.digest(lesson.parts, ("llm.",)) != before
    assert shelf.take(tmp_path / "mind.pt", lesson) == {"loss": 0.5, "seconds": 3}
    assert shelf.digest(lesson.parts, ("llm.",)) == before
