"""Loading the published files: what fits is taken, all else is refused by name, nothing is run."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.model.backends.minicpmo.checkpoint import CheckpointError
from runtime.model.voice.checkpoint import FLOW, FLOW_YAML, HIFT, fill_hift, load_vocoder
from runtime.model.voice.config import BYTES_MAX, FlowConfig, read_flow_config
from runtime.model.voice.vocoder import Chunk
from tests.models import random_voice
from tests.models.random_voice import CONFIG, codes, flow_yaml, hift_weights, reference, vocoder

YAML = flow_yaml()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_voice.write_folder(tmp_path_factory.mktemp("voice"))


@pytest.fixture
def folder(published: Path, tmp_path: Path) -> Path:
    """A folder to spoil."""
    return Path(shutil.copytree(published, tmp_path / "token2wav"))


def test_a_folder_is_loaded(folder: Path) -> None:
    """A weight would be left at chance, or one of weight norm folded wrongly."""
    chunk = Chunk(reference=reference("a", 5), turn=None, codes=codes("x", 8), last=True)
    (wanted,) = vocoder().speak([chunk])
    loaded = load_vocoder(folder, steps=random_voice.STEPS)
    loaded._seed, loaded._table = "a small voice", vocoder()._table
    (found,) = loaded.speak([chunk])
    assert found.pcm.tobytes() == wanted.pcm.tobytes()


def test_weight_norm_is_read_in_either_spelling() -> None:
    """A file of another version of torch would be refused."""
    new, old = fill_hift(hift_weights()), fill_hift(hift_weights(old=True))
    shapes = [
        {name: weight.shape for name, weight in each.state_dict().items()} for each in (new, old)
    ]
    assert shapes[0] == shapes[1]
    weight = torch.nn.Conv1d(2, 3, 5)
    weight = torch.nn.utils.parametrizations.weight_norm(weight)
    torch.nn.init.normal_(weight.parametrizations.weight.original0)
    raw = weight.parametrizations.weight
    folded = raw.original0.double() * raw.original1.double()
    folded = folded / raw.original1.double().norm(dim=(1, 2), keepdim=True)
    assert torch.allclose(weight.weight.double(), folded, atol=1e-6)


def test_the_published_sizes_are_the_defaults(tmp_path: Path) -> None:
    """The published file would be refused."""
    (tmp_path / FLOW_YAML).write_text(flow_yaml(FlowConfig()))
    assert read_flow_config(tmp_path / FLOW_YAML) == FlowConfig()
    (tmp_path / FLOW_YAML).write_text(YAML)
    assert read_flow_config(tmp_path / FLOW_YAML) == CONFIG


# -- flow.yaml ------------------------------------------------------------------------------------

ATTACK = "!!python/object/apply:os.system ['touch ran']"
HOSTILE: dict[str, tuple[str, str]] = {
    "a call": (YAML.replace("mel\n", f"{ATTACK}\n"), "flow.output_type is not a plain value"),
    "a call as the document": (ATTACK, "the document is not a plain mapping"),
    "a name": (
        YAML.replace("depth: 2", "depth: !name:os.getpid"),
        "flow.decoder.estimator.depth is not a plain value",
    ),
    "another class": (
        YAML.replace("cosyvoice2.flow.decoder_dit.DiT", "os.system"),
        "flow.decoder.estimator has the tag '!new:os.system'",
    ),
    "no class": (re.sub(r"encoder: \S+", "encoder:", YAML), "flow.encoder has the tag None"),
    "another tag at the top": ("!new:os.system\n" + YAML, "the document has the tag"),
    "an anchor": (
        YAML.replace("depth: 2", "depth: &x 2"),
        "flow.decoder.estimator.depth is not a plain value",
    ),
    "an alias": (
        YAML.replace("depth: 2", "depth: *x"),
        "flow.decoder.estimator.depth is not a plain value",
    ),
    "an anchor of a mapping": (
        YAML.replace("encoder: !new", "encoder: &x !new"),
        "flow.encoder is not a plain mapping",
    ),
    "a merge": (YAML + "  <<: 1\n", "flow.<< is not known"),
    "a list": (YAML.replace("mel\n", "[mel]\n"), "flow.output_type is not a plain value"),
    "a mapping for a value": (
        YAML.replace("mel\n", "{a: 1}\n"),
        "flow.output_type is not a plain value",
    ),
    "a value for a mapping": ("flow: 1\n", "flow is not a plain mapping"),
    "a mapping as a key": ("? {a: 1}\n: 2\n", "a key of the document is not a plain value"),
    "laughs": ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n" + YAML, "a is not known"),
    "depth": ("flow: " + "[" * 30_000, "flow is not a plain mapping"),
    "depth of mappings": ("{a: " * 10_000, "a is not known"),
    "length": (YAML + "#" * BYTES_MAX, f"the file has more than {BYTES_MAX} bytes"),
    "nothing": ("", "the file is empty"),
    "two documents": (YAML + "---\n" + YAML, "the file has more than one document"),
    "a value twice": (
        YAML.replace("depth: 2", "depth: 2\n      depth: 3"),
        "flow.decoder.estimator.depth is given twice",
    ),
    "no YAML": ("@flow: 1", "the file is not YAML"),
    "another key": (YAML + "  hook: 1\n", "flow.hook is not known"),
    "a key too few": (flow_yaml(changes={"flow.vocab_size": None}), "flow.vocab_size is missing"),
    "a size of zero": (
        flow_yaml(changes={"flow.encoder.linear_units": 0}),
        "flow.encoder.linear_units is '0', not a whole number from 1 to 8192",
    ),
    "a huge size": (
        flow_yaml(changes={"flow.decoder.estimator.depth": 10**9}),
        "flow.decoder.estimator.depth is '1000000000', not a whole number",
    ),
    "many blocks": (
        flow_yaml(changes={"flow.encoder.num_up_blocks": 65}),
        "flow.encoder.num_up_blocks is '65', not a whole number from 1 to 64",
    ),
    "no size": (
        flow_yaml(changes={"flow.decoder.estimator.depth": "0x10"}),
        "flow.decoder.estimator.depth is '0x10', not a whole number",
    ),
    "another architecture": (
        flow_yaml(changes={"flow.encoder.normalize_before": False}),
        "flow.encoder.normalize_before is 'false'; only True is supported",
    ),
    "another guidance": (
        flow_yaml(changes={"flow.decoder.inference_cfg_rate": 0.5}),
        "flow.decoder.inference_cfg_rate is '0.5'; only 0.7 is supported",
    ),
    "no number": (
        flow_yaml(changes={"flow.decoder.inference_cfg_rate": "much"}),
        "flow.decoder.inference_cfg_rate is 'much'; only 0.7 is supported",
    ),
    "heads that do not fit": (
        flow_yaml(changes={"flow.encoder.attention_heads": 3}),
        "flow.encoder.output_size is 32, no multiple of 2 and 3 heads",
    ),
    "a small vocabulary": (
        flow_yaml(changes={"flow.vocab_size": 4218}),
        "flow.vocab_size is 4218, without the silent code 4218",
    ),
    "two input sizes": (
        flow_yaml(changes={"flow.input_size": 17}),
        "flow.encoder.input_size is not flow.input_size, 17",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_config_is_refused_by_its_path(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's folder would run code, fill the memory, or load as something else."""
    text, reason = HOSTILE[name]
    monkeypatch.chdir(folder)
    (folder / FLOW_YAML).write_text(text)
    with pytest.raises(CheckpointError, match=re.escape(f"{FLOW_YAML}: {reason}")):
        load_vocoder(folder)
    assert not (folder / "ran").exists()


