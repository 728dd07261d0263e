"""The shell around one session: inbox -> log -> step -> log -> perform.

- Events are taken off one inbox, one by one, in the log's order: each is appended to the log,
  stepped, its effects appended, and only then performed. The driver's task does this for events
  that are posted; while it waits, a task that brings an event (`step_or_post`) does it instead.
- Posting never blocks. Client bytes are bounded: `frames_received` waits while the inbox or the
  decoder is too far behind, and a bounded time for the recorder.
- Where a slow classifier looks for speech, other events wait in the inbox until it has answered:
  the session sees what it would see if the classifier answered at once.
- The driver awaits only its inbox: never the network, a model call or the log. Only `Send` and
  `Close` wait for the log's write(2), in the writer task.
- An effect goes to the part that performs it, and none of them waits: `AttachedClient`, the slot
  and the model (`ModelCalls`), timers, media decodes, speech detection.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import Context, copy_context
from typing import Any, Final, TypeVar, cast

import anyio
import anyio.lowlevel
import attrs
from anyio.abc import TaskGroup

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.errors import CLOSE_NORMAL, CLOSE_RESTART
from protocol.values.frames import Frame, Received, Shortened
from protocol.values.limits import NS_PER_S
from protocol.values.messages import ErrorReport
from protocol.values.records import session_id_of
from protocol.values.state import State
from recorder.format.format import Fields
from recorder.format.mapping import fin_fields
from recorder.read.past import Past

from ..media.decoder import Client, decode_at_once
from ..media.speech_detector import SpeechDetector
from ..media.values import Decoded, MediaError
from ..net.connection import Connection, Ready
from ..net.limits import LARGE_BYTES_MIN, LargeMessageLimiter
from ..telemetry.watching import SessionStatus, Watcher
from .crash_recovery import RecoveredSession
from .journal import FrameIndex, Journal, MarkRefused, OpenLog, ready_now
from .model_calls import Inbox, ModelCalls
from .peer import AttachedClient, Tokens
from .speech_input import SpeechInput

T = TypeVar("T")

ERROR_PAUSE_S: Final = 0.05
"""After each message that was refused: each costs a step, an answer and records in the log."""
INBOX_BYTES_MAX: Final = 32 * 1024 * 1024
"""The largest append, or a turn's frame that is larger; above it the reader pauses."""
DECODE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Video frames in the decoder, one append's worth; above it the reader pauses."""

DecodeMedia = Callable[[ef.DecodeMedia, Client], Awaitable[Decoded]]
"""Decodes a client's media, or raises `MediaError`."""


def clock_ns() -> int:
    """The event loop's clock in nanoseconds: real time, or a test's virtual time."""
    return int(anyio.current_time() * 1e9)


