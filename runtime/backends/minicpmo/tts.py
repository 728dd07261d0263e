"""The speech decoder: a turn's text and hidden states to speech codes, 25 a second.

A chunk feeds one condition a text token (its embedding plus the L2-normalised projection of the
language model's hidden state), then `audio_bos`, then each code as it is drawn. The cache lives for
the turn, so that a chunk hears what was said before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .config import TtsConfig
from .layers import KvCache, Tower
from .sampling import choose, penalise

CODES_A_UNIT: Final = 25
"""A unit is one second; a code is 40 ms."""


class SpeechDecoder(nn.Module):
    """Text rows, code rows, projection, tower and head."""

    def __init__(self, config: TtsConfig, vocabulary: int, width: int) -> None:
        super().__init__()
        self.config = config
        hidden = config.tower.hidden
        self.eos = config.codes
        self.emb_text = nn.Embedding(vocabulary, hidden)
        self.emb_code = nn.Embedding(config.codes, hidden)
        self.audio_bos = nn.Parameter(torch.zeros(hidden))
        self.projector_semantic = nn.Linear(width, hidden)
        self.model = Tower(config.tower)
        self.head_code = nn.Linear(hidden, config.codes + 1, bias=False)

    def condition(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """What one text token gives: (..., T) ids and (..., T, width) -> (..., T, hidden)."""
        text: Tensor = self.emb_text(ids)
        return text + F.normalize(self.projector_semantic(hidden), dim=-1)

    def speak(
        self,
        text: Sequence[tuple[int, Tensor]],
        cache: KvCache,
        spoken: Sequence[int],
        draws: NDArray[np.float64],
        *,
        last: bool,
        stop: Callable[[int], bool],
    ) -> list[int]:
        """Draw the codes of one chunk.

        Args:
            text: the chunk's text tokens, each with its hidden state (width,).
            cache: the turn's.
            spoken: the turn's codes so far, for the repetition penalty.
            draws: uniform numbers in [0, 1), one a step.
            last: the turn ends with this chunk, so speech may end before 25 codes.
            stop: asked before every step; True cuts the chunk there.

        Returns:
            The codes; amid a turn there are exactly 25, unless the chunk was cut.
        """
        codes: list[int] = []
        if stop(0):
            return codes
        rows = [self.audio_bos[None]]
        if text:
            ids = torch.tensor([index for index, _ in text], dtype=torch.int64)
            rows.insert(0, self.condition(ids, torch.stack([state for _, state in text])))
        hidden = self.model.step(torch.cat(rows)[None], cache)  # (1, text + 1, hidden)
        history = list(spoken)
        for step in range(CODES_A_UNIT):
            if step and stop(step):
                return codes
            logits = self.head_code(hidden[0, -1]).numpy().astype(np.float64)  # (codes + 1,)
            code = self._draw(logits, history, float(draws[step]), last=last)
            if code == self.eos:
                break
            codes.append(code)
            history.append(code)
            row: Tensor = self.emb_code(torch.tensor([[code]]))  # (1, 1, hidden)
            hidden = self.model.step(row, cache)
        return codes

    def _draw(
        self, logits: NDArray[np.float64], history: list[int], draw: float, *, last: bool
    ) -> int:
        config = self.config
        if not last:
            logits[self.eos] = -np.inf
        recent = history[-config.repetition_window :] if config.repetition_window else []
        penalise(logits, recent, config.repetition_penalty)
        return choose(logits, draw, config.temperature, config.top_k, config.top_p)
