"""The time line of a recorded session: its moments of sound, words, pictures and notes, in order.

Times are nanoseconds of the session's clock, 0 at its start. Sound lies on the grid of its own rate
(`runtime.measures.talk`), as float32 LE, mono.

- **User sound** ends when its message arrived, or follows the sound before it; a second that the
  server dropped is heard too. A JPEG stands where its message arrived, a PNG or a WebP of a live
  session where it was decoded. Sound and pictures of a chat's question stand where it arrived; of
  its conversation, only the last message is new.
- **Model sound** begins when its frame was sent, or after the sound that still plays, as a client
  would play it. If the user's sound came ahead of the clock, all that the server sends stands later
  by the lead of the unit that the model works at (`talk.InputLead`), and a note says so. A listen
  during a turn, or `interrupted`, cuts playing sound short; sound left when a turn has ended plays
  to its end.
- **Words** of the model stand where the sound of the same unit does, and in chat, where a voice
  follows the words, with the sound that comes within `HOLD_NS`. Words without sound, and those of a
  user's question, stand where they were sent; an utterance's text too, but not before its sound is
  heard.

The recording is shown, not the result of a replay. Stepping the session only decides which requests
were taken; after a divergence, each that parses counts as taken. Damage is a note.

Moments come in the order in which they begin. The model's sound can be cut short while it plays, so
it is held until it has been heard: a second or two in real time, and most of a session that was
faster than its own sound, so PCM above `HELD_BYTES_MAX` lies in a file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from tempfile import SpooledTemporaryFile
from typing import Final, Literal

import attrs

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values import messages as ms
from protocol.values import model
from protocol.values import openai as oa
from protocol.values.limits import NS_PER_S, OF_MODE
from protocol.values.model import SAMPLE_BYTES, ToolCall, ToolResult
from protocol.values.requests import Append, AppendSound, Ask, ClientMessage, See, TextPart
from protocol.wire.audio import to_float32
from protocol.wire.media import image_kind
from recorder.format.format import Fields, Record
from recorder.format.mapping import LoggedStep
from recorder.read.scan import Damage
from runtime.measures import conversation, talk
from runtime.measures.conversation import TrackedToolCall, Voice
from runtime.measures.talk import Line, Sound, Stretch, UserSoundClock

from ..rerun.logic import Replayer
from ..story.model_calls import asked_texts, calls_text
from ..story.reading import DecodedRecord, SessionStory

# -- moments ---------------------------------------------------------------------------------------


NAMES: Final[Mapping[Voice, str]] = {"user": "User", "model": "Model"}


@attrs.frozen(kw_only=True)
class Words:
    """Text as it came, spaces included; it arrived from the user, or was sent to them, at `at_ns`.

    `begin_ns`: when its sound begins; without one, `at_ns`, or the end of the sound that it
    transcribes. `end_ns`: when its sound is over; None without one. `response_id`: the model's
    turn; pieces of one turn are joined without a separator. `is_transcribed`: another model wrote
    it down. `tools`: the calls that the text stands for, or their results. `seq`: of the record
    that it is in.
    """

    voice: Voice
    at_ns: int
    begin_ns: int
    end_ns: int | None
    text: str
    response_id: str = ""
    is_transcribed: bool = False
    tools: tuple[ToolCall | ToolResult, ...] = ()
    seq: int = 0

    @property
    def speaker(self) -> str:
        """Who says it, for people."""
        return f"{NAMES[self.voice]} (transcribed)" if self.is_transcribed else NAMES[self.voice]


@attrs.frozen(kw_only=True)
class Picture:
    """A picture from the user: a JPEG file, from `begin_ns` until the next."""

    begin_ns: int
    jpeg: bytes


_Queue = Literal["queued", "queue_update", "queue_done", "created"]
_Answer = Literal["listen", "paused", "resumed", "interrupted", "prefilled", "response"]
_Ending = Literal["going_away", "error", "closed"]
_Other = Literal["force_listen", "shortened", "dropped", "unheard", "close", "damage", "mark"]
_Lead = Literal["ahead"]
NoteKind = Literal[_Queue, _Answer, _Ending, _Other, _Lead]
"""All but the last are the server's messages; see `protocol.values.messages`.