class Driver:
    """Runs one session; `session` is its machine, None before its first event.

    Args:
        opened: the session's first event, at 0 ns.
        open_log: opens its log; None where it is not recorded.
        make_calls: makes the session's `ModelCalls` around its inbox.
        decode_media: `MediaDecoder.decode`, off the event loop.
        limiter: for the server's large messages.
        has_room: whether there is room for so many more early bytes.
        owner: the name of the session's key; empty where the server has no keys.
        token: the client's first right to come back; empty: it did not ask for it.
        watcher: sees events and effects; None for none.
        recovered: a session that another server began, or a fork; None for a new one.
        speech_input: hears the user in addition to the model.

    Attributes:
        close: the code and reason with which the session closed, or will.
    """

    def __init__(
        self,
        opened: ev.ConnectionOpened,
        *,
        open_log: OpenLog | None,
        make_calls: Callable[[Inbox], ModelCalls],
        decode_media: DecodeMedia,
        limiter: LargeMessageLimiter,
        has_room: Callable[[int], bool],
        owner: str,
        party: str,
        token: str,
        watcher: Watcher | None,
        recovered: RecoveredSession | None,
        speech_input: SpeechInput,
    ) -> None:
        self.recording_id: Final = opened.recording_id
        self.mode: Final = opened.mode
        self.is_request: Final = opened.endpoint == "chat"
        self.owner: Final = owner
        self.party: Final = party
        self.session: Session | None = None
        self.first_frame = 0
        self.is_suspended = False
        self.close = (CLOSE_NORMAL, "")
        self._opened, self._recovered = opened, recovered
        self._has_room, self._limiter = has_room, limiter
        self._watcher = watcher
        self._began_ns = clock_ns()
        self._events = EventQueue()
        self._recording_lost = False
        self._errors = 0
        self._failure: Exception | None = None
        self._context: Context
        self._tasks: TaskGroup
        self._relief = anyio.Event()
        log_so_far: dict[str, Any] = {}
        tokens, units_dropped = None, 0
        if recovered is not None:
            self.session, self.first_frame = recovered.session, recovered.first_frame
            self.close = recovered.outstanding.close
            self._began_ns -= recovered.at_ns + recovered.away_ns
            log_so_far, tokens = recovered.log_so_far, recovered.known_tokens
            units_dropped = recovered.session.counts["units_dropped"]
        self.away_ns = self.now_ns() if recovered and recovered.fork is None else None
        self._journal = Journal(open_log, self._recording_failed, **log_so_far)
        self.peer = AttachedClient(token, self._journal.again, tokens)
        client = Client(is_live=opened.mode != "chat", owner=owner)
        self._decodes = MediaDecodes(
            decode=decode_media, client=client, inbox=self, on_done=self._relieve
        )
        self._calls = make_calls(self)
        self._speech_input = speech_input
        self._detector = SpeechDetector(speech_input.make_classifier)
        self._sounds: list[ef.DetectSpeech] = []
        self._timers = Timers(self)
        self._transcript = speech_input.transcript_writer(opened, self, units_dropped)
        for event in () if recovered is None else recovered.losses(self.now_ns()):
            self.post(event)

    @property
    def is_resumable(self) -> bool:
        """Whether its client may come back to it on another connection."""
        return self.session is not None and self.session.is_resumable

    @property
    def is_open_chat(self) -> bool:
        """Whether it is a chat that goes on: connected, with a slot for its turns only."""
        is_over = self.session is not None and self.session.state is State.CLOSED
        return self.mode == "chat" and not is_over

    @property
    def has_begun(self) -> bool:
        """Whether its client has sent what a session is kept for: an init, or a message before."""
        session = self.session
        if session is None or not session.frames_received:
            return False
        is_asked = self._opened.endpoint == "chat"  # by its only message
        return is_asked or session.state is State.ACTIVE or bool(session.early_bytes)

    @property
    def away_s(self) -> float:
        """For how long it has had no connection; 0 with one."""
        return 0.0 if self.away_ns is None else (self.now_ns() - self.away_ns) / NS_PER_S

    @property
    def keeps_slot(self) -> bool:
        """Whether it has no client, and keeps its slot for the client's return."""
        if self.session is None or self.mode == "chat":
            return False
        return self.session.state is State.ACTIVE and self.session.connection == "detached"

    @property
    def frame_index(self) -> FrameIndex:
        """Where its frames stand in its log."""
        return self._journal.frame_index

    @property
    def tokens(self) -> Tokens:
        """The tokens with which its client may come back."""
        return self.peer.tokens

    @property
    def frames_sent(self) -> int:
        """The number of frames that the session has sent; more may follow at once."""
        return 0 if self.session is None else self.session.counts["frames_sent"]

    @property
    def is_idle(self) -> bool:
        """Whether it waits: all that it was given is stepped and performed."""
        return self._events.is_idle

    def status(self, kv_tokens: int) -> SessionStatus:
        """What it shows of itself; `kv_tokens`: its tokens in the model's cache."""
        session = self.session
        counts = {} if session is None else session.counts
        return SessionStatus(
            recording_id=self.recording_id,
            session_id=session_id_of(self.recording_id),
            owner=self.owner,
            mode=self.mode,
            dialect=None if session is None else session.dialect_name,
            state=State.QUEUED if session is None else session.state,
            age_s=self.now_ns() / NS_PER_S,
            units=counts.get("units", 0),
            chunks=counts.get("chunks", 0),
            dropped_units=counts.get("units_dropped", 0),
            kv_tokens=kv_tokens,
            connection="connected" if session is None else session.connection,
        )

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

    # -- the inbox ------------------------------------------------------------------------------

    def now_ns(self) -> int:
        """As `Inbox`."""
        return int(anyio.current_time() * 1e9) - self._began_ns

    def _next_ns(self) -> int:
        """A time before the events that wait, if any."""
        first_ns = self._events.first_ns
        return self.now_ns() if first_ns is None else first_ns

    def post(self, event: ev.Event) -> None:
        """As `Inbox`; from the event loop only."""
        self._events.post(event)

    def step_or_post(self, event: ev.Event) -> None:
        """As `Inbox`."""
        if self._events.is_idle:
            self._context.run(self._at_once, self._step, event)
        else:
            self._events.post(event)

    def past(self) -> AbstractAsyncContextManager[Past]:
        """As `Inbox`."""
        return self._journal.past()

    # -- the client -----------------------------------------------------------------------------

    def resume(self, connection: Connection, *, used: str, token: str, after: int) -> None:
        """Go on with the client on a new connection; `used` is its token, `token` the next one."""
        self.away_ns = None
        resume_hash = self.peer.resume(connection, used=used, token=token)
        self.post(ev.PeerAttached(at_ns=self.now_ns(), after=after, resume_hash=resume_hash))

    def peer_gone(self, number: int, code: int) -> None:
        """Note that a connection is over; only the last one's end concerns the session."""
        if number == self.peer.number:
            self.away_ns = self.now_ns()
            self.post(ev.PeerGone(at_ns=self.now_ns(), code=code))

    def send_failed(self, number: int) -> None:
        """Note that a connection takes no more, as in `peer_gone`."""
        if number == self.peer.number:
            self.away_ns = self.now_ns()
            self.post(ev.SendFailed(at_ns=self.now_ns()))

    def give_up_slot(self) -> None:
        """Wait for the client without the slot, before the time for that is over."""
        self._timers.expire("detach")

    def suspend(self) -> None:
        """Leave a session whose client can come back to the next server: its log gets no `fin`."""
        if self.session is not None and self.is_resumable:
            self.is_suspended = self.session.state is not State.CLOSED
            self._events.wake()

    def stop_waiting(self) -> None:
        """End a session that waits for its client: there are too many."""
        self.post(ev.PeerGone(at_ns=self.now_ns()))

    def frames_received(self, number: int, *frames: Received) -> Awaitable[None] | None:
        """Bring frames of a connection; returns what to wait for before the next ones.

        Only small ones come together (`OnMessages`).
        """
        if number != self.peer.number:
            return anyio.sleep_forever()  # another connection has taken its place
        if self.peer.tokens.hashes[1:]:  # it has its greeting: it sends on the new connection
            self.peer.tokens.forget_old()
        first = frames[0]
        if isinstance(first, Shortened):
            self.step_or_post(ev.FrameReceived(at_ns=self.now_ns(), frame=None, shortened=first))
        elif first is not None and len(first) > LARGE_BYTES_MIN:
            return self._large_frame_received(first)
        else:
            self._step_or_post_frames(cast("tuple[Frame, ...]", frames))
        if self._errors:
            return self._pause()
        return self._wait_for_room() if self._is_behind or self._journal.is_behind else None

    async def _pause(self) -> None:
        """Read no more for a while: refused messages are work that serves no one."""
        errors, self._errors = self._errors, 0
        await anyio.sleep(ERROR_PAUSE_S * errors)
        await self._wait_for_room()

    async def _large_frame_received(self, frame: Frame) -> None:
        await self._limiter.wait(len(frame or b""))
        if self._journal.is_flooded_by(frame):
            self.post(ev.Flooded(at_ns=self.now_ns()))
            await anyio.sleep_forever()  # the session ends, and the connection with it
        self.step_or_post(ev.FrameReceived(at_ns=self.now_ns(), frame=frame))
        await self._wait_for_room()

    def _step_or_post_frames(self, frames: Sequence[Frame]) -> None:
        """Step or post frames, as `step_or_post` would one after the other."""
        while frames:
            at_ns = self.now_ns()
            if not self._events.is_idle:
                for frame in frames:
                    self._events.post(ev.FrameReceived(at_ns=at_ns, frame=frame))
                return
            count = self._context.run(self._at_once, self._take_frames, at_ns, frames)
            frames = frames[count or len(frames) :]

    @property
    def _is_behind(self) -> bool:
        is_decoder_behind = self._decodes.held_bytes > DECODE_BYTES_MAX
        return self._events.frame_bytes > INBOX_BYTES_MAX or is_decoder_behind

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

    async def run(self, connection: Connection | None) -> None:
        """Run the session until it is CLOSED and its slot is back, then finish the log.

        After a cancellation or a bug of ours too, the slot is given back (B5). `connection` is the
        client's connection; None for a session that another server began.
        """
        if connection is not None:
            self.peer.first(connection)
        try:
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._timers.run)
                if self._transcript is not None:
                    self._tasks.start_soon(self._transcript.run)
                await self._run_session()
                self._tasks.cancel_scope.cancel()
        finally:
            self._calls.give_up()
            if self._watcher is not None:
                self._watcher.over(None if self.session is None else self.session.end_reason)
            if self.is_suspended:
                self._journal.leave()
                self.peer.hang_up(CLOSE_RESTART)
            await self._journal.finish(self.now_ns(), fin_fields(self.session, "broken_off"))

    async def _run_session(self) -> None:
        self._context = copy_context()
        session = self._begin() if self._recovered is None else self._go_on(self._recovered)
        while not session.is_finished:
            event = await self._next_event(session)
            if event is not None:
                self._step(event)
            elif self.is_suspended:
                return
        await self._journal.finish(self.now_ns(), fin_fields(session, session.end_reason))

    def _begin(self) -> Session:
        self._journal.append_event(self._opened)
        self.session, effects = Session.open(self._opened)
        self._record_and_perform(self.session, self._opened, effects)
        return self.session

    def _go_on(self, recovered: RecoveredSession) -> Session:
        """Go on where a log ends: without a slot or model calls; only a fork has a client."""
        at_ns = self._next_ns()
        effects = recovered.go_on(self._journal, at_ns, self._watcher)
        self._perform(effects, ready_now, at_ns)
        self._recovered = None
        return recovered.session

    async def _next_event(self, session: Session) -> ev.Event | None:
        """Wait for an event; None when the session is suspended or finished."""
        while self._recording_lost or self._is_left or not self._events:
            if self._is_left or session.is_finished:
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

    @property
    def _is_left(self) -> bool:
        """Whether it is suspended now: speech of its last sound is not found again."""
        return self.is_suspended and not self._events.expects_speech

    def _at_once(self, take: Callable[..., T], *arguments: object) -> T | None:
        """Take something in the task that brings it, and step what this brings.

        The driver's task sleeps. What fails here is raised there.
        """
        result, session = None, self.session
        assert session is not None
        self._events.is_emptied = True
        try:
            result = take(*arguments)
            while not session.is_finished and (event := self._events.take()) is not None:
                self._step(event)
        except Exception as error:
            self._failure = error
        self._events.is_emptied = False
        if self._failure is not None or session.is_finished:
            self._events.wake()
        return result

    # -- a step ---------------------------------------------------------------------------------

    def _take_frames(self, at_ns: int, frames: Sequence[Frame]) -> int:
        """Keep the sound of the first messages, if they only bring sound; else step the first one.

        `frames`: messages that came together. Returns the number of those taken.
        """
        session = self.session
        assert session is not None
        messages = session.read_ahead(frames)
        if not messages:
            self._step(ev.FrameReceived(at_ns=at_ns, frame=frames[0]))
            return 1
        events = [ev.FrameReceived(at_ns=at_ns, frame=frame) for frame in frames[: len(messages)]]
        self._journal.append_event(*events)
        session.keep(at_ns, messages)
        if self._watcher is not None:
            self._watcher.received(events, messages, session)
        return len(events)

    def _step(self, event: ev.Event) -> None:
        """Append an event to the log, step it, append its effects, and perform them."""
        session = self.session
        assert session is not None
        if isinstance(event, ev.FrameReceived):
            is_early = session.peer.state is State.QUEUED and session.early_bytes == 0
            if is_early and not self._has_room(len(event.frame or b"")):
                event = attrs.evolve(event, has_room=False)
            event = session.shortened(event)
        self._journal.append_event(event, is_step=True)
        self._record_and_perform(session, event, session.step(event))

    def _record_and_perform(
        self, session: Session, event: ev.Event, effects: tuple[ef.Effect, ...]
    ) -> None:
        for effect in effects:
            if isinstance(effect, ef.ForgetRecording):
                self._journal.forget()
        if ErrorReport in map(type, session.peer.sent):
            self._errors += 1
        ready = self._journal.append_effects(session, event, effects)
        if effects:
            self._perform(effects, ready, event.at_ns)
        if session.peer.is_closed:
            self._calls.stop_trying()
            self._decodes.cancel_all()
        if self._watcher is not None:
            self._watcher.saw(event, effects, session)

    def _perform(self, effects: Iterable[ef.Effect], ready: Ready, now_ns: int) -> None:
        """Perform the effects of a step at `now_ns`; frames and closes are sent after `ready`."""
        for effect in effects:
            if self._transcript is not None:
                self._transcript.saw(effect)
            match effect:
                case ef.Send(frame=frame):
                    if self.peer.new_connections:
                        frame = self.peer.with_token(frame)
                    if self.peer.connection is not None:
                        self.peer.connection.send(frame, ready)
                case ef.Attach():
                    self.peer.greet(effect, ready)
                case ef.Close():
                    self.close = (effect.code, effect.reason)
                    self.peer.close(effect.code, effect.reason, ready)
                case ef.DecodeMedia():
                    self._decodes.start(effect, self._tasks)
                case ef.CancelDecode():
                    self._decodes.cancel(effect.media)
                case ef.DetectSpeech():
                    self._find_speech(effect, now_ns)
                case ef.SetTimer():
                    self._timers.set(effect)
                case ef.CancelTimer():
                    self._timers.cancel(effect)
                case ef.DropUnit() | ef.ForgetRecording():
                    pass  # a watcher counts it; it was done before the effects were recorded
                case _:
                    self._calls.perform(effect)

    def _find_speech(self, effect: ef.DetectSpeech, now_ns: int) -> None:
        """Have speech found in sound, before any other event is taken."""
        if not (self._events.is_held or self._detector.is_slow(effect)):
            self._events.put_first(self._detector.detect(effect, now_ns))
            return
        self._sounds.append(effect)
        if not self._events.is_held:  # else it is of the same step
            self._events.is_held = True
            self._tasks.start_soon(self._classify, now_ns)

    async def _classify(self, at_ns: int) -> None:
        """Classify the sounds of a step, and then go on."""
        sounds, self._sounds = self._sounds, []
        held_bytes = sum(len(effect.data) for effect in sounds)
        self._events.frame_bytes += held_bytes
        found: list[ev.Event] = []
        for effect in sounds:
            found += await self._speech_input.search(self._detector, effect, at_ns)
        self._events.frame_bytes -= held_bytes
        self._events.is_held = False
        # Stepped now: after a mark, and before the events that wait.
        self._events.put_first(attrs.evolve(event, at_ns=self._next_ns()) for event in found)
        self._relieve()
        self._events.wake()


