"""Streaming requests on a model: their owner, and their outputs as the calling program holds them.

A request's tasks hold no reference to its outputs, so dropping these unclosed, as by `async for
...: break`, ends the request and frees the slot.
"""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterable, AsyncIterator
from itertools import count
from typing import Self

import anyio
from anyio.abc import TaskGroup

from protocol.values.errors import LocalProtocolError
from protocol.values.limits import Mode

from ..model.backends.base import Backend, BackendError
from ..model.backends.streams import Anchoring, SamplingParams, Streams
from ..slots.admission import Admission
from ..slots.workers import Workers
from .request import Request, Slots, StreamingInput, StreamingOutput


class Streaming:
    """Streaming requests on one model, which stays the caller's; an asynchronous context manager.

    Leaving its block, in the task that entered it, cuts all requests.

    Args:
        model: a backend with streaming input (`Streams`), or its workers.
        admission: the queue for its slots; None makes one, which must be their only user.
        mode: the kind of request for wait estimates: `chat` for those answered within seconds.
    """

    def __init__(
        self,
        model: Backend | Workers,
        *,
        admission: Admission | None = None,
        mode: Mode = "transcription",
    ) -> None:
        workers = model if isinstance(model, Workers) else Workers((model,))
        self._slots = Slots(workers, admission, mode)
        self._tasks: TaskGroup | None = None
        self._running: dict[str, Request] = {}
        self._numbers = count()

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise LocalProtocolError("this Streaming was already entered")
        self._tasks = await anyio.create_task_group().__aenter__()
        self._entered_by = anyio.get_current_task()
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._tasks is not None
        for request in self._running.values():
            request.cut()
        here, entered_by = anyio.get_current_task(), self._entered_by
        if here != entered_by:  # A nursery must be left by the task that opened it.
            raise LocalProtocolError(
                f"this Streaming was entered by the task {entered_by.name!r} and is left by "
                f"{here.name!r}: its requests are cut; leave it in the task that entered it"
            )
        tasks, self._tasks = self._tasks, None
        # The block's exception is kept from the nursery, which would wrap it in a group.
        await tasks.__aexit__(None, None, None)

    def generate(
        self,
        inputs: AsyncIterable[StreamingInput],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        carry_terminator: bool = False,
        max_slice_nums: int = 1,
    ) -> StreamingRequest:
        """Begin a request that is extended while it is answered.

        Args:
            inputs: its chunks; read a few ahead in its own task, and closed there.
            sampling_params: for chunks without their own; None: the defaults.
            request_id: unique among running requests; it keys the RNG. None: a counter.
            carry_terminator: feed a chunk's last token before the next one's prompt, else drop it.
            max_slice_nums: maximum slices per picture, 1-9.

        Returns:
            Its outputs, to be closed, by `async with` or `aclose`, unless they are read to the end.

        Raises:
            ParameterError: the id or the number of slices is out of its range.
            LocalProtocolError: a request of this id runs, or the `Streaming` is not entered.
            TypeError: the inputs cannot be iterated.
        """
        if self._tasks is None:
            raise LocalProtocolError("requests are made within `async with Streaming(...)`")
        name = f"stream-{next(self._numbers)}" if request_id is None else request_id
        if name in self._running:
            raise LocalProtocolError(f"a request {name!r} runs already")
        anchoring = Anchoring(
            request_id=name, carry_terminator=carry_terminator, max_slice_nums=max_slice_nums
        )
        params = SamplingParams() if sampling_params is None else sampling_params
        request = Request(aiter(inputs), params, anchoring, self._slots)
        self._running[name] = request
        self._tasks.start_soon(self._run, request)
        return StreamingRequest(request)

    async def abort(self, request_id: str) -> bool:
        """End a request with `abort`, and wait until its slot is free; False if none ran."""
        request = self._running.get(request_id)
        if request is not None:
            await request.abort()
        return request is not None

    def token_id(self, name: str) -> int | None:
        """The id of a token by its name, as `<|im_end|>`; `BackendError` if not supported."""
        backend = self._slots.workers.any_backend
        if not isinstance(backend, Streams):
            raise BackendError(f"model {self._slots.workers.info.name} takes no streaming input")
        return backend.token_id(name)

    async def _run(self, request: Request) -> None:
        try:
            await request.run()
        finally:
            del self._running[request.anchoring.request_id]


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
