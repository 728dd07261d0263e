"""Messages that come together are counted as each by itself would be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, cast

import attrs

from protocol.machine.session import Session
from protocol.values import events as ev
from protocol.values.errors import LocalProtocolError
from runtime.telemetry.meters import Key, Meter, ModeInstruments, Series
from tests.project.sampling import sample
from tests.protocol.test_likeness import events_in
from tests.protocol.test_quiet import is_whole, with_pieces
from tests.test_golden import LOGS

HEARD_MIN = 1000
"""Messages that must have been heard together, or nothing was tried."""


class Noted(dict[Key, Series]):
    """Stands for the instruments of a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.observed: list[tuple[Key, float]] = []

    def __missing__(self, key: Key) -> Series:
        series = self[key] = Series(())
        return series

    def observe(self, values: Mapping[Key, float]) -> None:
        self.observed += values.items()

    @property
    def added(self) -> dict[Key, float]:
        return {key: series.total for key, series in self.items()}


@attrs.define
class Metered:
    """A session and its meter."""

    session: Session
    meter: Meter
    books: Noted
    heard: int = 0

    @classmethod
    def open(cls, opened: ev.ConnectionOpened) -> Metered:
        session, effects = Session.open(opened)
        books = Noted()
        metered = cls(session, Meter(cast("ModeInstruments", books), opened), books)
        metered.meter.saw(opened, effects, session)
        return metered

    def step(self, event: ev.Event) -> None:
        if isinstance(event, ev.FrameReceived) and event.shortened is None:
            event = self.session.shortened(event)
        self.meter.saw(event, self.session.step(event), self.session)

    def take(self, events: Sequence[Any]) -> None:
        while events:
            whole = is_whole(events[0])
            messages = self.session.read_ahead([it.frame for it in events]) if whole else []
            kept = events[: len(messages)]
            if messages:
                self.session.keep(kept[0].at_ns, messages)
                self.meter.received(kept, messages, self.session)
            else:
                self.step(events[0])
            self.heard += len(kept)
            events = events[max(1, len(kept)) :]


def test_messages_that_are_only_kept_are_counted_all_the_same() -> None:
    """A busy server would show other figures than a quiet one, or than its recordings."""
    heard = 0
    for path in LOGS[:: sample(1, 3)]:
        chance = Random(path.name)
        opened, *events = events_in(path)
        assert isinstance(opened, ev.ConnectionOpened)
        together, singly = Metered.open(opened), Metered.open(opened)
        for event in events:
            batch = with_pieces(event, chance)
            try:
                for each in batch:
                    singly.step(each)
            except LocalProtocolError:
                break  # what was drawn has led away from the log
            together.take(batch)
        together.meter.over("client")
        singly.meter.over("client")
        assert together.books.added == singly.books.added, path
        assert together.books.observed == singly.books.observed, path
        heard += together.heard
    assert heard >= HEARD_MIN, heard
