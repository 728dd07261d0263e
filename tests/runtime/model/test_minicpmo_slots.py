"""Sessions of a model whose units have slots, in which it calls tools, with random weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import attrs
import numpy as np
import pytest

from protocol.values.limits import INPUTS_MAX
from protocol.values.model import (
    ChatConfig,
    DuplexConfig,
    Finalized,
    Opening,
    PastUnit,
    Silent,
    Tool,
    Unit,
    UnitInput,
    UnitResult,
)
from runtime.model.backends.base import SILENT_STEPS_MIN, BackendRefused, CallsTools, ContextFull
from runtime.model.backends.minicpmo import session as session_module
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.runner import ModelRunner
from runtime.model.backends.minicpmo.sampling import Candidates, decide, decide_chat, draws
from runtime.model.backends.minicpmo.slot_layout import (
    EVENTS_MAX,
    FILE,
    GRAMMAR,
    NEW,
    OPEN,
    TOO_LONG,
)
from runtime.model.backends.minicpmo.work import Feed, Work
from runtime.model.engine.backend import EngineBackend
from tests.models import random_model
from tests.models.blocking import BlockingSession, alone
from tests.models.makers import TOOLS
from tests.models.random_model import IN_SLOTS, facts, opener, picture, unit
from tests.project.sampling import ONE_LOOP, sample

UNITS = 16
OFFERED = (TOOLS["clock"], TOOLS["tide"])
ANSWERED = (
    UnitInput(kind="started", call="t1"),
    UnitInput(kind="result", call="t1", text="nine"),
    UnitInput(kind="text", text="<unit> the door </unit> is open"),
)
Ran = list[tuple[UnitResult, Finalized]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DuplexModel:
    """A model with slots, for four sessions."""
    return random_model.load(tmp_path_factory.mktemp("model"), IN_SLOTS, slots=4)


@pytest.fixture
def start(model: DuplexModel) -> Iterator[random_model.Open]:
    """Opens sessions that are released in the end."""
    with opener(model, 1) as open_one:
        yield open_one


def opening(seed: int = 1, **config: Any) -> Opening:
    """Settings with two tools."""
    return attrs.evolve(random_model.opening(seed, **config), tools=OFFERED)


def heard(index: int) -> Unit:
    """A unit of a session: some have events, a picture, or must listen."""
    return unit(
        index,
        inputs=ANSWERED if index % 5 == 3 else (),
        frames=(picture(1),) if index == 6 else (),
        force_listen=index == 12,
    )


def plain(result: UnitResult, made: Finalized) -> tuple[object, ...]:
    """All that two runs must share."""
    return (*facts(result), made.kv_length, made.fed_ids, made.silent)


def run(session: BlockingSession, count: int = UNITS) -> Ran:
    """Run and finalize units."""
    out = []
    for index in range(count):
        result = session.run_unit(heard(index))
        out.append((result, session.finalize(index, interrupted=False)))
    return out


def calls(ran: Ran) -> list[str]:
    """The names of the calls that could be read."""
    spans = (span for _, made in ran if made.silent for span in made.silent.spans)
    return [span.name for span in spans if span.kind == "call" and not span.fault]


def test_a_session_speaks_and_calls(model: DuplexModel, start: random_model.Open) -> None:
    """Whatever the weights: calls, thoughts, speech, and every end of a silent part."""
    assert model.info.duplex_tools
    ran = [one for seed in range(3) for one in run(start(opening(seed)))]
    assert "clock" in calls(ran)
    assert {made.silent.end for _, made in ran if made.silent} >= {"eos", "no_action", "budget"}
    assert {result.is_listen for result, _ in ran} == {True, False}


def test_what_is_fed_follows_the_grammar(model: DuplexModel, start: random_model.Open) -> None:
    """From the speech to the end of the unit, over all units of a session."""
    slots = model.tokens.slots
    assert slots is not None
    carried = "first"
    for result, made in run(start(opening())):
        place = "spoken"
        for index in (*result.fed_ids, *made.fed_ids):
            name = slots.name(index)
            before, place = place, GRAMMAR[place][name]
            if name == "<ai_non_spoken_slot>":
                place = carried
            elif place == "silent":
                carried = before if before in OPEN and "budget" in name else "first"
        assert place == "start"


def test_events_and_tools_are_input(start: random_model.Open) -> None:
    """A result or an offer that the model does not get would be lost in silence."""
    session, other = start(opening()), start(random_model.opening(1))
    assert session.opened.prompt_length > other.opened.prompt_length
    with_events = session.run_unit(unit(0, inputs=ANSWERED))
    session.rollback(0)
    without = session.run_unit(unit(0))
    assert with_events.input_hash != without.input_hash
    assert with_events.logits_hash != without.logits_hash


@pytest.mark.parametrize("forced", sample([False, True], [True]))
def test_a_recorded_session_is_run_again(start: random_model.Open, *, forced: bool) -> None:
    """With the recorded decisions or its own, all that follows has the same bytes."""
    session, again = start(opening()), start(opening())
    for index in range(UNITS):
        result = session.run_unit(heard(index))
        if index % 4 == 1:
            session.interrupt(index)
        made = session.finalize(index, interrupted=False)
        assert made.silent is not None
        repeated = again.run_unit(heard(index))
        answer = again.finalize_again(index, interrupted=False, silent=made.silent, forced=forced)
        assert plain(repeated, answer) == plain(result, made)


def test_a_cut_ends_the_silent_part_but_not_its_first_steps(start: random_model.Open) -> None:
    """A client that sends a file would else starve it, or a call would never end."""
    session, cut = start(opening()), list[Silent]()
    for index in range(UNITS):
        session.run_unit(unit(index))
        session.interrupt(index)
        silent = session.finalize(index, interrupted=False).silent
        assert silent is not None
        cut.append(silent)
    assert max(len(silent.decided_ids) for silent in cut) == SILENT_STEPS_MIN
    assert "cut" in {silent.end for silent in cut}


@pytest.mark.parametrize("step", [0, 1, 5])
def test_a_failure_is_undone_to_the_end_of_the_speech(
    start: random_model.Open, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The speech was sent already: the unit is closed as if nothing had been decided."""
    session, twin, compute = start(opening()), start(opening()), ModelRunner.compute
    fed = list[Work]()

    def failing(runner: ModelRunner, works: Sequence[Work]) -> list[Any]:
        answers = compute(runner, works)
        fed.extend(work for work in works if isinstance(work, Feed))
        if len(fed) == step + 1:
            raise RuntimeError("the device failed")
        return answers

    session.run_unit(unit(0))
    twin.run_unit(unit(0))
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "compute", failing)
        made = session.finalize(0, interrupted=False)
    undecided = Silent(end="failed")
    assert made.silent == undecided
    repeated = twin.finalize_again(0, interrupted=False, silent=None, forced=False)
    assert repeated.fed_ids == made.fed_ids
    rest = [(one.run_unit(unit(1)), one.finalize(1, interrupted=False)) for one in (session, twin)]
    assert plain(*rest[0]) == plain(*rest[1])


