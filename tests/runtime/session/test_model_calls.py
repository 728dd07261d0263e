"""A session's calls: what comes too late does nothing, and opening is tried again."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import attrs
import pytest

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.limits import CLEANUP_WAIT_S
from protocol.values.model import (
    ChatConfig,
    Cut,
    DuplexConfig,
    Finalized,
    Message,
    Opened,
    Opening,
    Prefill,
    Text,
    Turn,
    TurnChunk,
    TurnResult,
    Unit,
    UnitResult,
    Voice,
)
from runtime.model.backends.base import (
    OPEN_TRIES,
    BackendError,
    BackendGone,
    BackendInfo,
    BackendRefused,
    ContextFull,
    Emit,
    ignore,
)
from runtime.model.backends.scripted import Call, ScriptedBackend
from runtime.session.model_calls import OPEN_S_MAX, RELEASE_WAIT_S, ModelCalls
from runtime.slots.admission import Admission
from runtime.slots.workers import Lease, Workers
from tests.sessions.in_memory import close_frame, init_frame, on_virtual_time, world

OPENING: Final = Opening(
    instructions="", voice=Voice(llm_pcm=b"", tts_pcm=b""), config=DuplexConfig(), seed=1
)
UNIT: Final = Unit(index=0, pcm=b"", frames=(), force_listen=False, max_slice_nums=1)
TURN: Final = Turn(
    index=0,
    messages=(Message(role="user", content=(Text(text="hello"),)),),
    config=ChatConfig(),
    speech=None,
    max_slice_nums=1,
    use_image_id=False,
    omni=False,
    thinking=False,
    seed=1,
)
RESULT: Final = UnitResult(index=0, is_listen=True, kv_length=1)
FINALIZED: Final = Finalized(index=0, kv_length=1)
PREFILL: Final = Prefill(index=0, input_tokens=1, input_hash="")
CHUNK: Final = TurnChunk(index=0, step=0, text="late", pcm=b"", token_ids=(0,), codec_ids=())
ANSWER: Final = TurnResult(index=0, text="late", reason="turn_end", generated_tokens=1, kv_length=1)


class Stubborn:
    """A backend of one slot whose calls end when the test says so, cancelled or not.

    It stands for one whose calls run in threads. `hangs` names the call that does; `outcome` is
    what it ends with, None for what it should.
    """

    def __init__(self) -> None:
        self.info: BackendInfo = attrs.evolve(ScriptedBackend(slots=1).info)
        self.opened = Opened(prompt_length=1)
        self.hangs = ""
        self.outcome: Exception | None = None
        self.go = anyio.Event()
        self.ended = anyio.Event()
        self.calls: list[str] = []

    async def _do(self, name: str) -> None:
        self.calls.append(name)
        if name == self.hangs:
            with anyio.CancelScope(shield=True):
                await self.go.wait()
            self.ended.set()
            if self.outcome is not None:
                raise self.outcome

    async def open(self, opening: Opening, *, slot: int) -> Stubborn:
        await self._do("open")
        return self

    async def chat(self, *, slot: int) -> Stubborn:
        await self._do("chat")
        return self

    async def run(
        self, call: Unit | Turn, cut: Cut | None = None, *, emit: Emit = ignore
    ) -> UnitResult | TurnResult:
        if isinstance(call, Unit):
            await self._do("unit")
            return RESULT
        await self._do("prefill")
        emit(PREFILL)
        await self._do("generate")
        emit(CHUNK)
        return ANSWER

    def interrupt(self, index: int = 0) -> None:
        self.calls.append("interrupt")

    async def finalize(self, index: int, *, interrupted: bool) -> Finalized:
        await self._do("finalize")
        return FINALIZED

    async def rollback(self, index: int) -> None:
        await self._do("rollback")

    async def release(self) -> None:
        await self._do("release")


class Desk:
    """One session's calls on two workers of one slot each, and what was posted."""

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self.backends = [Stubborn(), Stubborn()]
        self.workers = Workers(self.backends)
        self.posted: list[ev.Event] = []
        self.admission = Admission(
            self.workers.pool,
            clock_ns=lambda: int(anyio.current_time() * 1e9),
            new_ticket_id=lambda: "ticket_000000000000",
        )
        self.calls = ModelCalls(
            workers=self.workers, admission=self.admission, inbox=self, tasks=tasks
        )

    def now_ns(self) -> int:
        return 0

    def post(self, event: ev.Event) -> None:
        self.posted.append(event)

    step_or_post = post

    def take(self) -> list[str]:
        """What was posted since the last time, by name."""
        names = [type(event).__name__ for event in self.posted]
        self.posted.clear()
        return names

    def lease(self) -> Lease:
        """Have a slot leased to the session."""
        leases: list[Lease] = []
        self.admission.enter(
            "video",
            on_leased=leases.append,
            on_moved=lambda _: None,
            on_cancelled=lambda: None,
            on_refused=lambda _: None,
        )
        self.calls.hold(leases[0])
        return leases[0]


