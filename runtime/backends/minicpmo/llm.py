"""The language model: Qwen3 in the small, over token ids and embeddings mixed.

The head is tied to the token embedding. What is fed is always embeddings, so that sound and
pictures take their place among the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .config import TowerConfig
from .layers import KvCache, Tower


class LanguageModel(nn.Module):
    """Token embedding, tower and tied head."""

    def __init__(self, config: TowerConfig, vocabulary: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, config.hidden)
        self.model = Tower(config)

    def embed(self, ids: Sequence[int]) -> Tensor:
        """Token ids to embeddings, (T, hidden)."""
        out: Tensor = self.embed_tokens(torch.tensor(ids, dtype=torch.int64))
        return out

    def feed(self, embeddings: Tensor, cache: KvCache) -> Tensor:
        """Feed embeddings (T, hidden) to a session's cache; gives hidden states (T, hidden)."""
        return self.model.step(embeddings[None], cache)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., hidden) to logits (..., vocabulary)."""
        return hidden @ self.embed_tokens.weight.T
