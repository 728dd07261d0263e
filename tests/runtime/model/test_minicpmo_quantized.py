"""Quantised checkpoints and weights: the numbers of the files, in any batch, or an error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch.nn import functional as F  # noqa: N812

from runtime.commands.quantize import quantize_command
from runtime.model.backends.minicpmo import checkpoint
from runtime.model.backends.minicpmo import quantized as module
from runtime.model.backends.minicpmo.attention import Row, spans_of
from runtime.model.backends.minicpmo.checkpoint import WEIGHTS, CheckpointError, load_parts
from runtime.model.backends.minicpmo.config import load_config
from runtime.model.backends.minicpmo.decoder import FusedDecoder, Operators, StockDecoder
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.quantized import (
    FILES,
    GROUP,
    QuantizedLinear,
    gptq_tensors,
    joined_words,
    quantized,
    read_quantization,
    unpacked,
)
from runtime.model.backends.minicpmo.runner import PROBE_ROWS, rows_are_independent
from runtime.model.backends.minicpmo.work import Feed
from runtime.model.models import ModelUnusableError, load_backend, load_checkpoint
from tests.models.flash import flash_on_cpu
from tests.models.quantized import FORMS, Form, rewrite
from tests.models.random_model import facts, opener, unit, write_checkpoint

GATE = "llm.model.layers.0.mlp.gate_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("plain"))


Folders = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def folders(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A checkpoint in a form, and one with the same weights in float32."""
    made = dict[str, tuple[Path, Path]]()

    def find(name: str) -> tuple[Path, Path]:
        if name not in made:
            made[name] = rewrite(source, tmp_path_factory.mktemp("form"), FORMS[name])
        return made[name]

    return find


def parts_of(folder: Path, **how: Any) -> Any:
    return load_parts(load_config(folder / "config.json"), folder, **how)


# -- the files of other packages ------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
def test_the_weights_are_those_that_the_files_stand_for(folders: Folders, name: str) -> None:
    """A model would say gibberish: codes, zeros or groups in another order."""
    quantised, plain = map(parts_of, folders(name))
    layers = dict(plain.llm.model.named_modules())
    count = 0
    for key, layer in quantised.llm.model.named_modules():
        if isinstance(layer, QuantizedLinear):
            count += 1
            assert torch.equal(layer.weight(torch.float32), layers[key].weight), key
            half = layers[key].weight.bfloat16()
            assert torch.equal(layer.weight(torch.bfloat16), half), key
    assert count == 2 * 7
    assert torch.equal(quantised.llm.lm_head.weight, plain.llm.lm_head.weight)


@pytest.mark.parametrize("name", ["awq", "gptq"])
def test_a_session_says_what_one_of_the_same_weights_in_float_says(
    folders: Folders, name: str
) -> None:
    """Something else than the weights would differ: a rounding, a layer that was left out."""
    said = []
    for folder in folders(name):
        model = DuplexModel.load(folder, slots=2)
        assert model.info.deterministic
        with opener(model, seed=3) as open_one:
            session = open_one()
            each = []
            for index in range(3):
                each.append(facts(session.run_unit(unit(index))))
                session.finalize(index, interrupted=False)
            said.append(each)
    assert said[0] == said[1]


