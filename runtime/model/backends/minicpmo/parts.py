"""All modules of a model, under the published checkpoint's keys, as `checkpoint.py` loads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from .audio import AudioEncoder, AudioProjection
from .config import ModelConfig
from .mel import MelFrontEnd
from .tts import SpeechDecoder
from .vision import Resampler, VisionTower


class Parts(nn.Module):
    """Language model, vision tower and resampler, audio encoder and projection, speech decoder.

    Attributes:
        vpm: pictures to patches, which `resampler` turns into embeddings.
        apm: sound to rows, which `audio_projection_layer` turns into embeddings.
        tts: text and hidden states to speech codes.
        front_end: sound to mel frames; tables only, always on the host.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width = int(config.llm.hidden_size)
        self.llm = Qwen3ForCausalLM(config.llm)
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
