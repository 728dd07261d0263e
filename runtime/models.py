"""Which models there are, by name, and how each is loaded.

The name is an operator's word (`--model`) or a log's; it never comes from a client. Torch is
imported only when a model that needs it is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from .backends.base import Backend
from .backends.scripted import ScriptedBackend

MODELS: Final = ("tiny", "scripted")
"""`tiny` is the embedded trained model; `scripted` plays a fixed script and hears nothing."""


class ModelUnknownError(ValueError):
    """There is no model of that name."""


def tiny_path() -> Path:
    """Return the folder of the embedded model: beside the code when installed, else fixtures/."""
    installed = Path(__file__).parent / "backends" / "minicpmo" / "tiny"
    return installed if installed.exists() else Path(__file__).parents[1] / "fixtures" / "tiny"


def load_backend(name: str, slots: int | None = None) -> Backend:
    """Load a model.

    Args:
        name: one of `MODELS`.
        slots: sessions at once; None takes the model's own number.

    Raises:
        ModelUnknownError: there is none of that name.
    """
    if name == "scripted":
        backend = ScriptedBackend() if slots is None else ScriptedBackend(slots=slots)
    elif name == "tiny":
        from .backends.minicpmo.model import DuplexModel
        from .backends.threaded import ThreadedBackend

        return ThreadedBackend(DuplexModel.load(tiny_path()), slots=slots)
    else:
        raise ModelUnknownError(f"unknown model {name!r}: choose from {', '.join(MODELS)}")
    return backend
