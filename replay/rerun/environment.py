"""Whether a full replay here can be compared with what was recorded there.

Rules: the recorded fingerprint and the backend's own must be equal, line by line; a line that only
one of them has differs. A backend that says of itself that it is not deterministic cannot be
compared at all. Which lines there are is the backend's business; a log without the line `numerics`
was made by the first version of a backend's own arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import attrs

from recorder.format.records import Fields
from runtime.model.backends.base import Backend, BackendInfo
from runtime.model.models import load_backend

from .report import Mismatch


def model_of(head: Fields) -> str | None:
    """Return the name of the model that a log was made with, as its head says; None if not."""
    config = head.get("config")
    name = config.get("model") if isinstance(config, Mapping) else None
    return name if isinstance(name, str) else None


DTYPES: Final = MappingProxyType({"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"})
"""What `load_backend` calls the formats that a fingerprint names."""


NUMERICS: Final = "numerics"
FIRST_NUMERICS: Final = "1"
"""The version of the arithmetic behind logs that do not say one."""


@attrs.frozen
class Loading:
    """A model and how it is to compute, as `load_backend` takes it."""

    name: str
    device: str | None = None
    dtype: str | None = None
    deterministic: bool = False

    def load(self) -> Backend:
        """Load it with one slot, which all that is replayed needs.

        Raises:
            ValueError: it cannot be had here.
        """
        return load_backend(
            self.name,
            1,
            device=self.device,
            dtype=self.dtype,
            deterministic=self.deterministic,
        )


def loading_of(head: Fields, name: str) -> Loading:
    """How a model is loaded so that it computes as one did for a log, as far as that is known.

    Args:
        head: the fields of the log's `session` record.
        name: the model; it may be the log's own in another place.
    """
    config, fingerprint = head.get("config"), head.get("fingerprint")
    if not isinstance(fingerprint, Mapping):
        return Loading(name)
    device, dtype = fingerprint.get("device"), fingerprint.get("dtype")
    if not isinstance(device, str) or not isinstance(dtype, str):
        return Loading(name)  # A model that has neither: a script.
    is_exact = isinstance(config, Mapping) and config.get("deterministic") is True
    where = "cpu" if device == "cpu" else _gpu()
    return Loading(
        name, device=where, dtype=DTYPES.get(dtype), deterministic=is_exact and where == "cuda"
    )


def _gpu() -> str | None:
    """A GPU where there is one; without it what there is, and the report says that it differs."""
    import torch  # It costs a second: only a log that was made on a GPU pays it.

    return "cuda" if torch.cuda.is_available() else None


def mismatches(head: Fields, info: BackendInfo) -> tuple[Mismatch, ...]:
    """List what differs between where a log was recorded and here.

    Args:
        head: the fields of the log's `session` record.
        info: the backend that is to run it again.
    """
    said = head.get("fingerprint")
    there = {name: str(line) for name, line in said.items()} if isinstance(said, Mapping) else {}
    here = {name: str(line) for name, line in info.fingerprint.items()}
    if NUMERICS in here:
        there.setdefault(NUMERICS, FIRST_NUMERICS)
    found = [
        Mismatch(name=name, recorded=there.get(name), here=here.get(name))
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
    config = head.get("config")
    there_too = not (isinstance(config, Mapping) and config.get("deterministic") is False)
    if not (info.deterministic and there_too):
        found.append(
            Mismatch(name="deterministic", recorded=str(there_too), here=str(info.deterministic))
        )
    return tuple(found)
