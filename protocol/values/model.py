"""The plain values that a session and a model exchange.

They cross the `Backend` protocol (`runtime/model/backends/base.py`) and are part of events, so they
hold only bytes, integers and text: a backend can run in another process, and a log can hold them.

- A *unit* is one second of a duplex session.
- A *turn* of chat is stateless: it has the whole conversation, is prefilled at once, and leaves
  nothing in the model. Its media is decoded: JPEG files and PCM; a video is both.
- The server runs no *tool*. A turn offers tools; an answer may end with calls of them; the client
  runs these, and asks again with the conversation, the calls and their results. A duplex session
  offers them when it is opened: the model calls in the *silent part* of a unit, after its speech,
  and what the client returned is part of a later unit's input.
- An *utterance* of a transcription is one anchored request of streaming input: its sound comes in
  chunks of exactly one second, and the model writes the text of each before the next. A slot keeps
  the state of an utterance from chunk to chunk.

PCM is little-endian float32, mono: 16 kHz towards the model, 24 kHz from it.
Costs are integer microseconds, measured outside the session, which never asks for them.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal, get_args

import attrs
import numpy as np
from numpy.typing import NDArray

SlidingWindow = Literal["off", "basic", "context"]
Stage = Literal["prefill", "llm", "tts", "token2wav"]
"""The stages of one unit up to its result, in the order in which they run."""

INPUT_RATE_HZ: Final = 16_000
OUTPUT_RATE_HZ: Final = 24_000
UNIT_SAMPLES: Final = 16_000
"""One unit is one second of input audio."""
SAMPLE_BYTES: Final = 4
SAMPLE16_BYTES: Final = 2
"""Bytes of a signed 16-bit sample, as in sound to be transcribed (003)."""
UNIT_BYTES: Final = UNIT_SAMPLES * SAMPLE_BYTES


# -- Tools ----------------------------------------------------------------------------------------

ToolChoice = Literal["auto", "none"]
"""Whether the model may call tools; that it must is not offered: its tokens are not constrained."""
TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""The name of a tool: it stands in JSON that a model writes token by token."""
CALLS_MAX: Final = 16
"""Calls an answer: what a model writes beyond is text."""


@attrs.frozen(kw_only=True)
class Tool:
    """A function that the client offers to the model.

    Attributes:
        name: its name: 1 to 64 letters, digits, `_` and `-`.
        description: what it does, for the model.
        parameters: its arguments, as a JSON Schema; the model reads it, the server does not.
    """

    name: str
    description: str = ""
    parameters: str = ""


@attrs.frozen(kw_only=True)
class ToolCall:
    """A call of a tool, which the model asks of the client.

    Attributes:
        id: names the call, for its result; empty until the session names it.
        name: of the tool.
        arguments: a JSON object, as text. It is not checked against the tool's `parameters`.
    """

    id: str = ""
    name: str
    arguments: str


@attrs.frozen(kw_only=True)
class ToolResult:
    """What a tool returned: in chat a message of the role `tool`, in a duplex session by itself.

    Attributes:
        call_id: the call that it answers.
        output: any text.
    """

    call_id: str
    output: str


# -- Units ----------------------------------------------------------------------------------------

SpanKind = Literal["think", "call", "text"]
SilentEnd = Literal["no_action", "eos", "budget", "cut", "failed"]
"""Why a silent part ends: nothing to do; the model's own end; its budget is used up; the session
cut it; it failed, and was undone to the end of the speech."""
InputKind = Literal["started", "result", "text"]


@attrs.frozen(kw_only=True)
class UnitInput:
    """An event that a unit tells the model besides sound and pictures.

    Attributes:
        kind: `started`: the call was accepted; `result`: what it returned; `text`: anything else.
        call: the model's name of the call: `t1`, `t2`... in the order of a session's calls; empty
            of a text.
        text: of a result, and of a text.
    """

    kind: InputKind
    call: str = ""
    text: str = ""


@attrs.frozen(kw_only=True)
class Span:
    """Something that the model wrote in silence, from its opener to its closer.

    Attributes:
        text: what is between the two, of all units in which it was written.
        name, arguments: of a call, as the backend read it, as in `ToolCall`.
        fault: why it is not a call of a tool that was offered, in words for the model.
    """

    kind: SpanKind
    text: str
    name: str = ""
    arguments: str = ""
    fault: str = ""


