"""A server that is killed: what a client has seen is in the log, and the log is sound.

`tests.soak.crash` does it for longer, with many clients; a few of its kills are here.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Final, get_args

import attrs
import pytest
from click.testing import CliRunner
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from recorder.format.format import Record
from recorder.read.reader import LogReader, read
from recorder.repair import verify
from recorder.write.writer import Durability
from replay.rerun.logic import replay
from runtime.cli import main
from tests.live.servers import LiveServer, live_server
from tests.sessions.in_memory import append_frame, init_frame
from tests.soak.crash import Found, Plan, kill_once

SEED: Final = 3
HEARD_MAX: Final = 200
"""Frames before a kill: a second or two of the load."""


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


# -- under load ------------------------------------------------------------------------------------


def test_servers_killed_under_load_have_logged_all_that_was_heard(tmp_path: Path) -> None:
    """With many clients at once, one of them was told what no log has; or a log cannot be read.

    It is so under any durability: that is for power cuts, the kernel keeps what a process wrote.
    """
    chance, found = Random(SEED), Found()
    for durability in get_args(Durability):
        plan = Plan.draw(chance, heard_max=HEARD_MAX)
        kill_once(attrs.evolve(plan, durability=durability), tmp_path, found)
    assert found.failures == []
    assert found.counts["units"]
    assert found.counts["open"]
    for path in tmp_path.iterdir():
        if verify(path).state == "unreadable":  # nobody had heard of this session
            path.unlink()
    done = CliRunner().invoke(main, ["replay", str(tmp_path)])
    assert done.exit_code == 0, done.output


TELLS_FIRST: Final = """
import itertools, threading
import recorder.write.files, runtime.session.journal

async def written(self, log, seq):
    pass

disk = recorder.write.files

def write(self, descriptor, data, write=disk.Disk.write, calls=itertools.count()):
    if next(calls) >= 100:
        threading.Event().wait()
    return write(self, descriptor, data)

recorder.write.files.Disk.write, runtime.session.journal.Journal._written = write, written
from runtime.cli import main; main()"""


def test_a_server_that_tells_before_it_writes_is_found_out(tmp_path: Path) -> None:
    """The kills would prove nothing: a server that loses what it told would pass."""
    plan, found = Plan.draw(Random(SEED), heard_max=HEARD_MAX), Found()
    kill_once(plan, tmp_path, found, run=(sys.executable, "-P", "-c", TELLS_FIRST))
    assert any("were heard" in failure for failure in found.failures)