@pytest.mark.parametrize("exact", [False, True])
def test_a_unit_whose_worker_was_lost_in_silence_is_rebuilt(
    model: DuplexModel, start: random_model.Open, *, exact: bool
) -> None:
    """Nothing was decided in it, and what was open stays open."""
    lost, again, past = start(opening()), start(opening()), []
    for index in range(6):
        result = lost.run_unit(heard(index))
        if index % 2:
            made = lost.finalize_again(index, interrupted=False, silent=None, forced=True)
        else:
            made = lost.finalize(index, interrupted=False)
        silent = None if index % 2 else made.silent
        past.append(PastUnit(unit=heard(index), result=result, interrupted=False, silent=silent))
    for one in past:
        steps = again.stepped.rebuild(one, exact=exact, is_last=one is past[-1])
        rebuilt = alone(steps, model.compute)
    assert rebuilt.kv_length == made.kv_length
    rest = [(one.run_unit(heard(6)), one.finalize(6, interrupted=False)) for one in (lost, again)]
    if exact:
        assert plain(*rest[0]) == plain(*rest[1])


def result(text: str, call: str = "t1") -> UnitInput:
    return UnitInput(kind="result", call=call, text=text)


def test_an_event_that_is_too_long_is_an_error_in_its_place(model: DuplexModel) -> None:
    """A result of a page would take the whole context, and end the session."""
    slots = model.tokens.slots
    assert slots is not None
    long, short = result("0" * 2_000), UnitInput(kind="text", text="rain")
    in_place = slots.events([result(TOO_LONG), short])
    assert slots.events([long, short]) == in_place
    assert slots.events([result("0" * 900), short]) != in_place
    many = [result("0" * 900, f"t{number}") for number in range(INPUTS_MAX)]
    assert len(slots.events(many)) <= EVENTS_MAX


