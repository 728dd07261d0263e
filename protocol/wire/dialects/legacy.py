"""The common part of `legacy-duplex` and `legacy-chat`: queue events and errors (002, 004).

Their event types have no `session.` prefix. An error has its text at the top level, and `code` as
our addition.
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
"""An error without a code comes from another server, and counts as its failure."""


def faults(cls: type, text: Field, code: Field) -> Table:
    """Make the table of an end that is sent as an error."""
    session_id = Field("session_id", TEXT, "", attr="named", omit=True)
    rows: tuple[Row, ...] = (text, code, session_id)
    return Table(cls, *rows, tag=ERROR)
