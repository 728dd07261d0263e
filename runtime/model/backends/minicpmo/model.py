"""A model in memory: its weights, its metadata, and the sessions on it.

A folder has the published layout: `config.json`, `tokenizer.json`, safetensors, and the vocoder's
assets. Sessions, one per slot, share only the weights (B8), so each gives the same bytes whatever
the others do. Loading sets torch to one thread for the process: sums always have the same order.

`random_model` makes one of the published architecture with random weights, to measure time and
memory: its output is noise, its timing realistic. The numbers are those of the public code's
configuration and of model.md.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import string
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import nn

from protocol.values.limits import VOICE_STEPS
from protocol.values.model import Opening

from ..base import BackendInfo
from ..streams import Anchoring
from .anchor import Anchor, Transcript
from .batched import means_on
from .chat import ChatTurn
from .checkpoint import Parts, build_parts, load_parts, weight_files
from .config import ModelConfig, load_config, read_config
from .device import WHOLE, compute_repeatably, device_name
from .logits import shortlists_on
from .machine import Machine
from .quantized import QuantizedLinear, chosen
from .session import SteppedSession
from .slots import FILE as SLOTS_FILE
from .tokens import TEMPLATE_FILE, Tokens
from .vocoder import CODES_A_CHUNK, Pcm, Sounding
from .voices import load_vocoder
from .work import Work

THREADS: Final = 1
SLOTS: Final = 8
"""Sessions that one core of a common machine serves at one unit a second, with a margin."""
VOCODER: Final = Path("assets/token2wav")
"""The folder of a checkpoint's vocoder."""
NUMERICS: Final = "2"
"""Version of our arithmetic, raised by each change that gives other bits for the same weights and
input. Version 2 scales pictures as Pillow does; logs without a version are of 1."""
QUANTIZE: Final = "quantize"
"""In a fingerprint: how the weights were quantised when they were loaded."""
LIBRARIES: Final = ("torch", "transformers", "tokenizers", "numpy", "simplejpeg")


