"""`antiphon serve` with its models in other processes: started by it, or found at addresses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime import RUN
from tests.live.servers import LiveServer, live_server
from tests.live.test_worker import live_worker
from tests.project.forkserver import NEW_INTERPRETER

DEMO = Path(__file__).parents[2] / "fixtures" / "speech" / "demo.wav"
WAIT_S = 120
SOON_S = 60
"""A worker process starts in one second, on a busy machine in some."""


def antiphon(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*RUN, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)


def talk(server: LiveServer) -> subprocess.CompletedProcess[str]:
    """Stream eleven seconds of sound, and hear the reply."""
    reply = server.errors.with_name("reply.wav")
    return antiphon("talk", DEMO, "--url", server.url, "--fast", "--reply", reply)


def replayed(folder: Path) -> list[dict[str, Any]]:
    """Run all recordings of a folder again, with the model."""
    logs = sorted(folder.glob("*.session.zst"))
    return [json.loads(antiphon("replay", "--full", log, "--json").stdout) for log in logs]


def workers_of(server: LiveServer) -> list[int]:
    """The processes that a server has started."""
    pid = server.process.pid
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    names = {child: Path(f"/proc/{child}") for child in found}
    return [
        child
        for child, path in names.items()
        if b"worker" in (path / "cmdline").read_bytes() + (path / "comm").read_bytes()
    ]


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def soon(condition: Callable[[], bool]) -> bool:
    """Whether a condition holds within `SOON_S`."""
    until_s = time.monotonic() + SOON_S
    while not condition() and time.monotonic() < until_s:
        time.sleep(0.05)
    return condition()


# -- isolate --------------------------------------------------------------------------------------


def test_an_isolated_model_is_recorded_as_one_in_the_server(tmp_path: Path) -> None:
    """A recording would depend on where the model ran, or the server need torch itself."""
    flags = ("--isolate", "--record", str(tmp_path))
    with live_server(*flags, model="tiny", run=NEW_INTERPRETER) as server:
        assert "torch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
        talked = talk(server)
        assert talked.returncode == 0, talked.stderr
        assert server.stop() == 0
    (body,) = replayed(tmp_path)
    assert (body["result"], body["units"] > 5) == ("identical", True)


def test_a_server_outlives_its_workers() -> None:
    """Every session would end with the first model that crashes, and none begin after it."""
    with live_server("--isolate", "--worker", "scripted", "--no-record") as server:
        before = workers_of(server)
        assert len(before) == 2
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        assert soon(lambda: len(set(workers_of(server)) - set(before)) == 2)
        assert talk(server).returncode == 0
        assert server.stop() == 0
        assert not any(map(is_running, before))


@pytest.mark.parametrize("end", [LiveServer.kill, LiveServer.stop])
def test_workers_end_with_their_server(end: Callable[[LiveServer], object]) -> None:
    """They would hold their GPUs for a server that is not there."""
    with live_server("--isolate", "--no-record") as server:
        (worker,) = workers_of(server)
        end(server)
        assert soon(lambda: not is_running(worker))


def test_a_worker_that_does_not_start_says_why(tmp_path: Path) -> None:
    """An operator would have to guess."""
    (tmp_path / "config.json").write_text("{}")
    refused = antiphon("serve", "--port", 0, "--no-record", "--isolate", "--model", tmp_path)
    assert refused.returncode == 1
    assert "the worker did not start: cannot serve" in refused.stderr
    what, _, advice = refused.stderr.rpartition("; ")
    assert what.endswith("config.audio_config is missing")
    assert advice == f"to see what is missing: antiphon doctor --model {tmp_path}\n"


# -- worker_addresses -----------------------------------------------------------------------------


def test_a_session_through_workers_elsewhere(tmp_path: Path) -> None:
    """Its recording would not replay, or its server end with one of them."""
    one, other = (f"unix:{tmp_path}/{name}" for name in ("one", "other"))
    with (
        live_worker(model="scripted", listen=one) as first,
        live_worker(model="scripted", listen=other),
        live_server(
            *("--worker-address", one, "--worker-address", other),
            *("--record", str(tmp_path)),
            model="tiny",  # which no worker has: the workers say what they serve
        ) as server,
    ):
        for _ in range(2):
            talked = talk(server)
            assert talked.returncode == 0, talked.stderr
            first.process.kill()
        assert server.stop() == 0
    for body in replayed(tmp_path):
        assert (body["result"], body["fingerprint"]["backend"]) == ("identical", "scripted")


def test_a_worker_that_comes_back_is_taken(tmp_path: Path) -> None:
    """A server would have to be restarted with each of its workers."""
    address = f"unix:{tmp_path}/worker"
    with (
        live_worker(model="scripted", listen=address) as worker,
        live_server("--worker-address", address, "--no-record") as server,
    ):
        worker.process.kill()
        worker.process.wait()
        with live_worker(model="scripted", listen=address):
            assert talk(server).returncode == 0
        assert server.stop() == 0


def test_a_server_waits_for_its_workers(tmp_path: Path) -> None:
    """The order in which services start would decide whether they do."""
    address = f"unix:{tmp_path}/worker"
    command = [*RUN, "serve", "--port", "0", "--no-record", "--worker-address", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        assert process.stdout.readline() == f"loading {address}\n".encode()
        assert b"waiting for it" in process.stderr.readline()
        with live_worker(model="scripted", listen=address):
            assert b"listening on" in process.stdout.readline()
            assert process.stdout.readline() == b"ready\n"
            process.terminate()
            assert process.wait(WAIT_S) == 0


def test_a_worker_of_another_model_is_refused(tmp_path: Path) -> None:
    """A session's bytes would depend on the worker that it was given."""
    one, other = (f"unix:{tmp_path}/{name}" for name in ("one", "other"))
    with (
        live_worker(model="scripted", listen=one),
        live_worker("--slots", "1", model="tiny", listen=other),
    ):
        addresses = ("--worker-address", one, "--worker-address", other)
        refused = antiphon("serve", "--port", 0, "--no-record", *addresses)
    assert refused.returncode == 1
    assert "worker 1 cannot stand in for worker 0" in refused.stderr