def test_no_room_is_kept_for_errors_that_cannot_come(model: DuplexModel) -> None:
    """A result that fitted became an error, for each accepted call next to it took room for one."""
    slots = model.tokens.slots
    assert slots is not None
    begun = [UnitInput(kind="started", call=f"t{number}") for number in range(3, 11)]
    refused = result(TOO_LONG, "t2")
    first = result("0" * (EVENTS_MAX - len(slots.events([*begun, result(""), refused]))))
    in_place = slots.events([*begun, first, refused])
    assert len(in_place) == EVENTS_MAX
    assert slots.events([*begun, first, result("0" * 2_000, "t2")]) == in_place


@pytest.mark.soak  # `test_the_context_is_never_overrun` is shorter.
def test_results_end_no_session_whose_window_slides(start: random_model.Open) -> None:
    """A client that answers at length would lose its session, though the oldest is forgotten."""
    config = DuplexConfig(sliding_window="basic", generate_audio=False)
    told = attrs.evolve(opening(), config=config, tools=(), instructions="0" * 6_400)
    session = start(told)
    lengths = []
    for index in range(48):
        session.run_unit(unit(index, inputs=(result("0" * 980),) if index == 44 else ()))
        lengths.append(session.finalize(index, interrupted=False).kv_length)
    assert min(lengths) > 6_400
    assert lengths != sorted(lengths)


def test_the_context_is_never_overrun(tmp_path: Path) -> None:
    """The worst case of a unit has its events, its speech and its silent part."""
    narrow = random_model.load(tmp_path, IN_SLOTS, {"max_position_embeddings": 212}, slots=1)
    for words in sample(range(24), range(0, 24, 3)):  # The last unit begins at many distances.
        with opener(narrow, words) as open_one:
            short = random_model.opening(words, max_new_speak_tokens_per_chunk=1 + words % 2)
            said = attrs.evolve(short, instructions="x" * words)
            assert 100 < max(lengths(open_one(said))) <= 212


def lengths(session: BlockingSession) -> Iterator[int]:
    """The tokens of a session after each of its units, until one does not fit."""
    for index in range(40):
        try:
            session.run_unit(unit(index, inputs=ANSWERED[:1], force_listen=index % 2 == 1))
        except ContextFull:
            return
        made = session.finalize(index, interrupted=False)
        assert made.silent is not None
        assert made.silent.end != "failed"  # As beyond the memory's end.
        yield made.kv_length
    raise AssertionError("the context is never full")


