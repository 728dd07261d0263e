"""A duplex session of OpenAI's Realtime API: a response is one speaking turn of the model.

- The session is there once it has a slot, with settings of its own; the client changes them when it
  likes. The model is opened with the first sound, and takes instructions and voice no more then.
- Sound comes as in `live`, and goes out as the model speaks it: nothing is sent for a listen.
- Where the client speaks is found outside (`DetectSpeech`). That is told, becomes an item, and
  stops the model where the client wants it to (barge-in); while it speaks on, the model listens.
- A client may stop sending: while an answer is due, or goes on, silence is heard in its place, a
  second each second.
- The model decides when it speaks. A response that is asked for has failed if it listens on.
"""

from __future__ import annotations

from typing import Any, Final

import attrs

from ..values import effects as ef
from ..values import events as ev
from ..values.errors import CLOSE_POLICY, ErrorCode
from ..values.limits import (
    ANSWER_UNITS,
    INSTRUCTIONS_CHARS_MAX,
    MODEL_CHARS_SHOWN,
    MS_PER_S,
    NS_PER_S,
)
from ..values.messages import Created, Listen, ServerMessage, Speech
from ..values.model import SAMPLE16_BYTES
from ..values.openai import (
    CancelResponse,
    ClearSound,
    CommitSound,
    Configure,
    Configured,
    CreateItem,
    InputStep,
    Item,
    OpenAISession,
    Part,
    ReplyReason,
    Respond,
)
from ..values.requests import AppendSound, ClientMessage, Init, VoiceName
from ..values.state import Gate, State
from ..values.utf8 import Refused
from ..wire.rates import LIVE_RATE_HZ
from .replies import Replies

STOCK_VOICES: Final = frozenset(
    {"alloy", "ash", "ballad", "coral", "echo", "sage", "shimmer", "verse", "marin", "cedar"}
)
"""Voices of OpenAI that clients name by default: the model's own stands for them."""
UPDATES_MAX: Final = 16
"""Changes that are told one by one when the session is there: no client sets itself up in more."""
AWAY_NS: Final = 3 * NS_PER_S // 2
"""A client that sends no sound for so long has stopped: pieces of a second may be a little late."""
_EARLY: Final = (Configure, AppendSound, CreateItem)
"""Messages that are taken while the session waits for its slot."""
_SOUND: Final = (Part(kind="input_audio"),)


