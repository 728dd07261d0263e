"""Models by name or by folder, and how each is loaded.

The name comes from an operator (`--model`) or a log, never from a client. A package that the
operator installed may offer a backend, as an entry point of the group `BACKENDS`; it is imported
only when it is named, and torch only for a model that needs it.
A folder holds a published checkpoint: `config.json`, `tokenizer.json`, safetensors, and
`assets/token2wav` if it can speak. A bad checkpoint is one error that says why; `antiphon doctor
--model FOLDER` says more.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from anyio import to_thread

from protocol.values.limits import VOICE_STEPS

from .. import SOURCE_TREE
from ..net.process import importing
from ..settings.extras import what_is_missing
from ..settings.settings import CONTEXT_PERCENT, nearest
from .backends.base import Backend, BackendError, BackendInfo
from .backends.scripted import ScriptedBackend

if TYPE_CHECKING:
    import torch

    from .backends.minicpmo.device import MemoryPlan
    from .backends.minicpmo.model import DuplexModel

MODELS: Final = ("tiny", "scripted")
"""`tiny` is the embedded trained model; `scripted` plays a fixed script and hears nothing."""
MOONSHINE: Final = "moonshine"
"""Transcribes speech, and does nothing else."""
INSTALLED: Final = "backend:"
"""Prefix of an installed package's backend: `backend:NAME`, or `backend:NAME:ARGUMENT`. With an
argument it may be left out: `NAME:ARGUMENT`."""
BACKENDS: Final = "antiphon.backends"
"""The group of entry points: each is called as `load_backend` is, with its argument as the name."""
EXAMPLES: Final = {name: f"examples/{name}" for name in ("cascade", "llama_omni")}
"""The packages in the sources that offer a backend."""


class ModelUnknownError(ValueError):
    """There is no model of that name, and no such folder."""


class ModelUnusableError(ValueError):
    """The folder holds no checkpoint that can be served here; the text says why."""


def has_moonshine() -> bool:
    """Whether the package of `MOONSHINE` is installed."""
    return find_spec("moonshine_voice") is not None


def tiny_path() -> Path:
    """The folder of the embedded model: in the installed package, else in fixtures/."""
    installed = Path(__file__).parent / "backends" / "minicpmo" / "tiny"
    return installed if installed.exists() else SOURCE_TREE / "fixtures" / "tiny"


def model_folder(name: str) -> Path:
    """The folder of a checkpoint, `tiny` or a path; `ModelUnknownError` if it is missing."""
    folder = tiny_path() if name == "tiny" else Path(name).expanduser()
    if not folder.is_dir():
        raise ModelUnknownError(
            f"unknown model {name!r}: choose from {', '.join(MODELS)}, or name the folder of a "
            f"checkpoint, an installed {INSTALLED}NAME, or {MOONSHINE}, which transcribes"
            f"{nearest(name, (*MODELS, MOONSHINE))}"
        )
    return folder


def is_installed(name: str) -> bool:
    """Whether a name is that of an installed package's backend, and of no model of ours."""
    offered, _, argument = name.partition(":")
    has_prefix = name.startswith(INSTALLED)
    return has_prefix or bool(
        argument and offered in {*entry_points(group=BACKENDS).names, *EXAMPLES}
    )


def installed_backend(name: str) -> tuple[EntryPoint, str]:
    """Find a `backend:NAME:ARGUMENT` and its argument; `ModelUnknownError` if it is missing."""
    wanted, _, argument = name.removeprefix(INSTALLED).partition(":")
    found = entry_points(group=BACKENDS)
    if wanted not in found.names:
        there = ", ".join(sorted(found.names)) or "none"
        hint = nearest(wanted, sorted(found.names))
        if wanted in EXAMPLES:
            hint = f"; it is in the sources of Antiphon: pip install ./{EXAMPLES[wanted]}"
        raise ModelUnknownError(
            f"unknown model {name!r}: the backends of installed packages are {there}{hint}"
        )
    return found[wanted], argument


def check_model(name: str) -> None:
    """Raise `ModelUnknownError` for an unknown model, before anything is started."""
    if is_installed(name):
        installed_backend(name)
    elif name not in ("scripted", MOONSHINE):
        model_folder(name)


def require_deterministic(name: str, info: BackendInfo) -> None:
    """Raise `ModelUnusableError` if a loaded model does not repeat a session's bytes."""
    if not info.deterministic:
        raise ModelUnusableError(
            f"{name}: the same bytes cannot be guaranteed, as --deterministic requires: "
            f"{info.varies} varies"
        )


