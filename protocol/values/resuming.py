"""Messages by which a client comes back to its session; they belong to no dialect."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class ComeBack:
    """Go on with a session on a new connection; its first message.

    Attributes:
        token: the last one that the session gave.
        last_seq: the number of the last frame that the client has; -1 for none.
    """

    token: str
    last_seq: int = -1


@attrs.frozen(kw_only=True)
class Resumable:
    """Where the session stands, and how its client comes back; the first frame of a connection.

    Attributes:
        recording_id: names the session in the address of a connection that comes back to it.
        token: the right to come back, once; empty: the session cannot be resumed any more.
        grace_s: seconds without a connection for which the slot is kept.
        expires_in_s: seconds without a connection after which the session ends.
        next_seq: the number of the frame that follows.
        ack: messages of the client that the session has.
    """

    recording_id: str
    token: str
    grace_s: int = 0
    expires_in_s: int = 0
    next_seq: int = 0
    ack: int = 0


@attrs.frozen(kw_only=True)
class Replaced:
    """The client came back on another connection; this one is closed."""
