"""Loading a checkpoint in the published layout: `config.json` and safetensors, sharded or not.

No content of a checkpoint is executed. Every key must be known, present, of the right shape and
finite; the error lists all that are not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from safetensors import SafetensorError, safe_open

from .config import ModelConfig
from .parts import Parts

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
SUFFIX: Final = ".safetensors"
UNUSED: Final = frozenset({"tts.model.embed_tokens.weight"})
"""Keys of the published checkpoint that are not used in computation."""
LISTED_MAX: Final = 20
"""Maximum keys per kind in an error."""


class CheckpointError(ValueError):
    """A checkpoint that does not fit the model; the message lists every reason."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in order.

    `OSError`: there are none; `CheckpointError`: the index is malformed, or names a file outside
    the folder.
    """
    index = folder / INDEX
    if not index.exists():
        if not (folder / WEIGHTS).exists():
            raise FileNotFoundError(f"neither {WEIGHTS} nor {INDEX} is there")
        return [folder / WEIGHTS]
    try:
        raw = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{INDEX} is no JSON: {error}") from error
    mapping = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(mapping, dict) or not all(isinstance(n, str) for n in mapping.values()):
        raise CheckpointError(f"{INDEX} has no weight_map")
    names = sorted(set(mapping.values()))
    if any(Path(name).name != name or not name.endswith(SUFFIX) for name in names):
        raise CheckpointError(f"{INDEX} names a file that is not beside it")
    return [folder / name for name in names]


@contextmanager
def _defaults(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def build_parts(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Parts:
    """Build the modules with arbitrary weights, for inference."""
    with _defaults(dtype, device):
        parts = Parts(config)
    return parts.requires_grad_(False).eval()


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every weight by key, without allocating them."""
    parts = build_parts(config, torch.float32, torch.device("meta"))
    return {key: tuple(value.shape) for key, value in parts.state_dict().items()}


@attrs.frozen(kw_only=True)
class Survey:
    """A comparison of file headers with the config; each misshaped key comes with both shapes."""

    tensors: int
    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    misshaped: tuple[str, ...]

    @property
    def problems(self) -> list[str]:
        """The problems, one per line; empty if the checkpoint fits."""
        return [
            *_listed("missing keys", self.missing),
            *_listed("unknown keys", self.unknown),
            *_listed("keys of another shape", self.misshaped),
        ]


def _listed(kind: str, keys: tuple[str, ...]) -> list[str]:
    if not keys:
        return []
    shown = ", ".join(keys[:LISTED_MAX])
    more = f" and {len(keys) - LISTED_MAX} more" if len(keys) > LISTED_MAX else ""
    return [f"{len(keys)} {kind}: {shown}{more}"]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error


def survey(wanted: Mapping[str, tuple[int, ...]], folder: Path) -> Survey:
    """Compare the files' headers with the `wanted` shapes, without reading weights.

    `OSError`: a file is missing; `CheckpointError`: a file is damaged.
    """
    missing, unknown, misshaped, tensors = set(wanted), [], [], 0
    for path in weight_files(folder):
        with _opened(path) as file:
            for key in sorted(file.keys()):
                if key in UNUSED:
                    continue
                if key not in wanted:
                    unknown.append(key)
                    continue
                missing.discard(key)
                shape = tuple(file.get_slice(key).get_shape())
                if shape == wanted[key]:
                    tensors += 1
                else:
                    misshaped.append(f"{key} {shape} not {wanted[key]}")
    return Survey(
        tensors=tensors,
        missing=tuple(sorted(missing)),
        unknown=tuple(sorted(unknown)),
        misshaped=tuple(sorted(misshaped)),
    )


def load_parts(
    config: ModelConfig,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Parts:
    """Build the modules for inference and load every weight, converted to `dtype`.

    `OSError`: a file is missing; `CheckpointError`: a key is unknown, missing, misshaped or not
    finite, or a file damaged.
    """
    problems = survey(shapes(config), folder).problems
    if problems:
        raise CheckpointError("the checkpoint does not fit its config: " + "; ".join(problems))
    parts = build_parts(config, dtype, torch.device(device))
    wanted, broken = parts.state_dict(), list[str]()
    for path in weight_files(folder):
        with _opened(path) as file:
            for key in sorted(set(file.keys()) - UNUSED):
                weight = wanted[key].copy_(file.get_tensor(key))
                if not _is_finite(weight):
                    broken.append(key)
    if broken:
        kind = f"keys with numbers that are not finite in {str(dtype).removeprefix('torch.')}"
        raise CheckpointError("; ".join(_listed(kind, tuple(sorted(broken)))))
    return parts


def _is_finite(weight: torch.Tensor) -> bool:
    """Whether all numbers are finite: one pass without a copy, since weights are large."""
    return bool(torch.stack(torch.aminmax(weight)).isfinite().all()) if weight.numel() else True
