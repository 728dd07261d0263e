"""The official client of OpenAI's Realtime API writes down what is said, at a real server."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soxr
from openai import AsyncOpenAI

from recorder.read.reader import LogReader
from replay.rerun.logic import replay
from runtime.commands.server_process import RUN
from tests.bench.tiny.score_transcripts import Written, word_error
from tests.bench.tiny.staging import known_phrases, read_speech
from tests.live.servers import LiveServer, live_server
from tests.live.test_openai_realtime import RATE_HZ, client_of, say, until
from tests.live.test_transcription_tiny import HELDOUT

NAME = "conversation.item.input_audio_transcription"
PHRASES = 6
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


@pytest.mark.parametrize("kind", ["server_vad", None])
def test_phrases_are_written_down(tmp_path: Path, kind: str | None) -> None:
    """This client cannot use the server, or its recordings cannot be run again."""
    folder = tmp_path / "recordings"
    with live_server("--record", str(folder), model="tiny") as server:
        found = asyncio.run(transcribe(server, kind))
        assert "broke" not in server.errors.read_text()
    texts, _ = utterances()
    done = [event for event in found if event.type == f"{NAME}.completed"]
    written = [
        Written(said=tuple(text.split()), wrote=tuple(event.transcript.split()))
        for text, event in zip(texts, done, strict=True)
    ]
    assert word_error(written) <= 0.2
    for event in done:
        deltas = [it for it in found if it.type == f"{NAME}.delta" and it.item_id == event.item_id]
        assert "".join(it.delta for it in deltas).strip() == event.transcript
        steps = [it.type for it in found if getattr(it, "item_id", "") == event.item_id]
        assert steps.index("input_audio_buffer.committed") < steps.index(event.type)
        assert event.usage.seconds > 0.5
    kinds = {event.type for event in found}
    assert ("input_audio_buffer.speech_started" in kinds) is (kind is not None)
    (log,) = folder.rglob("*.session.zst")
    with LogReader(log) as items:
        assert replay(items).identical
    fully = [*RUN, "replay", str(log), "--full"]
    assert subprocess.run(fully, check=False, capture_output=True).returncode == 0
    for form in ("srt", "wav"):
        out = tmp_path / f"out.{form}"
        command = [*RUN, "export", str(log), "--to", form, "--output", str(out)]
        subprocess.run(command, check=True, capture_output=True)
        assert out.stat().st_size > 100
    assert np.mean([event.transcript in (tmp_path / "out.srt").read_text() for event in done]) > 0.8
    redacted = tmp_path / "redacted.session.zst"
    command = [*RUN, "redact", str(log), "--output", str(redacted)]
    subprocess.run(command, check=True, capture_output=True)
    with LogReader(redacted) as items:
        assert replay(items).identical
