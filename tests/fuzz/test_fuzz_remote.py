"""Fuzzing with `--url`: over real sockets, against the real server and against wrong ones."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from websockets.sync.server import ServerConnection

from tests.fuzz.__main__ import fuzz_command
from tests.fuzz.campaign import Budget, Campaign
from tests.fuzz.case import FAULTS, Case, Step
from tests.fuzz.drawing import RAW, all_names
from tests.fuzz.remote import CannotFuzzError, RemoteTarget, read_address
from tests.live.servers import LiveServer, live_server
from tests.network.peers import create, peer, say
from tests.project.sampling import sample

ROOT = Path(__file__).parents[2]
ANSWER_S = 8.0
INIT = {"type": "session.init", "payload": {}}


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    """A server with the scripted model."""
    with live_server("--no-record") as server:
        yield server


@pytest.fixture
def target(live: LiveServer) -> RemoteTarget:
    """That server, to be fuzzed."""
    made = RemoteTarget(read_address(live.url), answer_s=ANSWER_S)
    made.begin()
    return made


def case_of(*steps: tuple[str, object]) -> Case:
    """Make a case of the `realtime` dialect."""
    made = tuple(Step(kind=kind, value=value) for kind, value in steps)
    return Case(dialect="realtime", mode="video", steps=made)


def test_a_server_in_order_has_no_findings(live: LiveServer, target: RemoteTarget) -> None:
    """Whoever fuzzes a server of his own would chase ghosts; or ours has a bug on its sockets."""
    tally = Campaign(target, all_names(), seed=3, budget=Budget(examples=sample(30, 12))).run()
    assert [(one.finding, one.case.steps) for one in tally.found] == []
    assert tally.pairs
    assert target.check() == ""
    assert live.errors.read_text() == ""


@pytest.mark.parametrize("fault", [*FAULTS, *RAW])
def test_a_session_survives_what_a_client_can_do_to_a_socket(
    target: RemoteTarget, fault: str
) -> None:
    """One rude client would cost the server a slot, or its life."""
    kind = "fault" if fault in FAULTS else "raw"
    steps = [("await", "turn"), (kind, fault.replace(" ", "")), ("send", INIT), ("await", "answer")]
    assert target.run(case_of(*steps)).findings == ()


def test_messages_in_fragments_byte_by_byte_are_answered(target: RemoteTarget) -> None:
    """A client behind a slow network would get no answer."""
    steps = [("await", "turn"), ("fault", "fragments"), ("fault", "dribble"), ("send", INIT)]
    outcome = target.run(case_of(*steps, ("await", "answer")))
    assert ("realtime CONNECTED", "session.init", "Created") in outcome.pairs
    assert outcome.findings == ()


def silent(websocket: ServerConnection) -> None:
    """Say nothing at all."""
    websocket.recv()


def broken(websocket: ServerConnection) -> None:
    """Fail as many servers do."""
    say(websocket, "session.queue_done")
    websocket.recv()
    websocket.close(1011, "Internal Server Error")


def chatty(websocket: ServerConnection) -> None:
    """Say something of one's own."""
    create(websocket)
    say(websocket, "server.mood", mood="fine")
    websocket.recv()


@pytest.mark.parametrize(
    ("answer", "kind"), [(silent, "hang"), (broken, "crash"), (chatty, "undocumented")]
)
def test_another_server_is_judged_too(answer: object, kind: str) -> None:
    """A server that breaks the protocol in its own way would pass."""
    with peer(answer) as url:  # type: ignore[arg-type]
        other = RemoteTarget(read_address(url), answer_s=0.3)
        outcome = other.run(case_of(("await", "turn"), ("send", INIT), ("await", "answer")))
    assert kind in {finding.kind for finding in outcome.findings}


def test_the_key_goes_with_the_handshake() -> None:
    """A server with keys could not be fuzzed."""
    seen = []

    def note(websocket: ServerConnection) -> None:
        assert websocket.request is not None
        seen.append(websocket.request.headers.get("Authorization"))
        websocket.close(1000)

    with peer(note) as url:
        RemoteTarget(read_address(url, "k-1"), answer_s=0.3).run(case_of())
    assert set(seen) == {"Bearer k-1"}


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("ws://host:1", "ws://host:1"),
        ("ws://host:1/", "ws://host:1"),
        ("wss://host/v1/realtime", "wss://host"),
        ("ws://host/behind/v1/realtime", "ws://host/behind"),
    ],
)
def test_an_address_is_taken_as_servers_print_it(url: str, origin: str) -> None:
    """What `antiphon serve` prints could not be given to `python -m tests.fuzz`."""
    assert read_address(url).origin == origin


@pytest.mark.parametrize("url", ["http://host", "host:80", "ws://", "nonsense"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    """A typing error gives a traceback."""
    with pytest.raises(CannotFuzzError):
        read_address(url)


def test_a_port_where_nobody_is_is_one_line_and_no_success() -> None:
    """A job that fuzzes a server that is down would say that nothing was found."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    told = CliRunner().invoke(fuzz_command, ["--url", f"ws://127.0.0.1:{port}"])
    assert told.exit_code == 2, told.output
    assert told.output.startswith("Error: no answer at ")
    assert len(told.output.strip().splitlines()) == 1


def test_a_server_that_goes_away_is_found(tmp_path: Path) -> None:
    """A server that dies of a message would be taken for one that says nothing wrong."""
    with live_server("--no-record") as server:
        target = RemoteTarget(read_address(server.url), answer_s=1.0)
        target.begin()
        server.kill()
        outcome = target.run(case_of(("await", "turn")))
    assert [finding.kind for finding in outcome.findings] == ["crash"]


def test_the_command_fuzzes_an_address(live: LiveServer, tmp_path: Path) -> None:
    """The command would fuzz something else than it was told."""
    words = ["--url", live.url, "--examples", "5", "--seed", "2", "--json"]
    told = CliRunner().invoke(fuzz_command, [*words, "--out", str(tmp_path / "out")])
    assert told.exit_code == 0, told.output
    body = json.loads(told.stdout)
    assert (body["examples"], body["url"], body["left"]) == (5, live.url, "")


@pytest.mark.soak  # `test_the_command_fuzzes_an_address` runs the command in this process.
def test_it_runs_as_a_module() -> None:
    """The line that the README names would not run."""
    words = (sys.executable, "-m", "tests.fuzz", "--examples", "3", "--seed", "1", "--json")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["examples"] == 3
