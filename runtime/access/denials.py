"""What the gate denied: counted by reason, and told in the server's log at a bounded rate.

- A reason is one of a few words, so that it can be a label of a metric.
- A line names the client's address, what it asked for and, where that is known, the name of its
  key. Never a key, nor anything else in the client's own words, but for a page's origin.
- A page that is refused is a warning, with the flag that would welcome it: a browser hides the
  reason from the page, so the operator is the only one to learn it.
- Whoever knocks all day fills no disk: what is beyond `LINES_MAX` in a window is counted alone, and
  the window's successor says how many lines were left out.

It belongs to one event loop and takes its clock from outside.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Literal

Reason = Literal["host", "origin", "no_key", "wrong_key", "mode", "scope"]
"""Why: the name that the server was called by, the page, no key, a wrong one or two at once; or a
good key that is not for that mode, or not an admin's."""

LINES_MAX: Final = 30
"""In a window: enough to see who it is, and to be acted on by what watches logs."""
WINDOW_S: Final = 60.0

_LOG: Final = logging.getLogger("antiphon.access")


class Denials:
    """The denials of one server, from zero.

    Args:
        clock: seconds, of a clock that does not go back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: Counter[Reason] = Counter()
        self._window_s = -WINDOW_S
        self._lines = 0

    @property
    def counts(self) -> Mapping[Reason, int]:
        """How many there were, by reason; what never happened is not among them."""
        return MappingProxyType(dict(self._counts))

    def note(
        self, reason: Reason, *, peer: str, asked: str, name: str = "", flag: str = ""
    ) -> None:
        """Count one, and tell it if there is room.

        Args:
            reason: why.
            peer: the client's address.
            asked: `WebSocket`, or `HTTP`.
            name: of its key; empty where it had no good one.
            flag: that would have let it in; empty where none would.
        """
        self._counts[reason] += 1
        if self._clock() - self._window_s >= WINDOW_S:
            if self._lines > LINES_MAX:
                _LOG.info("%d denials more were not told", self._lines - LINES_MAX)
            self._window_s, self._lines = self._clock(), 0
        self._lines += 1
        if self._lines <= LINES_MAX:
            key = f" (key {name})" if name else ""
            told = f"{reason}; {flag} would allow it" if flag else reason
            level = logging.WARNING if reason == "origin" else logging.INFO
            _LOG.log(level, "denied %s to %s%s: %s", asked, peer, key, told)
