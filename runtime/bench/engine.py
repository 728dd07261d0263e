"""How many sessions an engine serves: units by the clock, batched against one at a time.

Both ways run in this process on one model, in turns, so that whatever else the machine does meets
both. A session asks for a unit each second, and for its finalize when the unit is answered. A unit
is missed that is answered more than a second after it was due, or not at all: a session that falls
`BEHIND_S` behind is given up, with the units that it had left.

Beside the clock stands the CPU time of the engine's thread: `busy_ms` a unit. It hardly depends on
what else the machine does, and a second of it has room for 1000 / `busy_ms` sessions;
`virtual` runs all of it on that clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, Protocol

import anyio
import attrs
import click
import numpy as np

from protocol.model import DuplexConfig, Opening, Unit, UnitResult, Voice

from ..backends.base import Backend
from ..engine.engine import Engine
from .material import MS, Speech, Times, sum_up

Mode = Literal["batched", "single"]
Arrival = Literal["together", "spread"]
Doing = Literal["speaking", "listening"]

MODES: Final[tuple[Mode, ...]] = ("batched", "single")
MISSED_SHARE: Final = 0.01
"""A unit in a hundred may be late."""
DUE_S: Final = 1.0
BEHIND_S: Final = 5.0
"""Five units would wait by then, and the server drops those that wait longer (B7)."""
LEAD_S: Final = 0.2
"""From all sessions being open to the first unit."""
NEAR: Final = 8
"""The search ends where the last count that was served and the first that was not are an eighth
apart: closer than runs of the same count are to each other."""
INSTRUCTIONS: Final = "Answer what you hear."
OFFSET_S: Final = 3
"""Each session is so many seconds further in what it hears than the one before."""


class EngineBench(Backend, Protocol):
    """A backend that runs on an engine of its own."""

    @property
    def engine(self) -> Engine:
        """The engine."""
        ...


@attrs.frozen(kw_only=True)
class Load:
    """What each session does.

    Attributes:
        speech: what it hears.
        seconds: units, one a second.
        doing: `speaking` makes the model speak in every unit, `listening` listen.
        tokens_max: most tokens that a speaking unit feeds.
    """

    speech: Speech
    seconds: int
    doing: Doing = "speaking"
    tokens_max: int = 19

    def opening(self, number: int) -> Opening:
        """The settings of session `number`."""
        config = DuplexConfig(
            force_listen_count=0,
            listen_prob_scale=0.0,
            length_penalty=10.0,
            max_new_speak_tokens_per_chunk=self.tokens_max + 1,
        )
        return Opening(instructions=INSTRUCTIONS, voice=Voice(), config=config, seed=number)

    def unit(self, number: int, index: int) -> Unit:
        """A unit of session `number`."""
        pcm = self.speech.second(index + OFFSET_S * number)
        return Unit(index=index, pcm=pcm, force_listen=self.doing == "listening")


@attrs.frozen(kw_only=True)
class EngineRun:
    """What became of the units of one run.

    Attributes:
        mode: batched, or one request at a time.
        arrival: when in the second units are due: all at once, or spread over it.
        sessions: at once.
        units: that were due.
        missed: of these, answered more than a second after they were due, or never.
        latency: from due to answered, of those that were answered.
        latency_finalized: from due to finalized: what a client would wait for an answer that is
            sent after its finalize instead of before.
        stages_ms: the median time of each stage of a unit; that of other sessions is in it.
        tokens_mean: text tokens that a unit fed.
        spoken: share of the answered units that spoke.
        busy_ms: CPU time of the engine's thread a unit.
        batch_mean: requests answered together.
    """

    mode: Mode
    arrival: Arrival
    sessions: int
    units: int
    missed: int
    latency: Times
    latency_finalized: Times
    stages_ms: dict[str, float]
    tokens_mean: float
    spoken: float
    busy_ms: float
    batch_mean: float

    @property
    def is_served(self) -> bool:
        """Fewer than one unit in a hundred was missed."""
        return self.missed < MISSED_SHARE * self.units


@attrs.frozen
class Answer:
    """One unit that was answered.

    Attributes:
        answered_ms: from due to answered.
        finalized_ms: from due to finalized.
        stages_us: of prefill, llm, tts and token2wav.
        tokens: that it fed.
        is_spoken: it spoke.
    """

    answered_ms: float
    finalized_ms: float
    stages_us: tuple[int, int, int, int]
    tokens: int
    is_spoken: bool

    @classmethod
    def of(cls, result: UnitResult, answered_ms: float, finalized_ms: float) -> Answer:
        """Take from a result what is summed up."""
        costs = result.costs
        return cls(
            answered_ms,
            finalized_ms,
            (costs.prefill_us, costs.llm_us, costs.tts_us, costs.token2wav_us),
            len(result.fed_ids),
            not result.is_listen,
        )


async def run_engine(
    backend: EngineBench, load: Load, *, mode: Mode, arrival: Arrival, sessions: int
) -> EngineRun:
    """Have sessions ask for units, and measure.

    Args:
        backend: on an engine of its own, with a slot for each session.
        load: what they do.
        mode: how the engine is set, for the result.
        arrival: when in the second.
        sessions: at once.
    """
    answers: list[Answer] = []
    opened = [await backend.open(load.opening(n), slot=n) for n in range(sessions)]
    before = backend.engine.statistics
    began_s = anyio.current_time() + LEAD_S

    async def ask(number: int) -> None:
        late_s = number / sessions if arrival == "spread" else 0.0
        for index in range(load.seconds):
            due_s = began_s + late_s + index
            await anyio.sleep_until(due_s)
            if anyio.current_time() - due_s > BEHIND_S:
                return
            result = await opened[number].run_unit(load.unit(number, index))
            answered_s = anyio.current_time()
            await opened[number].finalize(index, interrupted=False)
            finalized_s = anyio.current_time()
            answers.append(Answer.of(result, (answered_s - due_s) * MS, (finalized_s - due_s) * MS))

    async with anyio.create_task_group() as tasks:
        for number in range(sessions):
            tasks.start_soon(ask, number)
    after = backend.engine.statistics
    for session in opened:
        await session.release()
    turns = max(1, after.turns - before.turns)
    return sum_up_run(
        answers,
        mode=mode,
        arrival=arrival,
        sessions=sessions,
        units=sessions * load.seconds,
        cpu_ns=after.cpu_ns - before.cpu_ns,
        batch_mean=(after.answers - before.answers) / turns,
    )


def sum_up_run(
    answers: Sequence[Answer],
    *,
    mode: Mode,
    arrival: Arrival,
    sessions: int,
    units: int,
    cpu_ns: int,
    batch_mean: float,
) -> EngineRun:
    """Sum up what the units of a run took; see `EngineRun` for the arguments."""
    if not answers:
        raise click.ClickException("no unit was answered")
    in_time = sum(answer.answered_ms <= DUE_S * MS for answer in answers)
    stages = np.median([answer.stages_us for answer in answers], axis=0) / MS
    names = ("prefill", "llm", "tts", "token2wav")
    return EngineRun(
        mode=mode,
        arrival=arrival,
        sessions=sessions,
        units=units,
        missed=units - in_time,
        latency=sum_up([answer.answered_ms for answer in answers]),
        latency_finalized=sum_up([answer.finalized_ms for answer in answers]),
        stages_ms={name: round(float(ms), 2) for name, ms in zip(names, stages, strict=True)},
        tokens_mean=round(float(np.mean([answer.tokens for answer in answers])), 2),
        spoken=round(float(np.mean([answer.is_spoken for answer in answers])), 3),
        busy_ms=round(cpu_ns / 1e6 / len(answers), 3),
        batch_mean=round(batch_mean, 2),
    )


# -- how many ----------------------------------------------------------------------------------


class Search:
    """Which count to try next, and what was found: counts in order, doubled, then in between.

    Args:
        counts: to be tried first, in order, until one is not served.
        most: highest count.
    """

    def __init__(self, counts: Sequence[int], most: int) -> None:
        self._counts = sorted({count for count in counts if count <= most})
        self._most = most
        self.served = 0
        self.failed: int | None = None

    def next_count(self) -> int | None:
        """The count to try; None where the search is over."""
        if self.failed is None:
            further = [count for count in self._counts if count > self.served]
            if further:
                return further[0]
            return min(2 * max(1, self.served), self._most) if self.served < self._most else None
        middle = (self.served + self.failed) // 2
        is_near = self.failed - self.served <= max(1, self.served // NEAR)
        return None if is_near or middle == 0 else middle

    def note(self, count: int, *, is_served: bool) -> None:
        """Take a result."""
        if is_served:
            self.served = max(self.served, count)
        else:
            self.failed = count if self.failed is None else min(self.failed, count)


@attrs.frozen(kw_only=True)
class Served:
    """How many sessions were served, for one arrival.

    Attributes:
        arrival: when in the second.
        batched: most sessions with under 1% of units missed.
        single: likewise, one request at a time.
        ratio: the one in terms of the other; None where not even one session was served.
        busy_ratio: CPU time a unit one at a time, in terms of that in batches, at the largest count
            that both ran.
        is_bounded: the search ended at the highest count that may be tried, so more were possible.
    """

    arrival: Arrival
    batched: int
    single: int
    ratio: float | None
    busy_ratio: float
    is_bounded: bool


def judge(arrival: Arrival, runs: Sequence[EngineRun], searches: dict[Mode, Search]) -> Served:
    """Sum up the runs of one arrival."""
    busy = {(run.mode, run.sessions): run.busy_ms for run in runs}
    counts = {mode: {run.sessions for run in runs if run.mode == mode} for mode in MODES}
    both = max(counts["batched"] & counts["single"])
    batched, single = searches["batched"], searches["single"]
    return Served(
        arrival=arrival,
        batched=batched.served,
        single=single.served,
        ratio=round(batched.served / single.served, 2) if single.served else None,
        busy_ratio=round(busy["single", both] / max(1e-3, busy["batched", both]), 2),
        is_bounded=batched.failed is None,
    )
