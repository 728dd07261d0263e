"""The official client of OpenAI's Realtime API, as it is, at a real server."""

from __future__ import annotations

import asyncio
import base64
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import soxr
from openai import AsyncOpenAI, NotFoundError, OpenAI
from openai.resources.realtime.realtime import AsyncRealtimeConnection

from recorder.read.past import Past
from recorder.read.reader import LogReader
from replay.rerun.logic import replay
from runtime import RUN
from runtime.media.image import decode_image
from tests.live.exported import loud_s
from tests.live.servers import LiveServer, live_server
from tests.media.webps import LOSSY
from tests.project.sampling import sample
from tests.soak import clients
from tests.transcripts.media import png

SPEECH: Final = Path(__file__).parents[2] / "fixtures" / "speech" / "demo.wav"
RATE_HZ: Final = 24_000
PIECE_S: Final = 0.02
PACE: Final = 4
"""Times as fast as speech: no more than a few seconds may wait for the model."""
SILENCE_S: Final = 5
WAIT_S: Final = 60
WAYS: Final = ["tools", "discord"]
REPLY: Final = (
    "response.created",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_audio_transcript.delta",
    "response.output_audio.delta",
    "response.output_audio.done",
    "response.output_audio_transcript.done",
    "response.content_part.done",
    "response.output_item.done",
    "conversation.item.done",
    "response.done",
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, Path]]:
    """A server of the embedded model."""
    folder = tmp_path_factory.mktemp("recordings")
    with live_server("--record", str(folder), model="tiny") as live:
        yield live, folder


@pytest.fixture(scope="module")
def scripted() -> Iterator[LiveServer]:
    """A server whose model plays a script."""
    with live_server("--no-record") as live:
        yield live


def question() -> bytes:
    """A spoken question and silence: signed 16-bit LE, 24 kHz."""
    with wave.open(str(SPEECH)) as file:
        rate_hz = file.getframerate()
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype("f4")
    sound = soxr.resample(samples, rate_hz, RATE_HZ).clip(-32768, 32767).astype("<i2")
    return sound.tobytes() + bytes(2 * RATE_HZ * SILENCE_S)


async def say(connection: AsyncRealtimeConnection, sound: bytes) -> None:
    """Say sound in pieces."""
    size = 2 * int(RATE_HZ * PIECE_S)
    for at in range(0, len(sound), size):
        piece = base64.b64encode(sound[at : at + size]).decode()
        await connection.input_audio_buffer.append(audio=piece)
        await asyncio.sleep(PIECE_S / PACE)


async def until(connection: AsyncRealtimeConnection, name: str) -> list[Any]:
    """Receive until an event comes; all of them."""
    found = []
    async with asyncio.timeout(WAIT_S):
        while not found or found[-1].type != name:
            found.append(await connection.recv())
            assert found[-1].type != "error", found[-1]
    return found


def client_of(server: LiveServer) -> dict[str, Any]:
    """The arguments of a client."""
    host, port = server.address
    return {"api_key": "none", "base_url": f"http://{host}:{port}/v1"}


