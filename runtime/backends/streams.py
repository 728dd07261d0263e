"""Streaming input on a backend: one request that is added to while it is answered.

A request is anchored: it stays in one slot from its first chunk to its end. Each chunk extends the
cumulative prompt, tokens are sampled behind it, and what was computed is kept and never computed
again (003, "The Anchor Request Pattern").

The discard rule: the last token that a chunk samples was never fed, so the model's memory does not
hold it, and the next chunk's prompt follows the token before it. All other sampled tokens stay in
the cumulative prompt. With `carry_terminator` the last one is fed in front of the next chunk's
prompt, for models that go on only from their own terminator: one more token to compute.

Calls on one request never overlap; `interrupt` alone may come at any moment, from any task. What
crosses is plain values, as in `base`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import index
from typing import Final, Literal, Protocol, SupportsIndex, runtime_checkable

import attrs

from protocol.limits import SLICES_MAX
from protocol.model import Costs
from protocol.turn import Picture, Sound, Text

FinishReason = Literal["stop", "length", "context_full"]
"""Why a chunk was answered no further: one of its stop tokens, its most tokens, or no more room."""
OutputKind = Literal["delta", "final_only"]

TOKENS_MAX: Final = 1_000_000
"""More than any context holds, and little enough to be multiplied without thought."""
REQUEST_ID_LENGTH_MAX: Final = 128
"""A name for logs; it is hashed for every chunk."""
STOP_IDS_MAX: Final = 1024
"""Ids that are looked up for every token; a vocabulary has a few dozen that end anything."""


def _ids(values: Iterable[SupportsIndex]) -> tuple[int, ...]:
    """Ids of any kind of integer as plain ones."""
    return tuple(index(value) for value in values)


class ParameterError(ValueError):
    """A sampling parameter that is out of its range, or not taken with streaming input."""


def _within(name: str, value: object, low: float, high: float, *, whole: bool = True) -> None:
    """Hold a number to its range, ends included; True and False are no numbers."""
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        wanted = "a whole number" if whole else "a number"
        raise ParameterError(f"{name} is a {type(value).__name__}, not {wanted}")
    if not low <= value <= high:  # So a NaN is out of every range.
        raise ParameterError(f"{name} is {value}, not within {low} to {high}")


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How tokens are sampled behind a chunk; the names are those of 003's source.

    Attributes:
        max_tokens: most tokens of a chunk, at least 1; the context may end it before.
        temperature: 0 takes the most likely token, of equal ones that with the lower id; 0-100.
        top_p: probability mass kept, above 0 and up to 1.
        top_k: candidates kept; 0 keeps all.
        seed: with the request's id, the chunk's number and the step, it decides every draw.
        stop_token_ids: each of them ends the chunk; it is emitted.
        ignore_eos: the tokens with which the model ends an answer do not end the chunk.
        n: answers a chunk; one request has one memory, so more than 1 is refused.
        stop: texts that end a chunk; refused, for they could be found only across tokens that were
            emitted already, and nothing emitted is taken back.
        output_kind: `final_only` is refused: whoever streams in wants to be answered as it goes.

    Raises:
        ParameterError: a value is out of its range, or refused; the text names it.
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
        """Refuse what cannot be had with streaming input."""
        if self.n != 1:
            raise ParameterError(f"n is {self.n}: streaming input gives one answer, so n is 1")
        if self.stop:
            raise ParameterError("stop has texts: streaming input is ended by stop_token_ids alone")
        if self.output_kind != "delta":
            raise ParameterError(
                f"output_kind is {self.output_kind!r}: streaming input gives 'delta' alone"
            )


@attrs.frozen(kw_only=True)
class TokenIds:
    """Token ids to be fed as they are, control tokens too."""

    ids: tuple[int, ...] = attrs.field(converter=_ids)


Part = Text | TokenIds | Sound | Picture
"""A piece of a chunk's prompt. Text never yields a control token, whatever it spells. Sound is of
whole seconds, and goes on where the request's last sound ended. A picture is a JPEG file."""


@attrs.frozen(kw_only=True)
class Anchoring:
    """What the chunks of one request have in common.

    Attributes:
        request_id: its name; it keys the RNG, so the same request gets the same draws.
        carry_terminator: the last sampled token is fed in front of the next chunk's prompt.
        max_slice_nums: most slices a picture may be cut into, 1-9.

    Raises:
        ParameterError: a value is out of its range.
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
    """One step of a chunk: tokens were computed, and one was sampled behind them.

    Attributes:
        chunk: 0, 1, 2... counts the request's chunks.
        step: 0, 1, 2... counts the chunk's tokens.
        token_id: what was sampled.
        text: the whole characters that it completes; may be empty.
        reason: why it is the chunk's last; None where another follows.
        computed_tokens: tokens that this step fed: the chunk's prompt at step 0, then 1.
        prompt_tokens: rows of the chunk's prompt, a token carried over included.
        kv_length: tokens in the KV cache; this one is not among them.
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
    """What came of one chunk.

    Attributes:
        chunk: 0, 1, 2... counts the request's chunks.
        token_ids: sampled, at least one; the last is not in the KV cache.
        reason: why no more of them were.
        prompt_tokens: as of `Sampled`.
        kv_length: as of `Sampled`, behind the last step.
        held: text of an incomplete character, which a later chunk may complete.
        fed_ids: the ids of the chunk's prompt, with -1 where an embedding was fed.
        logits_hash: blake2b-128 hex of the prompt's last logits.
        margin: by how much the best of these logits was ahead of the second.
        costs: what it took.
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
        """Extend the cumulative prompt, and sample behind it.

        Args:
            prompt: what is added.
            params: of this chunk.
            emit: told each token as it is sampled, in order, from the event loop; it never blocks.
            due_s: seconds from now until the chunk should be answered, below 0 where it is late;
                None for whenever nothing else is to be done.

        Returns:
            The chunk's end.

        Raises:
            ContextFull: the prompt does not fit; nothing was fed.
            BackendRefused: the prompt or its parameters cannot be taken; nothing was fed.
            BackendError: it failed, or the request was cut; release it.
            BackendGone: the request is lost.
        """
        ...

    def interrupt(self) -> None:
        """Cut the request at its next step, for good, be one under way or not; never blocks."""
        ...

    async def release(self) -> None:
        """Give back everything the request holds; it never raises for one that is lost."""
        ...


@runtime_checkable
class Streams(Protocol):
    """A backend that takes streaming input."""

    async def anchor(self, anchoring: Anchoring, *, slot: int) -> AnchorSession:
        """Take a request on `slot`, which is empty; it computes nothing yet.

        Raises:
            BackendError: it cannot be taken; the slot is as empty as before.
        """
        ...

    def token_id(self, name: str) -> int | None:
        """The id of a token by its name in the tokenizer, as `<|im_end|>`; None has none.

        Raises:
            BackendError: the model takes no streaming input.
        """
        ...
