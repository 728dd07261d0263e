"""The state of one session, and the tokens in its slot: the prompt, the units, what windows drop.

*State* is a value: a rollback keeps the old one. Keys and values are in the slot (`KvSlots`); the
state holds the valid length of each. Nothing after a length is read, so an older state is valid
while nothing before its lengths was overwritten. That happens only where the audio encoder
restarts; `overwritten` keeps the old content.

*The prompt* is `<|im_start|>system`, the instructions, any reference audio between its markers at
ten embeddings a second, then `<|im_end|>` without a newline (model.md). The part after these is the
suffix, before which the window `context` inserts earlier text.

*The sliding windows* are what finalize drops (model.md, "Finalize"). `basic`: above 8000 tokens the
oldest units are dropped until 6000 are left; the prompt stays. `context`: above 24 units the oldest
are dropped one by one; at most 500 tokens of their text move into the prompt, after `previous: `
and before the prompt's suffix. Both slide earlier if another unit as large as the largest so far
would not fit. The remaining keys move down, rotated by the distance: a key at position p was
rotated by p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from protocol.values.model import INPUT_RATE_HZ, SAMPLE_BYTES, Opening, SlidingWindow

from ..base import BackendRefused, ContextFull
from ..tool_calls import check_parameters
from .attention import KvCopy
from .audio import MelCarry, samples_of
from .runner import ModelRunner
from .slot_layout import EVENTS_MAX, SilentState
from .tokens import Tokens
from .vocoder import VocoderBuffer
from .work import EncodeReference, Feed, LlmOutput, Steps

# -- the state ----------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Speech:
    """A turn's speech: positions in the speech decoder's slot, and the vocoder's input state.

    `is_complete`: no unit of the turn was left out, as a rebuild may do.
    """

    length: int = 0
    vocoder_buffer: VocoderBuffer | None = None
    is_complete: bool = True


@attrs.frozen(kw_only=True)
class Span:
    """One finalized unit in the language model's slot: tokens, and the ids of its text."""

    length: int
    text_ids: tuple[int, ...] = ()


@attrs.frozen(kw_only=True)
class Layout:
    """The layout of the language model's slot, which the windows change.

    Attributes:
        prefix: tokens of the prompt before its suffix.
        suffix: ids that close the prompt.
        previous: ids of older units' text, marker included (window `context`).
        spans: the finalized units, oldest first.
    """

    prefix: int
    suffix: tuple[int, ...]
    previous: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()

    @property
    def prompt(self) -> int:
        """Tokens before the first unit."""
        return self.prefix + len(self.previous) + len(self.suffix)

    @property
    def length(self) -> int:
        """Tokens of the prompt and of all finalized units."""
        return self.prompt + sum(span.length for span in self.spans)


@attrs.frozen(kw_only=True)
class SessionState:
    """A session between two steps.

    Attributes:
        layout: of the language model's slot, up to the last finalized unit.
        length: tokens in the slot.
        audio_units: units in the audio encoder's slot, 0 to 29.
        overwritten: the content that this unit overwrote there.
        history: decided ids, for the repetition penalty.
        text_ids: text ids of the current or last unit.
        has_seen: a unit had a picture (in slots).
        silent_state: where the last silent part left off (in slots).
    """

    layout: Layout
    length: int
    mel: MelCarry = attrs.field(factory=MelCarry.start)
    audio_units: int = 0
    overwritten: KvCopy | None = attrs.field(default=None, eq=False)
    history: tuple[int, ...] = ()
    turn_open: bool = False
    speech: Speech = Speech()
    text_ids: tuple[int, ...] = ()
    has_seen: bool = False
    silent_state: SilentState = attrs.field(factory=SilentState)

    def but(self, **changes: Any) -> SessionState:
        """Return the state with some attributes replaced."""
        return attrs.evolve(self, **changes)


# -- the prompt ---------------------------------------------------------------------------------