@pytest.mark.parametrize("kind", ["server_vad", "semantic_vad", None])
def test_a_question_is_answered(
    tiny: tuple[LiveServer, Path], tmp_path: Path, kind: str | None
) -> None:
    """This client cannot use the server, or its recordings cannot be run again."""
    server, folder = tiny
    before = set(folder.rglob("*.session.zst"))

    async def ask() -> list[Any]:
        client = AsyncOpenAI(**client_of(server))
        async with client.realtime.connect(model="tiny") as connection:
            detection: Any = None if kind is None else {"type": kind}
            audio: Any = {"input": {"turn_detection": detection}, "output": {"voice": "marin"}}
            await connection.session.update(session={"type": "realtime", "audio": audio})
            if kind is None:  # it asks itself, in less than a second
                sound = question()[: -SILENCE_S * 2 * RATE_HZ]
                await connection.input_audio_buffer.append(audio=base64.b64encode(sound).decode())
                await connection.input_audio_buffer.commit()
                await connection.response.create()
                return await until(connection, "response.done")
            saying = asyncio.create_task(say(connection, question()))
            found = await until(connection, "response.done")
            saying.cancel()
            return found

    found = asyncio.run(ask())
    kinds = [event.type for event in found]
    assert kinds[:3] == ["session.created", "conversation.created", "session.updated"]
    voice = [name for name in kinds if name.startswith("input_audio_buffer")]
    steps = ["speech_started", "speech_stopped", "committed"]
    steps = steps[-1:] if kind is None else steps
    assert voice == [f"input_audio_buffer.{step}" for step in steps]
    reply = [event for event in found if event.type in REPLY and event.type in kinds]
    order = list(dict.fromkeys(event.type for event in reply[-12:]))
    assert set(order) <= set(REPLY)
    done = found[-1].response
    assert done.status == "completed"
    words = "".join(it.delta for it in found if it.type == "response.output_audio_transcript.delta")
    assert done.output[0].content[0].transcript == words == "It is time to sing."
    sound = [it.delta for it in found if it.type == "response.output_audio.delta"]
    assert sum(len(base64.b64decode(delta)) for delta in sound) > RATE_HZ
    assert "broke" not in server.errors.read_text()
    (log,) = set(folder.rglob("*.session.zst")) - before
    with LogReader(log) as items:
        assert replay(items).identical
    user_s, model_s = loud_s(log, tmp_path)
    assert 0.5 < user_s < 1.5, "a question of a second, said in pieces"
    assert model_s > 0.5
    redacted = tmp_path / "redacted.session.zst"
    command = [*RUN, "recordings", "redact", str(log), "--output", str(redacted)]
    subprocess.run(command, check=True, capture_output=True)
    assert loud_s(redacted, tmp_path) == (0, 0)
    with LogReader(redacted) as items:
        assert replay(items).identical


# Others: questions as above, and a telephone as in `test_twilio.py`, by the scripts of `make soak`.
@pytest.mark.costly
@pytest.mark.parametrize("scene", sample([*WAYS, "twilio", "answer", "push-to-talk"], WAYS))
def test_a_way_of_its_users_is_answered(tmp_path: Path, scene: str) -> None:
    """A telephone bridge, a bot, or a page with a button gets no answer, or one too many."""
    said = tmp_path / "question.pcm"
    said.write_bytes(bytes(6 * RATE_HZ) if scene == "tools" else clients.question())
    words = [sys.executable, "-W", "ignore", str(clients.SCRIPTS / clients.OPENAI.script)]
    report = clients.play(words, scene, "", said, tmp_path, is_tls=False)
    assert not clients.wrong(scene, report)


@pytest.mark.parametrize(
    ("transcriber", "words"), [("tiny", "what time is it"), ("moonshine", "What time is it?")]
)
def test_what_its_user_says_is_written_down(tmp_path: Path, transcriber: str, words: str) -> None:
    """Its captions and its history have one side only."""
    if transcriber == "moonshine":
        pytest.importorskip("moonshine_voice")
    folder = tmp_path / "recordings"

    async def ask(server: LiveServer) -> list[Any]:
        client = AsyncOpenAI(**client_of(server))
        async with client.realtime.connect(model="tiny") as connection:
            wanted: Any = {"input": {"transcription": {"model": "gpt-4o-transcribe"}}}
            await connection.session.update(session={"type": "realtime", "audio": wanted})
            saying = asyncio.create_task(say(connection, question()))
            name = "conversation.item.input_audio_transcription.completed"
            found = await until(connection, name)
            saying.cancel()
            return found

    with live_server("--record", str(folder), "--transcriber", transcriber, model="tiny") as server:
        found = asyncio.run(ask(server))
        assert "broke" not in server.errors.read_text()
    assert found[-1].transcript == words
    items = [it.item.id for it in found if it.type == "conversation.item.done"]
    assert found[-1].item_id == items[0]
    (log,) = folder.rglob("*.session.zst")
    with LogReader(log) as records:
        assert replay(records).identical
    told = subprocess.run(
        [*RUN, "export", str(log), "--to", "srt", "--output", "-"], capture_output=True, check=True
    )
    assert f"User (transcribed): {words}" in told.stdout.decode()


