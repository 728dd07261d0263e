"""A server that is killed: what a client has seen is in the log, and the log is sound."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from recorder.reader import LogReader, read
from recorder.records import Record
from recorder.verify import verify
from replay.logic import replay
from tests.helpers import append_frame, init_frame
from tests.live import LiveServer, live_server


async def talk_until_killed(server: LiveServer, units: int, seen: list[str]) -> None:
    """Stream faster than the server answers, and kill it in the middle of everything."""
    async with connect(f"{server.url}?mode=audio", max_size=None) as socket:
        seen.append(str(await socket.recv()))
        await socket.send(init_frame())
        seen.append(str(await socket.recv()))
        frame = append_frame()
        for _ in range(units):
            await socket.send(frame)
            seen.append(str(await socket.recv()))
        await socket.send(frame)
        await socket.send(frame)
        seen.append(str(await socket.recv()))
        server.kill()
        with suppress(ConnectionClosed, OSError):
            while True:  # what the kernel had already been given
                seen.append(str(await socket.recv()))


@pytest.mark.parametrize("units", [0, 4, 11])
def test_a_killed_server_has_logged_all_that_was_seen(units: int, tmp_path: Path) -> None:
    """After a crash nobody can tell what the client was told."""
    seen: list[str] = []
    with live_server("--record", str(tmp_path)) as server:
        asyncio.run(talk_until_killed(server, units, seen))
    (path,) = tmp_path.iterdir()

    report = verify(path)
    assert report.state == "open"
    assert not report.damage

    records = list(read(path))
    logged = [record.fields["frame"] for record in records if record.kind == "tx"]
    assert logged[: len(seen)] == seen
    assert report.units >= outcomes(seen)

    with LogReader(path) as reader:
        replayed = replay(reader)
    assert replayed.divergence is None
    assert not replayed.finished


def outcomes(frames: list[str]) -> int:
    """Units that a client was told of: a listen, or the audio of a speech."""
    bodies: list[dict[str, Any]] = [json.loads(frame) for frame in frames]
    return sum(body.get("kind") in ("listen", "audio") for body in bodies)


def test_a_log_of_a_killed_server_ends_within_a_block(tmp_path: Path) -> None:
    """The last second before a crash is read as something else."""
    seen: list[str] = []
    with live_server("--record", str(tmp_path)) as server:
        asyncio.run(talk_until_killed(server, 3, seen))
    (path,) = tmp_path.iterdir()
    whole = list(read(path))
    data = path.read_bytes()
    for cut in range(1, 400, 7):
        path.write_bytes(data[:-cut])
        with LogReader(path) as reader:
            kept = [item for item in reader if isinstance(item, Record)]
        assert kept == whole[: len(kept)]
