"""A model's architecture, from the `config.json` of a published checkpoint.

The top level is a Qwen3 config; `vision_config`, `audio_config` and `tts_config` hold the towers.
Unsupported values are refused by name, so a file of another version never loads partially. Absent
values take the published class's defaults. Keys without effect (`architectures`, ...) are ignored.

Slicing follows `config.json`, mel frames follow `audio`; but the published code follows the
folder's `preprocessor_config.json`, so a different one belongs to another model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import attrs
from transformers import LlamaConfig, Qwen3Config, SiglipVisionConfig, WhisperConfig

from protocol.values.model import INPUT_RATE_HZ

from .attention import ATTENTION
from .quantized import KEY, Quantization, read_quantization, with_quantization

FFT: Final = 400
"""Samples of a mel frame."""
HOP: Final = 160
"""Samples from one mel frame to the next."""
UNIT_FRAMES: Final = 50
"""Audio frames a second after the convolutions; the encoder pools them to embeddings."""
REQUIRED: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "config": {
            "attention_bias": False,
            "audio_chunk_length": 1.0,
            "hidden_act": "silu",
            "model_type": "minicpmo",
            "rope_parameters": None,
            "rope_scaling": None,
            "slice_mode": True,
        },
        "config.audio_config": {"activation_function": "gelu", "scale_embedding": False},
        "config.vision_config": {"hidden_act": "gelu_pytorch_tanh", "num_channels": 3},
        "config.tts_config": {
            "backbone_model": "llama",
            "condition_type": "hidden_text_merge",
            "hidden_act": "silu",
            "interleaved": False,
            "normalize_projected_hidden": True,
            "num_vq": 1,
            "projector_type": "mlp",
            "use_llm_hidden_state": False,
        },
    }
)
"""The only supported values; any other is another architecture."""
PREPROCESSOR: Final = "preprocessor_config.json"
PICTURE_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {"image_feature_size": 64, "patch_size": 14, "scale_resolution": 448}
)
"""Defaults of the published `MiniCPMVImageProcessor`; its other defaults equal this code's."""
VERSION: Final = "4.5"
"""Of the published model; a text or a number in its file."""
TTS_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "audio_bos_token_id": 21_132,
        "condition_type": "llm_hidden",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "llm_dim": 2560,
        "max_position_embeddings": 4096,
        "normalize_projected_hidden": False,
        "num_attention_heads": 12,
        "num_audio_tokens": 4097,
        "num_hidden_layers": 20,
        "num_key_value_heads": 12,
        "num_text_tokens": 21_178,
        "text_eos_token_id": 21_133,
    }
)
"""Defaults of the published `MiniCPMTTSConfig`; two are unsupported, so a file must set them."""


@attrs.frozen(kw_only=True)
class AudioConfig:
    """The streaming Whisper encoder (`audio_config`) and its pooling.

    Attributes:
        d_model: width of the residual stream.
        encoder_attention_heads: heads; each has its own keys.
        encoder_ffn_dim: width inside the MLP.
        max_source_positions: rows of the position table, at 50 a second.
        pool: frames per embedding (`audio_pool_step` of the top level).
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
        """Embeddings per unit."""
        return UNIT_FRAMES // self.pool

    @property
    def units(self) -> int:
        """Units in the cache before it is dropped entirely (29 of 1500 rows)."""
        return (self.max_source_positions - 3) // UNIT_FRAMES


@attrs.frozen(kw_only=True)
class VisionConfig:
    """The SigLIP tower (`vision_config`) and the resampler.

    Attributes:
        siglip: for the stock layers; without the layer that is dropped.
        queries: embeddings per slice (`query_num`).
        scale_resolution: side of a square with a slice's area, in pixels.
        patch_size: side of a patch, in pixels.
    """

    siglip: SiglipVisionConfig
    queries: int
    scale_resolution: int
    patch_size: int


@attrs.frozen(kw_only=True)
class TtsConfig:
    """The speech decoder (`tts_config`).

    Attributes:
        llama: its backbone.
        llm_dim: width of the hidden states that condition it.
        num_text_tokens: rows of its text embedding.
        num_audio_tokens: speech codes; the last one ends speech.
        audio_bos_token_id: row of the text embedding before the first code.
        text_eos_token_id: row after the last text of a chat answer; None if there is none.
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
    """The values of `config.json` that the modules are built from.

    `name`: the file's, or else the folder's. `llm`: the language model's config. `transcribes`:
    trained to transcribe second by second; not a key of published files. `quantization`: of the
    language model's layers; None: they are not quantised.
    """

    name: str
    llm: Qwen3Config
    audio: AudioConfig
    vision: VisionConfig
    tts: TtsConfig
    transcribes: bool = False
    quantization: Quantization | None = None

    @property
    def context_limit(self) -> int:
        """Maximum tokens of a session: 8192, or fewer positions."""
        return min(CONTEXT_LIMIT, int(self.llm.max_position_embeddings))


CONTEXT_LIMIT: Final = 8192
"""A duplex session's context (000, `context_full`)."""


def _check_values(
    raw: Mapping[str, Any],
    path: str,
    wanted: Mapping[str, Any],
    defaults: Mapping[str, Any],
    reason: str,
) -> None:
    """Check values of a file; an absent one without a default is as wanted.

    `ValueError` names the first that differs, by `path`, and the wanted one in `reason`.
    """
    for key, value in wanted.items():
        found = raw.get(key, defaults.get(key, value))
        if found != value:
            where = "" if key in raw else " by default"
            raise ValueError(f"{path}.{key} is {found!r}{where}; {reason.format(value)}")


def _check(raw: Mapping[str, Any], path: str, defaults: Mapping[str, Any]) -> None:
    """Refuse unsupported values."""
    _check_values(raw, path, REQUIRED[path], defaults, "only {!r} is supported")


