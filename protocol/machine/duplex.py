"""The full-duplex conversation: appends in, units through the model, results out.

`unit_loop` has the units and their outcomes, `input` what waits for them. Here is how the model is
set up (`Setup`), what all duplex kinds share (`DuplexKind`), and the plain one (000, 001, 002).

An init has its voices decoded, then the model is opened. Meanwhile the session is CONNECTED, and a
second init is refused (`Gate.OPENING`). After a wrong init the client may send a better one. Raw
float32 voices are ready; WAV files are decoded outside and come back by number.

A fork begins from the past of another session:

copied -> forked -> queued -> slot leased -> the client's init -> rebuilt -> it goes on

Its log begins with what the other session did, up to a unit, so the machine comes to where that one
was. With `Forked` it begins again: a client of its own waits in the queue and sets it up,
and the model is rebuilt (B11) where that of another session is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import ClassVar, Final

import attrs

from ..values import effects as ef
from ..values import events as ev
from ..values.behaviour import SENDS_USER_WORDS
from ..values.errors import ErrorCode
from ..values.frames import Refused
from ..values.limits import UNIT_FRAMES_MAX
from ..values.messages import Interrupted, Listen, Paused, Resumed, Speech, ToolCalled, ToolsState
from ..values.model import UNIT_BYTES, Opening, Tool, ToolResult, Voice
from ..values.openai import UserWords
from ..values.requests import Append, ClientMessage, Init, Interrupt, Pause, Resume, See, TellModel
from ..values.state import BEGINNINGS, Gate, SessionKind
from ..wire.dialects import first_dialect
from .core import Decode, Peer, Phase, Recording, Step, Timers, decode_voice
from .input import Attachments, Input, ToolCalls
from .kind import Handlers, Kind, Migration, Slot
from .unit_loop import Lockstep, UnitLoop, UserSpeech

AT_REST: Final = frozenset({Phase.IDLE, Phase.FINALIZING, Phase.ROLLING_BACK})
"""What a rebuild stands for; a unit that runs, or a model that is opened, is not a past."""
_KEPT: Final = (
    "a fork keeps the prompt, the voice and the settings of its recording: leave them out"
)


@attrs.define
class PendingInit:
    """An accepted init and the voices that it waits for, both by field name.

    `voices` are PCM, float32 LE 16 kHz mono, as far as decoded; `undecided` media numbers.
    """

    init: Init
    voices: dict[str, bytes] = attrs.Factory(dict)
    undecided: dict[str, int] = attrs.Factory(dict)

    @classmethod
    def of(cls, init: Init, decode: Decode) -> PendingInit:
        """Take an init, and have its voices decoded."""
        pending = cls(init)
        for name, source in {"llm": init.ref_audio, "tts": init.tts_ref_audio}.items():
            known = b"" if source is None else decode_voice(source, decode)
            if isinstance(known, int):
                pending.undecided[name] = known
            elif source is not None:
                pending.voices[name] = known
        return pending

    def awaits(self, media: int) -> bool:
        """Whether `media` is one of its voices."""
        return media in self.undecided.values()

    def decoded(self, media: int, pcm: bytes) -> None:
        """Take a decoded voice."""
        for name, number in list(self.undecided.items()):
            if number == media:
                self.voices[name] = pcm
                del self.undecided[name]

    def to_opening(self, seed: int, tools: tuple[Tool, ...]) -> Opening:
        """Make the backend's request; the spoken voice defaults to the heard one (000)."""
        llm = self.voices.get("llm", b"")
        voice = Voice(llm_pcm=llm, tts_pcm=self.voices.get("tts", llm))
        return Opening(
            instructions=self.init.instructions,
            voice=voice,
            config=self.init.config,
            seed=seed,
            tools=tools,
        )


