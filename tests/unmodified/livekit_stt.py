"""LiveKit Agents, the OpenAI `STT` over its realtime transcription."""

from __future__ import annotations

import asyncio

from common import RATE_HZ, Report, arguments
from livekit import rtc
from livekit.agents import stt, utils
from livekit.plugins.openai import STT


async def main() -> None:
    """Have the server write down a question."""
    scene, base, model, question = arguments()
    report = Report()
    async with utils.http_context.open():
        recognizer = STT(base_url=base, api_key="none", model=model, use_realtime=True)
        stream = recognizer.stream()

        async def read() -> None:
            async for event in stream:
                report.events[event.type.value] += 1
                if event.type is stt.SpeechEventType.FINAL_TRANSCRIPT:
                    report.words += event.alternatives[0].text

        async def send(piece: bytes) -> None:
            frame = rtc.AudioFrame(
                data=piece, sample_rate=RATE_HZ, num_channels=1, samples_per_channel=len(piece) // 2
            )
            stream.push_frame(frame)

        reading = asyncio.create_task(read())
        recognizer.on("error", lambda it: report.failures.append(str(it)))
        await report.act(scene, send, question)
        stream.end_input()
        await asyncio.wait([reading], timeout=5)
        await stream.aclose()
        await recognizer.aclose()
    report.show()


asyncio.run(main())
