"""Workers of a running server are listed, added and drained: over HTTP and by the command."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from runtime import RUN
from runtime.access.keys import Key, change_key_file, hash_key
from tests.live.servers import LiveServer, live_server
from tests.live.test_placement import soon, workers_of
from tests.live.test_worker import live_worker
from tests.network.requesting import Answer, request

KEYS = {"anna": "antiphon_anna", "root": "antiphon_root"}
WAIT_S = 60


@attrs.frozen
class Site:
    """A server with keys and one worker at an address, in a folder of sockets."""

    server: LiveServer
    folder: Path

    def ask(self, method: str, path: str, key: str = "root", body: Any = None) -> Answer:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        return request(
            self.server.address, path, method=method, key=KEYS[key], body=data, headers={}
        )

    def add(self, address: str, key: str = "root") -> Answer:
        return self.ask("POST", "/api/workers", key, {"address": address})

    def drain(self, number: object, key: str = "root") -> Answer:
        return self.ask("POST", f"/api/workers/{number}/drain", key)

    def states(self) -> dict[int, str]:
        workers = self.ask("GET", "/api/workers").said["workers"]
        return {worker["number"]: worker["state"] for worker in workers}

    def antiphon(self, *words: object) -> subprocess.CompletedProcess[str]:
        url = self.server.url.removesuffix("/v1/realtime")
        command = [*RUN, "workers", *map(str, words), "--url", url, "--key", KEYS["root"]]
        return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Serve with keys and one worker that is never drained."""
    folder = tmp_path_factory.mktemp("site")
    anna = Key(name="anna", hash=hash_key(KEYS["anna"]))
    root = Key(name="root", hash=hash_key(KEYS["root"]), scope="admin")
    change_key_file(folder / "keys.toml", lambda _: (anna, root), create=True)
    one = f"unix:{folder}/one"
    options = ("--worker-address", one, "--keys", str(folder / "keys.toml"), "--no-record")
    with live_worker(model="scripted", listen=one), live_server(*options) as server:
        yield Site(server, folder)
        assert "Traceback" not in server.errors.read_text()


def test_only_an_operator_sees_and_changes_workers(site: Site) -> None:
    """A client could have the server connect anywhere, or move the sessions of others."""
    address = f"unix:{site.folder}/nothing"
    answers = [
        site.ask("GET", "/api/workers", "anna"),
        site.add(address, "anna"),
        site.drain(0, "anna"),
    ]
    assert [answer.status for answer in answers] == [403, 403, 403]


def test_a_worker_is_added_drained_and_gone(site: Site) -> None:
    """A server would have to be restarted to change its workers."""
    other = f"unix:{site.folder}/other"
    with live_worker("--slots", "3", model="scripted", listen=other):
        added = site.add(other)
        assert (added.status, added.said["where"], added.said["slots"]) == (201, other, 3)
        number = added.said["number"]
        assert site.add(other).status == 409
        first, second = site.ask("GET", "/api/workers").said["workers"]
        assert (first["number"], first["where"]) == (0, f"unix:{site.folder}/one")
        assert first["fingerprint"] == second["fingerprint"]
        drained = site.drain(number)
        assert (drained.status, drained.said["state"]) == (202, "draining")
        assert soon(lambda: site.states() == {0: "serving"})
        assert site.drain(number).status == 404


def test_the_last_worker_is_not_drained(site: Site) -> None:
    """The server would go on without a model."""
    refused = site.drain(0)
    assert (refused.status, refused.said["error"]) == (409, "conflict")
    assert "the only one that serves" in refused.said["message"]
    assert [site.drain(number).status for number in (77, "x", "9" * 40, "%C2%B2")] == [404] * 4


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"address": "elsewhere"}, 400, "is not an address"),
        ({"address": "http://127.0.0.1/"}, 400, "is not an address"),
        ({"address": "tcp:192.0.2.1:7000"}, 400, "the server has no worker_token_file"),
        ({"address": "unix:/nowhere/at/all"}, 502, "no such file"),
        ({"address": ""}, 400, "address"),
        ({"address": 7}, 400, "address"),
        ({}, 400, "address"),
        ({"address": "unix:/x", "more": 1}, 400, "more"),
        (b"\xff", 400, "utf-8"),
        (b"[", 400, "$"),
        (b" " * 20_000, 413, "bytes"),
    ],
)
def test_a_wrong_address_is_told(site: Site, body: object, status: int, words: str) -> None:
    """An operator would have to search the log, or the server connect to a stranger."""
    answer = site.ask("POST", "/api/workers", body=body)
    assert (answer.status, site.states()) == (status, {0: "serving"})
    assert words in answer.said["message"]


def test_a_worker_of_another_model_is_not_added(site: Site) -> None:
    """A session's bytes would depend on the worker that it was given."""
    tiny = f"unix:{site.folder}/tiny"
    with live_worker("--slots", "1", model="tiny", listen=tiny):
        answer = site.add(tiny)
    assert answer.status == 409
    assert "cannot stand in for worker 0: modes is" in answer.said["message"]


def test_the_command_lists_adds_and_drains(site: Site) -> None:
    """An operator would write HTTP by hand."""
    other = f"unix:{site.folder}/third"
    with live_worker(model="scripted", listen=other):
        added = site.antiphon("add", other, "--json")
        assert added.returncode == 0, added.stderr
        number = json.loads(added.stdout)["number"]
        listed = site.antiphon("list").stdout
        assert all(word in listed for word in ("worker", "serving", "leased"))
        lines = site.antiphon("list", "--json").stdout.splitlines()
        assert [json.loads(line)["number"] for line in lines] == [0, number]
        drained = site.antiphon("drain", number, "--wait")
        assert (drained.returncode, drained.stderr) == (0, "")
        assert drained.stdout.splitlines()[-1] == f"worker {number} is gone"
    refused = site.antiphon("drain", 0)
    assert refused.returncode == 1
    assert "is the only one that serves (HTTP 409)" in refused.stderr
    assert site.antiphon("drain", "x").returncode == 2


def test_a_server_that_is_not_there_is_told() -> None:
    """An operator would read a traceback, or wait."""
    for url, code in (("ws://127.0.0.1:1", 1), ("http://127.0.0.1:1", 1), ("ftp://127.0.0.1:1", 2)):
        command = [*RUN, "workers", "list", "--url", url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False)


def test_a_server_with_its_own_model_connects_nowhere(tmp_path: Path) -> None:
    """Its operator never meant it to connect to a worker."""
    other = f"unix:{tmp_path}/other"
    with live_worker(model="scripted", listen=other), live_server("--no-record") as server:
        body = json.dumps({"address": other}).encode()
        path = "/api/workers"
        answer = request(server.address, path, method="POST", body=body, headers={})
        assert (answer.status, "needs --worker-address" in answer.said["message"]) == (409, True)
        (worker,) = request(server.address, path, headers={}).said["workers"]
        assert (worker["where"], worker["state"]) == ("embedded", "serving")


def test_an_isolated_worker_is_told_by_its_process() -> None:
    """An operator could not tell which process to look at."""
    with live_server("--isolate", "--no-record") as server:
        (worker,) = request(server.address, "/api/workers", headers={}).said["workers"]
        pid = int(worker["where"].removeprefix("pid "))
        assert pid in workers_of(server)
