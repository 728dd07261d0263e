"""A user's speech stops the model's, where the operator wants that (`--barge-in`)."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import Any, Final

import anyio
import numpy as np
import pytest

from recorder.format.format import SUFFIX
from recorder.read.reader import read
from replay.rerun.logic import replay
from runtime.model.backends.scripted import ScriptedBackend
from tests.sessions.in_memory import (
    Peer,
    World,
    append_frame,
    base64,
    init_frame,
    on_virtual_time,
    talkative,
    world,
)

RATE_HZ: Final = 16_000
SYLLABLES: Final = np.arange(RATE_HZ) % 4000 > 800
SECONDS: Final = "qqqqVVqqqq"
"""A user's seconds: quiet, or with a voice."""
OVER: Final = "VVVVVqqqq"
ASKED: Final = "Vqqqqqqq"


def second(kind: str, at: int) -> np.ndarray[Any, Any]:
    """A second of sound, in [-1, 1]."""
    draw = np.random.default_rng(at)
    if kind == "q":
        return draw.normal(0, 0.001, RATE_HZ)
    return draw.normal(0, 0.1, RATE_HZ) * SYLLABLES


def written(endpoint: str, sound: np.ndarray[Any, Any]) -> str:
    """A second as a client of an endpoint sends it."""
    if endpoint == "live":
        data = base64(np.rint(sound * 32767).astype("<i2").tobytes())
        return json.dumps({"type": "session.input_audio.append", "audio": data})
    data = base64(sound.astype("<f4").tobytes())
    if endpoint == "duplex":
        return json.dumps({"type": "audio_chunk", "audio": data})
    return append_frame(audio=data)


def loudness(data: str) -> float:
    """The RMS of sound as `live` sends it: the end of what was resampled is heard after a cut."""
    samples = np.frombuffer(b64decode(data), "<i2") / 32768
    return float(np.sqrt(np.square(samples).mean()))


def spoken(peer: Peer, endpoint: str) -> str:
    """Which seconds were answered by speech (S), and which by a listen (l)."""
    match endpoint:
        case "duplex":
            results = [it for it in peer.events if it["type"] == "result"]
            return "".join("l" if it["is_listen"] else "S" for it in results)
        case "live":
            sounds = [it for it in peer.events if it["type"] == "session.output_audio.delta"]
            return "".join("S" if loudness(it["delta"]) > 0.01 else "l" for it in sounds)
    return "".join({"listen": "l", "audio": "S"}.get(kind, "") for kind in peer.kinds)


async def begin(server: World, endpoint: str, rate_hz: int) -> Peer:
    """Have a session whose model may speak in its first second."""
    peer = server.connect("audio", endpoint=endpoint, label="scripted")
    none = {"force_listen_count": 0}
    match endpoint:
        case "duplex":
            peer.send(json.dumps({"type": "prepare", "config": none}))
            await peer.heard("prepared")
        case "live":
            audio = {"format": {"type": "audio/pcm", "rate": rate_hz}}
            session = {"model": "scripted", "audio": audio}
            peer.send(json.dumps({"type": "session.start", "session": session}))
            await peer.heard("session.started")
        case _:
            peer.send(init_frame(config=none))
            await peer.heard("session.created")
    return peer


def converse(
    endpoint: str,
    seconds: str = SECONDS,
    *,
    barge_in: bool,
    record_to: Path | None = None,
    rate_hz: int = RATE_HZ,
    pieces: int = 1,
) -> str:
    """Send the user's seconds as they are spoken, in pieces; returns how each was answered."""
    found: list[str] = []

    async def body() -> None:
        backend = ScriptedBackend(talkative)
        async with world(backend, record_to=record_to, barge_in=barge_in) as server:
            peer = await begin(server, endpoint, rate_hz)
            for at, kind in enumerate(seconds):
                sound = np.repeat(second(kind, at), rate_hz // 8000)[::2]
                for piece in np.split(sound, pieces):
                    peer.send(written(endpoint, piece))
                    await anyio.sleep(1 / pieces)
            found.append(spoken(peer, endpoint))
            peer.leave(1000)
            await server.quiet()

    on_virtual_time(body)
    return found[0]


@pytest.mark.parametrize("endpoint", ["realtime", "duplex", "live"])
def test_who_speaks_is_heard_out(endpoint: str, tmp_path: Path) -> None:
    """The model would talk on; or never again; or be stopped where nobody wants it."""
    assert converse(endpoint, barge_in=False) == "S" * len(SECONDS)
    assert converse(endpoint, barge_in=True, record_to=tmp_path) == "SSSSlllSSS"
    (path,) = tmp_path.glob("*" + SUFFIX)
    assert replay(read(path)).identical
    kinds = [record.fields.get("type") for record in read(path)]
    assert kinds.count("SpeechStarted") == kinds.count("SpeechStopped") == 1


def test_an_answer_that_begins_before_the_question_is_known_to_end_is_heard() -> None:
    """The detector is half a second behind: each quick answer would be cut."""
    assert converse("realtime", ASKED, barge_in=True) == "S" * len(ASKED)


def test_who_is_spoken_over_is_heard_out() -> None:
    """The model would talk on whoever talks, for it began while they did."""
    assert converse("realtime", OVER, barge_in=True) == "SSllllSSS"