# -- weights --------------------------------------------------------------------------------------


class Attack:
    """Pickles as a call."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self._path),)


def rewrite(folder: Path, file: str, **changes: Any) -> None:
    """Replace some weights, or leave them out where None."""
    state = {**torch.load(folder / file, weights_only=True), **changes}
    torch.save({name: value for name, value in state.items() if value is not None}, folder / file)


@pytest.mark.parametrize("file", [FLOW, HIFT])
def test_a_pickle_is_not_run(folder: Path, file: str) -> None:
    """A model's folder would run code."""
    torch.save({"weight": Attack(folder / "ran")}, folder / file)
    with pytest.raises(CheckpointError, match=f"{file} holds more than weights: it names .*mkdir"):
        load_vocoder(folder)
    (folder / file).write_bytes(pickle.dumps(Attack(folder / "ran")))
    with pytest.raises(CheckpointError, match=f"{file} holds more than weights"):
        load_vocoder(folder)
    assert not (folder / "ran").exists()


NAMES = {
    FLOW: ("decoder.estimator.blocks.1.attn.to_q.weight", (32, 32)),
    HIFT: ("generator.resblocks.3.activations1.1.alpha", (4,)),
}


@pytest.mark.parametrize("file", NAMES)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_refused(folder: Path, file: str, number: float) -> None:
    """Every session would hear silence, or noise."""
    name, shape = NAMES[file]
    broken = torch.ones(shape)
    broken.view(-1)[-1] = number
    rewrite(folder, file, **{name: broken})
    short = name.removeprefix("generator.")
    with pytest.raises(
        CheckpointError, match=f"{file} has numbers that are not finite in: {short}"
    ):
        load_vocoder(folder)


