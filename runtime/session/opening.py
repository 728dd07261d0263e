"""Opening a session on its slot: the only model call that is retried.

A retry may find a remote that restarts, or that still frees its last session. A refusal is final,
and so is a backend that fails slowly: a client and a slot wait.
"""

from __future__ import annotations

import logging
from typing import Final

import anyio

from protocol.values.model import Opening

from ..model.backends.base import (
    OPEN_PAUSE_S,
    OPEN_TRIES,
    Backend,
    BackendError,
    BackendRefused,
    BackendSession,
    ContextFull,
)

OPEN_S_MAX: Final = 5.0
"""No retry so long after the first try began."""

_logger = logging.getLogger("antiphon.session")


async def try_to_open(
    backend: Backend, opening: Opening, slot: int, is_over: anyio.Event
) -> BackendSession:
    """Open a session; retry while that may help until `is_over`; raises the last `BackendError`."""
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
