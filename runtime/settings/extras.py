"""Which extra of the distribution brings a package that is not installed.

`pip install antiphon` brings the client and the tools for recordings. What serves, runs a model or
writes films comes with an extra, and who lacks it is told which.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

MODULES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "media": ("av", "mcap"),
        "server": (
            *("h11", "httpcore2", "prometheus_client", "safetensors", "starlette"),
            *("structlog", "tokenizers", "torch", "transformers", "trio_websocket", "wsproto"),
            "yaml",
        ),
        "mic": ("sounddevice",),
        "vad": ("silero_vad",),
        "voice": ("onnxruntime",),
        "ray": ("ray",),
        "store": ("obstore",),
        "traces": ("opentelemetry",),
    }
)
"""The modules of each extra's packages, by the extra's name in pyproject.toml."""
_EXTRA_OF: Final = {module: extra for extra, modules in MODULES.items() for module in modules}


def install(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install 'antiphon[{extra}]'"


def what_is_missing(error: BaseException) -> str | None:
    """Say which extra an error asks for, in a group or not; None for any other error."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(what_is_missing, error.exceptions)), None)
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    module = error.name.partition(".")[0]
    extra = _EXTRA_OF.get(module)
    if extra is None:
        return None
    return f"needs the extra {extra!r}: {install(extra)} ({module} is missing)"
