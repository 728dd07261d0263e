"""When sound is due that is streamed in, be it live or all at once.

Sound is due a second after it came. What comes faster than it lasts, as a file does, is due as if
it had come at its own pace: so whoever sends an hour at once is answered as fast as the machine
can, and is ahead of nobody who talks.
"""

from __future__ import annotations

import math
from typing import Final

import attrs

DUE_S: Final = 1.0
"""Sound is due when the next second of it has come."""


@attrs.define
class Pace:
    """The pace of one stream of sound.

    Attributes:
        came_s: when its last chunk came, or would have come at the sound's own pace.
    """

    came_s: float = -math.inf

    def due_s(self, came_s: float, sound_s: float) -> float:
        """Take the next chunk.

        Args:
            came_s: when it came, on any clock.
            sound_s: how long its sound is.

        Returns:
            When it is due, on the same clock.
        """
        self.came_s = max(came_s, self.came_s + sound_s)
        return self.came_s + DUE_S
