"""`antiphon dev play`: clients get what the recorded one got, when it got it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import attrs
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from protocol.values.limits import NS_PER_S
from recorder.read.reader import LogReader, read
from replay.play import (
    Ended,
    Player,
    PlayOptions,
    PlayResult,
    PlayServer,
    Received,
    ScriptStep,
    Sent,
    address_of,
    play_command,
    read_opening,
    serve,
    steps,
)
from replay.story.wire import Wire
from runtime.access.gate import open_gate
from runtime.cli import main
from runtime.net.connection import WebSocketClosed
from runtime.net.listener import Address
from runtime.settings.settings import Settings
from tests.replay.test_logs import OPENED, Scene, write_log
from tests.sessions.in_memory import append_frame, close_frame, init_frame, on_virtual_time

GOLDEN = Path(__file__).parents[2] / "fixtures" / "logs"
VIDEO = GOLDEN / "v1-realtime-video.session.zst"
NAMES = (
    *("realtime-video", "duplex-v1-audio", "invalid-frame", "realtime-chat"),
    *("legacy-chat", "legacy-duplex", "transcription-drained"),
)
WAIT_S = 20.0
MS = 1_000_000


# -- a client -------------------------------------------------------------------------------------


def frames(log: Path, kind: str) -> list[Any]:
    """What was sent one way in a log."""
    return [record.fields["frame"] for record in read(log) if record.kind == kind]


@attrs.define
class Got:
    """What a client got."""

    frames: list[str | bytes] = attrs.field(factory=list)
    close: tuple[int | None, str | None] = (None, None)


def talk(url: str, says: Iterable[str | bytes]) -> Got:
    """Connect, say it all, and listen until the end."""
    heard = Got()
    with connect(url, max_size=None, open_timeout=WAIT_S, close_timeout=WAIT_S) as websocket:

        def listen() -> None:
            try:
                while True:
                    heard.frames.append(websocket.recv())
            except ConnectionClosed:
                pass

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            for frame in says:
                websocket.send(frame)
        except ConnectionClosed:
            pass
        listener.join(WAIT_S)
        heard.close = (websocket.close_code, websocket.close_reason)
    return heard


def played(
    options: PlayOptions, client: Callable[[str], Any], clients: int = 1
) -> tuple[list[Any], list[Any]]:
    """Play to clients at once, until all are done or, where nobody is counted, have left.

    Returns:
        What each of them returned, and what the server told.
    """
    found: list[Any] = []
    told: list[Any] = []

    async def run() -> None:
        here = Settings(host="127.0.0.1", port=0)

        def tell(event: str, **fields: object) -> None:
            told.append({"type": event, **fields})

        server = PlayServer(options, open_gate(here), tell)
        bound = anyio.Event()
        addresses: list[Address] = []

        def on_bound(all_of_them: tuple[Address, ...]) -> None:
            addresses.extend(all_of_them)
            bound.set()

        async def one() -> None:
            url = f"ws://127.0.0.1:{addresses[0].port}{address_of(options.opened)}"
            found.append(await anyio.to_thread.run_sync(client, url))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve, server, here, on_bound)
            with anyio.fail_after(WAIT_S):
                await bound.wait()
                async with anyio.create_task_group() as callers:
                    for _ in range(clients):
                        callers.start_soon(one)
            if options.clients_max is None:
                tasks.cancel_scope.cancel()

    anyio.run(run, backend="trio")
    return found, told


def options_of(log: Path, **fields: Any) -> PlayOptions:
    """Play a log as fast as its clients are, unless told otherwise."""
    opened = read_opening(log)
    return PlayOptions(log=log, opened=opened, **{"speed": 0.0, "clients_max": 1, **fields})


# -- over sockets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_client_that_says_the_same_gets_the_same(name: str) -> None:
    """A client would be tested against a server that nobody ever met."""
    log = GOLDEN / f"v1-{name}.session.zst"
    [heard], told = played(options_of(log, strict=True), partial(talk, says=frames(log, "rx")))
    assert heard.frames == frames(log, "tx")
    closes = [record.fields for record in read(log) if record.fields.get("type") == "Close"]
    assert heard.close == (closes[0]["code"], closes[0]["reason"])
    assert told[-1] == {
        "type": "ended",
        "client": 1,
        "how": "closed",
        "sent": len(heard.frames),
        "received": len(frames(log, "rx")),
        "differences": [],
    }


def test_several_clients_are_served_at_once() -> None:
    """A second client would wait for the first, or get the rest of its session."""
    options = options_of(VIDEO, clients_max=3)
    found, told = played(options, partial(talk, says=frames(VIDEO, "rx")), clients=3)
    assert [heard.frames == frames(VIDEO, "tx") for heard in found] == [True] * 3
    assert sorted(one["client"] for one in told if one["type"] == "ended") == [1, 2, 3]


def test_it_answers_where_the_recorded_server_did() -> None:
    """A client with a wrong address would seem to work."""

    def wrong(url: str) -> list[int]:
        statuses = []
        for path in ("/v1/realtime?mode=chat", "/ws/chat", "/nowhere"):
            with pytest.raises(InvalidStatus) as error:
                connect(url.partition("/v1")[0] + path).__enter__()
            statuses.append(error.value.response.status_code)
        return statuses

    [statuses], told = played(options_of(VIDEO, clients_max=None), wrong)
    assert statuses == [400, 404, 404]
    assert [one["type"] for one in told] == ["rejected"] * 3


def test_pages_of_other_origins_are_refused() -> None:
    """Any page that somebody looks at could fetch the recording out of their machine."""

    def page(url: str) -> int:
        with pytest.raises(InvalidStatus) as error:
            connect(url, origin=Origin("https://elsewhere.example")).__enter__()
        return int(error.value.response.status_code)

    [status], told = played(options_of(VIDEO, clients_max=None), page)
    assert (status, told[0]["type"]) == (403, "rejected")


def test_a_client_that_does_otherwise_is_told_of() -> None:
    """A client under test that says the wrong thing would pass."""
    says = [init_frame(), append_frame(), close_frame()]
    [heard], told = played(options_of(VIDEO, strict=True), partial(talk, says=says))
    assert heard.close == (1008, "frame 2 is close, recorded was append")
    assert told[-1]["how"] == "differed"
    assert told[-1]["differences"] == [{"index": 2, "expected": "append", "got": "close"}]


def test_a_client_that_does_otherwise_is_answered_all_the_same() -> None:
    """A client of another make could not be played to at all."""
    says = frames(VIDEO, "rx")
    says[7] = append_frame()  # in place of an event that does not exist
    [heard], told = played(options_of(VIDEO), partial(talk, says=says))
    assert heard.frames == frames(VIDEO, "tx")
    assert told[-1]["differences"] == [{"index": 7, "expected": "unknown", "got": "append"}]


def test_a_log_without_end_ends_as_the_server_did(tmp_path: Path) -> None:
    """A client could not be tried against a server that is killed."""
    scene = Scene()
    scene.activate()
    scene.unit(1)
    log = write_log(tmp_path, scene.records)
    [heard], told = played(options_of(log), partial(talk, says=frames(log, "rx")))
    assert heard.frames == frames(log, "tx")
    assert heard.close == (1006, "")
    assert told[-1]["how"] == "broken"


def test_a_log_that_is_gone_is_no_end_in_order(tmp_path: Path) -> None:
    """A client would take a server that has lost its recording for one that had said it all."""
    log = tmp_path / VIDEO.name
    log.write_bytes(VIDEO.read_bytes())
    options = options_of(log)
    log.unlink()
    [heard], told = played(options, partial(talk, says=[]))
    assert (heard.frames, heard.close) == ([], (1011, ""))
    assert [one["type"] for one in told] == ["connected", "failed", "ended"]


def test_where_the_recorded_client_left_this_one_may(tmp_path: Path) -> None:
    """A session that its client left would never end, or end as if the server had."""
    scene = Scene()
    scene.activate()
    scene.unit(1)
    scene._vanish()
    while scene.answer():
        pass
    scene.fin()
    log = write_log(tmp_path, scene.records)

    def leaves(url: str) -> int:
        with connect(url) as websocket:
            for frame in frames(log, "rx"):
                websocket.send(frame)
            return sum(1 for _ in zip(frames(log, "tx"), websocket, strict=False))

    [count], told = played(options_of(log), leaves)
    assert count == len(frames(log, "tx"))
    assert (told[-1]["how"], told[-1]["differences"]) == ("left", [])


# -- its clock ------------------------------------------------------------------------------------


class Peer:
    """A client in memory: what it says at which time, and when it got what."""

    def __init__(self, says: Iterable[tuple[float, str]]) -> None:
        self._says = list(says)
        self.got: list[tuple[float, str]] = []
        self.closed: tuple[float, int] | None = None

    async def receive(self) -> str:
        if not self._says:
            await anyio.sleep_forever()
        at_s, frame = self._says.pop(0)
        await anyio.sleep_until(at_s)
        return frame

    async def send(self, frame: str) -> None:
        self.got.append((round(anyio.current_time(), 6), frame))

    async def close(self, code: int, reason: str) -> None:
        self.closed = (round(anyio.current_time(), 6), code)

    async def abort(self) -> None:
        pass


INIT = init_frame()
APPEND = append_frame()
SCRIPT: tuple[ScriptStep, ...] = (
    Sent(at_ns=100 * MS, frame="queue_done"),
    Received(at_ns=200 * MS, kind="init"),
    Sent(at_ns=300 * MS, frame="created"),
    Received(at_ns=1_000 * MS, kind="append"),
    Sent(at_ns=1_500 * MS, frame="listen"),
    Sent(at_ns=9_000 * MS, frame="closed"),
    Ended(at_ns=9_100 * MS, how="closed", code=1000),
)


def clocked(
    says: Iterable[tuple[float, str]], script: Iterable[ScriptStep] = SCRIPT, **fields: Any
) -> tuple[Peer, PlayResult]:
    """Play a script to a client in memory, on virtual time that begins at 0."""
    peer = Peer(says)
    outcomes: list[PlayResult] = []

    async def body() -> None:
        outcomes.append(await Player(peer, iter(script), Wire(OPENED), **fields).run())

    on_virtual_time(body)
    return peer, outcomes[0]


@pytest.mark.parametrize("speed", [1.0, 0.5, 20.0])
def test_frames_go_out_at_their_times(speed: float) -> None:
    """A client would be tried at another pace than a server's."""
    peer, outcome = clocked([(0.0, INIT), (0.0, APPEND)], speed=speed)
    times = [at_s for at_s, _ in peer.got]
    assert times == pytest.approx([at / speed for at in (0.1, 0.3, 1.5, 9.0)])
    assert peer.closed == (pytest.approx(9.1 / speed), 1000)
    assert (outcome.how, outcome.sent, outcome.received) == ("closed", 4, 2)


