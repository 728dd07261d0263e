"""The Python API of streaming input: requests that are dropped, aborted, finished or left."""

from __future__ import annotations

import gc
import threading
import warnings
from typing import Any

import anyio
import anyio.to_thread
import pytest

from runtime import streaming as api
from runtime.model.backends.streams import Anchoring
from runtime.model.engine.backend import EngineBackend
from runtime.slots.workers import Workers
from runtime.streaming import (
    SamplingParams,
    Streaming,
    StreamingInput,
    StreamingOutput,
    StreamingRequest,
)
from runtime.streaming.request import Request, Slots
from tests.project.sampling import sample
from tests.sessions.streaming import EXAMPLE, WAIT_S, Chunks, Gate, given_chunks, params, read

pytestmark = pytest.mark.anyio

DROPPED = "request '.*' was dropped unclosed and is aborted"


async def speaking() -> Chunks:
    """Whoever goes on speaking, as a microphone does."""
    yield EXAMPLE[0]
    await anyio.sleep_forever()


async def all_back(workers: Workers) -> None:
    """Wait until no slot is taken."""
    with anyio.fail_after(WAIT_S):
        while workers.pool.leases:  # noqa: ASYNC110 - the pool tells nobody
            await anyio.sleep(0.01)


async def break_out(streaming: Streaming) -> None:
    """What a hasty program does."""
    async for _ in streaming.generate(speaking()):
        break
    gc.collect()


# -- dropped --------------------------------------------------------------------------------------


async def test_outputs_that_are_dropped_give_their_slots_back(backend: EngineBackend) -> None:
    """A program that breaks out of its loops would wait for a slot in silence, for ever."""
    async with Streaming(backend) as streaming:
        for _ in range(9):
            with pytest.warns(ResourceWarning, match=DROPPED):
                await break_out(streaming)
        with anyio.fail_after(WAIT_S):
            assert len(await read(streaming.generate(given_chunks(*EXAMPLE)))) == 6


async def test_outputs_in_a_cycle_are_aborted_once_it_is_collected(backend: EngineBackend) -> None:
    """An object of a program that holds its outputs and itself would keep the slot."""
    workers = Workers((backend,))
    async with Streaming(workers) as streaming:
        holder: dict[str, Any] = {"outputs": streaming.generate(speaking())}
        holder["itself"] = holder
        await anext(holder["outputs"])
        del holder
        with pytest.warns(ResourceWarning, match=DROPPED):
            gc.collect()
        await all_back(workers)


async def test_outputs_may_be_collected_in_another_thread(backend: EngineBackend) -> None:
    """The garbage collector runs in whatever thread asks for memory."""
    workers = Workers((backend,))
    async with Streaming(workers) as streaming:
        held = [streaming.generate(speaking())]
        await anext(held[0])
        where: list[int] = []

        def drop() -> None:
            where.append(threading.get_ident())
            held.clear()

        with pytest.warns(ResourceWarning, match=DROPPED):
            await anyio.to_thread.run_sync(drop)
        assert where != [threading.get_ident()]
        await all_back(workers)


@pytest.mark.parametrize("name", ["asyncio", "trio"])
async def test_outputs_may_outlive_their_loop(backend: EngineBackend, name: str) -> None:
    """A program that ends would be shown a traceback of its finalizers."""

    async def make() -> StreamingRequest:
        slots = Slots(Workers((backend,)), None, "transcription")
        inputs = aiter(given_chunks(EXAMPLE[0]))
        return StreamingRequest(
            Request(inputs, SamplingParams(), Anchoring(request_id="late"), slots)
        )

    def outlive() -> None:
        outputs = anyio.run(make, backend=name)
        del outputs
        gc.collect()

    with pytest.warns(ResourceWarning, match=DROPPED):
        await anyio.to_thread.run_sync(outlive)


async def test_collections_amid_everything_do_no_harm(backend: EngineBackend) -> None:
    """A finalizer that takes a lock which its own thread holds would never return."""
    workers, before = Workers((backend,)), gc.get_threshold()
    async with Streaming(workers) as streaming:
        gc.set_threshold(7, 1, 1)
        try:
            with warnings.catch_warnings(), anyio.fail_after(WAIT_S):
                warnings.simplefilter("ignore", ResourceWarning)
                for _ in range(sample(12, 4)):
                    holder: dict[str, Any] = {"outputs": streaming.generate(speaking())}
                    holder["itself"] = holder
                    await anext(holder["outputs"])
                    del holder
                    await anyio.to_thread.run_sync(gc.collect)
        finally:
            gc.set_threshold(*before)
        await all_back(workers)


