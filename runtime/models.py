"""Which models there are, by name or by folder, and how each is loaded.

The name is an operator's word (`--model`) or a log's; it never comes from a client. Torch is
imported only when a model that needs it is loaded.

A folder holds a checkpoint in the published layout: `config.json`, `tokenizer.json`, safetensors,
and `assets/token2wav` where it can speak. Whatever is wrong with it is one error that says what,
and `antiphon doctor --model FOLDER` says it at length.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from anyio import to_thread

from . import SOURCE_TREE
from .backends.base import Backend, BackendError, BackendInfo
from .backends.scripted import ScriptedBackend
from .config.values import nearest

if TYPE_CHECKING:
    import torch

    from .backends.minicpmo.model import DuplexModel
    from .backends.minicpmo.plan import MemoryPlan

MODELS: Final = ("tiny", "scripted")
"""`tiny` is the embedded trained model; `scripted` plays a fixed script and hears nothing."""
LLAMA_OMNI: Final = "llama_omni:"
"""Before the URL of a llama.cpp-omni server, `ws://host:port`."""


class ModelUnknownError(ValueError):
    """There is no model of that name, and no such folder."""


class ModelUnusableError(ValueError):
    """The folder holds no checkpoint that can be served here; the text says why."""


def tiny_path() -> Path:
    """Return the folder of the embedded model: beside the code when installed, else fixtures/."""
    installed = Path(__file__).parent / "backends" / "minicpmo" / "tiny"
    return installed if installed.exists() else SOURCE_TREE / "fixtures" / "tiny"


def model_folder(name: str) -> Path:
    """The folder of a model that is a checkpoint.

    Args:
        name: `tiny`, or the folder's path.

    Raises:
        ModelUnknownError: there is no such folder.
    """
    folder = tiny_path() if name == "tiny" else Path(name).expanduser()
    if not folder.is_dir():
        raise ModelUnknownError(
            f"unknown model {name!r}: choose from {', '.join(MODELS)}, {LLAMA_OMNI}URL, or name "
            f"the folder of a checkpoint{nearest(name, MODELS)}"
        )
    return folder


def check_model(name: str) -> None:
    """Refuse a name that stands for no model, before anything is started for it.

    Raises:
        ModelUnknownError: there is none of that name, and no such folder.
    """
    if name != "scripted" and not name.startswith(LLAMA_OMNI):
        model_folder(name)


def require_deterministic(name: str, info: BackendInfo) -> None:
    """Hold a model that was loaded to what an operator asked for.

    Raises:
        ModelUnusableError: it does not give each session the same bytes again.
    """
    if not info.deterministic:
        raise ModelUnusableError(
            f"{name}: nobody can promise the same bytes again, as --deterministic asks: "
            f"{info.varies} varies"
        )


def load_backend(
    name: str,
    slots: int | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    deterministic: bool = False,
) -> Backend:
    """Load a model.

    Args:
        name: one of `MODELS`, `llama_omni:` and a URL, or the folder of a checkpoint.
        slots: sessions at once; None takes the model's own number, and for a folder as many as
            fit into memory.
        device: one of the settings' `DEVICES`; None takes the CPU for `tiny`, and for a folder a
            GPU where there is one.
        dtype: one of their `DTYPES`; None takes fp32 on a CPU and bf16 on a GPU.
        deterministic: what a session gets is to be bitwise the same alone and among others; whether
            it is, its `info` says (`require_deterministic`).

    Raises:
        ModelUnknownError: there is none of that name.
        ModelUnusableError: the folder cannot be served here.
        ValueError: the device or the format cannot be had here, or the URL is none.
        DeviceLost: the device was lost to this process.
    """
    if name == "scripted":
        return ScriptedBackend() if slots is None else ScriptedBackend(slots=slots)
    if name.startswith(LLAMA_OMNI):
        from .backends.llama_omni import LlamaOmniBackend

        if slots not in {None, 1}:
            raise ValueError("llama_omni serves one session at a time: --slots is 1")
        return LlamaOmniBackend(name.removeprefix(LLAMA_OMNI))
    check_model(name)  # Before seconds are spent on importing torch.
    from .backends.minicpmo.model import SLOTS
    from .backends.minicpmo.plan import SLOTS_MAX
    from .engine.backend import EngineBackend

    if slots is None and name == "tiny":
        slots = SLOTS
    model = load_checkpoint(
        name, slots, slots_max=SLOTS_MAX, device=device, dtype=dtype, exact=deterministic
    )
    return EngineBackend(model)


async def load_backend_async(
    name: str,
    slots: int | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    deterministic: bool = False,
) -> Backend:
    """Load a model in a thread, so that the event loop goes on; see `load_backend`.

    Cancelled, it returns at once, and what was being loaded is let go of.
    """
    load = partial(load_backend, device=device, dtype=dtype, deterministic=deterministic)
    return await to_thread.run_sync(load, name, slots, abandon_on_cancel=True)


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn whatever is wrong with a checkpoint into one line.

    Args:
        folder: the checkpoint's.

    Raises:
        ModelUnusableError: in place of what was raised.
    """
    try:
        yield
    except BackendError:
        raise
    except OSError as error:
        what = f"{error.filename or ''}: {error.strerror}" if error.strerror else str(error)
        raise ModelUnusableError(f"{folder}: {what.removeprefix(f'{folder}/')}") from error
    except ValueError as error:
        raise ModelUnusableError(f"{folder}: {error}") from error
    except Exception as error:
        # A file that is no checkpoint of ours trips the libraries in ways that nobody lists.
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelUnusableError(f"{folder}: {text}") from error


