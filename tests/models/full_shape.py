"""The published shape with random weights, to measure time and memory: its output is noise.

The numbers are those of the public code's configuration and of docs/model.md.
"""

from __future__ import annotations

import itertools
import json
import shutil
import string
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from runtime.model.backends.minicpmo.batched import options_for
from runtime.model.backends.minicpmo.checkpoint import Parts, build_parts
from runtime.model.backends.minicpmo.config import ModelConfig, read_config
from runtime.model.backends.minicpmo.device import WHOLE, compute_repeatably
from runtime.model.backends.minicpmo.logits import shortlists_on
from runtime.model.backends.minicpmo.model import THREADS, DuplexModel
from runtime.model.backends.minicpmo.quantized import QuantizedLinear, chosen
from runtime.model.backends.minicpmo.runner import ModelRunner
from runtime.model.backends.minicpmo.slot_layout import FILE as SLOTS_FILE
from runtime.model.backends.minicpmo.tokens import Tokens
from runtime.model.backends.minicpmo.vocoder import CODES_A_CHUNK, Pcm, Vocode

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

    def open(self, reference: Pcm) -> object:
        """Return a voice, so that codes are requested."""
        return "mute"

    def prepare(self, voice: object) -> None:
        """Do nothing."""

    def sound(self, requests: Sequence[Vocode]) -> list[tuple[Pcm, object]]:
        """Return no samples."""
        return [(np.zeros(0, np.float32), None) for _ in requests]


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
    options = options_for(device, slots, exact=exact)
    shortlists = shortlists_on(device, tokens)
    runner = ModelRunner(
        parts, Mute(), slots, shortlists, options=options, context_percent=context_percent
    )
    return DuplexModel.of(runner, tokens, {})


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


def gpu_bytes() -> int | None:
    """Peak GPU memory in bytes; None without a GPU."""
    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else None
