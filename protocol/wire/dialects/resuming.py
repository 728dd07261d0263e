"""The messages by which a client comes back to its session, the same in every dialect.

They belong to no dialect, as `seq` and `ack` do not: only a connection whose address asks for a
session that can be resumed has them.
"""

from __future__ import annotations

from typing import Final

from ...values.resuming import ComeBack, Replaced, Resumable
from ..field import Field
from ..kinds import INTEGER, TEXT, integer, text
from ..table import Table

SESSION_RESUMABLE: Final = "session.resumable"
SESSION_RESUME: Final = "session.resume"
SESSION_REPLACED: Final = "session.replaced"
TOKEN_CHARS_MAX: Final = 64
"""32 random bytes in base64 have 43 characters."""

RESUMABLE: Final = Table(
    Resumable,
    Field("recording_id", TEXT, ""),
    Field("token", TEXT, ""),
    Field("grace_s", INTEGER, 0),
    Field("expires_in_s", INTEGER, 0),
    Field("next_seq", INTEGER, 0),
    Field("ack", INTEGER, 0),
    tag={"type": SESSION_RESUMABLE},
)
UNRESUMABLE: Final = Table(
    Resumable, Field("token", TEXT, ""), tag={"type": SESSION_RESUMABLE}, lacks={"recording_id": ""}
)
"""The same later on: the session cannot be resumed any more."""
REPLACED: Final = Table(Replaced, tag={"type": SESSION_REPLACED})
RESUME: Final = Table(
    ComeBack,
    Field("token", text(TOKEN_CHARS_MAX, 1)),
    Field("last_seq", integer(-1), -1),
    tag={"type": SESSION_RESUME},
)


def numbered(frame: str, *, seq: int, ack: int) -> str:
    """Put the numbers into a frame, which is a JSON object with a field or more."""
    return f'{frame[:-1]},"seq":{seq},"ack":{ack}}}'