`force_listen`: the user cuts the model short; `shortened`: a client's message was refused, and the
log keeps its length, hash and start; `dropped`: a second of input was lost to newer input;
`unheard`: words that were sent and, cut short, not heard; `close`: the WebSocket was closed;
`damage`: some of the log is lost here; `mark`: an annotation of the running session; `ahead`: the
user's sound comes that long before it can have been spoken.
"""


@attrs.frozen(kw_only=True)
class Note:
    """Another event of the session, with its details, and the record of `unheard` words."""

    begin_ns: int
    kind: NoteKind
    text: str = ""
    seq: int = 0


Moment = Sound | Words | Picture | Note


# -- moments that wait until they are final --------------------------------------------------------


HELD_BYTES_MAX: Final = 8 << 20
"""Of PCM in memory: half a minute of both voices; more goes to a temporary file."""


@attrs.define(order=False)
class _PendingMoment:
    begin_ns: int
    number: int
    until_ns: int
    moment: Moment
    place: int = 0
    length: int = 0
    moved: int = 0
    stretch: Stretch | None = None

    def __lt__(self, other: _PendingMoment) -> bool:
        return (self.begin_ns, self.number) < (other.begin_ns, other.number)


class PendingMoments:
    """The moments that wait; its owner closes it.

    The user's sounds have their own queue: those of a stretch move together and keep their order.
    All others are in a heap.
    """

    def __init__(self) -> None:
        self._held: list[_PendingMoment] = []
        self._user: deque[_PendingMoment] = deque()
        self._count = self._model_sounds = 0
        self._pcm: SpooledTemporaryFile[bytes] | None = None
        self._pcm_bytes = 0
        self.lines: Final = {voice: Line(voice) for voice in conversation.VOICES}

    def close(self) -> None:
        """Close the file."""
        if self._pcm is not None:
            self._pcm.close()

    def sound(
        self,
        voice: Voice,
        at_ns: int,
        pcm: bytes,
        *,
        is_captured: bool = False,
        response_id: str = "",
        later_ns: int = 0,
    ) -> Sound:
        """Hold a sound, placed after its voice's earlier sound; `is_captured` as in `place`.

        It is heard so much later than it was sent, or, if that is negative, than it came.
        """
        samples = len(pcm) // SAMPLE_BYTES
        line = self.lines[voice]
        begin = line.place(max(at_ns + later_ns, 0), samples, is_captured=is_captured)
        sound = Sound(voice=voice, at_ns=at_ns, begin=begin, pcm=pcm, response_id=response_id)
        held = self._new(attrs.evolve(sound, pcm=b""), sound.end_ns)
        held.place, held.length = self._pcm_bytes, len(pcm)
        if voice == "user":
            held.stretch, held.moved = line.stretch, line.stretch.moved
            self._user.append(held)
        else:
            self._model_sounds += 1
            heappush(self._held, held)
        if self._pcm is None:
            self._pcm = SpooledTemporaryFile(HELD_BYTES_MAX)  # noqa: SIM115 - `close` closes it
        self._pcm.seek(self._pcm_bytes)
        self._pcm.write(pcm)
        self._pcm_bytes += len(pcm)
        return sound

    def add(self, moment: Words | Picture | Note) -> None:
        """Hold a moment; the model's words until they are over, all others until they begin."""
        end_ns = moment.end_ns if isinstance(moment, Words) else None
        heappush(self._held, self._new(moment, end_ns))

    def _new(self, moment: Moment, end_ns: int | None) -> _PendingMoment:
        until_ns = end_ns if end_ns is not None and _is_of_model(moment) else moment.begin_ns
        self._count += 1
        return _PendingMoment(moment.begin_ns, self._count, until_ns, moment)

    def _first(self) -> _PendingMoment | None:
        if not self._user:
            return self._held[0] if self._held else None
        sound = self._user[0]
        _move_back(sound)
        return sound if not self._held or sound < self._held[0] else self._held[0]

    def cut(self, at_ns: int) -> None:
        """Drop the model's sound and words after this time; dropped words become a note."""
        held, self._held = sorted(self._held), []
        unheard: list[Words] = []
        for one in held:
            if not _is_of_model(one.moment) or one.until_ns <= at_ns:
                self._held.append(one)
            elif one.begin_ns < at_ns:
                _shorten(one, at_ns)
                self._held.append(one)
            elif isinstance(one.moment, Words):
                unheard.append(one.moment)
            else:
                self._model_sounds -= 1
        self.lines["model"].cut(at_ns)
        if unheard:
            text = "".join(words.text for words in unheard)
            self.add(Note(begin_ns=at_ns, kind="unheard", text=text, seq=unheard[0].seq))

    def ready(self, now_ns: int | None) -> Iterator[Moment]:
        """Yield the final moments: later ones begin at `now_ns` or after; None: no more come."""
        while (one := self._first()) is not None and (now_ns is None or one.until_ns <= now_ns):
            if one.stretch is not None:
                self._user.popleft()
            else:
                heappop(self._held)
                self._model_sounds -= isinstance(one.moment, Sound)
            yield self._whole(one)
        if not self._user and not self._model_sounds:
            self._pcm_bytes = 0

    def _whole(self, held: _PendingMoment) -> Moment:
        if not isinstance(held.moment, Sound) or self._pcm is None:
            return held.moment
        self._pcm.seek(held.place)
        return attrs.evolve(held.moment, pcm=self._pcm.read(held.length))


