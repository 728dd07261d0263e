"""A conversation through connections that are cut at any byte is the one that was not cut.

What the client sent is what the server got, each message once; what the server said is what the
client heard, each frame once. `python -m tests.soak.cuts` has many more.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from recorder.read.reader import LogReader
from recorder.storage.store import Store
from replay.rerun.logic import replay
from tests.live.servers import LiveServer, live_server
from tests.network.cutting import cutting
from tests.sessions.resumed import KINDS, Told, converse, cuts_of, heard_and_said


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, Path]]:
    """A server that records."""
    folder = tmp_path_factory.mktemp("logs")
    with live_server("--record", str(folder), "--slots", "8") as made:
        yield made, folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_each_message_and_each_frame_counts_once(
    server: tuple[LiveServer, Path], kind: str, seed: int
) -> None:
    """A conversation lost or repeated something where its connection was cut."""
    made, folder = server
    rng = random.Random(f"{kind} {seed}")
    cuts = cuts_of(kind, rng)
    told = Told()
    with cutting(made.address, cuts=cuts) as cutter:
        anyio.run(converse, kind, f"ws://127.0.0.1:{cutter.port}", told, rng)
        assert cutter.connections > 1
    path = Store(folder).path(told.recording_id)
    heard, said = heard_and_said(path)
    assert told.heard == said
    assert told.sent == heard
    with LogReader(path) as log:
        report = replay(log)
    assert report.identical, report.divergence


def test_a_way_back_that_is_cut_is_tried_again(server: tuple[LiveServer, Path]) -> None:
    """A connection that broke before its greeting ended the session for its client."""
    made, _ = server
    told, rng = Told(), random.Random(1)
    with cutting(made.address, cuts=[20_000, 400, 400]) as cutter:
        anyio.run(converse, "realtime, audio", f"ws://127.0.0.1:{cutter.port}", told, rng)
        assert cutter.connections == 4
    assert [json.loads(frame)["seq"] for frame in told.heard] == list(range(len(told.heard)))
