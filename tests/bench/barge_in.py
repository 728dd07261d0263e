"""How soon a client of `openai` hears that its user interrupts, and how often a noise does.

    python -m tests.bench.barge_in [--out FOLDER] [--count N]

Needs espeak-ng, for voices and sentences that the detector's constants were not chosen with. A
server in memory, on virtual time, whose model speaks all the time; a client that sends 20 ms every
20 ms. An interruption is a sentence in the noise of a room, or a noise without a voice. What is
counted is what the session tells: `speech_started`, and the response that ends as cancelled. The
delay is from the first sample of the sentence; a network's and a machine's come on top.

Noises are made, not recorded: a coffee machine or a dog was not tried. A sound of attention is a
quarter of a second of a voice that says "mm-hm".
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import wave
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import anyio
import numpy as np
import numpy.typing as npt
import soxr

from protocol.values.limits import BACKCHANNEL_MS
from runtime.media.speech_detector import EnergyJudge, Judge, SileroJudge
from runtime.model.backends.scripted import ScriptedBackend
from runtime.session.speech_input import SpeechInput
from tests.project.evidence import add_out
from tests.sessions.in_memory import Peer, base64, on_virtual_time, talkative, world

RATE_HZ: Final = 24_000
PIECE: Final = RATE_HZ // 50
BEFORE_S: Final = 3.0
AFTER_S: Final = 1.5
VOICES: Final = ("belinda", "boris", "caleb", "linda", "max", "norbert", "quincy", "steph")
SENTENCES: Final = (
    "stop please, that is not what I meant",
    "wait a moment",
    "could you say that again",
    "no, the other one",
    "excuse me",
    "actually I would like something else",
    "hold on",
    "yes I know that already",
    "how much does it cost",
    "let me think about it",
)
"""None of them is in the model's recipe."""
SNR_DB: Final = (10, 20, 30, 40)
ROOM: Final = 60.0
"""The noise of a room, as a 16-bit level: -55 dB of full scale."""

Sound = npt.NDArray[np.float64]
Noise = Callable[[np.random.Generator], Sound]


def sentence(text: str, voice: str, draw: np.random.Generator) -> Sound:
    """Have a sentence said: samples of -32768 to 32767, from the first one that is heard."""
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        speed, pitch = int(draw.integers(140, 200)), int(draw.integers(20, 80))
        words = ["-v", f"en-us+{voice}", "-s", str(speed), "-p", str(pitch), "-w", file.name]
        subprocess.run(["espeak-ng", *words, text], check=True)
        with wave.open(file.name) as said:
            rate_hz = said.getframerate()
            samples = np.frombuffer(said.readframes(said.getnframes()), "<i2")
    found: Sound = soxr.resample(samples.astype(np.float64), rate_hz, RATE_HZ)
    return found[int((np.abs(found) > 300).argmax()) :]


def _burst(draw: np.random.Generator, length_s: float, decay_s: float, level: float) -> Sound:
    at = np.arange(int(length_s * RATE_HZ)) / RATE_HZ
    burst: Sound = draw.normal(0, level, len(at)) * np.exp(-at / decay_s)
    return burst


def _repeated(
    draw: np.random.Generator, one: Callable[[], Sound], times: int, gap_s: float
) -> Sound:
    sound = np.zeros(int(2.5 * RATE_HZ))
    for number in range(times):
        start = int((number * gap_s + draw.uniform(0, gap_s / 4)) * RATE_HZ)
        part = one()[: len(sound) - start]
        sound[start : start + len(part)] += part
    return sound


def _hiss(draw: np.random.Generator) -> Sound:
    """A tap that is opened: noise that stays."""
    rise = np.minimum(np.arange(int(2.5 * RATE_HZ)) / (0.3 * RATE_HZ), 1)
    sound: Sound = draw.normal(0, 10 ** draw.uniform(1.5, 2.6), len(rise)) * rise
    return sound


