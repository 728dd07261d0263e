"""A duplex session of OpenAI's Realtime API: a response is one speaking turn of the model.

- The session is there once it has a slot, with settings of its own; the client changes them when it
  likes. The model is opened with the first sound, and takes instructions and voice no more then.
- Sound comes as in `live`, and goes out as the model speaks it: nothing is sent for a listen.
- The model decides when it speaks. Where it can be made to, it answers who asks for a response;
  else that response has failed if it listens on.
"""

from __future__ import annotations

from typing import Any, Final

import attrs

from ..values import events as ev
from ..values.errors import ErrorCode
from ..values.limits import (
    ANSWER_UNITS,
    FRAMES_MAX,
    INSTRUCTIONS_CHARS_MAX,
    NS_PER_S,
)
from ..values.messages import Created, Listen, ServerMessage, Speech
from ..values.openai import (
    CancelResponse,
    Configure,
    Configured,
    CreateItem,
    Respond,
)
from ..values.requests import AppendSound, ClientMessage, Init, VoiceName
from ..values.state import Gate, State
from ..values.utf8 import Refused
from ..wire.kinds import STOCK_VOICES
from .event_ids import UPDATES_MAX, first_settings, is_served
from .hearing import Hearing

_EARLY: Final = (Configure, AppendSound, CreateItem)
"""Messages that are taken while the session waits for its slot."""


@attrs.define(kw_only=True, eq=False)
class OpenAI(Hearing):
    """State of such a session between events.

    Attributes:
        is_opened: the model holds the prompt.
        updates: settings that were changed before the session was there, and not told yet.
    """

    is_opened: bool = False
    updates: int = 0

    # -- the session ----------------------------------------------------------------------------

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
        self.told = first_settings(self)
        if is_served(self, self.told.model):
            super().begin()

    def refused(self, message: ClientMessage) -> Refused | None:
        """Refuse what needs a slot before there is one, and more text than a prompt may have."""
        if self.state is not State.ACTIVE and not isinstance(message, _EARLY):
            return Refused(code=ErrorCode.NOT_READY, message="the session is not there yet")
        if not self.is_begun and len(self.prompt(message)) > INSTRUCTIONS_CHARS_MAX:
            text = f"instructions and items of over {INSTRUCTIONS_CHARS_MAX} characters"
            return Refused(code=ErrorCode.INVALID_PAYLOAD, message=text)
        if isinstance(message, CreateItem) and message.item.pictures:
            return self._unseen(message)
        return super().refused(message)

    def _unseen(self, message: CreateItem) -> Refused | None:
        """Refuse pictures that the model cannot see, or for which there is no room."""
        ignored = len(message.ignored)
        if self.state is not State.ACTIVE:
            text = "$.item.content: pictures are seen once the session is there"
            return Refused(code=ErrorCode.NOT_READY, message=text, ignored=ignored)
        if not self.opened.limits.can_see:
            text = "$.item.content: this model sees no pictures"
            return Refused(code=ErrorCode.UNSUPPORTED, message=text, ignored=ignored)
        if len(self.seen) + len(message.item.pictures) > FRAMES_MAX:
            text = f"$.item.content: {FRAMES_MAX} pictures at most wait for the next sound"
            return Refused(code=ErrorCode.INVALID_PAYLOAD, message=text, ignored=ignored)
        return None

    @property
    def is_begun(self) -> bool:
        """Whether the prompt is in the model, or on its way."""
        return self.is_opened or self.pending is not None

    def forked(self, _event: ev.Forked) -> None:
        """Take no notice: its items and responses are no past that another client could have."""

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
        if message.transcribes is not None:
            named = self.opened.limits.transcriber if message.transcribes else ""
            told = attrs.evolve(told, transcriber=named)
        if not self.samples:
            heard, spoken = message.heard or told.heard, message.spoken or told.spoken
            told = attrs.evolve(told, heard=heard, spoken=spoken)
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

    def timed_out(self, name: ev.TimerName) -> None:
        """Handle a timer; a client whose sound comes, but is no second yet, is waited for."""
        due_ns = self.sound_ns + self.opened.limits.init_wait_s * NS_PER_S
        if name == "init" and self.sound_ns and due_ns > self.now_ns:
            self.set_timer("init", (due_ns - self.now_ns) / NS_PER_S)
        else:
            super().timed_out(name)

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

    # -- items ----------------------------------------------------------------------------------

    def create_item(self, message: CreateItem) -> None:
        """Add an item, and give its client time to speak."""
        super().create_item(message)
        self._wait_on()

    # -- responses ------------------------------------------------------------------------------

    def respond(self, message: Respond) -> None:
        """Ask the model for a response, in the next seconds."""
        if self.reply is not None or self.is_asked:
            self.complain(ErrorCode.ACTIVE_RESPONSE, "a response is in progress, or was asked for")
            return
        self.is_asked, self.is_hushed, self.metadata = True, False, message.metadata
        behind = len(self.waiting) + len(self.resampling) + (self.call.unit is not None)
        self.due_units = max(self.due_units, ANSWER_UNITS + behind)
        self._open()
        self.expect_answer()

    @property
    def must_speak(self) -> bool:
        """Whether the next unit may not listen: a response was asked for."""
        return self.is_asked and self.opened.limits.can_speak

    def cancel_response(self, message: CancelResponse) -> None:
        """Have the model stop speaking, or not begin to."""
        names = {None, self.reply.id} if self.reply else {None} if self.is_asked else set()
        if message.response_id in names:
            self.interrupt_reply("client_cancelled")
            return
        code = ErrorCode.RESPONSE_CANCEL_NOT_ACTIVE
        self.complain(code, "there is no such response in progress")

    def tell(self, outcome: Listen | Speech) -> None:
        """Send a unit's speech, as a part of its response."""
        if isinstance(outcome, Listen):
            self.finish("completed")
            self._listened_on()
            return
        self.is_asked = False
        self.speak(outcome)
        self.due_units = 0 if outcome.end_of_turn else max(self.due_units, 2)
        self.expect_answer()

    def miss(self) -> None:
        """Go on after a unit that failed."""
        self.finish("failed", fault="inference_error")

    def _listened_on(self) -> None:
        self.due_units = max(self.due_units - 1, 0)
        if self.due_units or not self.is_asked:
            self.expect_answer()
            return
        self.is_asked = False
        self.give_none("failed", fault="no_speech", message="the model listens, and does not speak")
