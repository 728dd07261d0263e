"""Opening a session on its slot, which alone of all model calls is tried again.

The next try may find a remote that restarts, or that still frees its last session. What says no for
good is asked once, and so is a backend that takes its time to fail: a client waits, and a slot.
"""

from __future__ import annotations

import logging
from typing import Final

import anyio

from protocol.model import Opening

from .backends.base import (
    OPEN_PAUSE_S,
    OPEN_TRIES,
    Backend,
    BackendError,
    BackendRefused,
    BackendSession,
    ContextFull,
)

OPEN_S_MAX: Final = 5.0
"""No further try so long after the first began: a client waits, and its slot with it."""

_logger = logging.getLogger("antiphon.session")


async def try_to_open(
    backend: Backend, opening: Opening, slot: int, is_over: anyio.Event
) -> BackendSession:
    """Open, and try again where that may help and somebody still waits for it.

    Args:
        backend: whose slot it is.
        opening: what is opened.
        slot: where.
        is_over: set once nobody waits for it any more.

    Raises:
        BackendError: the last try's.
    """
    began_s, tries = anyio.current_time(), 0
    while True:
        try:
            return await backend.open(opening, slot=slot)
        except BackendError as error:
            tries += 1
            _logger.warning("opening on slot %d failed (try %d): %s", slot, tries, error)
            waited_s = anyio.current_time() - began_s
            is_final = isinstance(error, ContextFull | BackendRefused)
            if is_final or tries == OPEN_TRIES or waited_s >= OPEN_S_MAX:
                raise
            with anyio.move_on_after(OPEN_PAUSE_S * 2 ** (tries - 1)):
                await is_over.wait()
            if is_over.is_set():
                raise