def _is_of_model(moment: Moment) -> bool:
    return isinstance(moment, Sound | Words) and moment.voice == "model"


def _move_back(held: _PendingMoment) -> None:
    if held.stretch is None or not isinstance(held.moment, Sound):
        return
    samples, held.moved = held.stretch.moved - held.moved, held.stretch.moved
    if samples:
        held.moment = attrs.evolve(held.moment, begin=held.moment.begin - samples)
        held.begin_ns = held.until_ns = held.moment.begin_ns


def _shorten(held: _PendingMoment, at_ns: int) -> None:
    moment = held.moment
    if isinstance(moment, Sound):
        held.length = (talk.sample_at("model", at_ns) - moment.begin) * SAMPLE_BYTES
        held.until_ns = talk.time_of("model", talk.sample_at("model", at_ns))
    elif isinstance(moment, Words):
        held.moment, held.until_ns = attrs.evolve(moment, end_ns=at_ns), at_ns


# -- the time line ---------------------------------------------------------------------------------


HOLD_NS: Final = NS_PER_S
"""How long words of an answer wait for their sound: a voice is made a second at a time."""

_NOTES: Final[dict[type, NoteKind]] = {
    ms.Queued: "queued",
    ms.QueueUpdate: "queue_update",
    ms.QueueDone: "queue_done",
    ms.Created: "created",
    ms.Listen: "listen",
    ms.Paused: "paused",
    ms.Resumed: "resumed",
    ms.Interrupted: "interrupted",
    ms.GoingAway: "going_away",
    ms.Prefilled: "prefilled",
    ms.Response: "response",
    ms.TranscriptDone: "response",
    ms.ErrorReport: "error",
    ms.Closed: "closed",
}


AHEAD_NS_MIN: Final = 3 * NS_PER_S // 2
"""A client that sends each second when it begins is one ahead, which is not worth a note."""
_ANSWERS: Final = (ms.Speech, ms.Listen, ms.Interrupted, oa.ReplyStep, oa.ReplyState)
"""Messages that a unit of the model is answered by."""


