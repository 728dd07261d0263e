"""Long sessions: the sliding windows, and the encoder that starts over after 29 units."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from protocol.values.model import SlidingWindow
from runtime.model.backends.base import BackendError, ContextFull
from runtime.model.backends.minicpmo.audio import EncodeAudio
from runtime.model.backends.minicpmo.config import UNIT_FRAMES
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.runner import ModelRunner
from runtime.model.backends.minicpmo.state import (
    MARKER,
    PREVIOUS_TOKENS,
    Layout,
    SessionState,
    Span,
    rotate,
    slide,
)
from runtime.model.backends.minicpmo.work import Feed, Work
from tests.models import random_model
from tests.models.blocking import BlockingSession, alone, open_session
from tests.models.random_model import facts, opening, picture, unit
from tests.project.sampling import sample

WIDTH = 192


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DuplexModel:
    return random_model.load(tmp_path_factory.mktemp("model"), slots=2)


@pytest.fixture
def runner(model: DuplexModel) -> ModelRunner:
    for slot in range(model.info.slots):
        model.runner.clear(slot)
    return model.runner


def run(session: BlockingSession, first: int, end: int, **what: Any) -> list[tuple[Any, ...]]:
    rows = []
    for index in range(first, end):
        result = session.run_unit(unit(index, 3, **what))
        done = session.finalize(index, interrupted=False)
        rows.append((*facts(result), done.kv_length))
    return rows


# -- what is kept ---------------------------------------------------------------------------------


def layout(*lengths: int, prefix: int = 40, said: int = 0) -> Layout:
    """Finalized units of these lengths; each said so many tokens, numbered through."""
    spans = tuple(
        Span(length=length, text_ids=tuple(range(said * index, said * (index + 1))))
        for index, length in enumerate(lengths)
    )
    return Layout(prefix=prefix, suffix=(1,), spans=spans)


def slid(model: DuplexModel, before: Layout, policy: SlidingWindow) -> Layout:
    """The layout after a slide of a slot that holds nothing but zeros."""
    state = SessionState(layout=before, length=before.length)
    steps = slide(model.runner, model.tokens, 0, state, policy)
    after = alone(steps, model.compute)
    assert after.length == after.layout.length
    return after.layout


def test_basic_keeps_all_up_to_eight_thousand(model: DuplexModel, runner: ModelRunner) -> None:
    """A session would forget what still fits."""
    full = layout(*[79] * 100, 59)
    assert full.length == 8000
    assert slid(model, full, "basic") == full


def test_basic_drops_the_oldest_down_to_six_thousand(
    model: DuplexModel, runner: ModelRunner
) -> None:
    """A session would end, or forget the wrong end of it."""
    full = layout(*[79] * 100, 60, 13)
    after = slid(model, full, "basic")
    assert after.prompt == full.prompt
    assert after.length <= 6000 < after.length + 79
    assert after.spans == full.spans[-len(after.spans) :]


@pytest.mark.parametrize("policy", ["basic", "context"])
def test_room_is_made_for_a_unit_as_large_as_the_largest(
    model: DuplexModel, runner: ModelRunner, policy: SlidingWindow
) -> None:
    """A session with large pictures would end, though its client asked for a window."""
    full = layout(*[640] * 12, 13)
    assert full.length <= 8000
    assert full.length + 640 > model.info.context_limit
    after = slid(model, full, policy)
    assert after.length + 640 <= model.info.context_limit
    assert after.spans == full.spans[-len(after.spans) :]


def test_context_keeps_twenty_four_units(model: DuplexModel, runner: ModelRunner) -> None:
    """The window would be of another length than the model knows."""
    full = layout(*range(13, 13 + 24))
    assert slid(model, full, "context") == full
    after = slid(model, layout(*range(13, 13 + 27)), "context")
    assert [span.length for span in after.spans] == list(range(16, 16 + 24))
    assert after.previous == ()


def test_context_moves_what_was_said_into_the_prompt(
    model: DuplexModel, runner: ModelRunner
) -> None:
    """The model would forget its own words."""
    marker = tuple(model.tokens.encode(MARKER))
    after = slid(model, layout(*[20] * 26, said=3), "context")
    assert after.previous == (*marker, 0, 1, 2, 3, 4, 5)
    assert after.prompt == 40 + len(marker) + 6 + 1
    further = attrs.evolve(after, spans=(*after.spans, Span(length=20)))
    assert slid(model, further, "context").previous == (*marker, *range(9))


def test_context_keeps_the_last_five_hundred_tokens_said(
    model: DuplexModel, runner: ModelRunner
) -> None:
    """The prompt would grow until nothing else fits."""
    marker = tuple(model.tokens.encode(MARKER))
    after = slid(model, layout(*[60] * 54, said=10, prefix=10), "context")
    assert after.previous == (*marker, *range(300))
    grown = attrs.evolve(
        after, spans=(Span(length=9, text_ids=tuple(range(300, 319))),) * (24 + 12)
    )
    last = slid(model, grown, "context").previous
    assert len(last) == len(marker) + PREVIOUS_TOKENS == len(marker) + 500
    assert last[: len(marker)] == marker
    assert last[-19:] == tuple(range(300, 319))


def test_off_keeps_everything(model: DuplexModel, runner: ModelRunner) -> None:
    """A session that asked for no window would forget."""
    full = layout(*[79] * 101)
    assert slid(model, full, "off") == full


# -- what is moved --------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "distance"), [(7000, -6500), (100, -1), (50, 200), (3, 0)])
def test_a_turned_key_is_the_key_of_its_new_place(
    model: DuplexModel, start: int, distance: int
) -> None:
    """After a slide the model would look for its past in the wrong places."""
    rotary = model.runner.parts.llm.model.rotary_emb
    plain = torch.randn(1, 2, 20, 32, generator=torch.Generator().manual_seed(1))

    def at(first: int) -> Tensor:
        cos, sin = rotary(plain, torch.arange(first, first + 20)[None])
        key: Tensor = apply_rotary_pos_emb(plain, plain, cos, sin)[1]
        return key

    turned = rotate(at(start), distance, rotary.inv_freq)
    # An angle is rounded to float32, so that its error grows with the position.
    tolerance = 1e-5 + 4e-7 * max(start, start + distance)
    torch.testing.assert_close(turned, at(start + distance), rtol=0, atol=tolerance)


def fill(runner: ModelRunner, slot: int, rows: Tensor) -> None:
    at = 0
    for block in torch.split(rows, 64):
        runner.compute([Feed(slot=slot, start=at, rows=block)])
        at += len(block)


@pytest.mark.parametrize("policy", ["basic", "context"])
def test_what_is_kept_lies_as_if_fed_there(
    model: DuplexModel, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, policy: SlidingWindow
) -> None:
    """After a slide the model would answer from a garbled past."""
    monkeypatch.setattr("runtime.model.backends.minicpmo.state.BASIC_HIGH", 100)
    monkeypatch.setattr("runtime.model.backends.minicpmo.state.BASIC_LOW", 70)
    monkeypatch.setattr("runtime.model.backends.minicpmo.state.CONTEXT_UNITS", 4)
    embed, store = runner.parts.embed, runner.llm
    before = layout(13, 20, 13, 17, 13, 21, prefix=10, said=2)
    rows = torch.randn(before.length, WIDTH, generator=torch.Generator().manual_seed(5))
    fill(runner, 0, rows)
    old_values = store.values[:, 0].clone()
    state = SessionState(layout=before, length=before.length)
    after = alone(slide(runner, model.tokens, 0, state, policy), model.compute)
    new = after.layout
    kept = new.length - new.prompt
    assert 0 < kept < before.length - before.prompt
    prompt = rows[: before.prompt]
    if policy == "context":
        assert new.previous
        prompt = torch.cat((rows[: before.prefix], embed((*new.previous, *new.suffix))))
    fill(runner, 1, torch.cat((prompt, rows[-kept:])))
    # The keys of the first layer depend on nothing but their row and its place.
    torch.testing.assert_close(store.keys[0, 0], store.keys[0, 1], rtol=0, atol=1e-5)
    moved = store.values[:, 0, :, new.prompt : new.length]
    assert torch.equal(moved, old_values[:, :, before.length - kept : before.length])
    assert not store.keys[:, 0, :, new.length :].any()
    assert not store.values[:, 0, :, new.length :].any()


# -- sessions -------------------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that slide within a few units."""
    shorten(monkeypatch)


