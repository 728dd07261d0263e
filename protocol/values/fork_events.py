"""The event from which a session goes on that began with a copy of another's past."""

from __future__ import annotations

import attrs

from .session_limits import SessionLimits


@attrs.frozen(kw_only=True)
class Forked:
    """From here on the session is a new one; all before it was copied from another's recording.

    It has another client, no slot yet, and these values in place of those of its first event.

    Attributes:
        limits: of its own server.
        resume_hash, recording_notice: as in `ConnectionOpened`.
    """

    at_ns: int
    limits: SessionLimits
    resume_hash: str = ""
    recording_notice: str = ""
