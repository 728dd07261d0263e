"""Call a server as a telephone does: G.711 in pieces of 20 ms, both ways, until the call ends.

    pip install antiphon-0.2.0-py3-none-any.whl
    antiphon serve --model tiny
    python phone.py question.wav answer.wav

It speaks OpenAI's Realtime API, as gateways of telephones do. The question is a sound file; silence
follows it, as in a call. The caller hears silence, too, where the model does not speak. What was
not yet played is thrown away when the caller interrupts.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import wave

import numpy as np
import soundfile
import soxr
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

RATE_HZ = 8_000
PIECE = RATE_HZ // 50
"""20 ms: a sample is a byte."""
SILENCE = b"\xff"
"""Zero in the mu-law."""
PHONE = {"format": {"type": "audio/pcmu"}}


def encode(samples: np.ndarray) -> bytes:
    """Write 16-bit samples in the mu-law of G.711."""
    size = np.minimum(np.abs(samples.astype(np.int32)), 32_635) + 132
    exponent = np.log2(size).astype(np.int32) - 7
    mantissa = (size >> (exponent + 3)) & 0x0F
    return (~((samples < 0) << 7 | exponent << 4 | mantissa)).astype(np.uint8).tobytes()


def decode(data: bytes) -> np.ndarray:
    """Read the mu-law of G.711 as 16-bit samples."""
    byte = ~np.frombuffer(data, np.uint8).astype(np.int32)
    size = (((byte & 0x0F) << 3) + 132 << ((byte >> 4) & 0x07)) - 132
    return np.where(byte & 0x80, -size, size).astype("<i2")


def read(path: str) -> bytes:
    """Read a sound file."""
    samples, rate_hz = soundfile.read(path, dtype="int16", always_2d=True)
    heard = soxr.resample(samples.mean(axis=1), rate_hz, RATE_HZ)
    return encode(heard.clip(-32768, 32767).astype("<i2"))


class Call:
    """One call: `played` is what the caller heard, `_waiting` what comes next."""

    def __init__(self, socket: ClientConnection, question: bytes) -> None:
        self._socket = socket
        self._question = question
        self._waiting = bytearray()
        self.played = bytearray()

    async def speak(self, seconds: float, pace: float) -> None:
        """Send a piece every 20 ms, and play one."""
        begun, loop = asyncio.get_running_loop().time(), asyncio.get_running_loop()
        for number in range(int(seconds * 50)):
            piece = self._question[number * PIECE :][:PIECE].ljust(PIECE, SILENCE)
            said = {"type": "input_audio_buffer.append", "audio": base64.b64encode(piece).decode()}
            await self._socket.send(json.dumps(said))
            self.played += self._waiting[:PIECE].ljust(PIECE, SILENCE)
            del self._waiting[:PIECE]
            await asyncio.sleep(begun + (number + 1) / 50 / pace - loop.time())

    async def listen(self) -> None:
        """Take what the server says."""
        async for message in self._socket:
            event = json.loads(message)
            match event["type"]:
                case "response.output_audio.delta":
                    self._waiting += base64.b64decode(event["delta"])
                case "response.output_audio_transcript.delta":
                    print(event["delta"], end="", flush=True)
                case "response.done":
                    print()
                case "input_audio_buffer.speech_started":
                    self._waiting.clear()
                case "error":
                    raise SystemExit(event["error"]["message"])


async def reach(url: str) -> ClientConnection:
    """Connect to the server, or say in a line why not."""
    try:
        return await connect(url)
    except (OSError, WebSocketException) as error:
        advice = "is a server running there? Start one with: antiphon serve --model tiny"
        raise SystemExit(f"cannot connect to {url}: {error}; {advice}") from None


async def main() -> None:
    """Make the call."""
    parser = argparse.ArgumentParser(description="Call a server as a telephone does.")
    parser.add_argument("question", help="a sound file: WAV, FLAC, Ogg")
    parser.add_argument("answer", help="the WAV file of what the caller hears")
    parser.add_argument("--url", default="ws://127.0.0.1:8006")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--seconds", type=float, default=12, help="how long the call is")
    parser.add_argument("--pace", type=float, default=1, help="times as fast as speech, for tests")
    given = parser.parse_args()
    try:
        question = read(given.question)
    except soundfile.SoundFileError as error:
        raise SystemExit(str(error)) from None
    async with await reach(f"{given.url}/v1/realtime?model={given.model}") as socket:
        session = {"type": "realtime", "audio": {"input": PHONE, "output": PHONE}}
        await socket.send(json.dumps({"type": "session.update", "session": session}))
        call = Call(socket, question)
        listening = asyncio.create_task(call.listen())
        await call.speak(given.seconds, given.pace)
        listening.cancel()
    with wave.open(given.answer, "wb") as file:
        file.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
        file.writeframes(decode(bytes(call.played)).tobytes())


if __name__ == "__main__":
    asyncio.run(main())
