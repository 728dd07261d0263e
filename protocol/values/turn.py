"""The plain values of a chat turn, as a session and a model exchange them (`mode=chat`, 001, 004).

A turn is stateless: it has the whole conversation, is prefilled at once, and leaves nothing in the
model. Media is decoded: pictures are JPEG files, sound is PCM, a video is both.

PCM is little-endian float32, mono: 16 kHz towards the model, 24 kHz from it.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs
import numpy as np
from numpy.typing import NDArray

from .model import Costs
from .tools import Tool, ToolCall, ToolResult

Role = Literal["system", "user", "assistant", "tool"]
SpeechMode = Literal["default", "audio_assistant", "omni", "audio_roleplay", "voice_cloning"]
Language = Literal["en", "zh"]
StopReason = Literal["turn_end", "length", "interrupted", "tool_calls"]
"""Why a turn ended: the model's own end, `max_new_tokens`, a cut, or its own end with calls."""


@attrs.frozen(kw_only=True)
class Text:
    """Text."""

    text: str


@attrs.frozen(kw_only=True)
class Picture:
    """A JPEG file, proven decodable."""

    jpeg: bytes


def _pcm(samples: bytes | bytearray | memoryview | NDArray[np.floating[Any]]) -> bytes:
    """Convert samples to float32 LE; `TypeError` if not bytes or one channel of floats."""
    if isinstance(samples, bytes | bytearray | memoryview):
        return bytes(samples)
    if not isinstance(samples, np.ndarray):
        raise TypeError(f"pcm is a {type(samples).__name__}: neither bytes nor an array of floats")
    if not np.issubdtype(samples.dtype, np.floating):
        raise TypeError(f"pcm is an array of {samples.dtype}, not of floats in [-1, 1]")
    if samples.ndim != 1:
        raise TypeError(f"pcm has {samples.ndim} dimensions, not 1")
    return samples.astype("<f4").tobytes()


@attrs.frozen(kw_only=True)
class Sound:
    """Sound, float32 LE, 16 kHz mono, at least one sample; an array of floats is converted."""

    pcm: bytes = attrs.field(converter=_pcm)


Content = Text | Picture | Sound | ToolCall | ToolResult


@attrs.frozen(kw_only=True)
class Message:
    """One message of a conversation; a video's pictures and sound stand in it second by second.

    Calls stand last in a message of the assistant; a tool's message is one result.
    """

    role: Role
    content: tuple[Content, ...]


@attrs.frozen(kw_only=True)
class ChatConfig:
    """How a turn is generated (004, GenerationConfig; the rest as of model.md).

    Attributes:
        max_new_tokens: most tokens generated, 1-8192.
        temperature: sampling temperature, 0-2; 0 takes the most likely token (`do_sample: false`).
        top_p: probability mass kept, above 0 and up to 1.
        top_k: candidates kept, 1-1000.
        repetition_penalty: divisor on the logits of tokens that were generated, 1-2.
        length_penalty: factor against ending, 0.1-10; more makes answers longer.
        min_new_tokens: fewest tokens generated before the answer may end by itself, 0-8192.
    """

    max_new_tokens: int = 512
    temperature: float = 0.7
    top_p: float = 0.8
    top_k: int = 100
    repetition_penalty: float = 1.02
    length_penalty: float = 1.0
    min_new_tokens: int = 0


@attrs.frozen(kw_only=True)
class SpeechConfig:
    """How a turn is spoken (004, TTSConfig).

    Attributes:
        mode: the system message of a conversation without one, and whether it has the voice:
            `default` leaves it out.
        language: language of that system message.
        voice_pcm: reference audio, float32 LE, 16 kHz mono; empty takes the model's own voice.
    """

    mode: SpeechMode = "default"
    language: Language = "en"
    voice_pcm: bytes = b""


@attrs.frozen(kw_only=True)
class Turn:
    """Everything that a backend needs for one turn; the same values give the same answer.

    Attributes:
        index: 0, 1, 2... counts the session's turns; it keys the RNG.
        messages: the whole conversation, one message at least.
        speech: how it is spoken; None: only text.
        max_slice_nums: most slices a picture may be cut into, 1-9.
        use_image_id: pictures are numbered, if there are several.
        omni: sound and pictures of a message are joined without line breaks (004, omni_mode).
        thinking: the model may think aloud before it answers.
        tts_template: the prompt asks for an answer that could be spoken, spoken or not.
        tools: what the model may call.
    """

    index: int
    messages: tuple[Message, ...]
    config: ChatConfig
    speech: SpeechConfig | None
    max_slice_nums: int
    use_image_id: bool
    omni: bool
    thinking: bool
    seed: int
    tts_template: bool = False
    tools: tuple[Tool, ...] = ()

    @property
    def has_tools(self) -> bool:
        """Whether it offers tools, or its conversation has calls or results of them."""
        parts = (part for message in self.messages for part in message.content)
        return bool(self.tools) or any(isinstance(part, ToolCall | ToolResult) for part in parts)


@attrs.frozen(kw_only=True)
class Prefill:
    """A conversation in the KV cache: `input_tokens`, the generation prompt included.

    `fed_ids` has -1 for an embedding; `input_hash` is blake2b-128 hex of all input of the model.
    """

    index: int
    input_tokens: int
    fed_ids: tuple[int, ...] = ()
    input_hash: str = ""
    cost_us: int = 0


@attrs.frozen(kw_only=True)
class TurnChunk:
    """A piece of an answer: a token's text, a second of speech, or both.

    Attributes:
        step: 0, 1, 2... counts the chunks of the turn.
        text: only whole characters; may be empty.
        pcm: float32 LE, 24 kHz mono; may be empty.
        token_ids: ids generated since the last chunk.
        codec_ids: speech codes since the last chunk.
    """

    index: int
    step: int
    text: str = ""
    pcm: bytes = b""
    token_ids: tuple[int, ...] = ()
    codec_ids: tuple[int, ...] = ()


@attrs.frozen(kw_only=True)
class TurnResult:
    """The end of an answer.

    Attributes:
        text: of all chunks, joined; calls are not in it.
        pcm: the last of the speech, after all chunks; float32 LE, 24 kHz mono.
        generated_tokens: the terminator included.
        kv_length: tokens in the KV cache at the end.
        codec_ids: the speech codes after those of all chunks.
        cut: the generated token (from 0) before which it was cut; None if it was not.
        logits_hash: blake2b-128 hex of the first token's logits.
        margin: difference between the first token's best and second logit.
        costs: measured by the backend; `prefill_us` is in `Prefill` and 0 here.
        calls: complete calls of the turn's tools, in order, `CALLS_MAX` at most; without ids.
    """

    index: int
    text: str
    pcm: bytes = b""
    reason: StopReason = "turn_end"
    generated_tokens: int = 0
    kv_length: int = 0
    codec_ids: tuple[int, ...] = ()
    cut: int | None = None
    logits_hash: str = ""
    margin: float = 0.0
    costs: Costs = Costs()
    calls: tuple[ToolCall, ...] = ()
