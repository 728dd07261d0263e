"""A duplex session of OpenAI's Live API: sound in pieces of any size, a second out for each unit.

- Sound is 16-bit, at 24 or 16 kHz, or G.711, in both directions (`pieces`).
- A muted client is heard as silence, as long as what it sends.
- Each unit is answered by a second of sound, so that the sound is the session's time line: silence
  for a listen, before a turn's short first piece and after its short last one. What a turn's last
  piece has above a second begins the next one.
- Nothing can be changed in a session that is set up; an update is answered by what is in force.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from ..values import events as ev
from ..values.errors import ErrorCode
from ..values.items import as_prompt
from ..values.limits import INSTRUCTIONS_CHARS_MAX, MODEL_CHARS_SHOWN, MS_PER_S, USAGE_UNITS
from ..values.live import (
    LiveSession,
    LiveSettings,
    Mute,
    Muted,
    Notice,
    Unmute,
    Unmuted,
    Update,
    Updated,
    Usage,
    UserWords,
)
from ..values.messages import Closed, Created, EndReason, Listen, Metrics, ServerMessage, Speech
from ..values.model import OUTPUT_RATE_HZ, SAMPLE_BYTES
from ..values.requests import AppendSound, ClientMessage, Init, VoiceName
from ..values.sound import Coding
from ..values.state import State
from ..values.utf8 import Refused
from ..wire.g711 import expand
from ..wire.rates import to_pcm16
from .pieces import Pieces
from .units import PendingUnit

SECOND_BYTES: Final = OUTPUT_RATE_HZ * SAMPLE_BYTES
"""Of the model's speech."""
_EXPIRY: Final[Mapping[EndReason, Notice]] = {
    "timeout": Notice(code="time_over", text="the session has lasted as long as a session may"),
    "context_full": Notice(code="context_full", text="the model's context is full"),
}
"""Why a session expires, which its end does not tell."""


