"""One conversation with a server: sends a file second by second, and waits for the answer.

Two tasks: one sends, one receives. The rules:

- Second n is sent when it could have been spoken, n + 1 seconds after the beginning: a microphone
  sends it then, and a model that had it earlier would answer within it. The clock counts, and not
  how long sending took, so that an hour does not drift. `fast` sends it when second n - 1 was
  answered instead.
- A lost connection comes back by itself, and the file waits for it: the time away does not count.
- After the file comes silence, until the model has answered the last sound and listens again, or
  `silence_s_max` has passed. Then `session.close`, and the server's own end is waited for.
- A server's error ends the conversation and becomes `Tally.failure`, one line; an `inference_error`
  costs a unit and the conversation goes on.

`Tally` has the sums of a conversation so far, from the server's messages with their time; it does
no IO. A unit is known by the id of its append. Without ids, in some dialects and servers, outcomes
are counted: one for each unit, text and audio that follow each other being one. A dropped unit has
no outcome, so after one a count gives no round trips.

`Devices` records and plays by sounddevice (PortAudio). It calls from a thread of its own, so both
directions have a buffer with a lock. Sound that waits in the microphone's longer than
`CAPTURED_S_MAX` is dropped: a conversation is about now. There is no echo cancellation.

This file shows nothing and reads no file (`talk`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from importlib import import_module
from typing import Any, Final, Protocol, Self

import anyio
import attrs
import numpy as np

from protocol.values import messages as ms
from protocol.values.errors import CLIENT_ERRORS, ErrorCode
from protocol.values.limits import Mode
from protocol.values.model import INPUT_RATE_HZ, OUTPUT_RATE_HZ, SAMPLE_BYTES, UNIT_BYTES
from protocol.values.requests import Append, Init
from protocol.values.state import Gate

from ..client import terminal
from ..client.errors import ClientError, ReportedError, SessionClosedError
from ..client.resuming import Reconnected, Reconnecting
from ..client.session import ClientSession, connect
from ..client.websocket import background
from ..settings.extras import install

# -- sums ------------------------------------------------------------------------------------------


UNIT_ID: Final = "unit-"
"""The beginning of the ids of our appends; the unit's number follows."""


@attrs.frozen(kw_only=True)
class TimedMessage:
    """A message from the server.

    `at_s`: seconds since the conversation began. `unit`: the second of input that it answers, from
    0, if any. `round_trip_ms`: from sending that second to this; None if unknown.
    """

    at_s: float
    message: ms.ServerMessage
    unit: int | None = None
    round_trip_ms: float | None = None


