"""The model of a simulation: scripted, on virtual time, failing as drawn, and watchful.

What a client sends carries its number (`mark`), and what the model says carries the number of whom
it was opened for. So sound, words, settings or voices of one session in another are seen at once:
here, for what reaches the model, and at the clients, for what it says.

Around `ScriptedBackend`, which itself holds callers to the rules of calls, this one

- compares each opening with what the client of that number has sent;
- checks that each second of sound is of the session's own client;
- hangs, for ever or for long, fails, crashes with all its sessions, and dies for good, by the dice;
- says in its words all that it was fed before (`remembered`), so that a rebuild from another past
  is heard;
- counts what can have cost a slot.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import cache
from hashlib import blake2b
from random import Random
from typing import Any, Final, TypeVar

import anyio
import attrs
import numpy as np
from anyio.lowlevel import checkpoint

from protocol.values import effects as ef
from protocol.values.model import (
    Chunk,
    ChunkResult,
    Cut,
    Finalized,
    Opened,
    Opening,
    PastUnit,
    Text,
    Tool,
    Turn,
    TurnResult,
    Unit,
    UnitResult,
)
from protocol.values.requests import Init, ReferenceAudio
from runtime.model.backends.base import BackendError, BackendGone, BackendInfo, Emit, ignore
from runtime.model.backends.scripted import Call, ScriptedBackend, Speaks, Step, calling
from runtime.model.backends.scripted_chat import Answer, Fault, Transcribed

CLIENTS_MAX: Final = 4096
"""Numbers of clients below this are exact as a share of one."""
SPOKEN_SAMPLES: Final = 240
"""Of a second of speech: enough to say whose it is."""
TAG: Final = re.compile(r"<(\d+)>")
SAID: Final = re.compile(r"<\d+> (\d+)")
"""The number of what is said: of a unit in its session, a piece in its turn, a second in its
utterance."""

Report = Callable[[str], None]
T = TypeVar("T")


@cache
def block(number: int, samples: int) -> bytes:
    """Make sound that says a client's number in each sample."""
    return np.full(samples, number / CLIENTS_MAX, "<f4").tobytes()


def mark(number: int, counter: int, samples: int) -> bytes:
    """Make the sound of a client's next append: its number, and below zero a counter."""
    first = np.array([-(1 + counter) / CLIENTS_MAX], "<f4").tobytes()
    return first + block(number, samples)[len(first) :]


def strangers(pcm: bytes, number: int) -> bool:
    """Say whether there is somebody else's sound in this."""
    samples = np.frombuffer(pcm, "<f4")
    return bool(np.any((samples >= 0) & (samples != np.float32(number / CLIENTS_MAX))))


def voiced(pcm: bytes) -> bytes:
    """Leave silence out of sound."""
    samples = np.frombuffer(pcm, "<f4")
    return samples[samples != 0].tobytes()


