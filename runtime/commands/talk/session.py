"""One conversation with a server: sends a file second by second, and waits for the answer.

Two tasks: one sends, one receives. The rules:

- Second n is sent n seconds after the first, by the clock and not by how long sending took, so that
  an hour does not drift; `fast` sends it when second n - 1 was answered instead.
- A lost connection comes back by itself, and the file waits for it: the time away does not count.
- After the file comes silence, until the model has answered the last sound and listens again, or
  `silence_s_max` has passed. Then `session.close`, and the server's own end is waited for.
- A server's error ends the conversation and becomes `Tally.failure`, one line; an `inference_error`
  costs a unit and the conversation goes on.

It shows nothing (`view`) and reads no file (`command`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Final, Protocol

import anyio
import attrs
import numpy as np

from protocol.values.messages import ErrorReport, QueueDone
from protocol.values.model import UNIT_BYTES
from protocol.values.modes import Mode
from protocol.values.requests import Append, Init
from protocol.values.state import Gate

from ...client.background import background
from ...client.errors import ClientError, ReportedError, SessionClosedError
from ...client.resuming import Reconnected, Reconnecting
from ...client.session import ClientSession, connect
from .tally import UNIT_ID, Happening, Tally

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


class Microphone(Protocol):
    """Sound as it is spoken."""

    def forget(self) -> None:
        """Drop what was heard so far."""

    def second(self) -> bytes | None:
        """Take the next second, float32 LE, 16 kHz mono; None before it is over."""


@attrs.frozen(kw_only=True)
class Plan:
    """The material of a conversation.

    Attributes:
        units: the file, float32 LE 16 kHz mono, cut by `cut_units`.
        frame: a JPEG for each second, in mode=video.
        silence_s_max: whole seconds of silence after the file, at most.
        fast: send a second as soon as the one before it was answered, not in real time.
        microphone: what is said in place of a file, until the conversation is stopped.
    """

    units: tuple[bytes, ...] = ()
    instructions: str = ""
    frame: bytes | None = None
    silence_s_max: int = 10
    fast: bool = False
    microphone: Microphone | None = None

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

    def heard(self, happening: Happening) -> None:
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
        tally.failure = str(error)
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
            self._observer.heard(self._tally.heard(message, self._clock()))
            match message:
                case QueueDone() if self._session.connection.gate is Gate.CONNECTED:
                    init = Init(instructions=self._plan.instructions, notices=True)
                    await self._session.init(init)
                case ErrorReport() if self._session.connection.gate is Gate.CONNECTED:
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
            await (self._say() if self._plan.microphone is None else self._say_live())
            if self._session.connection.gate is not Gate.CLOSED:
                await self._session.close(CLOSE_REASON)
        self._patience.deadline = anyio.current_time() + CLOSED_WAIT_S

    async def _say(self) -> None:
        count = len(self._plan.units) + self._plan.silence_s_max
        silence = bytes(UNIT_BYTES)
        started_s = anyio.current_time()
        for number in range(count + 1):
            await self._wait_turn(number, started_s)
            if self._is_over() or number == count:
                return
            unit = self._plan.units[number] if number < len(self._plan.units) else silence
            await self._send_second(number, unit)

    async def _say_live(self) -> None:
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
        tally, due_s = self._tally, started_s + number
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
        heard_out = tally.last_listen >= len(self._plan.units) - 1
        return (
            self._stopped
            or tally.is_hopeless
            or self._session.connection.gate is Gate.CLOSED
            or (is_file and heard_out and listens_again and self._plan.is_answered(tally))
        )
