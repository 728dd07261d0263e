"""The device and the number format of a model, as the operator asks or by default."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from ..base import DeviceLost

FAILED: Final = getattr(torch, "AcceleratorError", ())
"""Torch's exception, from 2.8 on, for a failed GPU call."""
DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
)
"""The formats by their command-line names."""
CUBLAS_WORKSPACE: Final = "CUBLAS_WORKSPACE_CONFIG"
"""Without it cuBLAS may share its workspace among streams, and then choose by free space."""
MEMINFO: Final = Path("/proc/meminfo")


class DeviceError(ValueError):
    """The requested device is not available; the text gives the remedy."""


def pick_device(name: str | None, *, prefer_cuda: bool) -> torch.device:
    """Choose `cpu` or `cuda`, or for None the default; `DeviceError` if it is not available."""
    if name is None:
        name = "cuda" if prefer_cuda and torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise DeviceError(f"unknown device {name!r}: choose cpu or cuda")
    if not torch.cuda.is_available():
        raise DeviceError(
            "no GPU: torch finds no CUDA device; take --device cpu, or a torch built for the GPU"
        )
    return torch.device("cuda")


def pick_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """Choose a number format, by default fp32 on a CPU, bf16 on a GPU; `DeviceError` if unknown."""
    if name is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise DeviceError(f"unknown dtype {name!r}: choose from {', '.join(DTYPES)}")
    return DTYPES[name]


@contextmanager
def telling_lost() -> Iterator[None]:
    """Raise `DeviceLost` where the device is lost: then the next call fails too.

    A library that launches by itself raises its own error.
    """
    try:
        yield
    except RuntimeError as error:
        is_on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if not (isinstance(error, FAILED) or is_on_gpu):
            raise
        try:
            torch.cuda.synchronize()
        except Exception:
            text = str(error).partition("\n")[0]  # Kernel debugging advice follows.
            raise DeviceLost(f"the GPU is lost to this process ({text})") from error
        raise


def pin(row: Tensor, like: Tensor) -> Tensor:
    """Prepare a host tensor for `send`, in any thread: in `like`'s format, which a GPU can read."""
    if not like.is_cuda:
        return row
    try:
        return row.to(like.dtype).pin_memory()
    except RuntimeError:  # A lost GPU is found out where it computes.
        return row


def send(rows: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    """Copy host tensors to `like`'s device and format, to a GPU asynchronously.

    Those of `pin` are copied as they are, others first into one.
    """
    if like.device.type == "cpu":
        return [row.to(like) for row in rows]
    if like.is_cuda and all(row.is_pinned() for row in rows):
        return [row.to(like, non_blocking=True) for row in rows]
    packed = torch.cat([row.flatten() for row in rows])
    if like.is_cuda:
        packed = packed.pin_memory()
    sent = packed.to(like.device, non_blocking=True).to(like.dtype)
    parts = sent.split_with_sizes([row.numel() for row in rows])
    return [part.view(row.shape) for part, row in zip(parts, rows, strict=True)]


def fetch(tensor: Tensor) -> Tensor:
    """Bring a tensor to the host, and wait for it; from a GPU through pinned memory."""
    if not tensor.is_cuda:
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host


def compute_repeatably() -> None:
    """Make this process's GPU deterministic, before it computes; see also `batched.Means`."""
    os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def device_name(device: torch.device) -> str:
    """The device's name for replay comparisons: `cpu`, or the GPU's name."""
    return "cpu" if device.type == "cpu" else str(torch.cuda.get_device_name(device))


def free_bytes(device: torch.device) -> int:
    """Free memory of a device, in bytes."""
    if device.type == "cuda":
        gc.collect()  # A discarded model keeps its memory until then,
        torch.cuda.empty_cache()  # and torch keeps it for the next one.
        return int(torch.cuda.mem_get_info(device)[0])
    if MEMINFO.exists():
        for line in MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
