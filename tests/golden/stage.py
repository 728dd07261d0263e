"""What scenes of golden logs are told with: who is on stage, and what the model does there.

A scene is what clients do to a server in memory, on virtual time; the log of its last session is
kept. The scenes are in `golden_scenes` and `golden_chat`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import attrs
import numpy as np
import simplejpeg

from protocol.values.model import Unit
from runtime.model.backends.scripted import Speaks, Step
from runtime.model.backends.scripted_chat import tone
from tests.sessions.in_memory import Peer, World, append_frame, base64, close_frame

Play = Callable[[World], Awaitable[None]]
ONE_SLOT: dict[str, Any] = {"slots": 1}
"""Somebody has to wait."""


@attrs.frozen(kw_only=True)
class Scene:
    """What is played, and to which server.

    Attributes:
        play: what the clients do.
        backend: more of `ScriptedBackend`; `eventful` is its script where none is named.
        settings: of the server.
    """

    play: Play
    backend: dict[str, Any] = attrs.Factory(dict)
    settings: dict[str, Any] = attrs.Factory(dict)


def eventful(unit: Unit, seed: int) -> Step:
    """Listen, speak, fail and speak again, so that one log shows it all."""
    if unit.index in (2, 3, 6):
        speech = Speaks(
            text=f"unit {unit.index} ",
            pcm=tone(unit.index, seed, samples=24_000 if unit.index != 3 else 9_000),
            end_of_turn=unit.index == 3,
        )
        return Step(speech=speech, generate_s=0.5, steps=10)
    return Step(fault="fail") if unit.index == 4 else Step()


def brief(unit: Unit, seed: int) -> Step:
    """Listen for one unit, speak for two: a tenth of a second each."""
    if unit.index % 3 == 0:
        return Step()
    speech = Speaks(
        text=f"word {unit.index} ",
        pcm=tone(unit.index, seed, samples=2_400),
        end_of_turn=unit.index % 3 == 2,
    )
    return Step(speech=speech, generate_s=0.4, steps=8)


def only(index: int, **fields: Any) -> Callable[[Unit, int], Step]:
    """`brief`, but for one unit."""

    def script(unit: Unit, seed: int) -> Step:
        step = brief(unit, seed)
        return attrs.evolve(step, **fields) if unit.index == index else step

    return script


def without_loss(step: Step) -> Step:
    """The same step, without the loss of the worker while it is finalized."""
    is_lost = step.finalize.fault == "gone"
    return attrs.evolve(step, finalize=attrs.evolve(step.finalize, fault=None)) if is_lost else step


def picture(height: int = 48, width: int = 64) -> str:
    """A small JPEG, base64."""
    image = np.arange(height * width * 3, dtype=np.uint8).reshape(height, width, 3)
    return base64(simplejpeg.encode_jpeg(image))


async def talk(peer: Peer, seconds: int, **fields: object) -> None:
    """Say something, second by second."""
    for _ in range(seconds):
        peer.send(append_frame(**fields))
        await anyio.sleep(1)


async def part(peer: Peer, reason: str | None = None) -> None:
    """Close, and wait for the end."""
    peer.send(close_frame(reason))
    await peer.over()
