"""The vision tower and the resampler in few launches, for GPUs; see `vision.py` for what they do.

The patches are one matrix product, since a convolution's repeatable kernels are slow there. Places
that depend only on a slice's sides are made once. The stock weights stay, some as views.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from .fused import joined
from .vision import Resampler, VisionTower, patch_places, places_2d

SHAPES_KEPT: Final = 32
"""Shapes of slices whose places are kept, at 11 MB each: a camera's pictures have one or two."""


@attrs.frozen(eq=False, kw_only=True)
class Layer:
    """One layer's modules, and its weights of queries, keys and values joined."""

    stock: Any
    qkv: Tensor
    biases: Tensor


class FusedSight:
    """Slices of one shape to embeddings, (B, 3, h, w) to (B, queries, width)."""

    def __init__(self, tower: VisionTower, resampler: Resampler) -> None:
        self._tower, self._resampler = tower, resampler
        layers: list[Any] = [*tower.encoder.layers]
        self._heads, self._patch = int(layers[0].self_attn.num_heads), tower.embeddings.patch
        self._layers = [self._layer(each) for each in layers]
        self._places = lru_cache(SHAPES_KEPT)(self._places_of)

    @staticmethod
    def _layer(stock: Any) -> Layer:
        own = stock.self_attn
        parts = (own.q_proj, own.k_proj, own.v_proj)
        biases = torch.cat([part.bias.detach() for part in parts])
        return Layer(stock=stock, qkv=joined(*parts), biases=biases)

    def see(self, slices: Tensor) -> Tensor:
        """See the class."""
        rows, columns = (side // self._patch for side in slices.shape[2:])
        where, places = self._places(rows, columns)
        return self._read(self._encode(self._patches(slices, rows, columns) + where), places)

    def _places_of(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        embeddings, like = self._tower.embeddings, self._resampler.query
        at = patch_places(embeddings.side, rows, columns).to(like.device)
        return embeddings.position_embedding(at), places_2d(rows, columns, like)

    def _patches(self, slices: Tensor, rows: int, columns: int) -> Tensor:
        stock, side = self._tower.embeddings.patch_embedding, self._patch
        cut = slices.view(len(slices), 3, rows, side, columns, side).permute(0, 2, 4, 1, 3, 5)
        return F.linear(
            cut.reshape(len(slices), rows * columns, -1), stock.weight.flatten(1), stock.bias
        )

    def _encode(self, x: Tensor) -> Tensor:
        for layer in self._layers:
            stock, shape = layer.stock, (*x.shape[:2], 3, self._heads, -1)
            qkv = F.linear(stock.layer_norm1(x), layer.qkv, layer.biases).view(shape)
            query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
            seen = F.scaled_dot_product_attention(query, key, value)
            x = x + stock.self_attn.out_proj(seen.transpose(1, 2).flatten(2))
            x = x + stock.mlp.fc2(_activated(stock.layer_norm2(x), stock.mlp.fc1))
        out: Tensor = self._tower.post_layernorm(x)
        return out

    def _read(self, patches: Tensor, places: Tensor) -> Tensor:
        stock = self._resampler
        own, x = stock.attn, stock.ln_kv(stock.kv_proj(patches))  # (B, P, width)
        weights, biases = own.in_proj_weight.chunk(3), own.in_proj_bias.chunk(3)
        asked = (stock.ln_q(stock.query)[None], x + places, x)
        query, key, value = (
            F.linear(part, weight, bias).view(*part.shape[:2], own.num_heads, -1).transpose(1, 2)
            for part, weight, bias in zip(asked, weights, biases, strict=True)
        )
        query = query.expand(len(x), -1, -1, -1)
        seen = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        out: Tensor = stock.ln_post(own.out_proj(seen)) @ stock.proj
        return out


def _activated(x: Tensor, stock: Any) -> Tensor:
    """A linear layer and its `gelu`: one kernel on a GPU, whose `gelu` is of the same kind."""
    if not x.is_cuda:
        return F.gelu(stock(x), approximate="tanh")
    rows = x.flatten(0, 1)
    out: Tensor = torch.ops.aten._addmm_activation(
        stock.bias, rows, stock.weight.t(), use_gelu=True
    )
    return out.view(*x.shape[:2], -1)