@attrs.define
class Tally:
    """The sums of one conversation.

    Attributes:
        created: the server's message on the session; None before it came.
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

    created: ms.Created | None = None
    turns: list[str] = attrs.field(factory=list)
    pcm: bytearray = attrs.field(factory=bytearray)
    outcomes: int = 0
    listens: int = 0
    speeches: int = 0
    last_listen: int = -1
    last_speech: int = -1
    metrics: ms.Metrics = attrs.field(
        factory=lambda: ms.Metrics(kv_cache_length=0, recording="off")
    )
    wall_ms: list[float] = attrs.field(factory=list)
    round_trips_ms: list[float] = attrs.field(factory=list)
    errors: list[ms.ErrorReport] = attrs.field(factory=list)
    closed: ms.Closed | None = None
    away: bool = False
    away_s: float = 0.0
    reconnects: int = 0
    failure: str | None = None
    _sent_at_s: list[float] = attrs.field(factory=list)
    _previous: ms.ServerMessage | None = None
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

    def received(self, message: ms.ServerMessage, at_s: float) -> TimedMessage:
        """Add a message that came `at_s` seconds after the conversation began."""
        unit = round_trip_ms = None
        match message:
            case ms.Created():
                self.created = message
            case ms.Listen() | ms.Speech():
                unit, round_trip_ms = self._add_unit(message, at_s)
            case ms.ErrorReport():
                self.errors.append(message)
                self.outcomes += message.code is ErrorCode.INFERENCE_ERROR
            case ms.Closed():
                self.closed = message
        self._previous = message
        return TimedMessage(at_s=at_s, message=message, unit=unit, round_trip_ms=round_trip_ms)

    def _add_unit(self, message: ms.Listen | ms.Speech, at_s: float) -> tuple[int, float | None]:
        is_new, unit = self._unit_of(message)
        self._previous_unit = unit
        self.metrics = message.metrics
        if isinstance(message, ms.Speech):
            self.last_speech = unit
            self._add_speech(message)
        else:
            self.last_listen = unit
            self._in_turn = False
        round_trip_ms = self._round_trip_ms(message, unit, at_s)
        if is_new:
            self.outcomes += 1
            self.listens += isinstance(message, ms.Listen)
            self.speeches += isinstance(message, ms.Speech)
            self.wall_ms.append(message.metrics.wall_clock_ms)
            if round_trip_ms is not None:
                self.round_trips_ms.append(round_trip_ms)
        return unit, round_trip_ms

    def _unit_of(self, message: ms.Listen | ms.Speech) -> tuple[bool, int]:
        """Return whether a unit is new, and its number."""
        number = message.input_id.removeprefix(UNIT_ID)
        if message.input_id != number and number.isdecimal():
            return int(number) != self._previous_unit, int(number)
        text_before = isinstance(self._previous, ms.Speech) and not self._previous.pcm
        if text_before and isinstance(message, ms.Speech) and message.pcm and not message.text:
            return False, self._previous_unit
        return True, self.outcomes + message.metrics.dropped_units

    def _round_trip_ms(
        self, message: ms.Listen | ms.Speech, unit: int, at_s: float
    ) -> float | None:
        is_named = message.input_id.startswith(UNIT_ID)
        if unit >= self.units_sent or not (is_named or message.metrics.dropped_units == 0):
            return None
        return round((at_s - self._sent_at_s[unit]) * 1000, 3)

    def _add_speech(self, speech: ms.Speech) -> None:
        if not self._in_turn:
            self.turns.append("")
        self.turns[-1] += speech.text
        self.pcm += speech.pcm
        self._in_turn = not speech.end_of_turn


# -- microphone and loudspeaker --------------------------------------------------------------------


BLOCK_MS: Final = 20
"""Of both directions: short, as it adds to the delay of an answer."""
CAPTURED_S_MAX: Final = 3
"""A server that accepts nothing for longer has lost what was said meanwhile."""


class Devices:
    """The default microphone (16 kHz mono) and loudspeaker (24 kHz mono), while it is entered.

    `UnusableError` without sounddevice or PortAudio, and when it is entered without a device.
    """

    def __init__(self) -> None:
        self._package: Final = _sounddevice()
        self._lock: Final = threading.Lock()
        self._captured = bytearray()
        self._played = bytearray()
        self._streams: list[Any] = []
        self._amid_turn = False

    def __enter__(self) -> Self:
        """Open both."""
        sound = self._package
        try:
            self._open(sound.RawInputStream, INPUT_RATE_HZ, self._capture)
            self._open(sound.RawOutputStream, OUTPUT_RATE_HZ, self._sound)
        except (sound.PortAudioError, ValueError) as error:
            self.__exit__()
            raise terminal.UnusableError(f"--mic: no microphone or loudspeaker: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        """Close both."""
        while self._streams:
            self._streams.pop().close()

    def _open(self, kind: Callable[..., Any], rate_hz: int, callback: Callable[..., None]) -> None:
        stream = kind(
            samplerate=rate_hz,
            channels=1,
            dtype="float32",
            blocksize=rate_hz * BLOCK_MS // 1000,
            callback=callback,
        )
        self._streams.append(stream)
        stream.start()

    # -- the microphone ---------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop what was heard so far."""
        with self._lock:
            self._captured.clear()

    def second(self) -> bytes | None:
        """Take the next second, float32 LE, 16 kHz mono; None before it is over."""
        with self._lock:
            if len(self._captured) < UNIT_BYTES:
                return None
            unit = bytes(self._captured[:UNIT_BYTES])
            del self._captured[:UNIT_BYTES]
            return unit

    def _capture(self, data: Any, *_: object) -> None:
        with self._lock:
            self._captured += bytes(data)
            del self._captured[: max(0, len(self._captured) - CAPTURED_S_MAX * UNIT_BYTES)]

    # -- the loudspeaker --------------------------------------------------------------------------

    def play(self, message: ms.ServerMessage) -> None:
        """Play the model's sound; a listen during a turn, or an interruption, stops it."""
        match message:
            case ms.Speech(pcm=pcm, end_of_turn=is_end):
                self._amid_turn = not is_end
                with self._lock:
                    self._played += pcm
            case ms.Interrupted():
                self._stop()
            case ms.Listen() if self._amid_turn:
                self._stop()

    def _stop(self) -> None:
        self._amid_turn = False
        with self._lock:
            self._played.clear()

    def _sound(self, data: Any, frames: int, *_: object) -> None:
        wanted = frames * SAMPLE_BYTES
        with self._lock:
            piece = bytes(self._played[:wanted])
            del self._played[:wanted]
        data[:] = piece.ljust(wanted, b"\0")


