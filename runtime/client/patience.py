"""Which failures may pass, and how long to wait before another attempt."""

from __future__ import annotations

from typing import Final

from .errors import (
    CannotConnectError,
    ClientError,
    HandshakeRejectedError,
    SessionClosedError,
    SessionRefusedError,
)

RETRIES: Final = 4
"""With the waits below some five seconds: a server with a small model has restarted."""
RETRIES_MAX: Final = 100
"""With `BACKOFF_S_MAX` most of an hour; more is for a service manager."""
BACKOFF_S: Final = 0.5
"""Longer than a lost packet, shorter than a person notices."""
BACKOFF_S_MAX: Final = 30.0
"""A server that is gone for long is tried twice a minute."""
PASSING_CLOSE_CODES: Final = frozenset({1001, 1006, 1011, 1012, 1013, 1014})
"""Going away, lost, failed, restarting, full, and a gateway without its server (RFC 6455, 7.4)."""
PASSING_STATUSES: Final = frozenset({429, 502, 503, 504})
"""Too many requests, and a gateway or server that is not up yet (RFC 9110, 15.6)."""


def may_pass(error: ClientError) -> bool:
    """Whether an attempt that failed like this could succeed later."""
    match error:
        case CannotConnectError():
            return error.may_pass
        case HandshakeRejectedError():
            return error.status in PASSING_STATUSES
        case SessionClosedError():
            return error.code in PASSING_CLOSE_CODES
    return isinstance(error, SessionRefusedError)


def backoff_s(attempt: int, chance: float) -> float:
    """The wait after `attempt` (from 0) in seconds, less up to a half by `chance` in [0, 1)."""
    return float(min(BACKOFF_S * 2**attempt, BACKOFF_S_MAX) * (1 - chance / 2))