BLOCK: Final = 256
"""A long prompt is fed in blocks of this many tokens: bounded memory, and always the same split."""
EMBEDDED: Final = -1
"""Marks a fed embedding in `fed_ids` (see `Opened`)."""
MALFORMED: Final = "malformed reference audio"
REFERENCE_MAX: Final = 30 * INPUT_RATE_HZ
"""Maximum samples of reference audio."""


@attrs.frozen(kw_only=True)
class Prefilled:
    """A prompt in a slot: its layout, and the ids fed, with `EMBEDDED` for embeddings."""

    layout: Layout
    fed_ids: tuple[int, ...]


def _reference(pcm: bytes) -> Tensor:
    """Convert reference audio to samples; malformed audio is a `BackendRefused`."""
    samples = samples_of(pcm, MALFORMED)
    if len(samples) > REFERENCE_MAX:
        given = len(samples)
        raise BackendRefused(f"reference audio has {given} samples, more than {REFERENCE_MAX}")
    return samples


def feed_blocks(
    slot: int, start: int, rows: Tensor, check: Callable[[], None] = lambda: None
) -> Steps[LlmOutput]:
    """Feed rows (T, width), at least one, in blocks, and `check` before each; the last's output."""
    for block in torch.split(rows, BLOCK):
        check()
        fed: LlmOutput = yield Feed(slot=slot, start=start, rows=block)
        start += len(block)
    return fed


def prefill(runner: ModelRunner, tokens: Tokens, opening: Opening, slot: int) -> Steps[Prefilled]:
    """Feed the prompt into an empty slot.

    `ContextFull`: the prompt does not fit; nothing was fed. `BackendError`: the reference audio is
    malformed, or the tools cannot be offered.
    """
    parts = runner.parts
    voice, embed, limit = opening.voice.llm_pcm, parts.embed, parts.config.context_limit
    _check_tools(opening, tokens)
    laid_out = _prompt(tokens, opening)
    pooled = len(voice) // SAMPLE_BYTES * parts.config.audio.embeddings // INPUT_RATE_HZ
    words = sum(len(part) for part in laid_out if part is not None)
    if words + pooled + (1 if voice else 3) > limit:
        raise ContextFull(f"the prompt does not fit {limit} tokens")
    if opening.tools and words + pooled > limit // TOOLS_SHARE:
        raise BackendRefused(f"tools: with them the prompt has {words + pooled} of {limit} tokens")
    runner.reserve(slot, words + pooled, is_new=True)
    rows, fed = [], list[int]()
    for part in laid_out:
        if part is None:
            embeddings = yield EncodeReference(pcm=_reference(voice))  # (10 a second, width)
            rows.append(embeddings)
            fed += [EMBEDDED] * len(embeddings)
        elif part:
            rows.append(embed(part))
            fed += part
    whole = torch.cat(rows)
    yield from feed_blocks(slot, 0, whole)
    suffix = laid_out[-1] or ()
    layout = Layout(prefix=len(whole) - len(suffix), suffix=suffix)
    return Prefilled(layout=layout, fed_ids=tuple(fed))


TOOLS_SHARE: Final = 4
"""With tools the prompt has at most one part of so many of the context."""


def _prompt(tokens: Tokens, opening: Opening) -> Sequence[tuple[int, ...] | None]:
    """The prompt's ids; None stands for the reference audio."""
    ids, has_voice = tokens.ids, bool(opening.voice.llm_pcm)
    if tokens.slots is not None:
        return tokens.slots.prompt(opening.instructions, opening.tools, has_voice=has_voice)
    head = (ids.im_start, *tokens.encode(f"system\n{opening.instructions}\n"))
    if has_voice:
        return [head, (ids.audio_start,), None, (ids.audio_end, ids.im_end)]
    return [head, (ids.im_end,)]


