"""How soon a client of `openai` hears that its user interrupts, and how often a noise does.

    python -m tests.bench.barge_in [--out FOLDER] [--count N]

Needs espeak-ng, for voices and sentences that the detector's constants were not chosen with. A
server in memory, on virtual time, whose model speaks all the time; a client that sends 20 ms every
20 ms. An interruption is a sentence in the noise of a room, or a noise without a voice. What is
counted is what the session tells: `speech_started`, and the response that ends as cancelled. The
delay is from the first sample of the sentence; a network's and a machine's come on top.

Noises are made, not recorded: a coffee machine or a dog was not tried. A sound of attention is a
quarter of a second of a voice that says "mm-hm".

**Cost** (`--only cost`, on a quiet machine): sessions in real time, each with a user who speaks in
pieces of 20, 100 or 1000 ms; the processor's time of the whole process for a second of sound, and
how late a task wakes on the event loop. `silero on the loop` is what a server would do without its
thread. The minute at once is the sound of one more client, as a file is sent.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import anyio
import numpy as np
import numpy.typing as npt
import soxr

from protocol.values.limits import BACKCHANNEL_MS
from runtime.media.speech_detector import (
    EnergyClassifier,
    FrameClassifier,
    SileroClassifier,
    network,
)
from runtime.model.backends.scripted import ScriptedBackend
from runtime.session.speech_input import SpeechInput, in_thread
from tests.bench.moonshine import TICK_S, lateness
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
    make_classifier: Callable[[], FrameClassifier],
    backchannel_ms: int = BACKCHANNEL_MS,
) -> tuple[float | None, bool]:
    """Have a session in which `sound` comes while the model speaks."""
    whole = draw.normal(0, room, int((BEFORE_S + AFTER_S) * RATE_HZ) + len(sound))
    at = int(BEFORE_S * RATE_HZ)
    whole[at : at + len(sound)] += sound
    found: list[tuple[float | None, bool]] = []

    async def body() -> None:
        async with world(ScriptedBackend(talkative), backchannel_ms=backchannel_ms) as server:
            server.server._speech_input = SpeechInput(make_classifier)
            peer = server.connect("audio", endpoint="openai", label="scripted")
            await peer.heard("session.created")
            found.append(await converse(peer, whole))
            peer.leave(1000)
            await server.quiet()

    on_virtual_time(body)
    return found[0]


def measure(count: int, make_classifier: Callable[[], FrameClassifier]) -> dict[str, Any]:
    """Interrupt `count` times by a voice, and as often by each noise's share."""
    delays, missed, early, uncut = list[float](), 0, 0, 0
    for number in range(count):
        draw = np.random.default_rng(number)
        voice, snr_db = VOICES[number % len(VOICES)], SNR_DB[number % len(SNR_DB)]
        said = sentence(SENTENCES[number % len(SENTENCES)], voice, draw)
        said *= 2500 / np.sqrt(np.square(said).mean())
        delay, is_cut = interrupt(said, draw, 2500 / 10 ** (snr_db / 20), make_classifier)
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
            hits += interrupt(make(draw), draw, ROOM, make_classifier)[0] is not None
        false[name] = f"{hits} of {times}"
    heard: dict[str, str] = {}
    for least_ms in (0, BACKCHANNEL_MS):
        hits = 0
        for number, voice in enumerate(VOICES * 2):
            draw = np.random.default_rng(2000 + number)
            hits += interrupt(attention(voice, draw), draw, ROOM, make_classifier, least_ms)[1]
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


SESSIONS: Final = (1, 8, 30)
SECONDS: Final = 6


class OnLoop(SileroClassifier):
    """The trained classifier, on the event loop."""

    is_slow = False


CLASSIFIERS: Final[Mapping[str, Callable[[], FrameClassifier]]] = MappingProxyType(
    {"energy": EnergyClassifier, "silero on the loop": OnLoop, "silero": SileroClassifier}
)


