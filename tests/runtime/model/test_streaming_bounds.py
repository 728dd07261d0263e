"""The Python API of streaming input: its bounds, slots, failures, deadlines and prompts."""

from __future__ import annotations

import re
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.lowlevel
import pytest

from protocol.values.errors import ErrorCode, LocalProtocolError
from protocol.values.model import Text
from runtime.model.backends.base import BackendError, BackendGone
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.scripted import ScriptedBackend
from runtime.model.engine.backend import EngineBackend
from runtime.model.engine.engine import Engine
from runtime.slots.admission import Admission, Refused
from runtime.slots.workers import Workers
from runtime.streaming import (
    ParameterError,
    Picture,
    Sound,
    Streaming,
    StreamingInput,
    TokenIds,
    request,
)
from runtime.streaming.request import CHUNKS_WAITING_MAX, parts_of
from tests.models.random_model import sound
from tests.runtime.model.test_engine import FakeModel
from tests.sessions.streaming import EXAMPLE, Chunks, Gate, given_chunks, params, read

DOCS: Final = Path(__file__).parents[3] / "docs" / "streaming.md"

pytestmark = pytest.mark.anyio


# -- bounds ---------------------------------------------------------------------------------------


async def test_a_busy_anchor_holds_the_generator_up(backend: EngineBackend, gate: Gate) -> None:
    """A fast client would fill the server's memory."""
    taken = 0

    async def chunks() -> Chunks:
        nonlocal taken
        while taken < 30:
            taken += 1
            yield EXAMPLE[0]

    async with Streaming(backend) as streaming, streaming.generate(chunks()) as outputs:
        await gate.reached()
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
        assert taken == CHUNKS_WAITING_MAX + 1
        gate.opened.set()
        assert len(await read(outputs)) == taken == 30


async def test_outputs_that_nobody_reads_hold_the_model_up(
    backend: EngineBackend, monkeypatch: pytest.MonkeyPatch, model: DuplexModel
) -> None:
    """A program that forgot to read would fill its memory."""
    monkeypatch.setattr(request, "OUTPUTS_WAITING_MAX", 4)

    async def chunks() -> Chunks:
        for _ in range(10):
            yield EXAMPLE[1]

    async with Streaming(backend) as streaming, streaming.generate(chunks()) as outputs:
        await anyio.sleep(0.3)
        assert backend.engine.statistics.tasks == 2
        assert len(await read(outputs)) == 30


async def test_the_context_ends_with_a_prompt(backend: EngineBackend) -> None:
    """A long request would end in a crash, or be cut without a word."""
    closed = anyio.Event()

    async def chunks() -> Chunks:
        try:
            while True:
                yield StreamingInput([7] * 50, params(2))
        finally:
            closed.set()

    async with Streaming(backend) as streaming:
        outputs = await read(streaming.generate(chunks()))
    last = outputs[-1]
    assert (last.chunk, last.token_ids, last.finish_reason) == (5, (), "context_full")
    assert (last.computed_tokens, last.prompt_tokens, last.kv_length) == (0, 0, 255)
    assert [output.finish_reason for output in outputs[:-1]] == [None, "length"] * 5
    assert closed.is_set()


async def test_the_context_ends_amid_an_answer(backend: EngineBackend) -> None:
    """As with a prompt: what was said until then must be there."""
    chunks = given_chunks(StreamingInput([7] * 250, params(99)), EXAMPLE[0])
    async with Streaming(backend) as streaming:
        outputs = await read(streaming.generate(chunks))
    assert [output.kv_length for output in outputs if output.token_ids] == list(range(250, 257))
    assert outputs[-1].finish_reason == "context_full"
    assert {output.chunk for output in outputs} == {0}


# -- slots ----------------------------------------------------------------------------------------


async def test_requests_queue_for_slots_with_everybody_else(model: DuplexModel) -> None:
    """A request would be put into a session's slot, or overtake those who wait."""
    numbers = iter(range(99))
    workers = Workers((EngineBackend(model),))
    admission = Admission(
        workers.pool, clock_ns=lambda: 0, new_ticket_id=lambda: f"ticket_{next(numbers)}"
    )
    leases: list[Any] = []
    for _ in range(4):  # Sessions.
        admission.enter(
            "audio",
            on_leased=leases.append,
            on_moved=lambda _: None,
            on_cancelled=lambda: None,
            on_refused=lambda _: None,
        )
    done: list[str] = []

    async def ask(streaming: Streaming, name: str) -> None:
        outputs = await read(streaming.generate(given_chunks(EXAMPLE[0]), request_id=name))
        done.append(name if outputs else "nothing")

    async with Streaming(workers, admission=admission) as streaming:
        async with anyio.create_task_group() as tasks:
            for name in ("first", "second"):
                tasks.start_soon(ask, streaming, name)
                await anyio.wait_all_tasks_blocked()
            assert (admission.queue_length, done) == (2, [])
            assert {ticket.ticket.mode for ticket in admission.tickets()} == {"transcription"}
            with anyio.move_on_after(0.01):
                await anext(streaming.generate(given_chunks(EXAMPLE[0])))
            assert admission.queue_length == 2, "who gave up still waits"
            ticket = admission.tickets()[1].ticket
            admission.release(leases.pop())
        assert sorted(done) == ["first", "second"]
        assert ticket.ticket_id not in [place.ticket_id for place in admission.places()]
        admission.drain()
        with pytest.raises(Refused, match="service_unavailable"):
            await read(streaming.generate(given_chunks(EXAMPLE[0])))
    assert workers.pool.counts.leased == 3