def fingerprint(
    folder: Path, machine: Machine, tokens: Tokens, quantize: str | None = None
) -> Mapping[str, str]:
    """The facts that a full replay compares: file hashes, versions, this process's arithmetic."""
    files = {
        "weights": weight_files(folder),
        "config": [folder / "config.json"],
        "tokenizer": [
            folder / name for name in ("tokenizer.json", "tokenizer_config.json", TEMPLATE_FILE)
        ],
        "vocoder": sorted((folder / VOCODER).rglob("*")),
    }
    hashes = {}
    for name, paths in files.items():
        digest = hashlib.sha256()
        for path in paths:
            if path.is_file():
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
        hashes[name] = digest.hexdigest()
    keys, vocoder = machine.llm.keys, machine.vocoder
    return {
        "model": machine.config.name,
        **hashes,
        "numerics": NUMERICS,
        **({} if quantize is None else {QUANTIZE: quantize}),
        **({} if tokens.slots is None else {"slots": tokens.slots.policy.digest}),
        **({"voice": "none"} if vocoder is None else vocoder.fingerprint),
        **{name: _version(name) for name in LIBRARIES},
        "device": device_name(keys.device),
        "dtype": str(keys.dtype).removeprefix("torch."),
        "attention": machine.attention,
        "batch": machine.batch,
        "threads": str(torch.get_num_threads()),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:  # A machine that only computes may not have it.
        return "none"


def load_tokens(folder: Path, config: ModelConfig) -> Tokens:
    """Load a checkpoint's tokenizer; `ValueError` if it is invalid or has too many ids."""
    tokens, vocabulary = Tokens(folder), int(config.llm.vocab_size)
    if tokens.size > vocabulary:
        raise ValueError(f"tokenizer has {tokens.size} ids, the model {vocabulary}")
    return tokens


class DuplexModel:
    """One set of weights and the sessions on it."""

    def __init__(self, machine: Machine, tokens: Tokens, info: BackendInfo) -> None:
        self.machine, self.tokens, self._info = machine, tokens, info

    @property
    def info(self) -> BackendInfo:
        """The model's metadata."""
        return self._info

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        slots: int = SLOTS,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        exact: bool = False,
        voice_steps: int = VOICE_STEPS,
        quantize: str | None = None,
        context_percent: int = WHOLE,
    ) -> DuplexModel:
        """Load a model.

        Args:
            folder: holds the checkpoint.
            slots: maximum concurrent sessions; their memory is allocated now.
            device: where it computes.
            dtype: of weights, keys and values.
            exact: make results bitwise independent of the batch, if possible; see `info`.
            voice_steps: of the published voice's flow.
            quantize: how the language model's weights are quantised, one of `quantized.BITS`.
            context_percent: see `Machine`.

        `OSError`: a file is missing; `ValueError`: the config, the tokenizer or the weights do not
        fit each other.
        """
        torch.set_num_threads(THREADS)
        if exact:
            compute_repeatably()
        config = load_config(folder / "config.json")
        tokens = load_tokens(folder, config)
        parts = load_parts(config, folder, dtype, device, quantize)
        vocoder = load_vocoder(
            folder / VOCODER,
            slots=slots,
            dtype=dtype,
            device=device,
            exact=exact,
            steps=voice_steps,
        )
        if vocoder is not None and vocoder.codes < config.tts.eos:
            raise ValueError(f"the vocoder has {vocoder.codes} codes, the model {config.tts.eos}")
        where = parts.llm.lm_head.weight.device
        means = means_on(where, slots, exact=exact)
        machine = Machine(
            parts,
            vocoder,
            slots,
            shortlists_on(where, tokens),
            means=means,
            context_percent=context_percent,
        )
        return cls.of(machine, tokens, fingerprint(folder, machine, tokens, quantize))

    @classmethod
    def of(cls, machine: Machine, tokens: Tokens, facts: Mapping[str, str]) -> DuplexModel:
        """Make a model of loaded parts; `facts` is its fingerprint."""
        config, vocoder, varies = machine.config, machine.vocoder, ""
        if not machine.is_exact:
            varies = "what this device computes for several sessions"
        elif vocoder is not None and not vocoder.is_exact:
            varies = "the sound of its vocoder"
        info = BackendInfo(
            name=config.name,
            modes=("audio", "video", "chat", *(("transcription",) * config.transcribes)),
            slots=machine.slots,
            context_limit=config.context_limit,
            sliding_windows=("off", "basic", "context"),
            can_rollback=True,
            can_rebuild=True,
            can_speak=True,
            speaks=vocoder is not None,
            deterministic=not varies,
            fingerprint=facts,
            varies=varies,
            tools=tokens.tools is not None,
            duplex_tools=tokens.slots is not None,
        )
        return cls(machine, tokens, info)

    def compute(self, works: Sequence[Work]) -> list[Any]:
        """Answer requests of one bucket, in their order; see `Machine.compute`."""
        return self.machine.compute(works)

    def session(self, opening: Opening, *, slot: int) -> SteppedSession:
        """Make a session whose generators the caller drives, in an exclusive slot."""
        assert 0 <= slot < self.info.slots, (slot, self.info.slots)
        return SteppedSession(self.machine, self.tokens, opening, slot)

    def chat(self, *, slot: int) -> ChatTurn:
        """Make a chat turn whose generators the caller drives, in an exclusive slot."""
        assert 0 <= slot < self.info.slots, (slot, self.info.slots)
        return ChatTurn(self.machine, self.tokens, slot)

    def anchor(self, anchoring: Anchoring, *, slot: int) -> Anchor:
        """Make a streaming request whose generators the caller drives, in an exclusive slot."""
        assert 0 <= slot < self.info.slots, (slot, self.info.slots)
        return Anchor(self.machine, self.tokens, anchoring, slot)

    def token_id(self, name: str) -> int | None:
        """The id of a token by its name; see `Streams.token_id`."""
        return self.tokens.find(name)

    def transcript(self, *, slot: int) -> Transcript:
        """Make a transcription whose generators the caller drives, in an exclusive slot."""
        assert 0 <= slot < self.info.slots, (slot, self.info.slots)
        return Transcript(self.machine, self.tokens, slot)


# -- the published shape with random weights, to measure ----------------------------------------

Doing = Literal["speaking", "listening"]

GPU_GIB: Final = 24
"""For the weights in bf16 (18.7 GB), one session and workspace."""
FLOORS_MS: Final[Mapping[Doing, tuple[float, float]]] = {
    "listening": (7.0, 0.6),
    "speaking": (37.0, 2.4),
}
"""The floors (docs/model.md) of a unit without pictures on one H200 in bf16 at 4k of context: of
one session, and per further one. Speaking is 7 text tokens a unit."""

