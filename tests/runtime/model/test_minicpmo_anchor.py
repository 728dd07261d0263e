"""A request with streaming input on the model: what is fed, what is left out, what stays exact."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.values.model import Costs, Picture, Sound, Text
from runtime.model.backends.base import BackendError, BackendRefused, ContextFull
from runtime.model.backends.minicpmo.anchor import Anchor
from runtime.model.backends.minicpmo.audio import EncodeAudio
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.runner import ModelRunner
from runtime.model.backends.minicpmo.work import EncodeImage, Feed, Work
from runtime.model.backends.streams import (
    Anchoring,
    Extended,
    ParameterError,
    Part,
    Sampled,
    SamplingParams,
    TokenIds,
)
from tests.models import random_model
from tests.models.blocking import alone
from tests.models.random_model import SMALL, changed, picture, sound
from tests.project.sampling import sample

LONG = changed(SMALL, {"max_position_embeddings": 8192})
SEEDS = st.integers(-(2**63), 2**63 - 1)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> DuplexModel:
    """As small as can be, with room for 256 tokens; the encoder starts over every 3 seconds."""
    return DuplexModel.load(checkpoint, slots=4)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> DuplexModel:
    """Of the widths of `tiny`, so that its matrix products take the same kernels."""
    return random_model.load(tmp_path_factory.mktemp("model"), slots=4)


def params(max_tokens: int = 1, **what: Any) -> SamplingParams:
    """Sampling that nothing but its length ends, and that no chance decides."""
    return SamplingParams(
        **{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **what}
    )


def ids(*values: int) -> TokenIds:
    return TokenIds(ids=values)


@attrs.define
class Driven:
    """A request that is driven alone.

    Attributes:
        model: it runs on.
        anchor: its state.
        steps: all that was sampled.
        fed: rows fed to the language model, block by block: where to, and how many.
    """

    model: DuplexModel
    anchor: Anchor
    steps: list[Sampled] = attrs.field(factory=list)
    fed: list[tuple[int, int]] = attrs.field(factory=list)

    def add(self, *prompt: Part, how: SamplingParams | None = None) -> Extended:
        """Extend it."""
        asked = how or params()
        return alone(self.anchor.extend(prompt, asked, self.steps.append), self._compute)

    def _compute(self, works: Sequence[Work]) -> list[Any]:
        self.fed += [(work.start, len(work.rows)) for work in works if isinstance(work, Feed)]
        return self.model.compute(works)


def anchored(model: DuplexModel, slot: int = 0, **what: Any) -> Driven:
    """A request in a slot, of whatever another test left in it."""
    model.runner.clear(slot)
    anchoring = Anchoring(**{"request_id": "a", **what})
    return Driven(model, model.anchor(anchoring, slot=slot))


def held(model: DuplexModel, slot: int, length: int | None = None) -> torch.Tensor:
    """Keys and values of the language model in a slot, up to a length."""
    store = model.runner.llm
    return torch.stack((store.keys[:, slot, :, :length], store.values[:, slot, :, :length]))


def wiped(model: DuplexModel, slot: int) -> bool:
    """Nothing is left in any memory of a slot."""
    stores = (model.runner.llm, model.runner.audio, model.runner.tts)
    return not any(bool(s.keys[:, slot].any() or s.values[:, slot].any()) for s in stores)


def facts(done: Extended) -> Extended:
    """A result without its costs, which no two runs share."""
    return attrs.evolve(done, costs=Costs())


# -- the discard rule -----------------------------------------------------------------------------


def test_the_worked_example(wide: DuplexModel) -> None:
    """Tokens would be computed twice, or the last one be counted as heard by the model."""
    request = anchored(wide)
    a1, a2, a3 = (10, 11, 12), (20, 21), (30, 31)
    (d1,) = request.add(ids(*a1), how=params(1)).token_ids
    c2, d2, e2 = request.add(ids(*a2), how=params(3)).token_ids
    c3, d3 = request.add(ids(*a3), how=params(2)).token_ids
    emitted = [(step.chunk, step.token_id, step.computed_tokens) for step in request.steps]
    assert emitted == [(0, d1, 3), (1, c2, 2), (1, d2, 1), (1, e2, 1), (2, c3, 2), (2, d3, 1)]
    assert [step.reason for step in request.steps] == [
        "length",
        None,
        None,
        "length",
        None,
        "length",
    ]
    assert request.fed == [(0, 3), (3, 2), (5, 1), (6, 1), (7, 2), (9, 1)]
    assert request.anchor.length == 10

    cumulative = (*a1, *a2, c2, d2, *a3, c3)
    fresh = anchored(wide, slot=1)
    fresh.add(ids(*cumulative))
    torch.testing.assert_close(held(wide, 0, 10), held(wide, 1, 10), rtol=0, atol=1e-5)
    again = anchored(wide, slot=2)  # The same rows in the same blocks: bit by bit.
    for part in (a1, a2, (c2,), (d2,), a3, (c3,)):
        again.add(ids(*part))
    assert torch.equal(held(wide, 0), held(wide, 2))
    assert again.steps[-1].token_id == d3


def test_the_terminator_is_carried_over(wide: DuplexModel) -> None:
    """A model that needs its stop token fed back would lose its thread at each chunk."""
    carrying, plain = anchored(wide, carry_terminator=True), anchored(wide, slot=1)
    (d1,) = carrying.add(ids(1, 2, 3)).token_ids
    done = carrying.add(ids(4, 5), how=params(2))
    assert done.fed_ids == (d1, 4, 5)
    assert [step.computed_tokens for step in carrying.steps] == [3, 3, 1]
    assert carrying.anchor.length == 7
    plain.add(ids(1, 2, 3))
    assert plain.add(ids(d1, 4, 5), how=params(2)).token_ids == done.token_ids
    assert torch.equal(held(wide, 0), held(wide, 1))


def test_a_carried_token_alone_goes_on(model: DuplexModel) -> None:
    """Whoever wants the next few tokens without adding anything could not have them."""
    request = anchored(model, carry_terminator=True)
    request.add(ids(1, 2))
    assert request.add(how=params(2)).prompt_tokens == 1


@st.composite
def chunks(draw: st.DrawFn) -> list[tuple[tuple[int, ...], SamplingParams]]:
    """Chunks of ids, each with its own sampling, that together fit."""
    return [
        (
            tuple(draw(st.lists(st.integers(0, 285), min_size=1, max_size=9))),
            params(
                draw(st.integers(1, 6)),
                temperature=draw(st.sampled_from((0.0, 0.7, 3.0))),
                top_k=draw(st.sampled_from((0, 1, 20))),
                top_p=draw(st.sampled_from((1.0, 0.5))),
                seed=draw(SEEDS),
                stop_token_ids=draw(st.lists(st.integers(0, 300), max_size=60)),
            ),
        )
        for _ in range(draw(st.integers(1, 8)))
    ]


@settings(max_examples=sample(60, 20))
@given(what=chunks(), carries=st.booleans(), others=st.integers(1, 3))
def test_nothing_is_computed_twice(
    model: DuplexModel,
    what: list[tuple[tuple[int, ...], SamplingParams]],
    carries: bool,
    others: int,
) -> None:
    """A long request would become slower and slower, or its memory hold what nobody said."""
    request = anchored(model, carry_terminator=carries)
    known: list[int] = []
    for prompt, how in what:
        done = request.add(ids(*prompt), how=how)
        carried = done.fed_ids[: len(done.fed_ids) - len(prompt)]
        assert len(carried) == (carries and done.chunk > 0)
        known += [*carried, *prompt, *done.token_ids[:-1]]
        assert done.kv_length == request.anchor.length == len(known)
        assert done.prompt_tokens == len(prompt) + len(carried)
        ends = done.token_ids[-1] in how.stop_token_ids
        assert done.reason == ("stop" if ends else "length")
        assert not set(done.token_ids[:-1]) & set(how.stop_token_ids)
        assert len(done.token_ids) == how.max_tokens or ends
    starts = [start for start, _ in request.fed]
    assert starts == sorted(set(starts))
    assert sum(count for _, count in request.fed) == len(known)
    assert sum(step.computed_tokens for step in request.steps) == len(known)

    fresh = anchored(model, slot=others)
    fresh.add(ids(*known))
    length = len(known)
    torch.testing.assert_close(held(model, 0, length), held(model, others, length))
    text = "".join(step.text for step in request.steps) + request.anchor.rest()
    assert text == model.tokens.decode([step.token_id for step in request.steps])
    request.anchor.release()
    fresh.anchor.release()
    assert wiped(model, 0)


# -- sampling -------------------------------------------------------------------------------------


def test_a_draw_is_of_the_seed_the_request_the_chunk_and_the_step(model: DuplexModel) -> None:
    """Two requests of one seed would say the same, or one of them not the same again."""

    def said(seed: int = 1, before: int = 0, **what: Any) -> tuple[int, ...]:
        request = anchored(model, **what)
        for _ in range(before):
            request.add(ids(1))
        done = request.add(ids(9, 9), how=params(8, temperature=5.0, seed=seed))
        request.anchor.release()
        return done.token_ids

    assert said() == said()
    assert len({said(), said(seed=2), said(request_id="b"), said(before=1)}) == 4


def test_each_chunk_is_sampled_as_it_asks(model: DuplexModel) -> None:
    """One chunk's temperature would be another's."""
    request, other = anchored(model), anchored(model, slot=1)
    hot = params(4, temperature=50.0, seed=3)
    assert request.add(ids(1), how=hot).token_ids != other.add(ids(1), how=params(4)).token_ids
    top = params(4, temperature=50.0, top_k=1)
    request, other = anchored(model, slot=2), anchored(model, slot=3)
    assert request.add(ids(1), how=top).token_ids == other.add(ids(1), how=params(4)).token_ids


def test_the_model_s_own_endings_stop_a_chunk(
    model: DuplexModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that has said all would go on with what comes behind an answer."""
    request = anchored(model)
    monkeypatch.setattr(model.tokens, "endings", frozenset(range(model.tokens.size)))
    done = request.add(ids(1, 2), how=params(5, ignore_eos=False))
    assert (done.reason, len(done.token_ids)) == ("stop", 1)
    assert len(request.add(ids(3), how=params(5)).token_ids) == 5


