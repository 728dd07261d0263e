"""The shell around one session: inbox -> log -> step -> log -> perform.

- Events are taken off one inbox, one by one, in the log's order: each is appended to the log,
  stepped, its effects appended, and only then performed. The driver's task does this for events
  that are posted; while it waits, a task that brings an event (`bring`) does it instead.
- Posting never blocks. Client bytes are bounded: `frames_received` waits while the inbox or the
  decoder is too far behind, and a bounded time for the recorder.
- The driver awaits only its inbox: never the network, a model call or the log. Only `Send` and
  `Close` wait for the log's write(2), in the writer task.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import Context, copy_context
from typing import Final, TypeVar

import anyio
import anyio.lowlevel

from protocol.machine.session import Session
from protocol.values import events as ev
from protocol.values.errors import CLOSE_NORMAL, CLOSE_RESTART, ErrorCode
from protocol.values.state import State
from protocol.values.utf8 import Frame
from recorder.format.records import Fields
from recorder.format.steps import fin_fields
from recorder.read.past import Past

from ..media.decoder import Client
from ..media.speech_detector import SpeechDetector
from ..net.connection import Connection
from ..slots.admission import Admission
from ..telemetry.watching import Watcher
from . import rebuilding
from .calls import Calls, Inbox
from .decodes import DecodeMedia, Decodes
from .ears import EARS, Ears
from .entry import Entry
from .event_queue import EventQueue
from .journal import Journal, MarkRefused, OpenLog, ready_now
from .lane import LARGE_BYTES_MIN, Lane
from .peer import Peer, Tokens
from .performing import Performer
from .stepping import Stepper
from .taking_up import TakenUp
from .timers import Timers
from .transcriber import writer_of

T = TypeVar("T")

INBOX_BYTES_MAX: Final = 32 * 1024 * 1024
"""The largest append, or a turn's frame that is larger; above it the reader pauses."""


