"""Loading a voice from the published files: `flow.yaml`, `flow.pt` and `hift.pt`.

No content of a file is executed: the first is read as data (`config.py`), the others as tensors by
name (`torch.load` with `weights_only`). Every name must be known, present, of the right shape and
finite; the error lists all that are not. `hift.pt` has its convolutions as a direction and a length
(weight norm), in either of torch's two spellings; they are multiplied in float64.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from protocol.values.limits import VOICE_STEPS

from ..backends.minicpmo.checkpoint import CheckpointError, Survey
from .config import SIZE_MAX, FlowConfig, HiftConfig, read_flow_config
from .flow import Flow
from .hift import Hift
from .vocoder import VOICES, Vocoder

FLOW_YAML: Final = "flow.yaml"
FLOW: Final = "flow.pt"
HIFT: Final = "hift.pt"
NAME_MAX: Final = 200
PREFIX: Final = "generator."
"""Of each name in `hift.pt`."""
LENGTH, DIRECTION = ".weight_g", ".weight_v"
SPELLINGS: Final = (
    (re.compile(r"\.parametrizations\.weight\.original0$"), LENGTH),
    (re.compile(r"\.parametrizations\.weight\.original1$"), DIRECTION),
)
UNNORMED: Final = ("source_downs.", "m_source.", "f0_predictor.classifier.")
"""Modules of `hift.pt` whose weights are plain; all other weights have a length."""

Tensors = Mapping[str, Tensor]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file's tensors by name, without loading them into memory.

    `OSError`: it is missing; `CheckpointError`: it is damaged, or holds anything but tensors.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path.name} is missing")
    try:
        with zipfile.ZipFile(path) as archive:
            if any(each.compress_type for each in archive.infolist()):
                raise ValueError("it is compressed")  # To any size, and not read as such.
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # Torch's reader fails in many ways, and its advice is to trust.
        text = " ".join(str(error).split())
        named = re.search(r"GLOBAL ([\w.]+)", text)
        reason = f"it names {named[1]}" if named else f"{type(error).__name__}: {text[:100]}"
        raise CheckpointError(f"{path.name} holds more than weights: {reason}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path.name} is not a table of weights")
    for name, tensor in found.items():
        is_name = isinstance(name, str) and len(name) <= NAME_MAX and name.isprintable()
        if not is_name or not _is_plain(tensor):
            raise CheckpointError(f"{path.name} has {str(name)[:200]!r}, which is not a weight")
    return found


def _is_plain(tensor: object) -> bool:
    return (
        isinstance(tensor, Tensor)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_floating_point()
    )


def _check(file: str, wanted: Mapping[str, tuple[int, ...]], found: Tensors) -> None:
    """Compare names and shapes; `CheckpointError` lists what does not fit."""
    common = wanted.keys() & found.keys()
    misshaped = [
        f"{name} {tuple(found[name].shape)} not {wanted[name]}"
        for name in sorted(common)
        if tuple(found[name].shape) != wanted[name]
    ]
    problems = Survey(
        tensors=len(common) - len(misshaped),
        missing=tuple(sorted(wanted.keys() - common)),
        unknown=tuple(sorted(found.keys() - common)),
        misshaped=tuple(misshaped),
    ).problems
    if problems:
        raise CheckpointError(f"{file} does not fit {FLOW_YAML}: " + "; ".join(problems))


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


def _fill(file: str, module: nn.Module, found: Tensors) -> None:
    """Copy weights into an empty module; `CheckpointError` names those that are not finite."""
    broken = list[str]()
    for name, weight in module.state_dict().items():
        if not weight.copy_(found[name]).isfinite().all():
            broken.append(name)
    if broken:
        raise CheckpointError(f"{file} has numbers that are not finite in: {', '.join(broken)}")
    module.requires_grad_(False).eval()


def fill_flow(
    config: FlowConfig,
    found: Tensors,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Flow:
    """Make the flow of the tensors of `flow.pt`; `CheckpointError` if they do not fit."""
    flow = _empty_flow(config, found).to(dtype).to_empty(device=device)
    _fill(FLOW, flow, found)
    return flow


def _empty_flow(config: FlowConfig, found: Tensors) -> Flow:
    with torch.device("meta"):
        flow = Flow(config)
    _check(FLOW, _shapes(flow), found)
    return flow


def fill_hift(read: Tensors, device: torch.device | str = "cpu") -> Hift:
    """Make HiFT, with the widths of `hift.pt`'s tensors; `CheckpointError` if they do not fit."""
    hift, found = _empty_hift(read)
    names, hift = hift.state_dict().keys(), hift.to_empty(device=device)
    _fill(HIFT, hift, {name: _folded(name, found) for name in names})
    return hift