@asynccontextmanager
async def desk() -> AsyncIterator[Desk]:
    """A session's calls; what still hangs at the end is let go, and its slot given back."""
    async with anyio.create_task_group() as tasks:
        made = Desk(tasks)
        try:
            yield made
        finally:
            for backend in made.backends:
                backend.go.set()
            if made.calls.lease is not None:
                made.calls.perform(ef.Release(lease=1, condemn=False))


async def settle() -> None:
    """Let all that can happen now happen."""
    await anyio.wait_all_tasks_blocked()


async def open_session(it: Desk) -> None:
    it.calls.perform(ef.OpenBackend(lease=1, opening=OPENING))
    await settle()


async def start_unit(it: Desk) -> None:
    await open_session(it)
    it.calls.perform(ef.StartUnit(unit=UNIT))


async def finalize(it: Desk) -> None:
    await open_session(it)
    it.calls.perform(ef.StartFinalize(index=0, interrupted=False))


async def roll_back(it: Desk) -> None:
    await open_session(it)
    it.calls.perform(ef.Rollback(index=0))


async def start_turn(it: Desk) -> None:
    it.calls.perform(ef.StartTurn(lease=1, turn=TURN))


HANGING: Final[dict[str, Callable[[Desk], Awaitable[None]]]] = {
    "open": open_session,
    "unit": start_unit,
    "finalize": finalize,
    "rollback": roll_back,
    "chat": start_turn,
    "prefill": start_turn,
    "generate": start_turn,
}
OUTCOMES: Final = [
    None,
    BackendError("late"),
    ContextFull("late"),
    BackendGone("late"),
    RuntimeError("late"),
]


