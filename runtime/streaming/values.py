"""Inputs and outputs of a streaming request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal, SupportsIndex

import attrs

from protocol.values.model import INPUT_RATE_HZ, SAMPLE_BYTES, Picture, Sound, Text

from ..model.backends.streams import FinishReason, Part, SamplingParams, TokenIds

BYTES: Final = bytes | bytearray | memoryview
"""Sequences of integers, but never meant as token ids."""
PromptPart = str | SupportsIndex | Part | Sequence[SupportsIndex]
Prompt = str | Part | Sequence[PromptPart]
"""Text, token ids, sound or a picture, or a sequence of these; adjacent ids are one run."""


def parts_of(prompt: object) -> tuple[Part, ...]:
    """Read a `Prompt` into parts; adjacent ids become one. `TypeError` names an unknown part."""
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
    """A sequence of ids within a prompt."""
    if isinstance(part, Sequence) and not isinstance(part, BYTES):
        found = [item for item in part if isinstance(item, SupportsIndex)]
        if len(found) == len(part):
            return TokenIds(ids=found)
    raise TypeError(f"prompt[{place}] is a {type(part).__name__}: no text, ids, sound or picture")


@attrs.frozen
class StreamingInput:
    """A chunk of a request: an extension of the cumulative prompt.

    Attributes:
        prompt: text, token ids, `Sound`, `Picture`, or a sequence of these; else `TypeError`.
        sampling_params: for its answer; None: the request's.
        due_s: seconds from arrival to deadline, above 0, else `ValueError`. None: 1 with sound,
            otherwise lowest priority.
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
    """One step of a request: tokens computed, and one sampled after them.

    Attributes:
        chunk: the chunk answered, from 0. Sound that completes no second is answered with the chunk
            that completes it; the rest at the end as its own chunk, or as one more.
        token_ids: the sampled id; empty in the last output.
        text: whole characters; in the last output, the rest of an incomplete one.
        finish_reason: why it is the chunk's last token; None if another follows. In the last
            output, `context_full` if the next chunk does not fit, or `abort`.
        computed_tokens: tokens computed: the whole prompt at a chunk's first step, else one.
        prompt_tokens: rows of the chunk's prompt: tokens, embeddings, and the carried one.
        kv_length: tokens in the KV cache, without this step's.
        finished: the last output: the request has ended, and its slot is free.
    """

    request_id: str
    chunk: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | Literal["abort"] | None = None
    computed_tokens: int = 0
    prompt_tokens: int = 0
    kv_length: int = 0
    finished: bool = False
