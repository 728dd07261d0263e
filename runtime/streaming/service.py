"""Requests with streaming input on a model: who owns their tasks, and how one is begun."""

from __future__ import annotations

from collections.abc import AsyncIterable
from itertools import count
from typing import Self

import anyio
from anyio.abc import TaskGroup

from protocol.errors import LocalProtocolError
from protocol.messages import Mode

from ..admission import Admission
from ..backends.base import Backend, BackendError
from ..backends.streams import Anchoring, SamplingParams, Streams
from ..workers import Workers
from .outputs import StreamingRequest
from .request import Request
from .slots import Slots
from .values import StreamingInput


class Streaming:
    """Requests with streaming input on one model; an asynchronous context manager.

    At the end of its block all requests are cut. The task that entered it must leave it. The model
    is the caller's, before and after.

    Args:
        model: a backend that takes streaming input (`Streams`), or the workers that serve it.
        admission: the queue for its slots, where there is one: a server's `admission` for its
            `workers`. None makes one, and nobody else may take slots of the model then.
        mode: as what requests count where waits in that queue are estimated. A request holds its
            slot for as long as it is spoken to, as a transcription does; those that end with an
            answer, within seconds, are turns of `chat`.
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
            raise LocalProtocolError("this Streaming was entered already")
        self._tasks = await anyio.create_task_group().__aenter__()
        self._entered_by = anyio.get_current_task()
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._tasks is not None
        for request in self._running.values():
            request.cut()
        here, entered_by = anyio.get_current_task(), self._entered_by
        if here != entered_by:  # A nursery is left by the task that opened it.
            raise LocalProtocolError(
                f"this Streaming was entered by the task {entered_by.name!r} and is left by "
                f"{here.name!r}: its requests are cut; leave it in the task that entered it"
            )
        tasks, self._tasks = self._tasks, None
        # What the block raised is no business of the nursery's, which would put it into a group.
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
        """Begin a request that is added to while it is answered.

        Args:
            inputs: its chunks, as they come; most often an asynchronous generator. It is read ahead
                of the answers, a few chunks far, in a task of its own, and closed there.
            sampling_params: how chunks are answered that do not say; None takes the defaults.
            request_id: its name, another one than of all that run; it keys the RNG. None counts.
            carry_terminator: the last token that a chunk samples is fed in front of the next one's
                prompt; else it is left out.
            max_slice_nums: most slices a picture is cut into, 1-9.

        Returns:
            Its outputs. Close them, by `async with` or `aclose`, unless they are read to the end;
            where they are collected unclosed the request is aborted, with a `ResourceWarning`.

        Raises:
            ParameterError: the id or the number of slices is out of its range.
            LocalProtocolError: a request of this id runs, or this is no entered `Streaming`.
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
        """End a request at the model's next step, and wait until its slot is given back.

        Whoever reads its outputs gets those that there are, then a last one that says `abort`.

        Returns:
            Whether a request of this id ran.
        """
        request = self._running.get(request_id)
        if request is not None:
            await request.abort()
        return request is not None

    def token_id(self, name: str) -> int | None:
        """The id of a token by its name in the tokenizer, as `<|im_end|>`; None has none.

        Raises:
            BackendError: the model takes no streaming input, or none of its workers is there.
        """
        backend = self._slots.workers.any_backend
        if not isinstance(backend, Streams):
            raise BackendError(f"model {self._slots.workers.info.name} takes no streaming input")
        return backend.token_id(name)

    async def _run(self, request: Request) -> None:
        try:
            await request.run()
        finally:
            del self._running[request.anchoring.request_id]