class EventQueue:
    """The events that wait to be stepped, and the wait of the driver's task for them.

    Those that were posted are behind those that the last step has found.

    Attributes:
        frame_bytes: the bytes of the client's messages in it, and of the sound that is searched.
        is_held: none is taken: speech is being looked for in the sound of the last step.
        is_emptied: another task takes what is posted, and the driver's task sleeps on.
    """

    def __init__(self) -> None:
        self.frame_bytes = 0
        self._posted: deque[ev.Event] = deque()
        self._found: deque[ev.Event] = deque()
        self._arrival = anyio.Event()
        self._is_waited_for = False
        self.is_emptied = False
        self.is_held = False

    def __bool__(self) -> bool:
        return not self.is_held and bool(self._posted or self._found)

    @property
    def expects_speech(self) -> bool:
        """Whether speech was found, or is being looked for, in the sound of the last step."""
        return self.is_held or bool(self._found)

    @property
    def is_idle(self) -> bool:
        """Whether the driver's task waits, and nothing has woken it."""
        is_quiet = not (self.is_emptied or self.is_held or self._arrival.is_set())
        return self._is_waited_for and is_quiet

    @property
    def first_ns(self) -> int | None:
        """When the first posted event came; None without one."""
        return self._posted[0].at_ns if self._posted else None

    @property
    def has_more_than_a_frame(self) -> bool:
        """Whether a client's message is next, and something behind it."""
        is_frame = not self._found and isinstance(self._posted[0], ev.FrameReceived)
        return is_frame and len(self._posted) > 1

    def post(self, event: ev.Event) -> None:
        """Add an event, and wake the driver's task; from the event loop only."""
        if isinstance(event, ev.FrameReceived):
            self.frame_bytes += len(event.frame or b"")
        self._posted.append(event)
        if not self.is_emptied:
            self._arrival.set()

    def put_first(self, found: Iterable[ev.Event]) -> None:
        """Add what a step has found, before all that were posted."""
        self._found.extend(found)

    def take(self) -> ev.Event | None:
        """Take the next event; None without one."""
        if self.is_held or not (self._found or self._posted):
            return None
        event = self._found.popleft() if self._found else self._posted.popleft()
        if isinstance(event, ev.FrameReceived):
            self.frame_bytes -= len(event.frame or b"")
        return event

    async def wait(self) -> None:
        """Wait, in the driver's task, until an event is posted or `wake` is called."""
        self._arrival = anyio.Event()
        self._is_waited_for = True
        try:
            await self._arrival.wait()
        finally:
            self._is_waited_for = False

    def wake(self) -> None:
        """Let the driver's task look around."""
        self._arrival.set()