@pytest.mark.parametrize("file", NAMES)
def test_names_and_shapes_are_checked(folder: Path, file: str) -> None:
    """A part of the model would be left at chance."""
    name, shape = NAMES[file]
    short = name.removeprefix("generator.")
    for changes, reason in (
        ({name: None}, f"1 missing keys: {short}"),
        ({name: torch.zeros(3, 5)}, f"1 keys of another shape: {short} (3, 5) not {shape}"),
        ({"other": torch.zeros(3)}, "1 unknown keys: other"),
    ):
        kept = (folder / file).read_bytes()
        rewrite(folder, file, **changes)
        with pytest.raises(CheckpointError, match=re.escape(reason)):
            load_vocoder(folder)
        (folder / file).write_bytes(kept)


@pytest.mark.parametrize(
    "value",
    [1, "text", [torch.zeros(1)], torch.zeros(3, dtype=torch.int64), torch.zeros(3).to_sparse()],
)
@pytest.mark.filterwarnings("ignore:.*[Ss]parse.*")
def test_what_is_no_weight_is_refused(folder: Path, value: object) -> None:
    """It would fail somewhere else, without the file's name."""
    rewrite(folder, FLOW, **{NAMES[FLOW][0]: value})
    with pytest.raises(CheckpointError, match=r"flow\.pt"):
        load_vocoder(folder)


@pytest.mark.parametrize("file", NAMES)
def test_a_damaged_file_is_refused(folder: Path, file: str) -> None:
    """A download that broke would fail without the file's name."""
    whole = (folder / file).read_bytes()
    for data in (b"", b"\0" * 100, whole[: len(whole) // 2], b"version https://git-lfs\n"):
        (folder / file).write_bytes(data)
        with pytest.raises(CheckpointError, match=re.escape(file)):
            load_vocoder(folder)
    torch.save([1, 2], folder / file)
    with pytest.raises(CheckpointError, match=f"{file} is not a table of weights"):
        load_vocoder(folder)


def test_a_compressed_file_is_refused(folder: Path) -> None:
    """A file of 10 MB would be inflated to as many GB."""
    with zipfile.ZipFile(folder / FLOW) as whole:
        parts = {name: whole.read(name) for name in whole.namelist()}
    with zipfile.ZipFile(folder / FLOW, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in parts.items():
            packed.writestr(name, data)
    with pytest.raises(CheckpointError, match=r"flow\.pt .* it is compressed"):
        load_vocoder(folder)


@pytest.mark.parametrize("name", ["x" * 201, "a\nb"])
def test_an_error_quotes_no_strange_name(folder: Path, name: str) -> None:
    """A folder would write lines of its own into the log."""
    rewrite(folder, FLOW, **{name: torch.zeros(3)})
    with pytest.raises(CheckpointError, match=r"flow\.pt has '.{3,200}', which is not a weight$"):
        load_vocoder(folder)


@pytest.mark.parametrize("file", [FLOW_YAML, FLOW, HIFT])
def test_a_missing_file_is_named(folder: Path, file: str) -> None:
    """An operator could not tell what is missing."""
    (folder / file).unlink()
    with pytest.raises(OSError, match=re.escape(file)):
        load_vocoder(folder)


@pytest.mark.parametrize("width", [0, 4, 12, 10_000])
def test_a_width_that_is_not_supported_is_refused(folder: Path, width: int) -> None:
    """A file's shape would decide how much memory is used."""
    rewrite(folder, HIFT, **{"generator.conv_pre.bias": torch.zeros(width)})
    with pytest.raises(CheckpointError, match=r"generator\.conv_pre\.bias of shape"):
        load_vocoder(folder)


def test_a_weight_in_both_spellings_is_refused(folder: Path) -> None:
    """One of the two would be taken by chance."""
    both: dict[str, Tensor] = hift_weights(old=True)
    rewrite(folder, HIFT, **both)
    with pytest.raises(CheckpointError, match="both spellings"):
        load_vocoder(folder)


def test_nothing_of_the_published_package_is_imported(folder: Path) -> None:
    """A package of that name would run."""
    load_vocoder(folder)
    assert not {name for name in sys.modules if name.startswith("cosyvoice2")}
