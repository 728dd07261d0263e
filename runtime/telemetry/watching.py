"""What a session and a server let others see; nothing here can change either.

A session is seen as its log is: each event with the effects it led to, and the machine after it,
which is a function of these events. So whatever is measured or told of a session could be found
again in its recording.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import attrs

from protocol.effects import Effect
from protocol.events import ConnectionOpened, Event
from protocol.messages import Mode
from protocol.session import Session
from protocol.state import State
from recorder.retention import RetentionStatistics

from ..access.denials import Reason
from ..admission import RunningTask
from ..pool import PoolCounts
from ..transport.counters import Statistics
from ..workers import WorkersStatistics


class Watcher(Protocol):
    """Sees one session, from the event loop; it must return at once and raise nothing."""

    def saw(self, event: Event, effects: tuple[Effect, ...], session: Session) -> None:
        """Take note of an event and its effects, after they were performed.

        Args:
            event: the first is `ConnectionOpened`; `event.at_ns` counts from it.
            effects: what came of it, in order.
            session: the machine after the step, to be looked at and never stepped.
        """
        ...

    def over(self, reason: str | None) -> None:
        """Take note that nothing more comes.

        Args:
            reason: why the session ended; None where it was broken off.
        """
        ...


class Telemetry(Protocol):
    """Sees all sessions of a server."""

    def watch(self, opened: ConnectionOpened, owner: str) -> Watcher:
        """Begin to watch a session.

        Args:
            opened: its first event, which `saw` is told of too.
            owner: the name of the key that it came with; empty where there are no keys.
        """
        ...


@attrs.frozen(kw_only=True)
class SessionStatus:
    """One session that runs.

    Attributes:
        recording_id: its recording's name.
        session_id: its own, as its client knows it.
        owner: the name of its key; empty where there are no keys.
        mode: what it carries.
        dialect: its wire protocol; None before the client has chosen.
        state: where it is.
        age_s: since its connection was opened.
        units: units that the model began.
        chunks: seconds that it heard of a transcription.
        dropped_units: units dropped since they came too fast.
        kv_tokens: what it holds in the model's cache; 0 without a slot.
    """

    recording_id: str
    session_id: str
    owner: str
    mode: Mode
    dialect: str | None
    state: State
    age_s: float
    units: int
    chunks: int
    dropped_units: int
    kv_tokens: int


@attrs.frozen(kw_only=True)
class ServerStatus:
    """A server at one moment.

    Attributes:
        readiness: as `/ready` says.
        version: of the software.
        model: what is served.
        speech: `on`, or `off` where the model gives text alone; None while that is not known.
        uptime_s: since the server began.
        sessions: those that run, oldest first.
        queue_length: sessions and turns that wait for a slot.
        max_queue_size: how many may wait.
        running_tasks: the slots that are held, longest first.
        slots: where the slots are; None while the model loads.
        connections: open connections of any kind.
        tasks: of the event loop: a server that nobody uses comes back to the same number.
        recorder: what `RecorderStatistics` holds, by name; empty where nothing is recorded.
        listener: what its port counts; None where that is not known.
        workers: what became of the workers; None while the model loads.
        retention: what is recorded, and was removed; None where nothing is recorded.
        denied: what the gate denied, by reason; what never happened may be left out.
    """

    readiness: str
    version: str
    model: str
    speech: str | None
    uptime_s: float
    sessions: tuple[SessionStatus, ...]
    queue_length: int
    slots: PoolCounts | None
    connections: int
    tasks: int
    recorder: Mapping[str, int | float]
    listener: Statistics | None = None
    workers: WorkersStatistics | None = None
    retention: RetentionStatistics | None = None
    denied: Mapping[Reason, int] = MappingProxyType({})
    max_queue_size: int = 0
    running_tasks: tuple[RunningTask, ...] = ()
