"""The vision tower: a JPEG to 64 embeddings.

A picture is scaled to at most 448 x 448 with its shape kept, cut into patches, run through a small
tower that sees all patches at once, and read out by 64 queries. One picture is one slice, whatever
`max_slice_nums` allows. In `tiny` the tower is real and deterministic but keeps its first random
weights: pictures take their place in the context and mean nothing yet.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .config import VisionConfig
from .layers import RMSNorm, Tower, attend

QUERIES: Final = 64
"""Embeddings a slice."""


def decode_picture(jpeg: bytes, side: int, patch: int) -> Tensor:
    """Decode and scale a JPEG.

    Args:
        jpeg: the file.
        side: pixels of the longer side at most.
        patch: both sides become multiples of it.

    Returns:
        (3, height, width) in [-1, 1].

    Raises:
        ValueError: it cannot be decoded.
    """
    pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(
        jpeg, colorspace="RGB", min_height=side, min_width=side
    )
    height, width = pixels.shape[:2]
    scale = min(1.0, side / max(height, width))
    target = [max(1, round(n * scale / patch)) * patch for n in (height, width)]
    picture = torch.from_numpy(pixels).permute(2, 0, 1).to(torch.float32)[None]  # (1, 3, h, w)
    picture = F.interpolate(picture, size=target, mode="bilinear", antialias=True)
    return picture[0] / 127.5 - 1.0


class VisionTower(nn.Module):
    """Patches, blocks without a mask, and a resampler."""

    def __init__(self, config: VisionConfig, width: int) -> None:
        super().__init__()
        self.config = config
        hidden, rows = config.tower.hidden, config.side // config.patch
        self.patch_embedding = nn.Conv2d(3, hidden, config.patch, stride=config.patch)
        self.row_embedding = nn.Embedding(rows, hidden)
        self.column_embedding = nn.Embedding(rows, hidden)
        self.tower = Tower(config.tower)
        self.query = nn.Parameter(torch.zeros(QUERIES, hidden))
        self.kv_proj = nn.Linear(hidden, 2 * hidden, bias=False)
        self.proj = nn.Linear(hidden, width, bias=False)
        self.ln_post = RMSNorm(width)

    def forward(self, picture: Tensor) -> Tensor:
        """Embed one picture.

        Args:
            picture: (3, height, width) in [-1, 1], sides multiples of `patch`.

        Returns:
            (64, width).
        """
        patches = self.patch_embedding(picture[None])[0]  # (hidden, rows, columns)
        _, rows, columns = patches.shape
        places = self.config.side // self.config.patch
        row = self.row_embedding(torch.arange(rows) * places // rows)  # (rows, hidden)
        column = self.column_embedding(torch.arange(columns) * places // columns)
        x: Tensor = patches.permute(1, 2, 0) + row[:, None] + column[None]
        x = x.reshape(1, rows * columns, -1)  # (1, patches, hidden)
        for block in self.tower.blocks():
            q, k, v = block.project(x)
            x = block.join(x, attend(q, k, v, None))
        keys, values = self.kv_proj(self.tower.norm(x)).chunk(2, dim=-1)
        read = attend(self.query[None, None], keys[:, None], values[:, None], None)
        out: Tensor = self.ln_post(self.proj(read[0]))  # (64, width)
        return out

    def embed(self, jpeg: bytes) -> Tensor:
        """JPEG to (64, width).

        Raises:
            ValueError: it cannot be decoded.
        """
        picture = decode_picture(jpeg, self.config.side, self.config.patch)
        out: Tensor = self(picture)
        return out