def test_draws_are_of_the_unit_and_of_silence(
    start: random_model.Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of speech would shift with what is decided in silence, or repeat in each unit."""
    asked = list[tuple[int, int, str]]()

    def noted(seed: int, number: int, stage: str, count: int) -> Any:
        asked.append((seed, number, stage))
        return draws(seed, number, stage, count)

    monkeypatch.setattr(session_module, "draws", noted)
    run(start(opening(7)), 3)
    assert asked == [(7, 0, "silent"), (7, 1, "silent"), (7, 2, "silent")]


@pytest.mark.parametrize(
    ("tools", "why"),
    [
        ([Tool(name="t", parameters='{"type": "no"}')], r"tools: t: parameters.type 'no'"),
        ([Tool(name="t", description="x" * 4000)], r"with them the prompt has \d+ of 8192"),
    ],
)
def test_tools_that_cannot_be_offered_are_refused(
    start: random_model.Open, tools: list[Tool], why: str
) -> None:
    """The client learns which, before anything is fed."""
    with pytest.raises(BackendRefused, match=why):
        start(attrs.evolve(random_model.opening(1), tools=tuple(tools)))


def test_a_model_of_the_older_layout_has_no_tools(checkpoint: Path) -> None:
    """It was never trained to call any."""
    older = DuplexModel.load(checkpoint, slots=1)
    assert not older.info.duplex_tools
    assert "slots" not in older.info.fingerprint
    with opener(older, 1) as open_one, pytest.raises(BackendRefused, match="model has none"):
        open_one(opening())


def test_a_checkpoint_may_keep_the_older_layout_for_sessions_without_tools(tmp_path: Path) -> None:
    """What it has learnt in that would be lost, and its context would be full sooner."""
    folder = random_model.write_checkpoint(tmp_path, IN_SLOTS)
    path = folder / FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "always": False}))
    both = DuplexModel.load(folder, slots=2)
    assert both.info.duplex_tools
    plain = random_model.opening(1)
    with opener(both, 1) as open_one:
        session = open_one(plain)
        fed = [index for result, made in run(session) for index in (*result.fed_ids, *made.fed_ids)]
        assert not session.opened.takes_events
    assert not set(fed) & set(both.tokens.unchatted)
    with opener(both, 1) as open_one:
        session = open_one(opening())
        assert session.opened.takes_events
        assert run(session, 1)[0][1].silent is not None


def test_no_answer_of_chat_has_a_token_of_the_layout(model: DuplexModel) -> None:
    """Its weights decide them in sessions only, and their text is nothing."""
    tokens = model.tokens
    logits = np.zeros(tokens.size)
    logits[list(tokens.unchatted)] = 9.0
    for spoken in (True, False):
        chosen = decide_chat(
            Candidates(values=logits.copy()), (), 0.5, ChatConfig(), tokens, spoken=spoken
        )
        assert chosen not in tokens.unchatted
    assert tokens.slots is not None
    assert set(tokens.slots.of(*NEW)) <= set(tokens.unchatted)


def test_a_session_of_the_older_layout_is_not_swayed_by_the_tokens_of_slots(
    model: DuplexModel,
) -> None:
    """They took a part of the sample that ends a chunk, so it was ended less often."""
    older = copy.copy(model.tokens)
    older.slots = None
    numbers, ends = np.full(2, 0.4), older.ids.chunk_eos
    logits = np.zeros(older.size)
    logits[ends], logits[list(older.unchatted)] = 20.0, 22.0
    chosen = decide(Candidates(values=logits), (), numbers, DuplexConfig(), older)
    assert chosen == ends


def test_no_token_of_the_layout_is_text(model: DuplexModel) -> None:
    """A transcription would be full of marks that were never said."""
    slots = model.tokens.slots
    assert slots is not None
    assert model.tokens.control.issuperset(slots.ids.values())


def test_the_choices_of_a_checkpoint_are_in_its_fingerprint(tmp_path: Path) -> None:
    """A replay with another budget or other words would differ."""
    folder = random_model.write_checkpoint(tmp_path, IN_SLOTS)
    before = DuplexModel.load(folder, slots=1).info.fingerprint
    words = (folder / FILE).read_text()
    (folder / FILE).write_text(words.replace("by name", "by its name"))
    after = DuplexModel.load(folder, slots=1).info.fingerprint
    assert {name for name in before if before[name] != after[name]} == {"slots"}


@pytest.mark.parametrize("anyio_backend", ONE_LOOP)
@pytest.mark.anyio
async def test_sessions_on_an_engine_do_not_change_each_other(
    model: DuplexModel, start: random_model.Open
) -> None:
    """A call that depends on a neighbour could not be replayed."""
    backend, made = EngineBackend(model), dict[int, list[tuple[object, ...]]]()

    async def live(seed: int) -> None:
        session = await backend.open(opening(seed), slot=seed)
        assert isinstance(session, CallsTools)
        made[seed] = []
        for index in range(6):
            result = await session.run(heard(index))
            finalized = await session.finalize(index, interrupted=False)
            made[seed].append(plain(result, finalized))
        await session.release()

    async with anyio.create_task_group() as tasks:
        for seed in range(3):
            tasks.start_soon(live, seed)
    await backend.aclose()
    for seed, rows in made.items():
        assert rows == [plain(*one) for one in run(start(opening(seed)), 6)]