def _section(
    raw: Mapping[str, Any], key: str, defaults: Mapping[str, Any] = MappingProxyType({})
) -> Mapping[str, Any]:
    section = raw.get(key)
    if not isinstance(section, Mapping):
        raise ValueError(f"config.{key} is missing")
    _check(section, f"config.{key}", defaults)
    return {**defaults, **section}


def _chosen(raw: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The values that a file sets; a stock class has defaults for the rest."""
    return {name: raw[name] for name in names if name in raw}


def _llm(raw: Mapping[str, Any]) -> Qwen3Config:
    chosen = _chosen(
        raw,
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
        *("rms_norm_eps", "rope_theta", "tie_word_embeddings"),
        *("sliding_window", "use_sliding_window", "max_window_layers"),
    )
    if raw.get("use_sliding_window") and raw.get("max_window_layers"):
        raise ValueError(
            f"config.max_window_layers is {raw['max_window_layers']}; with use_sliding_window only "
            "0 is supported"
        )
    return Qwen3Config(**chosen, attn_implementation=ATTENTION)


def _audio(raw: Mapping[str, Any]) -> AudioConfig:
    names = [field.name for field in attrs.fields(AudioConfig) if field.name != "pool"]
    whisper = WhisperConfig(**_chosen(_section(raw, "audio_config"), *names))
    pool = raw.get("audio_pool_step", 5)
    return AudioConfig(**{name: getattr(whisper, name) for name in names}, pool=pool)


def _vision(raw: Mapping[str, Any]) -> VisionConfig:
    section = _section(raw, "vision_config")
    siglip = SiglipVisionConfig(
        **_chosen(
            section,
            *("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"),
            *("image_size", "patch_size", "layer_norm_eps"),
        ),
        attn_implementation="sdpa",
    )
    siglip.num_hidden_layers -= bool(raw.get("drop_vision_last_layer", True))
    slices, patch = raw.get("slice_config") or {}, siglip.patch_size
    if slices.get("patch_size", patch) != patch:
        raise ValueError(
            f"config.slice_config.patch_size is {slices['patch_size']}, "
            f"config.vision_config.patch_size {patch}; they must be equal"
        )
    return VisionConfig(
        siglip=siglip,
        queries=raw.get("query_num", 64),
        scale_resolution=slices.get("scale_resolution", 448),
        patch_size=patch,
    )


def _tts(raw: Mapping[str, Any]) -> TtsConfig:
    section = _section(raw, "tts_config", TTS_DEFAULTS)
    llama = LlamaConfig(
        **_chosen(
            section,
            *("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"),
            *("num_key_value_heads", "max_position_embeddings"),
        ),
        vocab_size=1,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=ATTENTION,
    )
    rows = section["num_text_tokens"]
    for key in ("audio_bos_token_id", "text_eos_token_id"):
        row = section[key]
        if row is None and key == "text_eos_token_id":
            continue
        if not isinstance(row, int) or not 0 <= row < rows:
            raise ValueError(
                f"config.tts_config.{key} is {row!r}, not a row of the text table: "
                f"config.tts_config.num_text_tokens is {rows}"
            )
    names = [field.name for field in attrs.fields(TtsConfig) if field.name != "llama"]
    return TtsConfig(llama=llama, **{name: section[name] for name in names})


def read_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """Read a parsed `config.json`, named `name` by default; `ValueError` names an invalid value."""
    _check(raw, "config", MappingProxyType({}))
    if str(raw.get("version", VERSION)) != VERSION:
        raise ValueError(f"config.version is {raw['version']!r}; only {VERSION!r} is supported")
    transcribes = raw.get("transcribes", False)
    if not isinstance(transcribes, bool):
        raise ValueError(f"config.transcribes is {transcribes!r}; it is true or false")
    config = ModelConfig(
        name=str(raw.get("name", name)),
        llm=_llm(raw),
        audio=_audio(raw),
        vision=_vision(raw),
        tts=_tts(raw),
        transcribes=transcribes,
        quantization=read_quantization(raw.get(KEY)),
    )
    if config.tts.llm_dim != config.llm.hidden_size:
        raise ValueError(
            f"config.tts_config.llm_dim is {config.tts.llm_dim}, "
            f"config.hidden_size {config.llm.hidden_size}; they must be equal"
        )
    return config


def load_config(path: Path) -> ModelConfig:
    """Read a `config.json`, with what other files in its folder say about it.

    A `preprocessor_config.json` must agree with it.

    `OSError`: it cannot be read; `ValueError`: one of them is not a JSON object, or not supported.
    """
    config = read_config(with_quantization(_read(path), path.parent), path.parent.name)
    if (beside := path.parent / PREPROCESSOR).exists():
        _check_preprocessor(_read(beside), config)
    return config


def _check_preprocessor(raw: Mapping[str, Any], config: ModelConfig) -> None:
    """Check a parsed `preprocessor_config.json`; `ValueError` names a value that differs."""
    computed = {
        "image_processor_type": "MiniCPMVImageProcessor",
        "scale_resolution": config.vision.scale_resolution,
        "patch_size": config.vision.patch_size,
        "image_feature_size": config.vision.queries,
        "slice_mode": True,
        "norm_mean": [0.5, 0.5, 0.5],
        "norm_std": [0.5, 0.5, 0.5],
        "feature_size": config.audio.num_mel_bins,
        "sampling_rate": INPUT_RATE_HZ,
        "n_fft": FFT,
        "hop_length": HOP,
        "dither": 0.0,
    }
    _check_values(raw, "preprocessor_config", computed, PICTURE_DEFAULTS, "{!r} is computed")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path.name} is not an object")
    return raw
