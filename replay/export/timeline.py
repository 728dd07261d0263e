"""The time line of a recorded session: sound, pictures and words, with their times.

- **User sound** ends when its message arrived, or follows the sound before it
  (`runtime.measures.placing`); a second that the server dropped is heard too. A JPEG stands where
  its message arrived, a PNG or a WebP of a live session where it was decoded. Sound and pictures of
  a chat's question stand where it arrived; of its conversation, only the last message is new.
- **Model sound** begins when its frame was sent, or after the sound that still plays, as a client
  would play it. A listen during a turn, or `interrupted`, cuts playing sound short; sound left when
  a turn has ended plays to its end.
- **Words** of the model stand where the sound of the same unit does, and in chat, where a voice
  follows the words, with the sound that comes within `HOLD_NS`. Words without sound, and those of a
  user's question, stand where they were sent; an utterance's text too, but not before its sound is
  heard.

The recording is shown, not the result of a replay. Stepping the session only decides which requests
were taken; after a divergence, each that parses counts as taken. Damage is a note. Moments come in
the order in which they begin; memory is bounded, see `holding`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import attrs

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values import messages as ms
from protocol.values import model
from protocol.values import openai as oa
from protocol.values.limits import NS_PER_S
from protocol.values.model import SAMPLE_BYTES, ToolResult
from protocol.values.modes import OF_MODE
from protocol.values.requests import Append, AppendSound, Ask, ClientMessage, See, TextPart
from protocol.wire.audio import to_float32
from protocol.wire.media import kind_of
from recorder.format.records import Fields, Record
from recorder.format.steps import Step
from recorder.read.scan import Damage
from runtime.measures.placing import SETTLED_NS, Positions, Sound, Voice

from ..rerun.logic import Replayer
from ..story.exchanges import asked_texts, calls_text
from ..story.reading import Passage, SessionStory
from .holding import Holding
from .moments import Moment, Note, NoteKind, Picture, Words

HOLD_NS: Final = NS_PER_S
"""How long words of an answer wait for their sound: a voice is made a second at a time."""

Watch = Callable[[Passage, ClientMessage | None, Sequence[ms.ServerMessage]], None]

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


class Timeline:
    """The moments of one session, to be iterated once; or `take` and `end` give them step by step.

    `head` holds the fields of the log's `session` record, `items` its records in order and its
    damage; `watch` is called with each record as the story reads it, and the messages in it.
    `story` reads the log, if it is read for other purposes too. `duration_ns` is to the end of all
    that was read so far, sound included.
    """

    def __init__(
        self,
        head: Fields,
        items: Iterable[Record | Damage] = (),
        watch: Watch | None = None,
        story: SessionStory | None = None,
    ) -> None:
        self.head: Final = head
        self._watch = watch
        self.story: Final = SessionStory(Replayer(go_on=True)) if story is None else story
        self.duration_ns = 0
        self._items = items
        self._holding: Final = Holding()
        self._texts: list[Words] = []
        self._is_chat = False
        self._is_speaking = False
        self._has_deltas = False
        self._asked_ns: int | None = None
        self._utterances = 0
        self._positions: Final = Positions()

    def tell(self, watch: Watch) -> None:
        """Read the log for a watcher, without its moments."""
        self._watch = watch
        for _ in self:
            pass

    def __iter__(self) -> Iterator[Moment]:
        try:
            for item in self._items:
                yield from self.take(item, self.story.take(item))
            yield from self.end()
        finally:
            self.close()

    def take(self, item: Record | Damage, passage: Passage | None) -> Iterator[Moment]:
        """Take the next record, or damage, as `story` read it; give the settled moments."""
        self._take(item, passage)
        yield from self._holding.ready(self._settled_ns)

    def end(self) -> Iterator[Moment]:
        """Give the rest."""
        self._flush_texts()
        yield from self._holding.ready(None)

    def close(self) -> None:
        """Let go of the sound that is held."""
        self._holding.close()

    @property
    def _settled_ns(self) -> int:
        """The time before which no later moment begins."""
        waiting = [words.at_ns for words in self._texts[:1]]
        asked = [] if self._asked_ns is None else [self._asked_ns]
        settled_ns = self._holding.settled_ns("user", self._now_ns)
        heard_ns = max(settled_ns, self._now_ns - SETTLED_NS)
        return min([self._now_ns, heard_ns, *waiting, *asked])

    @property
    def _is_live(self) -> bool:
        return OF_MODE[self.story.wire.mode].work == "unit"

    # -- records --------------------------------------------------------------------------------

    @property
    def _now_ns(self) -> int:
        return self.story.duration_ns

    def _take(self, item: Record | Damage, passage: Passage | None) -> None:
        if isinstance(item, Damage):
            self._asked_ns = None
            self._note("damage", f"{item.reason}: {item.detail}")
        if passage is None:
            return
        wire, kind = self.story.wire, passage.record.kind
        messages = wire.messages(passage.frame) if kind == "tx" and passage.frame else ()
        is_request = kind == "rx" and passage.short is None and passage.frame
        request = wire.request(passage.frame) if is_request else None
        if self._watch is not None:
            self._watch(passage, request, messages)
        fields = passage.record.fields
        self.duration_ns = max(self.duration_ns, self._now_ns)
        if self._texts and self._now_ns - self._texts[0].at_ns > (HOLD_NS if self._is_chat else 0):
            self._flush_texts()
        for message in messages:
            self._take_message(message)
        match kind:
            case "rx" if passage.short is not None:
                self._note("shortened", passage.short.told)
            case "rx":
                self._take_request(request)
            case "effect" if passage.effect == "DropUnit":
                self._note("dropped", f"second {fields.get('ordinal')} of the input")
            case "effect" if passage.effect == "Close":
                self._note("close", f"{fields.get('code')} {fields.get('reason')}")
            case "mark" if isinstance(text := fields.get("text"), str):
                self._note("mark", text)
        match passage.event:
            case ev.UserTranscribed() as words:
                self._take_words(words)
            case ev.MediaDecoded(pictures=pictures) if self._is_live:
                for jpeg in pictures:
                    self._show(jpeg)
        if passage.step is not None:
            self._take_question(passage.step)

    # -- the user's -----------------------------------------------------------------------------

    def _take_request(self, request: ClientMessage | None) -> None:
        match request:
            case AppendSound():
                pcm = to_float32(request.pcm16)
                sound = self._hear(pcm, self._now_ns, is_captured=True)
                self.story.dictated.hear(len(pcm) // SAMPLE_BYTES, sound.end_ns, self.story.session)
            case Append():
                if request.force_listen:
                    self._note("force_listen")
                for jpeg in request.frames:
                    self._show(jpeg)
                self._hear(request.pcm, self._now_ns, is_captured=True)
            case See() if request.jpeg:
                self._show(request.jpeg)
            case oa.CreateItem():
                for picture in request.item.pictures:
                    if kind_of(picture) == "JPEG":  # others are shown once they are decoded
                        self._show(picture)
            case Ask():
                self._ask(request)

    def _take_words(self, event: ev.UserTranscribed) -> None:
        """Place what the user said where it was heard."""
        begin_ns, end_ns = self._positions.span(event.start_ms, event.end_ms, self._now_ns)
        if event.text.strip():
            words = attrs.evolve(
                self._words("user", event.text),
                begin_ns=begin_ns,
                end_ns=end_ns,
                is_transcribed=True,
            )
            self._holding.add(words, begin_ns, end_ns)

    def _ask(self, ask: Ask) -> None:
        parts = ask.messages[-1].content
        text = "\n".join(asked_texts(parts))
        self._has_deltas = False
        self._asked_ns = None
        if text:
            self._holding.add(self._words("user", text), self._now_ns)
        if (
            not all(isinstance(part, TextPart | ToolResult) for part in parts)
            and self.story.is_in_step
        ):
            self._asked_ns = self._now_ns

    def _take_question(self, step: Step) -> None:
        for effect in step.effects:
            if isinstance(effect, ef.StartTurn) and self._asked_ns is not None:
                for content in effect.turn.messages[-1].content:
                    if isinstance(content, model.Picture):
                        self._show(content.jpeg, self._asked_ns)
                    elif isinstance(content, model.Sound):
                        self._hear(content.pcm, self._asked_ns)
                self._asked_ns = None

    def _hear(self, pcm: bytes, at_ns: int, *, is_captured: bool = False) -> Sound:
        sound = self._holding.sound("user", at_ns, pcm, is_captured=is_captured)
        if is_captured:
            self._positions.heard(len(pcm) // SAMPLE_BYTES, sound.begin_ns)
        self.duration_ns = max(self.duration_ns, sound.end_ns)
        return sound

    def _show(self, jpeg: bytes, at_ns: int | None = None) -> None:
        begin_ns = self._now_ns if at_ns is None else at_ns
        self._holding.add(Picture(begin_ns=begin_ns, jpeg=jpeg), begin_ns)

    # -- the server's ---------------------------------------------------------------------------

    def _take_message(self, message: ms.ServerMessage) -> None:
        match message:
            case ms.Pending():
                return  # answers a chunk that completes no unit
            case ms.TranscriptDelta(text=text):
                words = self._words("model", text, f"utterance {self._utterances}")
                begin_ns = max(self._now_ns, self.story.dictated.heard_ns)
                self._holding.add(attrs.evolve(words, begin_ns=begin_ns), begin_ns)
                return
            case ms.Speech() | ms.Delta():
                self._has_deltas = True
                self._is_chat = isinstance(message, ms.Delta)
                self._is_speaking = isinstance(message, ms.Speech) and not message.end_of_turn
                self._tell(message.text, message.pcm, message.response_id)
                return
            case ms.Response(text=text, pcm=pcm, response_id=response_id, tool_calls=calls):
                self._tell("" if self._has_deltas else text, pcm, response_id)
                self._tell(calls_text(calls), b"", response_id)
            case oa.ReplyStep(kind="text_delta", text=text, response_id=response_id):
                self._tell(text, b"", response_id)
                return
        is_stop = isinstance(message, ms.Interrupted) or _is_cancelled(message)
        if type(message) not in _NOTES and not is_stop:
            return
        self._utterances += isinstance(message, ms.TranscriptDone)
        self._flush_texts()
        if is_stop or (isinstance(message, ms.Listen) and self._is_speaking):
            self._holding.cut(self._now_ns)
        if is_stop or isinstance(message, ms.Listen | ms.Response):
            self._is_speaking = False
        self._note(_NOTES.get(type(message), "interrupted"), _told(message))

    def _tell(self, text: str, pcm: bytes, response_id: str) -> None:
        """Add the model's words and sound; its words may come before their sound."""
        if self._texts and self._texts[0].response_id != response_id:
            self._flush_texts()
        if text:
            self._texts.append(self._words("model", text, response_id))
        if not pcm:
            return
        sound = self._holding.sound("model", self._now_ns, pcm, response_id=response_id)
        self.duration_ns = max(self.duration_ns, sound.end_ns)
        if self._texts:
            said = "".join(words.text for words in self._texts)
            words = attrs.evolve(
                self._texts[0], text=said, begin_ns=sound.begin_ns, end_ns=sound.end_ns
            )
            self._holding.add(words, words.begin_ns, words.end_ns)
            self._texts.clear()

    def _flush_texts(self) -> None:
        for words in self._texts:
            self._holding.add(words, words.begin_ns)
        self._texts.clear()

    # -- others ---------------------------------------------------------------------------------

    def _words(self, voice: Voice, text: str, response_id: str = "") -> Words:
        return Words(
            voice=voice,
            at_ns=self._now_ns,
            begin_ns=self._now_ns,
            end_ns=None,
            text=text,
            response_id=response_id,
        )

    def _note(self, kind: NoteKind, text: str = "") -> None:
        self._holding.add(Note(begin_ns=self._now_ns, kind=kind, text=text), self._now_ns)


def _is_cancelled(message: ms.ServerMessage) -> bool:
    return isinstance(message, oa.ReplyState) and message.reply.status == "cancelled"


def _told(message: ms.ServerMessage) -> str:
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