def shorten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("runtime.model.backends.minicpmo.state.BASIC_HIGH", 100)
    patch.setattr("runtime.model.backends.minicpmo.state.BASIC_LOW", 60)
    patch.setattr("runtime.model.backends.minicpmo.state.CONTEXT_UNITS", 2)


Straight = Callable[[SlidingWindow], list[tuple[Any, ...]]]


@pytest.fixture(scope="module")
def straight(model: DuplexModel) -> Straight:
    """Runs twelve units with short windows, once for each policy."""

    @functools.cache
    def run_once(policy: SlidingWindow) -> list[tuple[Any, ...]]:
        session = open_session(model, opening(3, sliding_window=policy, generate_audio=False))
        with pytest.MonkeyPatch.context() as patch:
            shorten(patch)
            rows = run(session, 0, 12)
        session.release()
        return rows

    return run_once


@pytest.mark.parametrize("policy", sample(["basic", "context"], ["basic"]))
def test_a_session_goes_on_over_its_window(straight: Straight, policy: SlidingWindow) -> None:
    """A long session would end, though its client asked for a window."""
    assert straight(policy)[-1][-1] < straight("off")[-1][-1]


@pytest.mark.parametrize("policy", sample(["basic", "context"], ["context"]))
def test_rollback_is_exact_over_a_slide(
    model: DuplexModel, runner: ModelRunner, straight: Straight, short: None, policy: SlidingWindow
) -> None:
    """After `inference_error` a long session would go on from a garbled past (B3)."""
    session, rows = open_session(model, opening(3, sliding_window=policy, generate_audio=False)), []
    for index in range(8):
        session.run_unit(unit(index, 9, frames=(picture(1),)))
        session.rollback(index)
        rows += run(session, index, index + 1)
    session.release()
    assert rows == straight(policy)[:8]


