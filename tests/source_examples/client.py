"""A client of `/ws/chat`, for where the sources' own is not at hand: it does what that one does.

Reference audio goes into the system message and into `tts`; the answer is streamed and counted. It
is written for `shims.py`, as the example of 004 is read there.
"""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import numpy as np
import soundfile
import websockets


def load_voice(path: str) -> str:
    """Read the voice as the protocol wants it: base64 of float32 LE, 16 kHz mono."""
    samples, _ = soundfile.read(path, dtype="float32", samplerate=16_000)
    return base64.b64encode(samples.astype("<f4").tobytes()).decode()


def request(voice: str) -> dict[str, Any]:
    """Ask one question, in a voice."""
    system = [
        {"type": "text", "text": "Speak as this sample does."},
        {"type": "audio", "data": voice},
        {"type": "text", "text": "Answer in a few words."},
    ]
    return {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": "Hello!"}],
        "streaming": True,
        "generation": {"max_new_tokens": 256, "temperature": 0.7},
        "tts": {"enabled": True, "mode": "audio_assistant", "ref_audio_data": voice},
    }


async def main() -> None:
    """Talk once, and say what came."""
    said, sound = "", b""
    async with websockets.connect("wss://localhost:8006/ws/chat") as socket:
        await socket.send(json.dumps(request(load_voice("ref.wav"))))
        async for frame in socket:
            message = json.loads(frame)
            match message["type"]:
                case "prefill_done":
                    print(f"Prefill done, {message['input_tokens']} input tokens")
                case "chunk":
                    if message["text_delta"]:
                        said += message["text_delta"]
                        print(f"Streaming: {said}")
                    sound += base64.b64decode(message["audio_data"] or "")
                case "done":
                    print(f"Final: {message['text']}")
                    generated = message["generated_tokens"]
                    print(f"Tokens: {message['input_tokens']} in, {generated} out")
                    break
                case "error":
                    print(f"Error: {message['error']}")
                    break
    print(f"Received {len(np.frombuffer(sound, '<f4')) / 24_000:.1f}s of audio")


asyncio.run(main())
