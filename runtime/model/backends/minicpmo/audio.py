"""The streaming audio encoder: mel frames of one unit to ten embeddings.

Whisper's encoder with a KV cache: two convolutions (100 -> 50 frames a second), blocks that see the
unit's frames both ways and all earlier ones, a projection, and a mean over five. Positions are
absolute and added before the first block, so cached values stay valid; after 29 units the cache is
dropped entirely (model.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .attention import Cache, KvSlots, Row, SlotCache
from .config import UNIT_FRAMES, AudioConfig
from .flash import SpanCache, Spans
from .mel import CONTEXT
from .steps import Out


class AudioAttention(nn.Module):
    """Whisper's attention: biases on all but the keys."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        width = config.d_model
        self.heads = config.encoder_attention_heads
        self.scale = (width // self.heads) ** -0.5
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width)
        self.q_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, width) to queries, keys and values, (B, H, T, D) each."""
        b, t, _ = x.shape
        shape = (b, t, self.heads, -1)
        q: Tensor = self.q_proj(x).view(shape).transpose(1, 2)
        k: Tensor = self.k_proj(x).view(shape).transpose(1, 2)
        v: Tensor = self.v_proj(x).view(shape).transpose(1, 2)
        return q, k, v

    def join(self, attended: Tensor) -> Tensor:
        """(B, T, H, D) to (B, T, width)."""
        out: Tensor = self.out_proj(attended.flatten(2))
        return out


class AudioLayer(nn.Module):
    """One block of Whisper's encoder, normalised before attention and MLP."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.self_attn = AudioAttention(config)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.fc1 = nn.Linear(config.d_model, config.encoder_ffn_dim)
        self.fc2 = nn.Linear(config.encoder_ffn_dim, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the normalised stream."""
        return self.self_attn.split(self.self_attn_layer_norm(x))

    def join(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add the attention's output, then the MLP; (B, T, width) stays."""
        x = x + self.self_attn.join(attended)
        mixed: Tensor = self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))
        return x + mixed


@attrs.frozen(kw_only=True, eq=False)
class Hearing:
    """One unit's frames of one session: a request, answered by their embeddings, (10, width).

    Attributes:
        mel: (bands, 102) for the first unit of a session, else (bands, 104).
        units: units already in the slot, 0 to 28.
    """

    mel: Tensor
    slot: int
    units: int

    stage: ClassVar[int] = 1
    bucket: ClassVar[str] = "hear"

    @property
    def row(self) -> Row:
        """Where its frames go."""
        return Row(slot=self.slot, start=self.units * UNIT_FRAMES)


