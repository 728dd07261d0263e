"""The flow: codes to mel frames, by following a learned velocity from noise in a few steps.

The network (a DiT) sees the noisy frames, the encoder's condition, the speaker and the prompt's
mel, and gives the velocity at a time. A step takes it twice, with the conditions and without, and
moves beyond the former (guidance). The times are the same for all chunks, so what they do to each
block is computed once, at loading.

All frames of a chunk see each other and the cache, without positions. A cache is of one step, block
and half of the guidance; its newest rows come first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .config import MEL, SPEAKER, DitConfig, FlowConfig
from .encoder import Encoded, Encoder, causal, rows_before
from .encoder import Past as EncoderPast

GUIDANCE: Final = 0.7
BEFORE: Final = 2
"""Rows before a chunk that a convolution sees; a block has two of them."""
TIME_WIDTH: Final = 256
TIME_SCALE: Final = 1000.0
PARTS: Final = 3
"""Of a block: attention, MLP, convolution; each is shifted, scaled and gated."""

Time = Sequence[Tensor]
"""What a time does to blocks, (depth, 9, C), and to the last layer, (2, C); its length, ()."""


@attrs.frozen(kw_only=True, eq=False)
class Past:
    """What chunks of a batch see at a step, in all blocks, of what was before them.

    Attributes:
        rows: the cache, (depth, 2 B, H, P, 2 D), the guided half first.
        before: rows before the convolutions, (depth, 2 B, 2, 2, C).
        mask: over the chunk and the cache, (2 B, 1, 1, T + P), 0 or -inf; None: all are seen.
        ends: rows of each chunk, (2 B,); None: each has T.
    """

    rows: Tensor
    before: Tensor
    mask: Tensor | None = None
    ends: Tensor | None = None


Step = Callable[[Tensor, Tensor, Time, Past], tuple[Tensor, Tensor, Tensor]]
"""See `Flow.step`."""


class Attention(nn.Module):
    """Attention without positions, over the chunk and its cache."""

    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        inner = config.heads * config.head_width
        self.heads = config.heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(config.width, inner) for _ in range(3))
        self.q_norm, self.k_norm = (nn.LayerNorm(config.head_width, eps=1e-5) for _ in range(2))
        self.proj = nn.Linear(inner, config.width)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)  # (B, H, T, D)

    def forward(self, x: Tensor, past: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """(B, T, C), and the cache (B, H, P, 2 D) -> (B, T, C), and the chunk's keys and values."""
        query, key = self.q_norm(self._split(self.to_q(x))), self.k_norm(self._split(self.to_k(x)))
        new = torch.cat((key, self._split(self.to_v(x))), dim=-1)  # (B, H, T, 2 D)
        keys, values = torch.cat((new, past), dim=-2).chunk(2, dim=-1)  # (B, H, T + P, D) each
        seen = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        return self.proj(seen.transpose(1, 2).flatten(2)), new


class Convolution(nn.Module):
    """Two causal convolutions over three rows; its modules are numbered as in `flow.pt`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = nn.ModuleDict(
            {
                "1": nn.Conv1d(width, width, BEFORE + 1),
                "3": nn.LayerNorm(width, eps=1e-5),
                "6": nn.Conv1d(width, width, BEFORE + 1),
            }
        )

    def forward(self, x: Tensor, before: Tensor, ends: Tensor | None) -> tuple[Tensor, Tensor]:
        """(B, T, C), with the rows before each, (B, 2, 2, C) -> (B, T, C), and the next chunk's."""
        first = torch.cat((before[:, 0], x), dim=1)  # (B, 2 + T, C)
        x = F.mish(self.block["3"](causal(self.block["1"], first)))  # type: ignore[arg-type]
        second = torch.cat((before[:, 1], x), dim=1)
        kept = torch.stack([rows_before(rows, BEFORE, ends) for rows in (first, second)], dim=1)
        return causal(self.block["6"], second), kept  # type: ignore[arg-type]


class Mlp(nn.Module):
    """The MLP of a block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))  # type: ignore[no-any-return]


def _modulation(width: int, count: int) -> nn.Sequential:
    return nn.Sequential(nn.SiLU(), nn.Linear(width, count * width))


def _normed(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


class Block(nn.Module):
    """A block of the network: attention, convolution, MLP."""

    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        self.attn, self.conv = Attention(config), Convolution(config.width)
        self.mlp = Mlp(config.width)
        self.adaLN_modulation = _modulation(config.width, 3 * PARTS)

    def forward(
        self, x: Tensor, time: Tensor, past: Past, index: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, C) at a `time`, (9, C) -> (B, T, C), keys and values, and rows kept."""
        (shift, scale, gate), mlp, conv = time.view(PARTS, 3, -1)  # (C,) each
        seen, new = self.attn(_normed(x, shift, scale), past.rows[index], past.mask)
        x = x + gate * seen
        mixed, kept = self.conv(_normed(x, conv[0], conv[1]), past.before[index], past.ends)
        x = x + conv[2] * mixed
        return x + mlp[2] * self.mlp(_normed(x, mlp[0], mlp[1])), new, kept


class TimeEmbedder(nn.Module):
    """Embeds a time, in [0, 1]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(TIME_WIDTH, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, times: Tensor) -> Tensor:
        """(N,), float32 on the host -> (N, C)."""
        half = TIME_WIDTH // 2
        rates = torch.exp(torch.arange(half) / half * -math.log(10_000.0))
        angles = times[:, None] * TIME_SCALE * rates  # (N, 128)
        waves = torch.cat((angles.cos(), angles.sin()), dim=-1)
        return self.mlp(waves.to(self.mlp[0].weight))  # type: ignore[no-any-return, arg-type]


class FinalLayer(nn.Module):
    """The output layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.adaLN_modulation = _modulation(width, 2)
        self.linear = nn.Linear(width, MEL)