@attrs.frozen(kw_only=True)
class Silent:
    """The silent part of a unit, between its speech and its end.

    Attributes:
        spans: those that were closed in this unit, in order.
        is_open: a span goes on in the next unit.
        decided_ids: every id that was decided; one that was cut stopped after so many.
    """

    end: SilentEnd
    spans: tuple[Span, ...] = ()
    is_open: bool = False
    decided_ids: tuple[int, ...] = ()


@attrs.frozen(kw_only=True)
class DuplexConfig:
    """The inference settings of a duplex session (002 `config`; docs/protocol.md).

    Attributes:
        generate_audio: whether speaking units carry PCM.
        force_listen_count: how many units at the start must listen, 0-100.
        max_new_speak_tokens_per_chunk: tokens a unit may decide, 2-20; the last one ends it.
        temperature: sampling temperature, 0-2; 0 takes the most likely token, as
            `decode_mode` `greedy` does.
        top_k: candidates kept, 1-1000.
        top_p: probability mass kept, above 0 and up to 1.
        listen_prob_scale: factor on the probability of listening, 0-10.
        length_penalty: factor on the logit of `turn_eos`, 0.1-10.
        sliding_window: the policy when the context fills.
        deferred_finalize: finalize after the send (B2), not before it.
    """

    generate_audio: bool = True
    force_listen_count: int = 3
    max_new_speak_tokens_per_chunk: int = 20
    temperature: float = 0.7
    top_k: int = 20
    top_p: float = 0.8
    listen_prob_scale: float = 1.0
    length_penalty: float = 1.1
    sliding_window: SlidingWindow = "off"
    deferred_finalize: bool = True


@attrs.frozen(kw_only=True)
class Voice:
    """Reference audio, decoded: float32 LE, 16 kHz mono; empty where there is none."""

    llm_pcm: bytes = b""
    tts_pcm: bytes = b""


@attrs.frozen(kw_only=True)
class Opening:
    """Everything a backend needs to open a session; the same values give the same session.

    Attributes:
        tools: what the model may call; empty for a model without duplex tools.
    """

    instructions: str
    voice: Voice
    config: DuplexConfig
    seed: int
    tools: tuple[Tool, ...] = ()


@attrs.frozen(kw_only=True)
class Opened:
    """A session that is ready for its first unit; `prompt_length` is in tokens.

    `fed_ids` are the prompt's token ids, with -1 for an embedding fed instead of a token.
    `takes_events`: False if its units have no place for events, as it was opened without tools.
    """

    prompt_length: int
    fed_ids: tuple[int, ...] = ()
    takes_events: bool = True


@attrs.frozen(kw_only=True)
class Unit:
    """One second of input.

    Attributes:
        index: 0, 1, 2... counts units started and is never reused; it keys the RNG (B9).
        pcm: float32 LE, exactly `UNIT_SAMPLES` samples at 16 kHz.
        frames: JPEG files, each already proven decodable.
        max_slice_nums: most slices a frame may be cut into, 1-9.
        force_speak: the model may not listen, unless `force_listen` is set.
        inputs: events, in the order in which they are fed.
    """

    index: int
    pcm: bytes
    frames: tuple[bytes, ...] = ()
    force_listen: bool = False
    max_slice_nums: int = 1
    force_speak: bool = False
    inputs: tuple[UnitInput, ...] = ()


@attrs.frozen(kw_only=True)
class Cut:
    """Where an interrupted unit stopped: before step `step` (from 0) of `stage` (B6)."""

    stage: Stage
    step: int


@attrs.frozen(kw_only=True)
class Costs:
    """The cost of a unit, in microseconds; `wall_us` is from its start to its result."""

    prefill_us: int = 0
    generate_us: int = 0
    llm_us: int = 0
    tts_us: int = 0
    token2wav_us: int = 0
    wall_us: int = 0