def _empty_hift(read: Tensors) -> tuple[Hift, dict[str, Tensor]]:
    found = {_spelled(name): tensor for name, tensor in read.items()}
    if len(found) < len(read):
        raise CheckpointError(f"{HIFT} has a weight in both spellings of weight norm")
    with torch.device("meta"):
        hift = Hift(_hift_config(found))
    plain = _shapes(hift)
    wanted = dict[str, tuple[int, ...]]()
    for name, shape in plain.items():
        if not name.endswith(".weight") or name.startswith(UNNORMED):
            wanted[name] = shape
        else:
            base = name.removesuffix(".weight")
            wanted[base + LENGTH], wanted[base + DIRECTION] = (shape[0], 1, 1), shape
    _check(HIFT, wanted, found)
    return hift, found


def _spelled(name: str) -> str:
    """A name of `hift.pt` without its prefix, in one spelling."""
    name = name.removeprefix(PREFIX) if name.startswith(PREFIX) else f"{name} (not in {PREFIX}*)"
    for pattern, ending in SPELLINGS:
        name = pattern.sub(ending, name)
    return name


def _hift_config(found: Tensors) -> HiftConfig:
    widths = []
    for name in ("conv_pre.bias", "f0_predictor.condnet.0.bias"):
        shape = tuple(found[name].shape) if name in found else ()
        if len(shape) != 1 or not 8 <= shape[0] <= SIZE_MAX or shape[0] % 8:
            raise CheckpointError(f"{HIFT} has {PREFIX}{name} of shape {shape}, no supported width")
        widths.append(shape[0])
    return HiftConfig(width=widths[0], pitch_width=widths[1])


def _folded(name: str, found: Tensors) -> Tensor:
    """A plain weight: its direction, scaled to its length."""
    if name in found:
        return found[name]
    base = name.removesuffix(".weight")
    direction, length = found[base + DIRECTION].double(), found[base + LENGTH].double()
    return length * direction / direction.square().sum(dim=(1, 2), keepdim=True).sqrt()


def digest(folder: Path) -> str:
    """The SHA-256 of the three files, in hexadecimal, for the fingerprint."""
    total = hashlib.sha256()
    for name in (FLOW_YAML, FLOW, HIFT):
        with (folder / name).open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def read_config(folder: Path) -> FlowConfig:
    """Read `flow.yaml`; `OSError`: it is missing; `CheckpointError`: it is not supported."""
    try:
        return read_flow_config(folder / FLOW_YAML)
    except ValueError as error:
        raise CheckpointError(f"{FLOW_YAML}: {error}") from error


def survey(folder: Path) -> tuple[Flow, Hift]:
    """The modules without weights, after a check of names and shapes; errors as `load_vocoder`."""
    flow = _empty_flow(read_config(folder), read_tensors(folder / FLOW))
    return flow, _empty_hift(read_tensors(folder / HIFT))[0]


def load_vocoder(
    folder: Path,
    *,
    steps: int = VOICE_STEPS,
    voices: int = VOICES,
    sizes: Callable[[int], Sequence[int]] = lambda _: (),
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Vocoder:
    """Load a vocoder; the flow computes in `dtype`, HiFT in float32.

    `sizes`: sessions that are computed together, by the flow's width (`vocoder.sizes_on`).
    `OSError`: a file is missing; `CheckpointError`: a file is damaged, or does not fit the others.
    """
    flow = fill_flow(read_config(folder), read_tensors(folder / FLOW), dtype, device)
    hift = fill_hift(read_tensors(folder / HIFT), device)
    together = sizes(flow.config.dit.width)
    seed = digest(folder)
    vocoder = Vocoder(flow, hift, seed=seed, steps=steps, voices=voices, sizes=together)
    if vocoder.steps is not None and torch.device(device).type == "cuda":
        vocoder.steps.capture()
    return vocoder
