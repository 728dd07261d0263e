"""A model's memory, computed from its config without reading weights or allocating.

A session needs KV caches, `stores`, the mel front end's sound, and the vocoder's caches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import attrs
import torch

from .checkpoint import shapes
from .config import UNIT_FRAMES, ModelConfig
from .mel import BUFFER_MAX, HOP
from .token2wav import FILES

WORKSPACE_SHARE: Final = 0.1
"""Share of the memory for activations, the GPU's context and allocator losses."""
SLOTS_MAX: Final = 64
"""Maximum recommended slots, however much memory there is: a full batch of the engine."""
TOKEN2WAV_BYTES: Final = 1_450_000_000
"""Estimate for the published vocoder per session: 1.3 MB a frame (10 steps, float32) for a voice of
6 s and two states of a turn, in GPU memory if it runs there. That of `tiny` needs almost none."""
SAMPLE_BYTES: Final = 4
COPIES: Final = 2
"""Of the mel front end's buffer: the session's, and the one for a rollback."""


@attrs.frozen(kw_only=True)
class StoreShape:
    """The KV cache of one decoder, for one session.

    `capacity`: positions. `width`: of a head. `window`: positions that a query sees, itself
    included; None: all.
    """

    layers: int
    heads: int
    capacity: int
    width: int
    window: int | None = None

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Memory of one slot, in bytes."""
        return 2 * self.layers * self.heads * self.capacity * self.width * dtype.itemsize


def stores(config: ModelConfig) -> Mapping[str, StoreShape]:
    """The caches of every session in `Machine`: `llm`, `tts` and `audio`."""
    llm, llama, audio = config.llm, config.tts.llama, config.audio
    return {
        "llm": StoreShape(
            layers=llm.num_hidden_layers,
            heads=llm.num_key_value_heads,
            capacity=config.context_limit,
            width=llm.head_dim,
            window=llm.sliding_window if llm.use_sliding_window else None,
        ),
        "tts": StoreShape(
            layers=llama.num_hidden_layers,
            heads=llama.num_key_value_heads,
            capacity=llama.max_position_embeddings,
            width=llama.hidden_size // llama.num_attention_heads,
        ),
        "audio": StoreShape(
            layers=audio.encoder_layers,
            heads=audio.encoder_attention_heads,
            capacity=audio.units * UNIT_FRAMES,
            width=audio.d_model // audio.encoder_attention_heads,
        ),
    }


@attrs.frozen(kw_only=True)
class MemoryPlan:
    """A model's memory in bytes.

    Attributes:
        parameters: count by part of the model: `llm`, `vpm`, ...
        weight_bytes: by part, in the format computed in.
        session_bytes: per session on the device, for `llm`, `tts`, `audio`, `vocoder`.
        host_bytes: per session on the host.
    """

    parameters: Mapping[str, int]
    weight_bytes: Mapping[str, int]
    session_bytes: Mapping[str, int]
    host_bytes: int

    @property
    def model_bytes(self) -> int:
        """All weights, in bytes."""
        return sum(self.weight_bytes.values())

    @property
    def slot_bytes(self) -> int:
        """Keys and values of a session, in bytes."""
        return sum(size for name, size in self.session_bytes.items() if name != "vocoder")

    def each_bytes(self, device: torch.device) -> int:
        """A further session's bytes of a device's memory."""
        host = self.host_bytes if device.type == "cpu" else 0
        return sum(self.session_bytes.values()) + host

    def slots_that_fit(self, memory_bytes: int, device: torch.device) -> int:
        """Sessions that fit in a device's free `memory_bytes` with the weights; 0 if none does."""
        room = int(memory_bytes * (1 - WORKSPACE_SHARE)) - self.model_bytes
        return max(0, room // self.each_bytes(device))


def vocoder_bytes(folder: Path) -> int:
    """Bytes per session of the vocoder whose files are in `folder`."""
    return TOKEN2WAV_BYTES if any((folder / name).is_file() for name in FILES) else 0


def plan(config: ModelConfig, dtype: torch.dtype, *, vocoder_bytes: int = 0) -> MemoryPlan:
    """Plan the memory of a model; `vocoder_bytes` is per session."""
    parameters: dict[str, int] = {}
    for key, shape in shapes(config).items():
        part = key.partition(".")[0]
        parameters[part] = parameters.get(part, 0) + math.prod(shape)
    sessions = {name: store.slot_bytes(dtype) for name, store in stores(config).items()}
    return MemoryPlan(
        parameters=parameters,
        weight_bytes={name: count * dtype.itemsize for name, count in parameters.items()},
        session_bytes={**sessions, "vocoder": vocoder_bytes},
        host_bytes=COPIES * SAMPLE_BYTES * (BUFFER_MAX + BUFFER_MAX // HOP),
    )
