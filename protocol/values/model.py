"""The plain values that a session and a model exchange.

They cross the `Backend` protocol (`runtime/model/backends/base.py`) and are part of events, so they
hold only bytes, integers and text: a backend can run in another process, and a log can hold them.

PCM is little-endian float32, mono: 16 kHz towards the model, 24 kHz from it.
Costs are integer microseconds, measured outside the session, which never asks for them.
"""

from __future__ import annotations

from typing import Final, Literal

import attrs

SlidingWindow = Literal["off", "basic", "context"]
Stage = Literal["prefill", "llm", "tts", "token2wav"]
"""The stages of one unit, in the order in which they run."""

INPUT_RATE_HZ: Final = 16_000
OUTPUT_RATE_HZ: Final = 24_000
UNIT_SAMPLES: Final = 16_000
"""One unit is one second of input audio."""
SAMPLE_BYTES: Final = 4
SAMPLE16_BYTES: Final = 2
"""Bytes of a signed 16-bit sample, as in sound to be transcribed (003)."""
UNIT_BYTES: Final = UNIT_SAMPLES * SAMPLE_BYTES


@attrs.frozen(kw_only=True)
class DuplexConfig:
    """The inference settings of a duplex session (002 `config`, defaults of wire.md).

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
    """Everything a backend needs to open a session; the same values give the same session."""

    instructions: str
    voice: Voice
    config: DuplexConfig
    seed: int


@attrs.frozen(kw_only=True)
class Opened:
    """A session that is ready for its first unit; `prompt_length` is in tokens.

    `fed_ids` are the prompt's token ids, with -1 for an embedding fed instead of a token.
    """

    prompt_length: int
    fed_ids: tuple[int, ...] = ()


@attrs.frozen(kw_only=True)
class Unit:
    """One second of input.

    Attributes:
        index: 0, 1, 2... counts units started and is never reused; it keys the RNG (B9).
        pcm: float32 LE, exactly `UNIT_SAMPLES` samples at 16 kHz.
        frames: JPEG files, each already proven decodable.
        max_slice_nums: most slices a frame may be cut into, 1-9.
        force_speak: the model may not listen, unless `force_listen` is set.
    """

    index: int
    pcm: bytes
    frames: tuple[bytes, ...] = ()
    force_listen: bool = False
    max_slice_nums: int = 1
    force_speak: bool = False


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
    """A finalized unit: the terminator and `</unit>` are fed, the window has slid."""

    index: int
    kv_length: int
    fed_ids: tuple[int, ...] = ()
    cost_us: int = 0


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
    """

    unit: Unit
    result: UnitResult
    interrupted: bool
    is_voiced: bool = False
