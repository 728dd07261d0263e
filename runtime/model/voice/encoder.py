"""The encoder of the flow: speech codes to mel-rate conditions, two rows a code, chunk by chunk.

A look-ahead layer mixes three codes ahead into each row, six conformer blocks run at one row a
code, rows are doubled, and four blocks run at one row a mel frame. All see the whole chunk and the
cache, whose rows come oldest first. Attention adds a score by distance, as in Transformer-XL; a
distance is one of places in the cache, so it shrinks when the cache is cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .config import EncoderConfig

LOOKAHEAD: Final = 3
"""Codes that a chunk has beyond those it gives sound for."""
UP: Final = 2
"""Mel frames a code."""
CONV_ROWS: Final = 2
"""Rows before a chunk that the look-ahead layer sees, ..."""
UP_ROWS: Final = 4
"""... and doubled rows that the upsampling sees."""
DISTANCE_MAX: Final = 1000
"""Rows that attention reaches back; the published code's buffers end there."""
AHEAD_MAX: Final = 800
"""Rows of a chunk or a prompt; a prompt of 16 seconds has so many frames."""


def causal(conv: nn.Conv1d, rows: Tensor) -> Tensor:
    """A convolution over rows that begin with those before the chunk, (B, T + k - 1, C)."""
    seen = rows.unfold(1, conv.weight.shape[2], 1).flatten(2)  # (B, T, C * k)
    return F.linear(seen, conv.weight.flatten(1), conv.bias)  # (B, T, out)


def rows_before(rows: Tensor, count: int, ends: Tensor | None) -> Tensor:
    """The `count` rows before each end, (B, count, C), or the last ones.

    Ends, (B,), are counted without the `count` rows that `rows` begins with.
    """
    if ends is None:
        return rows[:, -count:]
    at = ends[:, None] + torch.arange(count, device=rows.device)  # (B, count)
    return rows.take_along_dim(at[..., None], dim=1)


class Embed(nn.Module):
    """The input layer of a row of blocks."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.out = nn.Sequential(nn.Linear(inputs, width), nn.LayerNorm(width, eps=1e-5))
        self._scale = math.sqrt(width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, inputs) -> (B, T, width)."""
        return self.out(x) * self._scale  # type: ignore[no-any-return]


class Lookahead(nn.Module):
    """Adds to each row what the next three and the last two say."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(width, width, LOOKAHEAD + 1)
        self.conv2 = nn.Conv1d(width, width, CONV_ROWS + 1)

    def forward(self, x: Tensor, before: Tensor, ends: Tensor | None) -> tuple[Tensor, Tensor]:
        """(B, T + 3, C), with the rows kept (B, 2, C) -> (B, T, C), and the next chunk's."""
        ahead = F.leaky_relu(causal(self.conv1, x), 0.01)  # (B, T, C)
        rows = torch.cat((before, ahead), dim=1)  # (B, 2 + T, C)
        kept = rows_before(rows, CONV_ROWS, ends)
        return x[:, :-LOOKAHEAD] + causal(self.conv2, rows), kept


class Attention(nn.Module):
    """Attention whose scores are by content and by distance."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, head_width = heads, width // heads
        self.linear_q, self.linear_k = nn.Linear(width, width), nn.Linear(width, width)
        self.linear_v, self.linear_out = nn.Linear(width, width), nn.Linear(width, width)
        self.linear_pos = nn.Linear(width, width, bias=False)
        self.pos_bias_u = nn.Parameter(torch.zeros(heads, head_width))
        self.pos_bias_v = nn.Parameter(torch.zeros(heads, head_width))

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, -1).transpose(-3, -2)  # (..., H, T, D)

    def distances(self, sinusoids: Tensor) -> Tensor:
        """What each distance adds to keys, (N, C) -> (H, N, D); the same for every chunk."""
        return self._split(self.linear_pos(sinusoids))

    def forward(
        self, x: Tensor, past: Tensor, distances: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attend to the cache (B, H, P, 2 D) and the chunk.

        `distances`: (H, P + T + T - 1, D), the farthest first. `mask`: (B, 1, 1, P + T), 0 or -inf.
        Returns (B, T, C), and the chunk's keys and values (B, H, T, 2 D).
        """
        query, key, value = (
            self._split(linear(x)) for linear in (self.linear_q, self.linear_k, self.linear_v)
        )  # (B, H, T, D) each
        new = torch.cat((key, value), dim=-1)
        keys, values = torch.cat((past, new), dim=-2).chunk(2, dim=-1)  # (B, H, P + T, D) each
        rows, scale = x.shape[1], key.shape[-1] ** -0.5
        by_distance = (query + self.pos_bias_v[:, None]) @ distances.transpose(-2, -1)
        by_place = _shifted(by_distance, rows, keys.shape[-2]) * scale  # (B, H, T, P + T)
        seen = F.scaled_dot_product_attention(
            query + self.pos_bias_u[:, None],
            keys,
            values,
            attn_mask=by_place if mask is None else by_place + mask,
            scale=scale,
        )
        return self.linear_out(seen.transpose(1, 2).flatten(2)), new


def _shifted(scores: Tensor, rows: int, seen: int) -> Tensor:
    """Scores by distance, (..., T, S + T - 1), as scores by place, (..., T, S).

    The last row's first place is the farthest one, and each row before begins one later.
    """
    if rows == 1:
        return scores
    flat = scores.flatten(-2)[..., rows - 1 : -1]  # Shifts a row by one against the next.
    return flat.view(*flat.shape[:-1], rows, -1)[..., :seen]