@attrs.define(kw_only=True, eq=False)
class OpenAI(Replies):
    """State of such a session between events.

    Attributes:
        is_opened: the model holds the prompt.
        updates: settings that were changed before the session was there, and not told yet.
        samples: that the client sent.
        is_speaking: the client speaks.
        heard_item: the item that the client's speech, or its sound so far, will be.
        uncommitted_bytes: sound since the last item of sound.
        is_hushed: the model only listens, for the client interrupted it and speaks on.
        is_asked: a response was asked for, and has not begun.
        due_units: seconds for which an answer is still due.
        sound_ns: when the client last sent sound.
    """

    is_opened: bool = False
    updates: int = 0
    samples: int = 0
    is_speaking: bool = False
    heard_item: str = ""
    uncommitted_bytes: int = 0
    is_hushed: bool = False
    is_asked: bool = False
    due_units: int = 0
    sound_ns: int = 0

    # -- the session ----------------------------------------------------------------------------

    @property
    def rate_hz(self) -> int:
        """Of the sound in both directions."""
        return LIVE_RATE_HZ

    @property
    def gate(self) -> Gate:
        """The gate that judges the client's messages."""
        return Gate.CLOSED if self.is_closed else Gate.OPEN

    @property
    def early_bytes(self) -> int | None:
        """No opening message is kept: settings are taken at once."""
        return None

    def begin(self) -> None:
        """Queue for the slot, with the settings of a client that has said nothing."""
        created_s = self.opened.created_ms // MS_PER_S
        self.told = OpenAISession(
            id=self.session_id,
            model=self.opened.label or next(iter(self.opened.limits.models), ""),
            expires_at=created_s + self.opened.limits.session_s,
        )
        if self.told.model not in self.opened.limits.models:
            text = f"there is no model {self.told.model[:MODEL_CHARS_SHOWN]!r} here"
            self.refuse(ErrorCode.MODEL_NOT_FOUND, text, close_code=CLOSE_POLICY)
            return
        super().begin()

    def refused(self, message: ClientMessage) -> Refused | None:
        """Refuse what needs a slot before there is one, and more text than a prompt may have."""
        if self.state is not State.ACTIVE and not isinstance(message, _EARLY):
            return Refused(code=ErrorCode.NOT_READY, message="the session is not there yet")
        if not self.is_begun and len(self.prompt(message)) > INSTRUCTIONS_CHARS_MAX:
            text = f"instructions and items of over {INSTRUCTIONS_CHARS_MAX} characters"
            return Refused(code=ErrorCode.INVALID_PAYLOAD, message=text)
        return super().refused(message)

    @property
    def is_begun(self) -> bool:
        """Whether the prompt is in the model, or on its way."""
        return self.is_opened or self.pending is not None

    def first_slot(self) -> None:
        """Tell the client that the session is there."""
        super().first_slot()
        self.create()
        for _ in range(self.updates):
            self.say(Configured(openai=self.told))
        self.updates, early, self.items = 0, self.items, {}
        for item in early.values():
            self.add(item, self.last_id)

    def say(self, message: ServerMessage) -> None:
        """Send a message; the first one has the settings in force."""
        if isinstance(message, Created):
            message = attrs.evolve(message, openai=self.told)
        super().say(message)

    def configure_session(self, message: Configure) -> None:
        """Change settings, and tell what is in force."""
        told = self.told
        if not self.is_begun:
            if message.instructions is not None:
                told = attrs.evolve(told, instructions=message.instructions)
            if message.voice is not None:
                voice = "" if message.voice in STOCK_VOICES else message.voice
                told = attrs.evolve(told, voice=voice)
        if message.modality is not None:
            told = attrs.evolve(told, modality=message.modality)
        if message.detection is not None or message.is_undetected:
            told = attrs.evolve(told, detection=message.detection)
            self.is_hushed = False
            self.is_speaking = self.is_speaking and message.detection is not None
        self.told = told
        self._wait_on()
        if self.state is State.ACTIVE:
            self.say(Configured(openai=told))
        else:
            self.updates = min(self.updates + 1, UPDATES_MAX)

    def _wait_on(self) -> None:
        """Give a client time that sets its session up, and has not spoken."""
        if self.state is State.ACTIVE and not self.is_begun:
            self.cancel_timer("init")
            self.set_timer("init", self.opened.limits.init_wait_s)

    def end(self, reason: Any, **more: Any) -> None:
        """End the session, and the response in progress; no message says so."""
        if self.state is State.ACTIVE:
            self.finish("cancelled" if reason == "client" else "failed", fault=reason)
        super().end(reason, **more)

    # -- the model ------------------------------------------------------------------------------

    def _open(self) -> None:
        """Open the model with the settings in force."""
        if self.is_begun or self.lease is None or self.is_moving:
            return
        voice = VoiceName(name=self.told.voice) if self.told.voice else None
        self.init(Init(instructions=self.prompt(), ref_audio=voice))

    def configure(self, init: Init) -> None:
        """Take the settings of an init: none is kept twice."""

    def ready(self, _prompt_length: int) -> None:
        """Go on: the model holds the prompt."""
        self.is_opened = True
        self.start_if_due()

    def _reject(self, message: str) -> None:
        """Go on with the model's own voice; a prompt that does not fit ends the session."""
        self.pending = None
        self.complain(ErrorCode.INVALID_PAYLOAD, message)
        if not self.told.voice:
            self.end("context_full")
            return
        self.told = attrs.evolve(self.told, voice="")
        self._open()

    def past_s(self) -> int | None:
        """Return the seconds that the model was fed; none before it was opened."""
        return super().past_s() if self.is_opened else None

    def start_if_due(self) -> None:
        """Start the oldest waiting unit if it may start, and the model is open."""
        if self.is_opened:
            super().start_if_due()
        elif self.waiting and not self.move_if_due():
            self._open()

    def take_up(self) -> None:
        """Go on where the session was: the model is back."""
        if self.is_begun:
            super().take_up()
        else:
            self.start_if_due()

    # -- sound ----------------------------------------------------------------------------------

    def append_sound(self, message: AppendSound) -> None:
        """Take sound: find speech in it, and have each second that is full run."""
        if self.state is not State.ACTIVE:
            return
        self.sound_ns = self.now_ns
        self.uncommitted_bytes += len(message.pcm16)
        self._detect(message.pcm16)
        self.take_sound(message.pcm16)

    def _detect(self, pcm16: bytes) -> None:
        """Have speech found in the client's next sound, unless it has turned that off."""
        how, at = self.told.detection, self.samples
        self.samples += len(pcm16) // SAMPLE16_BYTES
        if how is not None:
            self.do(
                ef.DetectSpeech(
                    at=at,
                    rate_hz=self.rate_hz,
                    data=pcm16,
                    threshold=how.threshold,
                    silence_ms=how.silence_ms,
                    is_speech=self.is_speaking,
                )
            )

    def speech_started(self, event: ev.SpeechStarted) -> None:
        """Tell that the client speaks, and stop the model where the client wants that."""
        how = self.told.detection
        if how is None or self.is_speaking or self.state is not State.ACTIVE:
            return
        self.is_speaking, self.heard_item = True, self.new_id()
        start_ms = max(event.at_ms - how.prefix_ms, 0)
        self.say(InputStep(kind="speech_started", item_id=self.heard_item, at_ms=start_ms))
        if how.interrupts:
            self._interrupt("turn_detected")
            self.is_hushed = True

    def speech_stopped(self, event: ev.SpeechStopped) -> None:
        """Make an item of what the client said."""
        if not self.is_speaking or self.state is not State.ACTIVE:
            return
        self.is_speaking = self.is_hushed = False
        self.heard_item = self.heard_item or self.new_id()
        step = InputStep(kind="speech_stopped", item_id=self.heard_item, at_ms=event.at_ms)
        self.say(step)
        self._commit()

    def hear(self, second: bytes) -> None:
        """Take a second of sound; an answer may be due after it."""
        super().hear(second)
        self._expect()

    def append(self, message: Any) -> None:
        """Take a second of sound; the model may be made to listen to it."""
        how = self.told.detection
        is_held = how is not None and not how.creates and not self.is_asked and self.reply is None
        if self.is_hushed or is_held:
            message = attrs.evolve(message, force_listen=True)
        super().append(message)

    def commit_sound(self, _message: CommitSound) -> None:
        """Make an item of the sound so far."""
        if not self.uncommitted_bytes:
            code = ErrorCode.INPUT_AUDIO_BUFFER_COMMIT_EMPTY
            self.complain(code, "there is no sound since the last item")
            return
        self.heard_item = self.heard_item or self.new_id()
        self._commit()

    def _commit(self) -> None:
        previous, item = self.last_id, Item(id=self.heard_item, role="user", parts=_SOUND)
        self.uncommitted_bytes, self.heard_item = 0, ""
        self.say(InputStep(kind="committed", item_id=item.id, previous_id=previous))
        self.add(item, previous)
        self.due_units = max(self.due_units, ANSWER_UNITS)
        self._expect()

    def clear_sound(self, _message: ClearSound) -> None:
        """Forget the sound that the model has not heard yet."""
        self.unheard, self.uncommitted_bytes = b"", 0
        self.say(InputStep(kind="cleared"))

    # -- silence in place of a client that sends none ----------------------------------------------

    def _expect(self) -> None:
        """Have silence heard a second from now, if an answer is due and the client sends none."""
        if self.due_units and "silence" not in self.timers.pending and not self.is_closed:
            self.set_timer("silence", 1.0)

    def peer_attached(self, event: ev.PeerAttached) -> None:
        """Go on with a client that is back: an answer may still be due."""
        super().peer_attached(event)
        self._expect()

    def timed_out(self, name: ev.TimerName) -> None:
        """Handle a timer: of the session, or of a client that sends no sound."""
        if name != "silence":
            super().timed_out(name)
            return
        if not self.due_units or self.is_detached:
            return
        left_ns = self.sound_ns + AWAY_NS - self.now_ns
        if left_ns > 0:
            self.set_timer("silence", left_ns / NS_PER_S + 1 / MS_PER_S)
            return
        if not self.waiting and not self.resampling and self.call.unit is None:
            silence = bytes(self.second_bytes - len(self.unheard))
            second, self.unheard = self.unheard + silence, b""
            self._detect(silence)
            self.hear(second)
        self._expect()

    # -- items ----------------------------------------------------------------------------------

    def create_item(self, message: CreateItem) -> None:
        """Add an item, and give its client time to speak."""
        super().create_item(message)
        self._wait_on()

    # -- responses ------------------------------------------------------------------------------

    def respond(self, _message: Respond) -> None:
        """Ask the model for a response, in the next seconds."""
        if self.state is not State.ACTIVE or self.reply is not None:
            return  # it speaks already: that is the response
        self.is_asked, self.is_hushed = True, False
        behind = len(self.waiting) + len(self.resampling) + (self.call.unit is not None)
        self.due_units = max(self.due_units, ANSWER_UNITS + behind)
        self._open()
        self._expect()

    def cancel_response(self, message: CancelResponse) -> None:
        """Have the model stop speaking, or not begin to."""
        names = {None, self.reply.id} if self.reply else {None} if self.is_asked else set()
        if message.response_id in names:
            self._interrupt("client_cancelled")
            return
        code = ErrorCode.RESPONSE_CANCEL_NOT_ACTIVE
        self.complain(code, "there is no such response in progress")

    def _interrupt(self, reason: ReplyReason) -> None:
        """Have the model listen, and end the response that is there or was asked for."""
        if self.call.unit is None and not self.waiting:
            self.assembler.force_listen()  # the next one
        self._force_listen()
        self.response_id, self.due_units = None, 0
        self.finish("cancelled", reason)
        if self.is_asked:
            self.is_asked = False
            self.give_none("cancelled", reason)

    def tell(self, outcome: Listen | Speech) -> None:
        """Send a unit's speech, as a part of its response."""
        if isinstance(outcome, Listen):
            self.finish("completed")
            self._listened_on()
            return
        self.is_asked = False
        self.speak(outcome)
        self.due_units = 0 if outcome.end_of_turn else max(self.due_units, 2)
        self._expect()

    def miss(self) -> None:
        """Go on after a unit that failed."""
        self.finish("failed", fault="inference_error")

    def _listened_on(self) -> None:
        self.due_units = max(self.due_units - 1, 0)
        if self.due_units or not self.is_asked:
            self._expect()
            return
        self.is_asked = False
        self.give_none("failed", fault="no_speech", message="the model listens, and does not speak")
