"""The official client of OpenAI's Realtime API writes down what is said, at a real server."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import soxr
from openai import AsyncOpenAI

from recorder.read.reader import LogReader
from replay.rerun.logic import replay
from runtime import RUN
from tests.bench.tiny.score_transcripts import Written, word_error
from tests.bench.tiny.staging import known_phrases, read_speech
from tests.live.servers import LiveServer, live_server
from tests.live.test_openai_realtime import RATE_HZ, client_of, say, until
from tests.live.test_transcription_tiny import HELDOUT

NAME = "conversation.item.input_audio_transcription"
PHRASES = 4
PAUSE_S = 1.2


def utterances() -> tuple[list[str], list[bytes]]:
    """Phrases of voices that the model never heard: their texts, and PCM16 at 24 kHz."""
    found = known_phrases(HELDOUT)[::5][:PHRASES]
    sounds = [soxr.resample(read_speech(HELDOUT, it), 16_000, RATE_HZ) for it in found]
    return [it.phrase for it in found], [
        (sound.clip(-1, 1) * 32_767).astype("<i2").tobytes() for sound in sounds
    ]


async def transcribe(server: LiveServer, kind: str | None) -> list[Any]:
    """Say all phrases, and return what the client is told."""
    _, sounds = utterances()
    silence = bytes(2 * int(PAUSE_S * RATE_HZ))
    client = AsyncOpenAI(**client_of(server))
    async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
        heard: Any = {
            "format": {"type": "audio/pcm", "rate": RATE_HZ},
            "transcription": {"model": "tiny", "language": "en"},
            "turn_detection": None if kind is None else {"type": kind},
        }
        session: Any = {"type": "transcription", "audio": {"input": heard}}
        await connection.session.update(session=session)
        found = await until(connection, "session.updated")

        async def speak() -> None:
            for sound in sounds:
                await say(connection, sound if kind is None else sound + silence)
                if kind is None:
                    await connection.input_audio_buffer.commit()

        speaking = asyncio.create_task(speak())
        for _ in sounds:
            found += await until(connection, f"{NAME}.completed")
        await speaking
    return found


def judge(found: list[Any]) -> None:
    """See that each utterance is an item with its own words."""
    texts, _ = utterances()
    done = [event for event in found if event.type == f"{NAME}.completed"]
    written = [
        Written(said=tuple(text.split()), wrote=tuple(event.transcript.split()))
        for text, event in zip(texts, done, strict=True)
    ]
    assert word_error(written) <= 0.2
    for event in done:
        own = [it for it in found if getattr(it, "item_id", "") == event.item_id]
        deltas = [it.delta for it in own if it.type == f"{NAME}.delta"]
        assert "".join(deltas).strip() == event.transcript
        steps = [it.type for it in own]
        assert steps.index("input_audio_buffer.committed") < steps.index(event.type)
        assert event.usage.seconds > 0.5


def run(*words: str) -> None:
    """Run a command that must succeed."""
    subprocess.run([*RUN, *words], check=True, capture_output=True)


def test_phrases_are_written_down(tmp_path: Path) -> None:
    """This client cannot use the server, or its recordings cannot be run again."""
    folder = tmp_path / "recordings"
    with live_server("--record", str(folder), model="tiny") as server:
        by_hand = asyncio.run(transcribe(server, None))
        found = asyncio.run(transcribe(server, "server_vad"))
        assert "broke" not in server.errors.read_text()
    judge(by_hand)
    judge(found)
    kinds, kinds_by_hand = ({event.type for event in events} for events in (found, by_hand))
    assert kinds - kinds_by_hand == {
        "input_audio_buffer.speech_started",
        "input_audio_buffer.speech_stopped",
    }
    logs = sorted(folder.rglob("*.session.zst"))
    run("replay", *map(str, logs), "--full")
    captions, redacted = tmp_path / "out.srt", tmp_path / "redacted.session.zst"
    run("export", str(logs[-1]), "--to", "srt", "--output", str(captions))
    done = [event.transcript for event in found if event.type == f"{NAME}.completed"]
    assert np.mean([text in captions.read_text() for text in done]) > 0.8
    run("recordings", "redact", str(logs[-1]), "--output", str(redacted))
    for log in (*logs, redacted):
        with LogReader(log) as items:
            assert replay(items).identical
