"""The state of one session as an explicit value: to go back is to keep the old one.

Keys and values lie in the slot (`KvSlots`); the state holds how much of each counts. What is behind
a length is never read, so an older state is whole as long as nothing before its lengths was
overwritten. That happens in one place, where the audio encoder starts over; `overwritten` keeps
what was there.
"""

from __future__ import annotations

from typing import Any

import attrs

from .attention import Kept
from .mel import MelCarry
from .vocoder import Voicing


@attrs.frozen(kw_only=True)
class Speech:
    """The speaking side of a turn; a turn that has not spoken has none of it.

    Attributes:
        length: positions in the speech decoder's slot.
        voicing: what the vocoder was handed; None before the turn's first codes.
    """

    length: int = 0
    voicing: Voicing | None = None


@attrs.frozen(kw_only=True)
class Span:
    """One finalized unit in the language model's slot.

    Attributes:
        length: tokens.
        text_ids: the text that it said.
    """

    length: int
    text_ids: tuple[int, ...] = ()


@attrs.frozen(kw_only=True)
class Layout:
    """How the language model's slot is laid out; the windows move things by it.

    Attributes:
        prefix: tokens of the prompt before its suffix.
        previous: ids of what older units said, marker included (window `context`).
        suffix: ids that close the prompt.
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
        mel: the front end's carry.
        heard: units in the audio encoder's slot, 0 to 29.
        overwritten: what this unit overwrote there.
        history: decided ids, for the repetition penalty.
        turn_open: the model has begun a turn and not ended it.
        speech: the turn's speaking side.
        said: text ids of the unit that runs or ran last.
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
        """The same state with some attributes replaced."""
        return attrs.evolve(self, **changes)