class FeedForward(nn.Module):
    """The feed-forward layer of a block."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        return self.w_2(F.silu(self.w_1(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A block: attention, then feed-forward, each after its norm."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config.width, config.heads)
        self.feed_forward = FeedForward(config.width, config.inner)
        self.norm_mha = nn.LayerNorm(config.width, eps=1e-12)
        self.norm_ff = nn.LayerNorm(config.width, eps=1e-12)

    def forward(
        self, x: Tensor, past: Tensor, distances: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Attention.forward`."""
        seen, new = self.self_attn(self.norm_mha(x), past, distances, mask)
        x = x + seen
        return x + self.feed_forward(self.norm_ff(x)), new


@attrs.frozen(kw_only=True, eq=False)
class Past:
    """What chunks of a batch see of what was before them, the last row next to the chunk.

    Attributes:
        ahead: rows before the look-ahead layer's second convolution, (B, 2, C).
        doubled: rows before that of the upsampling, (B, 4, C).
        codes: keys and values of each block at one row a code, (B, H, P, 2 D) each.
        frames: of each block at one row a frame.
        codes_mask: over `codes` and the chunk, (B, 1, 1, P + T), 0 or -inf; None: all are seen.
        frames_mask: over `frames` and the chunk.
        given: 1 for the codes of each chunk, 0 for those that fill it up, (B, T + 3, 1).
        ends: rows of each chunk, (B,); None: each has T.
    """

    ahead: Tensor
    doubled: Tensor
    codes: Sequence[Tensor]
    frames: Sequence[Tensor]
    codes_mask: Tensor | None = None
    frames_mask: Tensor | None = None
    given: Tensor | None = None
    ends: Tensor | None = None


@attrs.frozen(kw_only=True, eq=False)
class Encoded:
    """A chunk's rows.

    Attributes:
        rows: one for each mel frame, (B, 2 T, C).
        ahead: for the next `Past`.
        doubled: for the next `Past`.
        codes: the chunk's keys and values, (B, blocks, H, T, 2 D).
        frames: (B, up blocks, H, 2 T, 2 D).
    """

    rows: Tensor
    ahead: Tensor
    doubled: Tensor
    codes: Tensor
    frames: Tensor


class Upsampling(nn.Module):
    """The convolution after rows are doubled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, UP_ROWS + 1)


class Encoder(nn.Module):
    """See the module's docstring; parameters are named as in `flow.pt`."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embed(config.inputs, config.width)
        self.pre_lookahead_layer = Lookahead(config.width)
        self.encoders = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.up_layer = Upsampling(config.width)
        self.up_embed = Embed(config.width, config.width)
        self.up_encoders = nn.ModuleList(Block(config) for _ in range(config.up_blocks))
        self.after_norm = nn.LayerNorm(config.width, eps=1e-5)
        self._distances: list[Tensor] = []

    def prepare(self) -> None:
        """Compute each block's table of distances, once the weights are loaded."""
        sinusoids = _sinusoids(self.config.width).to(self.after_norm.weight)
        blocks = (*self.encoders, *self.up_encoders)
        self._distances = [block.self_attn.distances(sinusoids) for block in blocks]

    def _run(
        self,
        x: Tensor,
        blocks: nn.ModuleList,
        tables: Sequence[Tensor],
        past: Sequence[Tensor],
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        rows, news = x.shape[1], list[Tensor]()
        seen = past[0].shape[-2] + rows
        assert rows <= AHEAD_MAX, rows
        assert seen <= DISTANCE_MAX, seen
        for block, table, before in zip(blocks, tables, past, strict=True):
            near = table[:, DISTANCE_MAX - seen : DISTANCE_MAX + rows - 1]  # (H, S + T - 1, D)
            x, new = block(x, before, near, mask)
            news.append(new)
        return x, torch.stack(news, dim=1)  # (B, T, C), (B, blocks, H, T, 2 D)

    def forward(self, embedded: Tensor, past: Past, *, last: bool) -> Encoded:
        """Encode embedded codes, (B, T + 3, inputs), or (B, T, inputs) if they end the turn."""
        x = self.embed(embedded)
        if past.given is not None:
            x = x * past.given
        elif last:
            x = F.pad(x, (0, 0, 0, LOOKAHEAD))
        x, ahead = self.pre_lookahead_layer(x, past.ahead, past.ends)  # (B, T, C)
        before, after = self._distances[: self.config.blocks], self._distances[self.config.blocks :]
        x, codes = self._run(x, self.encoders, before, past.codes, past.codes_mask)
        x = torch.cat((past.doubled, x.repeat_interleave(UP, dim=1)), dim=1)  # (B, 4 + 2 T, C)
        doubled = rows_before(x, UP_ROWS, None if past.ends is None else UP * past.ends)
        x = self.up_embed(causal(self.up_layer.conv, x))  # (B, 2 T, C)
        x, frames = self._run(x, self.up_encoders, after, past.frames, past.frames_mask)
        rows = self.after_norm(x)
        return Encoded(rows=rows, ahead=ahead, doubled=doubled, codes=codes, frames=frames)


def _sinusoids(width: int) -> Tensor:
    """Sines and cosines of each distance, from `DISTANCE_MAX` - 1 down to -`AHEAD_MAX`, (N, C)."""
    distance = torch.arange(DISTANCE_MAX - 1, -AHEAD_MAX - 1, -1.0)[:, None]
    rate = torch.exp(torch.arange(0, width, 2.0) * -(math.log(10_000.0) / width))
    return torch.stack(((distance * rate).sin(), (distance * rate).cos()), dim=-1).flatten(1)