def _sounddevice() -> Any:
    try:
        return import_module("sounddevice")
    except ImportError as error:
        text = f"--mic needs the extra 'mic': {install('mic')}"
        raise terminal.UnusableError(text) from error
    except OSError as error:  # sounddevice is there, and PortAudio is not
        text = f"--mic: {error}: install PortAudio (on Debian: apt install libportaudio2)"
        raise terminal.UnusableError(text) from error


# -- the conversation ------------------------------------------------------------------------------


LOOK_S: Final = 0.02
"""How often a microphone is looked at; its seconds are sent so much later at most."""
CLOSE_REASON: Final = "user_stop"
"""As 001's example has it."""
CLOSED_WAIT_S: Final = 10.0
"""A server says `session.closed` at once; a dead one is not waited for."""
ANSWER_WAIT_S: Final = 30.0
"""How long to wait for a unit without a clock (`fast`): thirty times its usual time."""
SOUND_LEVEL_MIN: Final = 0.01
"""A second whose loudest sample is below -40 dB of full scale counts as silent."""


@attrs.frozen(kw_only=True)
class Plan:
    """The material of a conversation.

    Attributes:
        units: the file, float32 LE 16 kHz mono, cut by `cut_units`.
        frame: a JPEG for each second, in mode=video.
        silence_s_max: whole seconds of silence after the file, at most.
        fast: send a second as soon as the one before it was answered, not in real time.
        microphone: what is said in place of a file, until the conversation is stopped; it plays
            what the server sends.
        record: whether the server may record it.
    """

    units: tuple[bytes, ...] = ()
    instructions: str = ""
    frame: bytes | None = None
    silence_s_max: int = 10
    fast: bool = False
    microphone: Devices | None = None
    record: bool = True

    @cached_property
    def last_sound(self) -> int:
        """The number of the last second that is not silent, which needs an answer."""
        return max((number for number, unit in enumerate(self.units) if has_sound(unit)), default=0)

    def is_answered(self, tally: Tally) -> bool:
        """Whether the model has spoken since the last second with sound."""
        return tally.last_speech >= self.last_sound


class Observer(Protocol):
    """Receives the events of a conversation as they happen; times are seconds since it began."""

    def sent(self, unit: int, at_s: float, *, has_sound: bool) -> None:
        """Take note that a second of input is being sent."""

    def received(self, timed: TimedMessage) -> None:
        """Take note of a server's message."""

    def connects(self, change: Reconnecting | Reconnected, at_s: float) -> None:
        """Take note that the connection is lost, or back."""


