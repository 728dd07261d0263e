"""A worker whose weights differ in one byte takes no session, and so no rebuild."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.sync.client import connect

from protocol.values import events as ev
from runtime.model.models import tiny_path
from tests.live.servers import live_server
from tests.live.test_placement import antiphon
from tests.live.test_rolling_upgrade import SECOND, events_of, hear, talk, workers
from tests.live.test_worker import live_worker

MODEL_OPTIONS = ("--device", "cpu", "--slots", "2")
"""Those of `tiny` in a folder as those of `tiny` by its name."""


def change_a_byte(weights: Path) -> None:
    """Flip the lowest bit of the middle number of the largest tensor."""
    data = bytearray(weights.read_bytes())
    (header_bytes,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + header_bytes])
    spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
    begin, end = max(spans, key=lambda span: span[1] - span[0])
    middle = 8 + header_bytes + begin + (end - begin) // 8 * 4
    data[middle] ^= 1
    weights.write_bytes(data)


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a worker that serves `tiny` with one byte changed."""
    folder = tmp_path_factory.mktemp("unequal")
    shutil.copytree(tiny_path(), folder / "model")
    change_a_byte(folder / "model" / "model.safetensors")
    address = f"unix:{folder}/worker"
    with live_worker(*MODEL_OPTIONS, model=str(folder / "model"), listen=address):
        yield address


def test_one_byte_keeps_a_worker_out(unequal: str, tmp_path: Path) -> None:
    """A session would go on, or be rebuilt, with another model, and its replay differ."""
    equal = tmp_path / "equal"
    shutil.copytree(tiny_path(), equal)
    address, logs = f"unix:{tmp_path}/worker", tmp_path / "logs"
    with live_worker(*MODEL_OPTIONS, model=str(equal), listen=address) as worker:
        both = ("--worker-address", address, "--worker-address", unequal)
        refused = antiphon("serve", "--port", 0, "--no-record", *both)
        assert refused.returncode == 1
        assert "worker 1 cannot stand in for worker 0: fingerprint weights is" in refused.stderr
        assert ";" not in refused.stderr  # nothing else differs
        options = ("--worker-address", address, "--record", str(logs), "--rebuild", "exact")
        options += ("--resume-s", "10")  # for which it waits for another worker
        with (
            live_server(*options) as server,
            connect(f"{server.url}?mode=audio", compression=None) as socket,
        ):
            url = server.url.removesuffix("/v1/realtime")
            added = antiphon("workers", "add", unequal, "--url", url)
            assert added.returncode == 1
            assert f"worker {unequal} cannot stand in for worker 0: fingerprint" in added.stderr
            assert hear(socket)["type"] == "session.queue_done"
            socket.send('{"type": "session.init", "payload": {}}')
            assert hear(socket)["type"] == "session.created"
            talk(socket, 2)
            # The operator starts the unequal worker in the place of the one that died.
            worker.process.kill()
            Path(address.removeprefix("unix:")).unlink()
            Path(address.removeprefix("unix:")).symlink_to(unequal.removeprefix("unix:"))
            socket.send(json.dumps({"type": "input.append", "input": {"audio": SECOND}}))
            while (event := hear(socket))["type"] != "session.closed":
                assert event["type"].startswith("error"), event
            assert event["reason"] == "backend_error", event
            told = server.errors.read_text()
            why = f"worker 0 cannot be replaced yet: worker {address} cannot stand in for worker 0"
            assert f"{why}: fingerprint weights is" in told
            (listed,) = workers(server, "list")
            assert (listed["state"], listed["free"]) == ("loading", 0)
    (log,) = logs.glob("*.session.zst")
    events = events_of(log)
    assert any(isinstance(event, ev.BackendLost | ev.LeaseRevoked) for event in events)
    assert not any(isinstance(event, ev.Rebuilt) for event in events)