def test_a_product_in_blocks_is_the_same_to_rounding(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large layers are computed in blocks: outputs would be left out or stand elsewhere."""
    layer = parts_of(folders("gptq")[0]).get_submodule(GATE)
    x = torch.randn(16, layer.in_features, generator=torch.Generator().manual_seed(1))
    whole = layer(x)
    assert torch.equal(whole, F.linear(x, layer.weight(torch.float32)))
    monkeypatch.setattr(module, "BLOCK_NUMBERS", 50 * layer.in_features)
    torch.testing.assert_close(layer(x), whole, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(layer(x.repeat(4, 1)[:n])[:16], layer(x)[:n]) for n in PROBE_ROWS[:3])


@pytest.mark.parametrize("name", ["awq", "gptq", "gptq 8 bits"])
def test_a_product_in_16_bits_is_that_of_the_float_weights(folders: Folders, name: str) -> None:
    """More would be lost than what the format of the product costs: one rounding of each sum."""
    layer = parts_of(folders(name)[0]).get_submodule(GATE)
    x = torch.randn(16, layer.in_features, generator=torch.Generator().manual_seed(1)).bfloat16()
    product, weight = layer(x), layer.weight(torch.float32).bfloat16()
    assert torch.equal(product, F.linear(x, weight))
    exact = F.linear(x.double(), weight.double())
    half_a_step = torch.finfo(torch.bfloat16).eps / 2 * exact.abs()
    assert ((product.double() - exact).abs() <= half_a_step + 1e-5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_have_their_own_bits_in_any_batch(folders: Folders, dtype: torch.dtype) -> None:
    """What a session says would depend on who else speaks."""
    folder, plain = folders("awq")
    is_independent = rows_are_independent(parts_of(folder, dtype=dtype))
    if dtype == torch.bfloat16 and not rows_are_independent(parts_of(plain, dtype=dtype)):
        pytest.skip("matrix units of this CPU mix the rows of products in bf16")
    assert is_independent
    model = DuplexModel.load(folder, slots=4, dtype=dtype)
    rows = [torch.randn(3, 192, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    works = [Feed(slot=n, start=0, rows=each.to(dtype)) for n, each in enumerate(rows)]
    together = model.compute(works)
    for work, fed in zip(works, together, strict=True):
        model.runner.clear(work.slot)
        (alone,) = model.compute([work])
        assert torch.equal(alone.hidden, fed.hidden)


def test_a_gpu_s_pass_computes_the_same(folders: Folders) -> None:
    """Only the stock model would know quantised layers."""
    quantised, plain = folders("gptq 8 bits")
    hidden = []
    for folder in (quantised, plain):
        model = DuplexModel.load(folder, slots=2)
        parts, store = model.runner.parts, model.runner.llm
        stock = StockDecoder(name="t", model=parts.llm.model, head=parts.llm.lm_head, store=store)
        with flash_on_cpu(), torch.inference_mode():
            x = torch.randn(2, 3, 192, generator=torch.Generator().manual_seed(1))
            spans = spans_of(store, [Row(slot=0, start=0), Row(slot=1, start=0)], 3)
            hidden.append(FusedDecoder(stock, Operators()).forward(x, spans))
    torch.testing.assert_close(hidden[0], hidden[1], rtol=1e-4, atol=1e-4)


def test_older_files_of_their_own_are_read(folders: Folders, tmp_path: Path) -> None:
    """Checkpoints of a year ago would be said to have unknown keys."""
    for name, file, renamed in (
        ("gptq", FILES[0], {}),
        ("awq", FILES[1], {"bits": "w_bit", "group_size": "q_group_size", "version": "version"}),
    ):
        folder = tmp_path / name
        shutil.copytree(folders(name)[0], folder)
        config = json.loads((folder / "config.json").read_text())
        how = config.pop("quantization_config")
        (folder / "config.json").write_text(json.dumps(config))
        kept = {renamed.get(key, key): value for key, value in how.items()}
        if renamed:
            del kept["quant_method"]
            kept["version"] = "GEMM"
        (folder / file).write_text(json.dumps(kept))
        found = load_config(folder / "config.json").quantization
        assert found == load_config(folders(name)[0] / "config.json").quantization
        (folder / file).write_text("{")
        with pytest.raises(ValueError, match=f"{file} is not JSON"):
            load_config(folder / "config.json")


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'"),
        ({"quant_method": "awq", "bits": 8}, "bits is 8; only 4"),
        ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv'; only 'gemm'"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point is False"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3; only 4 and 8"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"quant_method": "gptq", "is_marlin_format": True}, "is_marlin_format is True"),
        ({"quant_method": "gptq", "dynamic": {"+:.*": {"bits": 8}}}, "dynamic is"),
        ({"quant_method": "gptq", "lm_head": True}, "lm_head is True"),
        ({"quant_method": "gptq", "group_size": 0}, "group_size is 0"),
        ({"quant_method": "gptq", "group_size": "128"}, "group_size is '128'"),
        ([], "not an object"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(said: Any, text: str) -> None:
    """Weights would be read in a way in which they were not written."""
    with pytest.raises(ValueError, match=r"config\.quantization_config") as caught:
        read_quantization(said)
    assert text in str(caught.value)


def test_a_layer_that_does_not_fit_is_an_error(folders: Folders, tmp_path: Path) -> None:
    """A server would start with a layer at chance, and no one would know."""

    def told(name: str, **changes: torch.Tensor | None) -> str:
        folder = tmp_path / "spoiled"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(folders(name)[0], folder)
        state: dict[str, Any] = load_file(folder / WEIGHTS)
        state |= {f"{GATE}.{part}": value for part, value in changes.items()}
        save_file({k: v.contiguous() for k, v in state.items() if v is not None}, folder / WEIGHTS)
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is held below
            parts_of(folder)
        return str(caught.value)

    state = load_file(folders("gptq")[0] / WEIGHTS)
    tensors = {part: state[f"{GATE}.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx")}
    assert "1 missing keys: " + GATE + ".scales" in told("gptq", scales=None)
    assert "keys of another shape" in told("gptq", qzeros=tensors["qzeros"][:1])
    assert "qweight I64 not I32" in told("gptq", qweight=tensors["qweight"].long())
    assert "unknown keys" in told("gptq", bias=torch.zeros(384))
    wild = torch.full_like(tensors["g_idx"], 7)
    assert f"{GATE}: g_idx has groups" in told("gptq", g_idx=wild)
    endless = tensors["scales"].clone()
    endless[0, 0] = torch.inf
    assert f"not finite in float32: {GATE}.scales" in told("gptq", scales=endless).replace("1 ", "")


def test_a_config_and_files_that_disagree_are_an_error(source: Path, tmp_path: Path) -> None:
    """The error would be a list of a hundred keys, without what they have in common."""
    shutil.copytree(source, tmp_path / "a")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = Form(method="awq").config
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="says awq, but no layer is quantised"):
        parts_of(tmp_path / "a")


# -- quantising what is not -----------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_is_the_nearest_of_its_group(bits: int) -> None:
    """More would be lost than the bits cost."""
    weight = torch.randn(24, 2 * GROUP + 64, generator=torch.Generator().manual_seed(1)) * 0.02
    weight[0, :GROUP] = 0
    weight[1, :GROUP] = weight[1, :GROUP].abs() + 1
    codes, scales, zeros = quantized(weight, bits)
    of = torch.arange(weight.shape[1]) // GROUP
    back = (codes.float() - zeros.float()[:, of]) * scales.float()[:, of]
    steps = scales.float()[:, of]
    assert torch.all((back - weight).abs() <= steps * 1.2)  # The ends of a group may be cut.
    assert torch.equal(back[0, :GROUP], weight[0, :GROUP])
    inner = (codes > 0) & (codes < (1 << bits) - 1)
    assert torch.all(((back - weight).abs() <= steps * 0.501)[inner])


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_split_as_they_were_joined(bits: int) -> None:
    """Signs of words would spoil their highest codes."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 1 << bits, (5, 64), generator=generator, dtype=torch.uint8)
    codes[0] = (1 << bits) - 1
    assert torch.equal(unpacked(joined_words(codes, bits), bits), codes)


@pytest.mark.parametrize("form", ["int4", "int8"])
def test_a_saved_checkpoint_is_what_is_quantised_when_loaded(
    source: Path, tmp_path: Path, form: str
) -> None:
    """A folder that was saved to load sooner would say other things."""
    copied = tmp_path / "model"
    shutil.copytree(source, copied)
    done = CliRunner().invoke(quantize_command, [str(copied), "--to", form], catch_exceptions=False)
    assert done.output == f"saved in {copied}-{form}\n"
    saved, made = parts_of(tmp_path / f"model-{form}"), parts_of(copied, quantize=form)
    assert set(saved.state_dict()) == set(made.state_dict())
    for key, value in saved.state_dict().items():
        assert torch.equal(value, made.state_dict()[key]), key
    assert any(isinstance(layer, QuantizedLinear) for layer in made.modules())
    again = CliRunner().invoke(quantize_command, [str(copied), "--to", form])
    assert again.exit_code == 1
    assert f"{copied}-{form} exists" in again.output
    twice = CliRunner().invoke(quantize_command, [f"{copied}-{form}", "--to", form])
    assert "its files are quantised (gptq)" in twice.output
    assert not list(tmp_path.glob("*.part"))


def test_a_run_that_fails_or_is_killed_leaves_nothing_in_the_way(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run failed about a folder that nobody had named, until it was removed by hand."""
    copied, part = tmp_path / "model", tmp_path / "model-int4.part"
    shutil.copytree(source, copied)

    def full(*_: object, **__: object) -> None:
        assert part.is_dir()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_file", full)
        failed = CliRunner().invoke(quantize_command, [str(copied), "--to", "int4"])
    assert "No space left" in failed.output
    assert not part.exists()
    part.mkdir()
    (part / "old.safetensors").touch()
    done = CliRunner().invoke(quantize_command, [str(copied), "--to", "int4"])
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "model-int4" / "old.safetensors").exists()


def test_files_in_folders_of_a_checkpoint_are_saved_with_it(source: Path, tmp_path: Path) -> None:
    """A voice's or an adapter's own config.json would be missing."""
    copied = tmp_path / "model"
    shutil.copytree(source, copied)
    (copied / "extra").mkdir()
    for name in ("config.json", WEIGHTS):
        (copied / "extra" / name).write_text("{}")
    CliRunner().invoke(quantize_command, [str(copied), "--to", "int4"], catch_exceptions=False)
    saved = sorted(path.name for path in (tmp_path / "model-int4" / "extra").iterdir())
    assert saved == ["config.json", WEIGHTS]
    assert "quantization_config" in (tmp_path / "model-int4" / "config.json").read_text()


def test_the_files_are_in_a_form_that_others_read() -> None:
    """Only we could read what we save."""
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(1))
    found = gptq_tensors(weight, 4)
    shapes = {name: (tuple(each.shape), each.dtype) for name, each in found.items()}
    assert shapes == {
        "qweight": ((32, 16), torch.int32),
        "qzeros": ((2, 2), torch.int32),
        "scales": ((2, 16), torch.float16),
        "g_idx": ((256,), torch.int32),
    }
    codes, scales, zeros = quantized(weight, 4)
    assert int(found["qweight"][0, 3]) & 15 == codes[3, 0]
    assert int(found["qweight"][0, 3]) >> 4 & 15 == codes[3, 1]
    assert (int(found["qzeros"][1, 0]) & 15) + 1 == zeros[0, 1]
    assert torch.equal(found["scales"].T, scales)


def test_a_model_is_loaded_quantised_and_says_so(source: Path) -> None:
    """A replay would compare two models, or not know how to load the recorded one."""
    model = load_checkpoint(str(source), 2, slots_max=2, device="cpu", dtype=None, quantize="int8")
    assert model.info.fingerprint["quantize"] == "int8"
    assert model.info.deterministic
    assert "quantize" not in DuplexModel.load(source, slots=1).info.fingerprint


def test_what_cannot_be_quantised_is_refused(folders: Folders) -> None:
    """An operator would believe that it was."""
    with pytest.raises(ModelUnusableError, match="its files are quantised"):
        load_backend(str(folders("awq")[0]), 1, device="cpu", quantize="int4")
    with pytest.raises(ModelUnusableError, match="scripted cannot be quantised"):
        load_backend("scripted", quantize="int4")
