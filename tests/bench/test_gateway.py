"""The bench of the gateway: it runs, its load counts rightly, its yardsticks do the same work.

No time is judged here.
"""

from __future__ import annotations

import json
import math
import socket
import statistics
import struct
from base64 import b64decode
from contextlib import closing
from importlib import import_module
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import anyio
import attrs
import numpy as np
import orjson
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from protocol.values.messages import Speech
from protocol.values.model import OUTPUT_RATE_HZ, SAMPLE_BYTES, UNIT_BYTES
from protocol.values.requests import Append, Request
from protocol.wire.codec import Context, encode_base64, parse_frame
from protocol.wire.dialects.realtime import REALTIME
from runtime.commands.bench import Times
from tests.bench.gateway import __main__ as command
from tests.bench.gateway import measure as gateway
from tests.bench.gateway.child import GatewayBenchError, child
from tests.bench.gateway.load import (
    CLOSE,
    PING,
    PONG,
    SMALL_BYTES,
    TEXT,
    Link,
    LoadError,
    client_frame,
    connect,
)
from tests.bench.gateway.material import (
    CODINGS,
    CONTENDERS,
    END,
    OPENAI,
    PATTERNS,
    RECORDING,
    Coding,
    Contender,
    Exchange,
    Pattern,
    Plan,
    deltas,
    make_exchanges,
    make_plan,
)
from tests.bench.gateway.measure import GatewayResult, Run, measure_gateway
from tests.bench.gateway.meter import STAGES, Stages
from tests.bench.gateway.servers import _Listener
from tests.sessions.in_memory import numbers

SMALL: Final = Plan(
    patterns=(
        Pattern(name="flat", sessions=2, units=4, pace="flat"),
        Pattern(name="slow", sessions=2, units=1, pace="slow", has_picture=False),
        Pattern(name="together", sessions=3, units=1, pace="together"),
        Pattern(
            name="pieces",
            sessions=2,
            units=1,
            pace="spread",
            has_picture=False,
            pieces=50,
            coding="pcm16",
        ),
        *(attrs.evolve(each, sessions=2, units=1) for each in RECORDING[-len(OPENAI) :]),
    ),
    memory=Pattern(name="memory", sessions=3, units=1, pace="spread"),
    first=Pattern(name="first", sessions=1, units=2, pace="flat"),
    capacity=(Pattern(name="many", sessions=4, units=1, pace="spread"),),
    settle_s=0.05,
)
BUFFER: Final = memoryview(bytearray(1 << 18))

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def exchange() -> Exchange:
    """A unit."""
    return make_exchanges(1)[0]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> GatewayResult:
    """A short run, over real sockets and processes."""
    folder = tmp_path_factory.mktemp("gateway")

    async def run() -> GatewayResult:
        return await measure_gateway(folder, SMALL, rounds=2, machine={"cores": 1})

    return anyio.run(run, backend="trio")


# -- the whole ----------------------------------------------------------------------------------


@pytest.mark.soak
def test_every_pattern_is_run_against_every_contender_in_every_round(found: GatewayResult) -> None:
    """A ratio compares figures of different hours, or of a server that was left out."""
    ran = [(run.round, run.pattern, run.contender) for run in found.runs]
    assert sorted(ran) == sorted(
        (number, pattern.name, contender)
        for number in range(2)
        for pattern in SMALL.patterns
        for contender in pattern.contenders
    )
    starts = [contender for _, pattern, contender in ran if pattern == "flat"][:: len(CONTENDERS)]
    assert starts[0] != starts[-1]
    units = {pattern.name: pattern.sessions * pattern.units for pattern in SMALL.patterns}
    assert not any(run.missed for run in found.runs)
    assert all(run.units == units[run.pattern] == run.latency.count for run in found.runs)


@pytest.mark.soak
def test_figures_are_figures(found: GatewayResult) -> None:
    """A chart of them breaks, or shows a server that took no CPU."""
    body = json.loads(orjson.dumps(attrs.asdict(found)))
    assert all(math.isfinite(number) for number in numbers(body))
    assert all(run.cpu_us > 0 and run.latency.p50_ms > 0 for run in found.runs)
    assert found.unit_bytes > UNIT_BYTES * 4 // 3
    assert set(found.memory_bytes) == set(found.busy_bytes) == set(CONTENDERS)
    assert all(found.busy_bytes[name] >= size for name, size in found.memory_bytes.items())
    assert {run.contender for run in found.capacity} == {"recorded", "websockets"}


