"""The shape of a model, as the `config.json` of a published checkpoint says it.

The top level is a Qwen3 config; `vision_config`, `audio_config` and `tts_config` hold the towers.
What a tower needs is read here into frozen values, and a value that this code does not compute is
refused by name: a file of another version never loads half-understood. Keys that say nothing about
the computation (`architectures`, `auto_map`, ...) are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs
from transformers import LlamaConfig, Qwen3Config, SiglipVisionConfig

from .attention import ATTENTION

T = TypeVar("T")

UNIT_FRAMES: Final = 50
"""Audio frames a second after the convolutions; the encoder pools them to embeddings."""
REQUIRED: Final[Mapping[str, Mapping[str, Any]]] = {
    "config": {"attention_bias": False, "hidden_act": "silu", "rope_scaling": None},
    "config.audio_config": {"activation_function": "gelu"},
    "config.vision_config": {"hidden_act": "gelu_pytorch_tanh"},
    "config.tts_config": {
        "backbone_model": "llama",
        "hidden_act": "silu",
        "normalize_projected_hidden": True,
        "num_vq": 1,
        "projector_type": "mlp",
    },
}
"""Where a file says anything else than this, it is another architecture."""


@attrs.frozen(kw_only=True)
class AudioConfig:
    """The streaming Whisper encoder (`audio_config`), with the pool behind it.

    Attributes:
        d_model: width of the residual stream.
        encoder_layers: blocks.
        encoder_attention_heads: heads; each has its own keys.
        encoder_ffn_dim: width inside the MLP.
        num_mel_bins: mel bands.
        max_source_positions: rows of the position table, at 50 a second.
        pool: frames that make one embedding (`audio_pool_step` of the top level).
    """

    d_model: int
    encoder_layers: int
    encoder_attention_heads: int
    encoder_ffn_dim: int
    num_mel_bins: int
    max_source_positions: int
    pool: int

    @property
    def embeddings(self) -> int:
        """Embeddings a unit."""
        return UNIT_FRAMES // self.pool

    @property
    def units(self) -> int:
        """Units that the keys and values hold before they are dropped whole (29 of 1500 rows)."""
        return (self.max_source_positions - 3) // UNIT_FRAMES


@attrs.frozen(kw_only=True)
class VisionConfig:
    """The SigLIP tower (`vision_config`) and the resampler.

    Attributes:
        siglip: the tower's config, for the stock layers; without the layer that is dropped.
        queries: embeddings a slice (`query_num`).
        scale_resolution: side of a square whose area one slice has.
        patch_size: pixels of a patch's side.
    """

    siglip: SiglipVisionConfig
    queries: int
    scale_resolution: int
    patch_size: int


@attrs.frozen(kw_only=True)
class TtsConfig:
    """The speech decoder (`tts_config`).

    Attributes:
        llama: its backbone, for the stock model.
        llm_dim: width of the hidden states that it is conditioned on.
        num_text_tokens: rows of its text embedding.
        num_audio_tokens: speech codes; the last one is the end of speech.
        audio_bos_token_id: row of the text embedding before the first code.
        text_eos_token_id: row behind the last text of an answer of chat; None where there is none.
    """

    llama: LlamaConfig
    llm_dim: int
    num_text_tokens: int
    num_audio_tokens: int
    audio_bos_token_id: int
    text_eos_token_id: int | None

    @property
    def eos(self) -> int:
        """The code that ends speech."""
        return self.num_audio_tokens - 1


@attrs.frozen(kw_only=True)
class ModelConfig:
    """Everything of `config.json` that the modules are built from.

    Attributes:
        name: the model's name; the folder's where the file gives none.
        llm: the language model, for the stock Qwen3.
        audio: the audio encoder.
        vision: the vision tower.
        tts: the speech decoder.
        transcribes: it was trained to write down what it hears second by second; no key of the
            published files, for these were not.
    """

    name: str
    llm: Qwen3Config
    audio: AudioConfig
    vision: VisionConfig
    tts: TtsConfig
    transcribes: bool = False

    @property
    def context_limit(self) -> int:
        """Most tokens of a session (8192 of whatever the positions would allow)."""
        return min(CONTEXT_LIMIT, int(self.llm.max_position_embeddings))


CONTEXT_LIMIT: Final = 8192
"""A duplex session's context (000, `context_full`)."""


