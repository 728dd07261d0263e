"""The speech decoder: a turn's text and hidden states to speech codes, 25 a second.

A Llama over embeddings: a chunk feeds one condition per text token (its embedding plus the
L2-normalised projection of the language model's hidden state), then `audio_bos`, then each drawn
code. Its KV cache lasts for the turn, so a chunk hears the speech before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.parametrizations import weight_norm
from transformers import LlamaModel

from .config import TtsConfig

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
