"""The dialogue of client and server, as it was heard, seen and read; units are `story`'s.

Rules:
- Frames are read with the dialect's own parsers; one that cannot be read, or that was refused, has
  no sound, picture or text.
- A model's words stand where their sound is heard, since text is sent earlier; words without sound
  stand where they were sent.
- From an answer's end, the words that were in no delta are taken: all, if it was not streamed.
- A listen during a turn stops playing sound, as a client does; after the turn's end it plays out.
- A picture stands where it was sent, a PNG or a WebP where it was decoded.
- A question in chat carries the whole conversation again; only its new part is taken, and its sound
  stands where it was asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import attrs

from protocol.values import events as ev
from protocol.values import messages as ms
from protocol.values.digest import digest
from protocol.values.limits import NS_PER_S
from protocol.values.model import INPUT_RATE_HZ, SAMPLE_BYTES
from protocol.values.openai import CreateItem
from protocol.values.requests import (
    Append,
    AppendSound,
    Ask,
    AudioPart,
    ClientMessage,
    See,
)
from protocol.values.requests import Part as ReceivedPart
from protocol.wire.audio import to_float32
from protocol.wire.media import kind_of
from recorder.format.records import Record
from runtime.measures.placing import Positions, Voice

from ..story.exchanges import asked_texts, calls_text
from ..story.reading import Dictated
from .parts import Json, Part, plain
from .pictures import Pictures
from .sound import Heard, Track

HOLD_NS: Final = NS_PER_S
"""Words wait this long for their sound: a model speaks a second at a time."""
SAID_MAX: Final = 20_000
"""Pieces of text: a longest session has 600, a chat of an hour one a second."""


@attrs.define(kw_only=True)
class _Held:
    turn: str
    seq: int
    begin_ns: int
    end_ns: int
    text: str = ""


class Dialogue:
    """Takes a session's frames and media in order.

    `said` holds words: voice, when they begin and end, the text, the record; the last of `pauses`
    has no end until it comes. `dictated` is the placed sound of a transcription that is not written
    down yet.
    """

    def __init__(self, dictated: Dictated) -> None:
        self.user: Final = Track("user")
        self.model: Final = Track("model")
        self.pictures: Final = Pictures()
        self._dictated: Final = dictated
        self.said: list[Json] = []
        self.pauses: list[list[int | None]] = []
        self._held: _Held | None = None
        self._last_said: dict[Voice, list[Any]] = {}
        self._told = ("", "")
        self._amid_turn = False
        self._sounds: set[str] = set()
        self._asked_ns = 0
        self._is_chat = False
        self._positions: Final = Positions()

    def receive(self, record: Record, request: ClientMessage) -> list[Part]:
        """Take a request that the session took."""
        match request:
            case AppendSound(pcm16=pcm16):
                return self.user.take(record.at_ns, to_float32(pcm16), is_captured=True)[1]
            case Append(pcm=pcm, frames=frames):
                heard, parts = self.user.take(record.at_ns, pcm, is_captured=True)
                self._positions.heard(len(pcm) // SAMPLE_BYTES, heard.begin_ns)
                return [*parts, *(self.pictures.take(record.at_ns, jpeg) for jpeg in frames)]
            case See(jpeg=jpeg):
                return [self.pictures.take(record.at_ns, jpeg)]
            case CreateItem(item=item):
                shown = (one for one in item.pictures if kind_of(one) == "JPEG")
                return [self.pictures.take(record.at_ns, jpeg) for jpeg in shown]
            case Ask(messages=messages):
                return self._asked(record, messages[-1].content)
        return []

    def _asked(self, record: Record, content: tuple[ReceivedPart, ...]) -> list[Part]:
        self._asked_ns, self._is_chat = record.at_ns, True
        words = asked_texts(content)
        heard = Heard(begin_ns=record.at_ns, end_ns=record.at_ns + HOLD_NS)
        self._say("user", heard, " ".join(words), record.seq)
        parts: list[Part] = []
        for sound in content:
            if isinstance(sound, AudioPart) and not sound.is_wav and sound.rate_hz == INPUT_RATE_HZ:
                parts += self.user.take(record.at_ns, sound.data)[1]
        return parts

    def decoded(self, event: ev.MediaDecoded) -> list[Part]:
        """Take decoded media; a chat's turn brings that of the turns before it again."""
        parts: list[Part] = []
        if event.pcm and (name := digest(event.pcm)) not in self._sounds:
            self._sounds.add(name)
            _, parts = self.user.take(self._asked_ns, event.pcm)
        is_chat, known = self._is_chat, self.pictures
        new = (jpeg for jpeg in event.pictures if not (is_chat and known.has(jpeg)))
        return [*parts, *(self.pictures.take(event.at_ns, jpeg) for jpeg in new)]

    def transcribed(self, event: ev.UserTranscribed, seq: int) -> None:
        """Take what the user said, as it was written down."""
        begin_ns, end_ns = self._positions.span(event.start_ms, event.end_ms, event.at_ns)
        text = f"{event.text.strip()} (transcribed)" if event.text.strip() else ""
        self._say("user", Heard(begin_ns=begin_ns, end_ns=end_ns), text, seq)

    def send(self, record: Record, messages: Iterable[ms.ServerMessage]) -> list[Part]:
        """Take the server's messages of a frame."""
        return [part for message in messages for part in self._take(record, message)]

    def end(self) -> list[Part]:
        """Give the rest."""
        self._let_go()
        return [*self.user.flush(), *self.model.flush()]

    def _take(self, record: Record, message: ms.ServerMessage) -> list[Part]:
        at_ns = record.at_ns
        match message:
            case ms.Speech(response_id=turn, text=text, pcm=pcm, end_of_turn=is_end):
                self._amid_turn = not is_end
                return self._speak(record, turn, text, pcm)
            case ms.Delta(response_id=turn, text=text, pcm=pcm):
                told = self._told[1] if self._told[0] == turn else ""
                self._told = (turn, told + text)
                return self._speak(record, turn, text, pcm)
            case ms.TranscriptDelta(text=text):
                self._hold(max(record.at_ns, self._dictated.heard_ns), record.seq, "", text)
            case ms.TranscriptDone():
                self._let_go()
            case ms.Response(response_id=turn, text=text, pcm=pcm, tool_calls=calls):
                told = self._told[1] if self._told[0] == turn else ""
                rest = [text.removeprefix(told), *([calls_text(calls)] if calls else ())]
                return self._speak(record, turn, " ".join(rest), pcm)
            case ms.Listen():
                self._let_go()
                return self.model.stop(at_ns) if self._amid_turn else []
            case ms.Interrupted():
                return self.model.stop(at_ns)
            case ms.Paused():
                self.pauses.append([at_ns, None])
            case ms.Resumed() if self.pauses:
                self.pauses[-1][1] = at_ns
        return []

    # -- words ----------------------------------------------------------------------------------

    def _speak(self, record: Record, turn: str, text: str, pcm: bytes) -> list[Part]:
        self._hold(record.at_ns, record.seq, turn, text)
        if not pcm:
            return []
        heard, parts = self.model.take(record.at_ns, pcm)
        self._let_go(heard)
        return parts

    def _hold(self, at_ns: int, seq: int, turn: str, text: str) -> None:
        held = self._held
        if held is not None and (held.turn != turn or at_ns - held.begin_ns >= HOLD_NS):
            self._let_go()
            held = None
        if held is None:
            held = _Held(turn=turn, seq=seq, begin_ns=at_ns, end_ns=at_ns + HOLD_NS)
        held.text += text
        self._held = held

    def _let_go(self, heard: Heard | None = None) -> None:
        held, self._held = self._held, None
        if held is not None:
            place = heard or Heard(begin_ns=held.begin_ns, end_ns=held.end_ns)
            self._say("model", place, held.text, held.seq)

    def _say(self, voice: Voice, heard: Heard, text: str, seq: int) -> None:
        if not text.strip() or len(self.said) >= SAID_MAX:
            return
        last = self._last_said.get(voice)
        if last is not None:  # words without sound give way
            last[2] = min(last[2], max(last[1], heard.begin_ns))
        self._last_said[voice] = said = [voice, heard.begin_ns, heard.end_ns, plain(text), seq]
        self.said.append(said)