def load_backend(
    name: str,
    slots: int | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    deterministic: bool = False,
    is_live: bool = True,
    voice_steps: int = VOICE_STEPS,
    quantize: str | None = None,
    context_percent: int = CONTEXT_PERCENT,
) -> Backend:
    """Load a model.

    Args:
        name: one of `MODELS`, `MOONSHINE`, an installed backend with its argument, or the folder of
            a checkpoint.
        slots: sessions at once; None takes the model's own number, for a folder as many as fit into
            memory.
        device: one of the settings' `DEVICES`; None takes the CPU for `tiny`, for a folder a GPU if
            there is one.
        dtype: one of their `DTYPES`; None takes fp32 on a CPU and bf16 on a GPU.
        deterministic: a session's bytes must not depend on the other sessions; the backend's `info`
            says whether they do (`require_deterministic`).
        is_live: False: an engine may hold sessions back, so that they are computed together.
        voice_steps: of the flow of a folder's published voice.
        quantize: one of their `QUANTIZATIONS`, for the weights of a folder's language model.
        context_percent: of a folder's context, for which each session's memory is planned.

    Raises:
        ModelUnknownError: there is no model of that name.
        ModelUnusableError: the folder cannot be served here, or the model cannot be quantised.
        ValueError: the device or the format is not available here.
        DeviceLost: the process lost the device.
    """
    if quantize is not None and (name in ("scripted", MOONSHINE) or is_installed(name)):
        raise ModelUnusableError(f"{name} cannot be quantised: only the checkpoint in a folder can")
    if name == "scripted":
        scripted = partial(ScriptedBackend, duplex_tools=True)
        return scripted() if slots is None else scripted(slots=slots)
    if name == MOONSHINE:
        with explained(name), importing(), _with_extras(name):
            from .backends.moonshine import Moonshine

            return Moonshine(slots)
    if is_installed(name):
        entry, argument = installed_backend(name)
        with explained(name), importing():
            with _with_extras(name):
                load = entry.load()
            return _checked(
                load(argument, slots, device=device, dtype=dtype, deterministic=deterministic)
            )
    check_model(name)  # Before seconds are spent on importing torch.
    with importing(), _with_extras(name):
        from .backends.minicpmo.device import SLOTS_MAX
        from .backends.minicpmo.model import SLOTS
        from .engine.backend import EngineBackend

    if slots is None and name == "tiny":
        slots = SLOTS
    model = load_checkpoint(
        name,
        slots,
        slots_max=SLOTS_MAX,
        device=device,
        dtype=dtype,
        exact=deterministic,
        voice_steps=voice_steps,
        quantize=quantize,
        context_percent=context_percent,
    )
    return EngineBackend(model, is_live=is_live)


@contextmanager
def _with_extras(name: str) -> Iterator[None]:
    """Import what a model needs; `ModelUnusableError` if it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = what_is_missing(error)
        if missing is None:
            raise
        raise ModelUnusableError(f"{name} {missing}") from error


async def load_backend_async(
    name: str,
    slots: int | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    deterministic: bool = False,
    voice_steps: int = VOICE_STEPS,
    quantize: str | None = None,
    context_percent: int = CONTEXT_PERCENT,
) -> Backend:
    """As `load_backend`, in a thread; cancelled, it returns at once and drops the model."""
    load = partial(
        load_backend,
        device=device,
        dtype=dtype,
        deterministic=deterministic,
        voice_steps=voice_steps,
        quantize=quantize,
        context_percent=context_percent,
    )
    return await to_thread.run_sync(load, name, slots, abandon_on_cancel=True)


def _checked(made: Backend) -> Backend:
    """Return a package's backend; `TypeError` if it is not one."""
    if not isinstance(getattr(made, "info", None), BackendInfo) or not hasattr(made, "open"):
        raise TypeError(f"it made a {type(made).__name__}, which is not a Backend")
    return made


@contextmanager
def _pointing_to_doctor(name: str) -> Iterator[None]:
    """Name the command that says what a folder lacks."""
    try:
        yield
    except ModelUnusableError as error:
        command = f"antiphon doctor --model {shlex.quote(name)}"
        raise ModelUnusableError(f"{error}; to see what is missing: {command}") from error


@contextmanager
def explained(folder: Path | str) -> Iterator[None]:
    """Turn any error of a checkpoint, or of a named backend, into a `ModelUnusableError`."""
    try:
        yield
    except (BackendError, ModelUnusableError):
        raise
    except OSError as error:
        what = f"{error.filename or ''}: {error.strerror}" if error.strerror else str(error)
        raise ModelUnusableError(f"{folder}: {what.removeprefix(f'{folder}/')}") from error
    except ValueError as error:
        raise ModelUnusableError(f"{folder}: {error}") from error
    except Exception as error:
        # An invalid checkpoint makes the libraries raise errors of any type.
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
    voice_steps: int = VOICE_STEPS,
    quantize: str | None = None,
    context_percent: int = CONTEXT_PERCENT,
) -> DuplexModel:
    """Load the model of a checkpoint; arguments and errors as of `load_backend`.

    `slots` None takes as many as fit into memory, `slots_max` at most; `exact` is `deterministic`.
    """
    with importing():
        from .backends.minicpmo.config import load_config
        from .backends.minicpmo.device import pick_device, pick_dtype, plan, raising_device_lost
        from .backends.minicpmo.model import VOCODER, DuplexModel
        from .backends.minicpmo.voices import planned

    folder = model_folder(name)
    where = pick_device(device, prefer_cuda=name != "tiny")
    what = pick_dtype(dtype, where)
    with _pointing_to_doctor(name), explained(folder), raising_device_lost():
        if slots is None:
            config = load_config(folder / "config.json")
            needs = planned(
                plan(config, what, quantize, context_percent),
                folder / VOCODER,
                what,
                where,
                voice_steps,
            )
            slots = min(slots_max, slots_that_fit(needs, where))
        return DuplexModel.load(
            folder,
            slots=slots,
            device=where,
            dtype=what,
            exact=exact,
            voice_steps=voice_steps,
            quantize=quantize,
            context_percent=context_percent,
        )


def slots_that_fit(needs: MemoryPlan, device: torch.device) -> int:
    """The sessions that fit into a device's memory with the weights; none: `ModelUnusableError`."""
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
