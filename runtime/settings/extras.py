"""Which extra of the distribution brings a package that is not installed.

Without an extra it brings the client and the tools for recordings. What serves, runs a model or
writes films comes with an extra, and who lacks it is told which.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from types import MappingProxyType
from typing import Final
from urllib.parse import unquote, urlsplit

from .. import SOURCE_TREE

NAME: Final = "antiphon"
"""Of the distribution."""

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
        "duplex-tools": ("minicpm_o5_sdk",),
        "mcp": ("mcp",),
        "words": ("moonshine_voice",),
        "store": ("obstore",),
        "traces": ("opentelemetry",),
        "webrtc": ("aiortc",),
    }
)
"""The modules of each extra's packages, by the extra's name in pyproject.toml."""
_EXTRA_OF: Final = {module: extra for extra, modules in MODULES.items() for module in modules}


def install(extra: str) -> str:
    """The command that installs an extra, from where Antiphon itself was installed (PEP 610).

    Never by its bare name, which a stranger may have registered in a public index.
    """
    try:
        installed = distribution(NAME)
        origin = json.loads(installed.read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return f"pip install -e {shlex.quote(f'{SOURCE_TREE}[{extra}]')}"
    url = origin.get("url", "")
    if not url:
        named = shlex.quote(f"{NAME}[{extra}]=={installed.version}")
        return f"pip install {named} (from the index that it came from)"
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        place = f"{NAME}[{extra}] @ {vcs['vcs']}+{url}@{vcs['commit_id']}"
    elif url.startswith("file:"):
        place = f"{unquote(urlsplit(url).path)}[{extra}]"
    else:
        place = f"{NAME}[{extra}] @ {url}"
    edits = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {edits}{shlex.quote(place)}"


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
