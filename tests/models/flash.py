"""Flash attention's operator on a CPU, for tests: written from its documentation, and as strict.

`torch.nn.attention.varlen` documents what the operator computes, and the kernel's own checks say
what it takes. It takes 16-bit formats alone; here float32 too, so that results can be told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

FORMATS = (torch.bfloat16, torch.float16, torch.float32)


def check(query: Tensor, key: Tensor, value: Tensor, *indices: Tensor) -> None:
    """Hold what the kernel asks for."""
    assert query.dtype == key.dtype == value.dtype
    assert query.dtype in FORMATS
    for tensor in (query, key, value):
        assert tensor.dim() == 3
        assert tensor.stride(-1) == 1
        assert tensor.shape[2] == query.shape[2] <= 256
        assert tensor.shape[2] % 8 == 0
    assert key.shape == value.shape
    assert query.shape[1] % key.shape[1] == 0
    for index in indices:
        assert index.dtype == torch.int32
        assert index.is_contiguous()


def forward(  # noqa: PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    **_more: object,
) -> tuple[Tensor, ...]:
    """Attention of packed sequences; the mask is aligned to the last query and the last key."""
    assert seqused_k is not None
    assert scale is not None
    assert (dropout_p, return_debug_mask) == (0.0, False)
    check(query, key, value, cum_seq_q, cum_seq_k, seqused_k)
    assert len(cum_seq_q) == len(cum_seq_k) == len(seqused_k) + 1
    before = -1 if window_size_left is None else window_size_left
    after = 0 if is_causal else -1 if window_size_right is None else window_size_right
    groups = query.shape[1] // key.shape[1]
    out = torch.full_like(query, torch.nan)
    for row, seen in enumerate(seqused_k.tolist()):
        begin, end = cum_seq_q[row : row + 2].tolist()
        start = int(cum_seq_k[row])
        count = end - begin
        assert 0 < count <= max_q
        assert count <= seen <= max_k
        assert start + seen <= len(key)
        first = max(0, seen - count - before) if before >= 0 else 0  # No query sees those before.
        asking = query[begin:end].double().unflatten(1, (-1, groups))
        asking = asking.permute(1, 2, 0, 3).flatten(1, 2)  # (heads of keys, groups * T, D)
        keys, values = (
            part[start + first : start + seen].double().transpose(0, 1) for part in (key, value)
        )
        apart = torch.arange(first, seen) - (torch.arange(count)[:, None] + seen - count)  # (T, S)
        hidden = torch.zeros_like(apart, dtype=torch.bool)
        hidden |= (apart < -before) if before >= 0 else False
        hidden |= (apart > after) if after >= 0 else False
        products = (asking @ keys.transpose(1, 2) * scale).unflatten(1, (groups, -1))
        shares = products.masked_fill_(hidden, -torch.inf).softmax(-1).flatten(1, 2)
        attended = (shares @ values).unflatten(1, (groups, -1))  # (heads of keys, groups, T, D)
        out[begin:end] = attended.permute(2, 0, 1, 3).flatten(1, 2).to(query.dtype)
    return (
        out,
        query.new_empty(query.shape[1], len(query), dtype=torch.float32),
        torch.empty(2, dtype=torch.uint64),
        torch.empty((), dtype=torch.uint64),
        query.new_empty(0),
    )


def unread(query: Tensor, *_args: object, **_options: object) -> tuple[Tensor, ...]:
    """In place of attention: it looks at no value."""
    return query.clone(), *(query.new_empty(0) for _ in range(4))


Kernel = Callable[..., tuple[Tensor, ...]]
_kernels: list[Kernel] = []


@contextmanager
def flash_on_cpu(kernel: Kernel = forward) -> Iterator[None]:
    """Have CPUs compute what the operator does, while it is open; the innermost counts."""
    _kernels.append(kernel)
    library = torch.library.Library("aten", "IMPL") if len(_kernels) == 1 else None
    if library is not None:

        def called(*args: Any, **options: Any) -> tuple[Tensor, ...]:
            return _kernels[-1](*args, **options)

        library.impl("_flash_attention_forward", called, "CPU")
    try:
        yield
    finally:
        _kernels.pop()
        if library is not None:
            library._destroy()
