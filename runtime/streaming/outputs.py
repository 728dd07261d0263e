"""The outputs of a streaming request, as the calling program holds them.

A request's tasks hold no reference to this object, so dropping it unclosed, as by `async for ...:
break`, ends the request and frees the slot.
"""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator
from typing import Self

from ..model.backends.streams import Anchoring
from .request import Request
from .values import StreamingOutput


class StreamingRequest(AsyncIterator[StreamingOutput]):
    """The outputs of one request, in order; a context manager, which closes it.

    One task at a time may wait for an output; cancelling that wait ends the request. If collected
    unclosed, the request is aborted with a `ResourceWarning`.
    """

    def __init__(self, request: Request) -> None:
        self._request = request

    @property
    def anchoring(self) -> Anchoring:
        """The request's id, and the settings shared by its chunks."""
        return self._request.anchoring

    async def __anext__(self) -> StreamingOutput:
        """Wait for the next output.

        Raises:
            StopAsyncIteration: the request has ended.
            LocalProtocolError: another task waits for it.
            BackendError: the model failed, refused a prompt, or is lost.
            Refused: there is no slot for it.
            Exception: the generator's own.
        """
        return await self._request.next()

    async def aclose(self) -> None:
        """End the request, drop unread outputs, and wait until its slot is free."""
        await self._request.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._request.is_over:
            return
        self._request.cut_soon()
        warnings.warn(
            f"request {self.anchoring.request_id!r} was dropped unclosed and is aborted: use "
            "`async with`, or `aclose`",
            ResourceWarning,
            stacklevel=1,
            source=self,
        )