@attrs.frozen(kw_only=True)
class UnitResult:
    """The model's result of one unit.

    Attributes:
        is_listen: the model listens; `text` and `pcm` are empty then, unless the unit was cut.
        pcm: float32 LE at 24 kHz. Exactly 24000 samples inside a turn, fewer at its start; at its
            end up to 30720, since a vocoder looks ahead and then releases the rest.
        kv_length: tokens in the KV cache, read after generate and before finalize (B10).
        decided_ids: every token id that was decided, terminators and forced ones included.
        fed_ids: the ids that were fed in generate (they differ from the decided ones, model.md).
        codec_ids: speech codes, 25 a second.
        cut: the place of the interruption, or None.
        input_hash: blake2b-128 hex of the unit's pcm, frames and flags.
        logits_hash: blake2b-128 hex of the first token's logits.
        margin: difference between the first token's best and second logit.
        vision_tokens: vision embeddings fed.
    """

    index: int
    is_listen: bool
    text: str = ""
    pcm: bytes = b""
    end_of_turn: bool = False
    kv_length: int = 0
    decided_ids: tuple[int, ...] = ()
    fed_ids: tuple[int, ...] = ()
    codec_ids: tuple[int, ...] = ()
    cut: Cut | None = None
    input_hash: str = ""
    logits_hash: str = ""
    margin: float = 0.0
    vision_slices: int = 0
    vision_tokens: int = 0
    costs: Costs = Costs()


@attrs.frozen(kw_only=True)
class Finalized:
    """A finalized unit: the terminator and `</unit>` are fed, the window has slid.

    `silent`: its silent part, of a model that has one; its ids are among `fed_ids` as far as they
    were fed.
    """

    index: int
    kv_length: int
    fed_ids: tuple[int, ...] = ()
    cost_us: int = 0
    silent: Silent | None = None


PAST_UNITS_MAX: Final = 16
"""Maximum past units per call of a rebuild: it holds their sound and pictures in memory."""


@attrs.frozen(kw_only=True)
class PastUnit:
    """A unit that a session's log holds as done, fed again in a rebuild.

    Attributes:
        unit: its input.
        result: the recorded result, without its `pcm`.
        interrupted: as in its `StartFinalize`.
        is_voiced: its turn is still open at the end of the past, so its speech codes go through the
            speech decoder and the vocoder again: no unit from it on ended a turn or was interrupted
            (`recorder.read.past.voiced`).
        silent: as in its `Finalized`; None too if the worker was lost before: nothing was decided.
    """

    unit: Unit
    result: UnitResult
    interrupted: bool
    is_voiced: bool = False
    silent: Silent | None = None


# -- The sound of OpenAI's dialects ---------------------------------------------------------------

Coding = Literal["audio/pcm", "audio/pcmu", "audio/pcma"]
"""Signed 16-bit LE samples, or a byte each by G.711's mu-law or A-law."""
CODINGS: Final[tuple[Coding, ...]] = get_args(Coding)
LIVE_RATES_HZ: Final = (24_000, 16_000)
"""Of PCM; the first one if nothing else is said."""
G711_RATE_HZ: Final = 8_000


def rate_of(coding: Coding) -> int:
    """Samples a second, if nothing else is said."""
    return LIVE_RATES_HZ[0] if coding == "audio/pcm" else G711_RATE_HZ


# -- Turns of chat --------------------------------------------------------------------------------

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


# -- Transcriptions -------------------------------------------------------------------------------

ChunkEnd = Literal["stop", "length"]
"""Why the text of a chunk ends: the model's terminator, or the most tokens of a chunk."""


@attrs.frozen(kw_only=True)
class Chunk:
    """One second of an utterance.

    Attributes:
        utterance: 0, 1, 2... counts the session's; with the session's seed it keys the RNG.
        index: 0 begins the utterance: the slot forgets the last one.
        pcm: float32 LE, exactly `UNIT_SAMPLES` samples at 16 kHz.
        is_last: the end of the utterance: text that was held back is released.
    """

    utterance: int
    index: int
    pcm: bytes
    is_last: bool = False
    seed: int


@attrs.frozen(kw_only=True)
class ChunkResult:
    """The model's result of one chunk.

    Attributes:
        text: only whole characters; may be empty.
        token_ids: sampled in this chunk, the terminator included.
        prompt_tokens: rows fed as the chunk's prompt, embeddings too; the first chunk's has the
            instructions.
        kv_length: tokens in the KV cache after it.
        fed_ids: the prompt's ids, with -1 for an embedding fed instead of a token.
        input_hash: blake2b-128 hex of the chunk's sound.
        logits_hash: blake2b-128 hex of the first token's logits.
        margin: difference between the first token's best and second logit.
    """

    utterance: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    reason: ChunkEnd
    prompt_tokens: int
    generated_tokens: int
    kv_length: int
    fed_ids: tuple[int, ...] = ()
    input_hash: str = ""
    logits_hash: str = ""
    margin: float = 0.0
    costs: Costs = Costs()