class AudioEncoder(nn.Module):
    """The encoder; its weights have the published names under `apm`."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.config = config
        width = config.d_model
        self.conv1 = nn.Conv1d(config.num_mel_bins, width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(config.max_source_positions, width)
        self.layers = nn.ModuleList(AudioLayer(config) for _ in range(config.encoder_layers))
        self.layer_norm = nn.LayerNorm(width)

    def blocks(self) -> list[AudioLayer]:
        """The blocks, typed."""
        return [layer for layer in self.layers if isinstance(layer, AudioLayer)]

    def convolve(self, mel: Tensor, context: int) -> Tensor:
        """Convolve (B, bands, context + 100 * U + 2) to (B, 50 * U, width).

        `context` is the number of frames before the first unit's own, 0 or 2.
        """
        x = F.gelu(self.conv1(mel))
        x = F.gelu(self.conv2(x)).transpose(1, 2)  # (B, context / 2 + 50 * U + 1, width)
        return x[:, context // 2 : -(CONTEXT // 2)]

    def frames(self, hearings: Sequence[Hearing], *, together: bool = False) -> list[Tensor]:
        """One unit of each session as the first block takes it, (50, width) each.

        `together`: convolve those of one length together.
        """
        contexts = [item.mel.shape[1] - 2 * UNIT_FRAMES - CONTEXT for item in hearings]
        if together and len(set(contexts)) == 1:
            mels = torch.stack([item.mel for item in hearings])
            convolved = list(self.convolve(mels, contexts[0]))
        else:
            pairs = zip(hearings, contexts, strict=True)
            convolved = [self.convolve(item.mel[None], context)[0] for item, context in pairs]
        table = self.embed_positions.weight
        return [
            rows + table[item.row.start : item.row.start + UNIT_FRAMES]
            for rows, item in zip(convolved, hearings, strict=True)
        ]

    def hear(self, hearings: Sequence[Hearing], store: KvSlots) -> Tensor:
        """Encode one unit of each session into (B, 50, width), appending its keys to the slot."""
        x = torch.stack(self.frames(hearings))
        cache = SlotCache(store, [item.row for item in hearings], UNIT_FRAMES, 1, causal=False)
        return self.encode(x, cache)

    def encode(self, x: Tensor, cache: Cache) -> Tensor:
        """The blocks, for rows (B, 50, width) whose keys go through the cache."""
        for index, block in enumerate(self.blocks()):
            q, k, v = block.split(x)
            seen, _ = cache.update(k, v, index)
            x = block.join(x, seen.attend(q, block.self_attn.scale))
        out: Tensor = self.layer_norm(x)
        return out

    def whole(self, mel: Tensor) -> Tensor:
        """Encode whole sessions for training, (B, bands, 100 * U + 2) -> (B, 50 * U, width).

        Equal to `hear` unit by unit, up to rounding.
        """
        x = self.convolve(mel, 0)
        span = self.config.units * UNIT_FRAMES
        runs = torch.split(x, span, dim=1)  # The cache is empty at the start of each run.
        return torch.cat([self._run(run) for run in runs], dim=1)

    def reference(self, mel: Tensor) -> Tensor:
        """Encode reference audio whole (`MelFrontEnd.clip`), (1, bands, N) -> (1, N / 2, width)."""
        x = F.gelu(self.conv2(F.gelu(self.conv1(mel)))).transpose(1, 2)
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        x = x + self.embed_positions.weight[: x.shape[1]]
        unit = torch.arange(x.shape[1], device=x.device) // UNIT_FRAMES
        mask = unit[None, :] <= unit[:, None]  # (T, T): its own unit, and all before
        for block in self.blocks():
            q, k, v = block.split(x)
            seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = block.join(x, seen.transpose(1, 2))
        out: Tensor = self.layer_norm(x)
        return out


class HearingNetwork:
    """The encoder's pass for many sessions, and the projection; see `steps.Network`."""

    is_causal = False
    name = "sound"

    def __init__(self, encoder: AudioEncoder, projection: AudioProjection, store: KvSlots) -> None:
        self._encoder, self._projection, self.store = encoder, projection, store
        self.width = encoder.config.d_model

    def forward(self, rows: Tensor, spans: Spans) -> Tensor:
        """See `Network.forward`."""
        return self._encoder.encode(rows, SpanCache(self.store, spans)).flatten(0, 1)

    def finish(self, hidden: Tensor, spans: Spans) -> Out:
        """The embeddings of each session's unit, (B, 10, width)."""
        return (self._projection(hidden.view(len(spans.slots), -1, self.width)),)


class AudioProjection(nn.Module):
    """Rows to embeddings of the language model's width: two layers, then the mean of five."""

    def __init__(self, config: AudioConfig, width: int) -> None:
        super().__init__()
        self.pool = config.pool
        self.linear1 = nn.Linear(config.encoder_ffn_dim // 4, width)
        self.linear2 = nn.Linear(width, width)

    def forward(self, rows: Tensor) -> Tensor:
        """(B, T, d_model) -> (B, T / 5, width), rounded down; fewer than 5 rows give none."""
        x: Tensor = self.linear2(F.relu(self.linear1(rows)))
        if x.shape[1] < self.pool:
            return x[:, :0]
        return F.avg_pool1d(x.transpose(1, 2), self.pool).transpose(1, 2)
