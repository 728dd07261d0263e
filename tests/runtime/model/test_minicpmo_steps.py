"""Steps of fixed sizes and attention in one call: what a GPU would compute, on a CPU.

Flash attention runs as `tests/models/flash.py` has it; CUDA graphs are not tried. All is held to
rows by themselves.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from protocol.values.model import UNIT_SAMPLES, DuplexConfig, Opening, Unit, UnitResult, Voice
from runtime.model.backends.base import DeviceLost
from runtime.model.backends.minicpmo.attention import Row
from runtime.model.backends.minicpmo.audio import EncodeAudio
from runtime.model.backends.minicpmo.batched import (
    NUMBERS_MAX,
    ROWS_MIN,
    Batched,
    ComputeOptions,
    Network,
    Step,
    Stepper,
    batched,
    batches,
    options_for,
)
from runtime.model.backends.minicpmo.checkpoint import build_parts, load_parts
from runtime.model.backends.minicpmo.config import load_config
from runtime.model.backends.minicpmo.decoder import BatchedDecoder, RowByRowDecoder, StockDecoder
from runtime.model.backends.minicpmo.device import send
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.runner import ModelRunner, network_of
from runtime.model.backends.minicpmo.work import EncodeImage, EncodeReference, Feed, Speak
from tests.bench.tiny.staging import known_phrases, stage_phrase
from tests.gpu.steps import Bench, measure
from tests.models.blocking import open_session
from tests.models.flash import flash_on_cpu, forward, unread

FIXTURES = Path(__file__).parents[3] / "fixtures"
HELDOUT = FIXTURES / "speech" / "heldout"
SLOTS = 3
UNIT_ROWS = 11
OPTIONS = ComputeOptions(is_flash=True, sizes=lambda *_: (2, SLOTS))
"""As on a GPU, with few sizes."""


@pytest.fixture(scope="module", autouse=True)
def flash() -> Iterator[None]:
    with flash_on_cpu():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DuplexModel:
    """`tiny`, with slots for 1024 tokens in place of 8192: each is written and read many times."""
    folder = tmp_path_factory.mktemp("model")
    for path in (FIXTURES / "tiny").iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    return DuplexModel.load(folder, slots=SLOTS)


@pytest.fixture(scope="module")
def stepping(model: DuplexModel) -> DuplexModel:
    """The same weights, computed as on a GPU."""
    parts = load_parts(model.runner.config, FIXTURES / "tiny")
    runner = ModelRunner(parts, model.runner.vocoder, SLOTS, options=OPTIONS)
    return DuplexModel.of(runner, model.tokens, {})


@pytest.fixture
def machines(model: DuplexModel, stepping: DuplexModel) -> tuple[ModelRunner, ModelRunner]:
    for slot in range(SLOTS):
        model.runner.clear(slot)
        stepping.runner.clear(slot)
    return model.runner, stepping.runner


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.2


def assert_near(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("slots", [1, 3, 4, 5, 48, 64, 65])
def test_the_largest_step_holds_everyone(slots: int) -> None:
    """Sessions would go in two steps, or steps be captured that nobody needs."""
    sizes = batches(slots, 1, 4096)
    assert sizes[-1] == slots
    assert list(sizes) == sorted(set(sizes))
    for length, width in ((2, 4096), (UNIT_ROWS, 4096), (77, 4096), (50, 1024)):
        some = batches(slots, length, width)
        assert some == sizes[: len(some)]
        assert max(some) * length * width <= NUMBERS_MAX


@pytest.mark.costly
@pytest.mark.parametrize("count", [1, 2, UNIT_ROWS, 5, 80])
@pytest.mark.parametrize("lengths", [(600, 20, 300), (128, 127)])
def test_a_step_gives_what_rows_by_themselves_give(
    machines: tuple[ModelRunner, ModelRunner], lengths: tuple[int, ...], count: int
) -> None:
    """On a GPU sessions would say other things than on a CPU."""
    llm = machines[1]._llm
    assert isinstance(llm, BatchedDecoder)
    assert llm.batched.steps is not None
    length = llm.batched.steps.length_of(count, 600)
    assert length == {5: UNIT_ROWS, 80: None}.get(count, count)
    for slot, length in enumerate(lengths):
        rows = noise(length, 192, seed=slot)
        for runner in machines:
            runner.compute([Feed(slot=slot, start=0, rows=rows)])
    for step in range(3):
        works = [
            Feed(slot=slot, start=length + step, rows=noise(count, 192, seed=10 * step + slot))
            for slot, length in enumerate(lengths)
        ]
        plain, stepped = (runner.compute(works) for runner in machines)
        for one, other in zip(plain, stepped, strict=True):
            assert_near(one.hidden, other.hidden)
            assert_near(one.logits.whole(), other.logits.whole())
    for slot in range(SLOTS):  # Sessions and rows that fill a step up wrote nothing before its end.
        end = dict(enumerate(lengths)).get(slot, -count - 2) + count + 2
        keys = (runner.llm.keys[:, slot, :, : end or None] for runner in machines)
        assert_near(*keys)


def test_codes_and_sound_go_the_same_way(machines: tuple[ModelRunner, ModelRunner]) -> None:
    """Speech would be other sounds, and what is heard other speech."""
    for step in range(3):
        works = [
            Speak(slot=slot, start=start, rows=noise(count, 128, seed=10 * step + slot))
            for slot, count in ((2, 3 if step == 0 else 1), (0, 7 if step == 0 else 1))
            for start in (step and step + (2 if slot else 6),)
        ]
        plain, stepped = (runner.compute(works) for runner in machines)
        for one, other in zip(plain, stepped, strict=True):
            assert_near(one.whole(), other.whole())
        hears = [
            EncodeAudio(mel=noise(80, 104, seed=step + slot), slot=slot, units=step)
            for slot in (0, 2)
        ]
        plain, stepped = (runner.compute(hears) for runner in machines)
        for one, other in zip(plain, stepped, strict=True):
            assert_near(one, other)


def test_a_session_that_overflows_spoils_no_other(
    machines: tuple[ModelRunner, ModelRunner],
) -> None:
    """In half precision one may; its rows stay in the step, and would be next to others' rows."""
    stepping = machines[1]
    broken = [Speak(slot=slot, start=0, rows=torch.full((10, 128), torch.nan)) for slot in (0, 1)]
    assert stepping.compute(broken)[0].whole().isnan().all()
    for slot in (0, 1):
        stepping.clear(slot)
    for rows in (3, 1):
        works = [Speak(slot=slot, start=4, rows=noise(rows, 128, seed=slot)) for slot in (0, 1, 2)]
        wanted = [machines[0].compute([work])[0] for work in works]
        for count in (3, 1):
            for one, other in zip(stepping.compute(works[:count]), wanted, strict=False):
                assert_near(one.whole(), other.whole())


