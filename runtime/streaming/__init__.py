"""Streaming input: a request to the model that is extended while it is answered (003).

    async with Streaming(await load_backend_async("tiny")) as streaming:
        async with streaming.generate(chunks(), SamplingParams(max_tokens=8)) as outputs:
            async for output in outputs:
                print(output.text, end="")

`chunks` is an asynchronous generator of `StreamingInput`; docs/streaming.md describes the rest. It
runs on asyncio and on trio, and shares the model's slots, batches and deadlines with sessions.
"""

from __future__ import annotations

from protocol.values.errors import LocalProtocolError
from protocol.values.model import Picture, Sound, Text

from ..model.backends.base import BackendError, BackendGone, BackendRefused
from ..model.backends.streams import FinishReason, ParameterError, SamplingParams, TokenIds
from ..slots.admission import Refused
from .request import Prompt, Streaming, StreamingInput, StreamingOutput, StreamingRequest

__all__ = (
    "BackendError",
    "BackendGone",
    "BackendRefused",
    "FinishReason",
    "LocalProtocolError",
    "ParameterError",
    "Picture",
    "Prompt",
    "Refused",
    "SamplingParams",
    "Sound",
    "Streaming",
    "StreamingInput",
    "StreamingOutput",
    "StreamingRequest",
    "Text",
    "TokenIds",
)
