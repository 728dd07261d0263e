"""A whole server on virtual time, and everything that can happen to it.

    draw(seed) -> storm: clients come and go, things break -> faults stop -> good clients -> the end

Real are the server, its queue, pool, drivers, connections, journal and recorder. The sockets, the
disk, the model and the clock are not. Everything is drawn from the seed and trio's scheduler is
seeded too, so that a seed that fails fails again, to the microsecond.

What is held to is in `simulated_rules`; here: clients hear only what a server may say and only what
is theirs, a client that takes nothing is dropped in time, those who come once faults have stopped
are served, and in the end no session, slot, task, ticket, log or file is left over, and every log
replays.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Coroutine
from functools import partial
from itertools import repeat
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar
from unittest.mock import patch

import anyio
import attrs
import trio
from anyio.abc import TaskGroup

from protocol.values import events as ev
from protocol.values import requests as rq
from protocol.values.errors import CLOSE_POLICY
from protocol.values.events import EVENT_IDS, PIECES
from protocol.values.limits import Mode
from protocol.values.messages import ResumeRequest
from recorder.format.format import SUFFIX, RecorderError
from recorder.read.reader import LogReader, read
from replay.rerun.logic import replay
from runtime.net.connection import CLOSE_FLUSH_S, SEND_BYTES_PER_S_MIN
from runtime.session import journal
from runtime.session.server import Server
from runtime.session.setup import SessionSpec
from runtime.session.speech_input import ENERGY_ONLY, SpeechInput
from runtime.settings.settings import Settings
from runtime.slots.workers import REPLACE_WAIT_S, RETRY_S_MAX, Workers
from tests.sessions.identities import CountedIdentities
from tests.sessions.in_memory import on_virtual_time
from tests.simulation.simulated_backend import Babble, Fleet
from tests.simulation.simulated_client import Client, ClientPlan
from tests.simulation.simulated_dictation import DictationClient
from tests.simulation.simulated_disk import FaultyDisk, SlowRecorder
from tests.simulation.simulated_omni import OmniClient
from tests.simulation.simulated_pieces import PiecesClient, decode
from tests.simulation.simulated_plan import Plan, draw, without_losses
from tests.simulation.simulated_rules import FIN_WAIT_S, RELEASE_WAIT_S, Rules
from tests.simulation.simulated_run import innermost, living_tasks, loud_logs, same_order_every_time
from tests.simulation.simulated_socket import Link, LinkPlan
from tests.simulation.simulated_way import Way

PATIENCE_S: Final = 60.0
"""So long after the last one came everybody hangs up, but for those whom a limit ends before."""
SLACK_S: Final = 5.0
"""What is left to a server beside its own waits: latencies, a release, a close."""
SERVED_WITHIN_S: Final = 16.0
"""A good client that comes to an idle server has its answer by then."""
READ_S: Final = 0.02
"""What a log's thread takes for a piece of work."""
STEADY: Final = frozenset({"good", "slow", "deaf", "hasty"})
"""The characters whose units do not depend on the moment at which they are answered."""
LOOK_S: Final = 0.37
"""How often the queue is looked at; no multiple of anything."""
FRAME_BYTES: Final = 64 * 1024
"""No frame is larger here."""
REPLACED_WITHIN_S: Final = REPLACE_WAIT_S + RETRY_S_MAX + SLACK_S
"""A worker that is condemned as faults stop is replaced by then."""
GOOD: Final[tuple[tuple[str, Mode], ...]] = (
    ("realtime", "audio"),
    ("realtime", "chat"),
    ("legacy-duplex", "audio"),
    ("legacy-chat", "chat"),
    ("transcription", "transcription"),
    ("live", "audio"),
    ("openai", "audio"),
    ("openai-transcription", "transcription"),
    ("vllm-omni", "audio"),
)
"""Who comes once faults have stopped."""
REFUSALS: Final = {
    "full": {"worker_busy", "service_unavailable"},
    "draining": {"service_unavailable"},
    "condemned": {"service_unavailable"},
    "loading": {"service_unavailable"},
}
"""What a server that is not ready says, any of it: a slot may still be on its way back."""


T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Outcome:
    """What came of a simulation.

    Attributes:
        seed: its number.
        name: of all that happened: equal where the same happened.
        violations: what must not be, in words.
        seen: what was tried, counted.
        virtual_s: how long it took on its own clock.
    """

    seed: int
    name: str
    violations: tuple[str, ...]
    seen: dict[str, int]
    virtual_s: float


