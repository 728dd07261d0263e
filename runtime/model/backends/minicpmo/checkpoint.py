"""A checkpoint in the published layout: the model's modules, and how their weights are loaded.

`Parts` holds all modules under the published keys. No content of a checkpoint is executed. Every
key must be known, present, of the right shape and finite; the error lists all that are not. Layers
of the language model may be quantised (`quantized.py`).

The speech decoder turns a turn's text and hidden states into speech codes, 25 a second: a Llama
over embeddings. A chunk feeds one condition per text token (its embedding plus the L2-normalised
projection of the language model's hidden state), then `audio_bos`, then each drawn code. Its KV
cache lasts for the turn, so a chunk continues the speech before it.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.parametrizations import weight_norm
from transformers import LlamaModel, Qwen3Config, Qwen3ForCausalLM

from . import quantized
from .audio import AudioEncoder, AudioProjection, MelFrontEnd
from .config import ModelConfig, TtsConfig, load_config
from .vision import Resampler, VisionTower

# -- the speech decoder -------------------------------------------------------------------------

CODES_A_UNIT: Final = 25
"""A unit is one second; a code is 40 ms."""


class Projector(nn.Module):
    """Two layers from the language model's width to the decoder's."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(width, hidden)
        self.linear2 = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., hidden)."""
        out: Tensor = self.linear2(F.relu(self.linear1(x)))
        return out


class SpeechDecoder(nn.Module):
    """The decoder; its weights have the published names under `tts`.

    `projector_spk` is loaded but unused: only the vocoder uses the voice.
    """

    def __init__(self, config: TtsConfig) -> None:
        super().__init__()
        self.config = config
        hidden = int(config.llama.hidden_size)
        self.emb_text = nn.Embedding(config.num_text_tokens, hidden)
        self.emb_code = nn.ModuleList([nn.Embedding(config.num_audio_tokens, hidden)])
        head = nn.Linear(hidden, config.num_audio_tokens, bias=False)
        self.head_code = nn.ModuleList([weight_norm(head)])
        self.projector_semantic = Projector(config.llm_dim, hidden)
        self.projector_spk = Projector(config.llm_dim, hidden)
        self.model = LlamaModel(config.llama)
        del self.model.embed_tokens  # Only embeddings are ever fed.

    def condition(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """The conditions of text tokens: (..., T) ids and (..., T, llm_dim) -> (..., T, hidden)."""
        text: Tensor = self.emb_text(ids)
        return text + F.normalize(self.projector_semantic(hidden), dim=-1)

    def opening(self, text: Sequence[tuple[int, Tensor]]) -> Tensor:
        """A chunk's first rows, (text + 1, hidden): its tokens' conditions, then `audio_bos`.

        Each token comes with its hidden state, (llm_dim,); the text may be empty.
        """
        weight = self.emb_text.weight
        bos = weight[self.config.audio_bos_token_id][None]
        if not text:
            return bos
        ids = torch.tensor([index for index, _ in text], device=weight.device)
        return torch.cat((self.condition(ids, torch.stack([state for _, state in text])), bos))

    def code(self, code: int) -> Tensor:
        """A code as a row, (1, hidden): a view of the table, which launches no kernel.

        `IndexError`: the model lacks it. On a GPU, such a lookup would end all sessions.
        """
        embedding = self.emb_code[0]
        assert isinstance(embedding, nn.Embedding)
        if not 0 <= code < embedding.num_embeddings:
            raise IndexError(f"a code is not from 0 to {embedding.num_embeddings - 1}")
        return embedding.weight[code][None]

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., hidden) to logits (..., codes)."""
        out: Tensor = self.head_code[0](hidden)
        return out


# -- all modules --------------------------------------------------------------------------------


