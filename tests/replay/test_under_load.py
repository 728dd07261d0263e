"""Sessions that were recorded while the engine was busy with others, computed again alone."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

from protocol.values.messages import Created, Listen, QueueDone, Speech
from protocol.values.model import DuplexConfig
from protocol.values.requests import Append, Init
from recorder.read.reader import LogReader
from replay.rerun.full import replay_fully
from replay.rerun.report import FullReport
from runtime.client.session import ClientSession, connect
from runtime.media.sound import read_wav
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.engine.backend import EngineBackend
from runtime.model.models import tiny_path
from tests.live.servers import live_server

ROOT: Final = Path(__file__).parents[2]
SESSIONS: Final = 8
UNITS: Final = 10
WAIT_S: Final = 120
UNIT_SAMPLES: Final = 16_000


def second(pcm: NDArray[np.float32], number: int) -> bytes:
    """One second of a sound that goes round and round."""
    places = range(number * UNIT_SAMPLES, (number + 1) * UNIT_SAMPLES)
    return np.take(pcm, places, mode="wrap").astype("<f4").tobytes()


async def talk(url: str, number: int) -> int:
    """One client, as quick as it is answered; gives the units in which the model spoke."""
    pcm = np.frombuffer(read_wav(ROOT / "fixtures" / "speech" / "demo.wav"), "<f4")
    frame = (ROOT / "fixtures" / "speech" / "frame.jpg").read_bytes()
    spoken: set[int] = set()
    sent = answered = 0

    async def send(session: ClientSession) -> None:
        nonlocal sent
        if sent == UNITS:
            await session.close()
            return
        shown = (frame,) if (sent + number) % 3 == 0 else ()
        forced = sent == 6 and number % 4 == 1
        await session.append(
            Append(
                pcm=second(pcm, sent + number),
                frames=shown,
                force_listen=forced,
                input_id=str(sent),
            )
        )
        sent += 1

    # Never listening by choice, every other session speaks without end beside those that listen.
    config = DuplexConfig(force_listen_count=1, listen_prob_scale=0.0 if number % 2 else 1.0)
    async with connect(url, mode="video") as session:
        async for message in session:
            if isinstance(message, QueueDone):
                await session.init(Init(instructions="Be brief.", config=config))
            elif isinstance(message, Created):
                await send(session)
            elif isinstance(message, Listen | Speech):
                unit = int(message.input_id)
                if isinstance(message, Speech):
                    spoken.add(unit)
                if unit == answered:  # its words, or where it has none its sound, which is all
                    answered += 1
                    await send(session)
    return len(spoken)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Sessions held at the same time."""
    folder = tmp_path_factory.mktemp("load")
    spoken: dict[int, int] = {}

    async def hold(url: str, number: int) -> None:
        spoken[number] = await talk(url, number)

    async def hold_all(url: str) -> None:
        with anyio.fail_after(WAIT_S):
            async with anyio.create_task_group() as tasks:
                for number in range(SESSIONS):
                    tasks.start_soon(hold, url, number)

    with live_server("--record", str(folder), "--slots", str(SESSIONS), model="tiny") as server:
        anyio.run(hold_all, server.url, backend="trio")
        assert server.stop() == 0
    assert sum(count > 0 for count in spoken.values()) >= SESSIONS // 2, spoken
    return sorted(folder.glob("*"))


@pytest.mark.soak
def test_a_busy_server_computes_what_a_quiet_one_does(logs: list[Path]) -> None:
    """A bug seen under load cannot be found again, because alone the model says something else."""
    model = DuplexModel.load(tiny_path(), slots=1)

    async def run(log: Path) -> FullReport:
        with LogReader(log) as reader:
            return await replay_fully(
                reader.head.fields, reader, lambda _: EngineBackend(model), model="tiny"
            )

    assert len(logs) == SESSIONS
    for log in logs:
        report = anyio.run(run, log, backend="trio")
        assert report.compared, report.environment
        assert report.identical, (log.name, report.first_divergence)
        assert report.units >= UNITS - 1
