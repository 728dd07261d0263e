"""The workers of a server: interchangeable backends, and a new one for each that is condemned.

A worker is one backend with its slots. A session runs on one of them from its lease to its release
and is told the same whichever it is; so workers must agree on all that sessions are told.

    worker condemned -> its leases come back, or replace_wait_s -> load -> a new worker in its place

Rules:

- A condemned worker is lent no more (B4). Sessions on its other slots go on and end as they do.
- A replacement is loaded once nobody is on the old worker any more, so that both need not fit into
  memory at once; but it waits for them only so long.
- Loading is tried until it works, with a growing pause, for whatever was wrong may be put right
  elsewhere. A worker that is condemned again soon after it came is replaced after such a pause too.
- A device that is lost to this process comes back in another: where no other worker serves, that is
  told, for whoever runs the server to end it.
- For `HOPE_S` a replacement counts as on its way, and sessions may wait for it; after that they are
  refused until it is there.
- Of a backend that was given up nothing is kept once its leases are back. One that `Closes` is told
  so. A call of its that hangs in a thread keeps it in memory none the less: no thread can be ended.

Loading itself is injected. It does not queue anybody (`runtime.admission`), count slots
(`runtime.pool`) or decide that a call hangs (the session does, and `runtime.calls`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final

import anyio
import attrs
from anyio.abc import TaskGroup

from protocol.errors import LocalProtocolError

from .backends.base import Backend, BackendGone, BackendInfo, Closes, DeviceLost, Remote
from .pool import Lease, Pool

REPLACE_SPARE_S: Final = 10.0
"""What hangs with the call that condemned a worker is condemned in its turn within the waits of the
cleanup and of the release; whoever is on it this long after is served, and may stay long."""
REPLACE_WAIT_S: Final = 20.0 + REPLACE_SPARE_S
"""Those waits are of 10 s each where nobody says otherwise."""
CLOSE_WAIT_S: Final = 10.0
"""A backend that takes longer to let go hangs, as it did before."""
RETRY_S: Final = 1.0
"""The first pause between two tries of loading; each is twice as long as the one before."""
RETRY_S_MAX: Final = 60.0
"""The longest: loading a large model over and over costs others their disk and memory."""
STEADY_S: Final = 60.0
"""A worker that served so long was sound: the next replacement in its place waits for nothing."""
HOPE_S: Final = 120.0
"""Longer than a large model takes to load, and less than a client would wait for nothing."""
DIFFERENCES_TOLD: Final = 3
"""Another model differs in everything: the first few say so."""
INSTANCE: Final = "instance"
"""The entry of a fingerprint that names the one backend; it may differ from worker to worker."""

Load = Callable[[int], Awaitable[Backend]]
"""Loads the backend of a place, 0 to the number of workers - 1; raises whatever is wrong."""

_AGREED: Final = (
    "modes",
    "context_limit",
    "sliding_windows",
    "can_rollback",
    "deterministic",
    "fingerprint",
)
_logger = logging.getLogger("antiphon.workers")


class WorkersDifferError(ValueError):
    """A worker cannot stand in for another; the text names what differs."""


@attrs.frozen(kw_only=True)
class WorkersStatistics:
    """What became of the workers.

    Attributes:
        workers: how many there should be.
        condemned: of these, lent no more and not replaced yet.
        replaced: replacements made so far.
        failures: tries of loading one that failed so far.
    """

    workers: int
    condemned: int
    replaced: int
    failures: int


@attrs.define(eq=False)
class _Place:
    """Where a worker is, and its replacement will be.

    Attributes:
        index: counts the places from 0.
        worker: the number of the worker that is or was there last.
        since_s: when it came, on the event loop's clock.
        tries: replacements tried since one last served for long.
        is_attended: a task replaces it.
        is_given_up: none is counted on any more.
    """

    index: int
    worker: int
    since_s: float = -math.inf
    tries: int = 0
    is_attended: bool = False
    is_given_up: bool = False


class Workers:
    """The backends of a server and their slots.

    Args:
        backends: one for each place, at least one, loaded.
        load: loads another for a place; None replaces none.
        replace_wait_s: how long those who are on a condemned worker are waited for: two models at
            once may not fit into memory.

    Raises:
        LocalProtocolError: there is none.
        WorkersDifferError: two of them cannot stand in for each other.

    Attributes:
        pool: their slots; `Admission` alone leases them.
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
        self._places = [_Place(index, index) for index in range(len(backends))]

    @property
    def info(self) -> BackendInfo:
        """What the workers are, as one backend: their slots together, and what they agree on."""
        backends = self._backends.values()
        return attrs.evolve(
            self._first,
            slots=self.pool.counts.slots,
            fingerprint=_shared(self._first),
            speaks=all(backend.info.speaks for backend in backends),
        )

    @property
    def can_replace(self) -> bool:
        """Whether a condemned worker is replaced at all."""
        return self._load is not None and self._is_running

    @property
    def more_to_come(self) -> bool:
        """Whether a replacement is on its way that may be waited for."""
        return self.can_replace and any(not place.is_given_up for place in self._condemned())

    @property
    def statistics(self) -> WorkersStatistics:
        """What became of them so far."""
        return WorkersStatistics(
            workers=len(self._places),
            condemned=len(list(self._condemned())),
            replaced=self._replaced,
            failures=self._failures,
        )

    @property
    def any_backend(self) -> Backend:
        """One of the backends, for what all of them agree on.

        Raises:
            BackendGone: none is there at the moment.
        """
        for backend in self._backends.values():
            return backend
        raise BackendGone("no worker is there")

    def backend_of(self, lease: Lease) -> Backend:
        """The backend that a lease is for; the lease is out."""
        return self._backends[lease.worker]

    async def run(
        self,
        on_changed: Callable[[], None],
        on_hopeless: Callable[[DeviceLost], None] = lambda _: None,
    ) -> None:
        """Replace what is condemned; runs until cancelled.

        Args:
            on_changed: told that a worker came, or is not counted on any more
                (`Admission.review`).
            on_hopeless: told that no worker is left and this process cannot have another.
        """
        self._is_running = True
        try:
            async with anyio.create_task_group() as tasks:
                while True:
                    stirred = self._stirred
                    for place in self._condemned():
                        if self.can_replace and not place.is_attended:
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

    async def _attend(
        self,
        place: _Place,
        tasks: TaskGroup,
        on_changed: Callable[[], None],
        on_hopeless: Callable[[DeviceLost], None],
    ) -> None:
        """Replace one worker, however long it takes."""
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
        place.since_s = anyio.current_time()
        place.is_attended = place.is_given_up = False
        self._replaced += 1
        _logger.warning("worker %d takes the place of the one condemned", place.worker)
        on_changed()

    async def _lose_hope(self, place: _Place, on_changed: Callable[[], None]) -> None:
        await anyio.sleep(HOPE_S)
        _logger.error("no worker in place of %d after %g s", place.worker, HOPE_S)
        place.is_given_up = True
        on_changed()

    async def _retire(self, worker: int, retired: anyio.Event) -> None:
        """Let a condemned worker's backend go as soon as nobody is on it."""
        while self.pool.leases_of(worker):
            stirred = self._stirred
            await stirred.wait()
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
        """Load a backend and see that it serves.

        Raises:
            Exception: whatever was wrong; nothing is left of the backend then.
        """
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
    """Tell a backend that it is given up; it may hang or fail, and nobody minds."""
    if not isinstance(backend, Closes):
        return
    try:
        with anyio.move_on_after(CLOSE_WAIT_S):
            await backend.aclose()
    except Exception:
        _logger.exception("a backend that was given up could not be closed")


def _shared(info: BackendInfo) -> dict[str, str]:
    """A fingerprint without what names the instance."""
    return {name: value for name, value in info.fingerprint.items() if name != INSTANCE}


def _check_agreement(first: BackendInfo, other: BackendInfo, index: int) -> None:
    """Hold a worker to what sessions are told.

    Raises:
        WorkersDifferError: it says something else.
    """
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
