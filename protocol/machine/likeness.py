"""Reads a session's appends by the templates of earlier ones (`wire.template`).

What it remembers is not the same in a replay, which sees no frame before its step, and need not be:
a template reads what parsing reads.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from ..values.modes import OF_MODE
from ..values.requests import Append, AppendSound, ClientMessage, Request
from ..values.state import ACCEPT, Gate, judge
from ..values.utf8 import Frame
from ..wire.dialects.base import Context, Dialect, Json
from ..wire.template import Alike, Template
from .resuming import Resuming

LESSONS: Final = 8
"""Appends of which a template is made; each one that a template reads gives one back. A client
whose appends all differ soon has them parsed, and no more."""
TEMPLATES: Final = 2
"""Kept of a session: one piece of a second may be other than the rest."""


class Likeness:
    """The templates of a session's appends, if they are alike."""

    def __init__(self, core: Resuming) -> None:
        self._core: Final = core
        self._templates: deque[Template] = deque(maxlen=TEMPLATES)
        self._made_in: tuple[Dialect, Context] | None = None
        self._lessons = LESSONS
        self._ahead: tuple[Frame, Alike] | None = None

    def learn(self, frame: Frame, body: Json, message: ClientMessage, context: Context) -> None:
        """Make the template of appends like one that had to be parsed."""
        if not (isinstance(message, Append | AppendSound) and isinstance(frame, str)):
            return
        dialect = self._core.dialect
        if self._made_in != (dialect, context):
            self._made_in, self._lessons = (dialect, context), LESSONS
            self._templates.clear()
        table = dialect.table(Request.APPEND, type(message))
        if table is None or not self._lessons:
            return
        self._lessons -= 1
        template = Template.of(frame, body, message, table, context)
        known = [it.literals for it in self._templates]
        if template is not None and template.literals not in known:
            self._templates.append(template)

    def read(
        self, gate: Gate, frame: Frame, context: Context, *, ahead: bool = False
    ) -> Alike | None:
        """Read a frame like an earlier append; None: it is to be parsed.

        `ahead`: it is read before its step, and remembered for that.
        """
        kept, self._ahead = self._ahead, None
        if (
            not isinstance(frame, str)
            or self._made_in != (self._core.dialect, context)
            or judge(gate, Request.APPEND) != ACCEPT
            or len(frame) > OF_MODE[self._core.opened.mode].frame_bytes_max
        ):
            return None
        if kept is not None and kept[0] is frame:
            self._ahead = kept if ahead else None
            return kept[1]
        for template in self._templates:
            alike = template.read(frame)
            if alike is not None:
                self._lessons = min(self._lessons + 1, LESSONS)
                self._ahead = (frame, alike) if ahead else None
                return alike
        return None

    def forget_ahead(self) -> None:
        """Forget a frame that was read before its step."""
        self._ahead = None
