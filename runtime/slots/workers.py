"""The workers of a server: interchangeable backends, and a replacement for each condemned one.

    worker condemned -> its leases come back, or replace_wait_s -> load -> a new worker in its place

- A worker is one backend with its slots. A session keeps one from lease to release; workers must
  agree on all that sessions are told.
- A condemned worker leases no more slots (B4); its other sessions go on. Its backend is dropped
  once its leases are back, and closed if it is `Closes`. No thread that hangs in it can be ended.
- A backend that is lost while no call is in flight (`Mortal`) is condemned at once.
- A replacement is loaded once the old worker has no sessions, because memory may not hold both, or
  after `replace_wait_s`; again and again, with a growing pause. For `HOPE_S` sessions may wait for
  it; after that they are refused until it is there.
- A device lost to this process comes back only in another process: if no other worker serves,
  `on_hopeless` is called, and the server ends.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final

import anyio
import attrs
from anyio.abc import TaskGroup

from protocol.values.errors import LocalProtocolError

from ..model.backends.base import (
    Backend,
    BackendGone,
    BackendInfo,
    Closes,
    DeviceLost,
    Mortal,
    Remote,
)
from .pool import Lease, Pool

REPLACE_SPARE_S: Final = 10.0
"""Sessions that hang with the condemning call end within the waits of cleanup and release; one that
is still there after this is served, and may stay long."""
REPLACE_WAIT_S: Final = 20.0 + REPLACE_SPARE_S
"""Those waits are 10 s each by default."""
REBUILDS_MAX: Final = 2
"""Rebuilds at once on a worker: each that is done sets a session free, and live units go first."""
CLOSE_WAIT_S: Final = 10.0
"""A backend that takes longer to close hangs."""
RETRY_S: Final = 1.0
"""Before the second try of loading; it doubles with each."""
RETRY_S_MAX: Final = 60.0
"""Loading a large model over and over costs other processes disk and memory."""
STEADY_S: Final = 60.0
"""A worker that served so long was sound: its replacement is loaded without a pause."""
HOPE_S: Final = 120.0
"""Longer than a large model takes to load, shorter than a client waits in vain."""
DIFFERENCES_TOLD: Final = 3
"""Another model differs in everything: a few differences are enough."""
INSTANCE: Final = "instance"
"""The fingerprint entry that names one backend; it may differ between workers."""

Load = Callable[[int], Awaitable[Backend]]
"""Loads the backend of a place, 0 to the number of workers - 1; raises its errors."""

_AGREED: Final = (
    "modes",
    "context_limit",
    "sliding_windows",
    "can_rollback",
    "can_rebuild",
    "deterministic",
    "fingerprint",
)
_logger = logging.getLogger("antiphon.workers")


class WorkersDifferError(ValueError):
    """A worker cannot stand in for another; the text names the differences."""


@attrs.frozen(kw_only=True)
class WorkersStatistics:
    """The number of workers, those condemned and not replaced yet, and totals so far."""

    workers: int
    condemned: int
    replaced: int
    failures: int


@attrs.define(eq=False)
class _Place:
    """A worker's place, which its replacement takes.

    Attributes:
        since_s: when its worker came, on the event loop's clock.
        tries: replacements tried since a worker last served long.
        is_attended: a task replaces it.
        is_given_up: sessions do not wait for a replacement any more.
        is_drained: its worker is not replaced.
    """

    index: int
    worker: int
    since_s: float = -math.inf
    tries: int = 0
    is_attended: bool = False
    is_given_up: bool = False
    is_drained: bool = False


class Workers:
    """The backends of a server and their slots, which only `Admission` leases from `pool`.

    Args:
        backends: one for each place, at least one, loaded.
        load: loads another for a place; None replaces none.
        replace_wait_s: the wait for a condemned worker's sessions: memory may not hold two models.

    `LocalProtocolError`: `backends` is empty; `WorkersDifferError`: two of them cannot stand in for
    each other.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        *,
        load: Load | None = None,
        replace_wait_s: float = REPLACE_WAIT_S,
    ) -> None:
        if not backends:
            raise LocalProtocolError("a server needs at least 1 worker, not 0")
        self._first = backends[0].info
        for index, backend in enumerate(backends):
            _check_agreement(self._first, backend.info, index)
        self._load = load
        self._replace_wait_s = replace_wait_s
        self._is_running = False
        self._replaced = self._failures = 0
        self._stirred = anyio.Event()
        self.pool = Pool(
            *(backend.info.slots for backend in backends), on_withheld=self._slot_withheld
        )
        self._backends = dict(enumerate(backends))
        self._rebuilds: dict[int, anyio.Semaphore] = {}
        self._revokes: dict[Lease, Callable[[], None]] = {}
        self._places = [_Place(index, index) for index in range(len(backends))]

    @property
    def info(self) -> BackendInfo:
        """The workers as one backend: all their slots, and the values on which they agree."""
        backends = self._backends.values()
        return attrs.evolve(
            self._first,
            slots=self.pool.counts.slots,
            fingerprint=_shared(self._first),
            speaks=all(backend.info.speaks for backend in backends),
        )

    @property
    def can_replace(self) -> bool:
        """Whether condemned workers are replaced."""
        return self._load is not None and self._is_running

    @property
    def more_to_come(self) -> bool:
        """Whether sessions may wait for a replacement."""
        coming = (place for place in self._condemned() if not place.is_drained)
        return self.can_replace and any(not place.is_given_up for place in coming)

    @property
    def statistics(self) -> WorkersStatistics:
        """The counts so far."""
        return WorkersStatistics(
            workers=len(self._places),
            condemned=len(list(self._condemned())),
            replaced=self._replaced,
            failures=self._failures,
        )

    @property
    def any_backend(self) -> Backend:
        """Any of the backends, for values on which all agree; `BackendGone` if none is there."""
        for backend in self._backends.values():
            return backend
        raise BackendGone("no worker is there")

    def backend_of(self, lease: Lease) -> Backend:
        """The backend of a lease that is out."""
        return self._backends[lease.worker]

    def hold(self, lease: Lease, on_revoked: Callable[[], None]) -> None:
        """Have `on_revoked` called if the lease's worker is drained or lost, until `let_go`."""
        self._revokes[lease] = on_revoked
        if self._place_of(lease.worker).is_drained:
            on_revoked()

    def let_go(self, lease: Lease) -> None:
        """Forget a lease that ends."""
        self._revokes.pop(lease, None)

    def drain(self, worker: int) -> None:
        """Lease no more slots of a worker, have its sessions move, and close it when they left.

        `LocalProtocolError`: there is no such worker, or no other that serves.
        """
        place = self._place_of(worker)
        if all(other is place or self.pool.is_condemned(other.worker) for other in self._places):
            raise LocalProtocolError(f"worker {worker} is the only one that serves")
        if not place.is_drained:
            place.is_drained = True
            self._withdraw(worker)

    def _withdraw(self, worker: int) -> None:
        """Lease no more slots of a worker, and have sessions without a call in flight move."""
        self.pool.condemn(worker)
        for lease, on_revoked in tuple(self._revokes.items()):
            if lease.worker == worker:
                on_revoked()

    def _place_of(self, worker: int) -> _Place:
        for place in self._places:
            if place.worker == worker:
                return place
        raise LocalProtocolError(f"there is no worker {worker}")

    def rebuilds_of(self, lease: Lease) -> anyio.Semaphore:
        """Admits a few rebuilds at once on the lease's worker."""
        return self._rebuilds.setdefault(lease.worker, anyio.Semaphore(REBUILDS_MAX))

    async def run(
        self,
        on_changed: Callable[[], None],
        on_hopeless: Callable[[DeviceLost], None] = lambda _: None,
    ) -> None:
        """Replace condemned workers until cancelled.

        `on_changed` is called when a worker came or was given up (`Admission.review`),
        `on_hopeless` when no worker is left and this process cannot have another.
        """
        self._is_running = True
        try:
            async with anyio.create_task_group() as tasks:
                for worker in self._backends:
                    tasks.start_soon(self._watch, worker)
                while True:
                    stirred = self._stirred
                    for place in self._condemned():
                        if place.is_attended:
                            continue
                        if place.is_drained:
                            place.is_attended = True
                            tasks.start_soon(self._see_off, place)
                        elif self.can_replace:
                            place.is_attended = True
                            tasks.start_soon(self._attend, place, tasks, on_changed, on_hopeless)
                    await stirred.wait()
        finally:
            self._is_running = False

    # -- inside ---------------------------------------------------------------------------------

    def _condemned(self) -> Iterator[_Place]:
        return (place for place in self._places if self.pool.is_condemned(place.worker))

    def _slot_withheld(self) -> None:
        stirred, self._stirred = self._stirred, anyio.Event()
        stirred.set()

    async def _watch(self, worker: int) -> None:
        """Condemn a worker when its backend is lost, whether a session uses it or not."""
        backend = self._backends[worker]
        if isinstance(backend, Mortal):
            await backend.wait_gone()
            self._withdraw(worker)

    async def _attend(
        self,
        place: _Place,
        tasks: TaskGroup,
        on_changed: Callable[[], None],
        on_hopeless: Callable[[DeviceLost], None],
    ) -> None:
        _logger.error("worker %d is condemned and will be replaced", place.worker)
        if anyio.current_time() - place.since_s >= STEADY_S:
            place.tries = 0
        async with anyio.create_task_group() as hoping:
            hoping.start_soon(self._lose_hope, place, on_changed)
            retired = anyio.Event()
            tasks.start_soon(self._retire, place.worker, retired)
            with anyio.move_on_after(self._replace_wait_s):
                await retired.wait()
            backend = await self._keep_loading(place, on_hopeless)
            hoping.cancel_scope.cancel()
        self.pool.remove(place.worker)
        place.worker = self.pool.add(backend.info.slots)
        self._backends[place.worker] = backend
        tasks.start_soon(self._watch, place.worker)
        place.since_s = anyio.current_time()
        place.is_attended = place.is_given_up = False
        self._replaced += 1
        _logger.warning("worker %d takes the place of the one condemned", place.worker)
        on_changed()

    async def _see_off(self, place: _Place) -> None:
        await self._retire(place.worker, anyio.Event())
        self.pool.remove(place.worker)
        self._places.remove(place)
        _logger.warning("worker %d is drained and closed", place.worker)

    async def _lose_hope(self, place: _Place, on_changed: Callable[[], None]) -> None:
        await anyio.sleep(HOPE_S)
        _logger.error("no worker in place of %d after %g s", place.worker, HOPE_S)
        place.is_given_up = True
        on_changed()

    async def _retire(self, worker: int, retired: anyio.Event) -> None:
        """Close a condemned worker's backend once its leases are back."""
        while self.pool.leases_of(worker):
            stirred = self._stirred
            await stirred.wait()
        self._rebuilds.pop(worker, None)
        await _close(self._backends.pop(worker))
        retired.set()

    async def _keep_loading(
        self, place: _Place, on_hopeless: Callable[[DeviceLost], None]
    ) -> Backend:
        while True:
            pause_s = RETRY_S * 2.0 ** min(place.tries - 1, 16) if place.tries else 0.0
            await anyio.sleep(min(pause_s, RETRY_S_MAX))
            place.tries += 1
            try:
                return await self._load_for(place)
            except Exception as error:
                self._failures += 1
                text = str(error) or type(error).__name__
                _logger.error("worker %d cannot be replaced yet: %s", place.worker, text)
                is_last = len(list(self._condemned())) == len(self._places)
                if isinstance(error, DeviceLost) and is_last:
                    on_hopeless(error)
                    await anyio.sleep_forever()

    async def _load_for(self, place: _Place) -> Backend:
        """Load a backend and check that it serves; if not, it is closed; raises any error."""
        assert self._load is not None
        backend = await self._load(place.index)
        try:
            if isinstance(backend, Remote):
                await backend.check()
            _check_agreement(self._first, backend.info, place.index)
        except Exception:
            await _close(backend)
            raise
        return backend


