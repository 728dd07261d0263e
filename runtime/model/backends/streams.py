"""Streaming input on a backend: one request that is extended while it is answered.

A request stays in one slot to its end. Each chunk extends the cumulative prompt, tokens are sampled
after it, and cached results are never recomputed (003, "The Anchor Request Pattern"). The discard
rule: the last token that a chunk samples is never fed, so the next prompt follows the token before
it. With `carry_terminator` it is fed before the next chunk's prompt, for models that continue only
after their own terminator. Calls on one request never overlap, except `interrupt`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import index
from typing import Final, Literal, Protocol, SupportsIndex, runtime_checkable

import attrs

from protocol.values.limits import SLICES_MAX
from protocol.values.model import Costs, Picture, Sound, Text

FinishReason = Literal["stop", "length", "context_full"]
"""Why a chunk's answer ended: a stop token, its `max_tokens`, or a full context."""
OutputKind = Literal["delta", "final_only"]

TOKENS_MAX: Final = 1_000_000
"""More than any context holds, and small enough to multiply without overflow."""
REQUEST_ID_LENGTH_MAX: Final = 128
"""A name for logs; it is hashed for every chunk."""
STOP_IDS_MAX: Final = 1024
"""Looked up for every token; a vocabulary has a few dozen stop tokens."""


def _ids(values: Iterable[SupportsIndex]) -> tuple[int, ...]:
    return tuple(index(value) for value in values)


class ParameterError(ValueError):
    """A sampling parameter out of its range, or not supported with streaming input."""


def _within(name: str, value: object, low: float, high: float, *, whole: bool = True) -> None:
    """Check a number's range, ends included; booleans are refused."""
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        wanted = "a whole number" if whole else "a number"
        raise ParameterError(f"{name} is a {type(value).__name__}, not {wanted}")
    if not low <= value <= high:  # A NaN is out of every range.
        raise ParameterError(f"{name} is {value}, not within {low} to {high}")


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How tokens are sampled after a chunk; the names are those of 003's source.

    Attributes:
        max_tokens: maximum tokens of a chunk, at least 1; the context may end it before.
        temperature: 0-100; 0 takes the most likely token, of equal ones the lower id.
        top_p: probability mass kept, above 0 and up to 1.
        top_k: candidates kept; 0 keeps all.
        seed: with the request's id, the chunk's number and the step, it decides every draw.
        stop_token_ids: each of them ends the chunk; it is emitted.
        ignore_eos: the model's own end tokens do not end the chunk.
        n: answers per chunk; only 1, since a request has one KV cache.
        stop: stop texts; refused, since they may span tokens already emitted.
        output_kind: `final_only` is refused: streaming input is answered continuously.

    `ParameterError`: a value is out of its range, or refused; the text names it.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_ids)
    ignore_eos: bool = False
    n: int = 1
    stop: str | Sequence[str] = ()
    output_kind: OutputKind = "delta"

    def __attrs_post_init__(self) -> None:
        _within("max_tokens", self.max_tokens, 1, TOKENS_MAX)
        _within("temperature", self.temperature, 0, 100, whole=False)
        _within("top_p", self.top_p, math.nextafter(0, 1), 1, whole=False)
        _within("top_k", self.top_k, 0, TOKENS_MAX)
        _within("seed", self.seed, -(2**63), 2**63 - 1)
        if len(self.stop_token_ids) > STOP_IDS_MAX:
            raise ParameterError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids, more than {STOP_IDS_MAX}"
            )
        for place, stop_id in enumerate(self.stop_token_ids):
            _within(f"stop_token_ids[{place}]", stop_id, 0, TOKENS_MAX)
        self._refuse()

    def _refuse(self) -> None:
        """Refuse parameters that streaming input does not support."""
        if self.n != 1:
            raise ParameterError(f"n is {self.n}: streaming input gives one answer, so n is 1")
        if self.stop:
            raise ParameterError("stop has texts: only stop_token_ids end streaming input")
        if self.output_kind != "delta":
            raise ParameterError(
                f"output_kind is {self.output_kind!r}: streaming input gives only 'delta'"
            )


