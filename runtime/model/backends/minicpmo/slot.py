"""What a chat turn and a streaming request share: their slot, their cut, and their end.

`interrupt` may come from any thread. After a failure the slot is empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Literal

from ..base import BackendError
from .machine import Machine
from .tokens import Tokens

Phase = Literal["new", "measured", "ready", "ran", "open", "failed", "released"]


@contextmanager
def failing(what: str) -> Iterator[None]:
    """Make any other exception a `BackendError` that says what failed."""
    try:
        yield
    except BackendError:
        raise
    except Exception as error:
        raise BackendError(f"{what} failed: {error}") from error


class InSlot:
    """What computes in one slot, which must be empty; its generators never overlap."""

    kind: ClassVar[str]

    def __init__(self, machine: Machine, tokens: Tokens, slot: int, phase: Phase) -> None:
        self._machine, self._tokens, self._slot = machine, tokens, slot
        self._phase: Phase = phase
        self._is_interrupted = False

    def interrupt(self) -> None:
        """Cut it for good at its next step, begun or not; safe from any thread."""
        self._is_interrupted = True

    def release(self) -> None:
        """Wipe the slot; idempotent, and any other call fails afterwards."""
        if self._phase not in ("failed", "released"):
            self._machine.clear(self._slot)
        self._phase = "released"

    @contextmanager
    def _wiped_on_failure(self, what: str) -> Iterator[None]:
        """As `failing`, and the slot is empty then."""
        with failing(what):
            try:
                yield
            except Exception:
                self.release()
                self._phase = "failed"
                raise

    def _require_uncut(self) -> None:
        if self._is_interrupted:
            raise BackendError(f"the {self.kind} was cut")

    def _require(self, phase: Phase) -> None:
        if self._phase != phase:
            raise BackendError(f"call out of order: the {self.kind} is {self._phase}, not {phase}")
