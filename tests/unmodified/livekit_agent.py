"""LiveKit Agents, a whole `AgentSession` with a function of its own, over both models.

The scene says which: `tools` is `RealtimeModel`, `tools-live` `GPTLiveModel`. There is no room: the
session's sound comes from here, and goes here.
"""

from __future__ import annotations

import asyncio

import aiohttp
from common import RATE_HZ, Report, arguments, spoken
from livekit import rtc
from livekit.agents import Agent, AgentSession
from livekit.agents.voice import io
from livekit.plugins.openai.realtime import GPTLiveModel, RealtimeModel
from livekit_common import clock


class Microphone(io.AudioInput):
    """What is said."""

    def __init__(self) -> None:
        super().__init__(label="here")
        self._frames = asyncio.Queue[rtc.AudioFrame]()

    async def __anext__(self) -> rtc.AudioFrame:
        return await self._frames.get()

    async def send(self, piece: bytes) -> None:
        """Say a piece."""
        self._frames.put_nowait(
            rtc.AudioFrame(
                data=piece, sample_rate=RATE_HZ, num_channels=1, samples_per_channel=len(piece) // 2
            )
        )


class Speaker(io.AudioOutput):
    """What is heard, as soon as it comes."""

    def __init__(self, report: Report) -> None:
        capabilities = io.AudioOutputCapabilities(pause=False)
        super().__init__(label="here", capabilities=capabilities, sample_rate=RATE_HZ)
        self._report = report
        self._played_s = 0.0

    async def capture_frame(self, frame: rtc.AudioFrame) -> None:
        """Hear a piece."""
        await super().capture_frame(frame)
        self._report.heard(spoken(frame.data))
        self._played_s += frame.duration

    def flush(self) -> None:
        """Play a segment to its end."""
        super().flush()
        played_s, self._played_s = self._played_s, 0.0
        if played_s:
            self.on_playback_finished(playback_position=played_s, interrupted=False)

    def clear_buffer(self) -> None:
        """Stop: all that came was played."""
        self.flush()


async def main() -> None:
    """Talk to the server."""
    scene, base, model, question = arguments()
    report = Report(is_live=scene.endswith("-live"))
    async with aiohttp.ClientSession() as http:
        kind = GPTLiveModel if report.is_live else RealtimeModel
        named = {} if model == "-" else {"model": model}
        session = AgentSession(llm=kind(base_url=base, api_key="none", http_session=http, **named))
        microphone = Microphone()
        session.input.audio, session.output.audio = microphone, Speaker(report)
        session.on("error", lambda it: report.failures.append(str(it.error)))
        session.on(
            "function_tools_executed",
            lambda it: report.events.update(
                [f"{call.name} {result.output}" for call, result in it.zipped()]
            ),
        )
        await session.start(agent=Agent(instructions="Answer briefly.", tools=[clock]))
        await report.act(scene, microphone.send, question)
        for item in session.history.items:
            if item.type == "message" and item.role == "assistant":
                report.words += item.text_content or ""
        await session.aclose()
    report.show()


asyncio.run(main())