@attrs.define(eq=False)
class Setup:
    """The model, from the init to its prompt, and again after a loss.

    Attributes:
        pending: the accepted init; None before, and once the model is open.
        is_opened: the model holds the prompt.
    """

    step: Step
    timers: Timers
    recording: Recording
    peer: Peer
    slot: Slot
    migration: Migration
    loop: UnitLoop
    kind: DuplexKind
    pending: PendingInit | None = None
    is_opened: bool = False

    def __attrs_post_init__(self) -> None:
        self.migration.work = self

    # -- an init --------------------------------------------------------------------------------

    def init(self, init: Init) -> None:
        """Accept an init."""
        self.timers.cancel("init")
        self.pending = PendingInit.of(init, self.step.decode)
        if not self.step.is_forking:
            self.loop.tools.offered = init.tools
        self._open_if_decoded(self.pending)

    def refusal(self, message: ClientMessage) -> Refused | None:
        """Refuse an init that would change what the model of a fork was opened with."""
        if not self.step.is_forking or not isinstance(message, Init):
            return None
        if message.tools == self.loop.tools.offered:  # whose client gives them functions again
            message = attrs.evolve(message, tools=())
        if _opens_model(message):
            return Refused(code=ErrorCode.INVALID_PAYLOAD, message=_KEPT)
        return None

    def media_decoded(self, event: ev.MediaDecoded) -> None:
        """Take a decoded voice or picture."""
        if self.pending is not None and self.pending.awaits(event.media):
            self.pending.decoded(event.media, event.pcm)
            if not self.peer.is_closed:
                self._open_if_decoded(self.pending)
        self.loop.media_decoded(event)

    def media_rejected(self, event: ev.MediaRejected) -> None:
        """Refuse the init of a damaged voice, or leave a damaged picture out."""
        pending = self.pending
        if pending is not None and pending.awaits(event.media) and not self.peer.is_closed:
            self._reject(f"reference audio: {event.reason}")
        self.loop.media_rejected(event)

    def _open_if_decoded(self, pending: PendingInit) -> None:
        """Have the model opened, or brought to the past of a fork, unless that must wait."""
        if self.migration.is_migrating:
            return
        if self.step.is_forking:
            self.migration.rebuild(self.slot.call.index + 1)
            return
        if pending.undecided:
            return
        assert self.slot.lease is not None
        self.slot.call.phase = Phase.OPENING
        self.loop.max_slice_nums = pending.init.max_slice_nums
        self.loop.deferred_finalize = pending.init.config.deferred_finalize
        tools = pending.init.tools if self.step.limits.duplex_tools else ()
        opening = pending.to_opening(self.step.opened.seed, tools)
        self.step.do(ef.OpenBackend(lease=self.slot.lease, opening=opening))

    def _reject(self, message: str) -> None:
        self.pending = None
        self.kind.init_rejected(message)

    def _is_opening(self, lease: int) -> bool:
        return lease == self.slot.lease and self.slot.call.phase is Phase.OPENING

    def backend_opened(self, event: ev.BackendOpened) -> None:
        """Become ACTIVE: the model holds the prompt."""
        if self._is_opening(event.lease):
            self.pending = None
            self.migration.answered()
            if self.slot.settle():
                self.is_opened = True
                self.loop.tools.takes_events = event.opened.takes_events
                self.kind.ready(event.opened.prompt_length)
                self.migration.move_if_due()

    def backend_open_failed(self, event: ev.BackendOpenFailed) -> None:
        """Refuse what the model is never opened with, or end the session if the model failed."""
        if not self._is_opening(event.lease):
            return
        if event.is_lost and self.recording.outlives_worker:
            self.migration.backend_lost()
            return
        if not self.slot.settle():
            return
        if event.context_full:
            self._reject("the prompt does not fit the model's context")
        elif event.refused:
            self._reject(event.refused)
        else:
            self.kind.give_up("the model could not be opened")

    # -- another slot ---------------------------------------------------------------------------

    def past_s(self) -> int | None:
        """Return the seconds that the model was fed; None before it was opened."""
        is_past = self.is_opened and self.peer.is_active
        return self.slot.call.index + 1 if is_past else None

    def leaving(self) -> None:
        """Let more units wait than usual, and calls of tools longer."""
        self.loop.input.raise_waiting_limit(self.step.limits.rebuild_units)
        self.loop.tools.stop_time()

    def resume_work(self) -> None:
        """Open the model, if that was lost or became due meanwhile; else go on with the units."""
        self.loop.tools.go_on()
        if self.pending is not None:
            self._open_if_decoded(self.pending)
        else:
            self.loop.resume_work()

    # -- a fork ---------------------------------------------------------------------------------

    def forked(self, event: ev.Forked) -> None:
        """Begin again, with the past as it is; ignored if the session was never set up."""
        if not self.peer.is_active or self.slot.call.phase not in AT_REST:
            return
        opened = attrs.evolve(
            self.step.opened,
            limits=event.limits,
            resume_hash=event.resume_hash,
            recording_notice=event.recording_notice,
            must_record=True,  # the rebuild reads it
        )
        self.step.reopen(opened)
        for name in tuple(self.timers.pending):
            self.timers.cancel(name)
        self.recording.state = "on"
        peer = self.peer
        peer.dialect = first_dialect(opened.mode, opened.endpoint)
        peer.enter(BEGINNINGS[peer.session_kind])
        peer.early = None
        peer.wants_notices = peer.is_detached = peer.is_asleep = False
        peer.frames_received = 0
        self.kind.is_draining = self.is_opened = False
        self.slot.forget()
        self.migration.forget()
        self.kind.forget_client()
        peer.greet()
        self.kind.begin()

    def rebuilt(self, event: ev.Rebuilt) -> None:
        """Go on; the client of a fork is told that its session is set up."""
        if not self.step.is_forking:
            self.migration.rebuilt(event)
        elif self.migration.is_rebuilding(event.lease):
            self.pending, self.step.is_forking, self.is_opened = None, False, True
            self.timers.cancel("rebuild")
            self.migration.answered()
            if self.slot.settle():
                self.kind.send_created()
                self.migration.move_if_due()


