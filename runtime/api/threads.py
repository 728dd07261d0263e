"""File work in a thread, for routes: errors become HTTP answers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import TypeVar

import anyio
import anyio.to_thread
from starlette.exceptions import HTTPException

from recorder.format.errors import RecorderError
from recorder.keep.remote import StoreError

_logger = logging.getLogger("antiphon.server")

T = TypeVar("T")


async def in_thread(work: Callable[[], T], limiter: anyio.CapacityLimiter | None = None) -> T:
    """Work on recordings in a thread; `limiter` bounds such threads.

    `HTTPException`: one is missing (404) or unreadable (422), or the object store fails (503).
    """
    try:
        # A disk that hangs must not keep the server from ending.
        return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=limiter)
    except FileNotFoundError:
        raise HTTPException(HTTPStatus.NOT_FOUND, "there is no such recording") from None
    except StoreError as error:
        _logger.warning("%s", error)
        text = "the object store of the recordings does not answer, or refuses"
        raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, text) from None
    except RecorderError:
        text = "this recording cannot be read"
        raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, text) from None
