"""The reckoning of capacity: its arithmetic, its page, and the bench that measures its inputs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

import anyio
import attrs
import orjson
import pytest
from click.testing import CliRunner

from runtime.settings.settings import TEXTS_MAX
from tests.bench.capacity import measure as bench
from tests.bench.capacity.__main__ import EVIDENCE, ROOT, capacity_command
from tests.bench.capacity.measure import MODES, Run, measure, predict
from tests.bench.capacity.model import Capacity, Gateway, reckon

PAGE: Final = (ROOT / "docs" / "scaling.md").read_text()
FOUND: Final[dict[str, Any]] = orjson.loads(EVIDENCE.read_bytes())


def reckoned(found: dict[str, Any], gpus: int = 8, gateway: Gateway | None = None) -> Capacity:
    """One mode of the page's question."""
    return reckon(
        found,
        mode="video",
        gpus=gpus,
        machines=64,
        sessions_per_gpu=32,
        gateway=gateway or Gateway(),
    )


def test_the_page_is_what_the_command_prints() -> None:
    """A reader plans with figures that nothing measured."""
    done = CliRunner().invoke(capacity_command, [], catch_exceptions=False)
    tables = done.output.split("\n\n")
    assert len(tables) == 3
    assert all(table.strip() in PAGE for table in tables)


def test_the_json_has_what_the_tables_have() -> None:
    """A script that plans reads other figures than people do."""
    done = CliRunner().invoke(capacity_command, ["--json", "--gpus", "8", "--machines", "64"])
    found = orjson.loads(done.output)
    assert found["video"] == attrs.asdict(reckoned(FOUND))
    assert tuple(found) == MODES


def test_the_page_says_how_far_the_line_was_off() -> None:
    """A reader trusts a sum of parts that was never compared with a whole."""
    for mode, (predicted, cores, ratio) in FOUND["linear"].items():
        assert f"{mode}: {predicted:.2f} of a core predicted, {cores:.2f} found" in PAGE
        assert 0.5 < ratio < 2


def test_the_answer_is_that_of_the_tables() -> None:
    """Most readers read no further than the answer."""
    answer = " ".join(PAGE.partition("## The answer")[2].partition("|")[0].split())
    ask = {"gpus": 8, "machines": 64, "sessions_per_gpu": 32, "gateway": Gateway()}
    audio, video = (reckon(FOUND, mode=mode, **ask) for mode in MODES)
    room = [each.limits[0].sessions for each in (audio, video)]
    assert f"room for {room[0]} sessions with sound, and for {room[1]} with a picture" in answer
    one, many = ([each.fleets[at].gateways for each in (audio, video)] for at in (0, -1))
    assert (
        f"needs {one[0]} or {one[1]} gateways, and 64 machines need {many[0]} or {many[1]}"
        in answer
    )
    assert all(it.limits[0].name == "the event loop's core" for it in (audio, video))
    assert f"{audio.disk_hours:g} hours (audio) or {video.disk_hours:g} (video)" in PAGE


def test_the_first_limit_decides_how_many_gateways() -> None:
    """A fleet is planned with a gateway that cannot serve it."""
    slow = Gateway(network_gb_s=0.1)
    for gateway in (Gateway(), slow):
        found = reckoned(FOUND, gateway=gateway)
        room = [limit.sessions for limit in found.limits]
        assert room == sorted(room)
        assert [it.gateways for it in found.fleets] == [
            -(-it.sessions // room[0]) for it in found.fleets
        ]
    assert reckoned(FOUND, gateway=slow).limits[0].name.startswith("network")


def test_a_gateway_has_so_many_workers() -> None:
    """A gateway is given more addresses than it reads."""
    cheap = [{**run, "loop_us": 1, "recorder_us": 1, "log_bytes": 1} for run in FOUND["runs"]]
    ample = Gateway(network_gb_s=1e6, memory_gb=1e6)
    found = reckon(
        {**FOUND, "runs": cheap},
        mode="video",
        gpus=8,
        machines=64,
        sessions_per_gpu=1,
        gateway=ample,
    )
    assert found.fleets[-1].gateways == 8 * 64 // TEXTS_MAX


def test_a_line_is_drawn_through_the_runs_of_fewer_sessions() -> None:
    """The check of the sum uses what it checks."""
    runs = [
        Run(**{**FOUND["runs"][0], "sessions": n, "cpu_us": us})
        for n, us in ((10, 3e3), (20, 2e3), (40, 1e3))
    ]
    assert predict(runs) == [0.06, 0.04, 1.5]


@pytest.mark.slow
@pytest.mark.soak
def test_the_bench_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can measure again."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here")
    monkeypatch.setattr(bench, "IDLE_S", 0.5)
    monkeypatch.setattr(bench, "SETTLE_S", 0.3)
    monkeypatch.setattr(bench, "IDLE_WORKERS", (1, 2))

    async def run() -> bench.Measured:
        return await measure(tmp_path, sessions=(1, 2, 4), seconds=1, tell=lambda _: None)

    found = anyio.run(run, backend="trio")
    assert [(it.mode, it.workers, it.sessions) for it in found.runs] == [
        (mode, workers, count) for mode in MODES for workers in (0, 2) for count in (1, 2, 4)
    ]
    for it in found.runs:
        assert it.units + it.missed == it.sessions
        assert it.cpu_us >= it.loop_us > 0
        assert it.log_bytes > 25_000
        assert (it.to_worker_bytes > 64_000) == (it.from_worker_bytes > 96_000) == bool(it.workers)
    assert found.client_bytes["video"][0] > found.client_bytes["audio"][0] > 85_000