@pytest.mark.soak
def test_only_what_records_has_a_recorder(found: GatewayResult) -> None:
    """What recording costs is a ratio of two servers that both record, or that both do not."""
    for run in found.runs:
        assert (run.recorder_us > 0) == (run.contender == "recorded")
    assert all(ratio > 0 for ratio in found.recorded_of_antiphon.values())
    assert [name for name, ratio in found.recorded_of_logged.items() if not ratio] == [*OPENAI]
    assert set(found.recording_us) == {pattern.name for pattern in SMALL.patterns}


@pytest.mark.parametrize(("module", "name"), [stage[1:] for stage in STAGES])
def test_every_stage_is_a_function(module: str, name: str) -> None:
    """A function was renamed, and the bench stops hours later."""
    assert callable(attrgetter(name)(import_module(module)))


@pytest.mark.soak
def test_every_stage_is_seen(found: GatewayResult) -> None:
    """A function was renamed, and its stage is silently the transport's."""
    assert {stage for stage, _, _ in STAGES} < set(found.stages_us)
    assert all(found.stages_us[stage] > 0 for stage, _, _ in STAGES)
    assert found.stages_us["recorder's thread"] > 0


@pytest.mark.soak
def test_the_tables_show_it_all(found: GatewayResult) -> None:
    """Somebody runs the bench for ten minutes and sees an error instead of a table."""
    console = command.Console(record=True, width=100)
    command.show(console, found)
    text = console.export_text()
    for word in (*CONTENDERS, *(pattern.name for pattern in SMALL.patterns), "many", "Memory"):
        assert word in text


def test_a_server_that_does_not_start_is_one_line(tmp_path: Path) -> None:
    """A traceback of a child says nothing to whoever ran the bench."""

    async def run() -> None:
        async with child("wrong", tmp_path, (), "runtime.commands.bench.no_such_module"):
            pass

    with pytest.raises(GatewayBenchError, match=r"^wrong gave no answer: .*no_such_module"):
        anyio.run(run, backend="trio")


def test_without_uvloop_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench dies of an import error in a process that nobody sees."""
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    done = CliRunner().invoke(command.gateway_command, [])
    assert done.exit_code == 1
    assert "pip install uvloop" in done.output


def test_the_plan_follows_the_options() -> None:
    """`--sessions 0` or `--pattern` measures for minutes what nobody asked for."""
    assert make_plan((), 0).capacity == ()
    assert make_plan((), 500).patterns == PATTERNS
    (only,) = make_plan((PATTERNS[2].name,), 500).patterns
    assert only is PATTERNS[2]
    capacity = make_plan((), 500).capacity
    assert [(it.sessions, it.pieces) for it in capacity] == [(500, 1), (500, 1), (300, 50)]
    assert {it.pace for it in capacity} == {"spread"}


# -- sums ---------------------------------------------------------------------------------------


def made(number: int, contender: Contender, cpu_us: float, **changes: Any) -> Run:
    """A run of the first pattern."""
    run = Run(
        round=number,
        contender=contender,
        pattern=PATTERNS[0].name,
        units=1,
        missed=0,
        cpu_us=cpu_us,
        loop_us=cpu_us,
        recorder_us=0.0,
        latency=Times(count=1, p50_ms=cpu_us, p99_ms=cpu_us, max_ms=cpu_us),
        load_busy=0.1,
        load_lag_ms=0.1,
    )
    return attrs.evolve(run, **changes)


def test_a_ratio_is_taken_within_a_round() -> None:
    """An hour in which the machine was slow decides who is faster."""
    ours, theirs = (100.0, 1000.0, 210.0), (50.0, 500.0, 100.0)
    runs = [
        run
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True))
        for run in (made(number, "antiphon", one), made(number, "websockets", other))
    ]
    row = gateway._row(runs, PATTERNS[0], "antiphon")
    assert row.of_websockets == {"cpu": 2.0, "p50": 2.0, "p99": 2.0}
    assert row.cpu_us == statistics.median(ours)


@pytest.mark.parametrize(
    ("changes", "bound"), [({}, False), ({"load_lag_ms": 5.1}, True), ({"load_busy": 0.81}, True)]
)
def test_a_load_that_was_late_or_busy_is_told(changes: dict[str, float], bound: bool) -> None:
    """The server is blamed for what the load could not do."""
    assert gateway._was_bound(made(0, "echo", 1.0, **changes)) is bound


# -- stages -------------------------------------------------------------------------------------


def test_a_stage_within_a_stage_counts_once() -> None:
    """The parts of a unit add up to more than the unit."""
    now = [0]
    stages = Stages(lambda: now[0])

    def inner(took: int) -> None:
        now[0] += took

    def outer() -> None:
        now[0] += 5
        measured(7)
        with pytest.raises(TypeError):
            measured()
        measured(3)

    measured = stages.wrap("parse", inner)
    stages.wrap("step", outer)()
    assert stages.spent_ns["parse"] == 10
    assert stages.spent_ns["step"] == 5
    assert sum(stages.spent_ns.values()) == now[0]


# -- the load -----------------------------------------------------------------------------------


def server_frame(payload: bytes, opcode: int = TEXT) -> bytes:
    """A frame as a server sends it (RFC 6455, 5.2)."""
    size = len(payload)
    if size < 126:
        return struct.pack("!BB", 0x80 | opcode, size) + payload
    if size < 1 << 16:
        return struct.pack("!BBH", 0x80 | opcode, 126, size) + payload
    return struct.pack("!BBQ", 0x80 | opcode, 127, size) + payload


def pair() -> tuple[Link, socket.socket]:
    """A link and the server's end of it."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(10)
    return Link(ours), theirs