class Dit(nn.Module):
    """The velocity's network."""

    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        self.t_embedder = TimeEmbedder(config.width)
        self.in_proj = nn.Linear(4 * MEL, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.final_layer = FinalLayer(config.width)

    def modulations(self, times: Tensor) -> tuple[Tensor, Tensor]:
        """What each time does to the blocks, (N, depth, 9, C), and to the last layer, (N, 2, C)."""
        embedded = self.t_embedder(times)  # (N, C)
        blocks = [each.adaLN_modulation(embedded) for each in self.blocks]  # type: ignore[operator]
        final = self.final_layer.adaLN_modulation(embedded)
        count = len(times)
        rows = torch.stack(blocks, dim=1).view(count, len(blocks), 3 * PARTS, -1)
        return rows, final.view(count, 2, -1)


@attrs.frozen(kw_only=True, eq=False)
class FlowOutput:
    """A chunk's mel frames, (B, T, 80), and what is kept.

    Attributes:
        rows: keys and values, (steps, depth, 2 B, H, T, 2 D).
        before: rows for the next `Past`, (steps, depth, 2 B, 2, 2, C).
    """

    mel: Tensor
    rows: Tensor
    before: Tensor


class Decoder(nn.Module):
    """Holds the network, for the names of `flow.pt`."""

    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        self.estimator = Dit(config)


class Flow(nn.Module):
    """Codes to mel frames; parameters are named as in `flow.pt`."""

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        self.config = config
        self.input_embedding = nn.Embedding(config.codes, config.encoder.inputs)
        self.spk_embed_affine_layer = nn.Linear(SPEAKER, MEL)
        self.encoder = Encoder(config.encoder)
        self.encoder_proj = nn.Linear(config.encoder.width, MEL)
        self.decoder = Decoder(config.dit)
        self._times: list[Time] = []

    def prepare(self, steps: int) -> None:
        """Compute what does not depend on the codes, once the weights are loaded."""
        self.encoder.prepare()
        times = 1 - torch.cos(torch.linspace(0, 1, steps + 1) * (math.pi / 2))
        blocks, final = self.decoder.estimator.modulations(times[:-1])
        deltas = times.diff().to(blocks.device)
        self._times = list(zip(blocks, final, deltas, strict=True))

    @property
    def steps(self) -> int:
        """Steps from noise to mel."""
        return len(self._times)

    def speaker(self, embedding: Tensor) -> Tensor:
        """A speaker's embedding, (192,), as the network's condition, (80,)."""
        return self.spk_embed_affine_layer(F.normalize(embedding, dim=0))  # type: ignore[no-any-return]

    def encode(self, codes: Tensor, past: EncoderPast, *, last: bool) -> tuple[Tensor, Encoded]:
        """Codes (B, T + 3), or (B, T) if they end the turn, to `mu`, (B, 2 T, 80)."""
        encoded = self.encoder(self.input_embedding(codes), past, last=last)
        return self.encoder_proj(encoded.rows), encoded

    def conditions(self, mu: Tensor, speaker: Tensor, prompt: Tensor) -> Tensor:
        """What the network sees: `mu`, the speaker (B, 80), and the prompt's mel, or zeros.

        (2 B, T, 240), without any in the second half.
        """
        speakers = speaker[:, None].expand_as(mu)
        guided = torch.cat((mu, speakers, prompt.to(mu).expand_as(mu)), dim=-1)  # (B, T, 240)
        return torch.cat((guided, torch.zeros_like(guided)))

    def forward(
        self,
        noise: Tensor,
        conditions: Tensor,
        past: Callable[[int], Past],
        step: Step | None = None,
    ) -> FlowOutput:
        """Follow the velocity from `noise`, (B, T, 80), in float32; `past` is that of a step.

        `step` is called in place of `Flow.step`.
        """
        x, config, run, kept = noise, self.config.dit, step or self.step, list[Tensor]()
        shape = (config.depth, len(conditions), config.heads, x.shape[1], 2 * config.head_width)
        rows = conditions.new_empty(self.steps, *shape)
        for at, time in enumerate(self._times):
            x, rows[at], before = run(x, conditions, time, past(at))
            kept.append(before.clone())
        return FlowOutput(mel=x.clone(), rows=rows, before=torch.stack(kept))

    def step(
        self, x: Tensor, conditions: Tensor, time: Time, past: Past
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Move `x` by a step; also its keys and values, and the rows kept, of all blocks."""
        dit, (blocks, final, delta) = self.decoder.estimator, time
        y = dit.in_proj(torch.cat((torch.cat((x, x)).to(conditions), conditions), dim=-1))
        news, kept = list[Tensor](), list[Tensor]()
        for index, block in enumerate(dit.blocks):
            y, new, rows = block(y, blocks[index], past, index)  # (2 B, T, C)
            news.append(new)
            kept.append(rows)
        y = dit.final_layer.linear(_normed(y, final[0], final[1]))  # (2 B, T, 80)
        with_conditions, without = y.float().chunk(2)
        velocity = (1 + GUIDANCE) * with_conditions - GUIDANCE * without
        return x + delta * velocity, torch.stack(news), torch.stack(kept)
