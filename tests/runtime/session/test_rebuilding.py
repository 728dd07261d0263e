"""How a session's past is handed to a model: in order, whole, little at once, once it is open."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.values.model import PAST_UNITS_MAX, UNIT_BYTES, Opening, PastUnit, Unit, UnitResult
from runtime.model.backends.base import OPEN_TRIES, BackendError
from runtime.model.backends.scripted import ScriptedBackend, ScriptedSession, Step, default_script
from runtime.model.backends.scripted_chat import ScriptedTranscript
from runtime.session.model_calls import BATCH_BYTES, _take
from tests.golden.moving import deaf_at
from tests.golden.transcription import done, said
from tests.sessions.in_memory import append_frame, on_virtual_time, world

PICTURE = bytes(4 * 1024 * 1024)


def past_unit(index: int, *, pictures: int = 0) -> PastUnit:
    unit = Unit(index=index, pcm=bytes(UNIT_BYTES), frames=(PICTURE,) * pictures)
    result = UnitResult(index=index, is_listen=True)
    return PastUnit(unit=unit, result=result, interrupted=False, is_voiced=False)


def batches(*pictures: int) -> list[list[int]]:
    units = iter([past_unit(index, pictures=count) for index, count in enumerate(pictures)])
    found = []
    while batch := _take(units):
        found.append([past.unit.index for past in batch])
    return found


def test_a_past_is_handed_over_in_batches() -> None:
    """A unit is left out, or a call holds more than a backend takes."""
    assert batches(*[0] * (PAST_UNITS_MAX + 2)) == [
        list(range(PAST_UNITS_MAX)),
        [PAST_UNITS_MAX, PAST_UNITS_MAX + 1],
    ]
    assert batches() == []


def test_pictures_make_a_batch_shorter() -> None:
    """Sixteen units full of pictures are a gigabyte in one message."""
    full = BATCH_BYTES // len(PICTURE)
    assert batches(16, 16, 0, full, 0) == [[0], [1], [2, 3], [4]]


class Restarting(ScriptedBackend):
    """A worker that cannot be opened the first two times."""

    refusals = OPEN_TRIES - 1

    def _refuse(self) -> None:
        if self.refusals:
            self.refusals -= 1
            raise BackendError("not now")

    async def open(self, opening: Opening, *, slot: int) -> ScriptedSession:
        self._refuse()
        return await super().open(opening, slot=slot)

    async def transcribe(self, *, slot: int) -> ScriptedTranscript:
        self._refuse()
        return await super().transcribe(slot=slot)


@pytest.mark.parametrize("mode", ["audio", "transcription"])
def test_a_model_that_restarts_is_opened_again_in_a_rebuild(tmp_path: Path, mode: str) -> None:
    """The session ends with its worker, though another try half a second later would open it."""

    def dies(unit: Unit, seed: int) -> Step:
        return Step(fault="gone") if unit.index == 1 else default_script(unit, seed)

    first = ScriptedBackend(dies, transcription=deaf_at(1))
    workers = list[Restarting]()

    async def load(_place: int) -> Restarting:
        workers.append(Restarting())
        return workers[-1]

    async def body() -> None:
        async with world(first, record_to=tmp_path, load=load) as server:
            if mode == "audio":
                peer = await server.activate("audio")
                for number in range(2):
                    peer.send(append_frame())
                    await peer.heard("response.output.delta", number + 1)
            else:
                peer = await server.activate_transcription()
                peer.send(*said(2))
                await done(peer, 1)
            assert [worker.refusals for worker in workers] == [0]
            peer.vanish()
            await server.quiet()

    on_virtual_time(body)
