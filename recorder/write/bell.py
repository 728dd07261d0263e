"""Waking tasks of an asyncio or trio event loop from a thread.

Rules: ringing never blocks and never fails, also when the loop has ended. Calls rung before the
loop has run the last ones share its wake-up. A loop is identified by AnyIO's token, so neither
backend is imported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Protocol, cast

from anyio.lowlevel import current_token

Call = Callable[[], object]


class _Trio(Protocol):
    def run_sync_soon(self, call: Call) -> None: ...


class _Asyncio(Protocol):
    def call_soon_threadsafe(self, call: Call) -> object: ...


class Bell:
    """Runs calls in one event loop, from any thread."""

    def __init__(self, native_token: object) -> None:
        """`native_token` is a `TrioToken` or an asyncio loop, from AnyIO's `current_token`."""
        self._schedule: Callable[[Call], object]
        if hasattr(native_token, "run_sync_soon"):
            self._schedule = cast("_Trio", native_token).run_sync_soon
        else:
            self._schedule = cast("_Asyncio", native_token).call_soon_threadsafe
        self._lock = threading.Lock()
        self._calls: list[Call] = []

    def ring(self, calls: Iterable[Call]) -> None:
        """Have the loop run `calls` soon and in order; they must not raise."""
        with self._lock:
            is_scheduled = bool(self._calls)
            self._calls += calls
            if is_scheduled or not self._calls:
                return
        try:
            self._schedule(self._run)
        except RuntimeError:  # the loop has ended, on either backend
            with self._lock:
                self._calls.clear()

    def _run(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        for call in calls:
            call()


class Bells:
    """One bell for each event loop that was seen: one in a server, one per test elsewhere."""

    def __init__(self) -> None:
        self._bells: dict[object, Bell] = {}

    def here(self) -> Bell | None:
        """Return the bell of the running loop, or None outside of one."""
        try:
            token = current_token().native_token
        except RuntimeError:  # AnyIO's error is a subclass
            return None
        bell = self._bells.get(token)
        if bell is None:
            bell = self._bells[token] = Bell(token)
        return bell