async def _close(backend: Backend) -> None:
    """Close a condemned backend; it may hang or fail."""
    if not isinstance(backend, Closes):
        return
    try:
        with anyio.move_on_after(CLOSE_WAIT_S):
            await backend.aclose()
    except Exception:
        _logger.exception("a backend that was given up could not be closed")


def _shared(info: BackendInfo) -> dict[str, str]:
    """A fingerprint without the entry that names the instance."""
    return {name: value for name, value in info.fingerprint.items() if name != INSTANCE}


def _check_agreement(first: BackendInfo, other: BackendInfo, index: int) -> None:
    """Raise `WorkersDifferError` if a worker does not agree with the first."""
    differences = []
    for name in _AGREED:
        if name == "fingerprint":
            ours, theirs = _shared(first), _shared(other)
            differences += [
                f"fingerprint {entry} is {theirs.get(entry)}, not {ours.get(entry)}"
                for entry in sorted(ours | theirs)
                if ours.get(entry) != theirs.get(entry)
            ]
        elif getattr(first, name) != getattr(other, name):
            differences.append(f"{name} is {getattr(other, name)}, not {getattr(first, name)}")
    if differences:
        told = "; ".join(differences[:DIFFERENCES_TOLD])
        if len(differences) > DIFFERENCES_TOLD:
            told += f"; and {len(differences) - DIFFERENCES_TOLD} more"
        raise WorkersDifferError(f"worker {index} cannot stand in for worker 0: {told}")