def test_a_late_client_is_answered_as_long_after() -> None:
    """A client that thinks for a while would be answered before it has done."""
    peer, _ = clocked([(0.2, INIT), (4.0, APPEND)])
    assert peer.got[2:] == [(4.5, "listen"), (12.0, "closed")]
    assert peer.closed == (12.1, 1000)


def test_without_a_clock_only_the_client_is_waited_for() -> None:
    """A test suite would take as long as the sessions that were recorded."""
    peer, _ = clocked([(5.0, INIT), (6.0, APPEND)], speed=0)
    assert [at_s for at_s, _ in peer.got] == [0.0, 5.0, 6.0, 6.0]


KINDS = {"init": INIT, "append": APPEND, "close": close_frame()}


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(["said", *KINDS]), st.integers(0, 3000)), max_size=12),
    st.lists(st.integers(0, 3000), min_size=12, max_size=12),
    st.sampled_from([0.0, 0.5, 1.0, 3.0]),
)
def test_no_frame_is_early(
    moves: list[tuple[str, int]], pauses_ms: list[int], speed: float
) -> None:
    """A client would hear the answer to what it has not said, or sooner than was possible."""
    at_ns, script = 0, list[ScriptStep]()
    for kind, gap_ms in moves:
        at_ns += gap_ms * MS
        script.append(
            Sent(at_ns=at_ns, frame=str(len(script)))
            if kind == "said"
            else Received(at_ns=at_ns, kind=kind)
        )
    says, now_s = [], 0.0
    for step, pause_ms in zip(
        [it for it in script if isinstance(it, Received)], pauses_ms, strict=False
    ):
        now_s += pause_ms / 1000
        says.append((now_s, KINDS[step.kind]))
    peer, outcome = clocked(says, [*script, Ended(at_ns=at_ns, how="closed")], speed=speed)
    assert (outcome.how, outcome.differences) == ("closed", [])
    got = {frame: at_s for at_s, frame in peer.got}
    said_by_client = 0
    for number, step in enumerate(script):
        if isinstance(step, Received):
            said_by_client += 1
            continue
        at_s = got[str(number)]
        if speed:
            assert at_s >= step.at_ns / NS_PER_S / speed - 1e-6
        if said_by_client:
            assert at_s >= says[said_by_client - 1][0] - 1e-6


