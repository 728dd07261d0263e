"""The process that talks to Ray, from the server's end: here it is a script that answers lines."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

import anyio
import pytest
import ray_driver
from ray_driver import tls_options
from ray_placement import RayCluster

from runtime.model.backends.base import BackendGone, BackendRefused

pytestmark = pytest.mark.anyio

SCRIPT = """
import json, sys
def say(**told):
    print(json.dumps(told), flush=True)
opening = json.loads(sys.stdin.readline())
if opening["ray"] == "nowhere":
    say(failed="there is no cluster")
    sys.exit()
if opening["ray"] == "crashes":
    print("cannot reach the head", file=sys.stderr)
    sys.exit(1)
say(connected=True)
found = 0
for line in sys.stdin:
    asked = json.loads(line)
    call, worker = asked["call"], asked.get("worker")
    found += 1
    if asked["do"] == "find" and worker == 9:
        sys.exit(1)
    if asked["do"] == "find" and worker == 8:
        say(call=call, failed="unknown model")
    else:
        say(note=f"worker {worker} waits")
        say(call=call, found=f"tcp:127.0.0.1:{found}")
"""


@asynccontextmanager
async def cluster(address: str) -> AsyncIterator[RayCluster]:
    """A cluster behind the script."""
    async with anyio.create_task_group() as tasks:
        driver = (sys.executable, "-c", SCRIPT)
        yield RayCluster(address, command=(), token="t", tasks=tasks, driver=driver)
        tasks.cancel_scope.cancel()


async def test_calls_are_answered_and_notes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A server would wait for a GPU, and its log not say so."""
    async with cluster("auto") as ray:
        assert await ray.find(3) == "tcp:127.0.0.1:1"
        await ray.want(2)
        await ray.end(3)
        assert await ray.find(3) == "tcp:127.0.0.1:4"
    assert "worker 3 waits" in caplog.text


@pytest.mark.parametrize(
    ("address", "why"), [("nowhere", "there is no cluster"), ("crashes", "cannot reach the head")]
)
async def test_a_cluster_that_cannot_be_reached_is_named(
    address: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator would have to guess what is wrong, and where."""
    caplog.set_level(logging.INFO)
    async with cluster(address) as ray:
        with pytest.raises(BackendGone, match=f"the Ray cluster at {address}: {why}"):
            await ray.want(1)


async def test_an_address_where_nothing_listens_is_told_at_once(free_tcp_port: int) -> None:
    """Ray tries for minutes without a word."""
    async with cluster(f"127.0.0.1:{free_tcp_port}") as ray:
        with pytest.raises(BackendGone, match=f"the Ray cluster at 127.0.0.1:{free_tcp_port}: "):
            await ray.want(1)


async def test_a_worker_that_does_not_start_says_why() -> None:
    """It would be tried for ever without a reason."""
    async with cluster("auto") as ray:
        with pytest.raises(BackendRefused, match="unknown model"):
            await ray.find(8)


async def test_a_process_that_ends_is_started_again() -> None:
    """A server would lose its cluster for good with the head of it."""
    async with cluster("auto") as ray:
        with pytest.raises(BackendGone, match="is lost"):
            await ray.find(9)
        await ray.end(9)  # it ended with that process
        assert await ray.find(3) == "tcp:127.0.0.1:1"


def test_the_link_is_encrypted_where_the_cluster_is() -> None:
    """Sound would cross a network in the clear that an operator made safe."""
    assert tls_options({}) == ["--no-tls"]
    files = {"RAY_TLS_SERVER_CERT": "cert.pem", "RAY_TLS_SERVER_KEY": "key.pem"}
    options = tls_options({"RAY_USE_TLS": "1", **files})
    assert options == ["--tls-cert", "cert.pem", "--tls-key", "key.pem"]


class DeadNode:
    """A cluster that takes the node of this process for dead."""

    def get_runtime_context(self) -> DeadNode:
        return self

    def get_node_id(self) -> str:
        return "own"

    def nodes(self) -> list[dict[str, object]]:
        return [{"NodeID": "own", "Alive": False}, {"NodeID": "other", "Alive": True}]


def test_the_process_ends_when_its_node_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers that it starts would wait for a GPU for ever, even a free one."""
    monkeypatch.setattr(ray_driver, "NODE_S", 0)
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit):
        ray_driver._end_with_node(DeadNode())


REAL = """
import json
import ray
from ray_driver import Driver, WorkerEndedError
notes = []
ray.init(num_gpus=1, num_cpus=1, include_dashboard=False, log_to_driver=False,
    logging_level="ERROR", object_store_memory=100_000_000)
driver = Driver(["--model", "scripted"], "a token of thirty-two characters", notes.append)
first = driver.find(0)
driver.end(0, again=True)
other = driver.find(0)
driver.want(2)
driver.want(0)
driver.end(0, again=False)
broken = Driver(["--model", "no-such-model"], "a token of thirty-two characters", notes.append)
try:
    broken.find(0)
except WorkerEndedError as error:
    failed = str(error)
print(json.dumps({"first": first, "other": other, "failed": failed}), flush=True)
ray.shutdown()
"""


@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")
def test_ray_starts_and_restarts_a_worker() -> None:
    """What is asked of Ray would not be what Ray does."""
    command = [sys.executable, "-c", textwrap.dedent(REAL)]
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}  # else it leaves one at home
    environ = os.environ | own
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=280, check=False, env=environ
    )
    assert ran.returncode == 0, ran.stderr
    told: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert told["first"].startswith("tcp:")
    assert told["other"].startswith("tcp:")
    assert told["first"] != told["other"]
    assert "no-such-model" in told["failed"]
