"""A model's slots for streaming requests, queued for as sessions do.

A server's admission on the same workers is the one queue, so neither kind overtakes the other.
"""

from __future__ import annotations

from itertools import count

import anyio

from protocol.values.errors import ErrorCode
from protocol.values.limits import NS_PER_S
from protocol.values.modes import Mode

from ..model.backends.base import BackendRefused
from ..slots.admission import Admission, Refused
from ..slots.pool import Lease
from ..slots.workers import Workers


def _now_ns() -> int:
    return int(anyio.current_time() * NS_PER_S)


class Slots:
    """The slots of some workers; without an `admission` it makes its own, their only user."""

    def __init__(self, workers: Workers, admission: Admission | None, mode: Mode) -> None:
        numbers = count()
        self.workers, self._mode = workers, mode
        self._admission = admission or Admission(
            workers.pool,
            clock_ns=_now_ns,
            new_ticket_id=lambda: f"ticket_{next(numbers):012x}",
            more_to_come=lambda: workers.more_to_come,
        )

    async def lease(self) -> Lease:
        """Wait for a slot; a cancelled wait holds none.

        `Refused`: there is no slot and no place in the queue, or no slot will come any more;
        `BackendRefused`: an operator removed the request from the queue.
        """
        told = anyio.Event()
        leases, errors = list[Lease](), list[Exception]()

        def leased(lease: Lease) -> None:
            leases.append(lease)
            told.set()

        def refused(code: ErrorCode) -> None:
            errors.append(Refused(code))
            told.set()

        def cancelled() -> None:
            errors.append(BackendRefused("an operator took the request out of the queue"))
            told.set()

        ticket = self._admission.enter(
            self._mode,
            on_leased=leased,
            on_moved=lambda _: None,
            on_cancelled=cancelled,
            on_refused=refused,
        )
        try:
            await told.wait()
        except BaseException:
            self._admission.leave(ticket)
            for lease in leases:
                self.give_back(lease)
            raise
        for error in errors:
            raise error
        return leases[0]

    def give_back(self, lease: Lease, *, condemned: bool = False) -> None:
        """Free a clean slot; `condemned`: its worker hangs or is lost."""
        self._admission.release(lease, condemned=condemned)