def cut_units(pcm: bytes) -> tuple[bytes, ...]:
    """Cut float32 LE, 16 kHz mono into seconds; the last one is filled up with silence."""
    starts = range(0, len(pcm), UNIT_BYTES)
    return tuple(pcm[start : start + UNIT_BYTES].ljust(UNIT_BYTES, b"\0") for start in starts)


def has_sound(unit: bytes) -> bool:
    """Whether a second of float32 LE is louder than the noise of a quiet room."""
    return bool(np.abs(np.frombuffer(unit, "<f4")).max() >= SOUND_LEVEL_MIN)


async def talk(
    url: str,
    plan: Plan,
    observer: Observer,
    *,
    mode: Mode,
    dialect: str = "realtime",
    key: str | None = None,
    tally: Tally | None = None,
    stop: anyio.Event | None = None,
) -> Tally:
    """Hold a conversation, to its end; cancelled, it drops the connection.

    Args:
        url: of the server; see `client.session.endpoint`.
        mode: `audio` or `video`.
        dialect: `realtime`, `duplex-v1` or `legacy-duplex`.
        key: the API key, if the server needs one.
        tally: the sums, which can be read meanwhile.
        stop: set by the caller to end the conversation politely before its time.

    Returns the tally; after an error it has a `failure`.
    """
    tally = tally or Tally()
    started_s = anyio.current_time()

    def on_connection(change: Reconnecting | Reconnected) -> None:
        tally.connects(change)
        observer.connects(change, anyio.current_time() - started_s)

    connecting = connect(
        url, mode=mode, dialect=dialect, key=key, resume=True, on_connection=on_connection
    )
    try:
        async with connecting as session:
            await converse(session, plan, observer, tally=tally, started_s=started_s, stop=stop)
    except ClientError as error:
        tally.failure = terminal.explain(error)
    return tally


async def converse(
    session: ClientSession,
    plan: Plan,
    observer: Observer,
    *,
    tally: Tally,
    started_s: float,
    stop: anyio.Event | None = None,
) -> None:
    """Hold a conversation over a connection that is open, and leave it open.

    Args:
        session: a session without a received message.
        tally: the sums; after an error it has a `failure`.
        started_s: the origin of times, by AnyIO's clock.
        stop: set by the caller to end the conversation politely before its time.
    """
    await _Conversation(
        session=session,
        plan=plan,
        observer=observer,
        tally=tally,
        clock=lambda: anyio.current_time() - started_s,
        stop=stop or anyio.Event(),
    ).run()
    tally.failure = tally.failure or _what_went_wrong(tally)


def _what_went_wrong(tally: Tally) -> str | None:
    if tally.errors:
        return str(ReportedError(tally.errors[0]))
    if tally.closed is None:
        return "the connection was closed before there was a session"
    if tally.closed.reason != "client":
        return f"the server ended the session: {tally.closed.reason}"
    return None


