"""Work with files in a thread, for routes: what cannot be had becomes an answer of HTTP."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import TypeVar

import anyio.to_thread
from starlette.exceptions import HTTPException

from recorder.errors import RecorderError

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Do something with the files of recordings.

    Raises:
        HTTPException: there is no such recording (404), or it cannot be read (422).
    """
    try:
        # A disk that hangs must not keep the server from ending.
        return await anyio.to_thread.run_sync(work, abandon_on_cancel=True)
    except FileNotFoundError:
        raise HTTPException(HTTPStatus.NOT_FOUND, "there is no such recording") from None
    except RecorderError:
        text = "this recording cannot be read"
        raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, text) from None
