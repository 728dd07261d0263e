"""The shape of a model, as `config.json` says it: frozen values, read strictly.

A tower is a stack of equal blocks (`layers.py`). Every dimension of every tower stands here and
nowhere else; the modules take them as they are. Unknown and missing keys are refused, so that a
file of another version never loads half-understood.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class TowerConfig:
    """One stack of transformer blocks.

    Attributes:
        hidden: width of the residual stream.
        intermediate: width inside the gated MLP.
        layers: blocks.
        heads: query heads.
        kv_heads: key and value heads; divides `heads`.
        head_dim: width of one head.
        window: positions that one query sees, itself included.
        rope_theta: base of the rotary embedding.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    rope_theta: float = 10_000.0


@attrs.frozen(kw_only=True)
class AudioConfig:
    """The streaming audio encoder: mel, two convolutions (100 -> 50 frames a second), a tower.

    Attributes:
        tower: its window counts frames at 50 a second; it is a multiple of 50 plus 1 at most.
        mels: mel bands between 40 Hz and 8 kHz.
    """

    tower: TowerConfig
    mels: int


@attrs.frozen(kw_only=True)
class VisionConfig:
    """The vision tower: patches of a square picture, a tower, a resampler to 64 embeddings.

    Attributes:
        tower: sees all patches of one picture at once; its window is unused.
        side: pixels of the picture's longer side at most.
        patch: pixels of a patch's side; divides `side`.
    """

    tower: TowerConfig
    side: int
    patch: int


@attrs.frozen(kw_only=True)
class TtsConfig:
    """The speech decoder: text and hidden states to speech codes, 25 a second.

    Attributes:
        tower: its KV lives for a turn.
        codes: speech codes; the id after the last is the end of speech.
        temperature: of the sampling.
        top_k: candidates kept.
        top_p: probability mass kept.
        repetition_penalty: divides the logits of the last `repetition_window` codes.
        repetition_window: codes of the turn that are penalised.
    """

    tower: TowerConfig
    codes: int
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    repetition_window: int


@attrs.frozen(kw_only=True)
class VocoderConfig:
    """The vocoder: one stored piece of waveform a code.

    Attributes:
        frame: samples at 24 kHz that a code stands for.
        overlap: samples over which neighbours are faded into each other.
        search: samples by which a piece may start later, to meet its neighbour in phase.
    """

    frame: int
    overlap: int
    search: int


@attrs.frozen(kw_only=True)
class ModelConfig:
    """Everything `config.json` holds.

    Attributes:
        name: the model's name.
        vocabulary: rows of the token embedding.
        context_limit: most tokens in a session's KV cache.
        llm: the language model.
        audio: the audio encoder.
        vision: the vision tower.
        tts: the speech decoder.
        vocoder: codes to waveform.
    """

    name: str
    vocabulary: int
    context_limit: int
    llm: TowerConfig
    audio: AudioConfig
    vision: VisionConfig
    tts: TtsConfig
    vocoder: VocoderConfig


_NESTED: dict[str, type[Any]] = {
    "tower": TowerConfig,
    "llm": TowerConfig,
    "audio": AudioConfig,
    "vision": VisionConfig,
    "tts": TtsConfig,
    "vocoder": VocoderConfig,
}


def _build(cls: type[T], raw: Mapping[str, Any], path: str) -> T:
    fields = {field.name: field for field in attrs.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(raw) - set(fields))
    missing = sorted(n for n, f in fields.items() if f.default is attrs.NOTHING and n not in raw)
    if unknown or missing:
        raise ValueError(f"{path}: unknown keys {unknown}, missing keys {missing}")
    values = {
        name: _build(_NESTED[name], value, f"{path}.{name}") if name in _NESTED else value
        for name, value in raw.items()
    }
    return cls(**values)


def load_config(path: Path) -> ModelConfig:
    """Read a `config.json`.

    Args:
        path: the file.

    Returns:
        The configuration.

    Raises:
        ValueError: a key is unknown or missing; the message says where.
    """
    return _build(ModelConfig, json.loads(path.read_text(encoding="utf-8")), "config")