def _check_tools(opening: Opening, tokens: Tokens) -> None:
    if opening.tools and tokens.slots is None:
        raise BackendRefused("tools: this server's model has none")
    for tool in opening.tools:
        try:
            check_parameters(tool.parameters)
        except ValueError as error:
            raise BackendRefused(f"tools: {tool.name}: {error}") from error


# -- sliding windows ----------------------------------------------------------------------------

BASIC_HIGH: Final = 8000
BASIC_LOW: Final = 6000
CONTEXT_UNITS: Final = 24
PREVIOUS_TOKENS: Final = 500
EVENTS_SHARE: Final = 8
"""Part of a small context that is left for the events of a unit."""
GENERATED_MAX: Final = 19
"""Tokens that a unit may generate beyond those of one that listened."""
MARKER: Final = "\n\nprevious: "


def rotate(keys: Tensor, distance: int, frequencies: Tensor) -> Tensor:
    """Rotate keys (..., D) by a distance in positions; rotary frequencies are (D / 2,)."""
    angles = torch.cat((frequencies, frequencies)).float() * distance  # (D,)
    low, high = keys.float().chunk(2, dim=-1)
    turned = keys.float() * angles.cos() + torch.cat((-high, low), dim=-1) * angles.sin()
    return turned.to(keys)


def slid(layout: Layout, tokens: Tokens, window: SlidingWindow, limit: int) -> Layout:
    """The layout after a window was applied: the same one if nothing slides.

    `limit`: tokens of the context.
    """
    room = limit - max(span.length for span in layout.spans) - GENERATED_MAX
    if tokens.slots is not None:
        room -= tokens.slots.silent_max + min(EVENTS_MAX, limit // EVENTS_SHARE)
    if window == "basic":
        return _basic(layout, room)
    if window == "context":
        return _context(layout, room, tokens)
    return layout


def slide(
    runner: ModelRunner, tokens: Tokens, slot: int, state: SessionState, window: SlidingWindow
) -> Steps[SessionState]:
    """Apply a window after a unit was finalized; the layout must cover the whole slot."""
    layout = state.layout
    assert layout.length == state.length, (layout.length, state.length)
    after = slid(layout, tokens, window, runner.config.context_limit)
    if after is layout:
        return state
    yield from _move(runner, slot, layout, after)
    return state.but(layout=after, length=after.length)


def _basic(layout: Layout, room: int) -> Layout:
    if layout.length <= min(BASIC_HIGH, room):
        return layout
    spans = list(layout.spans)
    length = layout.length
    while spans and length > min(BASIC_LOW, room):
        length -= spans.pop(0).length
    return attrs.evolve(layout, spans=tuple(spans))


def _context(layout: Layout, room: int, tokens: Tokens) -> Layout:
    marker = tuple(tokens.encode(MARKER))
    while len(layout.spans) > CONTEXT_UNITS or (layout.spans and layout.length > room):
        text_ids, previous = layout.spans[0].text_ids, layout.previous
        if text_ids:
            content = (*previous[len(marker) :], *text_ids)[-PREVIOUS_TOKENS:]
            previous = (*marker, *content)
        layout = attrs.evolve(layout, previous=previous, spans=layout.spans[1:])
    return layout


def _move(runner: ModelRunner, slot: int, before: Layout, after: Layout) -> Steps[None]:
    """Make the slot hold `after`, whose units are the last ones of `before`."""
    store, parts = runner.llm, runner.parts
    new = after.prompt
    old = before.length - (after.length - new)
    kept = store.take(slot, old, before.length)
    if after.previous != before.previous:
        rows = parts.embed((*after.previous, *after.suffix))
        yield Feed(slot=slot, start=after.prefix, rows=rows)
    frequencies: Tensor = parts.llm.model.rotary_emb.inv_freq
    for keys in kept.keys:  # Layer by layer: all in float32 would take gigabytes.
        keys.copy_(rotate(keys, new - old, frequencies))
    store.put(slot, new, kept)
    store.wipe(slot, after.length)
