"""A duplex session, heard as its client hears it: what crosses the wire becomes a conversation.

It is fed with the messages of both ends, live from the machine and later from a log, so that both
give the same. Memory holds intervals, the sound that may still move (`placing`) and 2 s more.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import attrs

from protocol.values import events as ev
from protocol.values import messages as ms
from protocol.values import openai as oa
from protocol.values.model import INPUT_RATE_HZ, OUTPUT_RATE_HZ, SAMPLE16_BYTES, SAMPLE_BYTES
from protocol.values.modes import Mode
from protocol.values.requests import Append, AppendSound, ClientMessage, Init
from protocol.values.sound import Coding, rate_of
from protocol.wire.g711 import expand
from protocol.wire.rates import LIVE_RATE_HZ, ratio_of, to_pcm16

from .conversation import TICK_HZ, Conversation, ticks_of
from .hearing import UserSound, UserSpeech
from .placing import Line, Stretch, time_of
from .speaking import ModelSpeech

NOTES_MAX: Final = 4096
"""Pauses, and times at which the model was asked to stop; a client may ask with each sound."""


@attrs.frozen
class Piece:
    """Sound of a client as it came: 16-bit LE, mono; `is_whole`: the model hears all sound."""

    pcm16: bytes
    rate_hz: int
    is_whole: bool


class ClientSound:
    """Knows how a client writes its sound; each message is to be read once."""

    def __init__(self, mode: Mode, endpoint: ev.Endpoint) -> None:
        self.mode: Final[Mode] = mode
        self.endpoint: Final[ev.Endpoint] = endpoint
        self._coding: Coding = "audio/pcm"
        self._rate_hz = self._spoken_hz = LIVE_RATE_HZ
        self._has_sound = False

    def read(self, request: ClientMessage) -> ClientMessage | Piece:
        """Return the message; sound in pieces as one."""
        match request:
            case AppendSound(pcm16=data) if self.endpoint in ev.PIECES:
                self._has_sound = True
                is_whole = self.endpoint == "live"
                return Piece(expand(data, self._coding), self._rate_hz, is_whole)
            case Init(live=settings) if settings.rate_hz:
                self._coding = settings.coding
                self._rate_hz = self._spoken_hz = settings.rate_hz
            case oa.Configure(heard=str() as coding) if not self._has_sound:
                self._coding, self._rate_hz = coding, rate_of(coding)
        return request

    def spoken_hz(self, coding: Coding) -> int:
        """Return the rate of the model's sound as sent."""
        return self._spoken_hz if coding == "audio/pcm" else rate_of(coding)


@attrs.define
class _Heard:
    """Sound of the user that may move, and how far its stretch had moved when it was placed."""

    sound: UserSound
    stretch: Stretch
    moved: int

    def placed(self) -> UserSound:
        """Return the sound where it lies now."""
        back = self.stretch.moved - self.moved
        self.sound.begin -= back
        self.sound.end -= back
        self.moved += back
        return self.sound


class Talk:
    """One session; each call has its time, which does not decrease."""

    def __init__(self) -> None:
        self.user: Final = UserSpeech()
        self.model: Final = ModelSpeech()
        self._line: Final = Line("user")
        self._heard = deque[_Heard]()
        self._rest = self._ticks = 0
        self._is_speaking = False
        self._stops: list[int] = []
        self._pauses: list[int] = []
        self._is_new = True

    def received(self, at_ns: int, message: ClientMessage | Piece) -> None:
        """Take a client's message that the session took, as `ClientSound` reads it."""
        match message:
            case Append(pcm=pcm):
                if message.force_listen:
                    self._asked_to_stop(at_ns)
                self._hear(at_ns, len(pcm) // SAMPLE_BYTES, pcm)
            case Piece(pcm16=pcm16, rate_hz=rate_hz):
                count = len(pcm16) // SAMPLE16_BYTES
                up, down = ratio_of(rate_hz, INPUT_RATE_HZ)
                blocks, self._rest = divmod(self._rest + count, down)
                first = self._ticks if message.is_whole else None
                self._ticks += count * (TICK_HZ // rate_hz)
                self._hear(at_ns, blocks * up, pcm16, rate_hz, first)

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

    def _hear(
        self, at_ns: int, samples: int, data: bytes, rate_hz: int = 0, first: int | None = None
    ) -> None:
        begin = self._line.place(at_ns, samples, is_captured=True)
        end = begin + samples
        sound = UserSound(
            at_ns=at_ns, begin=begin, end=end, data=data, rate_hz=rate_hz, first=first
        )
        stretch = self._line.stretch
        if self._heard or not self._line.is_settled:
            self._heard.append(_Heard(sound, stretch, stretch.moved))
            self._settle(at_ns)
            if self._heard and not sound.rate_hz:  # it is held: half the memory
                sound.data, sound.rate_hz = to_pcm16(sound.data), INPUT_RATE_HZ
        else:  # of a microphone without gaps
            self.user.hear(sound)
            self.user.place(at_ns)

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