def cost(
    make_classifier: Callable[[], FrameClassifier],
    sessions: int,
    piece_ms: int,
    *,
    at_once: bool = False,
) -> dict[str, Any]:
    """Have so many users speak in real time; and one more send a minute `at_once`."""
    late: list[float] = []
    used_s = behind_s = 0.0
    draw = np.random.default_rng(sessions)
    said = sentence(SENTENCES[-2], VOICES[0], draw)
    sound = np.resize(np.concatenate([said, np.zeros(RATE_HZ)]), SECONDS * RATE_HZ)
    minute = np.resize(sound, 60 * RATE_HZ)

    def frame(samples: Sound) -> str:
        audio = base64(np.rint(samples).clip(-32768, 32767).astype("<i2").tobytes())
        return json.dumps({"type": "input_audio_buffer.append", "audio": audio})

    pieces = [frame(it) for it in np.split(sound, SECONDS * 1000 // piece_ms)]

    async def speak(peer: Peer, phase_s: float) -> None:
        began_s = anyio.current_time() + phase_s
        for number, piece in enumerate(pieces):
            await anyio.sleep_until(began_s + number * piece_ms / 1000)
            peer.send(piece)

    async def body() -> None:
        nonlocal used_s, behind_s
        backend = ScriptedBackend(slots=sessions + 1)
        async with world(backend, classify=in_thread) as server, anyio.create_task_group() as tasks:
            server.server._speech_input = SpeechInput(make_classifier)
            peers = [
                server.connect("audio", endpoint="openai", label="scripted")
                for _ in range(sessions + at_once)
            ]
            for peer in peers:
                await peer.heard("session.created")
            used_s = time.process_time()
            tasks.start_soon(lateness, late)
            async with anyio.create_task_group() as users:
                for place, peer in enumerate(peers[:sessions]):
                    users.start_soon(speak, peer, place / sessions * piece_ms / 1000)
                if at_once:
                    await anyio.sleep(SECONDS / 2)
                    peers[-1].send(frame(minute))
            sent_s = anyio.current_time()
            while not all(it.is_idle for it in server.server._drivers):  # noqa: ASYNC110 - at the end
                await anyio.sleep(TICK_S)
            behind_s = anyio.current_time() - sent_s
            used_s = time.process_time() - used_s
            tasks.cancel_scope.cancel()
            for peer in peers:
                peer.leave(1000)

    anyio.run(body, backend="trio")
    quantiles = {f"p{q}": round(float(np.percentile(late, q)) * 1000, 2) for q in (50, 99, 100)}
    return {
        "sessions": sessions,
        "piece_ms": piece_ms,
        "minute_at_once": at_once,
        "cpu_s_per_s_of_sound": round(used_s / sessions / SECONDS, 4),
        "loop_late_ms": quantiles,
        "done_after_s": round(behind_s, 2),
    }


def main() -> int:
    """Measure, and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--only", choices=("error", "cost"), help="one part; the other stays")
    add_out(parser)
    asked = parser.parse_args()
    kept = asked.out / "barge_in.json"
    found: dict[str, Any] = {"what": "users who interrupt, and noises that do"}
    if asked.only and kept.exists():
        found = json.loads(kept.read_text("utf-8"))
    if asked.only != "cost":
        found |= {it: measure(asked.count, CLASSIFIERS[it]) for it in ("energy", "silero")}
    if asked.only != "error":
        network()
        found["machine"] = {"cores": os.cpu_count(), "other_load": round(os.getloadavg()[0], 1)}
        found["cost"] = {
            name: [
                *(cost(classifier, it, 100) for it in SESSIONS),
                *(cost(classifier, SESSIONS[-1], it) for it in (20, 1000)),
                cost(classifier, SESSIONS[-1], 100, at_once=True),
            ]
            for name, classifier in CLASSIFIERS.items()
        }
    text = json.dumps(found, indent=2) + "\n"
    kept.write_text(text, "utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