class Driver:
    """Runs one session; `session` is its machine, None before its first event.

    Args:
        opened: the session's first event, at 0 ns.
        open_log: opens its log; None where it is not recorded.
        make_calls: makes the session's `Calls` around its inbox.
        decode_media: `MediaDecoder.decode`, off the event loop.
        clock_ns: monotonic nanoseconds.
        lane: for the server's large messages.
        admit: refuses a connection without a slot, with its code, where there is no room.
        has_room: whether there is room for so many more early bytes.
        owner: the name of the session's key; empty where the server has no keys.
        token: the client's first right to come back; empty: it did not ask for it.
        refusal: the code with which it is refused a slot; None: it may have one.
        watcher: sees events and effects; None for none.
        taken: a session that another server began, or a fork; None for a new one.
        ears: hear the user in addition to the model.
    """

    def __init__(
        self,
        opened: ev.ConnectionOpened,
        *,
        open_log: OpenLog | None,
        admission: Admission,
        make_calls: Callable[[Inbox], Calls],
        decode_media: DecodeMedia,
        clock_ns: Callable[[], int],
        lane: Lane,
        admit: Callable[[], ErrorCode | None] = lambda: None,
        has_room: Callable[[int], bool] = lambda _: True,
        owner: str = "",
        token: str = "",
        refusal: ErrorCode | None = None,
        watcher: Watcher | None = None,
        taken: TakenUp | None = None,
        ears: Ears = EARS,
    ) -> None:
        self._opened = opened
        self._taken = taken
        self.recording_id: Final = opened.recording_id
        self.mode: Final = opened.mode
        self._has_room = has_room
        self._clock_ns = clock_ns
        self._lane = lane
        self.owner: Final = owner
        self.first_frame: Final = 0 if taken is None else taken.first_frame
        self._watcher = watcher
        self._began_ns = clock_ns() - (taken.at_ns + taken.away_ns if taken else 0)
        self._events = EventQueue()
        self._recording_lost = False
        self._failure: Exception | None = None
        self._context: Context
        self._stepper: Stepper
        self._relief = anyio.Event()
        self.session: Session | None = taken.session if taken else None
        self.away_ns = self.now_ns() if taken and taken.begun is None else None
        self.is_suspended = False
        before = {} if taken is None else taken.journal()
        self._journal = Journal(open_log, self._recording_failed, **before)
        self.peer = Peer(token, self._journal.again, None if taken is None else taken.known_tokens)
        client = Client(is_live=opened.mode != "chat", owner=owner)
        self._decodes = Decodes(
            decode=decode_media, client=client, inbox=self, on_done=self._relieve
        )
        calls = make_calls(self)
        entry = Entry(
            admission=admission,
            inbox=self,
            on_leased=calls.hold,
            admit=admit,
            owner=owner,
            refusal=refusal,
        )
        dropped = taken.session.counts["units_dropped"] if taken else 0
        self._performer = Performer(
            close=taken.outstanding.close if taken else (CLOSE_NORMAL, ""),
            events=self._events,
            peer=self.peer,
            entry=entry,
            calls=calls,
            decodes=self._decodes,
            detector=SpeechDetector(ears.make_judge),
            timers=Timers(self),
            writer=writer_of(ears.transcriber, opened, self, dropped),
        )
        for event in () if taken is None else taken.losses(self.now_ns()):
            self.post(event)

    @property
    def is_resumable(self) -> bool:
        """Whether its client may come back to it on another connection."""
        return self.session is not None and self.session.is_resumable

    @property
    def close(self) -> tuple[int, str]:
        """The code and reason with which it closed, or will."""
        return self._performer.close

    @property
    def tokens(self) -> Tokens:
        """The tokens with which its client may come back."""
        return self.peer.tokens

    @property
    def frames_sent(self) -> int:
        """The number of frames that the session has sent; more may follow at once."""
        return 0 if self.session is None else self.session.counts["frames_sent"]

    async def mark(self, fields: Fields) -> tuple[int, int]:
        """Write a mark into the log; the session does not see it.

        Returns:
            Its `seq`, once write(2) took it, and its time on the session's clock in nanoseconds:
            before the events in the inbox.

        `MarkRefused`: the session is not running, or the log does not take it.
        """
        if self.session is None or self.session.state is State.CLOSED:
            raise MarkRefused("over")
        at_ns = self._next_ns()
        return await self._journal.append_mark(at_ns, fields), at_ns

    @property
    def is_idle(self) -> bool:
        """Whether it waits: all that it was given is stepped and performed."""
        return self._events.is_idle

    def post(self, event: ev.Event) -> None:
        """As `Inbox`; from the event loop only."""
        self._events.post(event)

    def bring(self, event: ev.Event) -> None:
        """As `Inbox`."""
        if self._events.is_idle:
            self._context.run(self._at_once, self._stepper.step, event)
        else:
            self._events.post(event)

    @asynccontextmanager
    async def past(self) -> AsyncIterator[Past]:
        """As `Inbox`."""
        path, next_seq = await self._journal.written()
        with await rebuilding.in_thread(lambda: rebuilding.open_log(path)) as reader:
            yield Past(reader, until_seq=next_seq)

    def now_ns(self) -> int:
        """As `Inbox`."""
        return self._clock_ns() - self._began_ns

    def _next_ns(self) -> int:
        """A time before the events that wait, if any."""
        first_ns = self._events.first_ns
        return self.now_ns() if first_ns is None else first_ns

    def come_back(self, connection: Connection, *, used: str, token: str, after: int) -> None:
        """Go on with the client on a new connection; `used` is its token, `token` the next one."""
        self.away_ns = None
        resume_hash = self.peer.come_back(connection, used=used, token=token)
        self.post(ev.PeerAttached(at_ns=self.now_ns(), after=after, resume_hash=resume_hash))

    def peer_gone(self, number: int, code: int) -> None:
        """Note that a connection is over; only the last one's end concerns the session."""
        if number == self.peer.number:
            self.away_ns = self.now_ns()
            told = code if self._opened.resume_hash else 0
            self.post(ev.PeerGone(at_ns=self.now_ns(), code=told))

    def send_failed(self, number: int) -> None:
        """Note that a connection takes no more, as in `peer_gone`."""
        if number == self.peer.number:
            self.away_ns = self.now_ns()
            self.post(ev.SendFailed(at_ns=self.now_ns()))

    def suspend(self) -> None:
        """Leave a session whose client can come back to the next server: its log gets no `fin`."""
        if self.session is not None and self.is_resumable:
            self.is_suspended = self.session.state is not State.CLOSED
            self._events.wake()

    def wait_no_longer(self) -> None:
        """End a session that waits for its client: there are too many."""
        self.post(ev.PeerGone(at_ns=self.now_ns(), code=CLOSE_NORMAL))

    def frames_received(self, number: int, *frames: Frame) -> Awaitable[None] | None:
        """Bring frames of a connection; returns what to wait for before the next ones.

        Only small ones come together (`OnMessages`).
        """
        if number != self.peer.number:
            return anyio.sleep_forever()  # another connection has taken its place
        self.peer.heard()
        first = frames[0]
        if first is not None and len(first) > LARGE_BYTES_MIN:
            return self._large_frame_received(first)
        self._bring_frames(frames)
        return self._wait_for_room() if self._is_behind or self._journal.is_behind else None

    async def _large_frame_received(self, frame: Frame) -> None:
        await self._lane.enter(len(frame or b""))
        if self._journal.is_flooded_by(frame):
            self.post(ev.Flooded(at_ns=self.now_ns()))
            await anyio.sleep_forever()  # the session ends, and the connection with it
        self.bring(ev.FrameReceived(at_ns=self.now_ns(), frame=frame))
        await self._wait_for_room()

    @property
    def _is_behind(self) -> bool:
        return self._events.frame_bytes > INBOX_BYTES_MAX or self._decodes.is_behind

    async def _wait_for_room(self) -> None:
        """Wait while the server is too far behind."""
        while self._is_behind:
            self._relief = anyio.Event()
            await self._relief.wait()
        await self._journal.wait_for_room()

    def _relieve(self) -> None:
        self._relief.set()

    def _recording_failed(self) -> None:
        """Note that the log failed; called outside of any task, where no clock can be read."""
        self._recording_lost = True
        self._events.wake()

    # -- the loop -------------------------------------------------------------------------------

    async def _next_event(self) -> ev.Event | None:
        """Wait for an event; None when the session is suspended or finished."""
        assert self.session is not None
        while self._recording_lost or self.is_suspended or not self._events:
            if self.is_suspended or self.session.is_finished:
                return None
            if self._recording_lost:
                self._recording_lost = False
                self.post(ev.RecordingFailed(at_ns=self.now_ns()))
                continue
            await self._events.wait()
            if self._failure is not None:
                raise self._failure
        if self._events.has_more_than_a_frame:
            await anyio.lowlevel.checkpoint()  # one client's flood must not starve the others
        event = self._events.take()
        if isinstance(event, ev.FrameReceived):
            self._relief.set()  # The reader wakes only after the frame's step.
        return event

    def _bring_frames(self, frames: Sequence[Frame]) -> None:
        """Bring frames, as `bring` would one after the other."""
        while frames:
            at_ns = self.now_ns()
            if not self._events.is_idle:
                for frame in frames:
                    self._events.post(ev.FrameReceived(at_ns=at_ns, frame=frame))
                return
            taken = self._context.run(self._at_once, self._stepper.take, at_ns, frames)
            frames = frames[taken or len(frames) :]

    def _at_once(self, take: Callable[..., T], *arguments: object) -> T | None:
        """Take something in the task that brings it, and step what this brings.

        The driver's task sleeps. What fails here is raised there.
        """
        result = None
        self._events.begin_emptying()
        try:
            result = take(*arguments)
            while self._events and not self._stepper.session.is_finished:
                self._stepper.step(self._events.take())
        except Exception as error:
            self._failure = error
        self._events.end_emptying()
        if self._failure is not None or self._stepper.session.is_finished:
            self._events.wake()
        return result

    async def run(self, connection: Connection | None) -> None:
        """Run the session until it is CLOSED and its slot is back, then finish the log.

        After a cancellation or a bug of ours too, the slot is given back (B5). `connection` is the
        client's connection; None for a session that another server began.
        """
        if connection is not None:
            self.peer.first(connection)
        try:
            async with anyio.create_task_group() as tasks:
                self._performer.begin(tasks)
                await self._run_session()
                tasks.cancel_scope.cancel()
        finally:
            self._give_up_slot()
            if self._watcher is not None:
                self._watcher.over(None if self.session is None else self.session.end_reason)
            if self.is_suspended:
                self._journal.leave()
                self.peer.hang_up(CLOSE_RESTART)
            await self._journal.finish(self.now_ns(), fin_fields(self.session, "broken_off"))

    def _give_up_slot(self) -> None:
        self._performer.give_up_slot()

    async def _run_session(self) -> None:
        self._context = copy_context()
        session = self._begin() if self._taken is None else self._go_on(self._taken)
        while not session.is_finished:
            event = await self._next_event()
            if event is not None:
                self._stepper.step(event)
            elif self.is_suspended:
                return
        await self._journal.finish(self.now_ns(), fin_fields(session, session.end_reason))

    def _begin(self) -> Session:
        self._journal.append_event(self._opened)
        self.session, effects = Session.open(self._opened)
        self._stepper = self._step_by(self.session)
        self._stepper.perform(self._opened, effects)
        return self.session

    def _go_on(self, taken: TakenUp) -> Session:
        """Go on where a log ends: without a slot and model calls, and but for a fork a client."""
        self._stepper = self._step_by(taken.session)
        at_ns = self._next_ns()
        for effect in taken.go_on(self._journal, at_ns, self._watcher):
            self._performer.perform(effect, ready_now, at_ns)
        self._taken = None
        return taken.session

    def _step_by(self, session: Session) -> Stepper:
        return Stepper(
            session=session,
            journal=self._journal,
            performer=self._performer,
            watcher=self._watcher,
            has_room=self._has_room,
        )