@attrs.define(eq=False, kw_only=True)
class MediaDecodes:
    """The media decodes of one session: `DecodeMedia` -> `MediaDecoded` | `MediaRejected`.

    A cancelled one posts nothing. Small pictures are checked at once, in the event loop; `decode`
    does the others off it. `client` is the session, as the decoder knows it; `on_done` is called
    when a decode has ended.
    """

    _decode: DecodeMedia
    _client: Client
    _inbox: Inbox
    _on_done: Callable[[], None]
    _scopes: dict[int, anyio.CancelScope] = attrs.field(factory=dict, init=False)
    held_bytes: int = attrs.field(default=0, init=False)

    def start(self, effect: ef.DecodeMedia, tasks: TaskGroup) -> None:
        """Decode media in a task; never blocks."""
        try:
            made = decode_at_once(effect)
        except MediaError as error:
            self._reject(effect, error)
            return
        if made is not None:
            self._take(effect, made)
            return
        scope = self._scopes[effect.media] = anyio.CancelScope()
        # A turn's media does not pause the reader: during a turn only a close can follow.
        held_bytes = len(effect.data) if self._client.is_live else 0
        self.held_bytes += held_bytes
        tasks.start_soon(self._run, effect, scope, held_bytes)

    def cancel(self, media: int) -> None:
        """Cancel a decode unless it is done; nothing is posted for it."""
        scope = self._scopes.pop(media, None)
        if scope is not None:  # else it is decoded, and its event waits in the inbox
            scope.cancel()

    def cancel_all(self) -> None:
        """Cancel all decodes: the session is over, and other sessions wait for the decoder."""
        for scope in self._scopes.values():
            scope.cancel()

    async def _run(self, effect: ef.DecodeMedia, scope: anyio.CancelScope, held_bytes: int) -> None:
        try:
            with scope:
                made = await self._decode(effect, self._client)
                if not scope.cancel_called:
                    self._take(effect, made)
        except MediaError as error:
            if not scope.cancel_called:
                self._reject(effect, error)
        finally:
            self._scopes.pop(effect.media, None)
            self.held_bytes -= held_bytes
            self._on_done()

    def _take(self, effect: ef.DecodeMedia, made: Decoded) -> None:
        self._inbox.step_or_post(
            ev.MediaDecoded(
                at_ns=self._inbox.now_ns(),
                media=effect.media,
                pcm=made.pcm,
                pictures=made.pictures,
                stacked=made.stacked,
            )
        )

    def _reject(self, effect: ef.DecodeMedia, error: MediaError) -> None:
        reason = str(error)
        self._inbox.post(
            ev.MediaRejected(at_ns=self._inbox.now_ns(), media=effect.media, reason=reason)
        )