def test_a_client_that_stays_where_the_recorded_one_left_is_closed() -> None:
    """A server under test would wait for ever for what will not come, and say nothing of it."""
    script = (*SCRIPT[:2], Ended(at_ns=300 * MS, how="left"))
    peer, outcome = clocked([(0.2, INIT), (5.0, APPEND)], script)
    assert peer.closed == (10.2, 1000)
    assert [attrs.astuple(one) for one in outcome.differences] == [(1, None, "append")]


def test_a_client_that_leaves_early_is_told_of() -> None:
    """A client that gives up amid its session would pass."""

    class Leaves(Peer):
        async def receive(self) -> str:
            if not self._says:
                raise WebSocketClosed(1001, "")
            return await super().receive()

    peer = Leaves([(0.2, INIT)])
    outcomes: list[PlayResult] = []

    async def body() -> None:
        outcomes.append(await Player(peer, iter(SCRIPT), Wire(OPENED), strict=True).run())

    on_virtual_time(body)
    assert outcomes[0].how == "left"
    assert [attrs.astuple(one) for one in outcomes[0].differences] == [(1, "append", None)]


# -- the script -----------------------------------------------------------------------------------


def test_steps_are_those_of_the_log() -> None:
    """A frame would be played before the client's own that it answers."""
    with LogReader(VIDEO) as reader:
        opened = read_opening(VIDEO)
        found = list(steps(reader, Wire(opened)))
    assert [one.kind for one in found if isinstance(one, Received)] == [
        *("init", *("append",) * 6, "unknown", *("append",) * 4, "close")
    ]
    assert sum(isinstance(one, Sent) for one in found) == 20
    assert found[-1] == Ended(at_ns=10_300 * MS, how="closed", code=1000, reason="stopped")