def load_checkpoint(
    name: str,
    slots: int | None,
    *,
    slots_max: int,
    device: str | None,
    dtype: str | None,
    exact: bool = False,
) -> DuplexModel:
    """Load the model of a checkpoint.

    Args:
        name: `tiny`, or the checkpoint's folder.
        slots: sessions at once; None takes as many as fit into memory.
        slots_max: of these, at most.
        device: as of `load_backend`.
        dtype: as of `load_backend`.
        exact: what a session gets is to be bitwise its own.

    Raises:
        ModelUnknownError: there is no such folder.
        ModelUnusableError: it cannot be served here.
        ValueError: the device or the format cannot be had here.
        DeviceLost: the device was lost to this process.
    """
    from .backends.minicpmo.device import pick_device, pick_dtype, telling_lost

    folder = model_folder(name)
    where = pick_device(device, prefer_cuda=name != "tiny")
    what = pick_dtype(dtype, where)
    with explained(folder), telling_lost():
        from .backends.minicpmo.config import load_config
        from .backends.minicpmo.model import VOCODER, DuplexModel
        from .backends.minicpmo.plan import plan, vocoder_bytes

        if slots is None:
            config = load_config(folder / "config.json")
            needs = plan(config, what, vocoder_bytes=vocoder_bytes(folder / VOCODER))
            slots = min(slots_max, slots_that_fit(needs, where))
        return DuplexModel.load(folder, slots=slots, device=where, dtype=what, exact=exact)


def slots_that_fit(needs: MemoryPlan, device: torch.device) -> int:
    """Sessions that fit into a device's memory beside the weights, at least one.

    Raises:
        ModelUnusableError: not even one does.
    """
    from .backends.minicpmo.device import free_bytes

    free = free_bytes(device)
    slots = needs.slots_that_fit(free, device)
    if slots == 0:
        raise ModelUnusableError(
            f"not one session fits into the memory of the {device.type}: the weights take "
            f"{needs.model_bytes / 1e9:.1f} GB, a session {needs.each_bytes(device) / 1e9:.2f} GB; "
            f"there are {free / 1e9:.1f} GB (see `antiphon doctor`)"
        )
    return slots
