"""LiveKit Agents, `RealtimeModel` with default arguments but for the address."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from common import RATE_HZ, Report, arguments, spoken
from livekit import rtc
from livekit.plugins.openai.realtime import RealtimeModel


async def main() -> None:
    """Talk to the server."""
    scene, base, model, question = arguments()
    report = Report()
    reading = set[asyncio.Task[None]]()
    async with aiohttp.ClientSession() as http:
        named = {} if model == "-" else {"model": model}
        session = RealtimeModel(base_url=base, api_key="none", http_session=http, **named).session()

        def took(event: dict[str, Any]) -> None:
            report.events[event["type"]] += 1
            if event["type"] == "error":
                report.failures.append(str(event["error"]))

        async def read(generation: Any) -> None:
            async for message in generation.message_stream:
                async for frame in message.audio_stream:
                    report.heard(spoken(frame.data))
                async for words in message.text_stream:
                    report.words += words

        async def send(piece: bytes) -> None:
            session.push_audio(
                rtc.AudioFrame(
                    data=piece,
                    sample_rate=RATE_HZ,
                    num_channels=1,
                    samples_per_channel=len(piece) // 2,
                )
            )

        session.on("openai_server_event_received", took)
        session.on("generation_created", lambda it: reading.add(asyncio.create_task(read(it))))
        session.on("input_speech_started", lambda _: report.interrupted())
        await session.update_instructions("Answer briefly.")
        await report.act(scene, send, question)
        if scene == "answer":
            reply = await session.generate_reply(instructions="Say hello.")
            report.events["generate_reply"] += bool(reply.user_initiated)
        await session.aclose()
    report.show()


asyncio.run(main())
