"""How fast an engine rebuilds a session: past units per second of its thread's CPU time.

A unit is a second, so the figures are multiples of real time. The session is that of the load in
slot 0, with one more unit that listens: it ends the turn, so no speech is decoded again.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from protocol.values.limits import NS_PER_S
from protocol.values.model import PAST_UNITS_MAX, PastUnit

from ...model.engine.backend import EngineBackend
from .engine import Load


@attrs.frozen(kw_only=True)
class Rebuilt:
    """Units rebuilt per second of CPU time.

    Attributes:
        units: of the session.
        exact: unit by unit, as recorded.
        fast: in long prefills.
        voiced: exact, with a turn that is open from the first unit on: all its speech again.
    """

    units: int
    exact: float
    fast: float
    voiced: float


async def run_rebuilt(backend: EngineBackend, load: Load) -> Rebuilt:
    """Run a session, and rebuild it in each way; the backend is idle otherwise."""
    past = await _past(backend, load)
    voiced = [attrs.evolve(one, is_voiced=True) for one in past[:-1]]
    return Rebuilt(
        units=len(past),
        exact=await _speed(backend, load, past, exact=True),
        fast=await _speed(backend, load, past, exact=False),
        voiced=await _speed(backend, load, voiced, exact=True),
    )


async def _past(backend: EngineBackend, load: Load) -> list[PastUnit]:
    session, past = await backend.open(load.opening(0), slot=0), []
    for index in range(load.seconds + 1):
        unit = load.unit(0, index)
        if index == load.seconds:
            unit = attrs.evolve(unit, force_listen=True)
        result = attrs.evolve(await session.run_unit(unit), pcm=b"")
        await session.finalize(index, interrupted=False)
        past.append(PastUnit(unit=unit, result=result, interrupted=False))
    await session.release()
    return past


async def _speed(
    backend: EngineBackend, load: Load, past: Sequence[PastUnit], *, exact: bool
) -> float:
    session = await backend.open(load.opening(0), slot=0)
    began_ns = backend.engine.statistics.cpu_ns
    for begin in range(0, len(past), PAST_UNITS_MAX):
        await session.rebuild(past[begin : begin + PAST_UNITS_MAX], exact=exact)
    await session.release()  # The engine has then counted all that came before.
    return round(len(past) * NS_PER_S / (backend.engine.statistics.cpu_ns - began_ns), 1)
