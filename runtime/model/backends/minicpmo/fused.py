"""A stock decoder's forward pass over slots, in few launches: for GPUs.

Qwen3 and Llama differ here only by the norms of queries and keys. The stock weights stay where they
are loaded, as views of matrices that are multiplied in one: queries, keys and values; both halves
of the gated product. What lies between is in `kernels.py`, attention in `flash.py`.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .attention import KvSlots
from .flash import Spans
from .kernels import Operators, Rotation, try_operators

ACTIVATION: Final = "silu"

_log = logging.getLogger("antiphon.model")


@attrs.frozen(eq=False, kw_only=True)
class Layer:
    """One layer's weights.

    Attributes:
        first, second: of the norms before attention and before the gated product, (width,).
        qkv: queries, keys and values, ((heads + 2 groups) D, width).
        out: (width, heads D).
        both: the gate and what it gates, (2 inner, width).
        down: (width, inner).
        scale: of the products of queries and keys.
    """

    first: Tensor
    second: Tensor
    qkv: Tensor
    out: Tensor
    both: Tensor
    down: Tensor
    rotation: Rotation
    scale: float


class FusedDecoder:
    """The forward pass of a stock model, whose weights it joins.

    `ValueError`: the model has what these operations leave out.
    """

    def __init__(self, model: Any, store: KvSlots, operators: Operators) -> None:
        config = model.config
        if config.hidden_act != ACTIVATION or any("bias" in key for key in model.state_dict()):
            raise ValueError(f"{type(model).__name__} has another activation, or biases")
        self._store, self._operators = store, operators
        self.width, self._eps = int(config.hidden_size), float(config.rms_norm_eps)
        self._norm: Tensor = model.norm.weight
        device = self._norm.device
        positions = torch.arange(store.capacity, device=device)[None]
        turns = model.rotary_emb(torch.zeros(1, device=device), positions)
        half = turns[0].shape[-1] // 2
        cos, sin = (turn[0, :, :half].float().contiguous() for turn in turns)
        self._layers = [self._layer(each, config, cos, sin) for each in model.layers]

    def _layer(self, layer: Any, config: Any, cos: Tensor, sin: Tensor) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        heads, groups = int(config.num_attention_heads), int(config.num_key_value_heads)
        norms = None
        if hasattr(attention, "q_norm"):
            rows = [attention.q_norm.weight] * heads + [attention.k_norm.weight] * groups
            norms = torch.stack(rows)
        return Layer(
            first=layer.input_layernorm.weight,
            second=layer.post_attention_layernorm.weight,
            qkv=joined(attention.q_proj, attention.k_proj, attention.v_proj),
            out=attention.o_proj.weight,
            both=joined(mlp.gate_proj, mlp.up_proj),
            down=mlp.down_proj.weight,
            rotation=Rotation(
                heads=heads, groups=groups, norms=norms, eps=self._eps, cos=cos, sin=sin
            ),
            scale=float(attention.scaling),
        )

    def forward(self, rows: Tensor, spans: Spans) -> Tensor:
        """Feed (B, T, width), each where its span says; the last hidden states, (B * T, width)."""
        operators, x = self._operators, rows.flatten(0, 1)
        residual = x.to(torch.float32, copy=True)
        x = operators.norm(x, None, self._layers[0].first, self._eps)
        following = [*(layer.first for layer in self._layers[1:]), self._norm]
        for index, (layer, after) in enumerate(zip(self._layers, following, strict=True)):
            keys, values = self._store.layer(index)
            qkv = F.linear(x, layer.qkv)
            queries = operators.rotate(qkv, layer.rotation, spans.places, keys, values)
            seen = spans.attend(queries, keys, values, layer.scale)
            x = F.linear(seen.flatten(1), layer.out)
            x = operators.norm(x, residual, layer.second, self._eps)
            x = F.linear(operators.gate(F.linear(x, layer.both)), layer.down)
            x = operators.norm(x, residual, after, self._eps)
        return x


def joined(*parts: nn.Linear) -> Tensor:
    """Join the weights of some layers, of which each keeps a view."""
    whole = torch.cat([part.weight.detach() for part in parts])
    pieces = whole.split_with_sizes([len(part.weight) for part in parts])
    for part, piece in zip(parts, pieces, strict=True):
        part.weight = nn.Parameter(piece, requires_grad=False)
    return whole


def operators_for(store: KvSlots, heads: int) -> Operators:
    """The fastest operators that compute rightly for a decoder of so many query heads."""
    like = store.keys  # (layers, slots, groups, capacity, width)
    if like.is_cuda:
        try:
            from .kernels_triton import TritonOperators

            found = TritonOperators()
            try_operators(found, like, heads=heads, groups=like.shape[2], width=like.shape[4])
        except Exception:  # Of the compiler or the driver, of any type.
            _log.warning("no fused kernels here: torch's operators are launched", exc_info=True)
        else:
            return found
    return Operators()