@attrs.frozen(kw_only=True)
class TokenIds:
    """Token ids to be fed as they are, control tokens too."""

    ids: tuple[int, ...] = attrs.field(converter=_ids)


Part = Text | TokenIds | Sound | Picture
"""A piece of a chunk's prompt. Text never yields a control token. Sound has whole seconds, and
continues the request's last sound. A picture is a JPEG file."""


@attrs.frozen(kw_only=True)
class Anchoring:
    """The shared settings of one request's chunks; `ParameterError` if out of range.

    Attributes:
        request_id: it keys the RNG, so the same request gets the same draws.
        carry_terminator: the last sampled token is fed before the next chunk's prompt.
        max_slice_nums: maximum slices per picture, 1-9.
    """

    request_id: str
    carry_terminator: bool = False
    max_slice_nums: int = 1

    def __attrs_post_init__(self) -> None:
        if not 0 < len(self.request_id) <= REQUEST_ID_LENGTH_MAX:
            raise ParameterError(
                f"request_id has {len(self.request_id)} characters, "
                f"not 1 to {REQUEST_ID_LENGTH_MAX}"
            )
        _within("max_slice_nums", self.max_slice_nums, 1, SLICES_MAX)


@attrs.frozen(kw_only=True)
class Sampled:
    """One step of a chunk, counted from 0 as is the chunk in the request.

    Attributes:
        text: the whole characters that the token completes; may be empty.
        reason: why it is the chunk's last; None if another follows.
        computed_tokens: tokens that this step fed: the chunk's prompt at step 0, then 1.
        prompt_tokens: rows of the chunk's prompt, a carried token included.
        kv_length: tokens in the KV cache, without this one.
    """

    chunk: int
    step: int
    token_id: int
    text: str
    reason: FinishReason | None
    computed_tokens: int
    prompt_tokens: int
    kv_length: int


@attrs.frozen(kw_only=True)
class Extended:
    """The result of one chunk; `prompt_tokens` and `kv_length` are as of its last `Sampled`.

    Attributes:
        token_ids: sampled, at least one; the last is not in the KV cache.
        held: text of an incomplete character, which a later chunk may complete.
        fed_ids: ids of the chunk's prompt, -1 for an embedding.
        logits_hash: blake2b-128 hex of the prompt's last logits.
        margin: the best of these logits minus the second.
    """

    chunk: int
    token_ids: tuple[int, ...]
    reason: FinishReason
    prompt_tokens: int
    kv_length: int
    held: str = ""
    fed_ids: tuple[int, ...] = ()
    logits_hash: str = ""
    margin: float = 0.0
    costs: Costs = Costs()


class AnchorSession(Protocol):
    """One anchored request on a backend, from its slot's lease to its release."""

    async def extend(
        self,
        prompt: Sequence[Part],
        params: SamplingParams,
        emit: Callable[[Sampled], None],
        *,
        due_s: float | None = None,
    ) -> Extended:
        """Extend the cumulative prompt, and sample after it.

        `emit` gets each token in order, in the event loop, and never blocks. `due_s` is the seconds
        until the answer is due, negative if late; None: lowest priority.

        Raises:
            ContextFull: the prompt does not fit; nothing was fed.
            BackendRefused: the prompt or its parameters are not supported; nothing was fed.
            BackendError: it failed, or the request was cut; release it.
            BackendGone: the request is lost.
        """
        ...

    async def release(self) -> None:
        """Free everything it holds; never raises if it is lost."""
        ...

    def interrupt(self) -> None:
        """Cut the request for good at its next step, running or not; never blocks."""
        ...


@runtime_checkable
class Streams(Protocol):
    """A backend that takes streaming input."""

    async def anchor(self, anchoring: Anchoring, *, slot: int) -> AnchorSession:
        """Take a request on an empty slot, which a `BackendError` leaves empty."""
        ...

    def token_id(self, name: str) -> int | None:
        """The id of a token by its name, as `<|im_end|>`; `BackendError` if not supported."""
        ...
