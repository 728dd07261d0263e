"""Teacher-forced replay: each unit judged by itself, a near-tie told from a regression."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest
import torch

from protocol.values.model import Unit
from replay.assess.command import eval_command
from replay.assess.run import look_at, run_forced
from replay.eval.evaluate import Row
from replay.rerun import environment
from replay.rerun.environment import ModelUnavailableError
from replay.rerun.outputs import NEAR_TIE_DRAW_GAP, NEAR_TIE_MARGIN, is_near_tie
from replay.shared.commands import unwatched
from runtime.measures.conversation import Ratio
from runtime.model.backends.base import Backend, Choice
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.scripted import ScriptedBackend, Speaks, Step
from runtime.model.engine.backend import EngineBackend
from runtime.model.models import tiny_path
from tests.generated.clients import DirectBackend, append_pcm
from tests.project.sampling import sample
from tests.replay.test_cli import call
from tests.replay.test_fork import full_replay
from tests.replay.test_full import Echo, quick, record_session
from tests.sessions.in_memory import base64, close_frame, on_virtual_time, world

VOICES = sample((1, 2, 3), (1, 2))
UNITS = 10


def run(log: Path, backend: Backend) -> Row:
    """Force a log on a model."""
    rows = []

    async def body() -> None:
        rows.append(await run_forced(look_at(log), backend, unwatched))

    on_virtual_time(body)
    return rows[0]


def changed(row: Row) -> list[Any]:
    """The units that came out otherwise."""
    found = row.body["changed"]
    assert isinstance(found, list)
    return found


def otherwise(unit: Unit, seed: int) -> Step:
    """Say one word more in unit 3; the others are `quick`."""
    step = quick(unit, seed)
    if unit.index != 3 or step.speech is None:
        return step
    return attrs.evolve(step, speech=Speaks(text="another word", pcm=step.speech.pcm))


def test_one_other_unit_spoils_no_other(tmp_path: Path) -> None:
    """After a difference each unit would differ, and only the first could be judged."""
    log = record_session(tmp_path)
    assert full_replay(log, ScriptedBackend(otherwise)).units_changed > 5
    (found,) = changed(run(log, ScriptedBackend(otherwise)))
    assert (found["unit"], found["field"], found["near_tie"]) == (3, "decided_ids[1]", None)
    assert changed(run(log, ScriptedBackend(quick))) == []


def test_a_model_that_cannot_be_forced_says_so(tmp_path: Path) -> None:
    """It would be replayed as it likes, and judged as if it had been forced."""
    echo = Echo()
    log = record_session(tmp_path)
    with pytest.raises(ModelUnavailableError, match="cannot be forced"):
        anyio.run(run_forced, look_at(log), echo, unwatched)
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
        for weights in model.runner.parts.llm.parameters():
            spoil(weights)
    return model


def judged(logs: list[Path], model: DuplexModel) -> list[Row]:
    """Force all logs on a model, whatever it is."""

    async def body() -> list[Row]:
        backend = EngineBackend(model)
        return [await run_forced(look_at(log), backend, unwatched) for log in logs]

    return anyio.run(body)


@pytest.mark.soak  # `test_assess.py` forces a model to its own sessions.
def test_the_same_model_decides_the_same(logs: list[Path]) -> None:
    """A model would be found to differ from itself."""
    rows = judged(logs, DuplexModel.load(tiny_path(), slots=1))
    assert not any(map(changed, rows))
    decisions = [row.scores["tokens_otherwise"] for row in rows]
    assert all(isinstance(it, Ratio) and it.part == 0 for it in decisions)
    assert sum(it.whole for it in decisions if isinstance(it, Ratio)) > 50


def test_rounding_is_told_from_a_regression(logs: list[Path], half: DuplexModel) -> None:
    """A model engineer could not tell a port to half precision from a broken one."""
    numbers = torch.Generator().manual_seed(0)
    broken = spoilt(lambda weights: weights.mul_(1 + torch.randn(weights.shape, generator=numbers)))
    found = {"half": Counter[bool | None](), "broken": Counter[bool | None]()}
    for name, model, some in (("half", half, logs), ("broken", broken, sample(logs, logs[:1]))):
        for row in judged(some, model):
            found[name].update(it["near_tie"] for it in changed(row))
    assert found["half"][True] > 0
    assert 9 * found["half"][False] <= found["half"][True]
    assert found["broken"][False] > 3 * found["broken"][True]


def test_the_command_tells_it(
    logs: list[Path], half: DuplexModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script or a reader could not see how near a decision was."""
    monkeypatch.setattr(environment, "load_backend", lambda *_, **__: EngineBackend(half))
    flags = ("--mode", "forced", "--jobs", "1", "--model", "tiny")
    result = call(eval_command, *sample(logs, logs[:1]), *flags, "--json")
    body = json.loads(result.stdout)
    assert (result.exit_code, body["model"]) == (0, "tiny")
    differing = next(it for it in body["recordings"] if it["changed"])
    assert any(it["near_tie"] for it in differing["changed"])
    text = call(eval_command, differing["log"], *flags).stdout
    assert "units with other results:" in text
    assert ": a near-tie" in text