def _chords(draw: np.random.Generator) -> Sound:
    """Music: chords of a piano, as loud as speech."""

    def chord() -> Sound:
        at = np.arange(RATE_HZ // 2) / RATE_HZ
        tones = 220 * 2 ** (draw.integers(0, 24, 3) / 12)
        waves = sum(np.sin(2 * np.pi * hz * at) for hz in tones)
        made: Sound = waves * np.exp(-at / 0.25) * 10 ** draw.uniform(2.5, 3.5)
        return made

    return _repeated(draw, chord, 5, 0.5)


NOISES: Final[Mapping[str, Noise]] = MappingProxyType(
    {
        "hiss": _hiss,
        "music": _chords,
        "cough": lambda draw: _repeated(
            draw, lambda: _burst(draw, 0.3, 0.08, 10 ** draw.uniform(3, 3.8)), 2, 0.5
        ),
        "knocks": lambda draw: _repeated(
            draw, lambda: _burst(draw, 0.1, 0.02, 10 ** draw.uniform(3, 3.9)), 3, 0.4
        ),
        "typing": lambda draw: _repeated(
            draw, lambda: _burst(draw, 0.03, 0.006, 10 ** draw.uniform(2, 3.2)), 14, 0.15
        ),
    }
)
"""Sounds without a voice."""


async def converse(peer: Peer, sound: Sound) -> tuple[float | None, bool]:
    """Send sound while the model speaks; returns the delay of the interruption, and its cut."""
    spoke_s, told_s = BEFORE_S, None
    data = np.rint(sound).clip(-32768, 32767).astype("<i2").tobytes()
    began_s, seen = anyio.current_time(), 0
    for at in range(0, len(data), 2 * PIECE):
        piece = base64(data[at : at + 2 * PIECE].ljust(2 * PIECE, b"\0"))
        peer.send(json.dumps({"type": "input_audio_buffer.append", "audio": piece}))
        await anyio.sleep(0.02)
        for body in peer.events[seen:]:
            if body["type"] == "input_audio_buffer.speech_started" and told_s is None:
                told_s = anyio.current_time() - began_s - spoke_s
        seen = len(peer.events)
    is_cut = any(
        body["type"] == "response.done" and body["response"]["status"] == "cancelled"
        for body in peer.events
    )
    return told_s, is_cut


def attention(voice: str, draw: np.random.Generator) -> Sound:
    """Have a user say "mm-hm", in a quarter of a second."""
    said = sentence("mm-hm", voice, draw)[: RATE_HZ // 4]
    said[-RATE_HZ // 50 :] *= np.linspace(1, 0, RATE_HZ // 50)
    loud: Sound = said * 2500 / np.sqrt(np.square(said).mean())
    return loud


def interrupt(
    sound: Sound,
    draw: np.random.Generator,
    room: float,
    make_judge: Callable[[], Judge],
    backchannel_ms: int = BACKCHANNEL_MS,
) -> tuple[float | None, bool]:
    """Have a session in which `sound` comes while the model speaks."""
    whole = draw.normal(0, room, int((BEFORE_S + AFTER_S) * RATE_HZ) + len(sound))
    at = int(BEFORE_S * RATE_HZ)
    whole[at : at + len(sound)] += sound
    found: list[tuple[float | None, bool]] = []

    async def body() -> None:
        async with world(ScriptedBackend(talkative), backchannel_ms=backchannel_ms) as server:
            server.server._speech_input = SpeechInput(make_judge)
            peer = server.connect("audio", endpoint="openai", label="scripted")
            await peer.heard("session.created")
            found.append(await converse(peer, whole))
            peer.leave(1000)
            await server.quiet()

    on_virtual_time(body)
    return found[0]


def measure(count: int, make_judge: Callable[[], Judge]) -> dict[str, Any]:
    """Interrupt `count` times by a voice, and as often by each noise's share."""
    delays, missed, early, uncut = list[float](), 0, 0, 0
    for number in range(count):
        draw = np.random.default_rng(number)
        voice, snr_db = VOICES[number % len(VOICES)], SNR_DB[number % len(SNR_DB)]
        said = sentence(SENTENCES[number % len(SENTENCES)], voice, draw)
        said *= 2500 / np.sqrt(np.square(said).mean())
        delay, is_cut = interrupt(said, draw, 2500 / 10 ** (snr_db / 20), make_judge)
        if delay is None:
            missed += 1
        elif delay < 0:
            early += 1
        else:
            delays.append(delay * 1000)
            uncut += not is_cut
    false: dict[str, str] = {}
    for name, make in NOISES.items():
        times = count // len(NOISES)
        hits = 0
        for number in range(times):
            draw = np.random.default_rng(1000 + number)
            hits += interrupt(make(draw), draw, ROOM, make_judge)[0] is not None
        false[name] = f"{hits} of {times}"
    heard: dict[str, str] = {}
    for least_ms in (0, BACKCHANNEL_MS):
        hits = 0
        for number, voice in enumerate(VOICES * 2):
            draw = np.random.default_rng(2000 + number)
            hits += interrupt(attention(voice, draw), draw, ROOM, make_judge, least_ms)[1]
        heard[f"backchannel_ms {least_ms}"] = f"{hits} of {2 * len(VOICES)}"
    return {
        "interruptions": count,
        "missed": missed,
        "told before they began": early,
        "told, and not cut": uncut,
        "delay_ms": {f"p{at}": round(float(np.percentile(delays, at))) for at in (50, 90, 99)},
        "false": false,
        "cut by mm-hm": heard,
    }


def main() -> int:
    """Measure, and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    add_out(parser)
    asked = parser.parse_args()
    judges = {"energy": EnergyJudge, "silero": SileroJudge}
    found = {
        "what": "users who interrupt, and noises that do",
        **{name: measure(asked.count, judge) for name, judge in judges.items()},
    }
    text = json.dumps(found, indent=2) + "\n"
    (asked.out / "barge_in.json").write_text(text, "utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
