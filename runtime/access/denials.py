"""The gate's denials: counted by reason, and logged at a bounded rate.

- A log line names the client's address, its request and, if known, its key's name; never a key, and
  of the client's own text only a page's origin.
- A refused page is a warning with the flag that would allow it: browsers hide the reason from the
  page, so only the operator can see it.
- After `LINES_MAX` lines in a window, denials are only counted; the next window's first line says
  how many lines were left out.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Literal

Reason = Literal["host", "origin", "no_key", "wrong_key", "mode", "scope"]
"""The server's name in `Host`, the page, no key, a wrong key or several; or a valid key without
that mode or without the scope admin. A label of a metric."""

LINES_MAX: Final = 30
"""Lines in a window: enough to identify a client, and for log alerts."""
WINDOW_S: Final = 60.0

_LOG: Final = logging.getLogger("antiphon.access")


class Denials:
    """The denials of one server; `clock` gives seconds and never goes back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: Counter[Reason] = Counter()
        self._window_s = -WINDOW_S
        self._lines = 0

    @property
    def counts(self) -> Mapping[Reason, int]:
        """Denials by reason; a reason that never occurred is absent."""
        return MappingProxyType(dict(self._counts))

    def note(
        self, reason: Reason, *, peer: str, asked: str, name: str = "", flag: str = ""
    ) -> None:
        """Count a denial, and log it if there is room.

        `asked` is `WebSocket` or `HTTP`, `name` that of a valid key or empty, `flag` the server's
        flag that would allow it, or empty.
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
