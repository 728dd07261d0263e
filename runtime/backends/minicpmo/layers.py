"""The one transformer block that all towers share, and the KV cache of a session.

The block is Qwen3's: RMSNorm before attention and MLP, grouped queries with normalised heads,
rotary positions, a gated MLP; parameter names are Qwen3's too, so that a test can load the same
weights into the stock `Qwen3Model` and compare.

A query sees the last `window` positions. Decoding always attends to a span of the same size
(`window + T - 1` keys, masked where nothing is written yet), so that neither the cost nor the bits
of a step depend on how much history lies before it.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .config import TowerConfig

CACHE_BUCKET: Final = 1024
"""A cache grows by so many positions: small sessions stay small, and growing is rare."""

RMS_EPSILON: Final = 1e-6


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learned gain."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis; the shape stays."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, RMS_EPSILON)


def rope_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding.

    Args:
        positions: integers, shape (T,).
        head_dim: width of a head; even.
        theta: base of the frequencies.

    Returns:
        Two tensors of shape (T, head_dim).
    """
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = positions.to(torch.float32)[:, None] * inverse  # (T, D/2)
    angles = torch.cat((angles, angles), dim=-1)  # (T, D)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to x, shape (..., T, D)."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention with grouped queries: the queries of a group are folded into the time axis.

    Args:
        q: (B, H, T, D).
        k: (B, K, S, D), K dividing H.
        v: as `k`.
        mask: (T, S), 0 where a query may look and -inf elsewhere; None looks everywhere.

    Returns:
        (B, T, H * D).
    """
    b, h, t, d = q.shape
    groups = h // k.shape[1]
    q = q.reshape(b, k.shape[1], groups * t, d)  # (B, K, G*T, D): no repeated keys in memory
    folded = mask if mask is None or groups == 1 else mask.repeat(groups, 1)  # (G*T, S)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=folded)  # (B, K, G*T, D)
    return out.reshape(b, h, t, d).transpose(1, 2).reshape(b, t, h * d)


class KvCache:
    """One tower's keys and values for one session: append-only, so a length restores the past."""

    def __init__(self, config: TowerConfig) -> None:
        self.config = config
        self.length = 0
        self._rows = torch.zeros(2, config.layers, config.kv_heads, 0, config.head_dim)
        self._reserve(1)

    @property
    def capacity(self) -> int:
        """Positions that fit without growing."""
        return self._rows.shape[3]

    def _reserve(self, count: int) -> None:
        need = max(self.length + count, self.config.window + count - 1)
        if need > self.capacity:
            more = -(-need // CACHE_BUCKET) * CACHE_BUCKET - self.capacity
            self._rows = F.pad(self._rows, (0, 0, 0, more))

    def truncate(self, length: int) -> None:
        """Go back to `length` positions; what lay behind them is wiped."""
        assert length <= self.length, (length, self.length)
        self._rows[:, :, :, length : self.length] = 0.0
        self.length = length

    def span(self, count: int) -> tuple[int, int]:
        """Make room for `count` positions; gives the first and last (exclusive) they attend to."""
        self._reserve(count)
        size = self.config.window + count - 1
        end = max(self.length + count, size)
        return end - size, end

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values of one layer behind the others; gives the span to attend to.

        Args:
            layer: index of the block.
            k: (1, K, T, D), rotated.
            v: (1, K, T, D).

        Returns:
            Keys and values, shape (1, K, S, D) with S = window + T - 1.
        """
        count = k.shape[2]
        low, high = self.span(count)
        self._rows[0, layer, :, self.length : self.length + count] = k[0]
        self._rows[1, layer, :, self.length : self.length + count] = v[0]
        keys, values = self._rows[:, layer, None, :, low:high]  # (1, K, S, D) each
        return keys, values


def window_mask(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Causal mask with a window.

    Args:
        queries: positions, shape (T,).
        keys: positions, shape (S,).
        window: positions that a query sees, itself included.

    Returns:
        (T, S): 0 where seen, -inf elsewhere.
    """
    distance = queries[:, None] - keys[None, :]
    mask = torch.zeros(distance.shape)
    return mask.masked_fill_((distance < 0) | (distance >= window), float("-inf"))


class Attention(nn.Module):
    """Grouped-query attention with normalised heads."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.config = config
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, q, bias=False)
        self.k_proj = nn.Linear(config.hidden, kv, bias=False)
        self.v_proj = nn.Linear(config.hidden, kv, bias=False)
        self.o_proj = nn.Linear(q, config.hidden, bias=False)
        self.q_norm = RMSNorm(config.head_dim)
        self.k_norm = RMSNorm(config.head_dim)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, not yet rotated.

        Args:
            x: (B, T, hidden).

        Returns:
            (B, H, T, D), (B, K, T, D) and (B, K, T, D).
        """
        b, t, _ = x.shape
        shape = (b, t, -1, self.config.head_dim)
        q: Tensor = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k: Tensor = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v: Tensor = self.v_proj(x).view(shape).transpose(1, 2)
        return q, k, v

    def output(self, attended: Tensor) -> Tensor:
        """Project heads back, (B, T, H * D) -> (B, T, hidden)."""
        out: Tensor = self.o_proj(attended)
        return out


class Mlp(nn.Module):
    """The gated MLP (SwiGLU)."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) -> (..., hidden)."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """Attention and MLP, each normalised before and added to the stream."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden)
        self.mlp = Mlp(config)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the normalised stream (see `Attention.project`)."""
        return self.self_attn.project(self.input_layernorm(x))

    def join(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add what attention found, then the MLP; (B, T, hidden) stays."""
        x = x + self.self_attn.output(attended)
        mixed: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + mixed


class Tower(nn.Module):
    """Blocks and a last norm, over embeddings; used with a cache, or whole for training."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden)

    def blocks(self) -> list[Block]:
        """The blocks, typed."""
        return [block for block in self.layers if isinstance(block, Block)]

    def step(self, x: Tensor, cache: KvCache) -> Tensor:
        """Feed T new positions and advance the cache.

        Args:
            x: embeddings, (1, T, hidden).
            cache: the session's.

        Returns:
            Normalised hidden states, (1, T, hidden).
        """
        t = x.shape[1]
        low, high = cache.span(t)
        positions = torch.arange(cache.length, cache.length + t)
        cos, sin = rope_table(positions, self.config.head_dim, self.config.rope_theta)
        mask = window_mask(positions, torch.arange(low, high), self.config.window)
        for index, block in enumerate(self.blocks()):
            q, k, v = block.project(x)
            keys, values = cache.write(index, rotate(k, cos, sin), v)  # (1, K, S, D)
            x = block.join(x, attend(rotate(q, cos, sin), keys, values, mask))
        cache.length += t
        out: Tensor = self.norm(x)
        return out

    def whole(self, x: Tensor) -> Tensor:
        """Run complete sequences from position 0, as training does.

        Args:
            x: embeddings, (B, T, hidden).

        Returns:
            Normalised hidden states, (B, T, hidden); equal to `step` up to rounding.
        """
        positions = torch.arange(x.shape[1])
        cos, sin = rope_table(positions, self.config.head_dim, self.config.rope_theta)
        mask = window_mask(positions, positions, self.config.window)
        for block in self.blocks():
            q, k, v = block.project(x)
            x = block.join(x, attend(rotate(q, cos, sin), rotate(k, cos, sin), v, mask))
        out: Tensor = self.norm(x)
        return out
