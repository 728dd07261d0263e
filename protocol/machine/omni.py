"""A duplex session of vLLM-Omni's wire: units as in `duplex`, reported as items and responses.

- Each second is answered: by a listen, or by the next piece of a response (`conversation`), which
  is one speaking turn of the model. A model that speaks and then listens ends its response.
- A commit makes an item of the sound so far. The model has heard it by then, and answers when it
  likes; a client may stop sending meanwhile: as long as an answer is due, or goes on, the model
  gets silence in its place, a second each second.
- The client may interrupt, which counts an epoch. It says how much of a response it has played;
  that cuts the words of an interrupted one, and the model does not learn that.
- It comes back by an id and a token of `session.created` (`Peer`, docs/resume.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import ClassVar, Final

import attrs

from ..values import events as ev
from ..values import omni as om
from ..values import openai as oa
from ..values.errors import ErrorCode
from ..values.frames import Refused
from ..values.limits import ANSWER_UNITS, MS_PER_S, NS_PER_S
from ..values.messages import EndReason, Listen, Metrics, Speech, ToolCalled
from ..values.model import INPUT_RATE_HZ, OUTPUT_RATE_HZ, SAMPLE_BYTES, UNIT_BYTES
from ..values.requests import Append, ClientMessage, Init
from ..values.state import Gate
from ..wire.dialects.omni import RESUMED
from .conversation import AWAY_NS, SOUND_PARTS, Conversation, SoundPieces, no_model
from .duplex import DUPLEX_HANDLERS, DuplexKind
from .kind import Handlers

_FIXED: Final = "the model is set up already, and takes no other: leave it out"
_PLACES: Final = {it: f".{it}" for it in ("instructions", "ref_audio", "tools")}


@attrs.define(eq=False)
class Omni(DuplexKind):
    """A session of vLLM-Omni's wire.

    Attributes:
        requested: the set-up that the client asked for, or None.
        session: what is in force.
        connections: of the client, so far.
        is_asked: a response was asked for, and has not begun.
        due_units: seconds for which an answer is still due.
        samples: of the client's sound so far.
        uncommitted: of these, since the last item.
        sound_ns: when the client last sent sound.
        played: of the last responses, by their items: played and committed milliseconds.
        kv_length: tokens in the model's cache, as last reported.
    """

    answers_unreadable = True
    handlers: ClassVar[Handlers] = {
        **DUPLEX_HANDLERS,
        Init: attrgetter("init"),
        Append: attrgetter("append"),
        om.CommitTurn: attrgetter("commit"),
        om.Heartbeat: attrgetter("heartbeat"),
        om.BargeIn: attrgetter("barge_in"),
        om.ClearOutput: attrgetter("clear_output"),
        om.AckPlayback: attrgetter("acknowledge"),
        oa.ClearSound: attrgetter("clear_sound"),
        oa.Respond: attrgetter("respond"),
        oa.CancelResponse: attrgetter("cancel_response"),
        oa.CreateItem: attrgetter("create_item"),
        oa.DeleteItem: attrgetter("conversation.delete_item"),
        oa.RetrieveItem: attrgetter("conversation.retrieve_item"),
        oa.TruncateItem: attrgetter("conversation.truncate_item"),
        ev.UserTranscribed: attrgetter("conversation.user_transcribed"),
    }

    conversation: Conversation = attrs.field(init=False)
    requested: Init | None = None
    session: om.OmniSession = om.OmniSession()
    connections: int = 1
    is_asked: bool = False
    due_units: int = 0
    samples: int = 0
    uncommitted: int = 0
    sound_ns: int = 0
    played: dict[str, tuple[int, int]] = attrs.Factory(dict)
    kv_length: int = 0

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        sound = SoundPieces(self.step, self.peer)
        first = oa.OpenAISession(transcriber=self.step.limits.transcriber)
        self.conversation = Conversation(self.step, self.peer, self.loop, sound, first)

    # -- the session ----------------------------------------------------------------------------

    @property
    def gate(self) -> Gate:
        """The gate that judges the client's messages."""
        return Gate.STEERED if self.peer.is_active else super().gate

    def first_slot(self) -> None:
        """Wait for the client's settings, or begin without: its address names a model."""
        super().first_slot()
        label = self.step.opened.label
        if label and self.peer.early is None:
            init = Init(instructions="", omni=om.OmniSettings(model=label))
            refused = self.refusal(init)
            if refused is None:
                self.init(init)
            else:
                self.reject(refused)

    def init(self, init: Init) -> None:
        """Set the session up, or change its settings."""
        asked = attrs.asdict(init.omni, recurse=False, filter=lambda _, it: it is not None)
        self.session = now = attrs.evolve(self.session, **asked)
        talk = self.conversation
        talk.settings = attrs.evolve(talk.settings, modality=now.modality)
        how = now.detection
        if how is None and now.overlap == "barge_in_on_speech":
            how = oa.TurnDetection()
        self.loop.speech.sought = None if how is None else (how.threshold, how.silence_ms)
        if self.peer.is_active:
            self.peer.send(om.SessionUpdated(omni=self._in_force))
            return
        self.requested = init
        self.session = attrs.evolve(now, instructions=init.instructions)
        self.setup.init(init)

    def refusal(self, message: ClientMessage) -> Refused | None:
        """Refuse an unknown model, and what an open model cannot be given any more."""
        if not isinstance(message, Init):
            return self.loop.input.refusal(message) or self.conversation.refusal(message)
        code, text, name = ErrorCode.UNSUPPORTED, "", message.omni.model
        before = self.requested
        if name not in (None, "", *self.step.limits.models):
            code, text = ErrorCode.MODEL_NOT_FOUND, f"$.session.model: {no_model(name or '')}"
        elif before is not None and self.peer.is_active:
            for field in ("instructions", "ref_audio", "config", "tools"):
                asked, plain = getattr(message, field), getattr(Init(instructions=""), field)
                if asked not in (plain, getattr(before, field)):
                    text = f"$.session{_PLACES.get(field, '')}: {_FIXED}"
        ignored = len(message.ignored)
        return Refused(code=code, message=text, ignored=ignored) if text else None

    def send_created(self, prompt_length: int = 0) -> None:
        """Tell the client that the session is set up, and what is in force."""
        self.peer.greeted = self.peer.frames_sent
        self.peer.send_created(prompt_length=prompt_length, omni=self._in_force)
        self.peer.send(om.SessionUpdated(omni=self._in_force))

    @property
    def _in_force(self) -> om.OmniSession:
        now, models = self.session, self.step.limits.models
        return attrs.evolve(
            now,
            id=self.peer.session_id,
            model=now.model or next(iter(models), ""),
            is_resumable=self.peer.is_resumable,
        )

    def peer_attached(self, event: ev.PeerAttached) -> None:
        """Go on with a client that is back: an answer may still be due."""
        self.connections += 1
        name, number = self.peer.session_id, self.connections
        back = om.SessionResumed(session_id=name, connection=number, omni=self._in_force)
        self.peer.greeting = RESUMED.encode(back)
        super().peer_attached(event)
        self._expect_answer()

    def finish(self, reason: EndReason) -> None:
        """End the response in progress."""
        if self.peer.is_active:
            self._finish("cancelled" if reason == "client" else "failed", fault=reason)

    def heartbeat(self, _message: om.Heartbeat) -> None:
        """Answer a client that is there."""
        self.peer.send(om.HeartbeatAck(session_id=self.peer.session_id))

    # -- in -------------------------------------------------------------------------------------

    def append(self, message: Append) -> None:
        """Take sound and pictures."""
        self._append_sound(message)
        self.sound_ns, self.loop.tools.refusals = self.step.now_ns, 0
        self.uncommitted += len(message.pcm) // SAMPLE_BYTES

    def _append_sound(self, message: Append) -> None:
        self.samples += len(message.pcm) // SAMPLE_BYTES
        self.loop.append(message)

    def commit(self, message: om.CommitTurn) -> None:
        """Make an item of the sound so far; an answer to it may be due."""
        if not self.uncommitted:
            text = "there is no sound since the last item"
            self.peer.send_error(ErrorCode.INPUT_AUDIO_BUFFER_COMMIT_EMPTY, text)
            return
        talk, self.uncommitted = self.conversation, 0
        self.session = attrs.evolve(self.session, turn_id=self.session.turn_id + 1)
        item, previous = oa.Item(id=talk.new_id(), role="user", parts=SOUND_PARTS), talk.last_id
        self.peer.send(oa.InputStep(kind="committed", item_id=item.id, previous_id=previous))
        talk.add_sound(item, self.samples * MS_PER_S // INPUT_RATE_HZ)
        if not message.is_speech:
            self._send_listen(Metrics(kv_cache_length=self.kv_length, recording="off"))
        elif message.responds and talk.response is None:
            self.respond(oa.Respond())
        elif self.session.answers:
            self._await_answer()

    def clear_sound(self, _message: oa.ClearSound) -> None:
        """Forget the sound that fills no second yet; what is committed stays."""
        self._count_epoch()
        self.uncommitted = 0
        self.loop.input.assembler.remainder.clear()
        self.peer.send(oa.InputStep(kind="cleared"))

    # -- silence in place of a client that sends none -------------------------------------------

    def _await_answer(self) -> None:
        """Fill up the second, and expect an answer to it."""
        self.due_units = max(self.due_units, ANSWER_UNITS + self.loop.units_waiting)
        if self.loop.input.assembler.remainder:
            self._take_silence()
        self._expect_answer()

    def _expect_answer(self) -> None:
        """Have silence taken a second from now, if an answer is due and the client sends none."""
        if self.due_units and "silence" not in self.timers.pending and not self.peer.is_closed:
            self.timers.set("silence", 1.0)

    def _take_silence(self) -> None:
        missing = UNIT_BYTES - len(self.loop.input.assembler.remainder)
        self.sound_ns = self.step.now_ns + NS_PER_S - AWAY_NS  # the next one is due in a second
        self._append_sound(Append(pcm=bytes(missing)))

    def timed_out(self, name: ev.TimerName) -> None:
        """Handle a timer; a client that sends nothing is silent."""
        if name != "silence":
            super().timed_out(name)
            if name == "calls":
                self._expect_result()
        elif self.due_units and not self.peer.is_detached:
            left_ns = self.sound_ns + AWAY_NS - self.step.now_ns
            if left_ns > 0:
                self.timers.set("silence", left_ns / NS_PER_S + 1 / MS_PER_S)
                return
            if self.loop.unit is None and not self.loop.units_waiting:
                self._take_silence()
            self._expect_answer()

    def create_item(self, message: oa.CreateItem) -> None:
        """Add an item; the result of a call is answered without being asked for."""
        self.conversation.create_item(message)
        self._expect_result()

    def _expect_result(self) -> None:
        """Have the model fed what tools returned, if the client sends no sound."""
        if self.loop.tools.waiting:
            self.due_units = max(self.due_units, ANSWER_UNITS + self.loop.units_waiting)
            self._expect_answer()

    # -- responses ------------------------------------------------------------------------------

    def respond(self, message: oa.Respond) -> None:
        """Ask the model for a response, in the next seconds."""
        if self.conversation.response is not None or self.is_asked:
            text = "a response is in progress, or was asked for"
            self.peer.send_error(ErrorCode.ACTIVE_RESPONSE, text)
            return
        self.is_asked, self.loop.speech.must_listen = True, False
        self.conversation.asked = message
        self._await_answer()

    def cancel_response(self, message: oa.CancelResponse) -> None:
        """Have the model stop speaking, or not begin to."""
        if self.conversation.cancels(message, is_asked=self.is_asked):
            self._interrupt("client_cancelled")

    def barge_in(self, _message: om.BargeIn) -> None:
        """Have the model stop speaking: the user does."""
        self._interrupt("barge_in")

    def clear_output(self, _message: om.ClearOutput) -> None:
        """Have the model stop speaking: the rest of its sound is not played."""
        self._interrupt("client_cancelled")
        last = self._last_response()
        self.peer.send(om.OutputCleared(response_id="" if last is None else _response_of(last)))

    def _count_epoch(self) -> None:
        self.session = attrs.evolve(self.session, epoch=self.session.epoch + 1)

    def _interrupt(self, reason: oa.ResponseReason) -> None:
        """Have the model listen, and end the response that is there or was asked for."""
        self._count_epoch()
        if not (self.conversation.is_speaking or self.is_asked):
            return
        self.loop.stop_speaking()
        self.loop.response_id, self.due_units = None, 0
        self._finish("cancelled", reason)
        if self.is_asked:
            self.is_asked = False
            self.conversation.end_unbegun("cancelled", reason)
            self.peer.send(om.RateLimits())

    def send_calls(self, calls: Sequence[ToolCalled]) -> None:
        """Send calls in the response in progress, which they end, or in one of their own.

        The model gets the reason of a refused call like a result, a few times in a row in silence.
        """
        if calls and self.conversation.response is None:
            self.is_asked = False
            self.conversation.end_unbegun("completed", calls=calls)
            self.peer.send(om.RateLimits())
        elif calls:
            self.is_asked, self.loop.response_id = False, None
            self._finish("completed", calls=calls)
        if calls or self.loop.tools.may_feed_refusals():
            self._expect_result()

    def _finish(
        self,
        status: oa.ResponseStatus,
        reason: oa.ResponseReason = "",
        fault: str = "",
        calls: Sequence[ToolCalled] = (),
    ) -> None:
        """End the response in progress, if there is one."""
        response = self.conversation.response
        self.conversation.end_response(status, reason, fault=fault, calls=calls)
        if response is None:
            return
        self.peer.send(om.RateLimits())
        if status == "cancelled" and self.session.history == "ack_only":
            self._truncate(oa.item_of(response.id))

    def _truncate(self, item_id: str) -> None:
        """Forget the words of a response that the client has not heard."""
        _, committed_ms = self.played.get(item_id, (0, 0))
        played_ms = min(committed_ms, self._generated_ms(item_id))
        self.conversation.truncate(oa.TruncateItem(item_id=item_id, audio_end_ms=played_ms))

    def must_speak(self) -> bool:
        """Whether the next unit may not listen: a response was asked for."""
        return self.is_asked and self.step.limits.can_speak

    def must_listen(self) -> bool:
        """Whether the next unit may only listen: the client wants to be the one who asks."""
        is_answering = self.is_asked or self.conversation.is_speaking
        return not (is_answering or self.session.answers)

    def send_outcome(self, outcome: Listen | Speech) -> None:
        """Send a unit's outcome: a listen, or a piece of a response."""
        self.kv_length = outcome.metrics.kv_cache_length
        if isinstance(outcome, Listen):
            is_stopped = self.loop.speech.must_listen
            self._finish(*(("cancelled", "barge_in") if is_stopped else ("completed",)))
            self._send_listen(outcome.metrics, outcome.input_id)
            self._listened_on()
            return
        talk, self.is_asked = self.conversation, False
        if talk.response is None or talk.response.id != outcome.response_id:
            self._finish("completed")
            talk.begin_response(outcome)
            speaking = om.Speaking(response_id=outcome.response_id, epoch=self.session.epoch)
            self.peer.send(speaking)
        before_ms = self._generated_ms(oa.item_of(outcome.response_id))
        piece = attrs.evolve(
            outcome, end_of_turn=False, start_ms=before_ms, epoch=self.session.epoch
        )
        talk.speak(piece)
        if talk.is_too_long:
            self.loop.stop_speaking()
            self.loop.response_id = None
            self._finish("incomplete", "max_output_tokens")
        elif outcome.end_of_turn:
            self._finish("completed")
        self.due_units = 0 if talk.response is None else max(self.due_units, 2)
        self._expect_answer()

    def _send_listen(self, metrics: Metrics, input_id: str = "") -> None:
        name = self.peer.session_id
        listen = Listen(
            session_id=name, input_id=input_id, metrics=metrics, epoch=self.session.epoch
        )
        self.peer.send(listen)

    def _listened_on(self) -> None:
        self.due_units = max(self.due_units - 1, 0)
        if self.is_asked and not self.due_units:
            self.is_asked = False
            text = "the model listens, and does not speak"
            self.conversation.end_unbegun("failed", fault="no_speech", message=text)
            self.peer.send(om.RateLimits())
        self._expect_answer()

    def unit_undone(self) -> None:
        """End the response, of which a unit failed."""
        self._finish("failed", fault="inference_error")

    # -- playback -------------------------------------------------------------------------------

    def acknowledge(self, message: om.AckPlayback) -> None:
        """Note how much of a response the client has played."""
        named = message.response_id and oa.item_of(message.response_id)
        item_id = named or message.item_id or self._last_response()
        item = self.conversation.items.get(item_id or "")
        if item is None or not _is_speech(item) or message.item_id not in (None, item.id):
            text = "$.response_id: there is no such response, or this is not its item"
            self.peer.send_error(ErrorCode.ITEM_NOT_FOUND, text)
            return
        committed_ms = message.played_ms if message.committed_ms is None else message.committed_ms
        self.played[item.id] = message.played_ms, committed_ms
        while len(self.played) > ANSWER_UNITS:
            del self.played[next(iter(self.played))]
        generated_ms, response = self._generated_ms(item.id), self.conversation.response
        is_over = response is None or oa.item_of(response.id) != item.id
        if message.truncates and is_over:
            self._truncate(item.id)
        self.peer.send(
            om.Acknowledged(
                session_id=self.peer.session_id,
                epoch=self.session.epoch,
                item_id=item.id,
                playback=om.Playback(
                    generated_ms=generated_ms,
                    played_ms=message.played_ms,
                    committed_ms=committed_ms,
                ),
                truncates=message.truncates,
                is_whole=is_over and committed_ms >= generated_ms,
            )
        )

    def _last_response(self) -> str | None:
        """The item of what the model last said; None before the first."""
        items = reversed(self.conversation.items.values())
        return next((item.id for item in items if _is_speech(item)), None)

    def _generated_ms(self, item_id: str) -> int:
        """The milliseconds of a response's sound so far."""
        response, item = self.conversation.response, self.conversation.items.get(item_id)
        if response is not None and oa.item_of(response.id) == item_id:
            ends = response.ends
        else:
            ends = item.parts[0].ends if item is not None and item.parts else ()
        return ends[-1][0] * MS_PER_S // OUTPUT_RATE_HZ if ends else 0


def _is_speech(item: oa.Item) -> bool:
    """Whether an item is what the model said: a call has no sound that is played."""
    return item.role == "assistant" and item.call is None


def _response_of(item_id: str) -> str:
    """The id of the response that an item is made by."""
    return f"resp_{item_id.partition('_')[2]}"
