"""A duplex session, heard as its client hears it: what crosses the wire becomes a conversation.

It is fed with the messages of both ends, live from the machine and later from a log, so that both
give the same. Memory holds intervals, the sound that may still move (`placing`) and 200 ms more.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import attrs

from protocol.values import events as ev
from protocol.values import messages as ms
from protocol.values import openai as oa
from protocol.values.model import OUTPUT_RATE_HZ, SAMPLE_BYTES
from protocol.values.modes import Mode
from protocol.values.requests import Append, AppendSound, ClientMessage, Init
from protocol.values.sound import Coding, rate_of
from protocol.wire.rates import LIVE_RATE_HZ, Heard

from .conversation import Conversation, ticks_of
from .hearing import UserSpeech
from .placing import Line, Sound, Stretch, time_of
from .speaking import ModelSpeech

NOTES_MAX: Final = 4096
"""Pauses, and times at which the model was asked to stop; a client may ask with each sound."""


class ClientSound:
    """Reads a client's sound at the model's rate; each message is to be read once.

    `is_counted`: only how much sound came matters, and it is read as silence.
    """

    def __init__(self, mode: Mode, endpoint: ev.Endpoint) -> None:
        self.mode: Final[Mode] = mode
        self.endpoint: Final[ev.Endpoint] = endpoint
        self._heard, self._has_sound = Heard(), False
        self._spoken_hz = OUTPUT_RATE_HZ
        self.is_counted = False

    def read(self, request: ClientMessage) -> ClientMessage:
        """Return the message; sound in pieces as an append."""
        match request:
            case Init(live=settings) if settings.rate_hz:
                self._heard = Heard(settings.rate_hz, settings.coding)
                self._spoken_hz = settings.rate_hz
            case oa.Configure(heard=str() as coding) if not self._has_sound:
                self._heard = Heard(rate_of(coding), coding)
            case AppendSound(pcm16=pcm16) if self.endpoint in ev.PIECES:
                self._has_sound = True
                if self.is_counted:
                    return Append(pcm=bytes(self._heard.skip(pcm16) * SAMPLE_BYTES))
                return Append(pcm=self._heard.take(pcm16))
        return request

    def spoken_hz(self, coding: Coding) -> int:
        """Return the rate of the model's sound as sent."""
        return self._spoken_hz if coding == "audio/pcm" else rate_of(coding)


@attrs.define
class _Heard:
    """Sound of the user, and how far its stretch had moved when it was placed."""

    sound: Sound
    stretch: Stretch
    moved: int

    def placed(self) -> Sound:
        """Return the sound where it lies now."""
        back = self.stretch.moved - self.moved
        return attrs.evolve(self.sound, begin=self.sound.begin - back) if back else self.sound


class Talk:
    """One session; each call has its time, which does not decrease."""

    def __init__(self) -> None:
        self.user: Final = UserSpeech()
        self.model: Final = ModelSpeech()
        self._line: Final = Line("user")
        self._heard = deque[_Heard]()
        self._is_speaking = False
        self._stops: list[int] = []
        self._pauses: list[int] = []
        self._is_new = True

    def received(self, at_ns: int, message: ClientMessage) -> None:
        """Take a client's message that the session took; sound as `ClientSound` reads it."""
        if isinstance(message, Append):
            if message.force_listen:
                self._asked_to_stop(at_ns)
            self._hear(at_ns, message.pcm)

    def sent(self, at_ns: int, message: ms.ServerMessage, rate_hz: int = LIVE_RATE_HZ) -> None:
        """Take a message to the client, whose sound has a rate."""
        match message:
            case ms.Speech(text=text, pcm=pcm, response_id=response_id):
                samples = len(pcm) // SAMPLE_BYTES * OUTPUT_RATE_HZ // rate_hz
                self.model.say(at_ns, text, samples, response_id)
                self._is_speaking, self._is_new = not message.end_of_turn, True
            case oa.ReplyStep(kind="text_delta", text=text, response_id=response_id):
                self.model.say(at_ns, text, 0, response_id)
            case ms.Listen() if self._is_speaking:
                self.stopped(at_ns)
            case ms.Interrupted():
                self.stopped(at_ns)
            case oa.ReplyState(reply=reply) if reply.status == "cancelled":
                self.stopped(at_ns)
            case ms.Paused() if len(self._pauses) < NOTES_MAX:
                self._pauses.append(ticks_of(at_ns))

    def stopped(self, at_ns: int) -> None:
        """End the model's sound: its client plays it no longer."""
        self.model.cut(at_ns)
        self._is_speaking = False

    def conversation(self, end_ns: int) -> Conversation:
        """Return what was heard, once the session is over."""
        self._settle(None)
        return Conversation(
            user=self.user.spans(),
            model=self.model.spans(),
            texts=tuple(self.model.texts),
            stops=tuple(self._stops),
            pauses=tuple(self._pauses),
            end=ticks_of(end_ns),
        )

    def _asked_to_stop(self, at_ns: int) -> None:
        """Note it, if the model said anything since the last time: only the first counts."""
        if self._is_new and len(self._stops) < NOTES_MAX:
            self._stops.append(ticks_of(at_ns))
        self._is_new = False

    def _hear(self, at_ns: int, pcm: bytes) -> None:
        begin = self._line.place(at_ns, len(pcm) // SAMPLE_BYTES, is_captured=True)
        sound = Sound(voice="user", at_ns=at_ns, begin=begin, pcm=pcm)
        stretch = self._line.stretch
        self._heard.append(_Heard(sound, stretch, stretch.moved))
        self._settle(at_ns)

    def _settle(self, now_ns: int | None) -> None:
        """Search sound that moves no more."""
        line = self._line
        settled_ns = None if now_ns is None or line.is_settled else line.settled_ns(now_ns)
        while self._heard:
            sound = self._heard[0].placed()
            if settled_ns is not None and time_of("user", sound.begin) > settled_ns:
                break
            self._heard.popleft()
            self.user.hear(sound)
        self.user.place(now_ns)