def feed(link: Link, theirs: socket.socket, data: bytes) -> int:
    """Let a link read what its server sends; gives how many units were answered."""
    answered = at = 0
    while at < len(data):
        at += theirs.send(data[at : at + 60_000])
        while count := link.receive(BUFFER):
            answered += count
    return answered


def sound(count: int = OUTPUT_RATE_HZ * SAMPLE_BYTES) -> bytes:
    """An audio delta of so many bytes of PCM."""
    return deltas("1", bytes(count))[1]


@given(cuts=st.lists(st.integers(1, 400_000), max_size=12), small=st.lists(st.binary(max_size=300)))
def test_the_load_counts_answers_however_they_arrive(cuts: list[int], small: list[bytes]) -> None:
    """A unit's time ends amid its answer, or an answer is missed and the bench hangs."""
    frames = [server_frame(sound()), *map(server_frame, small), server_frame(sound())]
    stream = b"".join(frames)
    link, theirs = pair()
    with closing(theirs), closing(link.socket):
        link.due_ns.extend([0, 0])
        ends = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
        answered = [feed(link, theirs, stream[at:end]) for at, end in pairwise(ends)]
        assert sum(answered) == len(link.latency_ns) == 2
        assert not link.due_ns


def test_the_load_answers_pings() -> None:
    """A server drops the sessions of a long run, for they seem dead."""
    link, theirs = pair()
    with closing(theirs), closing(link.socket):
        theirs.sendall(server_frame(b"hello", PING))
        link.receive(BUFFER)
        assert theirs.recv(100) == client_frame(PONG, b"hello")


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (server_frame(struct.pack("!H", 1013) + b"queue_full", CLOSE), "queue_full"),
        (server_frame(b'{"type":"error","error":{"code":"not_ready"}}'), "not_ready"),
        (server_frame(sound(400_000)), "no second of speech"),
    ],
)
def test_the_load_stops_where_a_server_fails(frame: bytes, says: str) -> None:
    """A server that refuses everything is found to be the fastest of all."""
    link, theirs = pair()
    with closing(theirs), closing(link.socket):
        link.due_ns.append(0)
        with pytest.raises(LoadError, match=says):
            feed(link, theirs, frame)


def test_the_load_notices_a_lost_connection() -> None:
    """The bench waits for minutes for a server that has crashed."""
    link, theirs = pair()
    theirs.close()
    with closing(link.socket), pytest.raises(LoadError, match="closed"):
        link.receive(BUFFER)


