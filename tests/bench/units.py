"""The duration of a unit as a client sees it: `python -m tests.bench.units --help`.

A real server, real WebSockets, a unit a second. The server runs in its own process, with recording
on. Each client sends a second of speech and a picture every second, by the clock: clients are
spread evenly, or all at once, the worst case for a model that computes one unit at a time. A unit's
time runs from passing its append to the client's socket until its last frame (a listen, or the
speech's text and sound) is received and parsed; the server's own `wall_clock_ms` runs from the
unit's start to its result.

Times depend on the machine, so each is compared within the same run: a unit with its second, eight
sessions with one. No limit fails.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Final

import anyio
import attrs
import click
from rich.console import Console
from rich.table import Table

from protocol.values.messages import Created, ErrorReport, Listen, QueueDone, Speech
from protocol.values.requests import Append, Init
from runtime.client.errors import ClientError
from runtime.client.session import ClientSession, connect
from runtime.commands import bench as engine
from runtime.commands.demo import model_option, sample, served
from runtime.net import process

INSTRUCTIONS: Final = "Answer what you hear and see."
SESSIONS_WAIT_S: Final = 60.0
"""For opening all sessions; a prompt takes a small part of a second."""
ANSWERS_WAIT_S: Final = 10.0
"""For the remaining answers after the last unit; then it counts as unanswered."""
OFFSET_S: Final = 3
"""Offset in seconds of each client's speech to the one before."""


@attrs.frozen(kw_only=True)
class UnitsResult:
    """The results of one run.

    Attributes:
        arrival: when in the second their units come.
        speaking_share: share of the answered units in which the model spoke.
        dropped: units dropped by a late server (B7).
        latency: at the clients.
        latency_listening: of listening units; None if there were none.
        latency_speaking: of speaking units; None if there were none.
        server: by the server, without queues and network.
        p50_of_second: the median as a part of the unit's second.
    """

    sessions: int
    arrival: engine.Arrival
    units: int
    answered: int
    speaking_share: float
    dropped: int
    latency: engine.Times
    latency_listening: engine.Times | None
    latency_speaking: engine.Times | None
    server: engine.Times
    p50_of_second: float
    p99_of_second: float


# -- the clients --------------------------------------------------------------------------------


async def measure_units(
    url: str, speech: engine.Speech, *, sessions: int, seconds: int, arrival: engine.Arrival
) -> UnitsResult:
    """Measure the units of clients, one a second; `BenchError`: a session fails or ends early."""
    begin = anyio.Event()
    frame = sample("frame.jpg").read_bytes()
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
        raise engine.BenchError(f"{sessions} sessions were not set up within {SESSIONS_WAIT_S:g} s")
    failure = next((client.failure for client in clients if client.failure), None)
    if failure is not None:
        raise engine.BenchError(f"a session of {sessions} failed: {failure}")
    return _sum_up(clients, sessions=sessions, arrival=arrival)


class _Client:
    """One session; its appends and answers are named by number."""

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
        """Hold the session to its end."""
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


def _sum_up(clients: list[_Client], *, sessions: int, arrival: engine.Arrival) -> UnitsResult:
    listening: list[float] = []
    speaking: list[float] = []
    for client in clients:
        for number, latency_ms in client.latency_ms.items():
            (speaking if number in client.spoken else listening).append(latency_ms)
    if not (listening or speaking):
        raise engine.BenchError("no unit was answered")
    latency = engine.sum_up([*listening, *speaking])
    return UnitsResult(
        sessions=sessions,
        arrival=arrival,
        units=sum(len(client.units) for client in clients),
        answered=latency.count,
        speaking_share=round(len(speaking) / latency.count, 3),
        dropped=sum(client.dropped for client in clients),
        latency=latency,
        latency_listening=engine.sum_up(listening) if listening else None,
        latency_speaking=engine.sum_up(speaking) if speaking else None,
        server=engine.sum_up([ms for client in clients for ms in client.server_ms.values()]),
        p50_of_second=round(latency.p50_ms / 1000, 4),
        p99_of_second=round(latency.p99_ms / 1000, 4),
    )


# -- the command ----------------------------------------------------------------------------------