@attrs.define(kw_only=True, eq=False)
class Live(Pieces):
    """State of such a session between events.

    Attributes:
        settings: what the client chose.
        instructions, voice: the same, as it is told again.
        is_muted: the client's sound is taken as silence.
        surplus: the model's speech above the last second: float32 LE, 24 kHz.
        seconds: told so far.
        kv_length: tokens in the model's cache, as last reported.
        is_mid_turn: a piece of the turn was told.
    """

    settings: LiveSettings = attrs.Factory(LiveSettings)
    instructions: str = ""
    voice: str = ""
    is_muted: bool = False
    surplus: bytes = b""
    seconds: int = 0
    kv_length: int = 0
    is_mid_turn: bool = False

    # -- in -------------------------------------------------------------------------------------

    def init(self, init: Init) -> None:
        """Accept an init; what was said before is a part of the prompt, which a fork has."""
        if self.is_forking:
            self.settings = _inherited(self.settings, init.live)
            super().init(init)
            return
        self.settings, self.instructions = init.live, init.instructions
        self.voice = init.ref_audio.name if isinstance(init.ref_audio, VoiceName) else ""
        prompt = as_prompt(init.instructions, init.live.history)
        super().init(attrs.evolve(init, instructions=prompt))

    def refused(self, message: ClientMessage) -> Refused | None:
        """Refuse an unknown model, and more text than a prompt may have."""
        known = ("", self.settings.model) if self.is_forking else self.opened.limits.models
        match message:
            case Init(live=LiveSettings(history=said)) if (
                len(as_prompt(message.instructions, said)) > INSTRUCTIONS_CHARS_MAX
            ):
                text = f"$.session.input: with the instructions over {INSTRUCTIONS_CHARS_MAX}"
                return Refused(code=ErrorCode.INVALID_PAYLOAD, message=f"{text} characters")
            case Init(live=LiveSettings(model=model)) if model not in known:
                text = f"$.session.model: there is no model {model[:MODEL_CHARS_SHOWN]!r} here"
                return Refused(code=ErrorCode.MODEL_NOT_FOUND, message=text)
        return super().refused(message)

    @property
    def coding(self) -> Coding:
        """How sound is written, in both directions."""
        return self.settings.coding

    @property
    def rate_hz(self) -> int:
        """Of the sound in both directions."""
        return self.settings.rate_hz

    def append_sound(self, message: AppendSound) -> None:
        """Take sound, or as much silence of a muted client."""
        pcm16 = expand(message.pcm16, self.coding)
        self.take_sound(bytes(len(pcm16)) if self.is_muted else pcm16)

    def forget_client(self) -> None:
        """Hear the next client."""
        super().forget_client()
        self.is_muted = False

    def mute(self, message: Mute) -> None:
        """Hear silence from here on."""
        self.is_muted = True
        self.say(Muted(client_event_id=message.event_id))

    def unmute(self, message: Unmute) -> None:
        """Hear the client from here on."""
        self.is_muted = False
        self.say(Unmuted(client_event_id=message.event_id))

    def update(self, message: Update) -> None:
        """Tell what is in force."""
        self.say(Updated(live=self._in_force, client_event_id=message.event_id))

    # -- out ------------------------------------------------------------------------------------

    @property
    def _in_force(self) -> LiveSession:
        created_s = self.opened.created_ms // MS_PER_S
        return LiveSession(
            id=self.session_id,
            expires_at=created_s + self.opened.limits.session_s,
            model=self.settings.model,
            coding=self.coding,
            rate_hz=self.rate_hz,
            delegation=self.settings.delegation,
            backend=self.settings.backend,
            safety_identifier=self.settings.safety_identifier,
            instructions=self.instructions,
            voice=self.voice,
            store=self.recording == "on",
        )

    def say(self, message: ServerMessage) -> None:
        """Send a message; one about the whole session has what is in force."""
        match message:
            case Created():
                told = self.settings.event_id
                message = attrs.evolve(message, live=self._in_force, client_event_id=told)
            case Closed():
                message = attrs.evolve(message, live=self._in_force, seconds=self.seconds)
        super().say(message)
        if isinstance(message, Created) and self.settings.delegation == "responses":
            text = "the model answers by itself: nothing is delegated"
            self.say(Notice(code="nothing_delegated", text=text))

    def end(self, reason: EndReason, **more: Any) -> None:
        """End the session; one that expires is told why."""
        if self.state is State.ACTIVE and reason in _EXPIRY:
            self.say(_EXPIRY[reason])
        super().end(reason, **more)

    def tell(self, outcome: Listen | Speech) -> None:
        """Send a unit's second, and now and then how much was used."""
        self.kv_length = outcome.metrics.kv_cache_length
        speech = outcome if isinstance(outcome, Speech) else None
        self._say_second(
            self._line_up(speech),
            "" if speech is None else speech.text,
            session_id=self.session_id,
            response_id=outcome.response_id,
            input_id=outcome.input_id,
            metrics=outcome.metrics,
        )

    def user_transcribed(self, event: ev.UserTranscribed) -> None:
        """Tell what the user said."""
        if self.state is State.ACTIVE and event.text:
            words = UserWords(text=event.text, start_ms=event.start_ms, end_ms=event.end_ms)
            self.say(words)

    def miss(self) -> None:
        """Let the time line go on where a unit failed or was dropped."""
        metrics = Metrics(kv_cache_length=self.kv_length)
        names = dict.fromkeys(("session_id", "response_id", "input_id"), "")
        self._say_second(self._line_up(None), "", metrics=metrics, **names)

    def drop(self, unit: PendingUnit) -> None:
        """Let the time line go on where a unit is dropped: others would be taken for its answer."""
        super().drop(unit)
        self.miss()

    def _say_second(self, pcm: bytes, text: str, **unit: Any) -> None:
        pcm, unit = self.resampled(pcm, self.rate_hz), unit | {"coding": self.coding}
        if text or any(to_pcm16(pcm)):
            at_ms = self.seconds * MS_PER_S
            self.say(Speech(text=text, pcm=pcm, end_of_turn=False, start_ms=at_ms, **unit))
        else:
            self.say(Listen(silence_samples=self.rate_hz, **unit))
        self._count()

    def _line_up(self, speech: Speech | None) -> bytes:
        """Make the time line's next second of a unit's speech: float32 LE, 24 kHz."""
        new = b"" if speech is None else speech.pcm
        missing = max(SECOND_BYTES - len(self.surplus) - len(new), 0)
        is_first = speech is not None and not speech.end_of_turn and not self.is_mid_turn
        self.is_mid_turn = speech is not None and not speech.end_of_turn
        silence = bytes(missing)
        sound = self.surplus + (silence + new if is_first else new + silence)
        self.surplus = sound[SECOND_BYTES : 2 * SECOND_BYTES]
        return sound[:SECOND_BYTES]

    def _count(self) -> None:
        self.seconds += 1
        if self.seconds % USAGE_UNITS == 0:
            ratio = min(self.kv_length / self.opened.limits.context_tokens, 1.0)
            self.say(Usage(seconds=self.seconds, ratio=ratio))


def _inherited(settings: LiveSettings, asked: LiveSettings) -> LiveSettings:
    """Return the settings of a session with those that a fork's client gave."""
    if asked.coding:
        settings = attrs.evolve(settings, coding=asked.coding, rate_hz=asked.rate_hz)
    if asked.delegation is not None:
        settings = attrs.evolve(settings, delegation=asked.delegation, backend=asked.backend)
    return attrs.evolve(settings, event_id=asked.event_id)