def test_a_refused_handshake_is_told() -> None:
    """The bench waits for a session that a server has refused."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        answer = b"HTTP/1.1 503 Service Unavailable\r\n\r\n"

        async def run() -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anyio.to_thread.run_sync, refuse)
                with pytest.raises(LoadError, match="503"):
                    await anyio.to_thread.run_sync(connect, port, "/")

        def refuse() -> None:
            stream, _ = server.accept()
            with closing(stream):
                stream.recv(4096)
                stream.sendall(answer)

        anyio.run(run)


@given(payload=st.binary(max_size=70_000))
def test_frames_are_masked_as_the_standard_says(payload: bytes) -> None:
    """A server is given noise, and its refusal is measured."""
    frame = client_frame(TEXT, payload)
    width = {126: 2, 127: 8}.get(frame[1] & 0x7F, 0)
    size = int.from_bytes(frame[2 : 2 + width]) if width else frame[1] & 0x7F
    key, body = frame[2 + width : 6 + width], frame[6 + width :]
    assert (frame[0], frame[1] >> 7, size) == (0x81, 1, len(payload))
    mask = np.resize(np.frombuffer(key, np.uint8), len(body))
    assert (np.frombuffer(body, np.uint8) ^ mask).tobytes() == payload


# -- the same work ------------------------------------------------------------------------------


def test_a_unit_is_one_that_we_take(exchange: Exchange) -> None:
    """Refusals of what is no unit are measured."""
    context = Context(mode="video", sliding_windows=("off",))
    for frame, pictures in ((exchange.frame, 1), (exchange.pieces(1)[0], 0)):
        append = REALTIME.parse(Request.APPEND, parse_frame(frame), context)
        assert isinstance(append, Append)
        assert (len(append.pcm), len(append.frames)) == (UNIT_BYTES, pictures)


def test_the_yardsticks_say_what_we_say(exchange: Exchange) -> None:
    """A yardstick that says less is cheaper than us for that alone."""
    text, audio = deltas("7", exchange.pcm)
    (words,) = REALTIME.decode(parse_frame(text.decode()))
    (spoken,) = REALTIME.decode(parse_frame(audio.decode()))
    assert isinstance(words, Speech)
    assert isinstance(spoken, Speech)
    assert (words.input_id, words.pcm, spoken.pcm) == ("7", b"", exchange.pcm)
    assert words.text
    ours = REALTIME.encode(attrs.evolve(spoken, text=words.text))
    assert abs(sum(map(len, ours)) - len(text) - len(audio)) < 0.001 * len(audio)
    assert len(text) <= SMALL_BYTES < len(audio)


def test_the_yardstick_checks_what_we_check(exchange: Exchange) -> None:
    """A yardstick that looks at nothing is cheaper than us for that alone."""
    heard = _Listener()
    assert heard.take(exchange.pieces(1)[0].encode())
    assert heard.jpeg is None
    assert heard.take(exchange.frame.encode())
    assert heard.jpeg is not None
    assert heard.jpeg.startswith(b"\xff\xd8")
    samples = np.zeros(UNIT_BYTES // SAMPLE_BYTES, "<f4")
    samples[5] = np.nan
    message = orjson.dumps(
        {"type": "input.append", "input": {"audio": encode_base64(samples.tobytes())}}
    )
    with pytest.raises(ValueError, match="no sound"):
        heard.take(message)
    with pytest.raises(ValueError, match=r"[Bb]ase64|padding|character"):
        heard.take(b'{"type":"input.append","input":{"audio":"@@@@"}}')


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("count", [1, 10, 50])
def test_pieces_are_the_second_that_they_are_cut_from(
    exchange: Exchange, coding: Coding, count: int
) -> None:
    """Ratios between pieces compare different amounts of sound."""
    pieces = exchange.pieces(count, coding)
    assert [piece.endswith(END) for piece in pieces] == [False] * (count - 1) + [True]
    heard = _Listener()
    assert [heard.take(piece.encode()) for piece in pieces] == [False] * (count - 1) + [True]
    bodies = [orjson.loads(piece) for piece in pieces]
    sound = b"".join(b64decode((body.get("input") or body)["audio"]) for body in bodies)
    assert len(sound) == UNIT_BYTES // (1 if coding == "float32" else 2)


def test_the_keys_are_documented() -> None:
    """A reader of the JSON has to guess what a figure is."""
    text = Path(__file__).parents[2].joinpath("docs", "performance.md").read_text("utf-8")
    names = {field.name for cls in (GatewayResult, Run) for field in attrs.fields(cls)}
    assert sorted(name for name in names if f"`{name}`" not in text) == []
