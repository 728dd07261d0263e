"""The Python API of streaming input: how requests begin, wait, are answered and end."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import anyio
import anyio.lowlevel
import pytest

from runtime.model.backends.base import BackendError
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.engine.backend import EngineBackend
from runtime.slots.workers import Workers
from runtime.streaming import (
    ParameterError,
    Picture,
    SamplingParams,
    Sound,
    Streaming,
    StreamingInput,
    StreamingOutput,
)
from runtime.streaming.request import CHUNKS_WAITING_MAX
from tests.models import random_model
from tests.models.random_model import opening, picture, sound, unit
from tests.project.sampling import ONE_LOOP
from tests.runtime.model.test_engine_chat import answered, short
from tests.runtime.model.test_minicpmo_anchor import wiped
from tests.sessions.streaming import EXAMPLE, WAIT_S, Chunks, Gate, given_chunks, params, read

DOCS: Final = Path(__file__).parents[3] / "docs" / "streaming.md"

pytestmark = pytest.mark.anyio


# -- what is answered -----------------------------------------------------------------------------


async def test_the_worked_example(backend: EngineBackend) -> None:
    """Tokens would be computed twice, or outputs be given to the wrong chunk."""
    async with Streaming(backend) as streaming:
        outputs = await read(streaming.generate(given_chunks(*EXAMPLE)))
    told = [(o.chunk, o.computed_tokens, o.prompt_tokens, o.finish_reason) for o in outputs]
    assert told == [
        (0, 3, 3, "length"),
        (1, 2, 2, None),
        (1, 1, 2, None),
        (1, 1, 2, "length"),
        (2, 2, 2, None),
        (2, 1, 2, "length"),
    ]
    assert [output.kv_length for output in outputs] == [3, 5, 6, 7, 9, 10]
    assert all(len(output.token_ids) == 1 for output in outputs)
    assert sum(output.computed_tokens for output in outputs) == 10 == 7 + 6 - 3


async def test_a_carried_terminator_costs_a_token(backend: EngineBackend) -> None:
    """The option would be taken and do nothing."""
    async with Streaming(backend) as streaming:
        outputs = await read(streaming.generate(given_chunks(*EXAMPLE), carry_terminator=True))
    assert [output.computed_tokens for output in outputs] == [3, 3, 1, 1, 3, 1]


async def test_bunched_or_spaced_gives_the_same(backend: EngineBackend) -> None:
    """What is answered would depend on how fast the network is."""
    words = ("the lazy ", "dog and ", "the fox ", "jump over ", "the moon")
    prompts: list[Any] = [*words, Sound(pcm=sound(1)), [5, 6, 7], (Picture(jpeg=picture(1)), "it")]
    chunks = [
        StreamingInput(p, params(1 + n % 4, temperature=n % 3)) for n, p in enumerate(prompts)
    ]
    answered_count = anyio.Event()

    async def spaced() -> Chunks:
        nonlocal answered_count
        for chunk in chunks:
            answered_count = anyio.Event()
            yield chunk
            await answered_count.wait()

    got: list[StreamingOutput] = []
    async with Streaming(backend) as streaming:
        bunched = await read(streaming.generate(given_chunks(*chunks), request_id="same"))
        async for output in streaming.generate(spaced(), request_id="same"):
            got += [output] if output.token_ids else []
            if output.finish_reason is not None:
                answered_count.set()
    assert got == bunched
    assert {output.chunk for output in got} == set(range(8))


@pytest.mark.parametrize("anyio_backend", ONE_LOOP)
async def test_three_at_once_do_not_touch_each_other(tmp_path_factory: Any) -> None:
    """What one is answered would depend on who else is served (B8)."""
    model = random_model.load(tmp_path_factory.mktemp("model"), slots=5)
    backend = EngineBackend(model)

    async def chunks(number: int) -> Chunks:
        for index in range(4):
            yield StreamingInput([number, index, 7], params(3 + index, temperature=1.0))
            yield StreamingInput((Sound(pcm=sound(number + index)), "and then?"), params(5))
            await anyio.lowlevel.checkpoint()

    got: dict[int, list[StreamingOutput]] = {}

    async def ask(streaming: Streaming, number: int) -> None:
        got[number] = await read(streaming.generate(chunks(number), request_id=f"r{number}"))

    async def talk(slot: int) -> None:
        session = await backend.open(opening(1), slot=slot)
        for index in range(3):
            await session.run(unit(index))
            await session.finalize(index, interrupted=False)
        await session.release()

    async with Streaming(backend) as streaming:
        for number in range(3):
            await ask(streaming, number)
    alone, got = got, {}
    assert backend.engine.statistics.largest == 1
    workers = Workers((backend,))
    others = [workers.pool.lease() for _ in range(2)]  # Of a session, and of a turn of chat.
    async with Streaming(workers) as streaming, anyio.create_task_group() as tasks:
        voice, chat = (lease.slot for lease in others if lease is not None)
        tasks.start_soon(talk, voice)
        tasks.start_soon(answered, backend, short(1), chat)
        for number in range(3):
            tasks.start_soon(ask, streaming, number)
    assert got == alone
    assert backend.engine.statistics.largest > 1


async def test_texts_join_to_the_text_of_all_tokens(
    backend: EngineBackend, model: DuplexModel
) -> None:
    """Half a character would be shown as rubbish, or be lost at the end."""
    half = model.tokens.encode("\N{EURO SIGN}")[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.model.backends.minicpmo.anchor.decide_plain", lambda *_, **__: half)
        async with Streaming(backend) as streaming:
            outputs = [o async for o in streaming.generate(given_chunks(*EXAMPLE))]
    ids = [index for output in outputs for index in output.token_ids]
    assert "".join(output.text for output in outputs) == model.tokens.decode(ids) == "\ufffd" * 6
    assert outputs[-1].token_ids == ()
    assert (outputs[-1].text, outputs[-1].computed_tokens) == ("\ufffd", 0)


# -- how a request ends ---------------------------------------------------------------------------


async def test_a_single_chunk(backend: EngineBackend) -> None:
    """Whoever has all of it at once could not use it."""
    async with Streaming(backend) as streaming:
        outputs = await read(streaming.generate(given_chunks(StreamingInput("hello")), params(4)))
    assert len(outputs) == 4


async def test_a_generator_without_a_chunk_takes_no_slot(model: DuplexModel) -> None:
    """Whoever says nothing would wait for a slot, or hold it from others."""
    workers = Workers((EngineBackend(model),))
    leases = [workers.pool.lease() for _ in range(4)]
    async with Streaming(workers) as streaming:
        assert await read(streaming.generate(given_chunks())) == []
    assert len(workers.pool.leases) == len(leases)


async def test_outputs_do_not_wait_for_the_generator_s_end(backend: EngineBackend) -> None:
    """The last words would be shown when the caller hangs up."""
    ends = anyio.Event()

    async def chunks() -> Chunks:
        yield EXAMPLE[0]
        await ends.wait()

    async with Streaming(backend) as streaming, streaming.generate(chunks()) as outputs:
        with anyio.fail_after(WAIT_S):
            assert (await anext(outputs)).finish_reason == "length"
            ends.set()
            assert await read(outputs) == []


async def test_the_request_lasts_until_the_generator_ends(backend: EngineBackend) -> None:
    """A caller who pauses would be hung up on."""
    asked = anyio.Event()

    async def chunks() -> Chunks:
        yield EXAMPLE[0]
        asked.set()
        await anyio.sleep(0.1)
        yield EXAMPLE[1]

    async with Streaming(backend) as streaming:
        outputs = await read(streaming.generate(chunks()))
    assert asked.is_set()
    assert [output.chunk for output in outputs] == [0, 1, 1, 1]


async def test_what_the_generator_raises_is_raised_as_it_was(backend: EngineBackend) -> None:
    """A caller could not tell what went wrong, or would catch it in vain."""
    error, answered_it = KeyError("the microphone"), anyio.Event()

    async def chunks() -> Chunks:
        yield EXAMPLE[1]
        await answered_it.wait()
        raise error

    async with Streaming(backend) as streaming:
        outputs = streaming.generate(chunks())
        got = [await anext(outputs) for _ in range(3)]
        answered_it.set()
        with pytest.raises(KeyError) as raised:
            await read(outputs)
        assert raised.value is error
        assert [output.finish_reason for output in got] == [None, None, "length"]
        with pytest.raises(StopAsyncIteration):
            await anext(outputs)


async def test_a_generator_s_error_drops_what_waits(
    backend: EngineBackend, gate: Gate, model: DuplexModel
) -> None:
    """The model would go on with a request that nobody wants."""

    async def chunks() -> Chunks:
        yield EXAMPLE[1]
        yield EXAMPLE[1]
        await gate.reached()
        gate.opened.set()
        raise KeyError("the microphone")

    async with Streaming(backend) as streaming:
        with pytest.raises(KeyError):
            await read(streaming.generate(chunks()))
        assert wiped(model, 0)
    assert gate.fed <= 3, "the second chunk was begun"


async def test_an_error_passes_the_block_unwrapped(backend: EngineBackend) -> None:
    """`except KeyError` around it all would not catch it."""

    async def chunks() -> Chunks:
        yield EXAMPLE[0]
        raise KeyError("the microphone")

    with pytest.raises(KeyError):
        async with Streaming(backend) as streaming:
            await read(streaming.generate(chunks()))


async def test_params_are_refused_where_they_are_made(backend: EngineBackend) -> None:
    """A request would be answered otherwise than it was asked."""

    async def chunks() -> Chunks:
        yield EXAMPLE[0]
        yield StreamingInput("again", SamplingParams(n=2))

    async with Streaming(backend) as streaming:
        with pytest.raises(ParameterError, match="n is 2"):
            await read(streaming.generate(chunks()))


@pytest.mark.parametrize("item", ["text", [1, 2], None])
async def test_inputs_that_are_no_chunks(backend: EngineBackend, item: Any) -> None:
    """A forgotten `StreamingInput` would be a riddle."""

    async def chunks() -> Any:
        yield item

    async with Streaming(backend) as streaming:
        with pytest.raises(TypeError, match=f"gave a {type(item).__name__}: no chunk"):
            await read(streaming.generate(chunks()))


async def test_aclose_drops_what_waits_and_gives_the_slot_back(
    backend: EngineBackend, gate: Gate, model: DuplexModel
) -> None:
    """Whoever hangs up would go on being answered, in a slot that others wait for."""
    closed = anyio.Event()

    async def chunks() -> Chunks:
        try:
            while True:
                yield EXAMPLE[1]
        finally:
            closed.set()

    workers = Workers((backend,))
    async with Streaming(workers) as streaming:
        outputs = streaming.generate(chunks())
        await gate.reached()
        gate.opened.set()
        with anyio.fail_after(WAIT_S):
            await outputs.aclose()
            await outputs.aclose()
        assert closed.is_set()
        assert workers.pool.leases == ()
        assert wiped(model, 0)
        assert await read(outputs) == []
    assert gate.fed <= 2


async def test_cancelling_whoever_waits_ends_the_request(
    backend: EngineBackend, model: DuplexModel
) -> None:
    """A task that was given up would leave its request in the model."""
    workers, closed = Workers((backend,)), anyio.Event()

    async def chunks() -> Chunks:
        try:
            yield EXAMPLE[0]
            await anyio.sleep_forever()
        finally:
            closed.set()

    async with Streaming(workers) as streaming:
        outputs = streaming.generate(chunks())
        assert (await anext(outputs)).chunk == 0
        with anyio.move_on_after(0.05) as scope:
            await anext(outputs)
        assert scope.cancelled_caught
        assert closed.is_set()
        assert workers.pool.leases == ()
        assert wiped(model, 0)


async def test_the_end_of_the_block_cuts_all(backend: EngineBackend) -> None:
    """A program could not end while somebody speaks."""

    async def chunks() -> Chunks:
        yield EXAMPLE[0]
        await anyio.sleep_forever()

    with anyio.fail_after(WAIT_S):
        async with Streaming(backend) as streaming:
            outputs = [streaming.generate(chunks()) for _ in range(3)]
            for each in outputs:
                await anext(each)
        for each in outputs:
            with pytest.raises(BackendError, match="the request was cut"):
                await anext(each)


async def test_cancelling_all_around_leaves_nothing(backend: EngineBackend) -> None:
    """A program that is told to stop would hang, or its slots stay full."""

    async def chunks() -> Chunks:
        while True:
            yield StreamingInput("the fox", params(20, temperature=1.0))

    with anyio.move_on_after(0.1) as scope:
        async with Streaming(backend) as streaming, anyio.create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(read, streaming.generate(chunks()))
            await anyio.sleep_forever()
    assert scope.cancelled_caught


async def test_a_generator_that_is_closed_elsewhere_ends_the_request(
    backend: EngineBackend, gate: Gate
) -> None:
    """`aclose` on the generator, as the source has it, would hang the request."""

    async def chunks() -> Chunks:
        while True:
            yield EXAMPLE[0]

    inputs = chunks()
    async with Streaming(backend) as streaming, streaming.generate(inputs) as outputs:
        await gate.reached()
        for _ in range(20):
            await anyio.lowlevel.checkpoint()  # The queue fills, and the generator is left alone.
        await inputs.aclose()  # type: ignore[attr-defined]
        gate.opened.set()
        assert len(await read(outputs)) == CHUNKS_WAITING_MAX + 1
