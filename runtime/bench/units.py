"""How long a unit takes, as a client sees it: a real server, real WebSockets, a unit a second.

The server is a process of its own, started by the command line with recording on. Each client says
a second of speech and shows a picture every second, by the clock and not by when it was answered.
A unit's time runs from handing its append to the client's socket until its last frame (a listen,
or the speech's text and sound) was received and parsed; what the server says of it is its own
`wall_clock_ms`, from the unit's start to its result.

Clients come either spread evenly over the second, or all in the same moment, which is the worst
that a number of clients can do to a model that computes one unit at a time.
"""

from __future__ import annotations

import time
from typing import Final, Literal

import anyio
import attrs
import click

from protocol.messages import Created, ErrorReport, Listen, QueueDone, Speech
from protocol.requests import Append, Init

from ..client.errors import ClientError
from ..client.session import ClientSession, connect
from .material import Speech as Said
from .material import Times, shown_frame, sum_up

Arrival = Literal["spread", "together"]

INSTRUCTIONS: Final = "Answer what you hear and see."
SESSIONS_WAIT_S: Final = 60.0
"""For all sessions to be set up; a prompt takes a small part of a second."""
ANSWERS_WAIT_S: Final = 10.0
"""For what was not answered when the last unit was sent; then it counts as unanswered."""
OFFSET_S: Final = 3
"""Each client is so many seconds further in what it says than the one before."""


class BenchError(click.ClickException):
    """The bench cannot go on; the text says why, in one line."""


@attrs.frozen(kw_only=True)
class UnitsResult:
    """What became of the units of one run.

    Attributes:
        sessions: at once.
        arrival: when in the second their units come.
        units: sent in all.
        answered: of them.
        speaking_share: of the answered, how many the model spoke in.
        dropped: units that the server dropped, as it was behind (B7).
        latency: as the clients saw it.
        latency_listening: of the units that were listened to; None where there were none.
        latency_speaking: of those that were spoken in.
        server: as the server says, without queues and network.
        p50_of_second: the median as a part of the second that a unit has.
        p99_of_second: likewise.
    """

    sessions: int
    arrival: Arrival
    units: int
    answered: int
    speaking_share: float
    dropped: int
    latency: Times
    latency_listening: Times | None
    latency_speaking: Times | None
    server: Times
    p50_of_second: float
    p99_of_second: float


# -- the clients --------------------------------------------------------------------------------


async def measure_units(
    url: str, speech: Said, *, sessions: int, seconds: int, arrival: Arrival
) -> UnitsResult:
    """Have clients talk to a server, each a unit a second, and measure their units.

    Args:
        url: the server's.
        speech: what they say.
        sessions: clients at once.
        seconds: units that each of them sends.
        arrival: when in the second.

    Raises:
        BenchError: a session could not be had, or ended before its time.
    """
    begin = anyio.Event()
    frame = shown_frame()
    clients = [
        _Client(
            units=[
                Append(
                    pcm=speech.second(second + OFFSET_S * number),
                    frames=(frame,),
                    input_id=str(second),
                )
                for second in range(seconds)
            ],
            begin=begin,
            late_s=number / sessions if arrival == "spread" else 0.0,
        )
        for number in range(sessions)
    ]
    async with anyio.create_task_group() as tasks:
        for client in clients:
            tasks.start_soon(client.run, url)
        with anyio.move_on_after(SESSIONS_WAIT_S) as setting_up:
            for client in clients:
                await client.is_ready.wait()
        begin.set()
        if setting_up.cancelled_caught:
            tasks.cancel_scope.cancel()
    if setting_up.cancelled_caught:
        raise BenchError(f"{sessions} sessions were not set up within {SESSIONS_WAIT_S:g} s")
    failure = next((client.failure for client in clients if client.failure), None)
    if failure is not None:
        raise BenchError(f"a session of {sessions} failed: {failure}")
    return _sum_up(clients, sessions=sessions, arrival=arrival)


class _Client:
    """One session; its appends are named by their number, and so are the answers."""

    def __init__(self, *, units: list[Append], begin: anyio.Event, late_s: float) -> None:
        self.is_ready = anyio.Event()
        self.failure: str | None = None
        self.latency_ms: dict[int, float] = {}
        self.server_ms: dict[int, float] = {}
        self.spoken: set[int] = set()
        self.dropped = 0
        self.units = units
        self._begin = begin
        self._late_s = late_s
        self._sent_ns: list[int] = []
        self._all_answered = anyio.Event()

    async def run(self, url: str) -> None:
        """Hold the session, to its end."""
        try:
            async with connect(url, mode="video") as session, anyio.create_task_group() as tasks:
                async for message in session:
                    if isinstance(message, Listen | Speech):
                        self._take(message)
                    elif isinstance(message, QueueDone):
                        await session.init(Init(instructions=INSTRUCTIONS))
                    elif isinstance(message, Created):
                        tasks.start_soon(self._send, session)
                    elif isinstance(message, ErrorReport):
                        self.failure = f"{message.message} ({message.code})"
                tasks.cancel_scope.cancel()
        except* ClientError as errors:
            self.failure = self.failure or _first(errors)
        if not self._all_answered.is_set() and not self._sent_ns:
            self.failure = self.failure or "the server ended it at once"
        self.is_ready.set()

    async def _send(self, session: ClientSession) -> None:
        self.is_ready.set()
        await self._begin.wait()
        began_s = anyio.current_time() + self._late_s
        for number, unit in enumerate(self.units):
            await anyio.sleep_until(began_s + number)
            self._sent_ns.append(time.perf_counter_ns())
            await session.append(unit)
        with anyio.move_on_after(ANSWERS_WAIT_S):
            await self._all_answered.wait()
        await session.close()

    def _take(self, message: Listen | Speech) -> None:
        """Note a frame of a unit's answer; the last one counts."""
        number = int(message.input_id)
        self.latency_ms[number] = (time.perf_counter_ns() - self._sent_ns[number]) / 1e6
        self.server_ms[number] = message.metrics.wall_clock_ms
        self.dropped = message.metrics.dropped_units
        if isinstance(message, Speech):
            self.spoken.add(number)
        is_silent = not message.metrics.n_tts_tokens  # it listens, or speaks without a sound
        is_whole = is_silent or (isinstance(message, Speech) and bool(message.pcm))
        if is_whole and len(self.latency_ms) == len(self.units):
            self._all_answered.set()


def _first(errors: BaseExceptionGroup[Exception]) -> str:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)


def _sum_up(clients: list[_Client], *, sessions: int, arrival: Arrival) -> UnitsResult:
    listening: list[float] = []
    speaking: list[float] = []
    for client in clients:
        for number, latency_ms in client.latency_ms.items():
            (speaking if number in client.spoken else listening).append(latency_ms)
    if not (listening or speaking):
        raise BenchError("no unit was answered")
    latency = sum_up([*listening, *speaking])
    return UnitsResult(
        sessions=sessions,
        arrival=arrival,
        units=sum(len(client.units) for client in clients),
        answered=latency.count,
        speaking_share=round(len(speaking) / latency.count, 3),
        dropped=sum(client.dropped for client in clients),
        latency=latency,
        latency_listening=sum_up(listening) if listening else None,
        latency_speaking=sum_up(speaking) if speaking else None,
        server=sum_up([ms for client in clients for ms in client.server_ms.values()]),
        p50_of_second=round(latency.p50_ms / 1000, 4),
        p99_of_second=round(latency.p99_ms / 1000, 4),
    )
