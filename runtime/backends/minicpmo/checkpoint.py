"""Loading a checkpoint in the published layout: `config.json` and safetensors, sharded or not.

Nothing of a checkpoint is ever executed. Every key must be known, present and of the right shape;
where one is not, the error lists them all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open

from .config import ModelConfig
from .parts import Parts

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
UNUSED: Final = frozenset({"tts.model.embed_tokens.weight"})
"""Keys of the published checkpoint that nothing is computed from."""
LISTED_MAX: Final = 20
"""Keys that an error lists of each kind."""


class CheckpointError(ValueError):
    """A checkpoint that does not fit the model; the message lists every reason."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in order.

    Raises:
        OSError: there are none.
        CheckpointError: the index is malformed, or names a file outside the folder.
    """
    index = folder / INDEX
    if not index.exists():
        if not (folder / WEIGHTS).exists():
            raise FileNotFoundError(f"neither {WEIGHTS} nor {INDEX} is there")
        return [folder / WEIGHTS]
    mapping = json.loads(index.read_text(encoding="utf-8")).get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(n, str) for n in mapping.values()):
        raise CheckpointError(f"{INDEX} has no weight_map")
    names = sorted(set(mapping.values()))
    if any(Path(name).name != name for name in names):
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
    """The modules with weights of no meaning, for inference."""
    with _defaults(dtype, device):
        parts = Parts(config)
    return parts.requires_grad_(False).eval()


def _listed(kind: str, keys: list[str]) -> list[str]:
    if not keys:
        return []
    shown = ", ".join(keys[:LISTED_MAX])
    more = f" and {len(keys) - LISTED_MAX} more" if len(keys) > LISTED_MAX else ""
    return [f"{len(keys)} {kind}: {shown}{more}"]


def load_parts(
    config: ModelConfig,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Parts:
    """Build the modules and load every weight.

    Args:
        config: the shapes.
        folder: holds the safetensors files.
        dtype: of the weights in memory, whatever they are stored as.
        device: where they go.

    Returns:
        The modules, for inference only.

    Raises:
        OSError: a file is missing.
        CheckpointError: a key is unknown, missing or of another shape, or a file is damaged.
    """
    parts = build_parts(config, dtype, torch.device(device))
    wanted = parts.state_dict()
    missing, unknown, misshaped = set(wanted), [], []
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for key in sorted(file.keys()):
                    if key in UNUSED:
                        continue
                    if key not in wanted:
                        unknown.append(key)
                        continue
                    missing.discard(key)
                    shape = tuple(file.get_slice(key).get_shape())
                    if shape != tuple(wanted[key].shape):
                        misshaped.append(f"{key} {shape} not {tuple(wanted[key].shape)}")
                    else:
                        wanted[key].copy_(file.get_tensor(key))
        except SafetensorError as error:
            raise CheckpointError(f"{path.name} cannot be read: {error}") from error
    wrong = [
        *_listed("missing keys", sorted(missing)),
        *_listed("unknown keys", sorted(unknown)),
        *_listed("keys of another shape", sorted(misshaped)),
    ]
    if wrong:
        raise CheckpointError("the checkpoint does not fit its config: " + "; ".join(wrong))
    return parts
