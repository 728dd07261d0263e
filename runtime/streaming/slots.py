"""The slots of a model for requests with streaming input: queued for like those of sessions.

Where a server runs on the same workers, its admission is the one queue for both, so that a request
overtakes no session, nor a session a request.
"""

from __future__ import annotations

from itertools import count

import anyio

from protocol.errors import ErrorCode
from protocol.limits import NS_PER_S
from protocol.messages import Mode

from ..admission import Admission, Refused
from ..backends.base import Backend, BackendRefused
from ..pool import Lease
from ..workers import Workers


def _now_ns() -> int:
    return int(anyio.current_time() * NS_PER_S)


class Slots:
    """The slots of some workers.

    Args:
        workers: the model.
        admission: the queue for its slots; None makes one, and nobody else may lease them then.
        mode: as what requests count where waits are estimated.
    """

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
        """Wait for a slot; who is cancelled holds none.

        Raises:
            Refused: there is no slot and no place in the queue, or no slot will come any more.
            BackendRefused: an operator took the request out of the queue.
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

    def backend_of(self, lease: Lease) -> Backend:
        """The backend that a lease is for."""
        return self.workers.backend_of(lease)

    def give_back(self, lease: Lease, *, condemned: bool = False) -> None:
        """Give a slot back, clean; `condemned`, its worker hangs or is lost."""
        self._admission.release(lease, condemned=condemned)