def _fields(cls: type[T], raw: Mapping[str, Any], path: str, **given: object) -> T:
    """Build an attrs class from the keys it names."""
    names = [field.name for field in attrs.fields(cls) if field.name not in given]  # type: ignore[arg-type]
    missing = [name for name in names if name not in raw]
    if missing:
        raise ValueError(f"{path}: missing keys {missing}")
    return cls(**{name: raw[name] for name in names}, **given)


def _check(raw: Mapping[str, Any], path: str) -> None:
    for key, wanted in REQUIRED[path].items():
        if raw.get(key, wanted) != wanted:
            raise ValueError(f"{path}.{key} is {raw[key]!r}; only {wanted!r} is supported")


def _section(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = raw.get(key)
    if not isinstance(section, Mapping):
        raise ValueError(f"config.{key} is missing")
    _check(section, f"config.{key}")
    return section


def _llm(raw: Mapping[str, Any]) -> Qwen3Config:
    names = {
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
        *("rms_norm_eps", "rope_theta", "tie_word_embeddings"),
        *("sliding_window", "use_sliding_window", "max_window_layers"),
    }
    missing = sorted(names - {"sliding_window", "use_sliding_window", "max_window_layers"} - {*raw})
    if missing:
        raise ValueError(f"config: missing keys {missing}")
    if raw.get("use_sliding_window") and raw.get("max_window_layers"):
        raise ValueError(
            f"config.max_window_layers is {raw['max_window_layers']}; with use_sliding_window only "
            "0 is supported"
        )
    chosen = {name: raw[name] for name in sorted(names) if name in raw}
    return Qwen3Config(**chosen, attn_implementation=ATTENTION)


def _vision(raw: Mapping[str, Any]) -> VisionConfig:
    section = _section(raw, "vision_config")
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "image_size", "patch_size")
    missing = [name for name in (*names, "num_hidden_layers") if name not in section]
    if missing:
        raise ValueError(f"config.vision_config: missing keys {missing}")
    layers = section["num_hidden_layers"] - bool(raw.get("drop_vision_last_layer", True))
    siglip = SiglipVisionConfig(
        **{name: section[name] for name in names},
        num_hidden_layers=layers,
        layer_norm_eps=section.get("layer_norm_eps", 1e-6),
        attn_implementation="sdpa",
    )
    slices = raw.get("slice_config") or {}
    return VisionConfig(
        siglip=siglip,
        queries=raw.get("query_num", 64),
        scale_resolution=slices.get("scale_resolution", 448),
        patch_size=section["patch_size"],
    )


def _tts(raw: Mapping[str, Any]) -> TtsConfig:
    section = _section(raw, "tts_config")
    names = (
        *("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"),
        *("num_key_value_heads", "max_position_embeddings"),
    )
    missing = [name for name in names if name not in section]
    if missing:
        raise ValueError(f"config.tts_config: missing keys {missing}")
    llama = LlamaConfig(
        **{name: section[name] for name in names},
        vocab_size=1,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=ATTENTION,
    )
    eos = section.get("text_eos_token_id")
    return _fields(TtsConfig, section, "config.tts_config", llama=llama, text_eos_token_id=eos)


def read_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """Read the content of a `config.json`.

    Args:
        raw: as parsed.
        name: the model's name, unless the file has one.

    Returns:
        The configuration.

    Raises:
        ValueError: a key is missing or has a value that is not supported; the message names it.
    """
    _check(raw, "config")
    transcribes = raw.get("transcribes", False)
    if not isinstance(transcribes, bool):
        raise ValueError(f"config.transcribes is {transcribes!r}; it is true or false")
    config = ModelConfig(
        name=str(raw.get("name", name)),
        llm=_llm(raw),
        audio=_fields(
            AudioConfig,
            _section(raw, "audio_config"),
            "config.audio_config",
            pool=raw.get("audio_pool_step", 5),
        ),
        vision=_vision(raw),
        tts=_tts(raw),
        transcribes=transcribes,
    )
    if config.tts.llm_dim != config.llm.hidden_size:
        raise ValueError(
            f"config.tts_config.llm_dim is {config.tts.llm_dim}, "
            f"config.hidden_size {config.llm.hidden_size}; they must be equal"
        )
    return config


def load_config(path: Path) -> ModelConfig:
    """Read a `config.json`; see `read_config`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON object, or not one that is supported.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is no JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path.name} is not an object")
    return read_config(raw, path.parent.name)
