"""What both clients of LiveKit Agents share; for an environment that has them."""

from __future__ import annotations

from typing import Any, Final

from common import RATE_HZ, Report, Send
from livekit import rtc
from livekit.agents import function_tool, llm

HOUR: Final = "nine o'clock"


@function_tool
async def clock() -> str:
    """Say the time."""
    return HOUR


def result_of(call: llm.FunctionCall) -> llm.FunctionCallOutput:
    """What the clock returns, for a session in which no agent runs functions."""
    return llm.FunctionCallOutput(call_id=call.call_id, name=call.name, output=HOUR, is_error=False)


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