def simulate(seed: int) -> Outcome:
    """Run the simulation of a number; it shares nothing with any other."""
    return _run(draw(seed)).outcome()


@attrs.frozen(kw_only=True)
class Comparison:
    """A simulation compared with the same one in which no worker is lost.

    Attributes:
        units: of sessions that moved, in both.
        differences: what clients were told otherwise, in words.
    """

    units: int
    differences: tuple[str, ...]


def compare(seed: int) -> Comparison:
    """Run the simulation of a number with and without losses, and compare what clients were told.

    Compared are the units of clients that do not interrupt, and of whom none was dropped, as far as
    they were answered in both: the rest follows from the time that a move takes.
    """
    simulation = _run(draw(seed))
    moved, calm = simulation.steady_units(), _run(without_losses(draw(seed))).steady_units()
    units, differences = 0, []
    for number in sorted(moved.keys() & calm.keys()):
        pairs = list(zip(moved[number], calm[number], strict=False))
        units += len(pairs) if str(number) in simulation.rules.moved else 0
        for index, (ours, others) in enumerate(pairs):
            if ours != others:
                text = f"client {number}, answer {index}: {ours!r}, without losses {others!r}"
                differences.append(text)
    return Comparison(units=units, differences=tuple(differences))


def _run(plan: Plan) -> Simulation:
    simulation = Simulation(plan)
    with (
        same_order_every_time(),
        loud_logs(simulation.rules),
        patch.object(journal, "in_thread", _in_thread),
        patch.object(journal, "open_log", simulation.open_log),
    ):
        try:
            on_virtual_time(simulation.run, seed=plan.seed)
        except Exception as error:
            simulation.rules.violations.append(f"the server broke down: {innermost(error)!r}")
    return simulation


async def _in_thread(work: Callable[[], T]) -> T:
    """Do what a thread would do, on virtual time."""
    await anyio.sleep(READ_S)
    return work()


