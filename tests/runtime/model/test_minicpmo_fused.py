"""The passes of fewer launches that a GPU runs, against the stock modules, on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from protocol.values.model import DuplexConfig
from runtime.model.backends.minicpmo.attention import KvSlots, joined
from runtime.model.backends.minicpmo.batched import ComputeOptions
from runtime.model.backends.minicpmo.checkpoint import Parts, load_parts
from runtime.model.backends.minicpmo.config import load_config, read_config
from runtime.model.backends.minicpmo.decoder import (
    FusedDecoder,
    Operators,
    StockDecoder,
    try_operators,
)
from runtime.model.backends.minicpmo.device import pin
from runtime.model.backends.minicpmo.logits import INLINE_MAX, Shortlists, TokenLogits
from runtime.model.backends.minicpmo.runner import ModelRunner, operators_for
from runtime.model.backends.minicpmo.sampling import decide
from runtime.model.backends.minicpmo.tokens import Tokens
from runtime.model.backends.minicpmo.vision import FusedVision
from runtime.model.models import tiny_path
from tests.models.flash import flash_on_cpu
from tests.models.full_shape import write_tokenizer
from tests.models.random_model import CONFIG, SMALL, changed

ROOT = Path(__file__).parents[3]
VOCABULARY = 20_000
INTERPRETED = """
import torch
from runtime.model.backends.minicpmo.decoder import try_operators
from runtime.model.backends.minicpmo.kernels_triton import TritonOperators
for dtype in (torch.bfloat16, torch.float32):
    for heads, groups, width in ((32, 8, 128), (12, 12, 64)):
        shape = {"heads": heads, "groups": groups, "width": width}
        try_operators(TritonOperators(), torch.zeros(1, dtype=dtype), **shape)
"""


@pytest.fixture(scope="module")
def parts() -> Parts:
    """`tiny`, of which weights are joined here."""
    return load_parts(load_config(tiny_path() / "config.json"), tiny_path())


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("height", "width", "count"), [(448, 448, 1), (112, 154, 3)])
def test_slices_are_seen_as_by_the_stock_modules(
    parts: Parts, height: int, width: int, count: int
) -> None:
    """On a GPU another picture would be seen than was shown."""
    slices = noise(count, 3, height, width, seed=1).clamp(-1, 1)
    patch = parts.config.vision.patch_size
    with torch.inference_mode():
        wanted = parts.resampler(parts.vpm(slices), height // patch, width // patch)
        seen = FusedVision(parts.vpm, parts.resampler).embed(slices)
    torch.testing.assert_close(seen, wanted, rtol=1e-4, atol=1e-4)


def test_joined_weights_stay_those_of_the_checkpoint() -> None:
    """A second machine of the same parts would compute with others, and memory be taken twice."""
    linears = [torch.nn.Linear(8, count) for count in (3, 5)]
    before = [linear.weight.detach().clone() for linear in linears]
    whole = joined(*linears)
    for linear, weight in zip(linears, before, strict=True):
        assert torch.equal(linear.weight, weight)
        assert linear.weight.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize("what", ["an activation", "biases"])
def test_a_model_of_another_kind_is_refused(parts: Parts, what: str) -> None:
    """Its biases would be left out in silence."""
    model: Any = parts.tts.model
    config = SimpleNamespace(hidden_act="relu" if what == "an activation" else "silu")
    keys = {"layers.0.mlp.up_proj.bias": 0} if what == "biases" else {}
    other = SimpleNamespace(config=config, state_dict=lambda: model.state_dict() | keys)
    store = KvSlots(layers=1, slots=1, heads=1, capacity=1, width=8)
    with pytest.raises(ValueError, match="another activation, or biases"):
        FusedDecoder(StockDecoder(name="x", model=other, head=noise, store=store), Operators())


def test_where_kernels_cannot_be_compiled_torch_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An image without a compiler could not serve from a GPU."""
    monkeypatch.setitem(sys.modules, "runtime.model.backends.minicpmo.kernels_triton", None)
    store: Any = SimpleNamespace(keys=SimpleNamespace(is_cuda=True))
    assert operators_for(store, 4).name == "torch"
    assert "no fused kernels here" in caplog.text
    small = KvSlots(layers=1, slots=1, heads=1, capacity=1, width=8)
    assert operators_for(small, 4).name == "torch"


