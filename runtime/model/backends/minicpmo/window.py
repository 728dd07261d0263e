"""The sliding windows: what finalize drops from the language model's slot (model.md, "finalize").

`basic`: above 8000 tokens the oldest units are dropped until 6000 are left; the prompt stays.
`context`: above 24 units the oldest are dropped one by one; at most 500 tokens of their text move
into the prompt, after `previous: ` and before the prompt's suffix.

Both slide earlier if another unit as large as the largest so far would not fit. The remaining keys
move down, rotated by the distance: a key at position p was rotated by p.
"""

from __future__ import annotations

from typing import Final

import attrs
import torch
from torch import Tensor

from protocol.values.model import SlidingWindow

from .machine import Machine
from .state import Layout, SessionState
from .tokens import Tokens
from .work import Feed, Steps

BASIC_HIGH: Final = 8000
BASIC_LOW: Final = 6000
CONTEXT_UNITS: Final = 24
PREVIOUS_TOKENS: Final = 500
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
    if window == "basic":
        return _basic(layout, room)
    if window == "context":
        return _context(layout, room, tokens)
    return layout


def slide(
    machine: Machine, tokens: Tokens, slot: int, state: SessionState, window: SlidingWindow
) -> Steps[SessionState]:
    """Apply a window after a unit was finalized; the layout must cover the whole slot."""
    layout = state.layout
    assert layout.length == state.length, (layout.length, state.length)
    after = slid(layout, tokens, window, machine.config.context_limit)
    if after is layout:
        return state
    yield from _move(machine, slot, layout, after)
    return state.but(layout=after, length=after.length)


def _basic(layout: Layout, room: int) -> Layout:
    if layout.length <= min(BASIC_HIGH, room):
        return layout
    spans = list(layout.spans)
    length = layout.length
    while spans and length > BASIC_LOW:
        length -= spans.pop(0).length
    return attrs.evolve(layout, spans=tuple(spans))


def _context(layout: Layout, room: int, tokens: Tokens) -> Layout:
    marker = tuple(tokens.encode(MARKER))
    while len(layout.spans) > CONTEXT_UNITS or (layout.spans and layout.length > room):
        said, previous = layout.spans[0].text_ids, layout.previous
        if said:
            content = (*previous[len(marker) :], *said)[-PREVIOUS_TOKENS:]
            previous = (*marker, *content)
        layout = attrs.evolve(layout, previous=previous, spans=layout.spans[1:])
    return layout


def _move(machine: Machine, slot: int, before: Layout, after: Layout) -> Steps[None]:
    """Make the slot hold `after`, whose units are the last ones of `before`."""
    store, parts = machine.llm, machine.parts
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
