"""A transcription session of OpenAI's Realtime API: what its client says is transcribed.

started -> fed, fed, ... -> committed -> completed | failed

- Each utterance is an item. Where it starts and ends is found outside (`DetectSpeech`), and sound
  between utterances is not transcribed; or the client commits its sound itself.
- Its sound is fed second by second while it is spoken, so its text comes as the client speaks. If
  the model fails, the rest of the utterance is discarded.
- Settings are the form of the sound, and how speech is found. No message tells the session's end.
"""

from __future__ import annotations

from collections import deque
from operator import attrgetter
from typing import ClassVar, Final

import attrs

from ..values import effects as ef
from ..values import events as ev
from ..values import openai as oa
from ..values.behaviour import ENDS_SPEECH, LATE_FORMATS
from ..values.errors import ErrorCode
from ..values.frames import Refused
from ..values.limits import MS_PER_S, NS_PER_S
from ..values.messages import EndReason
from ..values.model import INPUT_RATE_HZ, SAMPLE16_BYTES, rate_of
from ..values.requests import AppendSound, ClientMessage, Commit
from ..values.state import Gate, ModelChosen
from ..wire.audio import DOWN, HISTORY_BYTES, expand, resample, to_pcm16
from . import conversation as shared
from .kind import Handlers
from .transcription import CHUNK_HANDLERS, ChunkKind, Utterance

FOUND_MS_MAX: Final = 2 * MS_PER_S
"""Speech is found so long after its start at most: sound before it is kept for so long."""


@attrs.define
class DictatedUtterance:
    """An utterance as its client knows it.

    Attributes:
        item_id: its item.
        samples: of its sound, at the client's rate.
        is_lost: the model failed at it: the rest of its sound is discarded.
    """

    item_id: str
    samples: int = 0
    is_lost: bool = False


