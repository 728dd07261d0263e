"""Forged logs with sound checksums: reading one costs no more than its bytes may."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recorder.repair import verify
from recorder.storage.store import INDEX_NAME
from tests.forged.bombs import BOMBS, bomb
from tests.forged.drawn import draw
from tests.forged.meter import CHEAP, LINEAR, Cost, Meter, metering
from tests.live.servers import LiveServer, live_server
from tests.recorder.test_listing import write_log
from tests.soak.forged import problem_of

WAYS = ("list", "verify", "replay")
"""Those that a server and a bug report meet; `make soak` reads in all."""


@pytest.fixture(scope="module", name="meter")
def _meter() -> Iterator[Meter]:
    with metering() as meter:
        yield meter


def problems(meter: Meter, folder: Path, log: bytes) -> list[str]:
    """Read a log in a folder of its own."""
    path = folder / "forged.session.zst"
    path.write_bytes(log)
    (folder / INDEX_NAME).unlink(missing_ok=True)
    return [found for cost in meter.read(path, WAYS) if (found := problem_of(cost)) is not None]


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_costs_no_more_than_its_bytes_may(name: str, meter: Meter, tmp_path: Path) -> None:
    """A file of kilobytes must not stop a server, nor fill the memory of a developer's machine."""
    assert problems(meter, tmp_path, bomb(name, 2)) == []


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(number=st.integers(0, 1 << 32))
def test_a_drawn_log_costs_no_more_than_its_bytes_may(
    number: int, meter: Meter, tmp_path: Path
) -> None:
    """What is not thought of as a bomb is drawn; `make soak` draws for ten minutes."""
    assert problems(meter, tmp_path, draw(Random(number))) == []


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_damage_and_the_rest_is_read(name: str) -> None:
    """What is before a bomb must not be lost to it."""
    report = verify(bomb(name, 1))
    assert report.state in {"damaged", "open"}
    assert report.records >= 2


def test_the_same_number_draws_the_same_log() -> None:
    """What failed must fail again."""
    assert draw(Random(5)) == draw(Random(5))


def test_what_costs_too_much_is_seen() -> None:
    """A detector that sees nothing proves nothing."""
    cost = Cost(way="list", file_bytes=1000, cpu_s=CHEAP.cpu_s * 1.1, mb=1.0)
    assert problem_of(cost) is not None
    assert problem_of(Cost(way="read", file_bytes=1000, cpu_s=cost.cpu_s, mb=1.0)) is None
    assert problem_of(Cost(way="read", file_bytes=1000, cpu_s=0.1, mb=LINEAR.mb * 1.1)) is not None
    assert (
        problem_of(Cost(way="read", file_bytes=1, cpu_s=0, mb=0, fault="KeyError: 1")) is not None
    )


def test_a_server_lists_a_folder_of_bombs(tmp_path: Path) -> None:
    """Whoever can put a file there, or uploads one, must not stop the list or take the memory."""
    for name in BOMBS:
        (tmp_path / f"{name.replace(' ', '-')}.session.zst").write_bytes(bomb(name, 8))
    write_log(tmp_path, "good")
    with live_server("--record", str(tmp_path)) as server:
        before_kib = peak_kib(server)
        connection = http.client.HTTPConnection(*server.address, timeout=60)
        connection.request("GET", "/api/recordings")
        answer = connection.getresponse()
        told = {it["recording_id"]: it["state"] for it in json.loads(answer.read())["recordings"]}
        connection.close()
        grown_kib = peak_kib(server) - before_kib
    assert len(told) == len(BOMBS) + 1
    assert told.pop("good") == "finished"
    assert set(told.values()) == {"crashed"}
    assert grown_kib < CHEAP.mb * 1e6 / 1024


def peak_kib(server: LiveServer) -> int:
    """The most memory that a server held so far."""
    status = Path(f"/proc/{server.process.pid}/status").read_text("utf-8")
    return int(status.partition("VmHWM:")[2].split()[0])