def test_pictures_of_one_shape_are_seen_together(machines: tuple[ModelRunner, ModelRunner]) -> None:
    """Each session's picture would wait for those of all others."""
    sizes = ((112, 112), (112, 112), (84, 154))
    sees = [
        EncodeImage(picture=noise(3, *size, seed=place), is_alone=False)
        for place, size in enumerate(sizes)
    ]
    assert sees[0].bucket == sees[1].bucket != sees[2].bucket
    assert (
        EncodeImage(picture=sees[0].picture).bucket != EncodeImage(picture=sees[0].picture).bucket
    )
    together = machines[1].compute(sees[:2])
    for see, seen in zip(sees, together, strict=False):
        assert_near(machines[0].compute([see])[0], seen)


def test_more_sessions_than_a_step_holds_go_in_several(model: DuplexModel) -> None:
    """Where steps are not exact they are of one session; the others would be left out."""
    parts, results = model.runner.parts, []
    for size in (1, SLOTS):
        options = ComputeOptions(is_flash=True, is_alone=True, sizes=lambda *_, size=size: (size,))
        runner = ModelRunner(parts, None, SLOTS, options=options)
        rows = [noise(2, 192, seed=slot) for slot in range(SLOTS)]
        places = [Row(slot=slot, start=4 + slot) for slot in range(SLOTS)]
        with torch.inference_mode():
            results.append(steps_of(runner).run(2, rows, places))
    for one, other in zip(*results, strict=True):
        assert_near(one, other)


def networks(runner: ModelRunner) -> list[Network]:
    """What runs in steps on a GPU."""
    return [each.network for each in runner._together]


def steps_of(runner: ModelRunner) -> Stepper:
    """The steps of the language model."""
    steps = runner._together[0].steps
    assert steps is not None
    return steps


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


