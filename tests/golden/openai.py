"""Scenes of golden logs in OpenAI's dialects, and of a user whose speech stops the model."""

from __future__ import annotations

import json
from typing import Any

import anyio
import numpy as np

from protocol.values import events as ev
from protocol.values.model import Unit
from runtime.model.backends.scripted import Speaks, Step
from runtime.model.backends.scripted_chat import tone
from tests.golden.stage import Scene, brief
from tests.media.webps import LOSSY
from tests.sessions.in_memory import Peer, World, append_frame, base64, close_frame, init_frame
from tests.transcripts.media import jpeg, png

SECOND = 24_000
QUIET = bytes(2 * SECOND)
WAVE = np.sin(np.arange(24) * 2 * np.pi / 24) * 9000
LOUD = np.tile(WAVE, SECOND // 24).astype("<i2").tobytes()
"""A kilohertz, whose periods are the same bytes: logs stay small."""
TRANSCRIBED = {"transcriber": "scripted"}


def say(peer: Peer, kind: str, **body: Any) -> None:
    """Send a message."""
    peer.send(json.dumps({"type": kind, **body}))


async def speak(peer: Peer, kind: str, *seconds: bytes) -> None:
    """Send seconds as they come, each in ten pieces."""
    for sound in seconds:
        size = len(sound) // 10
        for at in range(0, len(sound), size):
            say(peer, kind, audio=base64(sound[at : at + size]))
            await anyio.sleep(0.1)


async def hear(server: World, *words: tuple[str, int, bool]) -> None:
    """Have words of the user written down."""
    for text, start_ms, is_last in words:
        for driver in server.server._drivers:
            event = ev.UserTranscribed(
                at_ns=driver.now_ns(),
                text=text,
                start_ms=start_ms,
                end_ms=start_ms + 1000,
                is_last=is_last,
            )
            driver.post(event)
        await anyio.sleep(0.1)


async def lives(server: World) -> None:
    """A session of the Live API: history, muted for a while, told what it said, and expired."""
    peer = server.connect("audio", endpoint="live")
    await peer.heard("info")
    told = [{"role": "user", "content": [{"text": "My name is Ada."}]}]
    delegation = {"type": "responses", "responses": {"model": "gpt-5.6-luna"}}
    session = {"model": "scripted", "input": told, "delegation": delegation}
    say(peer, "session.start", session=session)
    await peer.heard("session.started")
    await speak(peer, "session.input_audio.append", LOUD, QUIET)
    await hear(server, ("hello ", 0, False), ("there", 1000, True))
    say(peer, "session.input_audio.mute", event_id="evt_1")
    await speak(peer, "session.input_audio.append", LOUD)
    say(peer, "session.input_audio.unmute")
    await speak(peer, "session.input_audio.append", *[LOUD] * 3)
    await peer.over()


async def reads_its_words(server: World) -> None:
    """A client of `realtime` that wants notices, and is sent what its user said."""
    peer = await server.activate("audio", notices=True)
    for words in (("hello ", 0, False), ("", 1000, False), ("there", 1000, True)):
        peer.send(append_frame())
        await hear(server, words)
        await anyio.sleep(0.9)
    peer.send(close_frame())
    await peer.over()


async def lives_on_the_phone(server: World) -> None:
    """A session of the Live API in G.711."""
    peer = server.connect("audio", endpoint="live")
    await peer.heard("info")
    audio = {"format": {"type": "audio/pcmu", "rate": 8000}}
    say(peer, "session.start", session={"model": "scripted", "audio": audio})
    await peer.heard("session.started")
    await speak(peer, "session.input_audio.append", *[bytes(range(250)) * 32] * 4)
    say(peer, "session.close")
    await peer.over()


async def responds(server: World) -> None:
    """A session of the Realtime API: an item, a question, an answer that is asked for."""
    peer = server.connect("audio", endpoint="openai", label="scripted")
    await peer.heard("session.created")
    settings = {"turn_detection": {"type": "server_vad"}, "transcription": {"model": "whisper-1"}}
    session = {"type": "realtime", "instructions": "Be brief.", "audio": {"input": settings}}
    say(peer, "session.update", session=session)
    part = {"type": "input_text", "text": "My name is Ada."}
    item = {"type": "message", "role": "user", "content": [part]}
    say(peer, "conversation.item.create", item=item)
    await speak(peer, "input_audio_buffer.append", LOUD, QUIET)
    await hear(server, ("what time ", 0, False), ("is it", 1000, True))
    await speak(peer, "input_audio_buffer.append", QUIET, LOUD, QUIET)
    await anyio.sleep(4)
    say(peer, "response.create", response={"metadata": {"for": "a test"}})
    await peer.heard("response.done", 3)
    say(peer, "conversation.item.truncate", item_id="item_1", audio_end_ms=500)
    say(peer, "response.cancel", event_id="evt_1")
    await anyio.sleep(1)
    peer.leave(1000)
    await server.quiet()


async def pushes_to_talk(server: World) -> None:
    """A telephone whose client speaks faster than its user, asks, and stops sending."""
    peer = server.connect("audio", endpoint="openai", label="scripted")
    await peer.heard("session.created")
    piece = bytes(range(250)) * 32
    say(peer, "input_audio_buffer.append", audio=base64(piece[:160]))
    phone = {"format": {"type": "audio/pcmu", "rate": 8000}}
    audio = {"input": {**phone, "turn_detection": None}, "output": phone}
    session = {"type": "realtime", "audio": audio, "max_output_tokens": 4096}
    say(peer, "session.update", session=session)
    say(peer, "input_audio_buffer.append", audio=base64(piece * 8 + piece[:3000]))
    say(peer, "input_audio_buffer.commit")
    say(peer, "response.create")
    await peer.heard("response.done")
    say(peer, "session.update", session={"type": "realtime", "audio": {"output": {"format": {}}}})
    peer.send("{")
    settings = {"turn_detection": {"type": "server_vad"}, "format": {"type": "audio/pcmu"}}
    say(peer, "session.update", session={"type": "realtime", "audio": {"input": settings}})
    await speak(peer, "input_audio_buffer.append", bytes(8000), piece, piece)
    await peer.heard("response.done", 2)
    peer.leave(1000)
    await server.quiet()


async def waits(server: World) -> None:
    """A client with a tool; late instructions, an mm-hm, silence, and words at the limit."""
    peer = server.connect("audio", endpoint="openai", label="scripted")
    await peer.heard("session.created")
    detection = {"type": "server_vad", "idle_timeout_ms": 3000, "backchannel_ms": 350}
    heard = {"turn_detection": detection, "transcription": {"model": "whisper-1"}}
    tool = {"type": "function", "name": "clock", "parameters": {"type": "object"}}
    session = {"type": "realtime", "tools": [tool], "audio": {"input": heard}}
    say(peer, "session.update", session=session)
    say(peer, "response.create", response={"instructions": "Greet the user."})
    await peer.heard("response.done")
    say(peer, "response.create", response={"instructions": "Say goodbye.", "tools": [tool]})
    await peer.heard("response.created", 2)
    await speak(peer, "input_audio_buffer.append", LOUD[: SECOND // 2] + QUIET[SECOND // 2 :])
    await peer.heard("input_audio_buffer.timeout_triggered")
    await peer.heard("response.done", 3)
    await speak(peer, "input_audio_buffer.append", *[LOUD] * 8)
    await hear(server, ("good ", 14_000, False), ("night", 15_000, True))
    await peer.over()


async def responds_after_a_loss(server: World) -> None:
    """A client of the Realtime API speaks, loses its connection amid a response and is back."""
    peer = server.connect("audio", endpoint="openai", label="scripted", resumable=True)
    await peer.heard("session.created")
    await speak(peer, "input_audio_buffer.append", LOUD, QUIET)
    await peer.heard("response.output_audio.delta")
    peer.vanish()
    await anyio.sleep(40)
    again = server.come_back(*peer.way_back)
    await again.greeted()
    await speak(again, "input_audio_buffer.append", LOUD, QUIET, QUIET)
    await anyio.sleep(5)
    again.leave(1000)
    await server.quiet()


async def shows_pictures(server: World) -> None:
    """A client of the Realtime API shows pictures of each kind, and what is refused."""
    peer = server.connect("audio", endpoint="openai", label="scripted")
    await peer.heard("session.created")
    still = png(64, 48)
    taken = (("jpeg", jpeg(64, 48)), ("png", still), ("webp", LOSSY))
    refused = (("png", still[:-9]), ("png", jpeg(64, 48)), ("gif", b"GIF89a"))
    for sound, shown in ((LOUD, taken), (QUIET, (("png", still), *refused)), (QUIET, ())):
        for kind, data in shown:
            part = {"type": "input_image", "image_url": f"data:image/{kind};base64,{base64(data)}"}
            item = {"type": "message", "role": "user", "content": [part]}
            say(peer, "conversation.item.create", item=item)
        await speak(peer, "input_audio_buffer.append", sound)
    await peer.heard("error", 3)
    await anyio.sleep(2)
    peer.leave(1000)
    await server.quiet()


def asked(unit: Unit, seed: int) -> Step:
    """Speak where it may: a tenth of a second, which ends the turn."""
    speech = Speaks(text="word ", pcm=tone(unit.index, seed, samples=2_400), end_of_turn=True)
    return Step(speech=None if unit.force_listen else speech, generate_s=0.2, steps=4)


def talks_on(unit: Unit, seed: int) -> Step:
    """Speak in every second: a tenth of a second each."""
    pcm = tone(unit.index, seed, samples=2_400)
    speech = Speaks(text=f"word {unit.index} ", pcm=pcm, end_of_turn=False)
    return Step(speech=speech, generate_s=0.4, steps=8)


async def talks_to_vllm_omni(server: World) -> None:
    """A client of vLLM-Omni's protocol: it commits, loses its connection, and interrupts."""
    peer = server.connect("audio", endpoint="omni", resumable=True)
    say(peer, "session.update", session={"model": "scripted", "overlap_policy": "listen_only"})
    created = await peer.heard("session.created")
    second = LOUD[: 2 * 16_000]
    await speak(peer, "input_audio_buffer.append", second, second)
    say(peer, "input_audio_buffer.commit", final=True, response_create=False)
    await peer.heard("response.done")
    say(peer, "playback.ack", played_ms=300, committed_ms=200, truncate=True)
    say(peer, "session.heartbeat", event_id="evt_1")
    await speak(peer, "input_audio_buffer.append", second)
    await hear(server, (" so", 0, False), (" it is", 1000, True))
    say(peer, "input_audio_buffer.commit", is_speech=False)
    await peer.heard("conversation.item.input_audio_transcription.completed")
    peer.vanish()
    await anyio.sleep(5)
    name, last = created["session"]["id"], peer.events[-1]["server_event_seq"] - 1
    again = server.come_back(name.removeprefix("duplex-"), created["resume_token"], last)
    await again.heard("session.resumed")
    detection = {"type": "server_vad", "silence_duration_ms": 600}
    say(again, "session.update", session={"turn_detection": detection})
    await speak(again, "input_audio_buffer.append", bytes(2 * 16_000), second)
    say(again, "barge_in")
    await again.heard("response.done")
    say(again, "response.create", response={"modalities": ["text"], "max_output_tokens": 1})
    await again.heard("response.done", 2)
    say(again, "session.update", session={"instructions": "Be brief."})
    say(again, "session.close")
    await again.over()


async def is_interrupted(server: World) -> None:
    """A user speaks as the model begins, and on; is quiet; and interrupts it."""
    peer = server.connect("audio")
    await peer.heard("session.queue_done")
    peer.send(init_frame(config={"force_listen_count": 0}))
    await peer.heard("session.created")
    wave = np.tile(np.sin(np.arange(16) * 2 * np.pi / 16) * 0.3, 1000)
    for level in (1, 1, 1, 1, 0, 0, 1, 1, 0, 0):
        peer.send(append_frame(audio=base64((wave * level).astype("<f4").tobytes())))
        await anyio.sleep(1)
    peer.send(close_frame())
    await peer.over()


async def dictates(server: World) -> None:
    """A transcription session of the Realtime API: speech that is found, a commit, and a clear."""
    peer = server.connect("transcription", endpoint="openai")
    await peer.heard("session.created")
    await speak(peer, "input_audio_buffer.append", QUIET, LOUD, LOUD, QUIET, QUIET)
    await peer.heard("conversation.item.input_audio_transcription.completed")
    audio = {"input": {"turn_detection": None, "transcription": {"model": "whisper-1"}}}
    say(peer, "session.update", event_id="evt_1", session={"type": "transcription", "audio": audio})
    audio = {"input": {"turn_detection": None}}
    say(peer, "session.update", session={"type": "transcription", "audio": audio})
    await speak(peer, "input_audio_buffer.append", LOUD, LOUD[:24_000])
    say(peer, "input_audio_buffer.commit")
    await peer.heard("conversation.item.input_audio_transcription.completed", 2)
    await speak(peer, "input_audio_buffer.append", LOUD)
    say(peer, "input_audio_buffer.clear")
    say(peer, "input_audio_buffer.commit")
    await anyio.sleep(1)
    peer.leave(1000)
    await server.quiet()


OPENAI_SCENES: dict[str, Scene] = {
    "live": Scene(
        play=lives, backend={"script": brief}, settings={**TRANSCRIBED, "limit_live_s": 7}
    ),
    "live-g711": Scene(play=lives_on_the_phone, backend={"script": brief}),
    "realtime-user-words": Scene(
        play=reads_its_words, backend={"script": brief}, settings=TRANSCRIBED
    ),
    "openai": Scene(play=responds, backend={"script": brief}, settings=TRANSCRIBED),
    "openai-pictures": Scene(play=shows_pictures, backend={"script": brief}),
    "openai-push-to-talk": Scene(play=pushes_to_talk, backend={"script": asked}),
    "openai-waits": Scene(
        play=waits, backend={"script": brief}, settings={**TRANSCRIBED, "limit_live_s": 20}
    ),
    "openai-resumed": Scene(play=responds_after_a_loss, backend={"script": brief}),
    "openai-transcription": Scene(play=dictates),
    "vllm-omni": Scene(play=talks_to_vllm_omni, backend={"script": brief}, settings=TRANSCRIBED),
    "barge-in": Scene(
        play=is_interrupted, backend={"script": talks_on}, settings={"barge_in": True}
    ),
}
