"""Measures the conversation of one duplex session, when it is over, as `antiphon eval` does.

It hears the messages that the machine took and made, so no frame is read again; what it computes
from them is what a recording is measured by (`measures`). A session that it did not see from its
begin (a fork, or one that another server began) is not measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import attrs

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.limits import NS_PER_S
from protocol.values.messages import ServerMessage, Speech
from protocol.values.requests import AppendSound, ClientMessage
from protocol.values.state import State

from ..measures.measure import Ratio, Times, Value
from ..measures.score import talk_scores
from ..measures.talk import ClientSound, Talk
from . import catalogue as c
from .instruments import Books
from .watching import Shown

IN_SECONDS: Final = frozenset({"overlap", "self_talk"})
"""Amounts of time; the others are counts."""


class TalkMeter:
    """Hears one session."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._talk: Talk | None = None
        self._sound = ClientSound("audio", "realtime")
        self._now_ns = 0

    def saw(self, event: ev.Event, effects: tuple[ef.Effect, ...], session: Shown) -> None:
        """Hear what an event brought, and its effects."""
        match event:
            case ev.ConnectionOpened(mode=mode, endpoint=endpoint):
                self._talk, self._sound = Talk(), ClientSound(mode, endpoint)
            case ev.Forked():
                self._talk = None
        if self._talk is not None:
            self._hear(self._talk, event, effects, session)

    def heard(
        self, events: Sequence[ev.FrameReceived], messages: Sequence[ClientMessage], session: Shown
    ) -> None:
        """Hear messages that had no effects (`Watcher`)."""
        for event, message in zip(events, messages, strict=True):
            self._now_ns = event.at_ns
            if self._talk is not None:
                self._received(self._talk, event.at_ns, message, session)

    def _received(self, talk: Talk, at_ns: int, taken: ClientMessage, session: Shown) -> None:
        is_early = isinstance(taken, AppendSound) and session.state is not State.ACTIVE
        if not is_early:
            talk.received(at_ns, self._sound.read(taken))

    def _hear(
        self, talk: Talk, event: ev.Event, effects: tuple[ef.Effect, ...], session: Shown
    ) -> None:
        at_ns = self._now_ns = event.at_ns
        if isinstance(event, ev.SpeechStarted | ev.SpeechStopped):
            talk.user.found(event)
        if session.taken is not None:
            self._received(talk, at_ns, session.taken, session)
        for effect in effects:
            if isinstance(effect, ef.DetectSpeech):
                talk.user.searched(at_ns, effect.at, effect.rate_hz, effect.silence_ms)
        for message in session.said:
            self._say(talk, at_ns, message)

    def _say(self, talk: Talk, at_ns: int, message: ServerMessage) -> None:
        if not isinstance(message, Speech):
            talk.sent(at_ns, message)
            return
        if self._sound.endpoint == "duplex":
            message = attrs.evolve(message, response_id="")  # its frames name no turn
        if self._sound.endpoint == "live" and not any(message.pcm):
            talk.sent(at_ns, attrs.evolve(message, pcm=b""))
            talk.stopped(at_ns)  # a second of silence is a listen there
        else:
            talk.sent(at_ns, message, self._sound.spoken_hz(message.coding))

    def over(self) -> None:
        """Measure the session."""
        if self._talk is not None:
            talk = self._talk.conversation(self._now_ns)
            for name, value in ({} if talk.is_written else talk_scores(talk)).items():
                metric = c.CONVERSATION.get(name)
                if metric is not None:
                    for one in values_of(name, value):
                        self._count(metric, one)

    def _count(self, metric: c.Metric, value: float) -> None:
        if metric.kind == "counter":
            self._books.add(metric, amount=value)
        else:
            self._books.observe(metric, value)


def values_of(name: str, value: Value) -> Iterator[float]:
    """Give what a metric holds of a measure: seconds, shares, or a count."""
    match value:
        case Times(values=values):
            yield from (length_ns / NS_PER_S for _, length_ns in values)
        case Ratio(part=part, whole=whole):
            yield part / whole
        case _:
            yield value.amount / (NS_PER_S if name in IN_SECONDS else 1)
