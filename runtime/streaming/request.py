"""One streaming request: its generator, its chunks, its outputs.

generator -> reader task -> waiting chunks -> runner task -> outputs -> the caller's iteration

Rules:
- At most `CHUNKS_WAITING_MAX` chunks wait; then the generator is not read. No chunk begins while
  `OUTPUTS_WAITING_MAX` outputs wait.
- A slot is leased when the first chunk has come, and freed, clean, before the request ends, with
  the last output, `finished`.
- The generator's end ends the request after all chunks are answered; its exception ends the request
  at once, and is raised after the existing outputs. The task that read it closes it.
- `aclose`, `abort`, cancelling a wait for an output, and collecting unclosed outputs cut the
  current chunk at its next step and drop the waiting ones.

`Streaming` owns the requests of a model; `StreamingRequest` is one as the calling program holds it.
A request's tasks hold no reference to its outputs, so dropping these unclosed, as by `async for
...: break`, ends the request and frees the slot.
"""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Final, Literal, Self, SupportsIndex

import anyio
import anyio.lowlevel
import attrs
import numpy as np
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from protocol.values.errors import ErrorCode, LocalProtocolError
from protocol.values.limits import NS_PER_S, Mode
from protocol.values.model import INPUT_RATE_HZ, SAMPLE_BYTES, UNIT_BYTES, Picture, Sound, Text

from ..model.backends import streams
from ..model.backends.base import Backend, BackendError, BackendGone, BackendRefused, ContextFull
from ..model.backends.streams import Anchoring, SamplingParams, Streams
from ..model.engine.backend import Pace
from ..slots.admission import Admission, Refused
from ..slots.workers import Lease, Workers

# -- inputs and outputs ---------------------------------------------------------------------------

BYTES: Final = bytes | bytearray | memoryview
"""Sequences of integers, but never meant as token ids."""
PromptPart = str | SupportsIndex | streams.Part | Sequence[SupportsIndex]
Prompt = str | streams.Part | Sequence[PromptPart]
"""Text, token ids, sound or a picture, or a sequence of these; adjacent ids are one run."""


def parts_of(prompt: object) -> tuple[streams.Part, ...]:
    """Read a `Prompt` into parts; adjacent ids become one. `TypeError` names an unknown part."""
    alone = isinstance(prompt, str | Text | streams.TokenIds | Sound | Picture)
    if not alone and (not isinstance(prompt, Sequence) or isinstance(prompt, BYTES)):
        raise TypeError(f"prompt is a {type(prompt).__name__}: no text, ids, sound or picture")
    parts: list[streams.Part] = []
    for part in _parts((prompt,) if alone else prompt):
        last = parts[-1] if parts else None
        if isinstance(part, streams.TokenIds) and isinstance(last, streams.TokenIds):
            parts[-1] = streams.TokenIds(ids=last.ids + part.ids)
        else:
            parts.append(part)
    return tuple(parts)


def _parts(prompt: object) -> Iterator[streams.Part]:
    assert isinstance(prompt, Sequence)
    for place, part in enumerate(prompt):
        if isinstance(part, Text | streams.TokenIds | Sound | Picture):
            yield part
        elif isinstance(part, str):
            yield Text(text=part)
        elif isinstance(part, SupportsIndex) and not isinstance(part, bool):
            yield streams.TokenIds(ids=(part,))
        else:
            yield _ids(place, part)


def _ids(place: int, part: object) -> streams.TokenIds:
    """A sequence of ids within a prompt."""
    if isinstance(part, Sequence) and not isinstance(part, BYTES):
        found = [item for item in part if isinstance(item, SupportsIndex)]
        if len(found) == len(part):
            return streams.TokenIds(ids=found)
    raise TypeError(f"prompt[{place}] is a {type(part).__name__}: no text, ids, sound or picture")


