"""What a session of `openai` hears: the client's sound, where it speaks, and silence in its place.

- Where the client speaks is found outside (`DetectSpeech`). That is told, becomes an item, and
  stops the model where the client wants it to (barge-in); while it speaks on, the model listens.
- A client may stop sending: while an answer is due, or goes on, silence is heard in its place, a
  second each second.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import attrs

from ..values import events as ev
from ..values.errors import ErrorCode
from ..values.items import Item, Part
from ..values.limits import ANSWER_UNITS, MS_PER_S, NS_PER_S
from ..values.model import SAMPLE16_BYTES
from ..values.openai import ClearSound, CommitSound, InputStep, ReplyReason
from ..values.requests import AppendSound
from ..values.sound import Coding
from ..values.state import State
from ..wire.g711 import expand
from .replies import Replies

AWAY_NS: Final = 3 * NS_PER_S // 2
"""A client that sends no sound for so long has stopped: pieces of a second may be a little late."""
UTTERANCES_MAX: Final = 16
"""Of what was said so long ago nothing is told any more."""
_SOUND: Final = (Part(kind="input_audio"),)


@attrs.define
class Utterance:
    """What the client said, as it is written down: where it begins and ends in its sound."""

    start_ms: int
    end_ms: int
    text: str = ""
    is_whole: bool = False


@attrs.define(kw_only=True, eq=False)
class Hearing(Replies):
    """What was heard of the client, and what it expects for it.

    Attributes:
        heard_item: the item that the client's speech, or its sound so far, will be.
        uncommitted_bytes: sound since the last item of sound.
        is_asked: a response was asked for, and has not begun.
        due_units: seconds for which an answer is still due.
        sound_ns: when the client last sent sound.
        skipped: samples that the model never gets: of before the session, or cleared.
        spans: the last items of sound, each with its end in milliseconds of the model's sound.
        utterances: what is written down, and in no item yet.
    """

    heard_item: str = ""
    uncommitted_bytes: int = 0
    is_asked: bool = False
    due_units: int = 0
    sound_ns: int = 0
    skipped: int = 0
    spans: deque[tuple[str, int]] = attrs.Factory(lambda: deque(maxlen=UTTERANCES_MAX))
    utterances: deque[Utterance] = attrs.Factory(lambda: deque(maxlen=UTTERANCES_MAX))

    @property
    def coding(self) -> Coding:
        """How the client's sound is written."""
        return self.told.heard

    def append_sound(self, message: AppendSound) -> None:
        """Take sound: find speech in it, and have each second that is full run."""
        pcm16 = expand(message.pcm16, self.coding)
        self._detect(pcm16)
        if self.state is not State.ACTIVE:
            self.skipped = self.samples
            return
        self.sound_ns = self.now_ns
        self.uncommitted_bytes += len(pcm16)
        self.take_sound(pcm16)

    def _detect(self, pcm16: bytes) -> None:
        """Have speech found in a session's next sound, unless its client has turned that off."""
        how = self.told.detection
        if how is None or self.state is not State.ACTIVE:
            self.samples += len(pcm16) // SAMPLE16_BYTES
        else:
            self.detect(pcm16, self.rate_hz, how.threshold, how.silence_ms)

    def speech_started(self, event: ev.SpeechStarted) -> None:
        """Tell that the client speaks, and stop the model where the client wants that."""
        how = self.told.detection
        if how is None or self.is_speaking or self.state is not State.ACTIVE:
            return
        self.is_speaking, self.heard_item = True, self.new_id()
        start_ms = max(event.at_ms - how.prefix_ms, 0)
        self.say(InputStep(kind="speech_started", item_id=self.heard_item, at_ms=start_ms))
        if how.interrupts:
            self.interrupt_reply("turn_detected")
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
        self.expect_answer()

    def append(self, message: Any) -> None:
        """Take a second of sound; the model may be made to listen to it."""
        how = self.told.detection
        is_held = how is not None and not how.creates and not self.is_asked and self.reply is None
        if is_held:
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
        heard = self.samples - self.skipped
        self.spans.append((item.id, heard * MS_PER_S // self.rate_hz))
        self._place_words()
        self.due_units = max(self.due_units, ANSWER_UNITS)
        self.expect_answer()

    # -- its words ------------------------------------------------------------------------------

    def user_transcribed(self, event: ev.UserTranscribed) -> None:
        """Take words of the client; they are told once the item of their sound is there."""
        if not self.utterances or self.utterances[-1].is_whole:
            self.utterances.append(Utterance(event.start_ms, event.end_ms))
        said = self.utterances[-1]
        said.text, said.end_ms, said.is_whole = said.text + event.text, event.end_ms, event.is_last
        if event.is_last and self.state is State.ACTIVE:
            self._place_words()

    def _place_words(self) -> None:
        for said in [it for it in self.utterances if it.is_whole]:
            item_id = next((name for name, end_ms in self.spans if said.start_ms < end_ms), "")
            if item_id:
                self.utterances.remove(said)
                self._tell_words(item_id, said)

    def _tell_words(self, item_id: str, said: Utterance) -> None:
        item, text = self.items.get(item_id), said.text.strip()
        if item is None or not text or not self.told.transcriber:
            return
        whole = " ".join(filter(None, [*(part.text for part in item.parts), text]))
        self.items[item_id] = attrs.evolve(item, parts=(Part(kind="input_audio", text=whole),))
        took_ms = said.end_ms - said.start_ms
        self.say(InputStep(kind="transcript_delta", item_id=item_id, text=text))
        self.say(InputStep(kind="transcript_done", item_id=item_id, text=whole, at_ms=took_ms))

    # -- by hand --------------------------------------------------------------------------------

    def clear_sound(self, _message: ClearSound) -> None:
        """Forget the sound that the model has not heard yet."""
        self.skipped += len(self.unheard) // SAMPLE16_BYTES
        self.unheard, self.uncommitted_bytes = bytearray(), 0
        self.say(InputStep(kind="cleared"))

    # -- silence in place of a client that sends none ----------------------------------------------

    def expect_answer(self) -> None:
        """Have silence heard a second from now, if an answer is due and the client sends none."""
        if self.due_units and "silence" not in self.timers.pending and not self.is_closed:
            self.set_timer("silence", 1.0)

    def peer_attached(self, event: ev.PeerAttached) -> None:
        """Go on with a client that is back: an answer may still be due."""
        super().peer_attached(event)
        self.expect_answer()

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
            second, self.unheard = bytes(self.unheard) + silence, bytearray()
            self._detect(silence)
            self.hear(second)
        self.expect_answer()

    def interrupt_reply(self, reason: ReplyReason) -> None:
        """Have the model listen, and end the response that is there or was asked for."""
        self.fall_silent()
        self.response_id, self.due_units = None, 0
        self.finish("cancelled", reason)
        if self.is_asked:
            self.is_asked = False
            self.give_none("cancelled", reason)