@attrs.define(eq=False)
class Dictation(ChunkKind):
    """A session of the Realtime API that transcribes.

    Attributes:
        settings: those in force.
        updates: settings that were changed before the session was there, and not sent yet.
        items_made: how many ids were made.
        last_item: the item that was committed last.
        open: the utterance being spoken.
        unanswered: the utterances without their whole text, oldest first.
        sound: PCM16 at the client's rate that is in no utterance yet, or does not fill its second.
        tail: the end of the sound before it, as the resampler needs it.
        samples: that the client sent, without those in `sound` of before the session.
        searched: of them, those that are known to be in an utterance or not: the last piece is not
            fed before it is searched, for the utterance may end in it.
        is_speaking: the client speaks, as far as that is looked for.
    """

    closed_in = frozenset()
    handlers: ClassVar[Handlers] = {
        **CHUNK_HANDLERS,
        oa.Configure: attrgetter("configure"),
        AppendSound: attrgetter("append_sound"),
        oa.CommitSound: attrgetter("commit_sound"),
        oa.ClearSound: attrgetter("clear_sound"),
        ev.SpeechStarted: attrgetter("speech_started"),
        ev.SpeechStopped: attrgetter("speech_stopped"),
    }

    settings: oa.OpenAISession = attrs.Factory(oa.OpenAISession)
    updates: int = 0
    items_made: int = 0
    last_item: str | None = None
    open: DictatedUtterance | None = None
    unanswered: deque[DictatedUtterance] = attrs.Factory(deque)
    sound: bytes = b""
    tail: bytes = bytes(HISTORY_BYTES)
    samples: int = 0
    searched: int = 0
    is_speaking: bool = False

    # -- the session ----------------------------------------------------------------------------

    @property
    def gate(self) -> Gate:
        """The gate that judges the client's messages."""
        return Gate.OPEN

    def begin(self) -> None:
        """Queue for the slot, with the settings of a client that has said nothing."""
        first, detection = shared.first_settings(self.peer), oa.TurnDetection(kind="server_vad")
        self.settings = attrs.evolve(first, transcriber=first.model, detection=detection)
        if shared.is_served(self, first.model):
            super().begin()

    def first_slot(self) -> None:
        """Tell the client that the session is there, and take the sound that came early."""
        self.settings = shared.start_time_limit(self, self.settings)
        self.peer.send_created(prompt_length=0, openai=self.settings)
        self.peer.move(ModelChosen)
        self.peer.active_ns = self.step.now_ns
        if not self.has_own_time:
            self.timers.set("idle", self.step.limits.idle_s)
        for _ in range(self.updates):
            self.peer.send(oa.Configured(openai=self.settings))
        early, self.sound, self.updates = self.sound, b"", 0
        self._take(early)

    def timed_out(self, name: ev.TimerName) -> None:
        """End the session, if the client is silent or its time is over; or what it speaks."""
        match name:
            case "idle":
                self.loop.check_idle()
            case "session":
                self.loop.end_after("timeout")
            case "silence":
                self._check_speech_end()
            case _:
                super().timed_out(name)

    def peer_attached(self, event: ev.PeerAttached) -> None:
        """Go on with a client that is back: its speech may be open."""
        super().peer_attached(event)
        self._check_speech_end()

    def _check_speech_end(self) -> None:
        """End the speech of a client that sends no sound any more."""
        if not self.is_speaking or self.peer.is_detached or not self.step.behaves(ENDS_SPEECH):
            return
        left_ns = self.peer.active_ns + shared.AWAY_NS - self.step.now_ns
        if left_ns > 0:
            self.timers.cancel("silence")
            self.timers.set("silence", left_ns / NS_PER_S + 1 / MS_PER_S)
        else:
            at_ms = self.samples * MS_PER_S // self._rate_hz
            self.speech_stopped(ev.SpeechStopped(at_ns=self.step.now_ns, at_ms=at_ms))

    def close_utterance(self) -> None:
        """Commit the utterance that is open."""
        self.is_speaking = False
        if self.open is not None:
            self._commit()

    def finish(self, reason: EndReason) -> None:
        """Tell why the session ends, and which items stay without their text."""
        is_due = self.has_own_time and reason in ("timeout", "idle") and self.peer.is_active
        for spoken in self.unanswered if is_due else ():
            self.peer.send(shared.never_written(spoken.item_id))
        shared.expired(self, reason)

    def refusal(self, message: ClientMessage) -> Refused | None:
        """Refuse what needs the session, another model, and sound for which there is no room."""
        ignored, limits = len(getattr(message, "ignored", ())), self.step.limits
        code, text = ErrorCode.INVALID_PAYLOAD, ""
        match message:
            case oa.CommitSound() | oa.ClearSound() if not self.peer.is_active:
                code, text = ErrorCode.NOT_READY, "the session is not there yet"
            case oa.Configure(transcriber=str() as name) if name not in limits.models:
                code = ErrorCode.MODEL_NOT_FOUND
                path = "$.session.audio.input.transcription.model"
                text = f"{path}: {shared.no_model(name)}"
            case oa.Configure():
                samples = self.samples or len(self.sound) // SAMPLE16_BYTES
                return shared.format_refusal(self.step, message, self.settings, samples)
            case AppendSound(pcm16=sound):
                coding = self.settings.input_format
                refused = shared.size_refusal(self.step, message, coding, self._rate_hz)
                if refused is not None:
                    return refused
                waiting = self.loop.waiting_bytes + len(self.sound)
                width = 1 if coding == "audio/pcm" else SAMPLE16_BYTES  # once expanded
                if waiting + len(sound) * width > limits.sound_bytes:
                    code, most = ErrorCode.BUFFER_FULL, limits.sound_bytes
                    text = f"{waiting} bytes of sound wait, at most {most} may: it is not kept"
        return Refused(code=code, message=text, ignored=ignored) if text else None

    def configure(self, message: oa.Configure) -> None:
        """Change settings, and send those in force."""
        now = self.settings
        if message.transcriber is not None:
            now = attrs.evolve(now, transcriber=message.transcriber)
        if message.input_format is not None and not self.samples and not self.sound:
            now = attrs.evolve(now, input_format=message.input_format)
        elif self.step.behaves(LATE_FORMATS) and shared.other_formats(message, now):
            now = attrs.evolve(now, input_format=message.input_format or now.input_format)
            self._forget_open()
            self.samples = self.searched = 0
        if message.detection is not None or message.is_undetected:
            now = attrs.evolve(now, detection=message.detection)
        if now.detection is not None and self.settings.detection is None and self.open is not None:
            self._commit()
        self.is_speaking = self.is_speaking and now.detection is not None
        self.settings = now
        if self.peer.is_active:
            self.peer.send(oa.Configured(openai=now))
        else:
            self.updates = min(self.updates + 1, shared.UPDATES_MAX)

    # -- sound ----------------------------------------------------------------------------------

    @property
    def _rate_hz(self) -> int:
        return rate_of(self.settings.input_format)

    def append_sound(self, message: AppendSound) -> None:
        """Take sound: it belongs to an utterance, or is kept for one that may have begun."""
        self.loop.appends += 1
        pcm16 = expand(message.pcm16, self.settings.input_format)
        if self.peer.is_active:
            if "idle" not in self.timers.pending and self.loop.ending is None:
                self.timers.set("idle", self.step.limits.idle_s)
            self._take(pcm16)
        else:
            self.sound += pcm16

    def _take(self, pcm16: bytes) -> None:
        how, at = self.settings.detection, self.samples
        self.sound += pcm16
        self.samples += len(pcm16) // SAMPLE16_BYTES
        self.searched = self.samples if how is None else at
        if how is None:
            if self.open is None and pcm16:
                self._start(self._new_id())
        elif pcm16:
            self.step.do(
                ef.DetectSpeech(
                    at=at,
                    rate_hz=self._rate_hz,
                    data=pcm16,
                    threshold=how.threshold,
                    silence_ms=how.silence_ms,
                    is_speech=self.is_speaking,
                )
            )
            if not self.is_speaking:
                kept_ms = how.prefix_ms + FOUND_MS_MAX
                kept_bytes = len(pcm16) + kept_ms * self._rate_hz // MS_PER_S * SAMPLE16_BYTES
                self.sound = self.sound[-kept_bytes:]
        self._feed()

    def speech_started(self, event: ev.SpeechStarted) -> None:
        """Start an utterance, a little before the speech that was found."""
        how = self.settings.detection
        if how is None or self.is_speaking or not self.peer.is_active:
            return
        self.is_speaking = True
        if self.open is not None:
            self._commit()
        start_ms = max(event.at_ms - how.prefix_ms, 0)
        item_id = self._new_id()
        self.peer.send(oa.InputStep(kind="speech_started", item_id=item_id, at_ms=start_ms))
        later = max(self.samples - start_ms * self._rate_hz // MS_PER_S, 0)
        self.sound = self.sound[max(len(self.sound) - later * SAMPLE16_BYTES, 0) :]
        self._start(item_id)
        self._feed()
        self._check_speech_end()

    def speech_stopped(self, event: ev.SpeechStopped) -> None:
        """Commit the utterance; sound after it may belong to the next one."""
        if not self.is_speaking or not self.peer.is_active:
            return
        self.is_speaking = False
        if self.open is None:
            return
        name = self.open.item_id
        self.peer.send(oa.InputStep(kind="speech_stopped", item_id=name, at_ms=event.at_ms))
        later = max(self.samples - event.at_ms * self._rate_hz // MS_PER_S, 0)
        kept = max(len(self.sound) - later * SAMPLE16_BYTES, 0)
        own, rest = self.sound[:kept], self.sound[kept:]
        self.sound = own
        self._commit()
        self.sound = rest

    def commit_sound(self, _message: oa.CommitSound) -> None:
        """Commit the utterance as far as it was spoken."""
        if self.open is None:
            code = ErrorCode.INPUT_AUDIO_BUFFER_COMMIT_EMPTY
            self.peer.send_error(code, "there is no sound since the last item")
            return
        self.is_speaking = False
        self._commit()

    def clear_sound(self, _message: oa.ClearSound) -> None:
        """Forget the utterance that is not committed: its text ends where it is."""
        self.peer.send(oa.InputStep(kind="cleared"))
        self._forget_open()

    def _forget_open(self) -> None:
        spoken, self.open, self.sound, self.is_speaking = self.open, None, b"", False
        if spoken is None or spoken.is_lost:
            return
        self.unanswered.pop()
        utterance = self.loop.pending[-1]
        self.loop.waiting_bytes -= len(utterance.sound)
        utterance.sound.clear()
        utterance.is_final = utterance.is_answered = utterance.is_transcribed = True
        self.loop.go_on()

    # -- utterances -----------------------------------------------------------------------------

    def _new_id(self) -> str:
        self.items_made += 1
        return self.step.derive("item", self.items_made)

    def _start(self, item_id: str) -> None:
        utterance = self.loop.open_utterance()
        self.tail = bytes(HISTORY_BYTES)
        self.open = DictatedUtterance(item_id, is_lost=utterance is None)
        if utterance is not None:
            utterance.is_begun = True
            self.unanswered.append(self.open)

    def _feed(self) -> None:
        """Give each second of the open utterance that is full to the model."""
        second_bytes = self._rate_hz * SAMPLE16_BYTES
        kept_bytes = second_bytes + (self.samples - self.searched) * SAMPLE16_BYTES
        while self.open is not None and len(self.sound) >= kept_bytes and not self.peer.is_closed:
            second, self.sound = self.sound[:second_bytes], self.sound[second_bytes:]
            self._give(second)

    def _give(self, pcm16: bytes) -> None:
        """Give sound of the open utterance to the model, at the model's rate."""
        assert self.open is not None
        self.open.samples += len(pcm16) // SAMPLE16_BYTES
        if self.open.is_lost:
            return
        pcm16 += bytes(-len(pcm16) % (DOWN * SAMPLE16_BYTES))
        sound = to_pcm16(resample(self.tail + pcm16, self._rate_hz, INPUT_RATE_HZ))
        self.tail = (self.tail + pcm16)[-HISTORY_BYTES:]
        self.loop.pending[-1].sound += sound
        self.loop.waiting_bytes += len(sound)
        self.loop.go_on()

    def _commit(self) -> None:
        """Close the open utterance, with the sound that is kept, and make it an item."""
        assert self.open is not None
        if self.sound:
            self._give(self.sound)
        spoken, self.open, self.sound = self.open, None, b""
        previous = self.last_item
        item = shared.whole(
            self.step, oa.Item(id=spoken.item_id, role="user", parts=shared.SOUND_PARTS)
        )
        self.last_item = item.id
        self.peer.send(oa.InputStep(kind="committed", item_id=item.id, previous_id=previous))
        self.peer.send(oa.ItemStep(kind="added", item=item, previous_id=previous))
        self.peer.send(oa.ItemStep(kind="done", item=item, previous_id=previous))
        if not spoken.is_lost:
            self.loop.commit(Commit(final=True))

    # -- out ------------------------------------------------------------------------------------

    def send_text(self, text: str) -> None:
        """Send text of the oldest utterance's item."""
        name = self.unanswered[0].item_id
        self.peer.send(oa.InputStep(kind="transcript_delta", item_id=name, text=text))

    def send_answer(self, utterance: Utterance) -> None:
        """Send the whole text of the oldest utterance's item."""
        spoken, text = self.unanswered.popleft(), "".join(utterance.texts).strip()
        took_ms = spoken.samples * MS_PER_S // self._rate_hz
        step = oa.InputStep(
            kind="transcript_done", item_id=spoken.item_id, text=text, at_ms=took_ms
        )
        self.peer.send(step)

    def send_failure(self, _utterance: Utterance, code: ErrorCode, text: str) -> None:
        """Tell that the model failed at an utterance."""
        spoken = self.unanswered.popleft()
        spoken.is_lost = True
        step = oa.InputStep(kind="transcript_failed", item_id=spoken.item_id, fault=code, text=text)
        self.peer.send(step)