def _opens_model(init: Init) -> bool:
    """Whether an init has what opens a model."""
    plain = Init(instructions="")
    names = ("instructions", "ref_audio", "tts_ref_audio", "max_slice_nums", "config", "tools")
    return any(getattr(init, name) != getattr(plain, name) for name in names)


DUPLEX_HANDLERS: Final[Handlers] = {
    ev.BackendOpened: attrgetter("setup.backend_opened"),
    ev.BackendOpenFailed: attrgetter("setup.backend_open_failed"),
    ev.Rebuilt: attrgetter("setup.rebuilt"),
    ev.RebuildFailed: attrgetter("setup.migration.rebuild_failed"),
    ev.LeaseRevoked: attrgetter("setup.migration.lease_revoked"),
    ev.UnitDone: attrgetter("loop.unit_done"),
    ev.UnitFailed: attrgetter("loop.unit_failed"),
    ev.FinalizeDone: attrgetter("loop.finalize_done"),
    ev.FinalizeFailed: attrgetter("loop.finalize_failed"),
    ev.RollbackDone: attrgetter("loop.rollback_done"),
    ev.RollbackFailed: attrgetter("loop.rollback_failed"),
    ev.MediaDecoded: attrgetter("setup.media_decoded"),
    ev.MediaRejected: attrgetter("setup.media_rejected"),
    ev.SpeechStarted: attrgetter("loop.speech_started"),
    ev.SpeechStopped: attrgetter("loop.speech_stopped"),
}
"""The events of every kind with these parts."""


@attrs.define(eq=False)
class DuplexKind(Kind):
    """A kind whose model runs on units; a kind of its own says where it differs."""

    session_kind = SessionKind.DUPLEX
    opens_model = True

    setup: Setup = attrs.field(init=False)
    loop: UnitLoop = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        step, timers, recording = self.step, self.timers, self.recording
        peer, slot = self.peer, self.slot
        migration = Migration(step, timers, peer, recording, slot, slot.call, self)
        waiting, speech, tools = Input(step, peer), UserSpeech(step), ToolCalls(step, timers, peer)
        self.loop = UnitLoop(
            step, peer, recording, slot, slot.call, migration, waiting, speech, tools, self
        )
        self.setup = Setup(step, timers, recording, peer, slot, migration, self.loop, self)
        self.slot_user = migration

    @property
    def gate(self) -> Gate:
        """The gate that judges the client's messages."""
        return super().gate if self.setup.pending is None else Gate.OPENING

    @property
    def samples_waiting(self) -> int:
        """Samples of the client's sound that no unit in the model has yet."""
        return self.loop.input.samples_waiting

    def ready(self, prompt_length: int) -> None:
        """Go on: the model holds the prompt."""
        self.send_created(prompt_length)

    def send_created(self, prompt_length: int = 0) -> None:
        """Tell the client that the session is set up."""
        self.peer.send_created(prompt_length=prompt_length)

    def forget_client(self) -> None:
        """Forget what the client sent that the model has not received, and what it is owed."""
        self.loop.forget_client()

    def timed_out(self, name: ev.TimerName) -> None:
        """Handle a timer: calls whose time is over end, and not the session."""
        if name == "calls":
            self.loop.tools.expire()
        else:
            super().timed_out(name)

    # -- the units (`UnitKind`) -----------------------------------------------------------------

    def open_if_due(self) -> bool:
        """Whether the model is open: input comes only then."""
        return True

    def must_speak(self) -> bool:
        """Whether the next unit may not listen."""
        return False

    def must_listen(self) -> bool:
        """Whether the next unit may only listen."""
        return False

    def send_outcome(self, outcome: Listen | Speech) -> None:
        """Send a unit's outcome."""
        self.peer.send(outcome)

    def send_calls(self, calls: Sequence[ToolCalled]) -> None:
        """Send the calls of tools that the model made in a unit."""
        for call in calls:
            self.peer.send(call)

    def unit_dropped(self) -> None:
        """Go on after a waiting unit was dropped: only its sound is lost."""

    def unit_undone(self) -> None:
        """Go on after a unit that failed, and has no outcome."""


