"""What a running session shows of itself."""

from __future__ import annotations

from collections.abc import Callable

from protocol.values.digest import session_id_of
from protocol.values.limits import NS_PER_S
from protocol.values.state import State

from ..telemetry.watching import SessionStatus
from .driver import Driver


def status_of(driver: Driver, kv_tokens: Callable[[str], int]) -> SessionStatus:
    """The session's status; `kv_tokens` gives tokens in the model's cache, by recording id."""
    session = driver.session
    counts = {} if session is None else session.counts
    return SessionStatus(
        recording_id=driver.recording_id,
        session_id=session_id_of(driver.recording_id),
        owner=driver.owner,
        mode=driver.mode,
        dialect=None if session is None else session.dialect_name,
        state=State.QUEUED if session is None else session.state,
        age_s=driver.now_ns() / NS_PER_S,
        units=counts.get("units", 0),
        chunks=counts.get("chunks", 0),
        dropped_units=counts.get("units_dropped", 0),
        kv_tokens=kv_tokens(driver.recording_id),
        connection="connected" if session is None else session.connection,
    )