def test_who_asks_for_a_response_gets_one(tiny: tuple[LiveServer, Path]) -> None:
    """An agent that is to speak first says nothing before its user does."""
    server, folder = tiny
    before = set(folder.rglob("*.session.zst"))

    async def ask() -> list[Any]:
        client = AsyncOpenAI(**client_of(server))
        async with client.realtime.connect(model="tiny") as connection:
            await connection.response.create(response={"metadata": {"for": "a greeting"}})
            return await until(connection, "response.done")

    response = asyncio.run(ask())[-1].response
    assert (response.status, response.metadata) == ("completed", {"for": "a greeting"})
    assert response.output[0].content[0].transcript
    (log,) = set(folder.rglob("*.session.zst")) - before
    report = subprocess.run(
        [*RUN, "replay", "--full", str(log)], capture_output=True, text=True, check=False
    )
    assert report.returncode == 0, report.stdout + report.stderr


def test_the_model_sees_its_pictures(tiny: tuple[LiveServer, Path]) -> None:
    """A screenshot would be refused, or not be there when its recording is run again."""
    server, folder = tiny
    before, still = set(folder.rglob("*.session.zst")), png(64, 48)

    async def show() -> list[Any]:
        client = AsyncOpenAI(**client_of(server))
        async with client.realtime.connect(model="tiny") as connection:
            await until(connection, "session.created")
            for kind, data in (("png", still), ("webp", LOSSY), ("png", still[:-9])):
                url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
                part: Any = {"type": "input_image", "image_url": url}
                item: Any = {"type": "message", "role": "user", "content": [part]}
                await connection.conversation.item.create(item=item)
            heard: list[Any] = []
            async with asyncio.timeout(WAIT_S):
                while not heard or heard[-1].type != "error":
                    heard.append(await connection.recv())
            await connection.response.create()
            return heard + await until(connection, "response.done")

    found = asyncio.run(show())
    (error,) = [event.error.message for event in found if event.type == "error"]
    assert error == "a video frame was left out: the image is a damaged PNG"
    (log,) = set(folder.rglob("*.session.zst")) - before
    with LogReader(log) as items:
        first = next(Past(items, until_seq=1 << 62).units())
    assert first.unit.frames == (decode_image(still), decode_image(LOSSY))
    report = subprocess.run(
        [*RUN, "replay", "--full", str(log)], capture_output=True, text=True, check=False
    )
    assert report.returncode == 0, report.stdout + report.stderr


def test_its_user_interrupts(scripted: LiveServer) -> None:
    """The model speaks on while its user speaks, and the client plays it."""
    loud = (np.sin(np.arange(RATE_HZ) / 5) * 9000).astype("<i2").tobytes()

    async def interrupt() -> list[Any]:
        client = AsyncOpenAI(**client_of(scripted))
        async with client.realtime.connect(model="scripted") as connection:
            await say(connection, bytes(8 * RATE_HZ))
            found = await until(connection, "response.output_audio.delta")
            await say(connection, loud)
            return found + await until(connection, "response.done")

    found = asyncio.run(interrupt())
    kinds = [event.type for event in found]
    assert kinds.index("input_audio_buffer.speech_started") < kinds.index("response.done")
    response = found[-1].response
    assert (response.status, response.status_details.reason) == ("cancelled", "turn_detected")


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
def test_a_model_that_is_not_served_is_named(scripted: LiveServer) -> None:
    """A client waits for a session of a model that is not there."""
    with OpenAI(**client_of(scripted)).realtime.connect(model="gpt-realtime") as connection:
        error: Any = connection.recv()
        assert error.type == "error"
        assert error.error.code == "model_not_found"
        assert "gpt-realtime" in error.error.message


def test_its_models_are_listed(scripted: LiveServer) -> None:
    """A client that asks what there is would find nothing, and a program offer nothing."""
    with OpenAI(**client_of(scripted)) as client:
        assert [model.id for model in client.models.list()] == ["scripted"]
        assert client.models.retrieve("scripted").owned_by == "antiphon"
        with pytest.raises(NotFoundError):
            client.models.retrieve("gpt/realtime")
