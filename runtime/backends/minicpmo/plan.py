"""How much memory a model takes, from its config alone: no weights are read, nothing is made.

Per session it is the keys and values of the three decoders, which `Machine` makes at once for all
slots from the same `stores`; the sound that the mel front end keeps; and what the vocoder keeps.
`WORKSPACE_SHARE` of the memory is left to what comes and goes while a batch is computed.
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
"""Of the memory, for activations, the GPU's own context and what the allocator cannot use."""
SLOTS_MAX: Final = 64
"""Slots that are recommended at most, however much memory there is: a full batch of the engine."""
TOKEN2WAV_BYTES: Final = 1_450_000_000
"""What the published vocoder keeps of a session, reckoned: 1.3 MB a frame (10 steps, float32) for a
voice of 6 s and two states of a turn; where it runs on a GPU it takes this from the same memory.
That of `tiny` keeps next to nothing."""
SAMPLE_BYTES: Final = 4
COPIES: Final = 2
"""Of the mel front end's buffer: the session's, and the one that a rollback goes back to."""


@attrs.frozen(kw_only=True)
class StoreShape:
    """The keys and values of one decoder, for one session.

    Attributes:
        layers: of the decoder.
        heads: key and value heads.
        capacity: positions.
        width: of a head.
        window: positions that a query sees, itself included; None sees all.
    """

    layers: int
    heads: int
    capacity: int
    width: int
    window: int | None = None

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Memory of one slot."""
        return 2 * self.layers * self.heads * self.capacity * self.width * dtype.itemsize


def stores(config: ModelConfig) -> Mapping[str, StoreShape]:
    """What `Machine` keeps of every session: `llm`, `tts` and `audio`."""
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
    """What a model takes.

    Attributes:
        parameters: by part of the model: `llm`, `vpm`, ...
        weight_bytes: of these, in the format that they are computed in.
        session_bytes: on the device, by what it is for: `llm`, `tts`, `audio`, `vocoder`.
        host_bytes: of a session on the host, whatever the device: the mel front end's.
    """

    parameters: Mapping[str, int]
    weight_bytes: Mapping[str, int]
    session_bytes: Mapping[str, int]
    host_bytes: int

    @property
    def model_bytes(self) -> int:
        """All weights."""
        return sum(self.weight_bytes.values())

    @property
    def slot_bytes(self) -> int:
        """What `Machine` makes for a session: keys and values."""
        return sum(size for name, size in self.session_bytes.items() if name != "vocoder")

    def each_bytes(self, device: torch.device) -> int:
        """What a further session takes of a device's memory."""
        host = self.host_bytes if device.type == "cpu" else 0
        return sum(self.session_bytes.values()) + host

    def slots_that_fit(self, memory_bytes: int, device: torch.device) -> int:
        """Sessions that fit beside the weights, 0 where not even one does.

        Args:
            memory_bytes: that can be had on the device, before the weights are there.
            device: which one.
        """
        room = int(memory_bytes * (1 - WORKSPACE_SHARE)) - self.model_bytes
        return max(0, room // self.each_bytes(device))


def vocoder_bytes(folder: Path) -> int:
    """What the vocoder whose files lie in `folder` keeps of a session."""
    return TOKEN2WAV_BYTES if any((folder / name).is_file() for name in FILES) else 0


def plan(config: ModelConfig, dtype: torch.dtype, *, vocoder_bytes: int = 0) -> MemoryPlan:
    """Plan the memory of a model.

    Args:
        config: its shapes.
        dtype: of weights, keys and values.
        vocoder_bytes: what the vocoder keeps of a session.

    Returns:
        The plan; building it takes a moment and no memory to speak of.
    """
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
