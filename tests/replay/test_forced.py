"""Teacher-forced replay: each unit judged by itself, a near-tie told from a regression."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import attrs
import pytest
import torch

from protocol.values.model import Unit
from recorder.read.reader import LogReader
from replay import cli
from replay.rerun import environment
from replay.rerun.environment import ModelUnavailableError
from replay.rerun.full import replay_fully
from replay.rerun.outputs import NEAR_TIE_DRAW_GAP, NEAR_TIE_MARGIN, is_near_tie
from replay.rerun.report import FullReport
from runtime.model.backends.base import Backend, Choice
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.scripted import ScriptedBackend, Speaks, Step
from runtime.model.engine.backend import EngineBackend
from runtime.model.models import tiny_path
from tests.generated.clients import DirectBackend, append_pcm
from tests.project.sampling import sample
from tests.replay.test_cli import call
from tests.replay.test_full import Echo, quick, record_session
from tests.sessions.in_memory import base64, close_frame, on_virtual_time, world

VOICES = sample((1, 2, 3), (1, 2))
UNITS = 10


def run(log: Path, backend: Backend, *, anyway: bool = False, forced: bool = True) -> FullReport:
    """Replay a log fully, forced."""
    reports = []

    async def body() -> None:
        with LogReader(log) as reader:
            replaying = partial(replay_fully, anyway=anyway, teacher_forced=forced)
            reports.append(await replaying(reader.head.fields, reader, lambda _: backend))

    on_virtual_time(body)
    return reports[0]


def otherwise(unit: Unit, seed: int) -> Step:
    """Say one word more in unit 3; the others are `quick`."""
    step = quick(unit, seed)
    if unit.index != 3 or step.speech is None:
        return step
    return attrs.evolve(step, speech=Speaks(text="another word", pcm=step.speech.pcm))


def test_one_other_unit_spoils_no_other(tmp_path: Path) -> None:
    """After a difference each unit would differ, and only the first could be judged."""
    log = record_session(tmp_path)
    free = run(log, ScriptedBackend(otherwise), forced=False)
    assert free.units_changed > 5
    report = run(log, ScriptedBackend(otherwise))
    assert (report.units, report.units_changed) == (13, 1)
    assert [unit.unit for unit in report.changed] == [3]
    assert report.divergence is not None
    assert (report.divergence.unit, report.divergence.field) == (3, "decided_ids[1]")
    assert (report.divergence.near_tie, report.decisions_changed > 0) == (None, True)
    assert run(log, ScriptedBackend(quick)).identical


def test_a_model_that_cannot_be_forced_says_so(tmp_path: Path) -> None:
    """It would be replayed as it likes, and judged as if it had been forced."""
    echo = Echo()
    with (
        LogReader(record_session(tmp_path)) as reader,
        pytest.raises(ModelUnavailableError, match="cannot be forced"),
    ):
        anyio.run(
            partial(replay_fully, reader.head.fields, reader, lambda _: echo, teacher_forced=True)
        )
    assert echo.released == 1


@pytest.mark.parametrize(
    ("margin", "gap", "is_near"),
    [
        (NEAR_TIE_MARGIN / 2, 0.4, True),
        (-NEAR_TIE_MARGIN / 2, None, True),
        (3.0, NEAR_TIE_DRAW_GAP / 2, True),
        (None, NEAR_TIE_DRAW_GAP / 2, True),
        (3.0, 0.2, False),
        (3.0, None, False),
        (None, None, None),
    ],
)
def test_what_is_a_near_tie(margin: float | None, gap: float | None, is_near: bool | None) -> None:
    """Rounding on another machine would be held for a bug, or a bug for rounding."""
    choice = Choice(stage="llm", step=0, recorded=1, own=2, margin=margin, draw_gap=gap)
    assert is_near_tie(choice) is is_near


# -- with the embedded model ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Sessions in which the embedded model speaks nearly all the time."""
    folder, model = tmp_path_factory.mktemp("tiny"), DuplexModel.load(tiny_path(), slots=1)
    for voice in VOICES:

        async def talk(voice: int = voice) -> None:
            async with world(DirectBackend(model, 0), record_to=folder) as server:
                server.server._identities.drawn = voice
                config = {"listen_prob_scale": 0, "force_listen_count": 1}
                peer = await server.activate("audio", config=config)
                for second in range(UNITS):
                    audio = append_pcm("speech", 16_000, voice, second * 16_000)
                    peer.send(
                        json.dumps({"type": "input.append", "input": {"audio": base64(audio)}})
                    )
                    await anyio.sleep(3)
                peer.send(close_frame())
                await peer.over()

        on_virtual_time(talk)
    return sorted(folder.glob("*.zst"))


@pytest.fixture(scope="module")
def half() -> DuplexModel:
    """The embedded model in half precision."""
    return DuplexModel.load(tiny_path(), slots=1, dtype=torch.bfloat16)


def spoilt(spoil: Callable[[torch.Tensor], None]) -> DuplexModel:
    """The embedded model with other weights in its language model."""
    model = DuplexModel.load(tiny_path(), slots=1)
    with torch.no_grad():
        for weights in model.machine.parts.llm.parameters():
            spoil(weights)
    return model


def judged(logs: list[Path], model: DuplexModel) -> list[FullReport]:
    """Replay all logs with a model, whatever it is."""
    made = []

    async def body() -> None:
        for log in logs:
            with LogReader(log) as reader:
                made.append(
                    await replay_fully(
                        reader.head.fields,
                        reader,
                        lambda _: EngineBackend(model),
                        model="tiny",
                        anyway=True,
                        teacher_forced=True,
                    )
                )

    anyio.run(body)
    return made


def test_the_same_model_decides_the_same(logs: list[Path]) -> None:
    """A model would be found to differ from itself."""
    reports = judged(logs, DuplexModel.load(tiny_path(), slots=1))
    assert all(report.identical for report in reports)
    assert sum(report.decisions for report in reports) > 50
    assert not any(report.decisions_changed for report in reports)


def test_rounding_is_told_from_a_regression(logs: list[Path], half: DuplexModel) -> None:
    """A model engineer could not tell a port to half precision from a broken one."""
    numbers = torch.Generator().manual_seed(0)
    broken = spoilt(lambda weights: weights.mul_(1 + torch.randn(weights.shape, generator=numbers)))
    found = {"half": Counter[str](), "broken": Counter[str]()}
    for name, model in (("half", half), ("broken", broken)):
        for report in judged(logs, model):
            found[name].update(otherwise=report.decisions_changed, near=report.near_ties)
    assert 0 < 0.9 * found["half"]["otherwise"] <= found["half"]["near"]
    assert found["broken"]["otherwise"] > 4 * found["broken"]["near"]


def test_the_command_tells_it(
    logs: list[Path], half: DuplexModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script or a reader could not see how near a decision was."""
    monkeypatch.setattr(environment, "load_backend", lambda *_, **__: EngineBackend(half))
    flags = ("--full", "--teacher-forced", "--model", "tiny")
    assert call(cli.replay_command, *logs, *flags).exit_code == 3
    result = call(cli.replay_command, *logs, *flags, "--anyway", "--json")
    bodies = json.loads(result.stdout)
    assert (result.exit_code, all(body["teacher_forced"] for body in bodies)) == (1, True)
    differing = next(body for body in bodies if body["decisions_changed"])
    assert differing["changed"][0]["near_tie"] is True
    text = call(cli.replay_command, differing["log"], *flags, "--anyway").stdout
    assert "dtype: recorded float32, here bfloat16" in text
    assert ": a near-tie" in text
    assert f"forced: {differing['decisions_changed']} of {differing['decisions']}" in text