# -- the command ----------------------------------------------------------------------------------


def call(*arguments: object) -> Result:
    """Run the command; whatever happens, it must not end in a traceback."""
    result = CliRunner().invoke(play_command, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def port() -> int:
    """A port that is free now."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def in_thread(port: int, log: Path, says: list[Any]) -> threading.Thread:
    """Talk to a server that is about to start."""

    def run() -> None:
        for _ in range(200):
            try:
                talk(f"ws://127.0.0.1:{port}{address_of(read_opening(log))}", says)
            except ConnectionRefusedError:
                time.sleep(0.05)
            else:
                return

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_the_command_tells_a_script_all_it_did(port: int) -> None:
    """A test of a client could not see what the client did."""
    caller = in_thread(port, VIDEO, frames(VIDEO, "rx"))
    result = call(VIDEO, "--port", port, "--speed", 0, "--clients", 1, "--strict", "--json")
    caller.join()
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert (result.exit_code, lines[0]["url"]) == (
        0,
        f"ws://127.0.0.1:{port}/v1/realtime?mode=video",
    )
    kinds = [line["type"] for line in lines]
    assert kinds[:2] == ["listening", "connected"]
    assert (kinds.count("sent"), kinds.count("received"), kinds[-1]) == (20, 13, "ended")
    received = [line for line in lines if line["type"] == "received"]
    assert all(line["kind"] == line["expected"] for line in received)


def test_a_difference_is_an_exit_code(port: int) -> None:
    """A build would pass whose client says the wrong thing."""
    caller = in_thread(port, VIDEO, [append_frame()])
    result = call(VIDEO, "--port", port, "--speed", 0, "--strict")
    caller.join()
    assert result.exit_code == 1
    assert "frame 0 was append, the recorded one init" in result.stdout
    assert result.stderr == "Error: a client deviated from the recorded one\n"


def test_what_cannot_be_played_is_one_line(tmp_path: Path, port: int) -> None:
    """A wrong path, a damaged log or a taken port would end in a traceback."""
    junk = tmp_path / "junk.session.zst"
    junk.write_bytes(b"no log at all" * 50)
    torn = tmp_path / "torn.session.zst"
    data = bytearray(VIDEO.read_bytes())
    data[len(data) // 2] ^= 1
    torn.write_bytes(data)
    for log in (tmp_path / "none.session.zst", junk, torn):
        result = call(log)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        result = call(VIDEO, "--port", port)
        served = CliRunner().invoke(main, ["serve", "--no-record", "--port", str(port)])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    for told in (result.stderr, served.stderr):
        assert told.endswith("in use; give another --port or --host\n")
