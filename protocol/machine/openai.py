"""A duplex session of OpenAI's Realtime API: a response is one speaking turn of the model.

- The session begins when it has a slot, with default settings; the client may change them at any
  time. The first second of sound, or a request for a response, opens the model; its instructions
  and voice are fixed from then on.
- Sound comes as in `live`, and goes out as the model speaks it: nothing is sent for a listen.
- Where the client speaks is found outside (`DetectSpeech`). The client gets a message about it, it
  becomes an item, and it stops the model where the client wants it to (barge-in); while the client
  speaks on, the model listens.
- A client may stop sending: while an answer is due, or goes on, the model gets silence in its
  place, a second each second.
- At its time limit it waits for the words of the last speech, then reports its end.
- A call of a tool ends the response in which it is made, or is one by itself, as the clients of the
  API wait for that end to return a result. What the model says then is another response.
- The model decides when it speaks. Where it can be made to (`can_speak`), it answers a request for
  a response; else that response fails if the model listens on.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import ClassVar, Final

import attrs

from ..values import behaviour, limits
from ..values import events as ev
from ..values import openai as oa
from ..values.errors import CLOSE_TOO_BIG, ErrorCode, FrameError
from ..values.frames import Refused
from ..values.messages import EndReason, Listen, Speech, ToolCalled
from ..values.model import OUTPUT_RATE_HZ, SAMPLE16_BYTES, SAMPLE_BYTES, rate_of
from ..values.requests import Append, AppendSound, ClientMessage, Init, VoiceName
from ..values.state import Gate
from ..wire.audio import expand
from ..wire.codec import STOCK_VOICES
from . import conversation as shared
from .duplex import DUPLEX_HANDLERS, DuplexKind
from .kind import Handlers

_EARLY: Final = (oa.Configure, AppendSound, oa.CreateItem)
"""Messages that are accepted while the session waits for its slot."""


@attrs.define(eq=False)
class OpenAI(DuplexKind):
    """A session of the Realtime API.

    Attributes:
        updates: settings that were changed before the session was there, and not sent yet.
        input_item: the item that the client's speech, or its sound so far, will be.
        uncommitted_bytes: sound since the last item of sound.
        asked_at: the first second that may begin the response that was asked for; None without one.
        due_units: seconds for which an answer is still due.
        sound_ns: when the client last sent sound.
        skipped: samples that the model never gets: sent before the session began, or cleared.
        ending_ms: its time is over, and words of speech after this are waited for; None before.
        played_ns: when the last response has been played, if the client's silence is timed.
    """

    has_opening = False
    handlers: ClassVar[Handlers] = {
        **DUPLEX_HANDLERS,
        ev.MediaDecoded: attrgetter("media_decoded"),
        ev.MediaRejected: attrgetter("media_rejected"),
        oa.Configure: attrgetter("configure"),
        AppendSound: attrgetter("append_sound"),
        oa.CommitSound: attrgetter("commit_sound"),
        oa.ClearSound: attrgetter("clear_sound"),
        oa.CreateItem: attrgetter("create_item"),
        oa.DeleteItem: attrgetter("conversation.delete_item"),
        oa.RetrieveItem: attrgetter("conversation.retrieve_item"),
        oa.TruncateItem: attrgetter("conversation.truncate_item"),
        oa.Respond: attrgetter("respond"),
        oa.CancelResponse: attrgetter("cancel_response"),
        ev.SpeechStarted: attrgetter("speech_started"),
        ev.SpeechStopped: attrgetter("speech_stopped"),
        ev.UserTranscribed: attrgetter("user_transcribed"),
    }

    sound: shared.SoundPieces = attrs.field(init=False)
    conversation: shared.Conversation = attrs.field(init=False)
    updates: int = 0
    input_item: str = ""
    uncommitted_bytes: int = 0
    asked_at: int | None = None
    due_units: int = 0
    sound_ns: int = 0
    skipped: int = 0
    ending_ms: int | None = None
    played_ns: int = 0

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.sound = shared.SoundPieces(self.step, self.peer, self.take_second)
        first = shared.first_settings(self.peer)
        self.conversation = shared.Conversation(self.step, self.peer, self.loop, self.sound, first)

    # -- the session ----------------------------------------------------------------------------

    @property
    def samples_waiting(self) -> int:
        """Samples of the client's sound that no unit in the model has yet."""
        return self.loop.input.samples_waiting + self.sound.samples_waiting

    @property
    def gate(self) -> Gate:
        """The gate that judges the client's messages."""
        return Gate.OPEN

    @property
    def settings(self) -> oa.OpenAISession:
        """The settings in force."""
        return self.conversation.settings

    def begin(self) -> None:
        """Queue for the slot, with the settings of a client that has sent nothing."""
        if shared.is_served(self, self.settings.model):
            super().begin()

    def first_slot(self) -> None:
        """Tell the client that the session is there, and add the items that came early."""
        super().first_slot()
        self.conversation.settings = shared.start_time_limit(self, self.settings)
        if self.has_own_time:
            self.timers.cancel("init")
        self.send_created()
        if self.step.behaves(behaviour.AWAITED_EVENTS):
            self.peer.send(oa.ConversationCreated(id=self.conversation.id))
        for _ in range(self.updates):
            self.peer.send(oa.Configured(openai=self.settings))
        self.updates = 0
        self.conversation.add_early()

    def send_created(self, prompt_length: int = 0) -> None:
        """Tell the client that the session is there, and its settings."""
        self.peer.send_created(prompt_length=prompt_length, openai=self.settings)

    def refusal(self, message: ClientMessage) -> Refused | None:
        """Refuse what needs a slot before there is one, and more text than a prompt may have."""
        if not self.peer.is_active and not isinstance(message, _EARLY):
            return Refused(code=ErrorCode.NOT_READY, message="the session is not there yet")
        if self.ending_ms is not None and isinstance(message, oa.Respond):
            return Refused(code=ErrorCode.SESSION_EXPIRED, message="the session is over")
        if (
            not self._is_begun
            and len(self.conversation.prompt(message)) > limits.INSTRUCTIONS_CHARS_MAX
        ):
            text = f"instructions and items of over {limits.INSTRUCTIONS_CHARS_MAX} characters"
            return Refused(code=ErrorCode.INVALID_PAYLOAD, message=text)
        if isinstance(message, oa.Respond) and message.instructions is not None:
            return self._instructions_refusal(message)
        if isinstance(message, oa.CreateItem) and message.item.pictures:
            return self._picture_refusal(message)
        samples = self.loop.speech.samples - self.skipped
        return (
            shared.format_refusal(self.step, message, self.settings, samples)
            or self.sound.refusal(message)
            or self.conversation.refusal(message)
            or self._backlog_refusal(message)
        )

    def _backlog_refusal(self, message: ClientMessage) -> Refused | None:
        """Refuse sound for which there is no room."""
        if not isinstance(message, AppendSound) or not self.step.behaves(behaviour.KEEPS_SOUND):
            return None
        width = 1 if self.sound.coding == "audio/pcm" else SAMPLE16_BYTES  # once expanded
        waiting = len(self.sound.rest) + len(message.pcm16) * width
        if waiting <= limits.BACKLOG_S_MAX * self.sound.second_bytes:
            return None
        most = f"at most {limits.BACKLOG_S_MAX} s of sound may wait for the model"
        text = f"$.audio: {most}: it is not kept"
        return Refused(code=ErrorCode.BUFFER_FULL, message=text, ignored=len(message.ignored))

    def _instructions_refusal(self, message: oa.Respond) -> Refused | None:
        """Refuse instructions of one response once the model has its prompt."""
        if not self._has_prompt or self.step.behaves(behaviour.REPORTS_LATE_INSTRUCTIONS):
            return None
        code, ignored = ErrorCode.UNSUPPORTED, len(message.ignored)
        return Refused(code=code, message=shared.UNHEARD, ignored=ignored)

    def _picture_refusal(self, message: oa.CreateItem) -> Refused | None:
        """Refuse pictures that the model does not take, or for which there is no room."""
        ignored, waiting = len(message.ignored), len(self.loop.input.pictures)
        if not self.peer.is_active:
            text = "$.item.content: pictures are seen once the session is there"
            return Refused(code=ErrorCode.NOT_READY, message=text, ignored=ignored)
        if not self.step.limits.can_see:
            text = "$.item.content: this model sees no pictures"
            return Refused(code=ErrorCode.UNSUPPORTED, message=text, ignored=ignored)
        if waiting + len(message.item.pictures) > limits.FRAMES_MAX:
            text = f"$.item.content: {limits.FRAMES_MAX} pictures at most wait for the next sound"
            return Refused(code=ErrorCode.INVALID_PAYLOAD, message=text, ignored=ignored)
        return None

    def frame_refused(self, error: FrameError, code: ErrorCode) -> None:
        """Answer an unreadable frame, and go on."""
        if self.step.behaves(behaviour.LENIENT_SETTINGS) and error.close_code != CLOSE_TOO_BIG:
            self.send_error(code, error.reason)
        else:
            super().frame_refused(error, code)

    def configure(self, message: oa.Configure) -> None:
        """Change settings, and send those in force."""
        now, speech = self.settings, self.loop.speech
        if not self._is_begun:
            if message.instructions is not None:
                now = attrs.evolve(now, instructions=message.instructions)
            if message.voice is not None:
                voice = "" if message.voice in STOCK_VOICES else message.voice
                now = attrs.evolve(now, voice=voice)
        if message.modality is not None:
            now = attrs.evolve(now, modality=message.modality)
        if message.detection is not None or message.is_undetected:
            now = attrs.evolve(now, detection=message.detection)
            speech.must_listen = False
            speech.is_speaking = speech.is_speaking and message.detection is not None
        now = self._offer(message, now)
        if message.transcribes is not None:
            named = self.step.limits.transcriber if message.transcribes else ""
            now = attrs.evolve(now, transcriber=named)
        is_late_too = self.step.behaves(behaviour.LATE_FORMATS)
        if not speech.samples or (is_late_too and shared.other_formats(message, now)):
            now = attrs.evolve(now, input_format=message.input_format or now.input_format)
            now = attrs.evolve(now, output_format=message.output_format or now.output_format)
            if speech.samples:
                self._forget_sound()
            self.sound.set_format(now.input_format, rate_of(now.input_format))
        self.conversation.settings = now
        self._wait_on()
        if self.peer.is_active:
            self.peer.send(oa.Configured(openai=now))
        else:
            self.updates = min(self.updates + 1, shared.UPDATES_MAX)

    def _offer(self, message: oa.Configure, now: oa.OpenAISession) -> oa.OpenAISession:
        """Return settings with the tools of a change; an open model has no others than before."""
        calls, tools = self.loop.tools, now.tools if message.tools is None else message.tools
        if not self.step.limits.duplex_tools:
            return attrs.evolve(now, tools=tools, tool_choice="none" if tools else "auto")
        choice = message.tool_choice or now.tool_choice
        is_parallel = now.is_parallel if message.is_parallel is None else message.is_parallel
        tools = calls.choose(tools, is_open=self._is_begun, choice=choice)
        calls.is_serial = not is_parallel
        return attrs.evolve(now, tools=tools, tool_choice=choice, is_parallel=is_parallel)

    def _forget_sound(self) -> None:
        """Forget less than a second of sound, which was read in another form."""
        self.sound.forget()
        self.loop.speech.forget()
        self.loop.speech.samples = self.skipped = self.uncommitted_bytes = 0
        self.input_item = ""

    def _wait_on(self) -> None:
        """Give a client time that sets its session up, and has not spoken."""
        if self.peer.is_active and not self._is_begun and not self.has_own_time:
            self.timers.cancel("init")
            self.timers.set("init", self.step.limits.init_wait_s)

    def timed_out(self, name: ev.TimerName) -> None:
        """Handle a timer; a client whose sound comes, but is not a second yet, is waited for."""
        due_ns = self.sound_ns + self.step.limits.init_wait_s * limits.NS_PER_S
        if name == "silence":
            self._take_silence()
        elif name == "quiet":
            self._break_silence()
        elif name == "session" and self._waits_for_words():
            self.timers.set("session", limits.LAST_WORDS_S)
        elif name == "init" and self.sound_ns and due_ns > self.step.now_ns:
            self.timers.set("init", (due_ns - self.step.now_ns) / limits.NS_PER_S)
        else:
            super().timed_out(name)
            if name == "calls":
                self._expect_result()

    def peer_attached(self, event: ev.PeerAttached) -> None:
        """Go on with a client that is back: an answer may still be due."""
        super().peer_attached(event)
        self._expect_answer()

    def finish(self, reason: EndReason) -> None:
        """End the response in progress, and make an item of what was heard."""
        if self.peer.is_active:
            if reason == "timeout" and self.step.behaves(behaviour.ENDS_SPEECH):
                self._close_speech()
            status = "cancelled" if reason == "client" else "failed"
            self.conversation.end_response(status, fault=reason)
            for item_id in self._unwritten:
                self.peer.send(shared.never_written(item_id))
            shared.expired(self, reason)

    def _close_speech(self) -> None:
        """Make an item of speech that is open."""
        speech = self.loop.speech
        if speech.is_speaking:
            at_ms = speech.samples * limits.MS_PER_S // self.sound.rate_hz
            self.speech_stopped(ev.SpeechStopped(at_ns=self.step.now_ns, at_ms=at_ms))

    def _waits_for_words(self) -> bool:
        """Whether the session, whose time is over, still waits for words of what was heard last."""
        is_due = self.peer.is_active and not self.peer.is_detached and self.ending_ms is None
        if not is_due or not self.step.behaves(behaviour.LAST_WORDS):
            return False
        self._close_speech()
        samples = self.loop.speech.samples - self.skipped
        late_s = samples // self.sound.rate_hz - limits.LAST_WORDS_S - self._behind
        self.ending_ms = late_s * limits.MS_PER_S
        if not self._unwritten:
            self.ending_ms = None
            return False
        self.conversation.end_response("failed", fault="timeout")
        self.loop.stop_speaking()
        self._fill_up()
        self._expect_answer()
        return True

    @property
    def _unwritten(self) -> list[str]:
        """The items whose words the session waits for."""
        return [] if self.ending_ms is None else self.conversation.unwritten(self.ending_ms)

    def user_transcribed(self, event: ev.UserTranscribed) -> None:
        """Take words of the client; a session ends that waited for no others."""
        conversation = self.conversation
        conversation.user_transcribed(event)
        if self.ending_ms is None or not event.is_last:
            return
        if event.end_ms + limits.MS_PER_S > conversation.spans[-1][1]:  # of the last item
            for item_id in self._unwritten:
                self.peer.send(oa.InputStep(kind="transcript_done", item_id=item_id))
            self.ending_ms = None
        if not self._unwritten:
            self.end("timeout")

    # -- the model ------------------------------------------------------------------------------

    @property
    def _has_prompt(self) -> bool:
        """Whether instructions come too late for the model."""
        return self._is_begun or self.setup.migration.is_migrating

    @property
    def _is_begun(self) -> bool:
        """Whether the prompt is in the model, or on its way."""
        return self.setup.is_opened or self.setup.pending is not None

    def _open(self, message: oa.Respond | None = None) -> None:
        """Open the model with the settings in force, and the instructions of a first response."""
        if self._is_begun or self.slot.lease is None or self.setup.migration.is_migrating:
            return
        voice = VoiceName(name=self.settings.voice) if self.settings.voice else None
        tools = self.settings.tools if self.step.limits.duplex_tools else ()
        prompt = self.conversation.prompt(message)
        self.setup.init(Init(instructions=prompt, ref_audio=voice, tools=tools))

    def open_if_due(self) -> bool:
        """Open the model at the first second of sound; whether it is open."""
        if not self.setup.is_opened and self.loop.input.waiting.units:
            if not self.setup.migration.move_if_due():
                self._open()
            return False
        return self.setup.is_opened

    def ready(self, _prompt_length: int) -> None:
        """Go on: the model holds the prompt."""
        self.loop.start_if_due()

    def init_rejected(self, message: str) -> None:
        """Go on without tools or in the model's own voice; a prompt too long ends the session."""
        self.peer.send_error(ErrorCode.INVALID_PAYLOAD, message)
        if self.settings.tools and message.startswith("tools"):
            self.conversation.settings = attrs.evolve(self.settings, tools=())
            self.peer.send(oa.Configured(openai=self.settings))
        elif self.settings.voice:
            self.conversation.settings = attrs.evolve(self.settings, voice="")
        else:
            self.end("context_full")
            return
        self._open()

    # -- sound ----------------------------------------------------------------------------------

    def append_sound(self, message: AppendSound) -> None:
        """Take sound: have speech found in it, and bring each full second to the model."""
        if self.ending_ms is not None:
            return
        pcm16 = expand(message.pcm16, self.sound.coding)
        self._detect(pcm16)
        if not self.peer.is_active:
            self.skipped = self.loop.speech.samples
            return
        self.sound_ns = self.step.now_ns
        self.uncommitted_bytes += len(pcm16)
        self.loop.tools.refusals = 0
        self.sound.rest += pcm16
        self._take_seconds()

    def _take_seconds(self) -> None:
        """Bring each full second to the model; more than may wait for it is kept."""
        sound, is_kept = self.sound, self.step.behaves(behaviour.KEEPS_SOUND)
        while len(sound.rest) >= sound.second_bytes and not self.peer.is_closed:
            waiting = len(self.loop.input.waiting.units) + len(sound.resampling)
            if is_kept and waiting >= limits.UNITS_PENDING_MAX:
                return
            self._convert(sound.next_second())

    def _detect(self, pcm16: bytes) -> None:
        """Have speech found in a session's next sound, unless its client has turned that off."""
        how = self.settings.detection
        if how is None or not self.peer.is_active:
            self.loop.speech.samples += len(pcm16) // SAMPLE16_BYTES
        else:
            short_ms = how.backchannel_ms
            if short_ms is None:
                short_ms = self.step.limits.backchannel_ms
            is_over = how.interrupts and self.conversation.response is not None
            speech_ms = short_ms if is_over else 0
            self.loop.speech.detect(
                pcm16, self.sound.rate_hz, how.threshold, how.silence_ms, speech_ms
            )

    def _convert(self, second: bytes) -> None:
        """Bring a second to the model; an answer may be due after it."""
        self.sound.convert(second)
        self._expect_answer()

    def take_second(self, pcm: bytes) -> None:
        """Take a second of sound; the model may be made to listen to it."""
        how, response = self.settings.detection, self.conversation.response
        is_held = how is not None and not how.creates and not self.is_asked and response is None
        is_held = is_held and not self.step.behaves(behaviour.ASKED_ONLY)
        self.loop.append(Append(pcm=pcm, force_listen=is_held))

    def media_decoded(self, event: ev.MediaDecoded) -> None:
        """Take a decoded voice or picture, or a second that was resampled."""
        self.setup.media_decoded(event)
        self.sound.resampled(event.media, event.pcm)
        self._take_seconds()

    def media_rejected(self, event: ev.MediaRejected) -> None:
        """Handle a damaged voice or picture, or take a second as silence."""
        self.setup.media_rejected(event)
        self.sound.resampled(event.media, b"")
        self._take_seconds()

    def speech_started(self, event: ev.SpeechStarted) -> None:
        """Report that the client speaks, and stop the model where the client wants that."""
        how, speech = self.settings.detection, self.loop.speech
        if how is None or speech.is_speaking or not self.peer.is_active:
            return
        self.timers.cancel("quiet")
        speech.is_speaking, self.input_item = True, self.conversation.new_id()
        start_ms = max(event.at_ms - how.prefix_ms, 0)
        step = oa.InputStep(kind="speech_started", item_id=self.input_item, at_ms=start_ms)
        self.peer.send(step)
        if how.interrupts:
            self._interrupt("turn_detected")
            speech.must_listen = True
        self._expect_answer()

    def speech_stopped(self, event: ev.SpeechStopped) -> None:
        """Make an item of what the client said."""
        speech = self.loop.speech
        if not speech.is_speaking or not self.peer.is_active:
            return
        speech.is_speaking = speech.must_listen = False
        self.input_item = self.input_item or self.conversation.new_id()
        step = oa.InputStep(kind="speech_stopped", item_id=self.input_item, at_ms=event.at_ms)
        self.peer.send(step)
        self._commit()

    def commit_sound(self, _message: oa.CommitSound) -> None:
        """Make an item of the sound so far."""
        if not self.uncommitted_bytes:
            code = ErrorCode.INPUT_AUDIO_BUFFER_COMMIT_EMPTY
            self.peer.send_error(code, "there is no sound since the last item")
            return
        self.input_item = self.input_item or self.conversation.new_id()
        is_part = len(self.sound.rest) % self.sound.second_bytes > 0
        if is_part and self.step.behaves(behaviour.ANSWERS_COMMITTED):
            self._fill_up()
        self._commit()

    def _commit(self) -> None:
        previous = self.conversation.last_id
        item = oa.Item(id=self.input_item, role="user", parts=shared.SOUND_PARTS)
        self.uncommitted_bytes, self.input_item = 0, ""
        self.peer.send(oa.InputStep(kind="committed", item_id=item.id, previous_id=previous))
        samples = self.loop.speech.samples - self.skipped
        self.conversation.add_sound(item, samples * limits.MS_PER_S // self.sound.rate_hz)
        if not self.step.behaves(behaviour.KEEPS_SOUND):
            self.due_units = max(self.due_units, limits.ANSWER_UNITS)
        elif self._answers_unasked:
            self.due_units = max(self.due_units, limits.ANSWER_UNITS + self._behind)
        self._expect_answer()

    def clear_sound(self, _message: oa.ClearSound) -> None:
        """Forget the sound that the model has not received yet; what is committed stays."""
        is_kept = self.step.behaves(behaviour.KEEPS_SOUND)
        kept = max(len(self.sound.rest) - self.uncommitted_bytes, 0) if is_kept else 0
        self.skipped += (len(self.sound.rest) - kept) // SAMPLE16_BYTES
        del self.sound.rest[kept:]
        self.uncommitted_bytes = 0
        self.peer.send(oa.InputStep(kind="cleared"))

    # -- silence in place of a client that sends none -------------------------------------------

    def _expect_answer(self) -> None:
        """Have silence taken a second from now, if an answer is due and the client sends none."""
        if self._is_awaited and "silence" not in self.timers.pending and not self.peer.is_closed:
            self.timers.set("silence", 1.0)

    @property
    def _is_awaited(self) -> bool:
        """Whether an answer is due, or the end of the client's speech, or its words."""
        is_open = self.step.behaves(behaviour.ENDS_SPEECH) and self.loop.speech.is_speaking
        return bool(self.due_units) or is_open or self.ending_ms is not None

    def _fill_up(self) -> None:
        """Fill up the second with silence, or take a second of it, in place of the client."""
        silence = bytes(-len(self.sound.rest) % self.sound.second_bytes or self.sound.second_bytes)
        self._detect(silence)
        self.sound.rest += silence
        # the next one is due in a second
        self.sound_ns = self.step.now_ns + limits.NS_PER_S - shared.AWAY_NS
        self._take_seconds()

    def _take_silence(self) -> None:
        """Fill up the second with silence, if the client has stopped sending."""
        if not self._is_awaited or self.peer.is_detached:
            return
        left_ns = self.sound_ns + shared.AWAY_NS - self.step.now_ns
        if left_ns > 0:
            self.timers.set("silence", left_ns / limits.NS_PER_S + 1 / limits.MS_PER_S)
            return
        is_idle = not self._behind
        if is_idle and self.step.behaves(behaviour.ANSWERS_COMMITTED):
            self._fill_up()
        elif is_idle:
            silence = bytes(self.sound.second_bytes - len(self.sound.rest))
            second, self.sound.rest = bytes(self.sound.rest) + silence, bytearray()
            self._detect(silence)
            self._convert(second)
        self._expect_answer()

    # -- a client that says nothing -------------------------------------------------------------

    @property
    def _idle_ms(self) -> int:
        """For how long a client may say nothing before the model speaks; 0: for ever."""
        how = self.settings.detection
        return how.idle_ms if how is not None and how.creates else 0

    def _play(self, samples: int) -> None:
        """Note when a second of a response has been played, after which the client may speak."""
        self.timers.cancel("quiet")
        if self._idle_ms:
            length_ns = samples * limits.NS_PER_S // OUTPUT_RATE_HZ
            self.played_ns = max(self.played_ns, self.step.now_ns) + length_ns

    def _wait_for_speech(self) -> None:
        """Wait for the client to speak, once a response is over and has been played."""
        if self._idle_ms and self.played_ns and not self.loop.speech.is_speaking:
            self.timers.cancel("quiet")
            from_ns = max(self.played_ns, self.step.now_ns)
            self.timers.set_at("quiet", from_ns + self._idle_ms * limits.NS_PER_MS)
            self.played_ns = 0

    def _break_silence(self) -> None:
        """Have the model speak, for the client has said nothing since the last response."""
        is_asked = self.is_asked or self.conversation.response is not None
        is_over = self.peer.is_detached or self.ending_ms is not None
        if not self._idle_ms or is_asked or is_over or self.loop.speech.is_speaking:
            return
        self.input_item = self.input_item or self.conversation.new_id()
        end_ms = (self.loop.speech.samples - self.skipped) * limits.MS_PER_S // self.sound.rate_hz
        step = oa.InputStep(
            kind="timeout_triggered",
            item_id=self.input_item,
            at_ms=end_ms,
            from_ms=max(end_ms - self._idle_ms, 0),
        )
        self.peer.send(step)
        self._commit()
        self.respond(oa.Respond())

    # -- responses ------------------------------------------------------------------------------

    def create_item(self, message: oa.CreateItem) -> None:
        """Add an item, and give its client time to speak."""
        self.conversation.create_item(message)
        self._expect_result()
        self._wait_on()

    def _expect_result(self) -> None:
        """Have the model fed what tools returned, if the client sends no sound."""
        if self.loop.tools.waiting:
            self.due_units = max(self.due_units, limits.ANSWER_UNITS + self._behind)
            self._expect_answer()

    def respond(self, message: oa.Respond) -> None:
        """Ask the model for a response, in the next seconds."""
        loop, conversation = self.loop, self.conversation
        if conversation.response is not None or self.is_asked:
            text = "a response is in progress, or was asked for"
            self.peer.send_error(ErrorCode.ACTIVE_RESPONSE, text)
            return
        self.timers.cancel("quiet")
        self.asked_at, loop.speech.must_listen = 0, False
        is_unheard = message.instructions is not None and self._has_prompt
        conversation.asked = attrs.evolve(message, is_unheard=is_unheard)
        if self.step.behaves(behaviour.ANSWERS_COMMITTED):
            self.asked_at = self._last_second()
            if self._seconds <= self.asked_at or self._seconds == self._started:
                self._fill_up()
        self.due_units = max(self.due_units, limits.ANSWER_UNITS + self._behind)
        self._open(message)
        self._expect_answer()

    @property
    def is_asked(self) -> bool:
        """Whether a response was asked for, and has not begun."""
        return self.asked_at is not None

    @property
    def _seconds(self) -> int:
        """Full seconds of input so far, those that wait included."""
        kept = len(self.sound.rest) // self.sound.second_bytes
        return self.loop.input.assembler.ordinal + len(self.sound.resampling) + kept

    @property
    def _started(self) -> int:
        """Seconds of input that the model has, or that were lost."""
        return self.loop.input.assembler.ordinal - len(self.loop.input.waiting.units)

    @property
    def _behind(self) -> int:
        """Seconds of input that the model has not answered yet."""
        return self._seconds - self._started + (self.loop.unit is not None)

    def _last_second(self) -> int:
        """Return the second of the last sample in an item, or of the last one if that began."""
        second_bytes = self.sound.second_bytes
        unfilled = len(self.sound.rest) % second_bytes
        received = self._seconds * second_bytes + unfilled
        committed = (received - self.uncommitted_bytes - 1) // second_bytes
        return committed if committed >= self._started else max((received - 1) // second_bytes, 0)

    @property
    def _answers_unasked(self) -> bool:
        """Whether the model answers by itself."""
        return self.settings.detection is not None and self.settings.detection.creates

    def must_speak(self) -> bool:
        """Whether the unit that starts may not listen: a response was asked for."""
        is_due = self.asked_at is not None and self._started > self.asked_at
        return is_due and self.step.limits.can_speak

    def must_listen(self) -> bool:
        """Whether the unit that starts may only listen: the model is not asked, or for later."""
        if self.ending_ms is not None:
            return True
        if self.conversation.is_speaking or not self.step.behaves(behaviour.ASKED_ONLY):
            return False
        if self.asked_at is not None:
            return self._started <= self.asked_at
        return not self._answers_unasked

    def cancel_response(self, message: oa.CancelResponse) -> None:
        """Have the model stop speaking, or not begin to."""
        if self.conversation.cancels(message, is_asked=self.is_asked):
            self._interrupt("client_cancelled")

    def _interrupt(self, reason: oa.ResponseReason) -> None:
        """Have the model listen, and end the response that is there or was asked for."""
        self.loop.stop_speaking()
        self.loop.response_id, self.due_units = None, 0
        self.conversation.end_response("cancelled", reason)
        if self.is_asked:
            self.asked_at = None
            self.conversation.end_unbegun("cancelled", reason)

    def send_outcome(self, outcome: Listen | Speech) -> None:
        """Send a unit's speech, as a part of its response."""
        if isinstance(outcome, Listen):
            self.conversation.end_response("completed")
            self._wait_for_speech()
            self._listened_on()
            self._take_seconds()
            return
        self.asked_at = None
        self._play(len(outcome.pcm) // SAMPLE_BYTES)
        self.conversation.speak(outcome)
        if self.conversation.is_too_long:
            self.loop.stop_speaking()
            self.loop.response_id = None
            self.conversation.end_response("incomplete", "max_output_tokens")
        is_over = self.conversation.response is None
        if is_over:
            self._wait_for_speech()
        self.due_units = 0 if is_over else max(self.due_units, 2)
        self._expect_answer()
        self._take_seconds()

    def send_calls(self, calls: Sequence[ToolCalled]) -> None:
        """Send calls in the response in progress, which they end, or in one of their own.

        The model gets the reason of a refused call like a result, a few times in a row in silence.
        """
        if calls and self.conversation.response is None:
            self.asked_at = None
            self.conversation.end_unbegun("completed", calls=calls)
        elif calls:
            self.loop.response_id = None
            self.conversation.end_response("completed", calls=calls)
        if calls or self.loop.tools.may_feed_refusals():
            self._expect_result()

    def unit_undone(self) -> None:
        """End the response, of which a unit failed."""
        self.conversation.end_response("failed", fault="inference_error")
        self._take_seconds()

    def _listened_on(self) -> None:
        self.due_units = max(self.due_units - 1, 0)
        if self.due_units or not self.is_asked:
            self._expect_answer()
            return
        self.asked_at = None
        text = "the model listens, and does not speak"
        self.conversation.end_unbegun("failed", fault="no_speech", message=text)