@attrs.define
class Babble:
    """Finds speech by the clock of the sound: its content says whose it is, and nothing else."""

    is_slow = False
    frame_ms = 100
    window = 3
    start = 2
    tail_ms = 0
    samples: int = 0

    def classify(self, effect: ef.DetectSpeech) -> Iterator[bool]:
        """Have 700 ms of speech in 2.3 s, which fits into no second."""
        frame = effect.rate_hz * self.frame_ms // 1000
        before = self.samples // frame
        self.samples += len(effect.data) // 2
        for number in range(before, self.samples // frame):
            yield number % 23 < 7


def words(number: int, index: int, past: str) -> str:
    """Write what the model says to a client in a unit."""
    return f"<{number}> {index}.{past} "


def remembered(past: str, unit: Unit, *, interrupted: bool) -> str:
    """Name what a model knows after a unit; `past` names what it knew before, first empty."""
    made = blake2b(f"{past} {unit.index} {unit.force_listen} {interrupted}".encode(), digest_size=4)
    for part in (unit.pcm, *unit.frames):
        made.update(part)
    return made.hexdigest()


@attrs.frozen(kw_only=True)
class ModelPlan:
    """What goes wrong with the model while faults are on, out of 1000 calls each.

    Attributes:
        slots: of each worker.
        workers: how many there are.
        replaces: a condemned worker is replaced.
        load_s: what loading a replacement takes, at most.
        load_fails: replacements that cannot be loaded.
        fails: units, turns and openings that fail.
        broken: finalizes and rollbacks that fail.
        gone: calls in which the worker dies; only the session is lost where none is replaced.
        hangs: calls that hang.
        late_s: after so long a hang ends, with a result or an error; None: never.
        full: units and openings that do not fit.
        slow: units that take longer than a second.
        release_fails: releases that fail.
        release_s: what a release takes.
        opening_s: what opening takes.
        can_rollback: whether a failed unit can be undone.
        crashes_s: moments at which all sessions are lost.
        down_s: how long nothing can be opened after a crash.
        killed_by_cuts: units that are cut, in which the worker dies.
        deaths_s: moments at which a worker dies.
        drains_s: moments at which a worker is drained, if another one serves.
    """

    slots: int
    workers: int = 1
    replaces: bool = True
    load_s: float = 3.0
    load_fails: int = 0
    fails: int = 0
    broken: int = 0
    gone: int = 0
    hangs: int = 0
    late_s: float | None = None
    full: int = 0
    slow: int = 0
    release_fails: int = 0
    release_s: float = 0.01
    opening_s: float = 0.2
    can_rollback: bool = True
    crashes_s: tuple[float, ...] = ()
    down_s: float = 0.0
    killed_by_cuts: int = 0
    deaths_s: tuple[float, ...] = ()
    drains_s: tuple[float, ...] = ()


@attrs.define(kw_only=True)
class Fleet:
    """What all workers of a simulation share.

    Attributes:
        plan: what goes wrong.
        seed: of the dice.
        report: told of what must not be.
        sent: the inits that each client has sent so far; the openings must be among them.
        padded: clients whose sound may have silence in it that they did not send.
        costs: how often something was done that may cost a slot.
        workers: all there have been.
        excused: the seeds of sessions whose rebuild may fail: opening or a call of it did.
        hanging: calls that hang now.
        is_sound: nothing goes wrong any more.
    """

    plan: ModelPlan
    seed: str
    report: Report
    sent: dict[int, list[Init]] = attrs.Factory(dict)
    padded: set[int] = attrs.Factory(set)
    costs: Counter[str] = attrs.Factory(Counter)
    workers: list[SimulatedBackend] = attrs.Factory(list)
    excused: set[int] = attrs.Factory(set)
    hanging: int = 0
    is_sound: bool = False

    @property
    def alive(self) -> int:
        """Workers that are neither dead nor closed."""
        return sum(not worker.is_gone for worker in self.workers)

    def make(self) -> SimulatedBackend:
        """Make another worker."""
        worker = SimulatedBackend(self, len(self.workers))
        self.workers.append(worker)
        return worker

    async def load(self, place: int) -> SimulatedBackend:
        """Make a worker in the place of one that was condemned, after a while; or fail to."""
        dice = self.dice("load", place, len(self.workers), anyio.current_time())
        await anyio.sleep(dice.random() * self.plan.load_s)
        if self.draw(dice, fail=self.plan.load_fails):
            raise BackendError("there is no memory for it")
        return self.make()

    def dice(self, *names: object) -> Random:
        """Make the dice of one call: the same for the same call."""
        return Random(f"{self.seed}/{names}")

    def draw(self, dice: Random, **chances: int) -> str | None:
        """Draw what goes wrong: each name with its chance out of 1000."""
        number = dice.randrange(1000)
        for name, chance in chances.items():
            if number < chance and not self.is_sound:
                return name
            number -= chance
        return None


class SimulatedBackend:
    """A `Backend` with chat: one worker, which may die.

    Args:
        fleet: whose.
        number: among all that the fleet has made.
    """

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.fleet, self._number, self._calls = fleet, number, 0
        self._gone = anyio.Event()
        self._plan, plan = fleet.plan, fleet.plan
        self._draw, self.dice, self._report = fleet.draw, fleet.dice, fleet.report
        self._down_until_s = 0.0
        self._in_flight: dict[anyio.CancelScope, None] = {}
        self.crashes = 0
        self.scripted = ScriptedBackend(
            self._step,
            chat=self._answer,
            transcription=self._hear,
            slots=plan.slots,
            can_rollback=plan.can_rollback,
            rebuild=Call(duration_s=0.01),
            duplex_tools=True,
            calls=self._calls_tools,
        )

    @property
    def info(self) -> BackendInfo:
        """What it is."""
        return self.scripted.info

    def crash(self) -> None:
        """Lose every session; nothing can be opened for a while."""
        self.crashes += 1
        self.fleet.costs["crashes"] += 1
        self._down_until_s = anyio.current_time() + self._plan.down_s
        for scope in tuple(self._in_flight):
            scope.cancel()

    @property
    def is_gone(self) -> bool:
        """Whether it is dead or closed."""
        return self._gone.is_set()

    async def wait_gone(self) -> None:
        """Wait until it is dead or closed."""
        await self._gone.wait()

    async def aclose(self) -> None:
        """Close it."""
        self._gone.set()

    def die(self) -> None:
        """Lose everything, for good."""
        if not self.is_gone:
            self.fleet.costs["deaths"] += 1
            self._gone.set()
            for scope in tuple(self._in_flight):
                scope.cancel()

    def draw_death(self, name: str, chance: int) -> float | None:
        """Draw whether it dies in its next call, and after how many seconds."""
        self._calls += 1
        dice = self.dice("gone", name, self._number, self._calls)
        return dice.random() / 2 if self._draw(dice, gone=chance) else None

    # -- what is scripted -----------------------------------------------------------------------

    def _step(self, unit: Unit, seed: int) -> Step:
        plan, dice = self._plan, self.dice("unit", seed, unit.index)
        fault = self._draw(dice, fail=plan.fails, context_full=plan.full)
        # Its own text is all that a script knows of the session: the rest says `SimulatedSession`.
        speech = Speaks(text="", pcm=b"", end_of_turn=dice.random() < 0.3)
        slow = dice.randrange(1000) < plan.slow and not self.fleet.is_sound
        return Step(
            speech=speech if dice.random() < 0.5 else None,
            fault=_fault(fault),
            prefill_s=0.02 + dice.random() / 20,
            generate_s=(1.5 if slow else 0.1) + dice.random() / 3,
            steps=1 + dice.randrange(6),
            finalize=self._call(self.dice("finalize", seed, unit.index)),
            rollback=self._call(self.dice("rollback", seed, unit.index)),
        )

    def _calls_tools(self, step: Step, unit: Unit, tools: Sequence[Tool]) -> Step:
        """Call the client's tool every now and then, with the client's number; it may fail."""
        step = attrs.evolve(step, silent_s=0.0)
        dice = self.dice("silent", tools[0].description, unit.index)
        if dice.random() < 0.05:
            return attrs.evolve(step, silent_fails=True)
        name = "door" if dice.random() < 0.1 else ""
        every = 1 if dice.random() < 0.6 else unit.index + 1
        arguments = f'{{"of": "{tools[0].description}"}}'
        return calling(name, arguments, at=0, every=every)(step, unit, tools)

    def _call(self, dice: Random) -> Call:
        fault = self._draw(dice, fail=self._plan.broken)
        return Call(duration_s=dice.random() / 25, fault=_fault(fault))

    def _answer(self, turn: Turn) -> Answer:
        plan, dice = self._plan, self.dice("turn", turn.seed, turn.index)
        said = "".join(part.text for part in turn.messages[-1].content if isinstance(part, Text))
        tag = TAG.search(said)
        fault = self._draw(dice, fail=plan.fails, context_full=plan.full)
        count = dice.randrange(1, 20)
        tokens = tuple(f"{tag.group(0)} {step} " if tag else "?" for step in range(count))
        return Answer(
            tokens=tokens,
            prefill_s=dice.random() / 4,
            token_s=0.02 + dice.random() / 10,
            samples=SPOKEN_SAMPLES,
            fault=_fault(fault),
            fault_at=dice.randrange(len(tokens) + 1),
        )

    def _hear(self, chunk: Chunk) -> Transcribed:
        plan, dice = self._plan, self.dice("chunk", chunk.seed, chunk.utterance, chunk.index)
        samples = np.frombuffer(chunk.pcm, "<f4")
        heard = samples[samples != 0]
        number = round(float(np.median(heard)) * 32_768) - 1 if len(heard) else -1
        fault = self._draw(dice, fail=plan.fails, context_full=plan.full)
        return Transcribed(
            text=f"<{number}> {chunk.index} " if number >= 0 else "",
            takes_s=0.02 + dice.random() / 5,
            fault=_fault(fault),
        )

    # -- calls ----------------------------------------------------------------------------------

    async def call(self, name: str, dice: Random, body: Callable[[], Awaitable[T]]) -> T:
        """Run a call, unless it hangs, or the model crashes or dies under it.

        Raises:
            BackendGone: it crashed, or is dead.
            BackendError: it hung, and came back with an error.
        """
        self.check_alive()
        death_s, crashes = self.draw_death(name, self._plan.gone), self.crashes
        with anyio.CancelScope() as scope:
            self._in_flight[scope] = None
            try:
                if self._draw(dice, hang=self._plan.hangs):
                    await self._hang(name, dice)
                if death_s is not None:
                    return await self._die_in(name, death_s, body)
                return await body()
            finally:
                del self._in_flight[scope]
        assert self.is_gone or self.crashes > crashes, "only a loss cancels a call"
        raise BackendGone(f"the model was lost in {name}")

    async def _die_in(self, name: str, death_s: float, body: Callable[[], Awaitable[T]]) -> T:
        """Die amid a call, or right after it; or only lose its session."""
        with anyio.move_on_after(death_s):
            done = await body()
            if not self._plan.replaces:
                return done
        self.lose(name)
        raise BackendGone(f"as was drawn: {name}")

    def lose(self, name: str) -> None:
        """Die, as was drawn, if there will be another one."""
        self.fleet.costs[f"gone in {name}"] += 1
        if self._plan.replaces:
            self.die()

    def check_alive(self) -> None:
        """See that it is not dead; raises `BackendGone`."""
        if self.is_gone:
            raise BackendGone("the worker is lost")

    async def _hang(self, name: str, dice: Random) -> None:
        self.fleet.costs[f"{name} hangs"] += 1
        self.fleet.hanging += 1
        try:
            await anyio.sleep(self._plan.late_s or float("inf"))
        finally:
            self.fleet.hanging -= 1
        if dice.random() < 0.5:
            raise BackendError(f"{name} came back late")

    async def open(self, opening: Opening, *, slot: int) -> SimulatedSession:
        """Open a session, once what it was asked with is compared with what was sent."""
        number = self._check(opening)
        dice = self.dice("open", opening.seed)

        async def open_it() -> SimulatedSession:
            await anyio.sleep(self._plan.opening_s * dice.random())
            self.check_up(opening.seed)
            if fault := self._draw(dice, fail=self._plan.fails):
                self.fleet.excused.add(opening.seed)
                raise BackendError(f"as was drawn: {fault}")
            session = await self.scripted.open(opening, slot=slot)
            return SimulatedSession(self, session, number, opening)

        return await self.call("open", dice, open_it)

    def _check(self, opening: Opening) -> int:
        tag = TAG.search(opening.instructions)
        if tag is None:
            self._report(f"B8: nobody sent the instructions {opening.instructions!r}")
            return -1
        number = int(tag.group(1))
        for init in self.fleet.sent.get(number, []):
            if init.config == opening.config and init.instructions == opening.instructions:
                break
        else:
            self._report(f"B8: client {number} did not ask for {opening.config}")
        pcms = {_voice_pcm(init) for init in self.fleet.sent.get(number, [])}
        if opening.voice.llm_pcm not in pcms:
            self._report(f"B8: client {number} was opened with a voice that it did not send")
        return number

    async def chat(self, *, slot: int) -> SimulatedTurn:
        """Take a turn."""
        self.check_alive()
        return SimulatedTurn(self, await self.scripted.chat(slot=slot), slot)

    async def transcribe(self, *, slot: int) -> SimulatedTranscript:
        """Take a transcription."""
        self.check_alive()
        return SimulatedTranscript(self, await self.scripted.transcribe(slot=slot), slot)

    def check_up(self, seed: int) -> None:
        """Raise a `BackendError` while the model is down."""
        self.check_alive()
        if anyio.current_time() < self._down_until_s and not self.fleet.is_sound:
            self.fleet.excused.add(seed)
            raise BackendError("the model is down")

    def check_unit(self, unit: Unit, number: int) -> None:
        """See that a second of sound is of the session's own client."""
        told = {int(it) for each in unit.inputs for it in TAG.findall(each.text)}
        if told - {number}:
            self._report(f"B8: unit {unit.index} of client {number} has somebody else's result")
        if strangers(voiced(unit.pcm) if number in self.fleet.padded else unit.pcm, number):
            self._report(f"B8: unit {unit.index} of client {number} has somebody else's sound")

    async def release(self, name: str, body: Callable[[], Awaitable[None]], dice: Random) -> None:
        """Give a session or a turn back; it may take long, hang or fail."""
        await anyio.sleep(self._plan.release_s)
        if self.is_gone:
            return
        if self._draw(dice, fail=self._plan.release_fails):
            self.fleet.costs[f"{name} fails"] += 1
            raise BackendError("as was drawn")
        if self._draw(dice, hang=self._plan.hangs):
            await self._hang(name, dice)
        await body()


def _fault(name: str | None) -> Any:
    """Name a fault as a script does; none of them hangs there."""
    allowed: dict[str, Fault] = {"fail": "fail", "context_full": "context_full"}
    return allowed.get(name or "")


def _voice_pcm(init: Init) -> bytes:
    return init.ref_audio.data if isinstance(init.ref_audio, ReferenceAudio) else b""


class _Tenant:
    """Who is on a slot: its calls one at a time (B4), until it is released or lost in a crash."""

    def __init__(self, backend: SimulatedBackend, scripted: Any, *names: object) -> None:
        self._backend, self._scripted, self._names = backend, scripted, names
        self._crashes = backend.crashes
        self._running: str | None = None

    async def release(self) -> None:
        """Give everything back."""
        self._begin("release")
        dice = self._backend.dice("release", *self._names)
        await self._backend.release("release", self._scripted.release, dice)

    async def _call(self, name: str, body: Callable[[], Awaitable[T]], *index: int) -> T:
        self._begin(name)
        try:
            if self._crashes != self._backend.crashes:
                raise BackendGone("lost in a crash")
            dice = self._backend.dice(name, *self._names, *index)
            return await self._backend.call(name, dice, body)
        finally:
            self._running = None

    def _begin(self, name: str) -> None:
        if self._running is not None:
            self._backend.fleet.report(f"B4: {name} while {self._running} is in flight")
        self._running = name


class SimulatedSession(_Tenant):
    """A session on the model, and whose it is."""

    def __init__(
        self, backend: SimulatedBackend, session: Any, number: int, opening: Opening
    ) -> None:
        super().__init__(backend, session, opening.seed)
        self._number, self._speaks = number, opening.config.generate_audio
        self._reached, self._past = -1, ""
        self._unit: Unit | None = None
        self._started, self._ended = set[str](), set[str]()

    def _feed(self, unit: Unit) -> None:
        """See that each call starts, and then ends once (B12)."""
        for each in unit.inputs:
            if each.kind == "started":
                self._started.add(each.call)
            elif each.kind == "result":
                if each.call not in self._started or each.call in self._ended:
                    text = f"B12: unit {unit.index} of client {self._number} ends {each.call}"
                    self._backend.fleet.report(text)
                self._ended.add(each.call)

    @property
    def opened(self) -> Opened:
        """What opening gave."""
        opened: Opened = self._scripted.opened
        return opened

    async def run(self, unit: Unit, cut: Cut | None = None) -> UnitResult:
        """Run a unit; what is said is the client's number."""
        self._backend.check_unit(unit, self._number)

        async def run() -> UnitResult:
            self._reached, self._unit = unit.index, unit
            result: UnitResult = await self._scripted.run(unit, cut)
            return result

        result = await self._call("unit", run, unit.index)
        self._feed(unit)
        if result.is_listen:
            return attrs.evolve(result, text="")  # A unit that was cut has words of a result.
        pcm = block(self._number, SPOKEN_SAMPLES) if self._speaks else b""
        return attrs.evolve(result, text=words(self._number, unit.index, self._past), pcm=pcm)

    def interrupt(self, index: int) -> None:
        """Cut unit `index`; the worker may die of it."""
        kills = self._backend.draw_death("interrupt", self._backend.fleet.plan.killed_by_cuts)
        if kills is not None and self._running == "unit":
            self._backend.lose("interrupt")
        else:
            self._scripted.interrupt(index)

    async def finalize(self, index: int, *, interrupted: bool) -> Finalized:
        """Finalize the unit."""
        unit = self._unit
        finalized: Finalized = await self._call(
            "finalize", lambda: self._scripted.finalize(index, interrupted=interrupted), index
        )
        assert unit is not None
        self._past = remembered(self._past, unit, interrupted=interrupted)
        return finalized

    async def rebuild(self, past: Sequence[PastUnit], *, exact: bool) -> Finalized:
        """Be fed a past, which must be the client's own."""
        for each in past:
            self._backend.check_unit(each.unit, self._number)
            self._feed(each.unit)
            self._past = remembered(self._past, each.unit, interrupted=each.interrupted)
        finalized: Finalized = await self._call(
            "rebuild", lambda: self._scripted.rebuild(past, exact=exact), past[0].unit.index
        )
        return finalized

    async def rollback(self, index: int) -> None:
        """Undo the unit, if it was ever begun: one that hung may have failed before."""

        async def undo() -> None:
            if self._reached == index:
                await self._scripted.rollback(index)

        await self._call("rollback", undo, index)


class SimulatedTurn(_Tenant):
    """A turn of chat on the model."""

    async def run(self, turn: Turn, cut: Cut | None = None, *, emit: Emit = ignore) -> TurnResult:
        """Feed the conversation, and answer."""
        self._backend.check_up(turn.seed)
        self._names = turn.seed, turn.index
        await self._call("prefill", checkpoint)  # It fails before it, or in the answer.
        result: TurnResult = await self._call(
            "answer", lambda: self._scripted.run(turn, cut, emit=emit)
        )
        return result

    def interrupt(self, index: int) -> None:
        """Cut it."""
        self._scripted.interrupt(index)


class SimulatedTranscript(_Tenant):
    """A transcription on the model."""

    async def run(self, chunk: Chunk, cut: Cut | None = None) -> ChunkResult:
        """Hear a second, unless it belongs to somebody else."""

        async def run() -> ChunkResult:
            self._backend.check_up(chunk.seed)
            result: ChunkResult = await self._scripted.run(chunk)
            return result

        return await self._call("chunk", run, chunk.seed, chunk.utterance, chunk.index)