@pytest.mark.parametrize("length", [1, UNIT_ROWS])
def test_a_step_can_be_captured(model: DuplexModel, length: int) -> None:
    """A GPU would refuse it, and every server with one would launch kernel by kernel."""
    runner = ModelRunner(model.runner.parts, None, 2, options=OPTIONS)
    for network in networks(runner):
        step = Step(network, 2, length)
        with torch.inference_mode(), flash_on_cpu(unread), Capturing() as capturing:
            step.compute()
        assert capturing.calls > 50
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
@pytest.mark.parametrize("is_flash", [False, True])
def test_in_half_precision_all_lies_on_the_device(dtype: torch.dtype, is_flash: bool) -> None:
    """A GPU would refuse an operation over two devices or formats, in mid-unit or amid a capture.

    Tensors without data stand in for its own: they know their device and their format.
    """
    device = torch.device("meta")
    parts = build_parts(load_config(FIXTURES / "tiny" / "config.json"), dtype, device)
    runner = ModelRunner(parts, None, SLOTS, options=ComputeOptions(is_flash=is_flash))
    assert runner.options.is_flash == is_flash
    feeds = [Feed(slot=slot, start=9, rows=parts.embed(range(13))) for slot in (0, 1)]
    speaks = [Speak(slot=2, start=0, rows=parts.tts.opening([(3, parts.embed((1,))[0])]))]
    with torch.inference_mode():
        found = [runner._llm.run(feeds), runner._tts.run(speaks)]
        for network in networks(runner)[:2]:
            step = Step(network, 2, 1)
            with Elsewhere():
                hidden, logits = step.compute()
            found.append((hidden, logits))
    for hidden, logits in found:
        assert (hidden.dtype, logits.dtype) == (dtype, torch.float32)
    for request in (
        EncodeImage(picture=torch.zeros(3, 448, 448)),
        EncodeAudio(mel=torch.zeros(80, 104), slot=0, units=3),
        EncodeReference(pcm=torch.zeros(16_000)),
    ):
        (rows,) = runner.compute([request])
        assert (rows.dtype, rows.device) == (dtype, device)
    runner.clear(0)
    for ids in ((-1,), (672,), (3, -1), (672, 3)):  # Found on the host: a GPU would not recover.
        with pytest.raises(IndexError, match="not from 0 to 671"):
            parts.embed(ids)
    assert parts.embed(()).shape == (0, 192)


def test_a_released_slot_is_empty(machines: tuple[ModelRunner, ModelRunner]) -> None:
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
    session = open_session(model, opening)
    results = []
    for index, second in enumerate(pcm.reshape(-1, UNIT_SAMPLES)):
        unit = Unit(index=index, pcm=second.astype("<f4").tobytes())
        results.append(session.run_unit(unit))
        session.finalize(index, interrupted=False)
    session.release()
    return results


def test_a_session_says_the_same(model: DuplexModel, stepping: DuplexModel) -> None:
    """A step would round so far off that other words come."""
    plain, stepped = play(model), play(stepping)
    assert [result.fed_ids for result in stepped] == [result.fed_ids for result in plain]
    assert any(not result.is_listen for result in plain)
    for one, other in zip(plain, stepped, strict=True):
        sounds = (np.frombuffer(result.pcm, "<f4") for result in (one, other))
        assert np.array_equal(*sounds)