def fresh(outcome: Exception | None) -> Exception | None:
    """The same once more, without a history of its own."""
    return None if outcome is None else type(outcome)(*outcome.args)


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda it: type(it).__name__)
@pytest.mark.parametrize("call", HANGING)
def test_what_ends_after_its_lease_was_condemned_does_nothing(
    call: str, outcome: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A result of the worker that hung reaches the session on its next one, or ends it."""

    async def body() -> None:
        async with desk() as it:
            first = it.lease()
            backend, other = it.backends
            backend.hangs, backend.outcome = call, fresh(outcome)
            await HANGING[call](it)
            await settle()
            assert backend.calls[-1] == call
            it.take()
            it.calls.perform(ef.Release(lease=1, condemn=True))
            await settle()
            assert it.take() == ["BackendReleased"]
            assert it.workers.pool.counts.condemned == 1

            second = it.lease()
            assert (second.worker, second.generation) == (1, first.generation + 1)
            other.hangs = "generate"
            it.calls.perform(ef.StartTurn(lease=2, turn=TURN))
            await settle()
            assert it.take() == ["SlotLeased", "TurnPrefilled"]
            backend.go.set()
            await settle()
            assert backend.ended.is_set()
            assert it.take() == []
            assert it.calls.lease == second
            if call in ("open", "chat") and outcome is None:
                assert backend.calls[-1] == "release", "what came too late is let go"

            other.go.set()
            await settle()
            assert it.take() == ["TurnProgress", "TurnDone"]
            it.calls.perform(ef.Release(lease=1, condemn=False))
            await settle()
            assert it.take() == ["BackendReleased"]
            assert it.workers.pool.counts.free == 1

    with caplog.at_level(logging.CRITICAL):
        on_virtual_time(body)


def test_a_release_that_hangs_delays_no_later_one() -> None:
    """After one hung release each further turn of that chat costs its slot too."""

    async def body() -> None:
        async with desk() as it:
            backend, _ = it.backends
            backend.hangs = "release"
            it.lease()
            await start_turn(it)
            await settle()
            it.calls.perform(ef.Release(lease=1, condemn=False))
            await anyio.sleep(RELEASE_WAIT_S + 0.1)
            assert it.take()[-1] == "BackendReleased"
            assert it.workers.pool.is_condemned(0)

            began_s = anyio.current_time()
            it.lease()
            await start_turn(it)
            await settle()
            it.calls.perform(ef.Release(lease=1, condemn=False))
            await settle()
            assert it.take()[-1] == "BackendReleased"
            assert anyio.current_time() == began_s
            assert not it.workers.pool.is_condemned(1)
            backend.go.set()
            await settle()
            assert it.take() == []

    on_virtual_time(body)


def test_a_late_cut_is_not_the_next_turn_s() -> None:
    """A question that was asked after an interruption is not answered."""

    async def body() -> None:
        async with desk() as it:
            it.calls.perform(ef.CutTurn(index=0))
            it.lease()
            await start_turn(it)
            it.calls.perform(ef.CutTurn(index=0))
            await settle()
            assert "interrupt" in it.backends[0].calls
            it.calls.perform(ef.Release(lease=1, condemn=False))
            await settle()
            it.backends[0].calls.clear()
            it.calls.perform(ef.CutTurn(index=0))
            it.lease()
            await start_turn(it)
            await settle()
            assert "interrupt" not in it.backends[0].calls

    on_virtual_time(body)


def test_a_hung_call_is_cancelled_with_its_lease() -> None:
    """The task of each call that ever hung stays, and the model with it."""

    async def body() -> None:
        hang = Call(fault="hang")
        backend = ScriptedBackend(slots=1, opening=lambda _: hang)
        async with world(backend) as server:
            peer = server.connect()
            await peer.heard("session.queue_done")
            peer.send(init_frame())
            await anyio.sleep(1)
            peer.vanish()
            await anyio.sleep(CLEANUP_WAIT_S + 1)
            assert server.server.readiness == "condemned"
            assert not backend.held_slots, "a cancelled opening leaves its slot empty"

    on_virtual_time(body)


# -- opening --------------------------------------------------------------------------------------


class Opens(ScriptedBackend):
    """Fails at opening as often as it is told to, and notes when it was asked."""

    def __init__(self, *errors: Exception, takes_s: float = 0.0) -> None:
        super().__init__(slots=1)
        self.errors, self.takes_s = list(errors), takes_s
        self.times: list[float] = []

    async def open(self, opening: Opening, *, slot: int) -> Any:
        self.times.append(anyio.current_time())
        await anyio.sleep(self.takes_s)
        if self.errors:
            raise self.errors.pop(0)
        return await super().open(opening, slot=slot)


@pytest.mark.parametrize("error", [BackendError, BackendGone])
def test_opening_is_tried_again(error: type[Exception]) -> None:
    """A remote that restarts costs the client its place in the queue."""

    async def body() -> None:
        backend = Opens(error("busy"), error("busy"))
        async with world(backend) as server:
            peer = server.connect()
            await peer.heard("session.queue_done")
            peer.send(init_frame())
            await peer.heard("session.created")
            assert backend.times == [0, 0.25, 0.75]

    on_virtual_time(body)


def test_opening_is_not_tried_for_ever() -> None:
    """A client and its slot wait for a model that cannot be had."""

    async def body() -> None:
        backend = Opens(*(BackendError("busy") for _ in range(9)))
        async with world(backend) as server:
            peer = server.connect()
            await peer.heard("session.queue_done")
            peer.send(init_frame())
            await peer.over()
            assert peer.closed == (1013, "worker_connect_failed")
            assert len(backend.times) == OPEN_TRIES

    on_virtual_time(body)


def test_opening_that_fails_slowly_is_not_tried_again() -> None:
    """Three tries of six seconds each keep the client, its slot and all behind it."""

    async def body() -> None:
        backend = Opens(*(BackendError("slow") for _ in range(9)), takes_s=OPEN_S_MAX)
        async with world(backend) as server:
            peer = server.connect()
            await peer.heard("session.queue_done")
            peer.send(init_frame())
            await peer.over()
            assert peer.closed == (1013, "worker_connect_failed")
            assert backend.times == [0]

    on_virtual_time(body)


@pytest.mark.parametrize("name", ["chat", "prefill"])
def test_a_turn_that_is_refused_is_told_why(name: str) -> None:
    """A client could not know which of its settings the model cannot honour."""

    async def body() -> None:
        async with desk() as it:
            backend = it.backends[it.lease().worker]
            backend.hangs, backend.outcome = name, BackendRefused("no thinking")
            backend.go.set()
            await start_turn(it)
            await settle()
            assert it.posted[-1] == ev.TurnFailed(at_ns=0, index=0, refused="no thinking")

    on_virtual_time(body)


@pytest.mark.parametrize("error", [ContextFull, BackendRefused])
def test_opening_that_cannot_work_is_not_tried_again(error: type[Exception]) -> None:
    """A client waits longer to hear why."""

    async def body() -> None:
        backend = Opens(error("too long"))
        async with world(backend) as server:
            peer = server.connect()
            await peer.heard("session.queue_done")
            peer.send(init_frame())
            reported = await peer.heard("error")
            assert backend.times == [0]
            if error is BackendRefused:
                assert reported["error"]["message"] == "too long"

    on_virtual_time(body)


@pytest.mark.parametrize("during", ["a try", "the pause"])
@pytest.mark.parametrize("way", ["close", "vanish"])
def test_a_session_that_ends_is_not_opened_again(during: str, way: str) -> None:
    """A slot is held for a client that has left, or opened and released at once (B4)."""

    async def body() -> None:
        takes_s = 1.0 if during == "a try" else 0.0
        backend = Opens(*(BackendError("busy") for _ in range(9)), takes_s=takes_s)
        async with world(backend) as server:
            peer = server.connect()
            await peer.heard("session.queue_done")
            peer.send(init_frame())
            await anyio.sleep(0.1)
            if way == "close":
                peer.send(close_frame())
            else:
                peer.vanish()
            await server.quiet()
            assert backend.times == [0]
            assert anyio.current_time() == pytest.approx(takes_s or 0.1)
            assert server.server.workers.pool.counts.free == 1

    on_virtual_time(body)


def test_a_connection_that_breaks_ends_the_tries_before_the_release() -> None:
    """The model is released while it is being opened (B4)."""

    async def body() -> None:
        backend = Opens(BackendError("busy"), takes_s=0.2)
        async with world(backend) as server:
            broken = server.connect()
            await broken.heard("session.queue_done")
            broken.send(init_frame())
            await anyio.sleep(0.1)
            broken.break_down()
            await server.quiet()
            await server.activate()
            assert backend.times == [0, 0.2]

    on_virtual_time(body)


def test_a_session_that_is_cut_off_is_released_by_its_model() -> None:
    """The model keeps what it knew of the session, and its slot is taken for one that hangs."""

    async def body() -> None:
        began_s = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            it = Desk(tasks)
            it.lease()
            await open_session(it)
            it.take()
            tasks.cancel_scope.cancel()
            it.calls.perform(ef.Release(lease=1, condemn=False))
        assert it.take() == ["BackendReleased"]
        assert it.backends[0].calls == ["open", "release"]
        assert anyio.current_time() == began_s
        counts = it.workers.pool.counts
        assert (counts.free, counts.condemned) == (2, 0)

    on_virtual_time(body)
