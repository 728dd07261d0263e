"""The watchdog of model calls: a call without a sign of life for too long ends its session.

One timer serves all calls of a session. It is set again only when it fires too early for the call
in progress, so it costs one effect in half a minute and not one a unit. A hanging call is waited
for as usual, then its slot is condemned (B4).
"""

from __future__ import annotations

from typing import Final

from ..values import events as ev
from ..values.limits import NS_PER_S
from .core import Core
from .unit_loop import Phase

SIGNS_OF_LIFE: Final = (
    ev.BackendOpened,
    ev.Rebuilt,
    ev.UnitDone,
    ev.UnitFailed,
    ev.FinalizeDone,
    ev.RollbackDone,
    ev.TurnPrefilled,
    ev.TurnProgress,
    ev.ChunkDone,
    ev.ChunkFailed,
)
"""Events that show that the model goes on; the next call may follow in the same step."""


def watch(core: Core, event: ev.Event) -> None:
    """Set the timer for the call in progress, if needed; runs after every event."""
    wait_s = core.opened.limits.call_wait_s
    if not wait_s or core.is_closed:
        return
    if core.call.is_idle or core.call.phase is Phase.REBUILDING:  # a timer of its own bounds it
        core.alive_ns = None
    elif core.alive_ns is None or isinstance(event, SIGNS_OF_LIFE):
        core.alive_ns = core.now_ns
    if core.alive_ns is not None and "watchdog" not in core.timers.pending:
        core.do(core.timers.set("watchdog", core.alive_ns + wait_s * NS_PER_S))


def look(core: Core) -> None:
    """Handle the timer: end a session whose call hangs, else let `watch` set it again."""
    wait_ns = core.opened.limits.call_wait_s * NS_PER_S
    if core.alive_ns is not None and core.now_ns - core.alive_ns >= wait_ns:
        core.give_up("the model could not be opened")
