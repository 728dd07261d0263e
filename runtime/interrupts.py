"""Ctrl-C: it ends a command at once, wherever the command stands.

Commands run on trio: there an interrupt is raised in whatever Python code runs, such as the loading
of a model, and no thread that waits for a name server keeps the process from ending. asyncio would
wait for both. What tells the user of it, with which exit code, is `cli`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Args = TypeVarTuple("Args")


def run(body: Callable[[Unpack[Args]], Awaitable[T]], *args: *Args) -> T:
    """Run a command's tasks on an event loop of their own.

    Args:
        body: is awaited to its end.
        args: of it.

    Raises:
        KeyboardInterrupt: as such, out of whichever task it came.
    """
    import anyio  # `antiphon --help` goes without

    try:
        return anyio.run(body, *args, backend="trio")
    except BaseExceptionGroup as group:
        if is_interrupt(group):
            raise KeyboardInterrupt from None
        raise


def is_interrupt(error: BaseException) -> bool:
    """Whether it is Ctrl-C, which comes out of tasks in a group."""
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(KeyboardInterrupt) is not None
    return isinstance(error, KeyboardInterrupt)