async def test_outputs_that_are_over_are_dropped_in_silence(backend: EngineBackend) -> None:
    """A program that did all right would be warned."""
    async with Streaming(backend) as streaming:
        outputs = streaming.generate(given_chunks(*EXAMPLE))
        async for output in outputs:
            if output.finished:
                break
        del outputs
        closed = streaming.generate(speaking())
        await closed.aclose()
        del closed
        cut = streaming.generate(speaking())
        await anext(cut)
    del cut
    gc.collect()


# -- finished, aborted ----------------------------------------------------------------------------


async def test_the_last_output_says_that_it_is(backend: EngineBackend) -> None:
    """Whoever collects an answer would not know when to show it."""
    workers = Workers((backend,))
    async with Streaming(workers) as streaming:
        got: list[StreamingOutput] = []
        async for output in streaming.generate(given_chunks(*EXAMPLE)):
            got.append(output)
            assert not output.finished or not workers.pool.leases, "its slot is still taken"
    assert [output.finished for output in got] == [False] * 6 + [True]
    last = got[-1]
    assert (last.chunk, last.token_ids, last.text, last.finish_reason) == (2, (), "", None)
    assert (last.computed_tokens, last.kv_length) == (0, 10)


async def test_a_context_that_is_full_finishes(backend: EngineBackend) -> None:
    """Whoever waits for the last output would wait for ever."""
    chunks = given_chunks(StreamingInput([7] * 200, params()), StreamingInput([7] * 200, params()))
    async with Streaming(backend) as streaming:
        outputs = [output async for output in streaming.generate(chunks)]
    assert [(o.chunk, o.finish_reason, o.finished) for o in outputs] == [
        (0, "length", False),
        (1, "context_full", True),
    ]


async def test_a_request_is_aborted_by_its_id(backend: EngineBackend, gate: Gate) -> None:
    """A program that knows the name of a request could not end it."""
    workers, got = Workers((backend,)), list[StreamingOutput]()

    async def chunks() -> Chunks:
        while True:
            yield EXAMPLE[1]

    async def take(outputs: Any) -> None:
        async for output in outputs:
            got.append(output)

    async with Streaming(workers) as streaming, anyio.create_task_group() as tasks:
        tasks.start_soon(take, streaming.generate(chunks(), request_id="mine"))
        await gate.reached()
        gate.opened.set()
        with anyio.fail_after(WAIT_S):
            assert await streaming.abort("mine")
            assert workers.pool.leases == ()
            assert not await streaming.abort("mine")
            assert not await streaming.abort("another")
    assert (got[-1].finish_reason, got[-1].finished, got[-1].token_ids) == ("abort", True, ())
    assert not any(output.finished for output in got[:-1])


async def test_a_request_that_waits_for_a_slot_is_aborted(backend: EngineBackend) -> None:
    """A request in the queue would be out of reach, and take a slot in the end."""
    workers = Workers((backend,))
    leases = [workers.pool.lease() for _ in range(4)]
    async with Streaming(workers) as streaming:
        outputs = streaming.generate(given_chunks(*EXAMPLE), request_id="mine")
        await anyio.wait_all_tasks_blocked()
        assert await streaming.abort("mine")
        assert [output.finish_reason async for output in outputs] == ["abort"]
    assert len(workers.pool.leases) == len(leases)


# -- left by another task -------------------------------------------------------------------------


async def test_a_streaming_that_another_task_leaves_says_so(backend: EngineBackend) -> None:
    """The event loop would end in an error about a cancel scope, which names nothing of ours."""
    workers = Workers((backend,))
    streaming = Streaming(workers)
    await streaming.__aenter__()
    outputs = streaming.generate(speaking())
    await anext(outputs)
    told: list[BaseException] = []

    async def leave() -> None:
        try:
            await streaming.__aexit__(None, None, None)
        except api.LocalProtocolError as error:
            told.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leave)
    assert "leave it in the task that entered it" in str(told[0])
    await all_back(workers)
    await streaming.__aexit__(None, None, None)
    with pytest.raises(api.BackendError, match="cut"):
        await anext(outputs)


# -- the names ------------------------------------------------------------------------------------


async def test_what_can_be_raised_can_be_caught(backend: EngineBackend) -> None:
    """A program would import errors from where they happen to lie."""
    names = ("BackendError", "BackendGone", "BackendRefused", "LocalProtocolError", "Refused")
    for name in (*names, "ParameterError"):
        assert issubclass(getattr(api, name), Exception)
        assert name in api.__all__
