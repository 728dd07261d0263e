"""Pipecat, `OpenAILiveLLMService`, `OpenAIRealtimeLLMService` and `OpenAIRealtimeSTTService`.

The scene says which: `answer-live`, `interrupt-live` and `tools-live`; `answer`, `interrupt` and
`tools`; `transcribe`.
There is a conversation from before, as its examples have.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np
from common import RATE_HZ, Report, arguments
from loguru import logger
from pipecat.adapters.schemas.function_schema import FunctionSchema
from pipecat.adapters.schemas.tools_schema import ToolsSchema
from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    InputAudioRawFrame,
    LLMContextFrame,
    LLMTextFrame,
    OutputAudioRawFrame,
    TranscriptionFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import WorkerRunner
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.services.openai.live.llm import OpenAILiveLLMService
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.services.openai.responses.llm import OpenAIResponsesLLMService
from pipecat.services.openai.stt import OpenAIRealtimeSTTService

TOOLS = ToolsSchema(
    standard_tools=[
        FunctionSchema(name="clock", description="The time.", properties={}, required=[])
    ]
)
INTERRUPTED = frozenset({"InterruptionFrame", "ProposedUserStartedSpeakingFrame"})


class Ear(FrameProcessor):
    """Sees what passes."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report

    async def process_frame(self, frame: Any, direction: Any) -> None:
        """Note a frame, and pass it on."""
        await super().process_frame(frame, direction)
        name = type(frame).__name__
        self._report.events[name] += 1
        match frame:
            case LLMTextFrame(text=text) | TranscriptionFrame(text=text):
                self._report.words += text
            case OutputAudioRawFrame(audio=audio):
                self._report.heard(audio)
            case ErrorFrame():
                self._report.failures.append(str(frame))
        if name in INTERRUPTED:
            self._report.interrupted()
        await self.push_frame(frame, direction)


async def clock(params: Any) -> None:
    """Say the time."""
    await params.result_callback("nine o'clock")


def service(scene: str, base: str, model: str) -> Any:
    """The service under test."""
    base = base.replace("http", "ws", 1)
    if scene.endswith("-live"):
        live = OpenAILiveLLMService
        settings = live.Settings(model=model, system_instruction="Answer briefly.")
        place = f"{base}/live/sessions"
        if scene != "tools-live":
            return live(api_key="none", base_url=place, settings=settings)
        backend = live.ResponsesDelegation(settings=OpenAIResponsesLLMService.Settings(model=model))
        return live(api_key="none", base_url=place, settings=settings, delegation=backend)
    if scene == "transcribe":
        written = OpenAIRealtimeSTTService
        return written(
            api_key="none",
            base_url=f"{base}/realtime",
            turn_detection={"type": "server_vad"},
            settings=written.Settings(model=model),
        )
    realtime = OpenAIRealtimeLLMService
    settings = realtime.Settings(model=model, system_instruction="Answer briefly.")
    return realtime(api_key="none", base_url=f"{base}/realtime", settings=settings)


async def main() -> None:
    """Talk to the server."""
    logger.remove()
    logger.add(sys.stderr, level="ERROR")
    scene, base, model, question = arguments()
    report = Report(is_live=scene.endswith("-live"))
    ends = (Ear(report), Ear(report))
    under_test = service(scene, base, model)
    if scene.startswith("tools"):
        under_test.register_function("clock", clock)
    worker = PipelineWorker(
        Pipeline([ends[0], under_test, ends[1]]),
        params=PipelineParams(audio_in_sample_rate=RATE_HZ, audio_out_sample_rate=RATE_HZ),
    )

    async def send(piece: bytes) -> None:
        assert np.frombuffer(piece, "<i2").size
        frame = InputAudioRawFrame(audio=piece, sample_rate=RATE_HZ, num_channels=1)
        await worker.queue_frame(frame)

    async def act() -> None:
        await asyncio.sleep(1)
        if scene != "transcribe":
            said = [{"role": "user", "content": "My name is Ada."}]
            await worker.queue_frame(LLMContextFrame(context=LLMContext(said, tools=TOOLS)))
            await asyncio.sleep(1)
        await report.act(scene, send, question)
        await worker.queue_frame(EndFrame())

    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    acting = asyncio.create_task(act())
    await asyncio.wait_for(runner.run(), 60)
    await acting
    report.show()


asyncio.run(main())
