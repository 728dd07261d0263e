"""The process: its memory, in the C library and the garbage collector, its output, its event loop.

A unit passes through half a dozen buffers of some 100 kB. glibc returns memory as soon as 128 kB
lie free at the heap's end, and takes it back page by page for the next frame: a fifth of the CPU
for a hundred sessions whose units come at the same moment.

Ctrl-C ends a command at once (`run`). Commands run on trio: an interrupt is raised in the running
Python code, such as a model's loading, and a thread in a DNS lookup does not hold up the end.
asyncio would wait for both.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar, TypeVarTuple, Unpack

if TYPE_CHECKING:
    from rich.console import Console

HEAP_SPARE_BYTES: Final = 64 << 20
"""Free memory that is kept: the need of a hundred units in flight."""
MAPPED_BYTES_MIN: Final = 4 << 20
"""A larger buffer gets a mapping of its own and goes back at once: the largest frames do."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_OPERATORS: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables by which an operator sets it; then it stays as set."""


def keep_freed_memory() -> bool:
    """Have the C library keep some freed memory for the next frames; False where it cannot.

    Only glibc can, and an operator's setting wins.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in _OPERATORS):
        return False
    wanted = ((_M_TRIM_THRESHOLD, HEAP_SPARE_BYTES), (_M_MMAP_THRESHOLD, MAPPED_BYTES_MIN))
    return all(mallopt(name, size) for name, size in wanted)


def trim_heap() -> None:
    """Return free memory inside the heap to the system: 50 us a MB, almost nothing for none.

    Without it the buffers of a burst of messages stay with the process for ever: by itself the C
    library returns only the heap's end.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it, and needs it
    if trim is not None:
        trim(HEAP_SPARE_BYTES)


@contextmanager
def importing() -> Iterator[None]:
    """Keep the garbage collector from looking at what modules make while they are imported.

    Nearly all stays in use, and with torch the searches in vain take a third of the start.
    """
    known, was_on = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > known:
            gc.freeze()
        if was_on:
            gc.enable()


def freeze_gc() -> None:
    """Move all loaded objects out of the garbage collector's sight until the server ends.

    With a model that is some 400000 objects, and a scan of them stops all sessions for 0.2 s.
    """
    gc.collect()
    gc.freeze()


def unfreeze_gc() -> None:
    """Let the collector see them again, to free a model that is replaced."""
    gc.unfreeze()


# -- standard output -----------------------------------------------------------------------------


LINE_CHARS: Final = 4096
"""Outside a terminal a row is one line, for `grep`; no path is longer (PATH_MAX)."""


def stdout_console() -> Console:
    """Return where rows are printed: a terminal, or lines that are neither folded nor cut."""
    from rich.console import Console  # a server does not need it

    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=LINE_CHARS)


# -- the event loop, and Ctrl-C --------------------------------------------------------------------

T = TypeVar("T")
Args = TypeVarTuple("Args")


def run(body: Callable[[Unpack[Args]], Awaitable[T]], *args: *Args) -> T:
    """Run a command's tasks on a new event loop; `KeyboardInterrupt` is raised without a group."""
    import anyio  # `antiphon --help` does not need it

    try:
        return anyio.run(body, *args, backend="trio")
    except BaseExceptionGroup as group:
        if is_interrupt(group):
            raise KeyboardInterrupt from None
        raise


def is_interrupt(error: BaseException) -> bool:
    """Whether it is Ctrl-C, in a group or not."""
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(KeyboardInterrupt) is not None
    return isinstance(error, KeyboardInterrupt)
