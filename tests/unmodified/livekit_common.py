"""What both clients of LiveKit Agents share; for an environment that has them."""

from __future__ import annotations

from typing import Any

from common import RATE_HZ, Report, Send
from livekit import rtc
from livekit.agents import function_tool


@function_tool
async def clock() -> str:
    """Say the time."""
    return "noon"


def watched(session: Any, report: Report) -> Send:
    """Report what a session is told, and return what sends it sound."""

    def took(event: dict[str, Any]) -> None:
        report.events[event["type"]] += 1
        if event["type"] == "error":
            report.failures.append(str(event["error"]))

    async def send(piece: bytes) -> None:
        session.push_audio(
            rtc.AudioFrame(
                data=piece, sample_rate=RATE_HZ, num_channels=1, samples_per_channel=len(piece) // 2
            )
        )

    session.on("openai_server_event_received", took)
    return send
