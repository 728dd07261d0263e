"""The OpenAI Agents SDK, `RealtimeRunner`."""

from __future__ import annotations

import asyncio

from agents import function_tool
from agents.realtime import RealtimeAgent, RealtimeRunner
from common import Report, arguments


@function_tool
def clock() -> str:
    """Say the time."""
    return "nine o'clock"


async def main() -> None:
    """Talk to the server."""
    scene, base, model, question = arguments()
    report = Report()
    runner = RealtimeRunner(
        RealtimeAgent(name="assistant", instructions="Answer briefly.", tools=[clock]),
        config={"model_settings": {"model_name": model}},
    )
    url = f"{base.replace('http', 'ws', 1)}/realtime?model={model}"
    async with await runner.run(model_config={"url": url, "api_key": "none"}) as session:

        async def listen() -> None:
            async for event in session:
                report.events[event.type] += 1
                if event.type == "audio":
                    report.heard(event.audio.data)
                elif event.type == "audio_interrupted":
                    report.interrupted()
                elif event.type == "error":
                    report.failures.append(str(event.error))
                elif event.type == "raw_model_event":
                    data = event.data
                    if data.type == "transcript_delta":
                        report.words += data.delta

        listening = asyncio.create_task(listen())
        await report.act(scene, session.send_audio, question)
        listening.cancel()
    report.show()


asyncio.run(main())
