"""The engine's bench on a clock that stands still during other processes' work.

Its time is the CPU time of this thread, which runs the engine's scheduler; it skips pauses without
a due unit. So it measures an engine on a core of its own, though caches and memory are shared. The
host's other work for a session (sockets, the log) is not included.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from typing import Any

from protocol.values import model as md
from protocol.values.limits import NS_PER_S
from runtime.commands.bench import BEHIND_S, DUE_S, MS, Answer, Case, EngineRun, Load, sum_up_run
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.session import SteppedSession
from runtime.model.engine.backend import BATCH_MAX
from runtime.model.engine.engine import BACKGROUND, Scheduler, Task


class _Client:
    def __init__(self, session: SteppedSession) -> None:
        self.session = session
        self.due_ns: deque[tuple[int, int]] = deque()
        self.is_busy = False
        self.is_lost = False


class VirtualRun:
    """One run, on the model's first slots; see the module's docstring."""

    def __init__(self, model: DuplexModel, load: Load, case: Case) -> None:
        self._load, self._case = load, case
        batch_max = BATCH_MAX if case.mode == "batched" else 1
        self._scheduler = Scheduler(model.compute, batch_max=batch_max)
        self._leaps_ns = -time.thread_time_ns()
        self._clients = [
            _Client(model.session(load.opening(number), slot=number))
            for number in range(case.sessions)
        ]
        self.answers: list[Answer] = []

    def _now_ns(self) -> int:
        return time.thread_time_ns() + self._leaps_ns

    def run(self) -> EngineRun:
        """Open the sessions, have all units computed, and sum up."""
        for client in self._clients:
            self._add(client.session.open(), BACKGROUND, lambda _: None)
        while not self._scheduler.is_idle:
            self._scheduler.turn(self._now_ns())
        count, tally = len(self._clients), self._scheduler.tally
        turns, answered = tally.turns, tally.answers
        began_ns, began_cpu_ns = self._now_ns(), time.thread_time_ns()
        due = [
            (began_ns + index * NS_PER_S + int(self._case.late(number) * NS_PER_S), number)
            for number in range(count)
            for index in range(self._load.seconds)
        ]
        heapq.heapify(due)
        indices = [0] * count
        while due or not self._scheduler.is_idle:
            if self._scheduler.is_idle:
                self._leaps_ns += max(0, due[0][0] - self._now_ns())
            while due and due[0][0] <= self._now_ns():
                due_ns, number = heapq.heappop(due)
                self._clients[number].due_ns.append((due_ns, indices[number]))
                indices[number] += 1
                self._begin(number)
            if not self._scheduler.is_idle:
                self._scheduler.turn(self._now_ns())
        cpu_ns = time.thread_time_ns() - began_cpu_ns
        for client in self._clients:
            client.session.release()
        return sum_up_run(
            self._case,
            self.answers,
            units=count * self._load.seconds,
            cpu_ns=cpu_ns,
            batch_mean=(tally.answers - answered) / max(1, tally.turns - turns),
        )

    def _add(self, steps: Any, deadline_ns: float, then: Any) -> None:
        def done(result: Any, error: BaseException | None) -> None:
            if error is not None:
                raise error
            then(result)

        self._scheduler.add(Task(steps=steps, deadline_ns=deadline_ns, done=done))

    def _begin(self, number: int) -> None:
        client = self._clients[number]
        if client.is_busy or client.is_lost or not client.due_ns:
            return
        due_ns, index = client.due_ns.popleft()
        began_ns = self._now_ns()
        if began_ns - due_ns > BEHIND_S * NS_PER_S:
            client.is_lost = True
            return
        client.is_busy = True

        def answered(result: md.UnitResult) -> None:
            answered_ns = self._now_ns()

            def finalized(_: md.Finalized) -> None:
                after_ms = (self._now_ns() - due_ns) * MS / NS_PER_S
                answered_ms = (answered_ns - due_ns) * MS / NS_PER_S
                self.answers.append(Answer.of(result, answered_ms, after_ms))
                client.is_busy = False
                self._begin(number)

            steps = client.session.finalize(index, interrupted=False)
            self._add(steps, self._now_ns() + DUE_S * NS_PER_S, finalized)

        steps = client.session.unit(self._load.unit(number, index), None)
        self._add(steps, began_ns + DUE_S * NS_PER_S, answered)


def run_virtual(model: DuplexModel, load: Load, case: Case) -> EngineRun:
    """Have sessions request units, on this thread's CPU clock; the model must be unused."""
    return VirtualRun(model, load, case).run()
