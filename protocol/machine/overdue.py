"""A model call that shows no sign of life for too long: it hangs, and its session ends.

One timer looks after all calls of a session. It is not set again with each call, but where it fires
too early for the call that is in progress: so it costs an effect in half a minute, and not one a
unit. What hangs is cleaned up as always: waited for a while, then its slot condemned (B4).
"""

from __future__ import annotations

from typing import Final

from ..values import events as ev
from ..values.limits import NS_PER_S
from .core import Core

SIGNS_OF_LIFE: Final = (
    ev.BackendOpened,
    ev.UnitDone,
    ev.UnitFailed,
    ev.FinalizeDone,
    ev.RollbackDone,
    ev.TurnPrefilled,
    ev.TurnProgress,
    ev.ChunkDone,
    ev.ChunkFailed,
)
"""What a model says that goes on; each may be followed by the next call within the same step."""


def watch(core: Core, event: ev.Event) -> None:
    """See that the call under way is not waited for without end; after every event.

    Args:
        core: the session's.
        event: what it was told.
    """
    wait_s = core.opened.limits.call_wait_s
    if not wait_s or core.is_closed:
        return
    if core.call.is_idle:
        core.alive_ns = None
    elif core.alive_ns is None or isinstance(event, SIGNS_OF_LIFE):
        core.alive_ns = core.now_ns
    if core.alive_ns is not None and "call" not in core.timers.pending:
        core.do(core.timers.set("call", core.alive_ns + wait_s * NS_PER_S))


def look(core: Core) -> None:
    """The timer fired: end a session whose call hangs, else let `watch` set it again."""
    wait_ns = core.opened.limits.call_wait_s * NS_PER_S
    if core.alive_ns is not None and core.now_ns - core.alive_ns >= wait_ns:
        core.give_up("the model could not be opened")
