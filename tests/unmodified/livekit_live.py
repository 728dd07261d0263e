"""LiveKit Agents, `GPTLiveModel` with default arguments but for the address."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from common import Report, arguments, spoken
from livekit.agents import llm
from livekit.plugins.openai.realtime import GPTLiveModel
from livekit_common import clock, result_of, watched


async def main() -> None:
    """Talk to the server."""
    scene, base, model, question = arguments()
    report = Report(is_live=True)
    tasks = set[asyncio.Task[None]]()
    async with aiohttp.ClientSession() as http:
        named = {} if model == "-" else {"model": model}
        live = GPTLiveModel(base_url=base, api_key="none", http_session=http, **named)
        session = live.session()

        def wrote(delta: Any) -> None:
            report.words += delta.text

        async def listen() -> None:
            async for heard in session._audio_ch:
                report.heard(spoken(heard.frame.data))

        def called(call: llm.FunctionCall) -> None:
            tasks.add(asyncio.create_task(session._append_items([result_of(call)])))

        send = watched(session, report)
        session.on("function_call", called)
        session.on("transcript_delta", wrote)
        await session._update_session(
            instructions="Answer briefly.", chat_ctx=llm.ChatContext.empty(), tools=[clock]
        )
        tasks.add(asyncio.create_task(listen()))
        await report.act(scene, send, question)
        await session.aclose()
        for task in tasks:
            task.cancel()
    report.show()


asyncio.run(main())
