"""How a server comes to its end: by one signal, a second and a third.

The first SIGINT, SIGTERM or SIGHUP drains: nobody is admitted, `/ready` is 503, and who is served
is warned and may go on for `drain_s`. Then, or at the second signal, every session gets its
`session.closed` with `server_shutdown` and every log its `fin`; that takes `shutdown_wait_s` at
most. The third signal cuts off what is left. While the model loads nobody is served, and the first
ends all. A device that is lost to the process ends it as a second signal does, but not as wanted.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import Final

import anyio
from anyio.abc import TaskGroup

from .backends.base import DeviceLost
from .calls import RELEASE_WAIT_S
from .connection import CLOSE_FLUSH_S
from .journal import FIN_WAIT_S
from .server import Server
from .settings import Settings

SHUTDOWN_SPARE_S: Final = 10.0
"""Beside the bounds of all that a session's end waits for: for a machine that is busy with it."""
CUT_OFF_S: Final = max(RELEASE_WAIT_S, FIN_WAIT_S)
"""What sessions that are cut off take at most: slots are given back while logs are finished."""

_logger = logging.getLogger("antiphon.server")

OnStopping = Callable[[signal.Signals | None], None]
"""Told, once all sessions are over, None; or the signal that cuts them off."""


def shutdown_wait_s(settings: Settings) -> float:
    """Say how long sessions that were told to end are waited for, in seconds.

    Longer than one may take by the settings: a model call that hangs, its slot's release and the
    log's last sync come one after the other, and beside them a client that takes nothing is told
    goodbye. Who takes little, but something, and has minutes of speech to come, is cut off.
    """
    model_s = settings.cleanup_wait_s + RELEASE_WAIT_S + FIN_WAIT_S
    client_s = settings.stall_s + CLOSE_FLUSH_S
    return max(model_s, client_s) + SHUTDOWN_SPARE_S


class End:
    """The end of one server.

    Args:
        settings: the operator's.
        tasks: all that the server does.
        on_stopping: told when it comes.

    Attributes:
        patience: cancelled when sessions are told to end; from then on a signal waits for nobody.
        cut_by: the signal that cut sessions off, or None.
        lost: the device that the server ended for, or None.
    """

    def __init__(self, settings: Settings, tasks: TaskGroup, on_stopping: OnStopping) -> None:
        self.settings = settings
        self.tasks = tasks
        self.patience = anyio.CancelScope()
        self.cut_by: signal.Signals | None = None
        self.lost: DeviceLost | None = None
        self._on_stopping = on_stopping
        self._has_begun = False

    def begin(self, server: Server) -> None:
        """Have a server shut down; once more does nothing."""
        if not self._has_begun:
            self._has_begun = True
            self.tasks.start_soon(shut_down, server, self)

    def give_up(self, server: Server, lost: DeviceLost) -> None:
        """End a server that has nothing left to serve with, and wait for nobody.

        Args:
            server: it; it may be ending already.
            lost: what it cannot have in this process any more.
        """
        _logger.error("%s: ending %d sessions", lost, server.sessions)
        self.lost = lost
        self.patience.cancel()
        self.begin(server)

    def come(self, cut_by: signal.Signals | None = None) -> None:
        """End all that is left.

        Args:
            cut_by: the signal that waits for nobody, or None.
        """
        self.cut_by = cut_by
        self._on_stopping(cut_by)
        self.tasks.cancel_scope.cancel()


async def watch_signals(server: Callable[[], Server | None], end: End) -> None:
    """Do what signals ask for; runs until cancelled, which the end does.

    Args:
        server: asked for at each signal; None while the model loads.
        end: of it.
    """
    drain_s, come = end.settings.drain_s, 0
    with anyio.open_signal_receiver(*_heeded()) as signals:
        async for number in signals:
            serving = server()
            come += serving is not None
            if serving is None:
                end.come()
            elif come > 2:
                _logger.warning("%s: %d sessions are cut off", number.name, serving.sessions)
                end.come(cut_by=number)
            elif come == 2:
                _logger.warning("%s: ending %d sessions now", number.name, serving.sessions)
                end.patience.cancel()
            else:
                told = logging.WARNING if serving.sessions and drain_s else logging.INFO
                text = "%s: %d sessions have %d s to finish"
                _logger.log(told, text, number.name, serving.sessions, drain_s)
                end.begin(serving)


def _heeded() -> list[signal.Signals]:
    """Say which signals end a server: that of a closed terminal, but under `nohup`."""
    ends = [signal.SIGINT, signal.SIGTERM]
    return ends if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*ends, signal.SIGHUP]


async def shut_down(server: Server, end: End) -> None:
    """Drain a server, end its sessions, and let the end come.

    Args:
        server: that serves.
        end: of it; its patience may be cancelled meanwhile.
    """
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
    end.come()
