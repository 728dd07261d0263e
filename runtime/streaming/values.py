"""What goes into a request with streaming input, and what comes out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal, SupportsIndex

import attrs

from protocol.model import INPUT_RATE_HZ, SAMPLE_BYTES
from protocol.turn import Picture, Sound, Text

from ..backends.streams import FinishReason, Part, SamplingParams, TokenIds

BYTES: Final = bytes | bytearray | memoryview
"""Sequences of integers, too; yet nobody means token ids by them."""
PromptPart = str | SupportsIndex | Part | Sequence[SupportsIndex]
Prompt = str | Part | Sequence[PromptPart]
"""Text, token ids, sound or a picture, or a sequence of these; ids that touch are one run."""


def parts_of(prompt: object) -> tuple[Part, ...]:
    """Read a prompt.

    Args:
        prompt: a `Prompt`.

    Returns:
        Its parts; ids that touch are one.

    Raises:
        TypeError: a part is of no known kind; the text names it.
    """
    alone = isinstance(prompt, str | Text | TokenIds | Sound | Picture)
    if not alone and (not isinstance(prompt, Sequence) or isinstance(prompt, BYTES)):
        raise TypeError(f"prompt is a {type(prompt).__name__}: no text, ids, sound or picture")
    parts: list[Part] = []
    for part in _parts((prompt,) if alone else prompt):
        last = parts[-1] if parts else None
        if isinstance(part, TokenIds) and isinstance(last, TokenIds):
            parts[-1] = TokenIds(ids=last.ids + part.ids)
        else:
            parts.append(part)
    return tuple(parts)


def _parts(prompt: object) -> Iterator[Part]:
    assert isinstance(prompt, Sequence)
    for place, part in enumerate(prompt):
        if isinstance(part, Text | TokenIds | Sound | Picture):
            yield part
        elif isinstance(part, str):
            yield Text(text=part)
        elif isinstance(part, SupportsIndex) and not isinstance(part, bool):
            yield TokenIds(ids=(part,))
        else:
            yield _ids(place, part)


def _ids(place: int, part: object) -> TokenIds:
    """A run of ids that stands in a prompt as a sequence of its own."""
    if isinstance(part, Sequence) and not isinstance(part, BYTES):
        found = [item for item in part if isinstance(item, SupportsIndex)]
        if len(found) == len(part):
            return TokenIds(ids=found)
    raise TypeError(f"prompt[{place}] is a {type(part).__name__}: no text, ids, sound or picture")


@attrs.frozen
class StreamingInput:
    """A chunk of a request: what it adds to the cumulative prompt.

    Attributes:
        prompt: text, token ids, `Sound`, `Picture`, or a sequence of these.
        sampling_params: how it is answered; None takes those of the request.
        due_s: seconds after it came in which it should be answered. None takes a second where there
            is sound in it, and else whenever nothing else is to be done.

    Raises:
        TypeError: the prompt is none.
        ValueError: `due_s` is not above 0.
    """

    prompt: Prompt
    sampling_params: SamplingParams | None = None
    due_s: float | None = None
    parts: tuple[Part, ...] = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "parts", parts_of(self.prompt))
        if self.due_s is not None and not self.due_s > 0:
            raise ValueError(f"due_s is {self.due_s}, not above 0")

    @property
    def sound_s(self) -> float:
        """Seconds of sound in the prompt."""
        sounds = (len(part.pcm) for part in self.parts if isinstance(part, Sound))
        return sum(sounds) / SAMPLE_BYTES / INPUT_RATE_HZ


@attrs.frozen(kw_only=True)
class StreamingOutput:
    """One step of a request: what was computed, and what was sampled behind it.

    Attributes:
        request_id: the request's.
        chunk: which chunk it answers, from 0. Sound that completes no second is answered with the
            chunk that completes it; what is left at the end as its own chunk, or as one more.
        token_ids: what was sampled: one id. None in the last output.
        text: whole characters alone; the texts of all outputs joined are the request's text. The
            last output has what was held back of a character that never became whole.
        finish_reason: why it is the chunk's last token; None where another follows. In the last
            output `context_full` where the next chunk does not fit, and `abort` where the request
            was aborted. Behind these the request is over, and chunks that wait are dropped.
        computed_tokens: tokens that the step computed: with a chunk's first all of its prompt, with
            the others the token before.
        prompt_tokens: rows of the chunk's prompt: tokens, embeddings, and the one carried over.
        kv_length: tokens in the KV cache; what this step sampled is not among them.
        finished: it is the last: the request is over, and its slot is given back.
    """

    request_id: str
    chunk: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | Literal["abort"] | None
    computed_tokens: int
    prompt_tokens: int
    kv_length: int
    finished: bool = False