@attrs.define(kw_only=True)
class _Conversation:
    """The two tasks, and the event between them: `_changed` is set again with each message."""

    _session: ClientSession
    _plan: Plan
    _observer: Observer
    _tally: Tally
    _clock: Callable[[], float]
    _stop: anyio.Event
    _stopped: bool = False
    _changed: anyio.Event = attrs.field(init=False, factory=anyio.Event)
    _patience: anyio.CancelScope = attrs.field(init=False, factory=anyio.CancelScope)

    async def run(self) -> None:
        """Send and receive until the session is over."""
        async with background() as tasks:
            tasks.start_soon(self._send)
            tasks.start_soon(self._watch_stop)
            try:
                with self._patience:
                    await self._receive()
                if self._patience.cancelled_caught:
                    self._fail(f"the server did not end the session within {CLOSED_WAIT_S:g} s")
            except ClientError as error:
                self._tally.failure = str(error)

    # -- receiving ------------------------------------------------------------------------------

    async def _receive(self) -> None:
        async for message in self._session:
            if self._plan.microphone is not None:
                self._plan.microphone.play(message)
            self._observer.received(self._tally.received(message, self._clock()))
            match message:
                case ms.QueueDone() if self._session.connection.gate is Gate.CONNECTED:
                    plan = self._plan
                    init = Init(instructions=plan.instructions, notices=True, record=plan.record)
                    await self._session.init(init)
                case ms.ErrorReport() if self._session.connection.gate is Gate.CONNECTED:
                    self._stopped = True  # what was refused is our init: there is no other
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _watch_stop(self) -> None:
        await self._stop.wait()
        self._stopped = True
        self._notify()

    def _fail(self, failure: str) -> None:
        self._tally.failure = self._tally.failure or failure

    # -- sending --------------------------------------------------------------------------------

    async def _send(self) -> None:
        with suppress(SessionClosedError):  # the receiver is told, too, and knows more
            await self._until(lambda: self._session.can_append or self._is_over())
            await (self._send_file() if self._plan.microphone is None else self._send_live())
            if self._session.connection.gate is not Gate.CLOSED:
                await self._session.close(CLOSE_REASON)
        self._patience.deadline = anyio.current_time() + CLOSED_WAIT_S

    async def _send_file(self) -> None:
        count = len(self._plan.units) + self._plan.silence_s_max
        silence = bytes(UNIT_BYTES)
        started_s = anyio.current_time()
        for number in range(count + 1):
            await self._wait_turn(number, started_s)
            if self._is_over() or number == count:
                return
            unit = self._plan.units[number] if number < len(self._plan.units) else silence
            await self._send_second(number, unit)

    async def _send_live(self) -> None:
        microphone, number = self._plan.microphone, 0
        assert microphone is not None
        microphone.forget()  # what was said while the session was not there yet
        while not self._is_over():
            unit = microphone.second()
            if unit is None:
                await self._until(self._is_over, anyio.current_time() + LOOK_S)
                continue
            await self._send_second(number, unit)
            number += 1

    async def _send_second(self, number: int, unit: bytes) -> None:
        self._tally.sent(self._clock())
        self._observer.sent(number, self._clock(), has_sound=has_sound(unit))
        await self._session.append(self._append(number, unit))

    def _append(self, number: int, unit: bytes) -> Append:
        names_units = self._session.dialect == "realtime"  # 000 has no field for an id
        return Append(
            pcm=unit,
            frames=() if self._plan.frame is None else (self._plan.frame,),
            input_id=f"{UNIT_ID}{number}" if names_units else None,
        )

    async def _wait_turn(self, number: int, started_s: float) -> None:
        if self._plan.fast:
            await self._wait_answer(number)
            return
        tally, due_s = self._tally, started_s + number + 1
        while anyio.current_time() < due_s + tally.away_s and not self._is_over():
            await self._until(self._is_over, due_s + tally.away_s)

    async def _wait_answer(self, number: int) -> None:
        tally, reconnects = self._tally, -1
        while tally.away or tally.reconnects != reconnects:
            reconnects = tally.reconnects
            deadline_s = anyio.current_time() + ANSWER_WAIT_S
            if await self._until(lambda: self._is_over() or tally.outcomes >= number, deadline_s):
                return
        self._fail(f"the server did not answer a unit within {ANSWER_WAIT_S:g} s")
        self._stopped = True

    async def _until(self, condition: Callable[[], bool], deadline_s: float = float("inf")) -> bool:
        """Wait for a condition on the tally; return whether it came before the deadline."""
        with anyio.CancelScope(deadline=deadline_s):
            while not condition():
                await self._changed.wait()
        return condition()

    def _is_over(self) -> bool:
        """Whether all is sent: stopped, ended by the server, or answered."""
        tally = self._tally
        listens_again = tally.last_listen > tally.last_speech
        is_file = self._plan.microphone is None
        has_ended = tally.last_listen >= len(self._plan.units) - 1
        return (
            self._stopped
            or tally.is_hopeless
            or self._session.connection.gate is Gate.CLOSED
            or (is_file and has_ended and listens_again and self._plan.is_answered(tally))
        )