def test_what_is_run_first_on_a_gpu_runs(
    model: DuplexModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first minutes with a GPU would go into mending the script that is to use them."""
    clock = Bench.clock
    monkeypatch.setattr(Bench, "clock", lambda *args: clock(*args[:3], count=1))
    found: dict[str, object] = {}
    runner = ModelRunner(model.runner.parts, None, SLOTS, options=OPTIONS)
    measure(runner, lambda name, value: found.update({name: value}))
    off = [value for name, value in found.items() if name.endswith("off by")]
    assert len(off) == 2 * (4 + 2)  # Four lengths for tokens and two for codes, of 1 and of 3.
    assert all(float(part) < 1e-3 for parts in off for part in parts)  # type: ignore[attr-defined]
    assert "pictures, 16, ms" in found


# -- where it cannot be had ----------------------------------------------------------------------


def test_a_log_tells_how_each_decoder_attends(
    model: DuplexModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay would take a speech decoder that fell back for one that did not."""
    parts, made = model.runner.parts, Stepper.__init__

    def tokens_alone(self: Stepper, network: Network, *args: Any) -> None:
        if network.name != "tokens by torch":
            raise RuntimeError("no memory for it")
        made(self, network, *args)

    monkeypatch.setattr(Stepper, "__init__", tokens_alone)
    runner = ModelRunner(parts, None, SLOTS, options=OPTIONS)
    steps = ", ".join(f"{length} x 2/3" for length in (1, 2, UNIT_ROWS, 77))
    assert runner.attention == f"flash; tokens by torch in steps of {steps}; codes by torch; sound"
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_where_no_step_can_be_made_all_goes_without(
    model: DuplexModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A driver that cannot capture would keep the server from starting."""

    def broken(*_: Any) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(Step, "__init__", broken)
    runner = ModelRunner(model.runner.parts, None, 1, options=OPTIONS)
    assert runner.attention == "flash; tokens by torch; codes by torch; sound"
    (fed,) = runner.compute([Feed(slot=0, start=0, rows=noise(1, 192, seed=0))])
    model.runner.clear(0)
    (wanted,) = model.runner.compute([Feed(slot=0, start=0, rows=noise(1, 192, seed=0))])
    assert_near(fed.logits.whole(), wanted.logits.whole())
    assert caplog.text.count("no fixed steps") == 3
    assert "no kernel image" in caplog.text


def refused(*_args: object, **_options: object) -> tuple[Tensor, ...]:
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


def test_without_its_kernel_rows_are_attended_one_by_one(
    model: DuplexModel, caplog: pytest.LogCaptureFixture
) -> None:
    """An older GPU, or one that computes in float32, would fail each unit."""
    with flash_on_cpu(refused):
        runner = ModelRunner(model.runner.parts, None, 1, options=OPTIONS)
    assert runner.attention == "sdpa, row by row"
    assert "no flash attention here" in caplog.text
    works = [Feed(slot=0, start=0, rows=noise(4, 192, seed=0))]
    model.runner.clear(0)
    for one, other in zip(runner.compute(works), model.runner.compute(works), strict=True):
        assert_near(one.logits.whole(), other.logits.whole())


def test_a_cpu_has_no_steps(model: DuplexModel) -> None:
    """Its bits would be others, and logs of before not be replayed."""
    assert model.runner.attention == "sdpa, row by row"
    for exact in (False, True):
        options = options_for(torch.device("cpu"), 8, exact=exact)
        assert options is model.runner.options


# -- exactness -----------------------------------------------------------------------------------

EXACT = ComputeOptions(is_flash=True, sizes=lambda *_: (ROWS_MIN,), is_alone=True)
"""As on a GPU that is to be exact. Steps are wide enough that on a CPU a row's bits are its own."""


@pytest.fixture(scope="module")
def exact(model: DuplexModel) -> Callable[[int], ModelRunner]:
    """Makes an exact machine of so many slots, once: it tries its steps for seconds."""

    @functools.cache
    def make(slots: int) -> ModelRunner:
        runner = ModelRunner(model.runner.parts, model.runner.vocoder, slots, options=EXACT)
        assert not runner.llm.keys.any()  # What was tried is gone.
        assert runner.llm._written == [0] * slots
        return runner

    return make


def test_an_exact_machine_gives_each_session_its_own(exact: Callable[[int], ModelRunner]) -> None:
    """A replay alone would find other bytes than were recorded in company."""
    runner = exact(SLOTS)
    assert runner.is_exact
    assert runner.attention == (
        "flash; tokens by torch in steps of 1 x 16, 2 x 16, 11 x 16, 77 x 16; "
        "codes by torch in steps of 1 x 16, 10 x 16, 20 x 16; sound in steps of 50 x 16"
    )
    assert runner.batch == "1 rows at least, but for steps one session at a time"
    for count in (1, 2, UNIT_ROWS, 5, 80):
        works = [
            Feed(slot=slot, start=9 * slot, rows=noise(count, 192, seed=slot + count))
            for slot in range(SLOTS)
        ]
        together = runner.compute(works)
        for work, fed in zip(works, together, strict=True):
            (own,) = runner.compute([work])
            assert torch.equal(own.hidden, fed.hidden)
            assert torch.equal(own.logits.whole(), fed.logits.whole())
    hears = [
        EncodeAudio(mel=noise(80, 104, seed=slot), slot=slot, units=1) for slot in range(SLOTS)
    ]
    for hear, heard in zip(hears, runner.compute(hears), strict=True):
        assert torch.equal(runner.compute([hear])[0], heard)
    for slot in range(SLOTS):
        runner.clear(slot)


@pytest.mark.soak  # `test_an_exact_machine_gives_each_session_its_own` compares the same steps.
def test_a_session_is_the_same_with_fewer_slots(
    model: DuplexModel, exact: Callable[[int], ModelRunner]
) -> None:
    """A replay, which has one slot, would find other bytes than the server made."""
    played = [play(DuplexModel.of(exact(slots), model.tokens, {})) for slots in (SLOTS, 1)]
    for one, other in zip(*played, strict=True):
        assert (one.logits_hash, one.codec_ids) == (other.logits_hash, other.codec_ids)
        assert one.pcm == other.pcm
    assert any(result.codec_ids for result in played[0])


def decoder_unlike(model: DuplexModel, what: str, slots: int = SLOTS) -> Batched:
    """A decoder that gives a session a little more, for what is none of its business."""
    parts, times = model.runner.parts, iter(range(1, 10_000))

    def head(hidden: Tensor) -> Tensor:
        logits: Tensor = parts.llm.lm_head(hidden)
        more = {
            "its neighbours": hidden.mean(),
            "its place in the step": torch.arange(len(hidden))[:, None],
            "the sixth place alone": (torch.arange(len(hidden)) == 5)[:, None],
            "the time": torch.tensor(next(times)),
        }
        return logits + more[what] * 1e-3

    store = ModelRunner(parts, None, slots, options=ComputeOptions(is_flash=True)).llm
    stock = StockDecoder(name="tokens", model=parts.llm.model, head=head, store=store)
    return batched(network_of(stock), EXACT, (1, 2))


@pytest.mark.parametrize(
    "what", ["its neighbours", "its place in the step", "the sixth place alone"]
)
def test_where_steps_are_not_exact_each_session_has_its_own(
    model: DuplexModel, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU whose products depend on the company would break replays that were promised."""
    decoder = decoder_unlike(model, what)
    assert decoder.steps is not None
    assert decoder.steps.sizes == {1: (1,), 2: (1,)}
    assert "steps of tokens by torch are not exact for several sessions" in caplog.text


@pytest.mark.soak  # `test_a_neighbour_who_has_said_more_is_found_out` has one slot more.
def test_it_is_found_out_in_a_replay_too(
    model: DuplexModel, exact: Callable[[int], ModelRunner]
) -> None:
    """It has one slot, and would take steps that the server did not."""
    places = steps_of(exact(1))._spread(UNIT_ROWS, ROWS_MIN)
    assert len({place.start for place in places}) == len(places) == ROWS_MIN
    unlike = decoder_unlike(model, "its neighbours", slots=1)
    assert unlike.steps is not None
    assert unlike.steps.sizes == {1: (1,), 2: (1,)}


def test_a_neighbour_who_has_said_more_is_found_out(model: DuplexModel) -> None:
    """With a slot for each row of a step all would be of one length, and it be let pass."""

    def by_longest(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        out, *rest = forward(*args, **options)
        return out + options["seqused_k"].max() * 1e-3, *rest

    options = attrs.evolve(EXACT, sizes=lambda *_: (SLOTS,))
    with flash_on_cpu(by_longest):
        runner = ModelRunner(model.runner.parts, None, SLOTS, options=options)
    steps = steps_of(runner)
    assert set(steps.sizes.values()) == {(1,)}
    starts = {place.start for place in steps._spread(1, SLOTS)}
    assert len(starts) == SLOTS


def test_what_differs_from_time_to_time_is_never_exact(model: DuplexModel) -> None:
    """Nothing that is computed so could be replayed."""
    assert decoder_unlike(model, "the time").steps is None


def test_what_differs_from_slot_to_slot_is_never_exact(model: DuplexModel) -> None:
    """A replay runs in the first slot, whichever it was."""

    def by_slot(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        out, *rest = forward(*args, **options)
        begins = args[4][:-1]  # Where each row's slot begins.
        return out + begins.repeat_interleave(len(out) // len(begins))[:, None, None], *rest

    with flash_on_cpu(by_slot):
        assert not ModelRunner(model.runner.parts, None, SLOTS, options=EXACT).is_exact


def test_a_gpu_that_is_lost_is_said_to_be(
    model: DuplexModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every unit would fail by itself, for ever, and the server look well."""
    runner = ModelRunner(model.runner.parts, None, SLOTS)

    def lost(*_: Any) -> None:
        text = "CUDA error: an illegal memory access was encountered\nCompile with ..."
        raise torch.AcceleratorError(text)

    works = [Feed(slot=0, start=0, rows=noise(1, 192, seed=0))]
    monkeypatch.setattr(RowByRowDecoder, "run", lost)
    with pytest.raises(DeviceLost, match=r"GPU is lost to this process \(CUDA error: an illegal"):
        runner.compute(works)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(torch.AcceleratorError):  # It answers: one call failed, and no other will.
        runner.compute(works)


def test_what_is_sent_arrives(model: DuplexModel) -> None:
    """Sounds of different lengths would be cut at each other's ends."""
    rows = [noise(2, 102, seed=1), noise(2, 104, seed=2)]
    for device in ("cpu", "meta"):
        like = torch.zeros(1, dtype=torch.bfloat16, device=device)
        sent = send(rows, like)
        assert [part.shape for part in sent] == [row.shape for row in rows]
        assert {(part.dtype, part.device.type) for part in sent} == {(torch.bfloat16, device)}
