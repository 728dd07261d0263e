"""A duplex session of OpenAI's Live API: sound in pieces of any size, a second out for each unit.

- Sound is 16-bit, at 24 or 16 kHz, or G.711, in both directions (`conversation`).
- A muted client is heard as silence, as long as what it sends.
- Each unit is answered by a second of sound, so that the sound is the session's time line: silence
  for a listen, before a turn's short first piece and after its short last one. What a turn's last
  piece has above a second begins the next one.
- A call of a tool is a delegated response by itself, whose result the model gets like any other
  input: it goes on without being asked.
- Only tools can be changed in a session that is set up, to fewer than the model was opened with; an
  update is answered by what is in force.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar, Final

import attrs

from ..values import events as ev
from ..values import openai as oa
from ..values.errors import ErrorCode
from ..values.frames import Refused
from ..values.limits import INSTRUCTIONS_CHARS_MAX, MODEL_CHARS_SHOWN, MS_PER_S, USAGE_UNITS
from ..values.messages import EndReason, Listen, Metrics, Speech, ToolCalled
from ..values.model import OUTPUT_RATE_HZ, SAMPLE_BYTES, Tool, ToolResult
from ..values.requests import Append, AppendSound, ClientMessage, Init, VoiceName
from ..wire.audio import expand, to_pcm16
from .conversation import SoundPieces
from .duplex import DUPLEX_HANDLERS, DuplexKind
from .kind import Handlers

SECOND_BYTES: Final = OUTPUT_RATE_HZ * SAMPLE_BYTES
"""Of the model's speech."""
_EXPIRY: Final[Mapping[EndReason, oa.Notice]] = {
    "timeout": oa.Notice(code="time_over", text="the session has lasted as long as a session may"),
    "context_full": oa.Notice(code="context_full", text="the model's context is full"),
}
"""Why a session expires, which its end does not tell."""


