"""How signals, and an admin over HTTP, end a server.

The first SIGINT, SIGTERM or SIGHUP drains, and so does `POST /api/drain`, after which a signal
counts as the second: no session is admitted, `/ready` is 503, and running sessions are warned and
may go on for `drain_s`. Then, or at the second signal, every session gets `session.closed` with
`server_shutdown` and every log its `fin`, within `shutdown_wait_s`. The third signal cuts off the
rest. While the model loads, the first one ends the server. A lost device acts as a second signal,
but is an error.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import Final

import anyio
from anyio.abc import TaskGroup

from ..model.backends.base import DeviceLost
from ..net.connection import CLOSE_FLUSH_S, Ready
from ..session.journal import FIN_WAIT_S, ready_now
from ..session.model_calls import RELEASE_WAIT_S
from ..session.server import Server
from ..settings.settings import Settings

SHUTDOWN_SPARE_S: Final = 10.0
"""Added to the bounds of a session's end, for a busy machine."""
ATTACHED_WAIT_S: Final = 2.0
"""Attached clients read the end of a log within `tail.POLL_S`; one that is slow is cut off."""
CUT_OFF_S: Final = max(RELEASE_WAIT_S, FIN_WAIT_S)
"""The most that cut-off sessions take: slots are released while logs are finished."""

_logger = logging.getLogger("antiphon.server")

OnStopping = Callable[[signal.Signals | None], None]
"""Called with None when all sessions are over, or with the signal that cuts them off."""


def shutdown_wait_s(settings: Settings) -> float:
    """The time for sessions that were told to end, in seconds: the longest of the settings.

    A hung model call, its slot's release and the log's last sync come in turn; the last frames to a
    client that takes nothing at the same time. A client that takes minutes of speech slowly is cut
    off.
    """
    model_s = settings.cleanup_wait_s + RELEASE_WAIT_S + FIN_WAIT_S
    client_s = settings.stall_s + CLOSE_FLUSH_S
    return max(model_s, client_s) + SHUTDOWN_SPARE_S


class End:
    """The end of one server: `tasks` are all of its tasks; `on_stopping` is called when it comes.

    `patience`: cancelled when sessions are told to end; `cut_by`: the signal that cut sessions off,
    or None; `has_begun`: the end has begun; `lost`: the device whose loss ended the server, or
    None; `attached_left` waits until all attached clients have left.
    """

    def __init__(
        self,
        settings: Settings,
        tasks: TaskGroup,
        on_stopping: OnStopping,
        attached_left: Ready = ready_now,
    ) -> None:
        self.attached_left = attached_left
        self.settings = settings
        self.tasks = tasks
        self.patience = anyio.CancelScope()
        self.cut_by: signal.Signals | None = None
        self.lost: DeviceLost | None = None
        self._on_stopping = on_stopping
        self.has_begun = False

    def drain(self, server: Server, asked_by: str, level: int = logging.INFO) -> None:
        """Start the shutdown as the first signal does, and log who asked for it.

        `level`: of that, where no session is warned.
        """
        drain_s = self.settings.drain_s
        told = logging.WARNING if server.sessions and drain_s else level
        _logger.log(told, "%s: %d sessions have %d s to finish", asked_by, server.sessions, drain_s)
        self.begin(server)

    def begin(self, server: Server) -> None:
        """Start the shutdown; a second call does nothing."""
        if not self.has_begun:
            self.has_begun = True
            self.tasks.start_soon(shut_down, server, self)

    def give_up(self, server: Server, lost: DeviceLost) -> None:
        """End a server that has lost its device, without a drain; it may be ending already."""
        _logger.error("%s: ending %d sessions", lost, server.sessions)
        self.lost = lost
        self.patience.cancel()
        self.begin(server)

    def come(self, cut_by: signal.Signals | None = None) -> None:
        """Cancel all that is left; `cut_by` is the signal that cuts sessions off, or None."""
        self.cut_by = cut_by
        self._on_stopping(cut_by)
        self.tasks.cancel_scope.cancel()


async def watch_signals(server: Callable[[], Server | None], end: End) -> None:
    """Act on signals until the end cancels it; `server` returns None while the model loads."""
    come = 0
    with anyio.open_signal_receiver(*_heeded()) as signals:
        async for number in signals:
            serving = server()
            if serving is not None:
                come = max(come, int(end.has_begun)) + 1
            if serving is None:
                end.come()
            elif come > 2:
                _logger.warning("%s: %d sessions are cut off", number.name, serving.sessions)
                end.come(cut_by=number)
            elif come == 2:
                _logger.warning("%s: ending %d sessions now", number.name, serving.sessions)
                end.patience.cancel()
            else:
                end.drain(serving, number.name)


def _heeded() -> list[signal.Signals]:
    """The signals that end a server; SIGHUP is ignored under `nohup`."""
    ends = [signal.SIGINT, signal.SIGTERM]
    return ends if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*ends, signal.SIGHUP]


async def shut_down(server: Server, end: End) -> None:
    """Drain a server, end its sessions, then cancel its tasks."""
    drain_s = end.settings.drain_s
    if drain_s and not end.patience.cancel_called:
        server.begin_drain(drain_s)
        end.patience.deadline = anyio.current_time() + drain_s
        with end.patience:
            await server.wait_until_empty()
    end.patience.cancel()
    server.drain()
    wait_s = shutdown_wait_s(end.settings)
    with anyio.move_on_after(wait_s) as scope:
        await server.wait_until_empty()
    if scope.cancelled_caught:
        _logger.error("%d sessions did not end in %g s", server.sessions, wait_s)
    with anyio.move_on_after(ATTACHED_WAIT_S):
        await end.attached_left()
    end.come()
