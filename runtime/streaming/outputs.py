"""The outputs of a request with streaming input, as the program that asked holds them.

A request lives in the tasks of its `Streaming`, which hold no reference to this object. So where it
is dropped unclosed, as `async for ...: break` does, its collection ends the request: else the slot
would be taken until the `Streaming` is left.
"""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator
from typing import Self

from ..backends.streams import Anchoring
from .request import Request
from .values import StreamingOutput


class StreamingRequest(AsyncIterator[StreamingOutput]):
    """The outputs of one request, in order; `Streaming.generate` makes it.

    As a context manager it is closed at the end of its block. One task at a time may wait for an
    output; where that is cancelled the request is over. A request whose outputs are collected
    unclosed is aborted, with a `ResourceWarning`.
    """

    def __init__(self, request: Request) -> None:
        self._request = request

    @property
    def anchoring(self) -> Anchoring:
        """The request's id, and what its chunks have in common."""
        return self._request.anchoring

    async def __anext__(self) -> StreamingOutput:
        """Wait for the next output.

        Raises:
            StopAsyncIteration: the request is over.
            LocalProtocolError: another task waits for it.
            BackendError: the model failed, refused a prompt, or is lost.
            Refused: there is no slot for it.
            Exception: as the generator raised it.
        """
        return await self._request.next()

    async def aclose(self) -> None:
        """End the request, drop what was not read, and wait until its slot is given back."""
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
