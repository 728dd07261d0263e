"""Clients of transcription made by numbers: what they say and do is drawn, played and recorded.

As `generated` does for duplex sessions: the same number makes the same client and the same log.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import anyio
import attrs
import numpy as np
from hypothesis import strategies as st

from runtime.model.backends.scripted import Call, ScriptedBackend
from tests.generated.clients import IDENTITIES_A_WORLD, Dice, SeededDice, pick
from tests.sessions.in_memory import Peer, append_sound, on_virtual_time, world
from tests.strategies.random_scripts import random_hearing

ACTIONS_MAX: Final = 30
SAMPLES_MAX: Final = 12 * 16_000
"""Of one client; more says the same."""
BLUNDERS: Final[tuple[str | bytes | None, ...]] = (
    *("no JSON", "[]", '{"type":"nope","type":"nope"}', '{"a":NaN}', b"\0\1", '{"type":"nope"}'),
    *("{}", '{"type":"session.update"}', '{"type":"session.update","model":"other"}'),
    *('{"type":"session.create","model":"scripted"}', '{"type":"session.close"}'),
    *('{"type":"input_audio_buffer.append","audio":"%"}', '{"type":"response.create"}'),
    '{"type":"input_audio_buffer.commit","final":1}',
)
"""Each is answered by an error, at most, and the session goes on."""
COMMIT: Final = '{"type":"input_audio_buffer.commit"}'
FINAL: Final = '{"type":"input_audio_buffer.commit","final":true}'


@attrs.frozen(kw_only=True)
class Say:
    """A frame; of sound, how many samples, and which."""

    frame: str | bytes | None = None
    samples: int = 0
    seed: int = 0


@attrs.frozen
class Wait:
    """Nothing, for a while."""

    ms: int


@attrs.frozen(kw_only=True)
class TranscriptionScript:
    """All that one client does.

    Attributes:
        choice: the message that chooses its model.
        actions: what it says after that, and before, where it is early.
        is_early: it says some of it before it has chosen.
        ending: how it goes.
        idle_s: the server's patience.
    """

    choice: str
    actions: tuple[Say | Wait, ...]
    is_early: bool
    ending: str
    idle_s: int


def script_of(dice: Dice) -> TranscriptionScript:
    """Draw a client."""
    actions: list[Say | Wait] = []
    left = SAMPLES_MAX
    for _ in range(1 + dice.below(ACTIONS_MAX)):
        kind = dice.below(20)
        if kind < 9:
            samples = min(left, pick(dice, 16_000, 2_048, 1 + dice.below(40_000), 1))
            left -= samples
            actions += [Say(samples=samples, seed=dice.below(1000))] if samples else []
        elif kind < 12:
            actions.append(Say(frame=COMMIT))
        elif kind < 16:
            actions.append(Say(frame=FINAL))
        elif kind < 18:
            actions.append(Wait(dice.below(3000)))
        else:
            actions.append(Say(frame=BLUNDERS[dice.below(len(BLUNDERS))]))
    kind = pick(dice, "session.update", "session.create")
    return TranscriptionScript(
        choice=f'{{"type":"{kind}","model":"scripted"}}',
        actions=tuple(actions),
        is_early=dice.below(6) == 5,
        ending=pick(dice, "silent", "vanish", "drain", "warn", "big"),
        idle_s=1 + dice.below(20),
    )


@st.composite
def transcription_scripts(draw: st.DrawFn) -> TranscriptionScript:
    """Draw a client, as a Hypothesis strategy."""

    @attrs.frozen
    class Drawn:
        def below(self, bound: int) -> int:
            return draw(st.integers(0, bound - 1))

    return script_of(Drawn())


def backend_of(number: int) -> ScriptedBackend:
    """Make a model in which everything happens that can; `number` decides."""
    dice = SeededDice("hearing", number)
    return ScriptedBackend(
        transcription=random_hearing(number),
        slots=1,
        context_limit=pick(dice, 8192, 8192, 120),
        release=Call(duration_s=dice.below(1000) / 1000),
    )


def record(script: TranscriptionScript, folder: Path, number: int) -> list[Path]:
    """Play a client to a server of its own, and return the logs that came of it."""
    before = set(folder.iterdir())

    async def body() -> None:
        settings = {"idle_s": script.idle_s, "limit_transcription_s": 40}
        async with world(backend_of(number), record_to=folder, **settings) as server:
            server.server._identities.drawn = number * IDENTITIES_A_WORLD
            peer = server.connect("transcription")
            await peer.until(lambda: bool(peer.all("session.created")))
            if not script.is_early:
                peer.send(script.choice)
            for place, action in enumerate(script.actions):
                if script.is_early and place == len(script.actions) // 2:
                    peer.send(script.choice)
                await _act(peer, action)
            if script.ending == "warn":
                server.server.begin_drain(2)
                await anyio.sleep(2)
            await _end(peer, script.ending)

    on_virtual_time(body)
    return sorted(set(folder.iterdir()) - before)


async def _act(peer: Peer, action: Say | Wait) -> None:
    if isinstance(action, Wait):
        await anyio.sleep(action.ms / 1000)
    elif action.samples:
        noise = np.random.default_rng(action.seed).integers(-9_000, 9_000, action.samples)
        peer.send(append_sound(noise.astype("<i2").tobytes()))
    else:
        peer.send(action.frame)


async def _end(peer: Peer, ending: str) -> None:
    if ending == "silent":
        await peer.over()
    elif ending == "vanish":
        peer.vanish()
    elif ending == "big":
        peer.send(None)
        await peer.over()
