"""Ctrl-C: it ends a command at once.

Commands run on trio: an interrupt is raised in the running Python code, such as a model's loading,
and a thread in a DNS lookup does not hold up the end. asyncio would wait for both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar, TypeVarTuple, Unpack

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