class Timeline:
    """The moments of one session, to be iterated once; or `take` and `end` give them step by step.

    `head` holds the fields of the log's `session` record, `items` its records in order and its
    damage. `story` reads the log, if it is read for other purposes too. `request` and `messages`
    are what the last record held: a frame is read once, as sound in pieces is resampled by that.
    `asked` is the last question of a chat, or the last one that offers tools.
    `duration_ns` is to the end of all that was read so far, sound included.
    """

    def __init__(
        self, head: Fields, items: Iterable[Record | Damage] = (), story: SessionStory | None = None
    ) -> None:
        self.head: Final = head
        self.story: Final = SessionStory(Replayer(go_on=True)) if story is None else story
        self.request: ClientMessage | None = None
        self.messages: Sequence[ms.ServerMessage] = ()
        self.asked: Ask | None = None
        self.duration_ns = 0
        self._items = items
        self._pending: Final = PendingMoments()
        self._texts: list[Words] = []
        self._is_chat = False
        self._is_speaking = False
        self._streamed = ""
        self._seq = 0
        self._asked_ns: int | None = None
        self._utterances = 0
        self._positions: Final = UserSoundClock()
        self._lead: Final = talk.InputLead()
        self._lead_noted_ns = 0

    def __iter__(self) -> Iterator[Moment]:
        try:
            for item in self._items:
                yield from self.take(item, self.story.take(item))
            yield from self.end()
        finally:
            self.close()

    def decoded_records(self) -> Iterator[DecodedRecord]:
        """Read the log, and yield its records as the story reads them, instead of the moments."""
        try:
            for item in self._items:
                decoded = self.story.take(item)
                deque(self.take(item, decoded), maxlen=0)
                if decoded is not None:
                    yield decoded
        finally:
            self.close()

    def take(self, item: Record | Damage, decoded: DecodedRecord | None) -> Iterator[Moment]:
        """Take the next record, or damage, as `story` read it; give the settled moments."""
        self._take(item, decoded)
        yield from self._pending.ready(self._settled_ns)

    def end(self) -> Iterator[Moment]:
        """Give the rest."""
        self._flush_texts()
        yield from self._pending.ready(None)

    def close(self) -> None:
        """Let go of the sound that is held."""
        self._pending.close()

    @property
    def _settled_ns(self) -> int:
        """The time before which no later moment begins."""
        waiting = [words.at_ns for words in self._texts[:1]]
        asked = [] if self._asked_ns is None else [self._asked_ns]
        user_ns = self._pending.lines["user"].settled_ns(self._now_ns)
        return min([self._now_ns, max(user_ns, self._now_ns - talk.SETTLED_NS), *waiting, *asked])

    # -- records --------------------------------------------------------------------------------

    @property
    def _now_ns(self) -> int:
        return self.story.duration_ns

    @property
    def played_ns(self) -> int:
        """When what the server sends now is played: later, if the model is ahead of the clock."""
        is_answer = any(isinstance(message, _ANSWERS) for message in self.messages)
        return self._lead.at(self._now_ns) if is_answer else self._lead.after(self._now_ns)

    @property
    def _spoken_ns(self) -> int:
        """When it is spoken what the client sends now, with its sound so far."""
        end_ns = talk.time_of("user", self._pending.lines["user"].end)
        return self._now_ns + talk.ahead_ns(end_ns, self._now_ns)

    def _begin_unit(self) -> None:
        """Measure how far the model is ahead of the clock, and note a change."""
        if self.story.session is None or not self.story.is_in_step:
            return
        line, waiting = self._pending.lines["user"], self.story.session.samples_waiting
        self._lead.begin(self._now_ns, line, waiting)
        if abs(self._lead.ns - self._lead_noted_ns) >= AHEAD_NS_MIN:
            self._lead_noted_ns = self._lead.ns
            text = f"the user's sound is {self._lead.ns / NS_PER_S:.1f} s ahead of the clock"
            self._note("ahead", f"{text}: what is sent is heard as much later")

    def _take(self, item: Record | Damage, decoded: DecodedRecord | None) -> None:
        if isinstance(item, Damage):
            self._asked_ns = None
            self._note("damage", f"{item.reason}: {item.detail}")
        if decoded is None:
            return
        self._seq = decoded.record.seq
        wire, kind = self.story.wire, decoded.record.kind
        self.messages = wire.messages(decoded.frame) if kind == "tx" and decoded.frame else ()
        is_request = kind == "rx" and decoded.short is None and decoded.frame
        self.request = wire.request(decoded.frame) if is_request else None
        for call in decoded.calls:
            self._take_call(call)
        fields = decoded.record.fields
        self.duration_ns = max(self.duration_ns, self._now_ns)
        if self._texts and self._now_ns - self._texts[0].at_ns > (HOLD_NS if self._is_chat else 0):
            self._flush_texts()
        for message in self.messages:
            self._take_message(message)
        match kind:
            case "rx" if decoded.short is not None:
                self._note("shortened", decoded.short.told)
            case "rx":
                self._take_request(self.request)
            case "effect" if decoded.effect == "StartUnit":
                self._begin_unit()
            case "effect" if decoded.effect == "DropUnit":
                self._note("dropped", f"second {fields.get('ordinal')} of the input")
            case "effect" if decoded.effect == "Close":
                self._note("close", f"{fields.get('code')} {fields.get('reason')}", self.played_ns)
            case "mark" if isinstance(text := fields.get("text"), str):
                self._note("mark", text)
        match decoded.event:
            case ev.UserTranscribed() as words:
                self._take_words(words)
            case ev.MediaDecoded(pictures=pictures) if OF_MODE[wire.mode].work == "unit":
                for jpeg in pictures:
                    self._show(jpeg)
        if decoded.step is not None:
            self._take_question(decoded.step)

    # -- the user's -----------------------------------------------------------------------------

    def _take_request(self, request: ClientMessage | None) -> None:
        match request:
            case AppendSound():
                pcm = to_float32(request.pcm16)
                sound = self._add_sound(pcm, self._now_ns, is_captured=True)
                self.story.backlog.add(len(pcm) // SAMPLE_BYTES, sound.end_ns, self.story.session)
            case Append():
                self._add_sound(request.pcm, self._now_ns, is_captured=True)
                if request.force_listen:
                    self._note("force_listen", at_ns=self._spoken_ns)
                for picture in request.frames:
                    if isinstance(picture, bytes):  # else it was not one
                        self._show(picture, self._spoken_ns)
            case See() if request.jpeg:
                self._show(request.jpeg, self._spoken_ns)
            case oa.CreateItem():
                for picture in request.item.pictures:
                    if image_kind(picture) == "JPEG":  # others are shown once they are decoded
                        self._show(picture)
            case Ask():
                self._ask(request)

    def _take_words(self, event: ev.UserTranscribed) -> None:
        """Place what the user said where it was heard."""
        begin_ns, end_ns = self._positions.span(event.start_ms, event.end_ms, self._spoken_ns)
        if event.text.strip():
            words = attrs.evolve(self._words("user", event.text), is_transcribed=True)
            self._pending.add(attrs.evolve(words, begin_ns=begin_ns, end_ns=end_ns))

    def _ask(self, ask: Ask) -> None:
        parts = ask.messages[-1].content
        text = "\n".join(asked_texts(parts))
        self._streamed = ""
        self._asked_ns = None
        self.asked = ask if ask.tools or self.asked is None else self.asked
        if text:
            given = (part for message in ask.messages for part in message.content)
            results = tuple(part for part in given if isinstance(part, ToolResult))
            self._pending.add(attrs.evolve(self._words("user", text), tools=results))
        if (
            not all(isinstance(part, TextPart | ToolResult) for part in parts)
            and self.story.is_in_step
        ):
            self._asked_ns = self._now_ns

    def _take_call(self, story: TrackedToolCall) -> None:
        """Add a call of a tool, in a duplex session, or its result."""
        if story.ended_ns is not None:
            result = ToolResult(call_id=story.call, output=story.result)
            words = self._words("user", "".join(asked_texts((result,))))
            self._pending.add(attrs.evolve(words, tools=(result,)))
        elif story.name:
            call = ToolCall(id=story.call, name=story.name, arguments=story.arguments)
            words = self._words("model", calls_text((call,)), story.call)
            self._pending.add(attrs.evolve(words, tools=(call,)))

    def _take_question(self, step: LoggedStep) -> None:
        for effect in step.effects:
            if isinstance(effect, ef.StartTurn) and self._asked_ns is not None:
                for content in effect.turn.messages[-1].content:
                    if isinstance(content, model.Picture):
                        self._show(content.jpeg, self._asked_ns)
                    elif isinstance(content, model.Sound):
                        self._add_sound(content.pcm, self._asked_ns)
                self._asked_ns = None

    def _add_sound(self, pcm: bytes, at_ns: int, *, is_captured: bool = False) -> Sound:
        later_ns = -self.story.wire.lag_ns if is_captured else 0
        sound = self._pending.sound("user", at_ns, pcm, is_captured=is_captured, later_ns=later_ns)
        if is_captured:
            self._positions.add(len(pcm) // SAMPLE_BYTES, sound.begin_ns)
        self.duration_ns = max(self.duration_ns, sound.end_ns)
        return sound

    def _show(self, jpeg: bytes, at_ns: int | None = None) -> None:
        self._pending.add(Picture(begin_ns=self._now_ns if at_ns is None else at_ns, jpeg=jpeg))

    # -- the server's ---------------------------------------------------------------------------

    def _take_message(self, message: ms.ServerMessage) -> None:
        match message:
            case ms.Pending():
                return  # answers a chunk that completes no unit
            case ms.TranscriptDelta(text=text):
                words = self._words("model", text, f"utterance {self._utterances}")
                begin_ns = max(self._now_ns, self.story.backlog.fed_ns)
                self._pending.add(attrs.evolve(words, begin_ns=begin_ns))
                return
            case ms.Speech() | ms.Delta():
                self._is_chat = isinstance(message, ms.Delta)
                self._streamed += message.text if self._is_chat else ""
                self._is_speaking = isinstance(message, ms.Speech) and not message.end_of_turn
                self._speak(message.text, message.pcm, message.response_id)
                return
            case ms.Response(text=text, pcm=pcm, response_id=response_id, tool_calls=calls):
                self._speak(text[len(self._streamed) :], pcm, response_id)
                if calls:
                    words = self._words("model", calls_text(calls), response_id)
                    self._texts.append(attrs.evolve(words, tools=calls))
            case oa.ReplyStep(kind="text_delta", text=text, response_id=response_id):
                self._speak(text, b"", response_id)
                return
        is_stop = isinstance(message, ms.Interrupted) or (
            isinstance(message, oa.ReplyState) and message.response.status == "cancelled"
        )
        if type(message) not in _NOTES and not is_stop:
            return
        self._utterances += isinstance(message, ms.TranscriptDone)
        self._flush_texts()
        if is_stop or (isinstance(message, ms.Listen) and self._is_speaking):
            self._pending.cut(self.played_ns)
        if is_stop or isinstance(message, ms.Listen | ms.Response):
            self._is_speaking = False
        self._note(_NOTES.get(type(message), "interrupted"), _details(message), self.played_ns)

    def _speak(self, text: str, pcm: bytes, response_id: str) -> None:
        """Add the model's words and sound; its words may come before their sound."""
        if self._texts and self._texts[0].response_id != response_id:
            self._flush_texts()
        if text:
            self._texts.append(self._words("model", text, response_id))
        if not pcm:
            return
        later_ns = self.played_ns - self._now_ns
        sound = self._pending.sound(
            "model", self._now_ns, pcm, response_id=response_id, later_ns=later_ns
        )
        self.duration_ns = max(self.duration_ns, sound.end_ns)
        if self._texts:
            words = attrs.evolve(self._texts[0], text="".join(it.text for it in self._texts))
            self._pending.add(attrs.evolve(words, begin_ns=sound.begin_ns, end_ns=sound.end_ns))
            self._texts.clear()

    def _flush_texts(self) -> None:
        for words in self._texts:
            self._pending.add(words)
        self._texts.clear()

    # -- others ---------------------------------------------------------------------------------

    def _words(self, voice: Voice, text: str, response_id: str = "") -> Words:
        return Words(
            voice=voice,
            at_ns=self._now_ns,
            begin_ns=self.played_ns if voice == "model" else self._now_ns,
            end_ns=None,
            text=text,
            response_id=response_id,
            seq=self._seq,
        )

    def _note(self, kind: NoteKind, text: str = "", at_ns: int | None = None) -> None:
        begin_ns = self._now_ns if at_ns is None else at_ns
        self._pending.add(Note(begin_ns=begin_ns, kind=kind, text=text))
        self.duration_ns = max(self.duration_ns, begin_ns)


def _details(message: ms.ServerMessage) -> str:
    match message:
        case ms.ErrorReport(code=code, message=text):
            return f"{code}: {text}"
        case ms.Closed(reason=reason, client_reason=client_reason):
            return client_reason or reason
        case ms.Response(reason=reason):
            return reason
        case ms.TranscriptDone():
            return "transcribed"
        case ms.Queued(place=place) | ms.QueueUpdate(place=place):
            return f"place {place.position} of {place.queue_length}"
    return ""
