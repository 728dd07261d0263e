"""Transcription by `tiny` over a real socket: words of voices that it never heard, as they come.

The server is one that clients of 003 connect to as they are; the client is that of
`test_live_transcription`. What a session was comes back from its log, and is replayed with the
model.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect

from protocol.values.model import UNIT_SAMPLES
from runtime import RUN
from runtime.model.backends.minicpmo.anchor import opening_ids
from runtime.model.backends.minicpmo.tokens import Tokens
from tests.bench.tiny.score_transcripts import Written, word_error
from tests.bench.tiny.staging import Heldout, known_phrases, read_speech
from tests.live.servers import LiveServer
from tests.live.test_transcription import (
    NAME,
    Body,
    append,
    done,
    greeted,
    replayed_server,
    send,
    stream_audio_file,
)
from tests.test_readme import EXAMPLES

ROOT: Final = Path(__file__).parents[2]
FIXTURES: Final = ROOT / "fixtures"
HELDOUT: Final = FIXTURES / "speech" / "heldout"
PIECE_BYTES: Final = 4096
PAUSE: Final = bytes(25_600)
"""0.8 s of silence."""


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server of this module records."""
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def server(recordings: Path) -> Iterator[LiveServer]:
    with replayed_server(recordings, "tiny") as server:
        yield server


@pytest.fixture(scope="module")
def spoken() -> list[tuple[Heldout, bytes]]:
    """Phrases, no two alike, each with its sound as PCM16."""
    items = known_phrases(HELDOUT)[::5]
    sounds = [read_speech(HELDOUT, item) for item in items]
    return [
        (item, (sound * 32_767).astype("<i2").tobytes())
        for item, sound in zip(items, sounds, strict=True)
    ]


async def speak(socket: ClientConnection, pcm16: bytes, *, pause_s: float = 0.0) -> None:
    """Send an utterance in small pieces, and commit it."""
    await send(socket, "input_audio_buffer.commit")
    for at in range(0, len(pcm16), PIECE_BYTES):
        await append(socket, pcm16[at : at + PIECE_BYTES])
        await asyncio.sleep(pause_s)
    await send(socket, "input_audio_buffer.commit", final=True)


async def transcribe(url: str, sounds: list[bytes], *, pause_s: float = 0.0) -> list[str]:
    """Have utterances written down on one connection, all sent before the first is read out."""
    async with connect(url) as socket:
        await greeted(socket, model="tiny")
        for sound in sounds:
            await speak(socket, sound, pause_s=pause_s)
        texts = []
        for _ in sounds:
            said, end = await done(socket)
            assert said == end["text"]
            texts.append(said)
    return texts


def test_the_example_client_of_003_reads_what_was_said(
    server: LiveServer, spoken: list[tuple[Heldout, bytes]]
) -> None:
    """Who points it at the embedded model gets no text, or other words than were said."""
    printed: list[str] = []
    pcm16 = PAUSE.join(sound for _, sound in spoken[:4])
    data = asyncio.run(stream_audio_file(server.url, NAME, pcm16, printed))
    assert "".join(printed) == data["text"]
    assert len(printed) > 1
    said = " ".join(item.phrase for item, _ in spoken[:4])
    written = Written(said=tuple(said.split()), wrote=tuple(data["text"].split()))
    assert word_error([written]) <= 0.4


def test_the_command_prints_what_the_readme_shows(server: LiveServer) -> None:
    """A new user's first transcription is of something else, or of nothing."""
    url = server.url.removesuffix("/v1/realtime")
    command = (*RUN, "transcribe", "fixtures/speech/demo.wav", "--url", url)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    ((_, shown),) = (
        (line, printed) for line, printed in EXAMPLES if line.startswith("transcribe ")
    )
    assert done.stdout.splitlines() == shown


def test_utterances_of_one_connection_are_written_down_in_order(
    server: LiveServer, spoken: list[tuple[Heldout, bytes]]
) -> None:
    """Texts would be mixed up between utterances, or be of other words."""
    texts = asyncio.run(transcribe(server.url, [sound for _, sound in spoken]))
    written = [
        Written(said=tuple(item.phrase.split()), wrote=tuple(text.split()))
        for (item, _), text in zip(spoken, texts, strict=True)
    ]
    assert word_error(written) <= 0.2


def test_bunched_or_spaced_alone_or_in_company_it_writes_the_same(
    server: LiveServer, spoken: list[tuple[Heldout, bytes]]
) -> None:
    """The same sound would give other words on a slow network, or on a busy server."""
    sounds = [sound for _, sound in spoken[5:8]]
    bunched = asyncio.run(transcribe(server.url, sounds))

    async def together() -> list[list[str]]:
        calls = [transcribe(server.url, [sound], pause_s=0.02) for sound in sounds]
        return await asyncio.gather(*calls)

    assert [text for (text,) in asyncio.run(together())] == bunched


def test_usage_is_what_the_model_fed_and_sampled(
    server: LiveServer, spoken: list[tuple[Heldout, bytes]]
) -> None:
    """A bill by `usage` would be of other work than was done."""
    tokens, (_, sound) = Tokens(FIXTURES / "tiny"), spoken[0]

    async def one() -> Body:
        async with connect(server.url) as socket:
            await greeted(socket, model="tiny")
            await speak(socket, sound)
            return (await done(socket))[1]

    end = asyncio.run(one())
    seconds = -(-len(np.frombuffer(sound, "<i2")) // UNIT_SAMPLES) + 1
    written = len(tokens.encode(end["text"]))
    assert end["usage"] == {
        "prompt_tokens": len(opening_ids(tokens)) + 10 * seconds,
        "completion_tokens": written + seconds,  # Each second's text has a terminator.
        "total_tokens": len(opening_ids(tokens)) + 11 * seconds + written,
    }