ROUNDING_NS: Final = 1_000
"""The event loop's clock is a float: a sleep may seem to end this much too early."""


class Timers:
    """The timers of one session: `SetTimer` -> `TimerFired`; a cancelled one posts nothing.

    One task, `run`, sleeps for all of them, since a session that waits for its client is little
    but timers.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._pending: dict[str, ef.SetTimer] = {}
        self._sleep: anyio.CancelScope | None = None

    def set(self, effect: ef.SetTimer) -> None:
        """Set a timer; one that is due fires at once."""
        assert effect.name not in self._pending, "a timer is cancelled before it is set again"
        self._pending[effect.name] = effect
        self._sleep_until_next()

    def cancel(self, effect: ef.CancelTimer) -> None:
        """Cancel a timer, unless it has fired: the machine ignores it by its generation."""
        if self._pending.pop(effect.name, None) is not None:
            self._sleep_until_next()

    def expire(self, name: ev.TimerName) -> None:
        """Have a timer fire now, if it is set."""
        if (effect := self._pending.get(name)) is not None:
            self._pending[name] = attrs.evolve(effect, at_ns=self._inbox.now_ns())
            self._sleep_until_next()

    async def run(self) -> None:
        """Bring each timer's event when it is due, until cancelled."""
        while True:
            with anyio.CancelScope() as self._sleep:
                self._sleep_until_next()
                await anyio.sleep_forever()
            self._fire()

    def _sleep_until_next(self) -> None:
        if self._sleep is None:
            return
        next_ns = min((it.at_ns for it in self._pending.values()), default=math.inf)
        self._sleep.deadline = anyio.current_time() + (next_ns - self._inbox.now_ns()) / 1e9

    def _fire(self) -> None:
        now_ns = self._inbox.now_ns()
        due = [it for it in self._pending.values() if it.at_ns <= now_ns + ROUNDING_NS]
        for it in due:
            del self._pending[it.name]
        for it in sorted(due, key=lambda it: it.at_ns):
            fired = ev.TimerFired(at_ns=now_ns, name=it.name, generation=it.generation)
            self._inbox.step_or_post(fired)
