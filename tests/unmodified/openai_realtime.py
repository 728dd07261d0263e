"""The `openai` package of Python, its Realtime client, in the ways of its users.

The scene says which: `answer`, `interrupt`, and `tools`, with a function that runs at the end of a
response, as the API's guide has it; `twilio`, a bridge
whose call sends media before the session's settings, in the sound of a telephone; `discord`, which
sends nothing while its user is quiet; `push-to-talk`, which commits and asks, twice.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any, Final

import numpy as np
from common import RATE_HZ, WAIT_S, Report, arguments
from openai import AsyncOpenAI

PHONE_HZ: Final = 8_000
SILENCE: Final = b"\xff" * (PHONE_HZ // 50)
"""Twenty milliseconds of a telephone."""
CLOCK: Final = {
    "type": "function",
    "name": "clock",
    "description": "The time.",
    "parameters": {"type": "object", "properties": {}},
}


def by_telephone(pcm16: bytes) -> bytes:
    """The same by mu-law at 8 kHz."""
    samples = np.frombuffer(pcm16, "<i2").astype(np.float64)
    count = len(samples) // 3
    samples = np.fft.irfft(np.fft.rfft(samples)[: count // 2 + 1], count) / 3
    level = np.minimum(np.abs(samples), 32_635) + 132
    exponent = np.floor(np.log2(level)).astype(int) - 7
    mantissa = (level.astype(int) >> (exponent + 3)) & 15
    sign = np.where(samples < 0, 128, 0)
    return bytes((~(sign | exponent << 4 | mantissa) & 255).astype(np.uint8))


class Caller:
    """A session of the package, and what it is told."""

    def __init__(self, connection: Any, report: Report) -> None:
        self.connection, self.report = connection, report
        self.is_phone = False

    async def listen(self) -> None:
        """Take what the server says."""
        report = self.report
        async for event in self.connection:
            report.events[event.type] += 1
            match event.type:
                case "response.output_audio_transcript.delta":
                    report.words += event.delta
                case "response.output_audio.delta":
                    sound = base64.b64decode(event.delta)
                    if self.is_phone:
                        report.sound_s += len(sound) / PHONE_HZ
                    else:
                        report.heard(sound)
                case "input_audio_buffer.speech_started":
                    report.interrupted()
                case "response.done":
                    await self.run(event.response.output)
                case "error":
                    report.failures.append(event.error.message)

    async def run(self, output: list[Any]) -> None:
        """Run what was called, and ask for an answer."""
        calls = [item for item in output if item.type == "function_call"]
        for call in calls:
            item = {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": "nine o'clock",
            }
            await self.connection.conversation.item.create(item=item)
        if calls:
            await self.connection.response.create()

    async def configure(self, **session: Any) -> None:
        """Change settings."""
        await self.connection.session.update(session={"type": "realtime", **session})

    async def append(self, sound: bytes) -> None:
        """Send sound."""
        await self.connection.input_audio_buffer.append(audio=base64.b64encode(sound).decode())

    async def until(self, name: str, times: int) -> None:
        """Wait until an event has come so often; a failure if it does not."""
        for _ in range(int(WAIT_S * 20)):
            if self.report.events[name] >= times:
                return
            await asyncio.sleep(0.05)
        self.report.failures.append(f"{self.report.events[name]} of {times} {name}")


async def talk(caller: Caller, scene: str, question: bytes) -> None:
    """Ask, or interrupt, as any microphone."""
    await caller.configure(instructions="Answer briefly.", tools=[CLOCK], tool_choice="auto")
    await caller.report.act(scene, caller.append, question)


async def telephone(caller: Caller, _scene: str, question: bytes) -> None:
    """Send media first, then the settings, then the call."""
    caller.is_phone = True
    for _ in range(5):
        await caller.append(SILENCE)
    phone = {"format": {"type": "audio/pcmu"}}
    audio = {"input": {**phone, "turn_detection": {"type": "server_vad"}}, "output": phone}
    await caller.configure(instructions="Answer briefly.", audio=audio)
    await caller.connection.response.create()
    await caller.until("response.done", 1)
    sound = by_telephone(question) + SILENCE * 100
    for at in range(0, len(sound), len(SILENCE)):
        await caller.append(sound[at : at + len(SILENCE)])
        await asyncio.sleep(0.02)
    await caller.until("input_audio_buffer.speech_stopped", 1)
    await caller.until("response.done", 2)


async def discord(caller: Caller, _scene: str, question: bytes) -> None:
    """Send what is louder than silence, and nothing else."""
    await caller.configure(instructions="Answer briefly.")
    loud = np.flatnonzero(np.abs(np.frombuffer(question, "<i2").astype(int)) > 500)
    spoken = question[2 * int(loud[0]) : 2 * int(loud[-1])]
    size = 2 * RATE_HZ // 50
    for at in range(0, len(spoken), size):
        await caller.append(spoken[at : at + size])
        await asyncio.sleep(0.02)
    await caller.until("input_audio_buffer.speech_stopped", 1)
    await caller.until("response.done", 1)


async def push_to_talk(caller: Caller, _scene: str, question: bytes) -> None:
    """Say nothing for a while; then ask twice, each time at once, and be answered twice."""
    await caller.configure(audio={"input": {"turn_detection": None}})
    await asyncio.sleep(2)
    for times in (1, 2):
        await caller.append(question)
        await caller.connection.input_audio_buffer.commit()
        await caller.connection.response.create()
        await caller.until("response.done", times)
        await asyncio.sleep(2)
    if caller.report.events["response.created"] != 2:
        caller.report.failures.append("it was answered without being asked")


WAYS: Final[dict[str, Callable[[Caller, str, bytes], Awaitable[None]]]] = {
    "answer": talk,
    "interrupt": talk,
    "tools": talk,
    "twilio": telephone,
    "discord": discord,
    "push-to-talk": push_to_talk,
}


async def main() -> None:
    """Talk to the server."""
    scene, base, model, question = arguments()
    report = Report()
    client = AsyncOpenAI(base_url=base, api_key="none")
    async with client.realtime.connect(model=model) as connection:
        caller = Caller(connection, report)
        listening = asyncio.create_task(caller.listen())
        await WAYS[scene](caller, scene, question)
        listening.cancel()
    report.show()


asyncio.run(main())