@attrs.define(eq=False)
class Live(DuplexKind):
    """A session of the Live API.

    Attributes:
        settings: what the client chose.
        instructions, voice: the same, as it is sent back.
        is_muted: the client's sound is taken as silence.
        surplus: the model's speech above the last second: float32 LE, 24 kHz.
        seconds: sent so far.
        kv_length: tokens in the model's cache, as last reported.
        is_mid_turn: a piece of the turn was sent.
    """

    handlers: ClassVar[Handlers] = {
        **DUPLEX_HANDLERS,
        ev.MediaDecoded: attrgetter("media_decoded"),
        ev.MediaRejected: attrgetter("media_rejected"),
        Init: attrgetter("init"),
        AppendSound: attrgetter("append_sound"),
        oa.Mute: attrgetter("mute"),
        oa.Unmute: attrgetter("unmute"),
        oa.Update: attrgetter("update"),
        ToolResult: attrgetter("loop.tools.returned"),
        oa.Respond: attrgetter("respond"),
        ev.Forked: attrgetter("setup.forked"),
        ev.UserTranscribed: attrgetter("user_transcribed"),
    }

    sound: SoundPieces = attrs.field(init=False)
    settings: oa.LiveSettings = attrs.Factory(oa.LiveSettings)
    instructions: str = ""
    voice: str = ""
    is_muted: bool = False
    surplus: bytes = b""
    seconds: int = 0
    kv_length: int = 0
    is_mid_turn: bool = False

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.sound = SoundPieces(self.step, self.peer, self.take_second)

    # -- the session ----------------------------------------------------------------------------

    @property
    def samples_waiting(self) -> int:
        """Samples of the client's sound that no unit in the model has yet."""
        return self.loop.input.samples_waiting + self.sound.samples_waiting

    def send_created(self, prompt_length: int = 0) -> None:
        """Tell the client that the session is set up, and what is in force."""
        self.peer.send_created(
            prompt_length=prompt_length, live=self._in_force, client_event_id=self.settings.event_id
        )
        is_called = self.settings.tools and self.step.limits.duplex_tools
        if self.settings.delegation == "responses" and not is_called:
            text = "the model answers by itself: nothing is delegated"
            self.peer.send(oa.Notice(code="nothing_delegated", text=text))
        self._send_tools_notice(())

    def _send_tools_notice(self, before: Sequence[Tool]) -> None:
        """Say once that no tool is called, of those that are offered now."""
        if self.settings.tools and not (before or self.step.limits.duplex_tools):
            text = "tools are kept, and no call of them is made"
            self.peer.send(oa.Notice(code="tools_not_called", text=text))

    def finish(self, reason: EndReason) -> None:
        """Tell why a session expires."""
        if self.peer.is_active and reason in _EXPIRY:
            self.peer.send(_EXPIRY[reason])

    def closed_fields(self) -> dict[str, Any]:
        """Return what is in force, and how much was used."""
        return {"live": self._in_force, "seconds": self.seconds}

    # -- in -------------------------------------------------------------------------------------

    def init(self, init: Init) -> None:
        """Accept an init; what was said before is a part of the prompt, which a fork has."""
        if self.step.is_forking:
            self.settings = now = _inherited(self.settings, init.live)
            self.sound.set_format(now.coding, now.rate_hz)
            self._offer(self.settings.tools)
            self.setup.init(init)
            return
        self.settings, self.instructions = init.live, init.instructions
        self.sound.set_format(init.live.coding, init.live.rate_hz)
        self.voice = init.ref_audio.name if isinstance(init.ref_audio, VoiceName) else ""
        prompt = oa.as_prompt(init.instructions, init.live.history)
        tools = init.live.tools if self.step.limits.duplex_tools else ()
        self.setup.init(attrs.evolve(init, instructions=prompt, tools=tools))

    def _offer(self, tools: tuple[Tool, ...]) -> None:
        """Take tools, of an open model only those that it has."""
        if self.step.limits.duplex_tools:
            tools = self.loop.tools.choose(tools)
        self.settings = attrs.evolve(self.settings, tools=tools)

    def refusal(self, message: ClientMessage) -> Refused | None:
        """Refuse an unknown model, and more text than a prompt may have."""
        known = ("", self.settings.model) if self.step.is_forking else self.step.limits.models
        match message:
            case Init(live=oa.LiveSettings(history=history)) if (
                len(oa.as_prompt(message.instructions, history)) > INSTRUCTIONS_CHARS_MAX
            ):
                text = f"$.session.input: with the instructions over {INSTRUCTIONS_CHARS_MAX}"
                return Refused(code=ErrorCode.INVALID_PAYLOAD, message=f"{text} characters")
            case Init(live=oa.LiveSettings(model=model)) if model not in known:
                text = f"$.session.model: there is no model {model[:MODEL_CHARS_SHOWN]!r} here"
                return Refused(code=ErrorCode.MODEL_NOT_FOUND, message=text)
            case ToolResult() | oa.Respond() if not self.step.limits.duplex_tools:
                name = "item.create" if isinstance(message, ToolResult) else "create"
                text = f"$.type: response.{name}, which the model cannot do"
                return Refused(code=ErrorCode.UNSUPPORTED, message=text)
            case ToolResult():
                return self.loop.tools.refusal(message, "$.item.call_id")
        return self.sound.refusal(message) or self.setup.refusal(message)

    def append_sound(self, message: AppendSound) -> None:
        """Take sound, or as much silence of a muted client."""
        pcm16 = expand(message.pcm16, self.sound.coding)
        for second in self.sound.cut(bytes(len(pcm16)) if self.is_muted else pcm16):
            self.sound.convert(second)

    def room_bytes(self) -> int:
        """Return the bytes of sound that are only kept: the rest of a second."""
        is_plain = self.sound.coding == "audio/pcm"
        return self.sound.second_bytes - 1 - len(self.sound.rest) if is_plain else 0

    def keep(self, messages: Sequence[AppendSound]) -> None:
        """Keep sound for the next second."""
        for message in messages:
            self.append_sound(message)

    def take_second(self, pcm: bytes) -> None:
        """Take a second of sound: float32 LE, 16 kHz."""
        self.loop.append(Append(pcm=pcm))

    def media_decoded(self, event: ev.MediaDecoded) -> None:
        """Take a decoded voice, or a second that was resampled."""
        self.setup.media_decoded(event)
        self.sound.resampled(event.media, event.pcm)

    def media_rejected(self, event: ev.MediaRejected) -> None:
        """Handle a damaged voice, or take a second as silence."""
        self.setup.media_rejected(event)
        self.sound.resampled(event.media, b"")

    def forget_client(self) -> None:
        """Hear the next client."""
        super().forget_client()
        self.sound.forget()
        self.is_muted = False

    def mute(self, message: oa.Mute) -> None:
        """Hear silence from here on."""
        self.is_muted = True
        self.peer.send(oa.Muted(client_event_id=message.event_id))

    def unmute(self, message: oa.Unmute) -> None:
        """Hear the client from here on."""
        self.is_muted = False
        self.peer.send(oa.Unmuted(client_event_id=message.event_id))

    def update(self, message: oa.Update) -> None:
        """Take tools, and tell what is in force."""
        before = self.settings.tools
        if message.tools is not None:
            self._offer(message.tools)
        self.peer.send(oa.Updated(live=self._in_force, client_event_id=message.event_id))
        self._send_tools_notice(before)

    def respond(self, message: oa.Respond) -> None:
        """Do nothing: the model goes on by itself."""

    # -- out ------------------------------------------------------------------------------------

    @property
    def _in_force(self) -> oa.LiveSession:
        created_s = self.step.opened.created_ms // MS_PER_S
        return oa.LiveSession(
            id=self.peer.session_id,
            expires_at=created_s + self.step.limits.session_s,
            model=self.settings.model,
            coding=self.sound.coding,
            rate_hz=self.sound.rate_hz,
            delegation=self.settings.delegation,
            backend=self.settings.backend,
            safety_identifier=self.settings.safety_identifier,
            instructions=self.instructions,
            voice=self.voice,
            store=self.recording.is_on,
            tools=self.settings.tools,
        )

    def send_outcome(self, outcome: Listen | Speech) -> None:
        """Send a unit's second, and now and then how much was used."""
        self.kv_length = outcome.metrics.kv_cache_length
        speech = outcome if isinstance(outcome, Speech) else None
        self._send_second(
            self._line_up(speech),
            "" if speech is None else speech.text,
            session_id=self.peer.session_id,
            response_id=outcome.response_id,
            input_id=outcome.input_id,
            metrics=outcome.metrics,
        )

    def send_calls(self, calls: Sequence[ToolCalled]) -> None:
        """Send calls of tools, at their place in the time line."""
        for call in calls:
            self.peer.send(attrs.evolve(call, unit=self.seconds - 1))

    def user_transcribed(self, event: ev.UserTranscribed) -> None:
        """Tell what the user said."""
        if self.peer.is_active and event.text:
            words = oa.UserWords(text=event.text, start_ms=event.start_ms, end_ms=event.end_ms)
            self.peer.send(words)

    def unit_undone(self) -> None:
        """Let the time line go on where a unit failed or was dropped."""
        metrics = Metrics(kv_cache_length=self.kv_length)
        names = dict.fromkeys(("session_id", "response_id", "input_id"), "")
        self._send_second(self._line_up(None), "", metrics=metrics, **names)

    unit_dropped = unit_undone  # else another unit would be taken for its answer

    def _send_second(self, pcm: bytes, text: str, **unit: Any) -> None:
        pcm = self.sound.to_rate(pcm, self.sound.rate_hz)
        unit["coding"] = self.sound.coding
        if text or any(to_pcm16(pcm)):
            at_ms = self.seconds * MS_PER_S
            self.peer.send(Speech(text=text, pcm=pcm, end_of_turn=False, start_ms=at_ms, **unit))
        else:
            self.peer.send(Listen(silence_samples=self.sound.rate_hz, **unit))
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
            ratio = min(self.kv_length / self.step.limits.context_tokens, 1.0)
            self.peer.send(oa.Usage(seconds=self.seconds, ratio=ratio))


def _inherited(settings: oa.LiveSettings, asked: oa.LiveSettings) -> oa.LiveSettings:
    """Return the settings of a session with those that a fork's client gave."""
    if asked.coding:
        settings = attrs.evolve(settings, coding=asked.coding, rate_hz=asked.rate_hz)
    if asked.delegation is not None:
        delegation, backend = asked.delegation, asked.backend
        settings = attrs.evolve(settings, delegation=delegation, backend=backend, tools=asked.tools)
    return attrs.evolve(settings, event_id=asked.event_id)