@attrs.frozen
class StreamingInput:
    """A chunk of a request: an extension of the cumulative prompt.

    Attributes:
        prompt: text, token ids, `Sound`, `Picture`, or a sequence of these; else `TypeError`.
        sampling_params: for its answer; None: the request's.
        due_s: seconds from arrival to deadline, above 0, else `ValueError`. None: 1 with sound,
            otherwise lowest priority.
    """

    prompt: Prompt
    sampling_params: streams.SamplingParams | None = None
    due_s: float | None = None
    parts: tuple[streams.Part, ...] = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "parts", parts_of(self.prompt))
        if self.due_s is not None and not self.due_s > 0:
            raise ValueError(f"due_s is {self.due_s}, not above 0")

    @property
    def sound_s(self) -> float:
        """Seconds of sound in the prompt."""
        sounds = (len(part.pcm) for part in self.parts if isinstance(part, Sound))
        return sum(sounds) / SAMPLE_BYTES / INPUT_RATE_HZ


@attrs.frozen(kw_only=True)
class StreamingOutput:
    """One step of a request: tokens computed, and one sampled after them.

    Attributes:
        chunk: the chunk answered, from 0. Sound that completes no second is answered with the chunk
            that completes it; the rest at the end as its own chunk, or as one more.
        token_ids: the sampled id; empty in the last output.
        text: whole characters; in the last output, the rest of an incomplete one.
        finish_reason: why it is the chunk's last token; None if another follows. In the last
            output, `context_full` if the next chunk does not fit, or `abort`.
        computed_tokens: tokens computed: the whole prompt at a chunk's first step, else one.
        prompt_tokens: rows of the chunk's prompt: tokens, embeddings, and the carried one.
        kv_length: tokens in the KV cache, without this step's.
        finished: the last output: the request has ended, and its slot is free.
    """

    request_id: str
    chunk: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: streams.FinishReason | Literal["abort"] | None = None
    computed_tokens: int = 0
    prompt_tokens: int = 0
    kv_length: int = 0
    finished: bool = False


# -- a request ------------------------------------------------------------------------------------

CHUNKS_WAITING_MAX: Final = 8
"""Some seconds of sound; reading further ahead only costs memory."""
OUTPUTS_WAITING_MAX: Final = 1024
"""The answers of some dozen chunks, for callers that read rarely."""
CLOSE_WAIT_S: Final = 10.0
"""A model call or generator that takes longer to end counts as hanging."""

_logger = logging.getLogger("antiphon.streaming")

Waiting = tuple[StreamingInput, float]
"""A chunk and its arrival time, on the event loop's clock."""


