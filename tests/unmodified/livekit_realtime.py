"""LiveKit Agents, `RealtimeModel` with default arguments but for the address."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from common import Report, arguments, spoken
from livekit.plugins.openai.realtime import RealtimeModel
from livekit_common import clock, result_of, watched


async def main() -> None:
    """Talk to the server."""
    scene, base, model, question = arguments()
    report = Report()
    reading = set[asyncio.Task[None]]()
    async with aiohttp.ClientSession() as http:
        named = {} if model == "-" else {"model": model}
        session = RealtimeModel(base_url=base, api_key="none", http_session=http, **named).session()

        async def read(generation: Any) -> None:
            async for message in generation.message_stream:
                async for frame in message.audio_stream:
                    report.heard(spoken(frame.data))
                async for words in message.text_stream:
                    report.words += words
            async for call in generation.function_stream:
                context = session.chat_ctx.copy()
                context.items.append(result_of(call))
                await session.update_chat_ctx(context)

        send = watched(session, report)
        session.on("generation_created", lambda it: reading.add(asyncio.create_task(read(it))))
        session.on("input_speech_started", lambda _: report.interrupted())
        await session.update_instructions("Answer briefly.")
        await session.update_tools([clock])
        await report.act(scene, send, question)
        if scene == "answer":
            reply = await session.generate_reply(instructions="Say hello.")
            report.events["generate_reply"] += bool(reply.user_initiated)
        await session.aclose()
    report.show()


asyncio.run(main())
