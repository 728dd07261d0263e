"""What `legacy-duplex` and `legacy-chat` have in common: queue events and errors (002, 004).

Their event types have no `session.` before them, and an error's text stands at its top with the
code beside it, an addition.
"""

from __future__ import annotations

from typing import Final

from ...values.errors import ErrorCode
from ...values.messages import ErrorReport, Queued, QueueDone, QueueUpdate
from ..field import Field
from ..kinds import TEXT, choice
from ..table import Row, Table
from . import shared

ERROR: Final = {"type": "error"}
ERROR_TEXT: Final = Field("error", TEXT, attr="message")
QUEUE: Final = (
    Table(Queued, *shared.PLACE, tag={"type": "queued"}),
    Table(QueueUpdate, *shared.PLACE, tag={"type": "queue_update"}),
    Table(QueueDone, tag={"type": "queue_done"}),
)
COMMON: Final = (
    *QUEUE,
    Table(
        ErrorReport,
        ERROR_TEXT,
        Field("code", choice(shared.ERROR_CODES), ErrorCode.INFERENCE_ERROR),
        shared.NAMED,
        tag=ERROR,
    ),
)
"""An error without a code is another server's, and its failure."""


def faults(cls: type, text: Field, code: Field) -> Table:
    """Make the table of an end that is told as an error."""
    session_id = Field("session_id", TEXT, "", attr="named", omit=True)
    rows: tuple[Row, ...] = (text, code, session_id)
    return Table(cls, *rows, tag=ERROR)
