"""Streaming input: a request to the model that is added to while it is answered (003).

    async with Streaming(load_backend("tiny")) as streaming:
        async with streaming.generate(chunks(), SamplingParams(max_tokens=8)) as outputs:
            async for output in outputs:
                print(output.text, end="")

`chunks` is an asynchronous generator of `StreamingInput`. Each chunk extends the cumulative prompt
of the request and is answered at once; what the model computed is kept and never computed again.
docs/streaming.md tells all of it. It runs on asyncio and on trio, and shares the model's slots,
batches and deadlines with sessions and turns of chat.
"""

from __future__ import annotations

from protocol.turn import Picture, Sound, Text

from ..backends.streams import FinishReason, ParameterError, SamplingParams, TokenIds
from .request import StreamingRequest
from .service import Streaming
from .values import Prompt, StreamingInput, StreamingOutput

__all__ = (
    "FinishReason",
    "ParameterError",
    "Picture",
    "Prompt",
    "SamplingParams",
    "Sound",
    "Streaming",
    "StreamingInput",
    "StreamingOutput",
    "StreamingRequest",
    "Text",
    "TokenIds",
)