async def test_a_request_counts_as_what_it_says(model: DuplexModel) -> None:
    """Whoever waits behind a chat would be told a minute, or behind a dictation seconds."""
    workers = Workers((EngineBackend(model),))
    for _ in range(4):
        workers.pool.lease()
    admission = Admission(workers.pool, clock_ns=lambda: 0, new_ticket_id=lambda: "ticket_1")
    async with Streaming(workers, admission=admission, mode="chat") as streaming:
        outputs = streaming.generate(given_chunks(EXAMPLE[0]))
        await anyio.wait_all_tasks_blocked()
        assert [ticket.ticket.mode for ticket in admission.tickets()] == ["chat"]
        await outputs.aclose()


async def test_who_is_taken_out_of_the_queue_is_told(model: DuplexModel) -> None:
    """An operator's word would leave the request waiting for ever."""
    workers = Workers((EngineBackend(model),))
    for _ in range(4):
        workers.pool.lease()
    admission = Admission(workers.pool, clock_ns=lambda: 0, new_ticket_id=lambda: "ticket_1")
    async with Streaming(workers, admission=admission) as streaming:
        outputs = streaming.generate(given_chunks(EXAMPLE[0]))
        await anyio.wait_all_tasks_blocked()
        assert admission.cancel("ticket_1")
        with pytest.raises(BackendError, match="out of the queue"):
            await anext(outputs)


async def test_no_slot_will_come(model: DuplexModel) -> None:
    """A request would wait for a model that is gone."""
    workers = Workers((EngineBackend(model),))
    lease = workers.pool.lease()
    assert lease is not None
    workers.pool.release(lease, condemned=True)
    async with Streaming(workers) as streaming:
        with pytest.raises(Refused) as refused:
            await anext(streaming.generate(given_chunks(EXAMPLE[0])))
    assert refused.value.code is ErrorCode.SERVICE_UNAVAILABLE


# -- failures -------------------------------------------------------------------------------------