def language_model(
    config: Qwen3Config, how: quantized.Quantization | None, layers: Set[str] | None
) -> Qwen3ForCausalLM:
    """Build the stock model, some of whose linear layers are quantised, None: all of them.

    Its blocks are built one by one, since all of them may not fit into memory before.
    """
    if how is None:
        return Qwen3ForCausalLM(config)
    short = copy.deepcopy(config)
    short.num_hidden_layers = 1
    llm = Qwen3ForCausalLM(short)
    blocks = llm.model.layers
    for index in range(config.num_hidden_layers):
        if index:
            blocks.append(type(blocks[0])(config, index))
        for name, stock in list(blocks[index].named_modules()):
            if isinstance(stock, nn.Linear) and (
                layers is None or f"{quantized.LAYERS}{index}.{name}" in layers
            ):
                inputs, outputs = stock.in_features, stock.out_features
                made = quantized.QuantizedLinear(inputs, outputs, how.bits, how.groups(inputs))
                blocks[index].set_submodule(name, made)
    llm.config = llm.model.config = config
    return llm


class Parts(nn.Module):
    """Language model, vision tower and resampler, audio encoder and projection, speech decoder.

    Args:
        how: quantises the language model's `layers`, None: all of them.

    Attributes:
        vpm: pictures to patches, which `resampler` turns into embeddings.
        apm: sound to rows, which `audio_projection_layer` turns into embeddings.
        tts: text and hidden states to speech codes.
        front_end: sound to mel frames; tables only, always on the host.
    """

    def __init__(
        self,
        config: ModelConfig,
        how: quantized.Quantization | None = None,
        layers: Set[str] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        width = int(config.llm.hidden_size)
        self.llm = language_model(config.llm, how, layers)
        self.vpm = VisionTower(config.vision)
        self.resampler = Resampler(config.vision, width)
        self.apm = AudioEncoder(config.audio)
        self.audio_projection_layer = AudioProjection(config.audio, width)
        self.tts = SpeechDecoder(config.tts)
        self.front_end = MelFrontEnd(config.audio.num_mel_bins)

    @property
    def is_on_cpu(self) -> bool:
        """Whether the weights are, and everything is computed, on the CPU."""
        device: torch.device = self.llm.lm_head.weight.device
        return device.type == "cpu"

    def embed(self, ids: Sequence[int]) -> Tensor:
        """Token ids to embeddings, (T, width); that of one id is a view, and launches no kernel.

        `IndexError`: the model lacks an id. On a GPU, such a lookup would end all sessions.
        """
        table = self.llm.model.embed_tokens
        if ids and not 0 <= min(ids) <= max(ids) < table.num_embeddings:
            raise IndexError(f"a token id is not from 0 to {table.num_embeddings - 1}")
        if len(ids) == 1:
            row: Tensor = table.weight[ids[0]]
            return row[None]
        out: Tensor = table(torch.tensor(ids, dtype=torch.int64, device=table.weight.device))
        return out


# -- loading ------------------------------------------------------------------------------------

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
SUFFIX: Final = ".safetensors"
CONFIG: Final = "config.json"
CODES: Final = ".qweight"
UNUSED: Final = frozenset({"tts.model.embed_tokens.weight"})
"""Keys of the published checkpoint that are not used in computation."""
LISTED_MAX: Final = 20
"""Maximum keys per kind in an error."""


class CheckpointError(ValueError):
    """A checkpoint that does not fit the model; the message lists every reason."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in order.

    `OSError`: there are none; `CheckpointError`: the index is malformed, or names a file outside
    the folder.
    """
    index = folder / INDEX
    if not index.exists():
        if not (folder / WEIGHTS).exists():
            raise FileNotFoundError(f"neither {WEIGHTS} nor {INDEX} is there")
        return [folder / WEIGHTS]
    try:
        raw = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{INDEX} is not JSON: {error}") from error
    mapping = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(mapping, dict) or not all(isinstance(n, str) for n in mapping.values()):
        raise CheckpointError(f"{INDEX} has no weight_map")
    names = sorted(set(mapping.values()))
    if any(Path(name).name != name or not name.endswith(SUFFIX) for name in names):
        raise CheckpointError(f"{INDEX} names a file that is not beside it")
    return [folder / name for name in names]


@contextmanager
def _defaults(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def build_parts(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    how: quantized.Quantization | None = None,
    layers: Set[str] | None = None,
) -> Parts:
    """Build the modules with arbitrary weights, for inference; see `Parts`."""
    with _defaults(dtype, device):
        parts = Parts(config, how, layers)
    return parts.requires_grad_(False).eval()


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every weight by key, without allocating them."""
    parts = build_parts(config, torch.float32, torch.device("meta"))
    return {key: tuple(value.shape) for key, value in parts.state_dict().items()}


def quantized_layers(folder: Path) -> frozenset[str]:
    """The language model's layers whose weights a folder's files have as codes."""
    found = set[str]()
    for path in weight_files(folder):
        with _opened(path) as file:
            keys = sorted(file.keys())
            found |= {key.removesuffix(CODES) for key in keys if key.endswith(CODES)}
    return frozenset(name for name in found if name.startswith(quantized.LAYERS))


def expected(config: ModelConfig, folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a folder's files must have, by key.

    `OSError`: a file is missing; `CheckpointError`: a file is damaged.
    """
    found, how = shapes(config), config.quantization
    if how is None:
        return found
    names = [
        name
        for name in quantized_layers(folder)
        if quantized.is_quantizable(key := f"{name}.weight", found.get(key, ()))
    ]
    if not names:
        raise CheckpointError(f"config.json says {how.method}, but no layer is quantised")
    for name in names:
        outputs, inputs = found.pop(f"{name}.weight")
        parts = how.shapes(outputs, inputs)
        found |= {f"{name}.{part}": shape for part, shape in parts.items()}
    return found


@attrs.frozen(kw_only=True)
class Survey:
    """A comparison of file headers with the config; each misshaped key comes with both shapes."""

    tensors: int
    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    misshaped: tuple[str, ...]

    @property
    def problems(self) -> list[str]:
        """The problems, one per line; empty if the checkpoint fits."""
        return [
            *_listed("missing keys", self.missing),
            *_listed("unknown keys", self.unknown),
            *_listed("keys of another shape", self.misshaped),
        ]


def _listed(kind: str, keys: tuple[str, ...]) -> list[str]:
    if not keys:
        return []
    shown = ", ".join(keys[:LISTED_MAX])
    more = f" and {len(keys) - LISTED_MAX} more" if len(keys) > LISTED_MAX else ""
    return [f"{len(keys)} {kind}: {shown}{more}"]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error


def survey(wanted: Mapping[str, tuple[int, ...]], folder: Path) -> Survey:
    """Compare the files' headers with the `wanted` shapes, without reading weights.

    `OSError`: a file is missing; `CheckpointError`: a file is damaged.
    """
    missing, unknown, misshaped, tensors = set(wanted), [], [], 0
    for path in weight_files(folder):
        with _opened(path) as file:
            for key in sorted(file.keys()):
                if key in UNUSED:
                    continue
                if key not in wanted:
                    unknown.append(key)
                    continue
                missing.discard(key)
                found = file.get_slice(key)
                shape, dtype = tuple(found.get_shape()), found.get_dtype()
                if shape != wanted[key]:
                    misshaped.append(f"{key} {shape} not {wanted[key]}")
                elif key.endswith(quantized.INTEGERS) and dtype != "I32":
                    misshaped.append(f"{key} {dtype} not I32")
                else:
                    tensors += 1
    return Survey(
        tensors=tensors,
        missing=tuple(sorted(missing)),
        unknown=tuple(sorted(unknown)),
        misshaped=tuple(sorted(misshaped)),
    )


def load_parts(
    config: ModelConfig,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    quantize: str | None = None,
) -> Parts:
    """Build the modules for inference and load every weight, converted to `dtype`.

    The layers that may be quantised are, if the files say so or `quantize` does, one of `BITS`.
    `OSError`: a file is missing; `CheckpointError`: a key is unknown, missing, misshaped or not
    finite, or a file damaged; `ValueError`: the checkpoint is quantised already.
    """
    how = quantized.chosen(config.quantization, quantize)
    problems = survey(expected(config, folder), folder).problems
    if problems:
        raise CheckpointError("the checkpoint does not fit its config: " + "; ".join(problems))
    layers = None if config.quantization is None else quantized_layers(folder)
    parts = build_parts(config, dtype, torch.device(device), how, layers)
    wanted, broken = parts.state_dict(), list[str]()
    quantised = {
        name: each
        for name, each in parts.named_modules()
        if isinstance(each, quantized.QuantizedLinear)
    }
    waiting = dict[str, dict[str, torch.Tensor]]()
    for path in weight_files(folder):
        with _opened(path) as file:
            for key in sorted(set(file.keys()) - UNUSED):
                tensor = file.get_tensor(key)
                name, _, part = key.rpartition(".")
                if name not in quantised:
                    tensor = wanted[key].copy_(tensor)
                else:  # Taken when all of the layer's tensors are there.
                    waiting.setdefault(name, {})[part] = tensor = tensor.to(device)
                    if _take(quantised[name], name, waiting[name], config.quantization):
                        tensor = quantised[name].scales if part == "weight" else tensor
                        del waiting[name]
                if not _is_finite(tensor):
                    broken.append(key)
    if broken:
        kind = f"keys with numbers that are not finite in {str(dtype).removeprefix('torch.')}"
        raise CheckpointError("; ".join(_listed(kind, tuple(sorted(broken)))))
    return parts


def save_quantized(folder: Path, into: Path, quantize: str) -> None:
    """Write a checkpoint with the language model's layers quantised, in GPTQ's form.

    `FileExistsError`: `into` exists; other errors are those of `load_parts`.
    """
    if into.exists():
        raise FileExistsError(f"{into} exists")
    config, bits = load_config(folder / CONFIG), quantized.BITS[quantize]
    quantized.chosen(config.quantization, quantize)
    if problems := survey(expected(config, folder), folder).problems:
        raise CheckpointError("the checkpoint does not fit its config: " + "; ".join(problems))
    files = weight_files(folder)
    part = into.with_name(f"{into.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # Of a run that was killed.
    written = {INDEX, CONFIG, *(path.name for path in files)}
    try:
        shutil.copytree(
            folder, part, ignore=lambda where, _: written if Path(where) == folder else set()
        )
        _write_quantized(folder, files, part, bits)
        part.rename(into)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _write_quantized(folder: Path, files: Sequence[Path], part: Path, bits: int) -> None:
    places = dict[str, str]()
    for path in files:
        kept = dict[str, torch.Tensor]()
        with _opened(path) as file:
            for key in sorted(file.keys()):
                tensor, name = file.get_tensor(key), key.rpartition(".")[0]
                if quantized.is_quantizable(key, tensor.shape):
                    made = quantized.gptq_tensors(tensor, bits)
                    kept |= {f"{name}.{suffix}": each for suffix, each in made.items()}
                else:
                    kept[key] = tensor
        save_file(kept, part / path.name, metadata={"format": "pt"})
        places |= dict.fromkeys(kept, path.name)
    if files != [folder / WEIGHTS]:
        index = {"metadata": {}, "weight_map": places}
        (part / INDEX).write_text(json.dumps(index), encoding="utf-8")
    raw = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    raw[quantized.KEY] = quantized.written_quantization(bits)
    (part / CONFIG).write_text(json.dumps(raw, indent=2), encoding="utf-8")


def _take(
    layer: quantized.QuantizedLinear,
    name: str,
    found: Mapping[str, torch.Tensor],
    how: quantized.Quantization | None,
) -> bool:
    """Fill a quantised layer, if all of its tensors are there."""
    if how is None:
        layer.quantize(found["weight"])
        return True
    if len(found) < len(how.shapes(layer.out_features, layer.in_features)):
        return False
    try:
        layer.read(found, how)
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}") from error
    return True


def _is_finite(weight: torch.Tensor) -> bool:
    """Whether all numbers are finite: one pass without a copy, since weights are large."""
    return bool(torch.stack(torch.aminmax(weight)).isfinite().all()) if weight.numel() else True
