"""Decoding in steps of fixed sizes: what a GPU would compute, on a CPU beside rows by themselves.

Flex attention runs here as its authors' reference, uncompiled. CUDA graphs are not tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from protocol.model import UNIT_SAMPLES, DuplexConfig, Opening, Unit, UnitResult, Voice
from runtime.backends.minicpmo.attention import KvSlots
from runtime.backends.minicpmo.audio import Hearing
from runtime.backends.minicpmo.checkpoint import build_parts
from runtime.backends.minicpmo.config import load_config
from runtime.backends.minicpmo.decode import BLOCK, Aim, Step, StepCache, Stepper, batches, stepper
from runtime.backends.minicpmo.machine import Decoder, Machine
from runtime.backends.minicpmo.model import DuplexModel
from runtime.backends.minicpmo.staging import known_phrases, stage_phrase
from runtime.backends.minicpmo.work import Feed, Hear, Recall, See, Speak
from tests import gpu

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

FIXTURES = Path(__file__).parents[1] / "fixtures"
HELDOUT = FIXTURES / "speech" / "heldout"
SLOTS = 3


def uncompiled(decoder: nn.Module, head: Callable[[Tensor], Tensor], store: KvSlots) -> Stepper:
    """Steps of two rows, and of all."""
    return Stepper(decoder, head, store, (2, SLOTS), flex_attention)


@pytest.fixture(scope="module")
def model() -> DuplexModel:
    return DuplexModel.load(FIXTURES / "tiny", slots=SLOTS)


@pytest.fixture(scope="module")
def stepping(model: DuplexModel) -> DuplexModel:
    """The same weights, decoded in steps."""
    machine = Machine(model.machine.parts, model.machine.vocoder, SLOTS, make_steps=uncompiled)
    return DuplexModel.of(machine, model.tokens, {})


@pytest.fixture
def machines(model: DuplexModel, stepping: DuplexModel) -> tuple[Machine, Machine]:
    for slot in range(SLOTS):
        model.machine.clear(slot)
        stepping.machine.clear(slot)
    return model.machine, stepping.machine


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.2


@pytest.mark.parametrize("slots", [1, 3, 4, 5, 48, 64, 65])
def test_the_largest_step_holds_everyone(slots: int) -> None:
    """Sessions would be left out, or steps be compiled that nobody needs."""
    sizes = batches(slots)
    assert sizes[-1] == slots
    assert list(sizes) == sorted(set(sizes))


@given(
    window=st.sampled_from([None, 1, 7, 128, 200]),
    where=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 4 * BLOCK - 1)), min_size=1, max_size=4
    ),
)
@settings(max_examples=60)
def test_a_row_sees_its_own_slot_up_to_its_place(
    window: int | None, where: list[tuple[int, int]]
) -> None:
    """A session would hear another's, or what is not there yet (B8)."""
    capacity = 4 * BLOCK
    store = KvSlots(layers=1, slots=4, heads=1, capacity=capacity, width=2, window=window)
    aim = Aim(store, len(where))
    aim.slots.copy_(torch.tensor([slot for slot, _ in where]))
    aim.places.copy_(torch.tensor([place for _, place in where]))
    aim.take()
    positions = torch.arange(4 * capacity)
    for row, (slot, place) in enumerate(where):
        begin = 0 if window is None else max(0, place - window + 1)
        wanted = set(range(slot * capacity + begin, slot * capacity + place + 1))
        sees = aim.mask.mask_mod(torch.tensor(row), torch.tensor(0), torch.tensor(0), positions)
        assert set(positions[sees].tolist()) == wanted
        count = int(aim.mask.kv_num_blocks[row, 0, 0])
        listed = aim.mask.kv_indices[row, 0, 0, :count].tolist()
        assert listed == sorted({position // BLOCK for position in wanted})
    assert aim.mask.full_kv_num_blocks is None  # See `Aim`: one processor would get them all.


@pytest.mark.parametrize("lengths", [(600, 20, 300), (128, 127)])
def test_a_step_gives_what_rows_by_themselves_give(
    machines: tuple[Machine, Machine], lengths: tuple[int, ...]
) -> None:
    """On a GPU sessions would say other things than on a CPU."""
    for slot, length in enumerate(lengths):
        rows = noise(length, 192, seed=slot)
        for machine in machines:
            machine.compute([Feed(slot=slot, start=0, rows=rows)])
    for step in range(3):
        works = [
            Feed(slot=slot, start=length + step, rows=noise(1, 192, seed=10 * step + slot))
            for slot, length in enumerate(lengths)
        ]
        plain, stepped = (machine.compute(works) for machine in machines)
        for one, other in zip(plain, stepped, strict=True):
            torch.testing.assert_close(one.hidden, other.hidden, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(
                one.logits.whole(), other.logits.whole(), rtol=1e-4, atol=1e-4
            )
    torch.testing.assert_close(
        machines[0].llm.keys, machines[1].llm.keys, rtol=1e-4, atol=1e-4
    )  # All of them: rows that fill a step up wrote nothing of their own.


def test_codes_are_decoded_in_steps_too(machines: tuple[Machine, Machine]) -> None:
    """Speech would be other sounds."""
    for step in range(3):
        works = [
            Speak(slot=slot, start=step, rows=noise(1, 128, seed=10 * step + slot))
            for slot in (2, 0)
        ]
        plain, stepped = (machine.compute(works) for machine in machines)
        for one, other in zip(plain, stepped, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


class Capturing(TorchDispatchMode):
    """Refuses what may not happen while a CUDA graph is captured.

    That is: values that leave the device, or come to it from Python, and results whose size depends
    on values.
    """

    REFUSED = ("_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        name = str(func)
        assert not any(f".{refused}." in f".{name}." for refused in self.REFUSED), name
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_a_step_can_be_captured(model: DuplexModel) -> None:
    """A GPU would refuse it, and every server with one would decode row by row."""

    def nothing(query: Tensor, *_args: object, **_options: object) -> Tensor:
        return query

    parts, machine = model.machine.parts, model.machine
    for decoder, head, store in (
        (parts.llm.model, parts.llm.lm_head, machine.llm),
        (parts.tts.model, parts.tts.logits, machine.tts),
    ):
        step = Step(decoder, head, store, 2, nothing)
        with torch.inference_mode(), Capturing() as capturing:
            step.compute()
        assert capturing.calls > 50
    machine.clear(0)
    with Capturing(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        torch.ones(1).item()
    with Capturing(), pytest.raises(AssertionError, match="lift_fresh"):
        torch.tensor([1])


class Elsewhere(TorchDispatchMode):
    """Refuses what reads from the host or writes to it, on a machine whose device is `meta`."""

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        out = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, out))
        assert {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)} <= {"meta"}, func
        return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_all_lies_on_the_device(dtype: torch.dtype) -> None:
    """A GPU would refuse an operation over two devices or formats, in mid-unit or amid a capture.

    Tensors without data stand in for its own: they know their device and their format.
    """
    device = torch.device("meta")
    parts = build_parts(load_config(FIXTURES / "tiny" / "config.json"), dtype, device)
    machine = Machine(parts, None, SLOTS)

    def flex(query: Tensor, keys: Tensor, values: Tensor, **_options: object) -> Tensor:
        assert query.dtype == keys.dtype == values.dtype == dtype
        return query

    feeds = [Feed(slot=slot, start=9, rows=parts.embed(range(13))) for slot in (0, 1)]
    speaks = [Speak(slot=2, start=0, rows=parts.tts.opening([(3, parts.embed((1,))[0])]))]
    for decoder, head, store, work in (
        (parts.llm.model, parts.llm.lm_head, machine.llm, feeds),
        (parts.tts.model, parts.tts.logits, machine.tts, speaks),
    ):
        step = Step(decoder, head, store, 2, flex)
        with torch.inference_mode():
            with Elsewhere():
                stepped = step.compute()
            for hidden, logits in (stepped, Decoder(decoder, head, store, None).run(work)):
                assert (hidden.dtype, logits.dtype) == (dtype, torch.float32)
    for request in (
        See(picture=torch.zeros(3, 448, 448)),
        Hear(hearing=Hearing(mel=torch.zeros(80, 104), slot=0, units=3)),
        Recall(pcm=torch.zeros(16_000)),
    ):
        (rows,) = machine.compute([request])
        assert (rows.dtype, rows.device) == (dtype, device)
    machine.clear(0)
    for ids in ((-1,), (640,), (3, -1), (640, 3)):  # Found on the host: a GPU would not recover.
        with pytest.raises(IndexError, match="not from 0 to 639"):
            parts.embed(ids)
    assert parts.embed(()).shape == (0, 192)


class OneLayer(nn.Module):
    """The least that a step can be made of: attention, and nothing else."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=heads * 16)

    def forward(self, inputs_embeds: Tensor, past_key_values: StepCache, **_: object) -> Any:
        rows = inputs_embeds.unflatten(2, (-1, 16)).transpose(1, 2)  # (B, heads, 1, 16)
        seen, _ = past_key_values.update(rows, rows, 0)
        return SimpleNamespace(last_hidden_state=seen.attend(rows, 1.0).flatten(2))


@pytest.fixture
def forgetful() -> Iterator[None]:
    """What torch compiled before does not count, nor what is compiled here after."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("forgetful")
def test_every_size_of_every_decoder_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch compiles a function for eight shapes: beyond 32 slots, speech would go row by row."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    slots = 33
    with torch.inference_mode():
        for heads in (2, 3):
            store = KvSlots(layers=1, slots=slots, heads=heads, capacity=BLOCK, width=16)
            made = stepper(OneLayer(heads), nn.Identity(), store)
            assert len(made.sizes) == 5
            for size in made.sizes:
                rows = noise(size, heads * 16, seed=size)
                hidden, _ = made.decode(list(rows), [(slot, 0) for slot in range(size)])
                torch.testing.assert_close(hidden, rows)  # Each sees itself alone.


def test_a_released_slot_is_empty(machines: tuple[Machine, Machine]) -> None:
    """What a step wrote would be left for the next session."""
    stepping = machines[1]
    works = [Feed(slot=slot, start=5, rows=noise(1, 192, seed=slot)) for slot in range(SLOTS)]
    stepping.compute(works)
    assert stepping.llm.keys[:, 1].any()
    stepping.clear(1)
    assert not stepping.llm.keys[:, 1].any()
    assert stepping.llm.keys[:, 0].any()


def play(model: DuplexModel) -> list[UnitResult]:
    """A phrase, its answer and its sound, unit by unit."""
    item = next(it for it in known_phrases(HELDOUT) if it.phrase == "tell me a joke")
    pcm, _ = stage_phrase(HELDOUT, item, 0)
    opening = Opening(instructions="Be brief.", voice=Voice(), config=DuplexConfig(), seed=1)
    session = model.open(opening)
    results = []
    for index, second in enumerate(pcm.reshape(-1, UNIT_SAMPLES)):
        unit = Unit(index=index, pcm=second.astype("<f4").tobytes())
        results.append(session.run_unit(unit))
        session.finalize(index, interrupted=False)
    session.release()
    return results


def test_a_log_tells_how_each_decoder_attends(model: DuplexModel) -> None:
    """A replay would take a speech decoder that fell back for one that did not."""

    def tokens_alone(
        decoder: nn.Module, head: Callable[[Tensor], Tensor], store: KvSlots
    ) -> Stepper:
        if decoder is not model.machine.parts.llm.model:
            raise RuntimeError("no memory for it")
        return uncompiled(decoder, head, store)

    machine = Machine(model.machine.parts, None, SLOTS, make_steps=tokens_alone)
    assert machine.attention == "sdpa, row by row; tokens by flex in steps of 2, 3"
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_session_says_the_same(model: DuplexModel, stepping: DuplexModel) -> None:
    """A step would round so far off that other words come."""
    plain, stepped = play(model), play(stepping)
    assert [result.fed_ids for result in stepped] == [result.fed_ids for result in plain]
    assert any(not result.is_listen for result in plain)
    for one, other in zip(plain, stepped, strict=True):
        sounds = (np.frombuffer(result.pcm, "<f4") for result in (one, other))
        assert np.array_equal(*sounds)


def test_what_is_run_first_on_a_gpu_runs(model: DuplexModel) -> None:
    """The first minutes with a GPU would go into mending the script that is to use them."""
    found: dict[str, object] = {}
    machine = Machine(model.machine.parts, None, SLOTS, make_steps=uncompiled)
    gpu.measure(machine, lambda name, value: found.update({name: value}))
    off = [value for name, value in found.items() if name.endswith("off by")]
    assert len(off) == 4
    assert all(float(part) < 1e-3 for parts in off for part in parts)  # type: ignore[attr-defined]
    assert "a picture, ms" in found


def test_where_no_step_can_be_made_rows_are_decoded_one_by_one(
    model: DuplexModel, caplog: pytest.LogCaptureFixture
) -> None:
    """A driver that cannot capture would keep the server from starting."""

    def broken(_decoder: nn.Module, _head: Callable[[Tensor], Tensor], _store: KvSlots) -> Stepper:
        raise RuntimeError("no kernel image")

    machine = Machine(model.machine.parts, None, 1, make_steps=broken)
    assert machine.attention == "sdpa, row by row"
    (fed,) = machine.compute([Feed(slot=0, start=0, rows=noise(1, 192, seed=0))])
    model.machine.clear(0)
    (wanted,) = model.machine.compute([Feed(slot=0, start=0, rows=noise(1, 192, seed=0))])
    assert torch.equal(fed.logits.whole(), wanted.logits.whole())
    assert caplog.text.count("decodes row by row") == 2
    assert "no kernel image" in caplog.text
