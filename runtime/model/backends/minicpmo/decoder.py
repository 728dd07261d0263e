"""A decoder, the language model or the speech decoder, over its KV cache, on a CPU or on a GPU.

On a CPU a session's result does not depend on its batch: attention is computed row by row
(`attention.py`), and a matrix product gives each row the same bits in any batch of at least
`ROWS_MIN`, to which smaller ones are padded. So the stock model runs there (`RowByRowDecoder`).

On a GPU its pass has fewer launches (`FusedDecoder`), and sessions run as `batched.py` has it
(`BatchedDecoder`): a token of one session with 8000 tokens of context takes 5.7 ms, by the stock
modules 31; its 2,118 launches become 379, and one when captured. Qwen3 and Llama differ here only
by the norms of queries and keys. The stock weights stay where they are loaded, as views of matrices
that are multiplied in one: queries, keys and values; both halves of the gated product.

What lies between the products is one kernel each (`Operators`): a norm comes with the sum before
it, and the rotation of queries and keys with their norms and with the writing of keys and values.
Each row is computed by itself, in float32, and rounded once; the sum that runs through all layers
is not rounded. The kernels need Triton, which torch brings for GPUs (`kernels_triton.py`); without
it, torch's own operators compute the same, in more launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from inspect import signature
from itertools import groupby
from typing import Any, Final

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .attention import KvSlots, Places, Row, SlotCache, Spans, joined
from .batched import Batched, ComputeOptions, Out, in_order
from .work import Feed, Speak

# -- the operations between matrix products -----------------------------------------------------

TRIED_ROWS: Final = 3
CLOSE: Final = 2e-2
"""What two ways of rounding to 16 bits may be apart."""


@attrs.frozen(eq=False, kw_only=True)
class Rotation:
    """How queries and keys of a decoder are turned, and where its heads are.

    Attributes:
        heads, groups: query heads, and key heads.
        norms: the weights of the norms of each query and key head, (heads + groups, D), or None.
        cos, sin: by position, float32, (positions, D / 2).
    """

    heads: int
    groups: int
    norms: Tensor | None
    eps: float
    cos: Tensor
    sin: Tensor


class Operators:
    """The operations, by torch's operators; N rows."""

    name = "torch"

    def norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """The norm of (N, width), or of `residual`, float32, to which it is added in place."""
        whole = x.float() if residual is None else residual.add_(x)
        return F.rms_norm(whole, weight.shape, weight.float(), eps).to(x)

    def rotate(
        self, qkv: Tensor, rotation: Rotation, places: Places, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Turn queries and keys, and write keys and values.

        Takes (N, (heads + 2 groups) D) and a layer of `KvSlots`; returns queries, (N, heads, D).
        """
        heads, groups = rotation.heads, rotation.groups
        rows = qkv.view(len(qkv), heads + 2 * groups, -1)
        values[places.flat] = rows[:, heads + groups :]
        turned = rows[:, : heads + groups].float()
        if rotation.norms is not None:
            turned = F.rms_norm(turned, turned.shape[-1:], eps=rotation.eps)
            turned = turned * rotation.norms.float()
        low, high = turned.chunk(2, dim=-1)
        cos, sin = rotation.cos[places.of][:, None], rotation.sin[places.of][:, None]
        turned = torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(qkv)
        keys[places.flat] = turned[:, heads:]
        return turned[:, :heads]

    def gate(self, both: Tensor) -> Tensor:
        """The gated product of (N, 2 width): `silu` of the first half times the second."""
        gate, up = both.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(both)


def try_operators(found: Operators, like: Tensor, *, heads: int, groups: int, width: int) -> None:
    """Try a decoder's shapes with few rows; `width`: of a head.

    `AssertionError` if they compute something else than `Operators` on a tensor's device.
    """
    shape = (heads, groups, width)
    made = [[*_tried(operators, like, *shape)] for operators in (Operators(), found)]
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=CLOSE, atol=CLOSE)


def _tried(
    operators: Operators, like: Tensor, heads: int, groups: int, width: int
) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(like)

    at = torch.arange(TRIED_ROWS, device=like.device)
    places, turns = Places(of=at + 1, flat=at + 5), (drawn(9, width // 2), drawn(9, width // 2))
    rotation = Rotation(
        heads=heads, groups=groups, norms=None, eps=1e-6, cos=turns[0].float(), sin=turns[1].float()
    )
    whole = heads * width
    for norms in (None, drawn(heads + groups, width)):
        keys, values = (drawn(groups, 16, width).transpose(0, 1) for _ in range(2))
        turned, rows = attrs.evolve(rotation, norms=norms), whole + 2 * groups * width
        yield operators.rotate(drawn(TRIED_ROWS, rows), turned, places, keys, values)
        yield from (keys, values)
    for residual in (None, drawn(TRIED_ROWS, whole).float()):
        yield operators.norm(drawn(TRIED_ROWS, whole), residual, drawn(whole), 1e-6)
        if residual is not None:
            yield residual
    yield operators.gate(drawn(TRIED_ROWS, 2 * whole))


# -- the forward pass in few launches, for GPUs -------------------------------------------------

ACTIVATION: Final = "silu"
Product = Callable[[Tensor], Tensor]
"""Multiplies rows by weights."""


def product_of(*parts: nn.Module) -> Product:
    """The product with some layers, side by side; one product, unless a layer is quantised."""
    stock = [part for part in parts if isinstance(part, nn.Linear)]
    if len(stock) == len(parts):
        return partial(F.linear, weight=joined(*stock))
    return lambda x: torch.cat([part(x) for part in parts], -1)


@attrs.frozen(eq=False, kw_only=True)
class Layer:
    """One layer's weights.

    Attributes:
        first, second: of the norms before attention and before the gated product, (width,).
        qkv: multiplies by queries, keys and values, (N, width) -> (N, (heads + 2 groups) D).
        out: (N, heads D) -> (N, width).
        both: by the gate and what it gates, (N, width) -> (N, 2 inner).
        down: (N, inner) -> (N, width).
        scale: of the products of queries and keys.
    """

    first: Tensor
    second: Tensor
    qkv: Product
    out: Product
    both: Product
    down: Product
    rotation: Rotation
    scale: float


@attrs.frozen(eq=False)
class StockDecoder:
    """A decoder of the stock modules, in parts.

    Attributes:
        name: of what it decodes, in words.
        model: stock, without its head.
        head: last hidden states to logits, (B, width) -> (B, ids).
        store: its slots.
    """

    name: str
    model: Any
    head: Callable[[Tensor], Tensor]
    store: KvSlots


class FusedDecoder:
    """A decoder's pass for many sessions, whose stock weights it joins; see `Network`.

    `ValueError`: the model has what these operations leave out.
    """

    is_causal = True

    def __init__(self, stock: StockDecoder, operators: Operators) -> None:
        model, store = stock.model, stock.store
        config = model.config
        if config.hidden_act != ACTIVATION or any("bias" in key for key in model.state_dict()):
            raise ValueError(f"{type(model).__name__} has another activation, or biases")
        self.name, self.store = f"{stock.name} by {operators.name}", store
        self._head, self._operators = stock.head, operators
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
            qkv=product_of(attention.q_proj, attention.k_proj, attention.v_proj),
            out=attention.o_proj,
            both=product_of(mlp.gate_proj, mlp.up_proj),
            down=mlp.down_proj,
            rotation=Rotation(
                heads=heads, groups=groups, norms=norms, eps=self._eps, cos=cos, sin=sin
            ),
            scale=float(attention.scaling),
        )

    def forward(self, rows: Tensor, spans: Spans) -> Tensor:
        """Feed (B, T, width), each where its span says; the last hidden states, (B * T, width)."""
        operators, x = self._operators, rows.flatten(0, 1)  # (N, width); N is B * T
        residual = x.to(torch.float32, copy=True)
        x = operators.norm(x, None, self._layers[0].first, self._eps)
        following = [*(layer.first for layer in self._layers[1:]), self._norm]
        for index, (layer, after) in enumerate(zip(self._layers, following, strict=True)):
            keys, values = self.store.layer(index)  # (positions, K, D)
            qkv = layer.qkv(x)  # (N, (H + 2 K) D)
            queries = operators.rotate(qkv, layer.rotation, spans.places, keys, values)
            seen = spans.attend(queries, keys, values, layer.scale)  # (N, H, D)
            x = layer.out(seen.flatten(1))  # (N, width)
            x = operators.norm(x, residual, layer.second, self._eps)
            x = layer.down(operators.gate(layer.both(x)))
            x = operators.norm(x, residual, after, self._eps)
        return x

    def finish(self, hidden: Tensor, spans: Spans) -> Out:
        """The last hidden state of each session, and its logits."""
        last = spans.last(hidden)
        return last, self._head(last).float()


# -- how sessions are run -----------------------------------------------------------------------


@attrs.frozen(eq=False)
class RowByRowDecoder:
    """A decoder that runs the stock model, and attends row by row."""

    stock: StockDecoder
    options: ComputeOptions

    def run(self, works: Sequence[Feed | Speak]) -> Out:
        """See `Decoder`; requests of one length run together."""
        order = sorted(range(len(works)), key=lambda index: len(works[index].rows))
        runs = groupby((works[index] for index in order), key=lambda work: len(work.rows))
        return in_order([self._run(list(some), count) for count, some in runs], order)

    def _run(self, works: Sequence[Feed | Speak], count: int) -> Out:
        rows = [Row(slot=work.slot, start=work.start) for work in works]
        x = _padded(torch.stack([work.rows for work in works]), -(-self.options.rows_min // count))
        starts = torch.tensor([work.start for work in works] + [0] * (len(x) - len(works)))
        positions = (starts[:, None] + torch.arange(count)).to(x.device)
        model, store = self.stock.model, self.stock.store
        groups = int(model.config.num_attention_heads) // store.keys.shape[2]
        kept = {_cache_name(model.__class__): SlotCache(store, rows, count, groups)}
        out = model(inputs_embeds=x, position_ids=positions, use_cache=True, **kept)
        hidden: Tensor = out.last_hidden_state[: len(works), -1]
        logits = self.stock.head(_padded(hidden, self.options.rows_min)).float()[: len(works)]
        return hidden, logits


@cache
def _cache_name(kind: Any) -> str:
    """Return the name of a stock model's cache, which transformers 5.24 changed."""
    return "cache" if "cache" in signature(kind.forward).parameters else "past_key_values"


def _padded(rows: Tensor, count: int) -> Tensor:
    lacking = max(0, count - len(rows))
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, lacking)) if lacking else rows


@attrs.frozen(eq=False)
class BatchedDecoder:
    """A decoder that runs all sessions together."""

    batched: Batched

    def run(self, works: Sequence[Feed | Speak]) -> Out:
        """See `Decoder`."""
        places = [Row(slot=work.slot, start=work.start) for work in works]
        return self.batched.run([work.rows for work in works], places)


Decoder = RowByRowDecoder | BatchedDecoder
"""Feeds the rows of each request, of any lengths, to its slot: last hidden states, (B, width), and
logits, (B, ids), float32."""
