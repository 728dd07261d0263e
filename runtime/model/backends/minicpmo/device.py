"""A model's device: which one, copies to it and from it, and the memory that a model takes there.

The memory is computed from the config without reading weights or allocating: a session needs KV
caches (`stores`), the mel front end's sound, and the vocoder's caches.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Final

import attrs
import torch
from torch import Tensor

from ..base import DeviceLost
from .audio import BUFFER_MAX
from .checkpoint import shapes
from .config import HOP, UNIT_FRAMES, ModelConfig
from .quantized import chosen, is_quantizable

# -- the device, and copies to it and from it ---------------------------------------------------

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
def raising_device_lost() -> Iterator[None]:
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


def choose_kernels() -> None:
    """Leave out those of cuDNN that do not suit this process's GPU, before it computes."""
    # On a Hopper GPU torch would choose cuDNN's attention, which takes tens of milliseconds to
    # plan each length of keys that is new to the thread; here nearly all are.
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    torch.backends.cudnn.allow_tf32 = False  # fp32 would have convolutions of 10 bits.


def compute_repeatably() -> None:
    """Make this process's GPU deterministic, before it computes; see `batched.ComputeOptions`."""
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


# -- memory -------------------------------------------------------------------------------------

WORKSPACE_SHARE: Final = 0.1
"""Share of the memory for activations, the GPU's context and allocator losses."""
SLOTS_MAX: Final = 64
"""Maximum recommended slots, however much memory there is: a full batch of the engine."""
WHOLE: Final = 100
"""Per cent."""
SHARED: Final = ("llm", "tts")
"""The stores that sessions may share."""
SAMPLE_BYTES: Final = 4
COPIES: Final = 2
"""Of the mel front end's buffer: the session's, and the one for a rollback."""


@attrs.frozen(kw_only=True)
class StoreShape:
    """The KV cache of one decoder, for one session.

    `capacity`: positions. `width`: of a head. `window`: positions that a query sees, itself
    included; None: all.
    """

    layers: int
    heads: int
    capacity: int
    width: int
    window: int | None = None

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Memory of one slot, in bytes."""
        return 2 * self.layers * self.heads * self.capacity * self.width * dtype.itemsize


def stores(config: ModelConfig) -> Mapping[str, StoreShape]:
    """The caches of every session in `ModelRunner`: `llm`, `tts` and `audio`."""
    llm, llama, audio = config.llm, config.tts.llama, config.audio
    return {
        "llm": StoreShape(
            layers=llm.num_hidden_layers,
            heads=llm.num_key_value_heads,
            capacity=config.context_limit,
            width=llm.head_dim,
            window=llm.sliding_window if llm.use_sliding_window else None,
        ),
        "tts": StoreShape(
            layers=llama.num_hidden_layers,
            heads=llama.num_key_value_heads,
            capacity=llama.max_position_embeddings,
            width=llama.hidden_size // llama.num_attention_heads,
        ),
        "audio": StoreShape(
            layers=audio.encoder_layers,
            heads=audio.encoder_attention_heads,
            capacity=audio.units * UNIT_FRAMES,
            width=audio.d_model // audio.encoder_attention_heads,
        ),
    }


def shared_positions(capacity: int, slots: int, percent: int) -> int | None:
    """Positions that slots share; None: each has all of its own."""
    if percent >= WHOLE:
        return None
    return max(capacity, slots * (capacity * percent // WHOLE))


@attrs.frozen(kw_only=True)
class MemoryPlan:
    """A model's memory in bytes.

    Attributes:
        parameters: count by part of the model: `llm`, `vpm`, ...
        weight_bytes: by part, in the format computed in, or quantised.
        session_bytes: per session on the device, for `llm`, `tts`, `audio`, `vocoder`.
        host_bytes: per session on the host.
        context_bytes: of a whole context in each of the stores that sessions may share (`SHARED`).
        voices_bytes: on the host, for reading reference audio; the same for any number of sessions.
    """

    parameters: Mapping[str, int]
    weight_bytes: Mapping[str, int]
    session_bytes: Mapping[str, int]
    host_bytes: int
    context_bytes: int
    voices_bytes: int = 0

    @property
    def model_bytes(self) -> int:
        """All weights, in bytes."""
        return sum(self.weight_bytes.values())

    @property
    def slot_bytes(self) -> int:
        """Keys and values of a session, in bytes."""
        return sum(size for name, size in self.session_bytes.items() if name != "vocoder")

    def each_bytes(self, device: torch.device) -> int:
        """A further session's bytes of a device's memory."""
        host = self.host_bytes if device.type == "cpu" else 0
        return sum(self.session_bytes.values()) + host

    def slots_that_fit(self, memory_bytes: int, device: torch.device) -> int:
        """Sessions that fit in a device's free `memory_bytes` with the weights; 0 if none does."""
        voices = self.voices_bytes if device.type == "cpu" else 0
        room = int(memory_bytes * (1 - WORKSPACE_SHARE)) - self.model_bytes - voices
        each, shared = self.each_bytes(device), sum(self.session_bytes[name] for name in SHARED)
        if room // each * shared < self.context_bytes:  # There is one whole context at least.
            rest = (room - self.context_bytes) // (each - shared)
            return max(0, min(rest, self.context_bytes // shared))
        return max(0, room // each)


def plan(
    config: ModelConfig,
    dtype: torch.dtype,
    quantize: str | None = None,
    context_percent: int = WHOLE,
) -> MemoryPlan:
    """Plan the memory of a model; `voices.planned` adds that of a published voice.

    `context_percent`: see `ModelRunner`. `ValueError`: see `quantized.chosen`.
    """
    how = chosen(config.quantization, quantize)
    parameters, weights = dict[str, int](), dict[str, int]()
    for key, shape in shapes(config).items():
        part, count = key.partition(".")[0], math.prod(shape)
        size = count * dtype.itemsize
        if how is not None and is_quantizable(key, shape):
            size = how.layer_bytes(*shape)
        parameters[part] = parameters.get(part, 0) + count
        weights[part] = weights.get(part, 0) + size
    sessions = {name: store.slot_bytes(dtype) for name, store in stores(config).items()}
    whole = sum(sessions[name] for name in SHARED)
    for name in SHARED:
        each = stores(config)[name].capacity
        sessions[name] = sessions[name] // each * (each * context_percent // WHOLE)
    return MemoryPlan(
        parameters=parameters,
        weight_bytes=weights,
        session_bytes={**sessions, "vocoder": 0},
        host_bytes=COPIES * SAMPLE_BYTES * (BUFFER_MAX + BUFFER_MAX // HOP),
        context_bytes=whole,
    )
