"""What the tests of telemetry share: servers in memory that are watched, and figures read back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
from prometheus_client.parser import text_string_to_metric_families

from protocol.machine.session import Session
from protocol.values.effects import CancelDecode, DecodeMedia, Effect
from protocol.values.events import ConnectionOpened, Event, MediaDecoded, MediaRejected
from recorder.format.format import Record
from recorder.format.mapping import EFFECT_KINDS, EVENT_KINDS, effect_record, event_of
from recorder.read.reader import LogReader, read
from recorder.read.scan import Damage
from runtime.model.backends.scripted import ScriptedBackend
from runtime.telemetry.meters import DeferredMeter, Meter, UnitMeter
from runtime.telemetry.metrics import Metrics
from runtime.telemetry.watching import Telemetry
from tests.sessions.in_memory import World, world


@asynccontextmanager
async def watched(
    telemetry: Telemetry, backend: ScriptedBackend | None = None, **settings: Any
) -> AsyncIterator[World]:
    """Run a server in memory whose sessions are watched."""
    async with world(backend, **settings) as server:
        server.server._telemetry = telemetry
        yield server


class Figures:
    """What metrics say, read back from their own text."""

    def __init__(self, metrics: Metrics) -> None:
        body, _ = metrics.text()
        self._values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(body.decode())
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        """Give a value; the name is without `antiphon_`."""
        return self._values[f"antiphon_{name}", frozenset(labels.items())]

    def all_of(self, name: str, **labels: str) -> float:
        """Sum the values of a name over all labels but those given."""
        found = [
            value
            for (sample, having), value in self._values.items()
            if sample == f"antiphon_{name}" and having >= set(labels.items())
        ]
        assert found, f"there is no {name}"
        return sum(found)


def is_whole(log: Path | bytes) -> bool:
    """Say whether a log is neither damaged nor cut off."""
    last: Record | Damage | None = None
    with LogReader(log) as reader:
        for last in reader:
            if isinstance(last, Damage):
                return False
    return last is not None and last.kind == "fin"


def meter_log(log: Path, metrics: Metrics, watched_from: float = 0) -> Session:
    """Measure a session from its log: its events, and the effects that they give again.

    It is watched after this part of its events, as by a server that goes on with it.

    Those effects are compared with the logged ones, so that nothing is measured that was not so.
    """
    records = list(read(log))
    again: list[tuple[str, Any]] = []
    logged = [(record.kind, record.fields) for record in records if record.kind in EFFECT_KINDS]
    session: Session | None = None
    events = [record for record in records if record.kind in EVENT_KINDS]
    for number, record in enumerate(events):
        event = event_of(record.fields, record.at_ns)
        effects: tuple[Effect, ...]
        if session is None:
            assert isinstance(event, ConnectionOpened)
            session, effects = Session.open(event)
            meter = metrics.watch(event, "")
        else:
            effects = session.step(event)
        again += [effect_record(effect) for effect in effects]
        if number >= watched_from * len(events):
            meter.saw(event, effects, session)
    assert session is not None
    assert again == logged
    fin = records[-1]
    assert fin.kind == "fin"
    reason = fin.fields["reason"]
    assert reason is None or isinstance(reason, str)
    meter.over(reason)
    return session


@attrs.define
class Checked:
    """A meter that is checked after each event."""

    later: DeferredMeter
    session: Session | None = None
    wrong: list[str] = attrs.Factory(list)
    decoding: set[int] = attrs.Factory(set)

    def saw(self, event: Event, effects: Any, session: Session) -> None:
        """Check a step."""
        self.later.saw(event, effects, session)
        self.later._backlog.count()
        self.session = session
        self._check_waiting(session)
        if isinstance(event, MediaDecoded | MediaRejected):
            self.decoding.discard(event.media)  # it may have been cancelled as it ended
        self.decoding |= {it.media for it in effects if isinstance(it, DecodeMedia)}
        self.decoding -= {it.media for it in effects if isinstance(it, CancelDecode)}
        if len(self.meter._media) != len(self.decoding):
            self.wrong.append(f"{len(self.meter._media)} decode, not {len(self.decoding)}")

    def received(self, events: Any, messages: Any, session: Session) -> None:
        """Check messages that had no effects."""
        self.later.received(events, messages, session)
        self.later._backlog.count()
        self.session = session
        self._check_waiting(session)

    @property
    def meter(self) -> Meter:
        """The meter."""
        return self.later.meter

    def over(self, reason: str | None) -> None:
        """Pass it on."""
        self.later.over(reason)

    def _check_waiting(self, session: Session) -> None:
        work = self.meter._work
        if isinstance(work, UnitMeter) and len(work._whole_ns) != session.units_waiting:
            self.wrong.append(f"{len(work._whole_ns)} wait, not {session.units_waiting}")


@attrs.define
class Checking:
    """Watches with `Checked`, and keeps what it saw."""

    metrics: Metrics
    seen: list[Checked] = attrs.Factory(list)

    def watch(self, opened: Any, owner: str) -> Checked:
        """As `Telemetry`."""
        self.seen.append(Checked(self.metrics.watch(opened, owner)))
        return self.seen[-1]
