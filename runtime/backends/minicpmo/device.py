"""Where a model computes: the device and the number format that an operator asks for, or gets."""

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
"""What torch, from 2.8 on, raises where a call to a GPU failed."""
DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
)
"""The formats by the names that the command line takes."""
CUBLAS_WORKSPACE: Final = "CUBLAS_WORKSPACE_CONFIG"
"""Without it cuBLAS may share its workspace among streams, and then choose by what is free."""
MEMINFO: Final = Path("/proc/meminfo")


class DeviceError(ValueError):
    """The device that was asked for cannot be had; the text says what to do."""


def pick_device(name: str | None, *, prefer_cuda: bool) -> torch.device:
    """The device to compute on.

    Args:
        name: `cpu`, `cuda`, or None for the default.
        prefer_cuda: the default is a GPU where there is one.

    Raises:
        DeviceError: a GPU was asked for and there is none, or there is no device of that name.
    """
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
    """The number format: as asked for, or fp32 on a CPU and bf16 on a GPU.

    Raises:
        DeviceError: there is no format of that name.
    """
    if name is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise DeviceError(f"unknown dtype {name!r}: choose from {', '.join(DTYPES)}")
    return DTYPES[name]


@contextmanager
def telling_lost() -> Iterator[None]:
    """Tell a device that is lost from a call that failed: a lost one fails the next call too.

    Raises:
        DeviceLost: in place of what torch raised.
    """
    try:
        yield
    except FAILED as error:
        try:
            torch.cuda.synchronize()
        except Exception:
            text = str(error).partition("\n")[0]  # Advice for who debugs kernels follows.
            raise DeviceLost(f"the GPU is lost to this process ({text})") from error
        raise


def send(rows: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    """Bring tensors from the host to where `like` is, in its format.

    A GPU gets all of them in one copy, which nobody waits for.
    """
    if like.device.type == "cpu":
        return [row.to(like) for row in rows]
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
    """Have this process's GPU compute the same bits each time; to be called before it computes.

    On a CPU it changes nothing. What is computed together still matters: see `decoder.Means`.
    """
    os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def device_name(device: torch.device) -> str:
    """The device as a replay compares it: `cpu`, or the GPU's name."""
    return "cpu" if device.type == "cpu" else str(torch.cuda.get_device_name(device))


def free_bytes(device: torch.device) -> int:
    """Memory that can still be had on a device."""
    if device.type == "cuda":
        gc.collect()  # A model that was given up keeps its memory until then,
        torch.cuda.empty_cache()  # and torch keeps it for the next one.
        return int(torch.cuda.mem_get_info(device)[0])
    if MEMINFO.exists():
        for line in MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