def test_a_session_without_a_window_ends_in_order(model: DuplexModel, runner: ModelRunner) -> None:
    """It would overrun its slot in mid-unit (B10)."""
    session = open_session(model, attrs.evolve(opening(), instructions="x" * 8120))
    fits = (8192 - session.opened.prompt_length - 32) // 13 + 1
    run(session, 0, fits, force_listen=True)
    with pytest.raises(ContextFull):
        session.run_unit(unit(fits, force_listen=True))
    session.release()


def test_rollback_is_exact_where_the_encoder_starts_over(
    model: DuplexModel, runner: ModelRunner
) -> None:
    """A unit that fails half a minute into a session would leave it half deaf (B3)."""
    listens = opening(3, force_listen_count=100)
    session = open_session(model, listens)
    straight = run(session, 0, 33)
    session.release()
    session = open_session(model, listens)
    rows = run(session, 0, 29)
    block = runner.first_block(session.slot)
    session.run_unit(unit(29, 9))
    assert not torch.equal(runner.first_block(session.slot).keys, block.keys)
    session.rollback(29)
    assert torch.equal(runner.first_block(session.slot).keys, block.keys)
    assert torch.equal(runner.first_block(session.slot).values, block.values)
    rows += run(session, 29, 33)
    session.release()
    assert rows == straight


def test_rollback_is_exact_where_starting_over_failed_midway(
    model: DuplexModel, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, where the fault comes once the encoder has written."""
    listens = opening(3, force_listen_count=100)
    session = open_session(model, listens)
    straight = run(session, 0, 31)
    session.release()
    session = open_session(model, listens)
    rows = run(session, 0, 29)

    def compute(works: list[Work]) -> list[Any]:
        answers = runner.compute(works)
        if isinstance(works[0], EncodeAudio):
            raise RuntimeError("the device failed")
        return answers

    with monkeypatch.context() as patch:
        patch.setattr(model, "compute", compute)
        with pytest.raises(BackendError, match="device"):
            session.run_unit(unit(29, 9))
    session.rollback(29)
    rows += run(session, 29, 31)
    session.release()
    assert rows == straight


def test_rollback_is_exact_where_the_copy_failed(
    model: DuplexModel, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unit before, which was finished, would be undone too, without a word."""
    session = open_session(model, opening(3, force_listen_count=100))
    run(session, 0, 29)

    def fail(slot: int) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(runner, "first_block", fail)
        with pytest.raises(MemoryError):
            session.run_unit(unit(29, 9))
    session.rollback(29)
    rows = run(session, 29, 30)
    session.release()
    session = open_session(model, opening(3, force_listen_count=100))
    assert run(session, 0, 30)[-1:] == rows
    session.release()


def test_the_encoder_forgets_after_twenty_nine_units(
    model: DuplexModel, runner: ModelRunner
) -> None:
    """A session of minutes would hear otherwise than the public code, or overrun its slot."""
    assert runner.audio.capacity == 29 * UNIT_FRAMES
    starts: list[int] = []
    compute = runner.compute

    def watched(works: list[Work]) -> list[Any]:
        starts.extend(work.units for work in works if isinstance(work, EncodeAudio))
        return compute(works)

    session = open_session(model, opening(3, force_listen_count=100))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "compute", watched)
        run(session, 0, 32)
    session.release()
    assert starts == [*range(29), 0, 1, 2]
