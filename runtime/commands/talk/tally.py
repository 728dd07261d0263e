"""The sums of a conversation so far, from the server's messages.

`view` shows a `Tally`, and `session` decides by it when the conversation is over. It takes messages
with their time and does no IO.

A unit is known by the id of its append. Without ids, in some dialects and servers, outcomes are
counted: one for each unit, text and audio that follow each other being one. A dropped unit has no
outcome, so after one a count gives no round trips.
"""

from __future__ import annotations

from typing import Final

import attrs

from protocol.values.errors import CLIENT_ERRORS, ErrorCode
from protocol.values.messages import (
    Closed,
    Created,
    ErrorReport,
    Listen,
    Metrics,
    Queued,
    QueueDone,
    QueuePlace,
    QueueUpdate,
    ServerMessage,
    Speech,
)
from protocol.values.model import OUTPUT_RATE_HZ, SAMPLE_BYTES

from ...client.resuming import Reconnected, Reconnecting

UNIT_ID: Final = "unit-"
"""The beginning of the ids of our appends; the unit's number follows."""


@attrs.frozen(kw_only=True)
class Happening:
    """A message from the server.

    `at_s`: seconds since the conversation began. `unit`: the second of input that it answers, from
    0, if any. `round_trip_ms`: from sending that second to this; None if unknown.
    """

    at_s: float
    message: ServerMessage
    unit: int | None = None
    round_trip_ms: float | None = None


def _no_metrics() -> Metrics:
    return Metrics(kv_cache_length=0, recording="off")


@attrs.define
class Tally:
    """The sums of one conversation.

    Attributes:
        place: in the queue; None outside the queue.
        created: the server's message on the session; None before it came.
        speaking: whether the model spoke last.
        turns: the model's words, a text for each turn.
        pcm: its voice so far, float32 LE, 24 kHz mono.
        outcomes: units that were answered, failed ones included.
        last_listen: the number of the unit it last listened to; -1 before.
        last_speech: the number of the unit it last spoke in; -1 before.
        wall_ms: the units' times inside the server.
        round_trips_ms: the units' times as seen by the client.
        away: whether the connection is lost, and may come back.
        away_s: the time without a connection, of all losses that are over.
        reconnects: the losses that are over.
        failure: why the conversation did not end well, in one line.
    """

    place: QueuePlace | None = None
    created: Created | None = None
    speaking: bool = False
    turns: list[str] = attrs.field(factory=list)
    pcm: bytearray = attrs.field(factory=bytearray)
    outcomes: int = 0
    listens: int = 0
    speeches: int = 0
    last_listen: int = -1
    last_speech: int = -1
    metrics: Metrics = attrs.field(factory=_no_metrics)
    wall_ms: list[float] = attrs.field(factory=list)
    round_trips_ms: list[float] = attrs.field(factory=list)
    errors: list[ErrorReport] = attrs.field(factory=list)
    closed: Closed | None = None
    away: bool = False
    away_s: float = 0.0
    reconnects: int = 0
    failure: str | None = None
    _sent_at_s: list[float] = attrs.field(factory=list)
    _previous: ServerMessage | None = None
    _previous_unit: int = -1
    _in_turn: bool = False

    @property
    def units_sent(self) -> int:
        """Seconds of input that were sent."""
        return len(self._sent_at_s)

    @property
    def reply_s(self) -> float:
        """Seconds of speech received."""
        return len(self.pcm) / SAMPLE_BYTES / OUTPUT_RATE_HZ

    @property
    def text(self) -> str:
        """All text of the model."""
        return " ".join(turn.strip() for turn in self.turns if turn.strip())

    @property
    def is_hopeless(self) -> bool:
        """Whether the server refused our input, so that it would refuse more."""
        return any(report.code in CLIENT_ERRORS for report in self.errors)

    def connects(self, change: Reconnecting | Reconnected) -> None:
        """Take note that the connection is lost, or back."""
        self.away = isinstance(change, Reconnecting)
        if isinstance(change, Reconnected):
            self.away_s += change.away_s
            self.reconnects += 1

    def sent(self, at_s: float) -> None:
        """Take note that a second of input goes out."""
        self._sent_at_s.append(at_s)

    def heard(self, message: ServerMessage, at_s: float) -> Happening:
        """Add a message that came `at_s` seconds after the conversation began."""
        unit = round_trip_ms = None
        match message:
            case Queued(place=place) | QueueUpdate(place=place):
                self.place = place
            case QueueDone():
                self.place = None
            case Created():
                self.created = message
            case Listen() | Speech():
                unit, round_trip_ms = self._add_unit(message, at_s)
            case ErrorReport():
                self._add_error(message)
            case Closed():
                self.closed = message
        self._previous = message
        return Happening(at_s=at_s, message=message, unit=unit, round_trip_ms=round_trip_ms)

    def _add_unit(self, message: Listen | Speech, at_s: float) -> tuple[int, float | None]:
        is_new, unit = self._unit_of(message)
        self._previous_unit = unit
        self.metrics = message.metrics
        self.speaking = isinstance(message, Speech)
        if isinstance(message, Speech):
            self.last_speech = unit
            self._add_speech(message)
        else:
            self.last_listen = unit
            self._in_turn = False
        round_trip_ms = self._round_trip_ms(message, unit, at_s)
        if is_new:
            self.outcomes += 1
            self.listens += not self.speaking
            self.speeches += self.speaking
            self.wall_ms.append(message.metrics.wall_clock_ms)
            if round_trip_ms is not None:
                self.round_trips_ms.append(round_trip_ms)
        return unit, round_trip_ms

    def _unit_of(self, message: Listen | Speech) -> tuple[bool, int]:
        """Return whether a unit is new, and its number."""
        number = message.input_id.removeprefix(UNIT_ID)
        if message.input_id != number and number.isdecimal():
            return int(number) != self._previous_unit, int(number)
        text_before = isinstance(self._previous, Speech) and not self._previous.pcm
        if text_before and isinstance(message, Speech) and message.pcm and not message.text:
            return False, self._previous_unit
        return True, self.outcomes + message.metrics.dropped_units

    def _round_trip_ms(self, message: Listen | Speech, unit: int, at_s: float) -> float | None:
        is_named = message.input_id.startswith(UNIT_ID)
        if unit >= self.units_sent or not (is_named or message.metrics.dropped_units == 0):
            return None
        return round((at_s - self._sent_at_s[unit]) * 1000, 3)

    def _add_speech(self, speech: Speech) -> None:
        if not self._in_turn:
            self.turns.append("")
        self.turns[-1] += speech.text
        self.pcm += speech.pcm
        self._in_turn = not speech.end_of_turn

    def _add_error(self, report: ErrorReport) -> None:
        self.errors.append(report)
        self.outcomes += report.code is ErrorCode.INFERENCE_ERROR
