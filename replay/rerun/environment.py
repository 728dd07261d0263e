"""Whether a full replay on this machine can be compared with a recording.

The two fingerprints must be equal, line by line, and the backend deterministic. The backend chooses
the lines; in a log, a missing `numerics` stands for version 1 of a backend's arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import MappingProxyType
from typing import Final

import attrs

from protocol.values.limits import VOICE_STEPS
from recorder.format.format import Fields
from runtime.model.backends.base import Backend, BackendInfo
from runtime.model.models import load_backend
from runtime.settings.settings import QUANTIZATIONS

from ..shared.fields import below, typed
from .report import Mismatch


class ModelUnavailableError(Exception):
    """The log does not name its model, or the model is not available here or cannot be forced."""


def model_of(head: Fields) -> str | None:
    """Return the name of the model in a log's head; None if the head has no name."""
    return typed(below(head, "config"), "model", str)


DTYPES: Final = MappingProxyType({"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"})
"""The names in `load_backend` of a fingerprint's dtypes."""


NUMERICS: Final = "numerics"
FIRST_NUMERICS: Final = "1"
"""The version of the arithmetic of logs without that line."""


@attrs.frozen
class Loading:
    """A model and how it computes: the arguments of `load_backend`.

    With several `slots` these may wait for each other; so no session may wait for another one's.
    """

    name: str
    device: str | None = None
    dtype: str | None = None
    deterministic: bool = False
    slots: int = 1
    voice_steps: int = VOICE_STEPS
    quantize: str | None = None

    def load(self) -> Backend:
        """Load it, with one slot for replay; `ValueError` if it is not available here."""
        how = attrs.asdict(self)
        name, slots = how.pop("name"), how.pop("slots")
        return load_backend(name, slots, is_live=slots == 1, **how)


def loading_of(head: Fields, name: str) -> Loading:
    """Choose settings with which a model computes as the log with this head did, if known."""
    fingerprint = below(head, "fingerprint")
    device, dtype = typed(fingerprint, "device", str), typed(fingerprint, "dtype", str)
    if device is None or dtype is None:
        return Loading(name)  # A model that has neither: a script.
    is_exact = below(head, "config").get("deterministic") is True
    where = "cpu" if device == "cpu" else _gpu()
    steps = typed(fingerprint, "voice_steps", str) or ""
    quantize = typed(fingerprint, "quantize", str)
    return Loading(
        name,
        device=where,
        dtype=DTYPES.get(dtype),
        deterministic=is_exact and where == "cuda",
        voice_steps=int(steps) if re.fullmatch("[1-9][0-9]?", steps) else VOICE_STEPS,
        quantize=quantize if quantize in QUANTIZATIONS else None,
    )


def _gpu() -> str | None:
    """The GPU if there is one; otherwise the default, and the report shows the difference."""
    import torch  # It costs a second: only a log that was made on a GPU pays it.

    return "cuda" if torch.cuda.is_available() else None


def load_model(
    head: Fields, model: str | None, load: Callable[[Loading], Backend]
) -> tuple[str, Backend]:
    """Load the model of the log with this head, or another `model`; return its name too.

    `load` loads a model, as `Loading.load` does. `ModelUnavailableError`: none is named, or `load`
    failed.
    """
    name = model if model is not None else model_of(head)
    if name is None:
        raise ModelUnavailableError("the log does not say which model made it")
    try:
        return name, load(loading_of(head, name))
    except Exception as error:  # any error means that there is no model
        text = f"the model {name!r} cannot be loaded: {error}"
        raise ModelUnavailableError(text) from error


def mismatches(head: Fields, info: BackendInfo) -> tuple[Mismatch, ...]:
    """List the differences between the environment of the log with this head and this one."""
    there = {name: str(line) for name, line in below(head, "fingerprint").items()}
    here = {name: str(line) for name, line in info.fingerprint.items()}
    if NUMERICS in here:
        there.setdefault(NUMERICS, FIRST_NUMERICS)
    found = [
        Mismatch(name=name, recorded=there.get(name), here=here.get(name))
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
    there_too = below(head, "config").get("deterministic") is not False
    if not (info.deterministic and there_too):
        found.append(
            Mismatch(name="deterministic", recorded=str(there_too), here=str(info.deterministic))
        )
    return tuple(found)