class Request:
    """One request, from its first chunk to its end."""

    def __init__(
        self,
        inputs: AsyncIterator[StreamingInput],
        params: streams.SamplingParams,
        anchoring: streams.Anchoring,
        slots: Slots,
    ) -> None:
        self.anchoring = anchoring
        self._inputs, self._params, self._slots = inputs, params, slots
        self._scope = anyio.CancelScope()
        self._lease: Lease | None = None
        self._is_unclean = self._is_aborted = False
        self._anchor: streams.AnchorSession | None = None
        self._pace, self._recut = Pace(), SecondCutter()
        self._chunks, self._is_owed, self._held = 0, False, ""
        self._last = StreamingOutput(request_id=anchoring.request_id)
        self._outputs: deque[StreamingOutput] = deque()
        self._error: Exception | None = None
        self._over, self._changed = anyio.Event(), anyio.Event()
        self._is_awaited = False
        self._call_soon = _loop_caller()

    @property
    def is_over(self) -> bool:
        """Whether the request has ended and its slot is free."""
        return self._over.is_set()

    # -- for the caller --------------------------------------------------------------------------

    async def next(self) -> StreamingOutput:
        """Wait for the next output; see `StreamingRequest.__anext__`."""
        if self._is_awaited:
            raise LocalProtocolError("another task waits for this request's next output")
        self._is_awaited = True
        try:
            await anyio.lowlevel.checkpoint()
            while not self._outputs and not self._over.is_set():
                await self._changed.wait()
        except anyio.get_cancelled_exc_class():
            await self.close()
            raise
        finally:
            self._is_awaited = False
        if self._outputs:
            output = self._outputs.popleft()
            self._notify()
            return output
        error, self._error = self._error, None
        raise StopAsyncIteration if error is None else error

    async def close(self) -> None:
        """End the request, drop unread outputs, and wait until its slot is free."""
        self.cut()
        await self._wait_until_over()
        self._outputs.clear()
        self._error = None

    async def abort(self) -> None:
        """End the request with a last output that says so, and wait as `close` does."""
        if not self._over.is_set():
            self._is_aborted = True
            self._stop()
        await self._wait_until_over()

    def cut_soon(self) -> None:
        """Cut the request from a finalizer: in any thread, also after the event loop."""
        with suppress(RuntimeError):  # With the loop its tasks have ended.
            self._call_soon(self.cut)

    # -- for `Streaming` ------------------------------------------------------------------------

    def cut(self) -> None:
        """End the request at the model's next step; never blocks."""
        if not self._over.is_set():
            self._fail(BackendError("the request was cut"))
            self._stop()

    async def run(self) -> None:
        """Read, compute and answer until the end."""
        send, receive = anyio.create_memory_object_stream[Waiting](CHUNKS_WAITING_MAX - 1)
        try:
            with self._scope, receive:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._read, send)
                    await self._serve(receive)
                    tasks.cancel_scope.cancel()
            if self._error is None:
                self._finish()
        except BaseException:  # The nursery's owner is cancelled.
            self._fail(BackendError("the request was cut"))
            raise
        finally:
            self._over.set()
            self._notify()

    def _stop(self) -> None:
        if self._anchor is not None:
            self._anchor.interrupt()
        self._scope.cancel()

    async def _wait_until_over(self) -> None:
        """Wait until the slot is free; if the model hangs, free it as condemned."""
        with anyio.move_on_after(CLOSE_WAIT_S, shield=True):
            await self._over.wait()
        if not self._over.is_set():
            _logger.error("request %s hangs in the model", self.anchoring.request_id)
            self._release_slot(condemned=True)

    # -- the reader -----------------------------------------------------------------------------

    async def _read(self, send: MemoryObjectSendStream[Waiting]) -> None:
        try:
            with send:
                # The one in hand waits as well: the stream's own buffer is one less than the bound.
                async for item in self._inputs:
                    if not isinstance(item, StreamingInput):
                        raise TypeError(f"the inputs gave a {type(item).__name__}: no chunk")
                    await send.send((item, anyio.current_time()))
        except Exception as error:
            self._fail(error)
            self.cut()
        finally:
            await self._close_inputs()

    async def _close_inputs(self) -> None:
        """Close a generator, with no effect on one read to its end."""
        close = getattr(self._inputs, "aclose", None)
        if close is None:
            return
        with anyio.move_on_after(CLOSE_WAIT_S, shield=True):
            try:
                await close()
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Keep only the first error; later ones follow from it, or from an abort."""
        if self._error is None and not self._is_aborted:
            self._error = error

    # -- the runner -----------------------------------------------------------------------------

    async def _serve(self, receive: MemoryObjectReceiveStream[Waiting]) -> None:
        try:
            first = await _next(receive)
            if first is not None:  # A generator without a chunk takes no slot.
                self._lease = await self._slots.lease()
                try:
                    await self._hold(self._lease, first, receive)
                finally:
                    self._release_slot(condemned=self._is_unclean)
        except Exception as error:
            self._fail(error)

    async def _hold(
        self, lease: Lease, first: Waiting, receive: MemoryObjectReceiveStream[Waiting]
    ) -> None:
        """Answer the chunks on a slot, and leave it clean."""
        backend = self._slots.workers.backend_of(lease)
        if not isinstance(backend, streams.Streams):
            raise BackendRefused(f"model {backend.info.name} takes no streaming input")
        try:
            self._anchor = await backend.anchor(self.anchoring, slot=lease.slot)
            try:
                await self._answer_all(self._anchor, first, receive)
            finally:
                self._is_unclean = True
                with anyio.CancelScope(shield=True):
                    await self._anchor.release()
                self._is_unclean = False
        except BackendGone:
            self._is_unclean = self._is_unclean or self._slots.workers.can_replace
            raise

    def _release_slot(self, *, condemned: bool) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            self._slots.release(lease, condemned=condemned)

    async def _answer_all(
        self,
        anchor: streams.AnchorSession,
        first: Waiting,
        receive: MemoryObjectReceiveStream[Waiting],
    ) -> None:
        waiting: Waiting | None = first
        while waiting is not None:
            item = waiting[0]
            if not await self._answer(anchor, *waiting):
                return
            while len(self._outputs) >= OUTPUTS_WAITING_MAX:
                await self._changed.wait()
            waiting = await _next(receive)
        rest = self._recut.rest()
        if rest:
            self._chunks -= self._is_owed  # Its own chunk if not answered yet, else one more.
            await self._answer(anchor, attrs.evolve(item, prompt=rest), anyio.current_time())

    async def _answer(
        self, anchor: streams.AnchorSession, item: StreamingInput, came_s: float
    ) -> bool:
        """Answer a chunk; False if the context is full."""
        parts = self._recut.cut(item.parts)
        self._chunks, self._is_owed = self._chunks + 1, bool(item.parts) and not parts
        due_s = self._due_s(item, came_s)
        if self._is_owed:  # Its sound completes no second: a later chunk answers it.
            return True
        try:
            params = item.sampling_params or self._params
            done = await anchor.extend(parts, params, self._emit, due_s=due_s)
        except ContextFull:
            self._last = attrs.evolve(
                self._last, chunk=self._chunks - 1, finish_reason="context_full", prompt_tokens=0
            )
            return False
        self._held, self._last = done.held, attrs.evolve(self._last, finish_reason=None)
        return done.reason != "context_full"

    def _finish(self) -> None:
        """Emit the last output: no token, but the text held back."""
        reason = "abort" if self._is_aborted else self._last.finish_reason
        self._add_output(
            attrs.evolve(
                self._last,
                token_ids=(),
                text=self._held,
                finish_reason=reason,
                computed_tokens=0,
                finished=True,
            )
        )

    def _due_s(self, item: StreamingInput, came_s: float) -> float | None:
        """Seconds until a chunk is due; None without a deadline."""
        if item.due_s is not None:
            return came_s + item.due_s - anyio.current_time()
        if not item.sound_s:
            return None
        return self._pace.due_s(came_s, item.sound_s) - anyio.current_time()

    def _emit(self, sampled: streams.Sampled) -> None:
        self._add_output(
            StreamingOutput(
                request_id=self.anchoring.request_id,
                chunk=self._chunks - 1,
                token_ids=(sampled.token_id,),
                text=sampled.text,
                finish_reason=sampled.reason,
                computed_tokens=sampled.computed_tokens,
                prompt_tokens=sampled.prompt_tokens,
                kv_length=sampled.kv_length,
            )
        )

    def _add_output(self, output: StreamingOutput) -> None:
        self._last = output
        self._outputs.append(output)
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


async def _next(receive: MemoryObjectReceiveStream[Waiting]) -> Waiting | None:
    try:
        return await receive.receive()
    except anyio.EndOfStream:
        return None


def _loop_caller() -> Callable[[Callable[[], None]], object]:
    """A thread-safe call into this event loop, which raises once the loop has ended.

    Safe in finalizers: neither loop takes a lock that the thread may hold, except a reentrant one.
    """
    loop: Any = anyio.lowlevel.current_token().native_token
    caller: Callable[[Callable[[], None]], object]
    caller = getattr(loop, "call_soon_threadsafe", None) or loop.run_sync_soon  # asyncio's, trio's
    return caller


def _now_ns() -> int:
    return int(anyio.current_time() * NS_PER_S)


class Slots:
    """The slots of some workers; without an `admission` it makes its own, their only user.

    Requests queue as sessions do: a server's admission on the same workers is the one queue, so
    neither kind overtakes the other.
    """

    def __init__(self, workers: Workers, admission: Admission | None, mode: Mode) -> None:
        numbers = count()
        self.workers, self._mode = workers, mode
        self._admission = admission or Admission(
            workers.pool,
            clock_ns=_now_ns,
            new_ticket_id=lambda: f"ticket_{next(numbers):012x}",
            more_to_come=lambda: workers.more_to_come,
        )

    async def lease(self) -> Lease:
        """Wait for a slot; a cancelled wait holds none.

        `Refused`: there is no slot and no place in the queue, or no slot will come any more;
        `BackendRefused`: an operator removed the request from the queue.
        """
        decided = anyio.Event()
        leases, errors = list[Lease](), list[Exception]()

        def leased(lease: Lease) -> None:
            leases.append(lease)
            decided.set()

        def refused(code: ErrorCode) -> None:
            errors.append(Refused(code))
            decided.set()

        def cancelled() -> None:
            errors.append(BackendRefused("an operator took the request out of the queue"))
            decided.set()

        ticket = self._admission.enter(
            self._mode,
            on_leased=leased,
            on_moved=lambda _: None,
            on_cancelled=cancelled,
            on_refused=refused,
        )
        try:
            await decided.wait()
        except BaseException:
            self._admission.leave(ticket)
            for lease in leases:
                self.release(lease)
            raise
        for error in errors:
            raise error
        return leases[0]

    def release(self, lease: Lease, *, condemned: bool = False) -> None:
        """Free a clean slot; `condemned`: its worker hangs or is lost."""
        self._admission.release(lease, condemned=condemned)


@attrs.define
class SecondCutter:
    """The sound of one request, cut again into whole seconds for the model.

    `left` is the rest: float32 LE, less than a second. It waits for the next sound; before other
    input, or at the end, it is padded with silence.
    """

    left: bytes = b""

    def cut(self, prompt: Sequence[streams.Part]) -> tuple[streams.Part, ...]:
        """Re-cut sound to whole seconds; `BackendRefused` names a part that is invalid sound."""
        return tuple(piece for place, part in enumerate(prompt) for piece in self._cut(place, part))

    def rest(self) -> tuple[streams.Part, ...]:
        """Take the rest, padded with silence; empty if there is none."""
        left, self.left = self.left, b""
        return (Sound(pcm=left.ljust(UNIT_BYTES, b"\0")),) if left else ()

    def _cut(self, place: int, part: streams.Part) -> Iterator[streams.Part]:
        if not isinstance(part, Sound):
            yield from self.rest()
            yield part
            return
        _check(place, part.pcm)
        pcm = self.left + part.pcm
        whole = len(pcm) - len(pcm) % UNIT_BYTES
        self.left = pcm[whole:]
        if whole:
            yield Sound(pcm=pcm[:whole])


def _check(place: int, pcm: bytes) -> None:
    """Refuse invalid sound while its place is known."""
    if not pcm:
        raise BackendRefused(f"prompt[{place}].pcm has no samples")
    if len(pcm) % SAMPLE_BYTES:
        raise BackendRefused(
            f"prompt[{place}].pcm has {len(pcm) / SAMPLE_BYTES:g} samples: float32 has "
            f"{SAMPLE_BYTES} bytes each"
        )
    if not np.isfinite(np.frombuffer(pcm, "<f4")).all():
        raise BackendRefused(f"prompt[{place}].pcm: a sample is not finite")


# -- the service -----------------------------------------------------------------------------------


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