# -- the plain duplex session ---------------------------------------------------------------------


@attrs.define(eq=False)
class Duplex(DuplexKind):
    """A session of units, each of which is answered by a message."""

    handlers: ClassVar[Handlers] = {
        **DUPLEX_HANDLERS,
        Init: attrgetter("setup.init"),
        Append: attrgetter("loop.append"),
        ToolResult: attrgetter("loop.tools.returned"),
        TellModel: attrgetter("loop.tools.add_text"),
        See: attrgetter("loop.input.see"),
        Interrupt: attrgetter("interrupt"),
        Pause: attrgetter("pause"),
        Resume: attrgetter("resume"),
        ev.Forked: attrgetter("setup.forked"),
        ev.UserTranscribed: attrgetter("user_transcribed"),
    }

    # -- the session ----------------------------------------------------------------------------

    @property
    def gate(self) -> Gate:
        """The gate that judges the client's messages."""
        if self.loop.is_paused:
            return Gate.PAUSED
        return super().gate

    def ready(self, prompt_length: int) -> None:
        """Go on: the model holds the prompt."""
        if self.step.opened.endpoint == "duplex":
            self.loop.lockstep = Lockstep(kv_length=prompt_length)
        self.send_created(prompt_length)

    def send_created(self, prompt_length: int = 0) -> None:
        """Tell the client that the session is set up."""
        tools: ToolsState = ""
        if self.loop.tools.offered:
            tools = "called" if self.step.limits.duplex_tools else "not_called"
        self.peer.send_created(prompt_length=prompt_length, tools=tools)

    def refusal(self, message: ClientMessage) -> Refused | None:
        """Refuse an init that a fork may not have, a result not due, a picture without room."""
        match message:
            case Init():
                return self.setup.refusal(message)
            case See():
                return self.loop.input.refusal(message)
            case ToolResult() | TellModel():
                return self.loop.tools.refusal(message)
        return None

    # -- in -------------------------------------------------------------------------------------

    def room_bytes(self) -> int:
        """Return the bytes of sound that are only kept, in a second without pictures to come."""
        loop, assembler = self.loop, self.loop.input.assembler
        is_plain = not (loop.input.pictures or loop.lockstep or loop.speech.must_listen)
        is_right = len(assembler.attached.frames) <= UNIT_FRAMES_MAX  # else the client is told
        if not is_plain or not is_right or self.step.limits.barge_in:
            return 0
        return UNIT_BYTES - 1 - len(assembler.remainder)

    def keep(self, messages: Sequence[Append]) -> None:
        """Keep sound for the next unit."""
        self.loop.appends += len(messages)
        last = messages[-1]
        slices = [it.max_slice_nums for it in messages if it.max_slice_nums is not None]
        attached = Attachments(
            input_id=last.input_id or self.step.derive("input", self.loop.appends - 1),
            max_slice_nums=slices[-1] if slices else None,
        )
        pcm = b"".join([message.pcm for message in messages])
        self.loop.input.assembler.add(pcm, attached)

    def interrupt(self, _message: Interrupt) -> None:
        """Have the unit in flight listen, else the next one (002, interrupt)."""
        self.loop.interrupt_next()
        self.peer.send(Interrupted())

    def pause(self, message: Pause) -> None:
        """Start no unit until the client resumes; waiting units are kept (002, pause)."""
        most_s = float(self.step.limits.pause_s)
        timeout_s = most_s if message.timeout_s is None else min(message.timeout_s, most_s)
        self.loop.is_paused = True
        self.timers.set("pause", timeout_s)
        self.peer.send(Paused(timeout_s=timeout_s))

    def resume(self, _message: Resume) -> None:
        """Go on (002, resume)."""
        self.loop.is_paused = False
        self.timers.cancel("pause")
        self.peer.send(Resumed())
        self.loop.start_if_due()

    def user_transcribed(self, event: ev.UserTranscribed) -> None:
        """Send what the user said, to a client that asked for it."""
        peer = self.peer
        is_wanted = peer.wants_notices and self.step.behaves(SENDS_USER_WORDS)
        if is_wanted and peer.is_active and peer.dialect.name == "realtime" and event.text:
            peer.send(UserWords(text=event.text, start_ms=event.start_ms, end_ms=event.end_ms))
