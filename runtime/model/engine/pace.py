"""Deadlines of streamed sound, live or all at once.

Sound is due a second after it came. Sound that comes faster than real time, such as a file, is due
as if it had come in real time: it is answered as fast as possible, but after live clients.
"""

from __future__ import annotations

import math
from typing import Final

import attrs

DUE_S: Final = 1.0
"""Sound is due when its next second has come."""


@attrs.define
class Pace:
    """The pace of one stream; `came_s` is when its last chunk came, or was due in real time."""

    came_s: float = -math.inf

    def due_s(self, came_s: float, sound_s: float) -> float:
        """Take a chunk of `sound_s` seconds that came at `came_s`; return its deadline in s."""
        self.came_s = max(came_s, self.came_s + sound_s)
        return self.came_s + DUE_S
