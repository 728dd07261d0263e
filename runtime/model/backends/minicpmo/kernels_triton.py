"""The operations of `decoder.Operators` in Triton; imported only where there is a GPU."""

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def"
# ruff: noqa: N803, PLR0917 - the names and the arguments of kernels

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import Places
from .decoder import Operators, Rotation

GATE_BLOCK = 1024


@triton.jit
def _norm(x, residual, weight, out, width, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    is_own = at < width
    value = tl.load(x + row + at, is_own, 0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row + at, is_own, 0.0)
        tl.store(residual + row + at, value, is_own)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    value *= scale * tl.load(weight + at, is_own, 0.0).to(tl.float32)
    tl.store(out + row + at, value.to(out.dtype.element_ty), is_own)


@triton.jit
def _rotate(
    qkv, queries, keys, values, norms, cos, sin, of, flat, stride, eps,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, HAS_NORMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    at = tl.arange(0, HALF)
    source = qkv + (row * (HEADS + 2 * GROUPS) + head) * 2 * HALF + at
    low = tl.load(source).to(tl.float32)
    high = tl.load(source + HALF).to(tl.float32)
    place = tl.load(flat + row)
    if head >= HEADS + GROUPS:
        target = values + (head - HEADS - GROUPS) * stride + place * 2 * HALF + at
    else:
        if HAS_NORMS:
            weight = norms + head * 2 * HALF + at
            mean = (tl.sum(low * low, 0) + tl.sum(high * high, 0)) / (2 * HALF)
            scale = 1.0 / tl.sqrt(mean + eps)
            low *= scale * tl.load(weight).to(tl.float32)
            high *= scale * tl.load(weight + HALF).to(tl.float32)
        turn = tl.load(of + row) * HALF + at
        c = tl.load(cos + turn)
        s = tl.load(sin + turn)
        turned = low * c - high * s
        high = high * c + low * s
        low = turned
        if head < HEADS:
            target = queries + (row * HEADS + head) * 2 * HALF + at
        else:
            target = keys + (head - HEADS) * stride + place * 2 * HALF + at
    tl.store(target, low.to(keys.dtype.element_ty))
    tl.store(target + HALF, high.to(keys.dtype.element_ty))


@triton.jit
def _gate(both, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_own = at < width
    gate = tl.load(both + row * 2 * width + at, is_own, 0.0).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + at, is_own, 0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + at, value.to(out.dtype.element_ty), is_own)


class TritonOperators(Operators):
    """The operations, each one launch."""

    name = "triton"

    def norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """See `Operators.norm`."""
        out, width = torch.empty_like(x), x.shape[1]
        has_residual = residual is not None
        block = triton.next_power_of_2(width)
        _norm[(len(x),)](
            x, residual if has_residual else x, weight, out, width, eps,
            HAS_RESIDUAL=has_residual, BLOCK=block,
        )  # fmt: skip
        return out

    def rotate(
        self, qkv: Tensor, rotation: Rotation, places: Places, keys: Tensor, values: Tensor
    ) -> Tensor:
        """See `Operators.rotate`."""
        heads, groups, width = rotation.heads, rotation.groups, keys.shape[2]
        queries = qkv.new_empty(len(qkv), heads, width)
        norms = rotation.norms
        _rotate[(len(qkv), heads + 2 * groups)](
            qkv, queries, keys, values, qkv if norms is None else norms, rotation.cos,
            rotation.sin, places.of, places.flat, keys.stride(1), rotation.eps,
            HEADS=heads, GROUPS=groups, HALF=width // 2, HAS_NORMS=norms is not None, num_warps=1,
        )  # fmt: skip
        return queries

    def gate(self, both: Tensor) -> Tensor:
        """See `Operators.gate`."""
        width = both.shape[1] // 2
        out = both.new_empty(len(both), width)
        _gate[(len(both), triton.cdiv(width, GATE_BLOCK))](both, out, width, BLOCK=GATE_BLOCK)
        return out
