"""A Pipecat pipeline whose model is an Antiphon server: it hears a WAV file, and writes the answer.

    pip install 'pipecat-ai[openai]==1.14.0'
    antiphon serve --model tiny
    python pipecat_pipeline.py question.wav answer.wav

In a program of yours a transport stands in place of the two files: `transport.input()` at the
beginning of the pipeline, `transport.output()` at its end.
"""

from __future__ import annotations

import argparse
import asyncio
import wave
from pathlib import Path

from pipecat.frames.frames import (
    EndFrame,
    Frame,
    InputAudioRawFrame,
    LLMContextFrame,
    LLMTextFrame,
    OutputAudioRawFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import WorkerRunner
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.live.llm import OpenAILiveLLMService

OUTPUT_RATE_HZ = 24_000
PIECE_S = 0.02
SILENCE_S = 6
"""After the question: the time for an answer."""


class Keep(FrameProcessor):
    """Keeps the model's sound, and prints its words."""

    def __init__(self) -> None:
        super().__init__()
        self.sound = bytearray()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        """Look at a frame, and pass it on."""
        await super().process_frame(frame, direction)
        if isinstance(frame, OutputAudioRawFrame):
            self.sound += frame.audio
        elif isinstance(frame, LLMTextFrame):
            print(frame.text, end="", flush=True)
        await self.push_frame(frame, direction)


async def say(worker: PipelineWorker, path: Path) -> None:
    """Say a WAV file of 16-bit samples at its pace, and silence after it."""
    with wave.open(str(path)) as file:
        rate_hz, channels = file.getframerate(), file.getnchannels()
        size = int(rate_hz * PIECE_S)
        pieces = [file.readframes(size) for _ in range(0, file.getnframes(), size)]
    await worker.queue_frame(LLMContextFrame(context=LLMContext()))  # begins the session
    pieces += [bytes(2 * channels * size)] * int(SILENCE_S / PIECE_S)
    for piece in pieces:
        await worker.queue_frame(
            InputAudioRawFrame(audio=piece, sample_rate=rate_hz, num_channels=channels)
        )
        await asyncio.sleep(PIECE_S)
    await worker.queue_frame(EndFrame())


async def main() -> None:
    """Ask, and keep the answer."""
    parser = argparse.ArgumentParser(description="Ask a server by a Pipecat pipeline.")
    parser.add_argument("question", type=Path)
    parser.add_argument("answer", type=Path)
    parser.add_argument("--url", default="ws://127.0.0.1:8006")
    parser.add_argument("--model", default="tiny")
    given = parser.parse_args()
    with wave.open(str(given.question)) as file:
        rate_hz = file.getframerate()
    model = OpenAILiveLLMService(
        api_key="none",  # or a key of the server
        base_url=f"{given.url}/v1/live/sessions",
        settings=OpenAILiveLLMService.Settings(
            model=given.model, system_instruction="Answer briefly."
        ),
    )
    keep = Keep()
    worker = PipelineWorker(
        Pipeline([model, keep]),
        params=PipelineParams(audio_in_sample_rate=rate_hz, audio_out_sample_rate=OUTPUT_RATE_HZ),
    )
    runner = WorkerRunner()
    await runner.add_workers(worker)
    saying = asyncio.create_task(say(worker, given.question))
    await runner.run()
    await saying
    with wave.open(str(given.answer), "wb") as file:
        file.setparams((1, 2, OUTPUT_RATE_HZ, 0, "NONE", ""))
        file.writeframes(keep.sound)


if __name__ == "__main__":
    asyncio.run(main())