FULL: Final[Mapping[str, Any]] = {
    "name": "full",
    "vocab_size": 151_748,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "drop_vision_last_layer": True,
    "audio_config": {
        "d_model": 1024,
        "encoder_layers": 24,
        "encoder_attention_heads": 16,
        "encoder_ffn_dim": 4096,
        "num_mel_bins": 80,
        "max_source_positions": 1500,
    },
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 980,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
    },
    "tts_config": {
        "llm_dim": 4096,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "num_hidden_layers": 20,
        "num_key_value_heads": 12,
        "max_position_embeddings": 4096,
        "num_text_tokens": 152_064,
        "num_audio_tokens": 6562,
        "audio_bos_token_id": 151_687,
        "text_eos_token_id": 151_692,
        "condition_type": "hidden_text_merge",
        "normalize_projected_hidden": True,
    },
}
"""A `config.json` of the published shape. Whisper's 80 mel bands and Qwen3's sizes are those of the
underlying models, which the public code leaves to the checkpoint's own file."""


class Mute:
    """A vocoder without sound: codes are still generated."""

    silent_code = codes = 0
    first_codes = CODES_A_CHUNK
    is_exact = True
    fingerprint: Final = MappingProxyType({"voice": "mute"})

    def open(self, reference: Pcm) -> object:  # noqa: ARG002
        """Return a voice, so that codes are requested."""
        return "mute"

    def prepare(self, voice: object) -> None:
        """Do nothing."""

    def sound(self, soundings: Sequence[Sounding]) -> list[tuple[Pcm, object]]:
        """Return no samples."""
        return [(np.zeros(0, np.float32), None) for _ in soundings]


def full_config(layers_scale: float = 1.0) -> ModelConfig:
    """The published architecture, with the language model's layers scaled for a smaller GPU."""
    layers = max(1, round(FULL["num_hidden_layers"] * layers_scale))
    return read_config({**FULL, "num_hidden_layers": layers}, "full")


def write_tokenizer(folder: Path, size: int, into: Path) -> Path:
    """Write a folder's tokenizer into another, with more tokens, up to `size` in all.

    Of a few hundred ids, the rules would seldom find one among the highest logits.
    """
    shutil.copy(folder / "tokenizer_config.json", into)
    if (folder / SLOTS_FILE).exists():
        shutil.copy(folder / SLOTS_FILE, into)
    raw = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = raw["model"]["vocab"]
    vocabulary |= {token["content"]: token["id"] for token in raw["added_tokens"]}
    ids = set(vocabulary.values())
    letters = string.ascii_letters + string.digits
    words = ("".join(word) for word in itertools.product(letters, repeat=3))
    fresh = (word for word in words if word not in vocabulary)
    vocabulary |= {next(fresh): index for index in range(size) if index not in ids}
    (into / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    return into


def random_model(
    config: ModelConfig,
    tokenizer: Path,
    *,
    slots: int,
    device: torch.device,
    dtype: torch.dtype,
    exact: bool = False,
    quantize: str | None = None,
    context_percent: int = WHOLE,
) -> DuplexModel:
    """Make a model with random weights; the folder's tokenizer, filled up, has no more ids."""
    torch.set_num_threads(THREADS)
    if exact:
        compute_repeatably()
    torch.manual_seed(0)
    parts = build_parts(config, dtype, device, chosen(config.quantization, quantize))
    randomize(parts)
    with tempfile.TemporaryDirectory(prefix="antiphon-random-") as name:
        tokens = Tokens(write_tokenizer(tokenizer, int(config.llm.vocab_size), Path(name)))
    means = means_on(device, slots, exact=exact)
    shortlists = shortlists_on(device, tokens)
    machine = Machine(
        parts, Mute(), slots, shortlists, means=means, context_percent=context_percent
    )
    return DuplexModel.of(machine, tokens, {})


def randomize(parts: Parts) -> None:
    """Draw all matrices, so that rows of about unit size stay so; some modules begin with zeros."""
    for value in parts.parameters():
        if value.dim() > 1:
            nn.init.normal_(value, std=value.shape[-1] ** -0.5)
    for module in parts.modules():
        if isinstance(module, QuantizedLinear):
            middle = 1 << module.bits - 1
            module.codes.random_(0, 256)
            module.scales.fill_(2 * module.in_features**-0.5 / middle)
            module.zeros.fill_(middle)


def floor_ms(doing: Doing, sessions: int) -> float:
    """The minimum of a unit of each of `sessions` on an H200 in ms, by model.md."""
    first, further = FLOORS_MS[doing]
    return first + further * (sessions - 1)


def gpu_bytes() -> int | None:
    """Peak GPU memory in bytes; None without a GPU."""
    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else None
