"""The vision tower and the resampler: a slice of a picture to 64 embeddings.

SigLIP over the slice's patches at their own shape (NaViT: the position table is read at fractions
of the slice's sides), then one cross attention of learned queries over the patches.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

from .config import VisionConfig

FREQUENCY_BASE = 10_000.0


def patch_places(side: int, rows: int, columns: int) -> Tensor:
    """The places of a slice's patches in a position table of `side` by `side`, (patches,)."""
    borders = torch.arange(1 / side, 1.0, 1 / side, device="cpu")

    def along(count: int) -> Tensor:
        step = (1 / torch.tensor(count, dtype=torch.float32, device="cpu")).item()
        # The step is rounded to float32, as in training: a fraction may lie on a border.
        fractions = torch.arange(0, 1 - 1e-6, step, device="cpu")
        return torch.bucketize(fractions, borders, right=True)

    return (along(rows)[:, None] * side + along(columns)).flatten()


class PatchEmbedding(nn.Module):
    """Patches to rows, with position embeddings."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        siglip = config.siglip
        self.patch, self.side = siglip.patch_size, siglip.image_size // siglip.patch_size
        self.patch_embedding = nn.Conv2d(
            3, siglip.hidden_size, siglip.patch_size, stride=siglip.patch_size
        )
        self.position_embedding = nn.Embedding(self.side**2, siglip.hidden_size)

    def forward(self, slices: Tensor) -> Tensor:
        """(B, 3, h, w) -> (B, patches, hidden)."""
        patches: Tensor = self.patch_embedding(slices)  # (B, hidden, rows, columns)
        rows, columns = patches.shape[2:]
        where: Tensor = self.position_embedding(
            patch_places(self.side, rows, columns).to(slices.device)
        )
        return patches.flatten(2).transpose(1, 2) + where


class VisionEncoder(nn.Module):
    """The blocks, under the published name."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        layers = config.siglip.num_hidden_layers
        self.layers = nn.ModuleList(SiglipEncoderLayer(config.siglip) for _ in range(layers))


class VisionTower(nn.Module):
    """SigLIP; its weights have the published names under `vpm`."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.embeddings = PatchEmbedding(config)
        self.encoder = VisionEncoder(config)
        self.post_layernorm = nn.LayerNorm(
            config.siglip.hidden_size, eps=config.siglip.layer_norm_eps
        )

    def forward(self, slices: Tensor) -> Tensor:
        """Encode slices (B, 3, h, w) in [-1, 1], whole patches, to (B, patches, hidden)."""
        x: Tensor = self.embeddings(slices)
        for layer in self.encoder.layers:
            x = layer(x, None)
        out: Tensor = self.post_layernorm(x)
        return out


def places_2d(rows: int, columns: int, like: Tensor) -> Tensor:
    """Sines and cosines of each patch's column and row, (rows * columns, width), as `like`.

    Only a row and a column are made on the host and sent.
    """
    width = like.shape[-1]
    frequencies = FREQUENCY_BASE ** -(torch.arange(width // 4, dtype=torch.float32) / (width // 4))

    def along(count: int) -> Tensor:  # (count, width / 2)
        angles = torch.arange(count, dtype=torch.float32)[:, None] * frequencies
        return torch.cat((angles.sin(), angles.cos()), dim=1).to(like)

    shape = (rows, columns, width // 2)
    both = (along(columns)[None].expand(shape), along(rows)[:, None].expand(shape))
    return torch.cat(both, dim=2).flatten(0, 1)


class Resampler(nn.Module):
    """Learned queries over a slice's patches; its weights have the published names."""

    def __init__(self, config: VisionConfig, width: int) -> None:
        super().__init__()
        heads = max(1, width // 128)
        self.query = nn.Parameter(torch.zeros(config.queries, width))
        self.kv_proj = nn.Linear(config.siglip.hidden_size, width, bias=False)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ln_q = nn.LayerNorm(width, eps=1e-6)
        self.ln_kv = nn.LayerNorm(width, eps=1e-6)
        self.ln_post = nn.LayerNorm(width, eps=1e-6)
        self.proj = nn.Parameter(torch.zeros(width, width))

    def forward(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """Read slices of one shape: (B, rows * columns, hidden) -> (B, queries, width)."""
        x: Tensor = self.ln_kv(self.kv_proj(patches))  # (B, P, width)
        places = places_2d(rows, columns, x)
        query = self.ln_q(self.query).expand(len(x), -1, -1)
        read: Tensor = self.attn(query, x + places, x, need_weights=False)[0]
        out: Tensor = self.ln_post(read) @ self.proj
        return out