async def test_a_model_that_fails_ends_the_request_alone(
    backend: EngineBackend, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """One hiccup would take the model from everybody."""
    gate.opened.set()
    gate.error = RuntimeError("no more memory")
    async with Streaming(backend) as streaming:
        with pytest.raises(BackendError, match="chunk 0 failed"):
            await read(streaming.generate(given_chunks(*EXAMPLE)))
        gate.error = None
        assert len(await read(streaming.generate(given_chunks(*EXAMPLE)))) == 6


async def test_a_prompt_that_is_malformed_names_its_part(backend: EngineBackend) -> None:
    """A program could not find which of its chunks is broken."""
    chunks = given_chunks(EXAMPLE[0], StreamingInput(["hm", Sound(pcm=bytes(10))]))
    async with Streaming(backend) as streaming:
        with pytest.raises(BackendError, match=r"prompt\[1\].pcm has 2.5 samples"):
            await read(streaming.generate(chunks))


async def test_a_model_that_is_gone(model: DuplexModel) -> None:
    """A request on a worker that was given up would wait for ever."""
    backend = EngineBackend(model)
    async with Streaming(backend) as streaming:
        await backend.aclose()
        with pytest.raises(BackendGone):
            await read(streaming.generate(given_chunks(EXAMPLE[0])))


@pytest.mark.parametrize("other", [EngineBackend(FakeModel()), ScriptedBackend()])
async def test_a_model_that_takes_no_streaming_input(other: Any) -> None:
    """Its slot would be lost with the first request."""
    workers = Workers((other,))
    async with Streaming(workers) as streaming:
        with pytest.raises(BackendError, match="takes no streaming input"):
            await read(streaming.generate(given_chunks(EXAMPLE[0])))
        with pytest.raises(BackendError, match="takes no streaming input"):
            streaming.token_id("<unit>")
    assert workers.pool.leases == ()


async def test_a_call_that_hangs_condemns_its_slot(
    model: DuplexModel, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that a hung call writes to would be lent to somebody else (B4)."""
    monkeypatch.setattr(request, "CLOSE_WAIT_S", 0.05)
    workers = Workers((EngineBackend(model),))
    async with Streaming(workers) as streaming:
        outputs = streaming.generate(given_chunks(*EXAMPLE))
        await gate.reached()
        await outputs.aclose()
        assert workers.pool.counts.condemned == 4
        assert workers.pool.leases == ()
        gate.opened.set()


async def test_misuse_is_told(backend: EngineBackend) -> None:
    """Two requests would be mixed up, or one wait where nothing runs."""
    streaming = Streaming(backend)
    with pytest.raises(LocalProtocolError, match="within"):
        streaming.generate(given_chunks())
    async with streaming:
        assert streaming.token_id("<unit>") is not None
        with pytest.raises(LocalProtocolError, match="already entered"):
            await streaming.__aenter__()
        with pytest.raises(TypeError):
            streaming.generate([EXAMPLE[0]])  # type: ignore[arg-type]
        with pytest.raises(ParameterError, match="request_id has 0 characters"):
            streaming.generate(given_chunks(), request_id="")

        async def silent() -> Chunks:
            await anyio.sleep_forever()
            yield EXAMPLE[0]

        async with aclosing(streaming.generate(silent(), request_id="a")) as outputs:
            with pytest.raises(LocalProtocolError, match="a request 'a' runs already"):
                streaming.generate(given_chunks(), request_id="a")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read, outputs)
                await anyio.wait_all_tasks_blocked()
                with pytest.raises(LocalProtocolError, match="another task waits"):
                    await anext(outputs)
                tasks.cancel_scope.cancel()
        assert len(await read(streaming.generate(given_chunks(EXAMPLE[0]), request_id="a"))) == 1


# -- deadlines ------------------------------------------------------------------------------------


async def test_sound_is_due_and_text_is_not(
    backend: EngineBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text would hold up whoever talks, or sound be answered when it is too late."""
    due_s: list[float] = []
    submit = Engine.submit

    def noted(self: Engine, steps: Any, *, due_ns: float) -> Any:
        due_s.append(due_ns / 1e9)
        return submit(self, steps, due_ns=due_ns)

    monkeypatch.setattr(Engine, "submit", noted)
    second = Sound(pcm=sound(1))
    chunks = given_chunks(
        StreamingInput("words"),
        StreamingInput(second),
        StreamingInput(("both", Sound(pcm=sound(1) + sound(2)))),
        StreamingInput([1]),
        StreamingInput("soon", due_s=0.2),
        StreamingInput(second, due_s=9),
    )
    async with Streaming(backend) as streaming:
        await read(streaming.generate(chunks, params(1)))
    assert due_s.pop() == 1, "the release"
    assert (due_s[0], due_s[3]) == (float("inf"), float("inf"))
    wanted = (1, 3, 0.2, 9)  # Two seconds of sound that came with the one before came early.
    for found, most in zip((due_s[1], due_s[2], due_s[4], due_s[5]), wanted, strict=True):
        assert most - 2 < found <= most


# -- prompts --------------------------------------------------------------------------------------

PICTURE, SOUND = Picture(jpeg=b"\xff\xd8"), Sound(pcm=bytes(4))


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("words", (Text(text="words"),)),
        (Text(text="words"), (Text(text="words"),)),
        ([1, 2, 3], (TokenIds(ids=(1, 2, 3)),)),
        ((1, [2, 3], TokenIds(ids=(4,)), 5), (TokenIds(ids=(1, 2, 3, 4, 5)),)),
        (SOUND, (SOUND,)),
        (
            [1, "a", SOUND, PICTURE, [2]],
            (TokenIds(ids=(1,)), Text(text="a"), SOUND, PICTURE, TokenIds(ids=(2,))),
        ),
        ([], ()),
    ],
)
async def test_prompts_of_every_kind(prompt: Any, parts: Any) -> None:
    """Ids would be fed as text, or in another order."""
    assert parts_of(prompt) == StreamingInput(prompt).parts == parts


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (None, "prompt is a NoneType"),
        (b"bytes", r"prompt is a bytes"),
        (7, "prompt is a int"),
        ({"a": 1}, "prompt is a dict"),
        ([1.5], r"prompt\[0\] is a float"),
        ([1, True], r"prompt\[1\] is a bool"),
        (["a", None], r"prompt\[1\] is a NoneType"),
        ([b"bytes"], r"prompt\[0\] is a bytes"),
        ([[1, "a"]], r"prompt\[0\] is a list"),
    ],
)
async def test_what_is_no_prompt(prompt: Any, text: str) -> None:
    """A mistake in a program would surface in the model's thread."""
    with pytest.raises(TypeError, match=text):
        StreamingInput(prompt)


async def test_what_is_due_is_in_the_future() -> None:
    """A deadline of nothing would be ahead of everybody."""
    for due_s in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="due_s"):
            StreamingInput("a", due_s=due_s)


# -- the documentation ----------------------------------------------------------------------------


async def test_the_documented_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """A program copied out of the documentation does not run."""
    (snippet,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    body, call, _ = snippet.partition("anyio.run(main)")
    assert call
    names: dict[str, Any] = {}
    exec(body, names)
    await names["main"]()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["0", "1", "1", "2"]
    assert [line[2] for line in lines] == ["length", "None", "length", "length"]
    assert [int(line[3]) for line in lines][2:] == [1, 2]
