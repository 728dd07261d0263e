"""Recordings of `tiny` for the tests of `antiphon eval --model`, and models with a planted change.

Each session is ten seconds, seven in make test: a question at once, and another one a few seconds
later, which often interrupts the answer. `Planted` is a model that differs in one known way.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import attrs
import numpy as np
import torch

from protocol.values.model import (
    INPUT_RATE_HZ,
    Cut,
    Finalized,
    Opened,
    Opening,
    Unit,
    UnitResult,
    Voice,
)
from replay.assess.command import Mode
from replay.assess.run import Run, run_model
from replay.rerun.environment import Loading
from replay.shared.commands import unwatched
from runtime.model.backends.base import Backend, Forced, ForcedResult
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.engine.backend import EngineBackend, EngineSession
from runtime.model.models import tiny_path
from tests.bench.tiny.staging import Pcm, known_phrases, read_speech, room
from tests.generated.clients import HELDOUT
from tests.models.blocking import BlockingSession, open_session
from tests.project.sampling import sample
from tests.sessions.in_memory import base64, close_frame, on_virtual_time, world

SECONDS: Final = sample(10, 7)
JOBS: Final = 8


@functools.cache
def tiny(slots: int = JOBS, dtype: torch.dtype = torch.float32) -> DuplexModel:
    """Load the embedded model, once a process: its sessions leave nothing behind."""
    return DuplexModel.load(tiny_path(), slots=slots, dtype=dtype)


# -- recordings -----------------------------------------------------------------------------------


class Steady:
    """A model in the event loop's own thread, that takes 0.2 s of virtual time for a unit."""

    def __init__(self, model: DuplexModel) -> None:
        self.info = attrs.evolve(model.info, slots=1)
        self.violations: list[str] = []
        self._model = model

    async def open(self, opening: Opening, *, slot: int) -> SteadySession:
        """Open a session."""
        assert slot == 0
        return SteadySession(open_session(self._model, opening))


@attrs.define
class SteadySession:
    """One session of a `Steady` model."""

    session: BlockingSession

    @property
    def opened(self) -> Opened:
        """What opening gave."""
        return self.session.opened

    async def run(self, unit: Unit, cut: Cut | None = None) -> UnitResult:
        """Run a unit."""
        await anyio.sleep(0.2)
        return self.session.run_unit(unit, cut)

    def interrupt(self, index: int) -> None:
        """Nothing asks for it."""
        raise AssertionError(index)

    async def finalize(self, index: int, *, interrupted: bool) -> Finalized:
        """Finalize the unit."""
        return self.session.finalize(index, interrupted=interrupted)

    async def rollback(self, index: int) -> None:
        """Undo the unit."""
        self.session.rollback(index)

    async def release(self) -> None:
        """Release the session."""
        self.session.release()


def talk_of(number: int) -> Pcm:
    """Make the user's sound of a session."""
    items = known_phrases(HELDOUT)
    first = read_speech(HELDOUT, items[(7 * number + 1) % len(items)])
    second = read_speech(HELDOUT, items[(11 * number + 40) % len(items)])
    sound = room(SECONDS * INPUT_RATE_HZ, number)
    sound[3_200 : 3_200 + len(first)] += first
    at = (5 - number % 2) * INPUT_RATE_HZ + number % 5 * INPUT_RATE_HZ // 10
    sound[at : at + len(second)] += second
    return sound


def record_talks(folder: Path, count: int, model: DuplexModel) -> list[Path]:
    """Record sessions of `tiny` as a server does; they differ in their sound and their seed."""

    async def talk(number: int) -> None:
        async with world(Steady(model), record_to=folder) as server:
            server.server._identities.drawn = number
            peer = await server.activate("audio")
            for second in np.split(talk_of(number), SECONDS):
                await anyio.sleep(1)
                audio = base64(second.astype("<f4").tobytes())
                peer.send(json.dumps({"type": "input.append", "input": {"audio": audio}}))
            await anyio.sleep(2)
            peer.send(close_frame())
            await peer.over()

    folder.mkdir(exist_ok=True)
    for number in range(count):
        on_virtual_time(partial(talk, number))
    return sorted(folder.glob("*.zst"))


# -- models with a planted change -----------------------------------------------------------------


class Planted:
    """A model whose sessions open otherwise, or whose sound is other."""

    def __init__(
        self,
        backend: EngineBackend,
        name: str,
        *,
        opens: Callable[[Opening], Opening] = lambda opening: opening,
        gain: float = 1,
    ) -> None:
        self.info = attrs.evolve(
            backend.info, fingerprint={**backend.info.fingerprint, "planted": name}
        )
        self._backend, self._opens, self._gain = backend, opens, gain

    async def open(self, opening: Opening, *, slot: int) -> Any:
        """Open a session."""
        session = await self._backend.open(self._opens(opening), slot=slot)
        return session if self._gain == 1 else _Louder(session, self._gain)


class _Louder:
    """A session whose sound is louder."""

    def __init__(self, session: EngineSession, gain: float) -> None:
        self._session, self._gain = session, gain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    async def run_forced(self, unit: Unit, forced: Forced, cut: Cut | None = None) -> ForcedResult:
        made = await self._session.run_forced(unit, forced, cut)
        pcm = (np.frombuffer(made.result.pcm, "<f4") * np.float32(self._gain)).tobytes()
        return attrs.evolve(made, result=attrs.evolve(made.result, pcm=pcm))


def configured(**settings: Any) -> Callable[[Opening], Opening]:
    """Open sessions with other settings."""
    return lambda opening: attrs.evolve(opening, config=attrs.evolve(opening.config, **settings))


def voiced(opening: Opening) -> Opening:
    """Open sessions with another reference voice."""
    at = np.arange(INPUT_RATE_HZ)
    pcm = (0.3 * np.sin(at / 9)).astype("<f4").tobytes()
    return attrs.evolve(opening, voice=Voice(llm_pcm=pcm, tts_pcm=pcm))


def spoilt(scale: float, layer: int = 1) -> DuplexModel:
    """Load it and change the weights of one layer of the language model by factors around 1."""
    model = DuplexModel.load(tiny_path(), slots=JOBS)
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights in model.runner.parts.llm.model.layers[layer].parameters():
            weights.mul_(1 + scale * torch.randn(weights.shape, generator=numbers))
    return model


def _opening(name: str, **settings: object) -> Backend:
    return Planted(EngineBackend(tiny()), name, opens=configured(**settings))


PLANTED: Final[dict[str, Callable[[], Backend]]] = {
    "none": lambda: EngineBackend(tiny()),
    "listens less": partial(_opening, "scale", listen_prob_scale=0.8),
    "may speak at once": partial(_opening, "free", force_listen_count=0),
    "another voice in the prompt": lambda: Planted(EngineBackend(tiny()), "v", opens=voiced),
    "another voice of the vocoder": lambda: Planted(EngineBackend(tiny()), "gain", gain=0.9),
    "half precision": lambda: EngineBackend(tiny(dtype=torch.bfloat16)),
    "weights of a layer, 10 %": lambda: EngineBackend(spoilt(0.1)),
    "weights of a layer, 100 %": lambda: EngineBackend(spoilt(1.0)),
}
"""Models with a planted change, by what it is."""


def run_on(logs: list[Path], mode: Mode, backend: Backend, *, jobs: int = JOBS, **how: Any) -> Run:
    """Run a model on logs, as the command does."""
    running = partial(run_model, mode, Loading("tiny", slots=jobs), logs, lambda _: backend)
    return anyio.run(partial(running, out=how.get("out"), watch=unwatched))