def test_ids_that_the_tokenizer_lacks_are_never_sampled(model: DuplexModel) -> None:
    """A client would be sent an id that stands for nothing."""
    request = anchored(model)
    done = request.add(ids(1), how=params(200, temperature=100.0, seed=7))
    assert max(done.token_ids) < model.tokens.size < model.runner.config.llm.vocab_size


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "several answers": ({"n": 2}, "n is 2"),
    "texts that stop": ({"stop": ["."]}, "stop has texts"),
    "one text that stops": ({"stop": "."}, "stop has texts"),
    "the end alone": ({"output_kind": "final_only"}, "output_kind is 'final_only'"),
    "no tokens": ({"max_tokens": 0}, "max_tokens is 0"),
    "half a token": ({"max_tokens": 1.5}, "max_tokens is a float"),
    "a truth as a number": ({"max_tokens": True}, "max_tokens is a bool"),
    "cold": ({"temperature": -0.1}, "temperature is -0.1"),
    "no number": ({"temperature": float("nan")}, "temperature is nan"),
    "text as a number": ({"temperature": "0"}, "temperature is a str"),
    "no mass": ({"top_p": 0.0}, "top_p is 0.0"),
    "too much mass": ({"top_p": 1.1}, "top_p is 1.1"),
    "fewer than none": ({"top_k": -1}, "top_k is -1"),
    "a negative id": ({"stop_token_ids": (3, -1)}, r"stop_token_ids\[1\] is -1"),
    "too many ids": ({"stop_token_ids": range(2000)}, "stop_token_ids has 2000 ids"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_params_that_are_refused(case: str) -> None:
    """Whoever asks for what cannot be had would be given something else in silence."""
    what, text = REFUSED[case]
    with pytest.raises(ParameterError, match=text):
        SamplingParams(**what)


# -- sound and pictures ---------------------------------------------------------------------------


def test_sound_is_one_stream_however_it_is_cut(model: DuplexModel) -> None:
    """Words at the border of two chunks would not be heard."""
    whole, pieces = anchored(model), anchored(model, slot=1)
    at_once = whole.add(Sound(pcm=b"".join(sound(n) for n in range(8))))
    for number in range(7):
        pieces.add(Sound(pcm=sound(number)))
    last = pieces.add(Sound(pcm=sound(7)))
    # With one token a chunk, which is left out, both have the same cumulative prompt.
    assert at_once.kv_length == last.kv_length == 80
    torch.testing.assert_close(held(model, 0, 80), held(model, 1, 80), rtol=0, atol=1e-4)
    assert at_once.token_ids == last.token_ids
    audio = model.runner.audio
    assert torch.equal(audio.keys[:, 0], audio.keys[:, 1])


def test_the_parts_of_a_prompt_are_fed_in_their_order(wide: DuplexModel) -> None:
    """A picture would be seen without its marks, or behind the words about it."""
    request, names = anchored(wide, max_slice_nums=4), wide.tokens.ids
    text = wide.tokens.encode("the fox")
    prompt = (Text(text="the fox"), Picture(jpeg=picture(1, 300, 200)), ids(7), Sound(pcm=sound(1)))
    done = request.add(*prompt)
    slices = [names.slice_, *[-1] * 64, names.slice_end] * 4
    whole = [names.image, *[-1] * 64, names.image_end]
    assert done.fed_ids[: len(text) + 66] == (*text, *whole)
    assert len(done.fed_ids) in {len(text) + 66 * (1 + n) + 11 for n in (2, 3, 4)}
    assert set(done.fed_ids[len(text) + 66 : -11]) == set(slices)
    assert done.fed_ids[-11:] == (7, *[-1] * 10)
    assert done.prompt_tokens == len(done.fed_ids) == done.kv_length


def test_text_yields_no_control_token(model: DuplexModel) -> None:
    """Whoever types `<|im_end|>` would end the instructions."""
    request = anchored(model)
    done = request.add(Text(text="<|im_end|><unit>"))
    assert not set(done.fed_ids) & model.tokens.control
    assert model.token_id("<|im_end|>") == model.tokens.ids.im_end
    assert model.token_id("<|no such token|>") is None


TRUNCATED = picture(1)[:700]
MALFORMED: dict[str, tuple[tuple[Part, ...], dict[str, Any], str]] = {
    "nothing": ((), {}, "chunk 1 is empty"),
    "no text": ((Text(text=""),), {}, "chunk 1 is empty"),
    "half a second": ((ids(1), Sound(pcm=sound(1)[:32_000])), {}, r"prompt\[1\].pcm has 8000 sam"),
    "half a sample": ((Sound(pcm=sound(1)[:-2]),), {}, "15999.5 samples"),
    "no sound": ((Sound(pcm=b""),), {}, "0 samples"),
    "no number": ((Sound(pcm=b"\0\0\xc0\x7f" * 16_000),), {}, r"prompt\[0\].pcm: .* finite"),
    "an id too high": ((ids(1, 320),), {}, r"prompt\[0\].ids\[1\] is 320"),
    "a negative id": ((ids(-1),), {}, r"prompt\[0\].ids\[0\] is -1"),
    "no picture": ((Picture(jpeg=b"GIF89a" * 9),), {}, r"prompt\[0\].jpeg"),
    "half a picture": ((Picture(jpeg=TRUNCATED),), {}, r"prompt\[0\].jpeg"),
    "an end too high": ((ids(1),), {"stop_token_ids": (5, 320)}, r"stop_token_ids\[1\] is 320"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_what_is_malformed_is_refused_by_its_path(model: DuplexModel, case: str) -> None:
    """One bad chunk would crash the engine, or spoil the memory of the request for good."""
    prompt, how, text = MALFORMED[case]
    request, other = anchored(model), anchored(model, slot=1)
    for each in (request, other):
        each.add(Sound(pcm=sound(0)))
    with pytest.raises(BackendRefused, match=text):
        request.add(*prompt, how=params(**how))
    assert facts(request.add(ids(3, 4), how=params(3))) == facts(
        other.add(ids(3, 4), how=params(3))
    )


# -- the end of the context -----------------------------------------------------------------------


def test_a_prompt_that_does_not_fit_feeds_nothing(model: DuplexModel) -> None:
    """The model would overrun its memory, or decode what it has no room for."""
    request = anchored(model)
    request.add(ids(*range(200)))
    before = held(model, 0)
    for prompt in (
        (ids(*range(57)),),
        (Sound(pcm=sound(1) * 6),),
        (Picture(jpeg=picture(1)),),
        (Text(text="x" * 1000),),
        (Text(text="x" * 1_000_000),),
        (ids(*range(50)), Sound(pcm=sound(1))),
    ):
        with pytest.raises(ContextFull):
            request.add(*prompt)
    assert torch.equal(held(model, 0), before)
    assert request.add(ids(*range(56)), how=params(9)).reason == "context_full"


@given(length=st.integers(1, 256), tokens=st.integers(1, 300))
@settings(max_examples=sample(30, 10))
def test_the_context_ends_amid_an_answer(model: DuplexModel, length: int, tokens: int) -> None:
    """The last free place would be left empty, or one too many be written."""
    request = anchored(model)
    done = request.add(ids(*[5] * length), how=params(tokens))
    room = 256 - length
    assert len(done.token_ids) == min(tokens, room + 1)
    assert done.reason == ("length" if tokens <= room + 1 else "context_full")
    assert done.kv_length == min(length + tokens - 1, 256)
    if done.kv_length == 256:
        with pytest.raises(ContextFull):
            request.add(ids(1))
    request.anchor.release()


# -- failure, cuts, and what is left --------------------------------------------------------------

EVERYTHING = (Picture(jpeg=picture(1)), Sound(pcm=sound(1)), Text(text="the fox"))


@pytest.mark.parametrize("kind", [EncodeImage, EncodeAudio, Feed])
@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "failed"])
def test_a_chunk_that_is_cut_or_fails_leaves_the_slot_empty(
    model: DuplexModel, kind: type[Work], is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a client said would be found by the next one in its slot."""
    request, real = anchored(model, slot=2), ModelRunner.compute
    request.add(ids(1, 2, 3))
    count = 0

    def compute(runner: ModelRunner, works: Sequence[Work]) -> list[Any]:
        nonlocal count
        if isinstance(works[0], kind):
            count += 1
            if is_cut:
                request.anchor.interrupt()
            else:
                raise RuntimeError("the device failed")
        return real(runner, works)

    monkeypatch.setattr(ModelRunner, "compute", compute)
    with pytest.raises(BackendError, match="was cut" if is_cut else "chunk 1 failed: the device"):
        request.add(*EVERYTHING, how=params(5))
    assert count == 1
    assert wiped(model, 2)
    monkeypatch.undo()
    with pytest.raises(BackendError, match="the request is failed"):
        request.add(ids(1))
    request.anchor.release()
    fresh, other = anchored(model, slot=2), anchored(model, slot=3)
    assert facts(fresh.add(ids(9), how=params(5))) == facts(other.add(ids(9), how=params(5)))


def test_a_cut_between_chunks_is_for_good(model: DuplexModel) -> None:
    """A request that was given up would go on with the chunk that was on its way."""
    request = anchored(model)
    request.add(ids(1))
    request.anchor.interrupt()
    with pytest.raises(BackendError, match="the request was cut"):
        request.add(ids(2))
    request.anchor.release()
    request.anchor.release()
    with pytest.raises(BackendError, match="the request is released"):
        request.add(ids(2))


def test_many_chunks_leave_memory_as_it_was(tmp_path: Path) -> None:
    """An hour of a request would take more and more of the server."""
    request = anchored(random_model.load(tmp_path, LONG, slots=1))

    def grown(chunks: int) -> tuple[int, int]:
        for number in range(chunks):
            request.add(Sound(pcm=sound(number % 7)), how=params(1 + number % 4, temperature=1.0))
            request.steps.clear()
            request.fed.clear()
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        dense = [each for each in tensors if each.layout is torch.strided]  # others' may be sparse
        return sum(each.nbytes for each in dense), tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        first, last = grown(40), grown(sample(160, 40))
    finally:
        tracemalloc.stop()
    assert last[0] <= first[0] + 4 * 30 * 16_000, "more than the front end's 30 seconds of sound"
    assert last[1] <= first[1] + 100_000