class Simulation:
    """One server and all that happens to it.

    Args:
        plan: what happens.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rules = Rules(self._slot_of, self._may_fail)
        self._clients: list[Client] = []
        self._ways: dict[int, Way] = {}
        self._disk = FaultyDisk(plan.disk, f"disk/{plan.seed}")
        self._fleet = Fleet(plan=plan.model, seed=f"model/{plan.seed}", report=self.rules.report)
        self._server: Server
        self._stall_s: int = plan.settings["stall_s"]
        self._flush_s = self._stall_s + CLOSE_FLUSH_S + SLACK_S
        self._connections = 0
        self._ended_s = 0.0

    def outcome(self) -> Outcome:
        """Say what came of it."""
        return Outcome(
            seed=self.plan.seed,
            name=self.rules.name,
            violations=tuple(self.rules.violations),
            seen=dict(sorted((self.rules.seen + self._fleet.costs).items())),
            virtual_s=self._ended_s,
        )

    def open_log(self, path: Path) -> LogReader:
        """Open a log that is written still."""
        found = self._disk.files.get(path.name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "the disk has no such file", path.name)
        return LogReader(bytes(found))

    def steady_units(self) -> dict[int, list[str]]:
        """What clients that do not interrupt were told in each unit, where none was dropped."""
        return {
            client.plan.number: client.units
            for client in self._clients
            if client.plan.character in STEADY and str(client.plan.number) not in self.rules.dropped
        }

    def _may_fail(self, opened: ev.ConnectionOpened) -> bool:
        """Whether a session's rebuild may fail: its log did, or the model at its opening."""
        name = f"{opened.recording_id}{SUFFIX}"
        return name in self._disk.faulty or opened.seed in self._fleet.excused

    def _slot_of(self, event: Any) -> object:
        """Name a slot among those of all workers."""
        for lease in self._server.workers.pool.leases:
            if lease.generation == event.lease:
                return (lease.worker, lease.slot)
        return ("given back", event.lease)

    # -- the story ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Live through all of it."""
        plan = self.plan
        slow = None
        if plan.recorder is not None:
            slow = SlowRecorder(self._disk, plan.disk, plan.recorder)
        async with anyio.create_task_group() as tasks:
            self._server = Server(
                Settings(model="scripted", record_to=Path("nowhere"), **plan.settings),
                Workers(
                    [self._fleet.make() for _ in range(plan.model.workers)],
                    load=self._fleet.load if plan.model.replaces else None,
                ),
                tasks=tasks,
                recorder=None if slow is None else slow.recorder,
                identities=CountedIdentities(),
                decode_media=decode,
                telemetry=self.rules,
                speech_input=SpeechInput(Babble) if plan.settings.get("barge_in") else ENERGY_ONLY,
            )
            tasks.start_soon(self._server.refresh)
            tasks.start_soon(self._server.replace_workers)
            if slow is not None:
                tasks.start_soon(slow.run)
            await anyio.wait_all_tasks_blocked()
            tasks_before = trio.lowlevel.current_statistics().tasks_living
            await self._storm()
            await self._calm()
            await self._end(tasks_before)
            tasks.cancel_scope.cancel()
        if slow is not None:
            slow.recorder.close()
            self._judge_recorder(slow)
        self.rules.judge_slots()
        self.rules.judge_ends()
        self._judge_logs()
        self._judge_returns()

    async def _storm(self) -> None:
        """Let everything happen that was drawn, until all clients are gone."""
        async with anyio.create_task_group() as tasks:
            chaos = anyio.CancelScope()
            tasks.start_soon(self._operate, chaos)
            tasks.start_soon(self._look)
            with anyio.CancelScope(deadline=self.plan.storm_s + PATIENCE_S):
                async with anyio.create_task_group() as clients:
                    for plan in self.plan.clients:
                        clients.start_soon(self._live, plan, tasks)
            self._fleet.is_sound = self._disk.is_sound = True
            chaos.cancel()
            limits = self.plan.settings["cleanup_wait_s"] + RELEASE_WAIT_S + FIN_WAIT_S
            limits += self.plan.settings.get("resume_s", 0)
            await self._empty_within(limits + self._flush_s)
            with anyio.move_on_after(self._flush_s):
                await self._until(lambda: not self._connections)
            if self._connections:
                self.rules.report(f"{self._connections} connections are left after all sessions")
            tasks.cancel_scope.cancel()

    async def _empty_within(self, wait_s: float) -> None:
        with anyio.move_on_after(wait_s) as scope:
            await self._server.wait_until_empty()
        if scope.cancelled_caught:
            self.rules.report(f"{self._server.sessions} sessions are left {wait_s} s after all")

    async def _look(self) -> None:
        """See, now and then, that nobody waits while a slot is free."""
        for _ in repeat(None):
            await anyio.sleep(LOOK_S)
            admission, free = self._server.admission, self._server.workers.pool.counts.free
            if free and admission.queue_length and not admission.is_draining:
                self.rules.report(f"{admission.queue_length} wait, and {free} slots are free")

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Look now and then: the server tells nobody."""
        for _ in repeat(None):
            if condition():
                return
            await anyio.sleep(LOOK_S)

    async def _operate(self, chaos: anyio.CancelScope) -> None:
        """Do what the operator does, and lose workers."""
        plan, dice = self.plan, Random(f"operator/{self.plan.seed}")
        acts = [(at_s, "delete") for at_s in plan.deletions_s]
        acts += [(at_s, "crash") for at_s in plan.model.crashes_s]
        acts += [(at_s, "die") for at_s in plan.model.deaths_s]
        acts += [(at_s, "leave") for at_s in plan.model.drains_s]
        if plan.drain_s is not None:
            acts.append((plan.drain_s, "drain"))
            if plan.warning_s:
                acts.append((plan.drain_s - plan.warning_s, "warn"))
        with chaos:
            for at_s, act in sorted(acts):
                await anyio.sleep_until(at_s)
                if act == "crash":
                    dice.choice(self._fleet.workers).crash()
                elif act == "die":
                    dice.choice(self._fleet.workers[-plan.model.workers :]).die()
                elif act == "leave":
                    self._drain_worker(dice)
                elif act == "drain":
                    self._server.drain()
                elif act == "warn":
                    self._server.begin_drain(plan.warning_s)
                else:
                    places = self._server.admission.places()
                    if places:
                        self._server.admission.cancel(dice.choice(places).ticket_id)

    def _drain_worker(self, dice: Random) -> None:
        """Drain a worker, if another one serves."""
        workers = self._server.workers
        serving = [it for it in workers._backends if not workers.pool.is_condemned(it)]
        if len(serving) > 1:
            self._fleet.costs["drains"] += 1
            workers.drain(dice.choice(serving))

    async def _live(self, plan: ClientPlan, tasks: TaskGroup) -> None:
        """Come when it is time, and go."""
        await anyio.sleep_until(plan.arrives_s)
        await self._connect(plan, tasks).run()

    def _connect(self, plan: ClientPlan, tasks: TaskGroup) -> Client:
        report = partial(self.rules.report, who=f"client {plan.number}")
        link = Link(plan.link, report)
        kind = PiecesClient if plan.endpoint in PIECES else Client
        if plan.endpoint == "omni":
            kind = OmniClient
        if plan.mode == "transcription" and plan.endpoint in PIECES:
            kind = DictationClient
        if plan.endpoint in EVENT_IDS:
            self._fleet.padded.add(plan.number)
            self.rules.seen[f"clients of {plan.dialect}"] += 1
        client = kind(
            plan,
            self._way(plan, link, tasks) if plan.resumable else link,
            report=report,
            on_init=lambda init: self._sent(plan.number, init),
            dice=Random(f"client/{self.plan.seed}/{plan.number}"),
        )
        tasks.start_soon(self._serve, plan, link, partial(self._handle, plan, link))
        self._clients.append(client)
        return client

    def _way(self, plan: ClientPlan, first: Link, tasks: TaskGroup) -> Way:
        """Make the connections of a client that may come back."""
        report = partial(self.rules.report, who=f"client {plan.number}")

        def come_back(link_plan: LinkPlan, recording_id: str, asked: ResumeRequest) -> Link:
            link = Link(link_plan, report)
            work = partial(self._handle_again, plan, link, recording_id, asked)
            tasks.start_soon(self._serve, plan, link, work)
            return link

        way = self._ways[plan.number] = Way(
            first,
            lasts_s=plan.lasts_s,
            visits=plan.visits,
            come_back=come_back,
            watch=tasks.start_soon,
            report=report,
        )
        return way

    async def _handle(self, plan: ClientPlan, link: Link) -> None:
        arrival = SessionSpec(
            mode=plan.mode,
            endpoint=plan.endpoint,
            label=plan.label,
            owner=str(plan.number),
            resumable=plan.resumable,
        )
        await self._server.handle(link, arrival)

    async def _handle_again(
        self, plan: ClientPlan, link: Link, recording_id: str, asked: ResumeRequest
    ) -> None:
        come_back = self._server.resume
        refusal = await come_back(link, recording_id, plan.mode, str(plan.number), asked)
        if refusal:
            self.rules.seen["refused to resume"] += 1
            await link.close(CLOSE_POLICY, refusal)

    def _sent(self, number: int, init: rq.Init) -> None:
        self._fleet.sent.setdefault(number, []).append(init)

    async def _serve(
        self, plan: ClientPlan, link: Link, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Run the server's side of one connection, as the listener does."""
        self._connections += 1
        try:
            with anyio.CancelScope() as scope:
                link.on_cancel = lambda: self._cancel(plan, scope)
                await work()
        finally:
            self._connections -= 1
        if not link.is_let_go:
            self.rules.report("its connection was left open", who=f"client {plan.number}")
        allowed_s = self._stall_s + 1 + FRAME_BYTES / SEND_BYTES_PER_S_MIN
        if link.stalled_s_max > allowed_s:
            text = (
                f"a send waited {link.stalled_s_max:.1f} s, at most {allowed_s:.1f} s are allowed"
            )
            self.rules.report(text, who=f"client {plan.number}")

    def _cancel(self, plan: ClientPlan, scope: anyio.CancelScope) -> None:
        self.rules.cancelled.add(str(plan.number))
        scope.cancel()

    async def _calm(self) -> None:
        """See that those who come once faults have stopped are served."""
        with anyio.move_on_after(REPLACED_WITHIN_S):
            await self._until(lambda: not self._server.workers.more_to_come)
        first = len(self.plan.clients)
        for number, (dialect, mode) in enumerate(GOOD, first):
            plan = ClientPlan(number=number, arrives_s=0, dialect=dialect, mode=mode, rounds=1)
            await self._serve_good(plan)

    async def _serve_good(self, plan: ClientPlan) -> None:
        readiness = self._server.readiness
        async with anyio.create_task_group() as tasks:
            client = self._connect(plan, tasks)
            with anyio.move_on_after(SERVED_WITHIN_S) as scope:
                await client.run()
            heard = f"it heard {client.said} {client.errors}, {client.link.closed}"
            if scope.cancelled_caught:
                self.rules.report(
                    f"a good client was not served by a server that is {readiness}: {heard}",
                    who=f"client {plan.number}",
                )
                tasks.cancel_scope.cancel()
            elif readiness == "ready" and not client.answers:
                self.rules.report(f"a good client got no answer: {heard}")
            elif readiness != "ready" and not REFUSALS[readiness] & set(client.errors):
                self.rules.report(f"the server is {readiness}, and does not say so: {heard}")

    async def _end(self, tasks_before: int) -> None:
        """Drain, and see that nothing is left."""
        self._server.drain()
        await self._empty_within(SLACK_S)
        await anyio.sleep(RELEASE_WAIT_S + SLACK_S)  # for what was cut off from outside
        self._ended_s = anyio.current_time()
        report, pool = self.rules.report, self._server.workers.pool
        tasks = trio.lowlevel.current_statistics().tasks_living
        expected = tasks_before + self._fleet.hanging + self._fleet.alive - self.plan.model.workers
        if tasks != expected:
            report(f"{tasks} tasks are left, not {expected}: {living_tasks()}")
        if pool.leases:
            report(f"slots are still lent: {pool.leases} (B5)")
        counts = pool.counts
        if counts.condemned and not self._fleet.costs and not self.rules.seen["condemned"]:
            report(f"{counts.condemned} slots are condemned, and nothing hung")
        if counts.free + counts.condemned != counts.slots:
            report(f"slots are lost: {counts} (B5)")
        if self._server.admission.queue_length or self._server.admission._held:
            report(f"tickets or leases are left: {self._server.admission._held}")
        for number, serving in self._server.workers._backends.items():
            held = serving.scripted.held_slots
            if held and not pool.is_condemned(number):
                report(f"worker {number} still holds slots {sorted(held)}")
        for worker in self._fleet.workers:
            for violation in worker.scripted.violations:
                report(f"the model: {violation}")

    # -- what is kept ---------------------------------------------------------------------------

    def _judge_recorder(self, slow: SlowRecorder) -> None:
        statistics = slow.recorder.statistics
        if statistics.logs or statistics.backlog_bytes or self._disk.open_files:
            self.rules.report(f"{statistics}, {self._disk.open_files} files are left open")

    def _judge_logs(self) -> None:
        """Replay every log, as far as the disk let it be written."""
        for name, data in self._disk.files.items():
            self.rules.note(name, bytes(data))
            session = self.rules.sessions[name.removesuffix(SUFFIX)]
            is_whole = name not in self._disk.faulty and not session.recording_failed
            who = session.who
            try:
                with LogReader(bytes(data)) as reader:
                    report = replay(reader)
            except RecorderError as error:
                if is_whole:
                    self.rules.report(f"its log cannot be read: {error}", who=who)
                continue
            if report.divergence is not None:
                self.rules.report(f"replay: {report.divergence}", who=who)
            if not is_whole:
                continue
            if report.damage_count:
                self.rules.report(f"its log is damaged: {report.damage}", who=who)
            elif not report.finished or report.truncated:
                self.rules.report("its log has no end", who=who)
            elif report.events != session.events:
                text = f"its log has {report.events} events, {session.events} were taken"
                self.rules.report(text, who=who)

    def _judge_returns(self) -> None:
        """See that who came back heard each frame of the log once."""
        for number, way in self._ways.items():
            name, who = f"{way.recording_id}{SUFFIX}", f"client {number}"
            if not way.recording_id:
                continue
            session = self.rules.sessions[way.recording_id]
            if name in self._disk.faulty or session.recording_failed:
                continue
            records = read(bytes(self._disk.files[name]))
            said = [str(it.fields["frame"]) for it in records if it.kind == "tx"]
            if way.heard != said[: len(way.heard)]:
                pairs = enumerate(zip(way.heard, said, strict=False))
                at = next((at for at, (ours, logs) in pairs if ours != logs), len(said))
                self.rules.report(f"resume: frame {at} is not that of its log", who=who)
            elif way.is_whole and len(way.heard) < len(said):
                text = f"{len(way.heard)} frames of {len(said)} were heard"
                self.rules.report(f"resume: {text}, and then the end", who=who)
