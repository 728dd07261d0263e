"""The state of one session as a value: a rollback keeps the old one.

Keys and values are in the slot (`KvSlots`); the state holds the valid length of each. Nothing after
a length is read, so an older state is valid while nothing before its lengths was overwritten. That
happens only where the audio encoder restarts; `overwritten` keeps the old content.
"""

from __future__ import annotations

from typing import Any

import attrs

from .attention import Kept
from .mel import MelCarry
from .vocoder import Voicing


@attrs.frozen(kw_only=True)
class Speech:
    """A turn's speech: positions in the speech decoder's slot, and the vocoder's input state.

    `is_complete`: no unit of the turn was left out, as a rebuild may do.
    """

    length: int = 0
    voicing: Voicing | None = None
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
        heard: units in the audio encoder's slot, 0 to 29.
        overwritten: the content that this unit overwrote there.
        history: decided ids, for the repetition penalty.
        said: text ids of the current or last unit.
    """

    layout: Layout
    length: int
    mel: MelCarry = attrs.field(factory=MelCarry.start)
    heard: int = 0
    overwritten: Kept | None = attrs.field(default=None, eq=False)
    history: tuple[int, ...] = ()
    turn_open: bool = False
    speech: Speech = Speech()
    said: tuple[int, ...] = ()

    def but(self, **changes: Any) -> SessionState:
        """Return the state with some attributes replaced."""
        return attrs.evolve(self, **changes)