@pytest.mark.skipif(find_spec("triton") is None, reason="torch brings it only for GPUs")
def test_the_kernels_compute_what_torch_does() -> None:
    """A GPU finds that out when it loads a model; here Triton's interpreter does."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, check=True, cwd=ROOT)


def test_kernels_that_compute_something_else_are_found_out() -> None:
    """A compiler with a fault would garble all that sessions say."""

    class Wrong(Operators):
        def gate(self, both: Tensor) -> Tensor:
            return super().gate(both) * 1.1

    shape = {"heads": 3, "groups": 1, "width": 8}
    try_operators(Operators(), torch.zeros(1), **shape)
    with pytest.raises(AssertionError):
        try_operators(Wrong(), torch.zeros(1), **shape)


def test_the_sum_of_all_layers_is_not_rounded() -> None:
    """Of 36 layers in 16 bits each would be off by what a hundred of them add."""
    residual = torch.full((1, 8), 256.0)
    for _ in range(100):
        Operators().norm(torch.full((1, 8), 0.5).bfloat16(), residual, torch.ones(8), 1e-6)
    assert torch.equal(residual, torch.full((1, 8), 306.0))


def test_a_trace_is_made_though_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit in progress would fail, which the exit waits for."""
    logits = noise(INLINE_MAX + 1, seed=3)
    wanted = TokenLogits(logits).trace().result()
    ended = ThreadPoolExecutor(1)
    ended.shutdown()
    monkeypatch.setattr("runtime.model.backends.minicpmo.logits._tracing", ended)
    assert TokenLogits(logits).trace().result() == wanted


def test_a_picture_is_sent_though_it_cannot_be_pinned() -> None:
    """A lost GPU would look like a broken picture, in the thread that decodes it."""

    class Lost:
        def to(self, _dtype: object) -> Lost:
            return self

        def pin_memory(self) -> Lost:
            raise RuntimeError("CUDA error: unspecified launch failure")

    like: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    row: Any = Lost()
    assert pin(row, like) is row


SHAPES = (
    {"slice_config": {"scale_resolution": 450}},
    {"audio_config": {"max_source_positions": 60}},
    {"max_position_embeddings": 64},
    {"tts_config": {"max_position_embeddings": 16}},
)


@pytest.mark.costly
@pytest.mark.parametrize("change", SHAPES)
def test_models_of_odd_shapes_are_warmed_up(
    change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU would refuse to start for a model that it could serve, or write past its memory."""
    parts = Parts(read_config(changed(CONFIG, SMALL, change), "odd")).requires_grad_(False).eval()
    options = ComputeOptions(is_flash=True, is_alone=True, sizes=lambda *_: (2,))
    with flash_on_cpu():
        runner = ModelRunner(parts, None, 2, options=options)
        runner._warm_up()
    assert caplog.text == ""
    assert runner.is_exact
    assert all(each.steps is not None for each in runner._together)


# -- the shape without a checkpoint ----------------------------------------------------------------


def test_a_filled_tokenizer_lets_rules_choose_from_a_shortlist(tmp_path: Path) -> None:
    """What noise decides would take the whole row each time, and a bench measure that."""
    tokens = Tokens(write_tokenizer(tiny_path(), VOCABULARY, tmp_path))
    assert tokens.size == VOCABULARY
    assert tokens.ids == Tokens(tiny_path()).ids
    shortlists = Shortlists.of(tokens, "cpu")
    rule = DuplexConfig(listen_prob_scale=0.0)
    for seed in range(20):
        (row,) = shortlists.rows(noise(1, VOCABULARY, seed=seed))
        numbers = np.random.default_rng(seed).random(2)
        index = row.settle(lambda logits, n=numbers: decide(logits, (), n, rule, tokens))  # type: ignore[misc]
        assert len(tokens.decode([index])) in {0, 3} or index < Tokens(tiny_path()).size
    assert (shortlists.settled, shortlists.unsettled) == (20, 0)


@pytest.mark.parametrize("count", [INLINE_MAX, INLINE_MAX + 1])
def test_a_result_names_all_its_first_logits(count: int) -> None:
    """A replay would be compared with the hash of something else."""
    logits = noise(count, seed=3)
    found = TokenLogits(logits).trace().result()
    again = TokenLogits(logits.clone()).trace().result()
    ordered = logits.sort().values
    assert found == again
    assert found.margin == float(ordered[-1] - ordered[-2])
    logits[-1] += 1e-3
    assert TokenLogits(logits).trace().result().digest != found.digest
