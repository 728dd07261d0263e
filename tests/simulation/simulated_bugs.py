"""Bugs that are planted into the server, to see that a simulation finds them.

Each is a mistake that somebody could make, in one place or two, and is there only within `planted`.
What a bug breaks is written beside it, with the words in which the simulation should say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from unittest.mock import patch
from weakref import WeakKeyDictionary

import anyio
import attrs

from protocol.machine import session as session_module
from protocol.machine.core import Peer as PeerPart
from protocol.machine.core import Phase, Timers
from protocol.machine.kind import Kind, Migration
from protocol.machine.unit_loop import UnitLoop
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.messages import Listen, QueuePlace, QueueUpdate, Speech
from protocol.values.model import PastUnit, Unit
from protocol.values.state import State
from runtime.net.connection import Ready
from runtime.session import model_calls
from runtime.session.driver import Driver
from runtime.session.journal import Journal
from runtime.session.model_calls import LeasedSlot, ModelCalls, ModelEffect
from runtime.session.peer import AttachedClient, Tokens, hash_of
from runtime.slots.admission import Admission
from runtime.slots.workers import Lease


@attrs.frozen(kw_only=True)
class Bug:
    """A mistake.

    Attributes:
        plant: puts it in place of what is right, for as long as the stack lasts.
        found_as: a pattern in what the simulation says of it, at least once.
        first: the nearest seed that finds it; the search goes on from there when the plan changes.
    """

    plant: Callable[[ExitStack], None]
    found_as: str
    first: int = 0


def _put(stack: ExitStack, owner: Any, name: str, instead: Any) -> None:
    stack.enter_context(patch.object(owner, name, instead))


def _release_before_cleanup(stack: ExitStack) -> None:
    """The slot goes back to the pool while the model still holds the session (B5)."""

    async def clean_later(self: ModelCalls, lease: LeasedSlot) -> bool:
        async def clean() -> None:
            await lease.settle()
            if held is not None:
                await held.release()

        held = lease.model.held
        self._tasks.start_soon(clean)
        return True

    _put(stack, ModelCalls, "_clean_up", clean_later)


def _barrier_open_on_failed_finalize(stack: ExitStack) -> None:
    """After a finalize that failed the next unit starts as if it had not (B1, B3)."""
    real = UnitLoop.finalize_failed

    def finalize_failed(self: UnitLoop, event: ev.FinalizeFailed) -> None:
        if self.call.awaits(Phase.FINALIZING, event.index) and not self.peer.is_closed:
            self._send_held()
            self._go_on()
        else:
            real(self, event)

    _put(stack, UnitLoop, "finalize_failed", finalize_failed)


def _leak_without_queue_done(stack: ExitStack) -> None:
    """Who goes before the slot is used takes it along (B5)."""
    real, real_give_up = Kind.lose_peer, ModelCalls.give_up

    def lose_peer(self: Kind) -> None:
        unused = self.peer.state is State.CONNECTED and self.slot.lease is not None
        real(self)
        if unused and self.slot.is_releasing:
            done = self.step.effects
            self.step.effects = [one for one in done if not isinstance(one, ef.Release)]
            self.slot.lease, self.slot.is_releasing = None, False

    def give_up(self: ModelCalls) -> None:
        driver = self._inbox
        assert isinstance(driver, Driver)
        if driver.session is None or driver.session.end_reason != "peer_gone":
            real_give_up(self)

    _put(stack, Kind, "lose_peer", lose_peer)
    _put(stack, ModelCalls, "give_up", give_up)


def _config_of_the_last(stack: ExitStack) -> None:
    """A slot keeps the settings of the session that it was opened for before (B8)."""
    real, kept = ModelCalls.perform, {}

    def open_it(self: ModelCalls, effect: ModelEffect) -> None:
        if not isinstance(effect, ef.OpenBackend):
            real(self, effect)
            return
        lease = self.lease
        assert lease is not None
        config = effect.opening.config
        before = kept.setdefault((lease.worker, lease.slot), config)
        kept[lease.worker, lease.slot] = config
        opening = attrs.evolve(effect.opening, config=before)
        real(self, attrs.evolve(effect, opening=opening))

    _put(stack, ModelCalls, "perform", open_it)


def _update_after_closed(stack: ExitStack) -> None:
    """Who leaves the queue is told of it, also after `session.closed`."""
    gone = QueuePlace(position=1, estimated_wait_s=0, ticket_id="ticket_0", queue_length=1)

    def left(session: Any, _event: ev.TicketLeft) -> None:
        kind: Kind = session.kind
        kind.slot.is_waiting = False
        for frame in kind.peer.dialect.encode(QueueUpdate(place=gone)):
            kind.step.do(ef.Send(ordinal=kind.peer.frames_sent, frame=frame))
            kind.peer.frames_sent += 1

    stack.enter_context(patch.dict(session_module._HANDLERS, {ev.TicketLeft: left}))


def _last_in_first_out(stack: ExitStack) -> None:
    """Whoever came last gets the slot."""
    real = Admission._lease_free_slots

    def hand_out(self: Admission) -> None:
        self._waiting = dict(reversed(self._waiting.items()))
        try:
            real(self)
        finally:
            self._waiting = dict(reversed(self._waiting.items()))

    _put(stack, Admission, "_lease_free_slots", hand_out)


def _modes_apart(stack: ExitStack) -> None:
    """Turns of chat, which are short, are let before."""
    real = Admission._lease_free_slots

    def hand_out(self: Admission) -> None:
        self._waiting = dict(
            sorted(self._waiting.items(), key=lambda it: it[1].ticket.mode != "chat")
        )
        real(self)

    _put(stack, Admission, "_lease_free_slots", hand_out)


def _lease_by_slot(stack: ExitStack) -> None:
    """A slot is taken back by its number, be its lease an old one; and it is given back twice."""
    real, real_release = Admission.release, ModelCalls._release

    def release(self: Admission, lease: Lease, *, condemned: bool = False) -> None:
        for other in tuple(self._held):
            if (other.worker, other.slot) == (lease.worker, lease.slot):
                real(self, other, condemned=condemned)

    async def release_twice(self: ModelCalls, lease: LeasedSlot, condemn: bool) -> None:
        await real_release(self, lease, condemn)
        await anyio.sleep(0.3)
        self._admission.release(lease.lease)

    _put(stack, Admission, "release", release)
    _put(stack, ModelCalls, "_release", release_twice)


def _answers_of_a_neighbour(stack: ExitStack) -> None:
    """A unit runs on the sound of the session before it (B8)."""
    real, last = ModelCalls.perform, []

    def start_unit(self: ModelCalls, effect: ModelEffect) -> None:
        if not isinstance(effect, ef.StartUnit):
            real(self, effect)
            return
        last.append(effect.unit.pcm)
        unit = attrs.evolve(effect.unit, pcm=last[-2] if len(last) > 40 else effect.unit.pcm)
        real(self, attrs.evolve(effect, unit=unit))

    _put(stack, ModelCalls, "perform", start_unit)


def _no_limit(stack: ExitStack) -> None:
    """Whoever is paused is forgotten: the pause has no end."""
    real = Timers.set

    def set_timer(self: Timers, name: ev.TimerName, seconds: float) -> None:
        real(self, name, seconds * 3 if name == "pause" else seconds)

    _put(stack, Timers, "set", set_timer)


# -- of sessions that lose their worker (B11) ------------------------------------------------------


def _next_index(stack: ExitStack) -> None:
    """The unit that was lost gets the next index, and so another seed."""
    real = UnitLoop.start_again

    def start_again(self: UnitLoop, unit: Unit) -> None:
        self.call.index += 1
        real(self, attrs.evolve(unit, index=self.call.index))

    _put(stack, UnitLoop, "start_again", start_again)


def _interrupt_lost(stack: ExitStack) -> None:
    """The unit that was lost while it was cut speaks (B6)."""
    real = UnitLoop.start_again

    def start_again(self: UnitLoop, unit: Unit) -> None:
        self.interrupted = False
        real(self, unit)

    _put(stack, UnitLoop, "start_again", start_again)


def _said_again(stack: ExitStack) -> None:
    """What was said last is said again after a rebuild."""
    real, real_send = UnitLoop.resume_work, UnitLoop._send_outcome
    last: WeakKeyDictionary[UnitLoop, Listen | Speech] = WeakKeyDictionary()

    def send_outcome(self: UnitLoop, outcome: Listen | Speech) -> None:
        last[self] = outcome
        real_send(self, outcome)

    def resume_work(self: UnitLoop) -> None:
        if self in last:
            self.peer.send(last[self])
        real(self)

    _put(stack, UnitLoop, "_send_outcome", send_outcome)
    _put(stack, UnitLoop, "resume_work", resume_work)


def _past_reversed(stack: ExitStack) -> None:
    """Past units are fed from the last to the first."""
    real = model_calls._take

    def take(units: Iterator[PastUnit]) -> list[PastUnit]:
        return real(units)[::-1]

    _put(stack, model_calls, "_take", take)


def _past_without_its_end(stack: ExitStack) -> None:
    """The last past unit is not fed."""
    real = model_calls._take

    def take(units: Iterator[PastUnit]) -> list[PastUnit]:
        taken = real(units)
        return taken[:-1] if len(taken) > 1 else taken

    _put(stack, model_calls, "_take", take)


def _log_of_another(stack: ExitStack) -> None:
    """A model is rebuilt from the log of the session that moved before (B8)."""
    real, logs = Journal.written, []

    async def written(self: Journal) -> tuple[Path, int]:
        logs.append(await real(self))
        return logs[-2] if len(logs) > 1 else logs[-1]

    _put(stack, Journal, "written", written)


def _leased_after_loss(stack: ExitStack) -> None:
    """The slot of a session that was lost is lent at once, and its release is not waited for."""
    real, real_post = Admission.release, ModelCalls._post

    def post(self: ModelCalls, lease: LeasedSlot, event: ev.Event, **how: Any) -> None:
        real_post(self, lease, event, **how)
        if isinstance(event, ev.BackendLost):
            self._admission.release(lease.lease)

    def release(self: Admission, lease: Lease, *, condemned: bool = False) -> None:
        if lease in self._held:
            real(self, lease, condemned=condemned)

    _put(stack, ModelCalls, "_post", post)
    _put(stack, Admission, "release", release)


def _not_ahead(stack: ExitStack) -> None:
    """Who lost a slot waits behind those who never had one."""
    real = Admission.enter

    def enter(self: Admission, mode: Any, *, ahead: bool = False, **how: Any) -> Any:
        return real(self, mode, **how)

    _put(stack, Admission, "enter", enter)


def _no_rebuild_timer(stack: ExitStack) -> None:
    """Who waits for another slot waits for ever."""
    real = Timers.set

    def set_timer(self: Timers, name: ev.TimerName, seconds: float) -> None:
        if name != "rebuild":
            real(self, name, seconds)

    _put(stack, Timers, "set", set_timer)


def _frame_left_out(stack: ExitStack) -> None:
    """A client that comes back misses the first frame that it has not heard."""
    real = AttachedClient.greet

    def greet(self: AttachedClient, effect: ef.Attach, ready: Ready) -> None:
        real(self, attrs.evolve(effect, after=effect.after + 1), ready)

    _put(stack, AttachedClient, "greet", greet)


def _tokens_stay_right(stack: ExitStack) -> None:
    """A token that was used lets in who stole it."""

    def rotate(self: Tokens, token: str, *, used: str) -> str:
        self.hashes.insert(0, hash_of(token))
        return self.hashes[0]

    _put(stack, Tokens, "rotate", rotate)
    _put(stack, Tokens, "forget_old", lambda self: None)


def _messages_counted_late(stack: ExitStack) -> None:
    """A client is told of fewer messages than have come, and sends the last one again."""
    real = PeerPart._send_greeting

    def send_greeting(self: PeerPart, after: int) -> None:
        self.frames_received -= 1
        real(self, after)
        self.frames_received += 1

    _put(stack, PeerPart, "_send_greeting", send_greeting)


def _waits_for_ever(stack: ExitStack) -> None:
    """A session waits for its client until its total time is over."""
    real = Timers.set

    def set_timer(self: Timers, name: ev.TimerName, seconds: float) -> None:
        if name != "resume":
            real(self, name, seconds)

    _put(stack, Timers, "set", set_timer)


def _sleeps_on_its_slot(stack: ExitStack) -> None:
    """A session whose client is away keeps its slot."""
    _put(stack, Migration, "sleep", lambda self: None)


def _dies_in_its_sleep(stack: ExitStack) -> None:
    """A session that sleeps is ended for want of a slot, which it does not need."""

    def sleep(self: Migration) -> None:
        if not self.is_migrating:
            self.move_if_due()
        elif self.slot.is_waiting:
            self.step.do(ef.LeaveQueue())

    _put(stack, Migration, "sleep", sleep)


BUGS: Final = MappingProxyType(
    {
        "release-before-cleanup": Bug(plant=_release_before_cleanup, found_as="B5|B4", first=1),
        "barrier-open": Bug(plant=_barrier_open_on_failed_finalize, found_as="b1: |B3", first=14),
        "leaked-slot": Bug(plant=_leak_without_queue_done, found_as="B5|b5", first=3),
        "config-left-over": Bug(plant=_config_of_the_last, found_as="did not ask for", first=1),
        "update-after-closed": Bug(plant=_update_after_closed, found_as="after the end"),
        "fifo-broken": Bug(plant=_last_in_first_out, found_as="FIFO", first=2),
        "modes-apart": Bug(plant=_modes_apart, found_as="FIFO", first=2),
        "lease-by-slot": Bug(plant=_lease_by_slot, found_as="is lent to|B5", first=1),
        "neighbours-sound": Bug(
            plant=_answers_of_a_neighbour, found_as="somebody else's sound", first=1
        ),
        "pause-too-long": Bug(plant=_no_limit, found_as="its pause lasts", first=17),
        "index-advanced": Bug(plant=_next_index, found_as="b11: |B11: ", first=16),
        "interrupt-lost": Bug(plant=_interrupt_lost, found_as="may speak|is not forced", first=21),
        "said-again": Bug(plant=_said_again, found_as="B11: it is told|B9: ", first=1),
        "past-reversed": Bug(plant=_past_reversed, found_as="B11: its rebuild failed", first=1),
        "past-cut-short": Bug(
            plant=_past_without_its_end, found_as="B11: the model said", first=34
        ),
        "log-of-another": Bug(plant=_log_of_another, found_as="somebody else's sound", first=1),
        "leased-after-loss": Bug(plant=_leased_after_loss, found_as="is lent to|B4", first=13),
        "not-ahead": Bug(plant=_not_ahead, found_as="FIFO", first=33),
        "frame-left-out": Bug(plant=_frame_left_out, found_as="resume: frame", first=1),
        "tokens-stay-right": Bug(plant=_tokens_stay_right, found_as="let it in", first=62),
        "messages-counted-late": Bug(plant=_messages_counted_late, found_as="resume: it says"),
        "waits-for-ever": Bug(plant=_waits_for_ever, found_as="its client is waited for", first=1),
        "sleeps-on-its-slot": Bug(
            plant=_sleeps_on_its_slot, found_as="it sleeps, and its", first=1
        ),
        "dies-in-its-sleep": Bug(plant=_dies_in_its_sleep, found_as="it sleeps, and ends", first=1),
        "rebuild-timer-lost": Bug(plant=_no_rebuild_timer, found_as="its rebuild lasts", first=33),
    }
)
"""By name, as `--bug` takes it."""


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Plant a bug; None plants none."""
    with ExitStack() as stack:
        if name is not None:
            BUGS[name].plant(stack)
        yield