SESSIONS_MANY: Final = 8
RUNS: Final[tuple[tuple[int, engine.Arrival], ...]] = (
    (1, "spread"),
    (SESSIONS_MANY, "spread"),
    (SESSIONS_MANY, "together"),
)
SECONDS: Final = 20
SECONDS_MAX: Final = 200
"""Longer sessions would reach the server's own limit."""


@attrs.frozen(kw_only=True)
class Bench:
    """The results of one run; `latency_ratio` is eight sessions' latency divided by one's."""

    machine: dict[str, str | int | float]
    model: str
    speech: str
    seconds: int
    units: list[UnitsResult]
    latency_ratio: dict[str, dict[str, float]]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@model_option
@click.option(
    "--seconds",
    type=click.IntRange(2, SECONDS_MAX),
    default=SECONDS,
    show_default=True,
    help="Units per session; there are three runs of this many seconds.",
)
def main(*, as_json: bool, model: str, seconds: int) -> None:
    """Measure how long a server takes for a unit: with one session, and with eight.

    It takes a minute and a half, and wants a machine that does nothing else meanwhile. A unit of
    `scripted` takes 3.7 ms of CPU for its tones and pauses; `tests.bench.gateway` measures a server
    whose model answers at once.
    """
    engine.print_found(process.run(_run, model, seconds), _show, as_json=as_json)


async def _run(model: str, seconds: int) -> Bench:
    speech = engine.load_speech()
    with tempfile.TemporaryDirectory(prefix="antiphon-bench-") as name:
        units: list[UnitsResult] = []
        engine.print_progress(f"starting a server with the {model} model")
        async with served(model, Path(name), "--slots", str(SESSIONS_MANY)) as url:
            for sessions, arrival in RUNS:
                engine.print_progress(f"{sessions} sessions, {arrival}, for {seconds} s")
                units.append(
                    await measure_units(
                        url, speech, sessions=sessions, seconds=seconds, arrival=arrival
                    )
                )
    return Bench(
        machine=engine.machine_facts(),
        model=model,
        speech=speech.name,
        seconds=seconds,
        units=units,
        latency_ratio={run.arrival: _ratio(run, units[0]) for run in units[1:]},
    )


def _ratio(many: UnitsResult, one: UnitsResult) -> dict[str, float]:
    return {
        "p50": round(many.latency.p50_ms / one.latency.p50_ms, 2),
        "p99": round(many.latency.p99_ms / one.latency.p99_ms, 2),
        "server_p50": round(many.server.p50_ms / one.server.p50_ms, 2),
        "server_p99": round(many.server.p99_ms / one.server.p99_ms, 2),
    }


# -- for people ---------------------------------------------------------------------------------


def _show(console: Console, found: Bench) -> None:
    facts = engine.machine_line(found.machine)
    console.print(f"{found.model} model, {found.seconds} s of {found.speech} a session; {facts}\n")
    console.print("A unit, p50 / p99 in ms", _units_table(found))


def _both(times: engine.Times | None) -> str:
    return "-" if times is None else f"{times.p50_ms:.1f} / {times.p99_ms:.1f}"


def _units_table(found: Bench) -> Table:
    runs = found.units
    ratios = [found.latency_ratio.get(run.arrival) for run in runs]
    ratios[0] = None
    rows: list[tuple[str, ...]] = [
        ("as a client sees it", *(_both(run.latency) for run in runs)),
        ("  listening", *(_both(run.latency_listening) for run in runs)),
        ("  speaking", *(_both(run.latency_speaking) for run in runs)),
        ("in the model", *(_both(run.server) for run in runs)),
        (
            "part of its second",
            *(f"{run.p50_of_second:.1%} / {run.p99_of_second:.1%}" for run in runs),
        ),
        (
            "times that of one session",
            *(f"{ratio['p50']:.2f} / {ratio['p99']:.2f}" if ratio else "" for ratio in ratios),
        ),
        ("units answered", *(f"{run.answered} of {run.units}" for run in runs)),
        ("  of them spoken", *(f"{run.speaking_share:.0%}" for run in runs)),
    ]
    names = [f"{run.sessions} {run.arrival}" if run.sessions > 1 else "1 session" for run in runs]
    return engine.table(["", *names], rows)


if __name__ == "__main__":
    main()
