"""What the kinds of OpenAI's APIs share: sound in pieces of any size, settings, the conversation.

Sound is 16-bit, and is cut into seconds as it came. A second at another rate than the model's is
resampled outside, with the end of the one before it, and comes back by its number. So the units do
not depend on how the sound was split, and joined they are the whole resampled.

The conversation of a session of `openai` or `vllm-omni` has items, responses, the user's words:

first speech -> begin_response -> speak, a piece a second -> end_response, with calls after speech

- A response is a `RealtimeResponse`: a `Response` is the answer of a turn of chat.
- One that never comes, or has only calls, is begun and ended at once (`end_unbegun`).
- The kind decides when the model speaks; what the client gets then is decided here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import attrs

from ..values import events as ev
from ..values import openai as oa
from ..values.behaviour import (
    AWAITED_EVENTS,
    CUTS_WORDS,
    KEEPS_SOUND,
    LATE_FORMATS,
    RESPONSE_OPTIONS,
    SOUND_FILES,
    WHOLE_PARTS,
)
from ..values.errors import CLOSE_POLICY, ErrorCode
from ..values.frames import Refused
from ..values.limits import (
    APPEND_BYTES_MAX,
    APPEND_S_MAX,
    ITEMS_CHARS_MAX,
    ITEMS_MAX,
    MODEL_CHARS_SHOWN,
    MS_PER_S,
    NS_PER_S,
)
from ..values.messages import EndReason, Speech, ToolCalled
from ..values.model import (
    INPUT_RATE_HZ,
    OUTPUT_RATE_HZ,
    SAMPLE16_BYTES,
    SAMPLE_BYTES,
    UNIT_BYTES,
    Coding,
    ToolResult,
    rate_of,
)
from ..values.requests import AppendSound, ClientMessage
from ..wire.audio import (
    DOWN,
    HISTORY_BYTES,
    LIVE_RATE_HZ,
    looks_float32,
    resample,
    to_float32,
    to_pcm16,
)
from .core import Peer, Step
from .kind import Kind
from .unit_loop import UnitLoop

# -- sound and settings -------------------------------------------------------------------------

AWAY_NS: Final = 3 * NS_PER_S // 2
"""A client that sends no sound for so long has stopped: pieces of a second may be a little late."""
SOUND_PARTS: Final = (oa.Part(kind="input_audio"),)
"""The content of an item that is the client's sound."""
UPDATES_MAX: Final = 16
"""Changes that are sent one by one when the session is there: no client sets itself up in more."""


@attrs.define
class Second:
    """A second of the client's sound: the number of its decoding, and its float32 once decoded."""

    media: int
    pcm: bytes | None = None


@attrs.define(eq=False)
class SoundPieces:
    """The client's sound on its way to units, and the model's on its way to the client.

    Attributes:
        take_second: takes a second of the client's sound: float32 LE, 16 kHz.
        coding, rate_hz, second_bytes: of the client's sound; a second is of 16-bit samples.
        rest: the client's sound that does not fill a second yet: PCM16.
        before: the end of the second before it, as the resampler needs it.
        resampling: seconds that are being resampled, oldest first.
        spoken: the end of the model's speech before, as the resampler needs it: PCM16, 24 kHz.
    """

    step: Step
    peer: Peer
    take_second: Callable[[bytes], None] = lambda _: None
    coding: Coding = "audio/pcm"
    rate_hz: int = LIVE_RATE_HZ
    second_bytes: int = LIVE_RATE_HZ * SAMPLE16_BYTES
    rest: bytearray = attrs.Factory(bytearray)
    before: bytes = bytes(HISTORY_BYTES)
    resampling: deque[Second] = attrs.Factory(deque)
    spoken: bytes = bytes(HISTORY_BYTES)

    def set_format(self, coding: Coding, rate_hz: int) -> None:
        """Set how the client's sound is written."""
        self.coding, self.rate_hz = coding, rate_hz
        self.second_bytes = rate_hz * SAMPLE16_BYTES

    @property
    def samples_waiting(self) -> int:
        """Samples, at the model's rate, of sound on its way to a unit."""
        rest = len(self.rest) // SAMPLE16_BYTES * INPUT_RATE_HZ // self.rate_hz
        return len(self.resampling) * INPUT_RATE_HZ + rest

    def forget(self) -> None:
        """Forget sound that fills no second, or is being resampled."""
        self.rest, self.before = bytearray(), bytes(HISTORY_BYTES)
        self.resampling.clear()

    def refusal(self, message: ClientMessage) -> Refused | None:
        """Refuse half a sample, and more sound at once than may wait."""
        if isinstance(message, AppendSound):
            return size_refusal(self.step, message, self.coding, self.rate_hz)
        return None

    def cut(self, pcm16: bytes) -> Iterator[bytes]:
        """Take sound; gives each second that is full."""
        self.rest += pcm16
        while len(self.rest) >= self.second_bytes and not self.peer.is_closed:
            yield self.next_second()

    def next_second(self) -> bytes:
        """Take the oldest second of the sound that is kept."""
        second = bytes(self.rest[: self.second_bytes])
        del self.rest[: self.second_bytes]
        return second

    def convert(self, second: bytes) -> None:
        """Bring a second to the model's rate."""
        if self.rate_hz == INPUT_RATE_HZ:
            self.take_second(to_float32(second))
            return
        rate = {} if self.rate_hz == LIVE_RATE_HZ else {"rate_hz": self.rate_hz}
        media = self.step.decode("second", self.before + second, **rate)
        self.before = second[-HISTORY_BYTES:]
        self.resampling.append(Second(media))

    def resampled(self, media: int, pcm: bytes) -> None:
        """Take a second that was resampled, or silence for one that could not be; in order."""
        for second in self.resampling:
            if second.media == media:
                second.pcm = pcm[:UNIT_BYTES].ljust(UNIT_BYTES, b"\0")
        while self.resampling and not self.peer.is_closed:
            first = self.resampling[0].pcm
            if first is None:
                return
            self.resampling.popleft()
            self.take_second(first)

    def to_rate(self, pcm: bytes, rate_hz: int) -> bytes:
        """Resample the model's next speech from 24 kHz; both float32 LE."""
        if rate_hz == LIVE_RATE_HZ:
            return pcm
        pcm16 = to_pcm16(pcm)
        pcm16 += bytes(-len(pcm16) % (DOWN * SAMPLE16_BYTES))
        sound, self.spoken = self.spoken + pcm16, (self.spoken + pcm16)[-HISTORY_BYTES:]
        return resample(sound, LIVE_RATE_HZ, rate_hz)


def size_refusal(step: Step, message: AppendSound, coding: Coding, rate_hz: int) -> Refused | None:
    """Refuse half a sample, another format, and more at once than may wait; None accepts it."""
    size, width = len(message.pcm16), SAMPLE16_BYTES if coding == "audio/pcm" else 1
    most, text = APPEND_S_MAX * rate_hz, ""
    if step.opened.endpoint == "openai" and step.behaves(KEEPS_SOUND):
        most = APPEND_BYTES_MAX // width
    if size % width:
        text = f"{size} bytes, a multiple of {width} is needed (int16)"
    elif size > most * width:
        text = f"{size // width} samples, at most {most} are allowed"
    elif coding == "audio/pcm" and step.behaves(SOUND_FILES) and looks_float32(message.pcm16):
        text = "samples that look like float32, int16 are needed"
    return Refused(code=ErrorCode.INVALID_PAYLOAD, message=f"$.audio: {text}") if text else None


def other_formats(message: oa.Configure, now: oa.OpenAISession) -> str:
    """Where a change of settings has another form of sound than that in force; empty if nowhere."""
    if message.input_format not in (None, now.input_format):
        return "input"
    return "output" if message.output_format not in (None, now.output_format) else ""


def format_refusal(
    step: Step, message: ClientMessage, now: oa.OpenAISession, samples: int
) -> Refused | None:
    """Refuse another form of the sound once there were so many samples; None accepts it."""
    is_late = step.behaves(LATE_FORMATS) and samples >= rate_of(now.input_format)
    where = other_formats(message, now) if is_late and isinstance(message, oa.Configure) else ""
    text = f"$.session.audio.{where}.format: a second of sound came in {now.input_format} already"
    ignored = len(getattr(message, "ignored", ()))
    code = ErrorCode.INVALID_PAYLOAD
    return Refused(code=code, message=text, ignored=ignored) if where else None


def first_settings(peer: Peer) -> oa.OpenAISession:
    """The settings in the Realtime API of a client that has sent nothing but its address."""
    opened, limits = peer.step.opened, peer.step.limits
    return oa.OpenAISession(
        id=peer.session_id,
        model=opened.label or next(iter(limits.models), ""),
        expires_at=opened.created_ms // MS_PER_S + limits.session_s,
    )


def whole(step: Step, item: oa.Item) -> oa.Item:
    """Have the parts of an item sent with their text, also where it is empty."""
    is_whole = step.behaves(WHOLE_PARTS)
    parts = tuple(attrs.evolve(it, is_whole=is_whole) for it in item.parts)
    return attrs.evolve(item, parts=parts)


def never_written(item_id: str) -> oa.InputStep:
    """The failure of an item whose words come too late."""
    code, text = ErrorCode.SESSION_EXPIRED, "the session is over"
    return oa.InputStep(kind="transcript_failed", item_id=item_id, fault=code, text=text)


def expired(kind: Kind, reason: EndReason) -> None:
    """Tell a client that its session ends because its time is over."""
    if kind.has_own_time and kind.peer.is_active and reason in ("timeout", "idle"):
        limits = kind.step.limits
        text = f"its limit is {limits.session_s} s"
        if reason == "idle":
            text = f"nothing was heard for {limits.idle_s} s"
        kind.peer.cause = ""
        kind.peer.send_error(ErrorCode.SESSION_EXPIRED, f"the session is over: {text}")


def start_time_limit(kind: Kind, settings: oa.OpenAISession) -> oa.OpenAISession:
    """Have a session's time begin with its slot; returns its settings, which tell the end."""
    if not kind.has_own_time:
        return settings
    kind.timers.set("session", kind.step.limits.session_s)
    waited_s = kind.step.now_ns // NS_PER_S
    return attrs.evolve(settings, expires_at=settings.expires_at + waited_s)


def no_model(name: str) -> str:
    """The words for a model that is not served."""
    return f"there is no model {name[:MODEL_CHARS_SHOWN]!r} here"


def is_served(kind: Kind, name: str) -> bool:
    """Whether a session's model is served; one that is not ends the session."""
    if name in kind.step.limits.models:
        return True
    kind.refuse(ErrorCode.MODEL_NOT_FOUND, no_model(name), close_code=CLOSE_POLICY)
    return False


# -- items and responses --------------------------------------------------------------------------

UNHEARD: Final = "$.response.instructions: the model has its prompt already, and takes no other"
FIRST: Final = "root"
"""In place of an item's id: before all items."""
UTTERANCES_MAX: Final = 16
"""Of what was said so long ago nothing is sent any more."""


@attrs.define
class Utterance:
    """What the client said, as it is transcribed: where it begins and ends in its sound."""

    start_ms: int
    end_ms: int
    text: str = ""
    is_whole: bool = False


@attrs.define(eq=False)
class Conversation:
    """What was said in a session, by either side.

    Attributes:
        settings: those in force.
        items: of the conversation, by their ids; the oldest are forgotten.
        chars: of the text of all items.
        items_made: how many ids were made.
        response: the one in progress.
        asked: the request for the response that comes next.
        is_mid_turn: calls ended the response of a turn that the model may speak on.
        words: the text of `response` so far.
        spans: the last items of sound, each with its end in milliseconds of the model's sound.
        utterances: what is transcribed, and in no item yet.
        id: as a client of `openai` knows the conversation; empty for others, and old ones.
    """

    step: Step
    peer: Peer
    loop: UnitLoop
    sound: SoundPieces
    settings: oa.OpenAISession
    items: dict[str, oa.Item] = attrs.Factory(dict)
    chars: int = 0
    items_made: int = 0
    response: oa.RealtimeResponse | None = None
    asked: oa.Respond = attrs.Factory(oa.Respond)
    is_mid_turn: bool = False
    words: str = ""
    spans: deque[tuple[str, int]] = attrs.Factory(lambda: deque(maxlen=UTTERANCES_MAX))
    utterances: deque[Utterance] = attrs.Factory(lambda: deque(maxlen=UTTERANCES_MAX))
    id: str = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        has_id = self.step.opened.endpoint == "openai" and self.step.behaves(AWAITED_EVENTS)
        self.id = self.step.derive("conv", 0) if has_id else ""

    # -- items ----------------------------------------------------------------------------------

    def new_id(self) -> str:
        """Make the id of an item."""
        self.items_made += 1
        return self.step.derive("item", self.items_made)

    @property
    def last_id(self) -> str | None:
        """The id of the last item; None without one."""
        return next(reversed(self.items), None)

    def add(self, item: oa.Item, after: str | None) -> None:
        """Add a complete item."""
        item = whole(self.step, item)
        self.keep(item, after)
        previous = None if after == FIRST else after
        self.peer.send(oa.ItemStep(kind="added", item=item, previous_id=previous))
        self.peer.send(oa.ItemStep(kind="done", item=item, previous_id=previous))

    def keep(self, item: oa.Item, after: str | None = None) -> None:
        """Keep an item, after all others or one of them, and forget the oldest of too many."""
        if after in (None, self.last_id):
            self.items[item.id] = item
        else:
            kept = list(self.items.items())
            at = 0 if after == FIRST else [*self.items].index(after) + 1
            self.items = dict([*kept[:at], (item.id, item), *kept[at:]])
        self.chars += item.chars
        while len(self.items) > ITEMS_MAX or self.chars > ITEMS_CHARS_MAX:
            self._forget(next(iter(self.items)))

    def add_early(self) -> None:
        """Send the items that came before the session was there."""
        early, self.items, self.chars = self.items, {}, 0
        for item in early.values():
            self.add(item, self.last_id)

    def _replace(self, item: oa.Item) -> None:
        self.chars += item.chars - self.items[item.id].chars
        self.items[item.id] = item

    def _forget(self, item_id: str) -> None:
        self.chars -= self.items.pop(item_id).chars

    def refusal(self, message: ClientMessage) -> Refused | None:
        """Refuse the result of a call that waits for none."""
        if not isinstance(message, oa.CreateItem) or not isinstance(message.item.call, ToolResult):
            return None
        if self.step.limits.duplex_tools:
            return self.loop.tools.refusal(message.item.call, "$.item.call_id")
        return Refused(code=ErrorCode.UNSUPPORTED, message="$.item.type: no tools")

    def create_item(self, message: oa.CreateItem) -> None:
        """Add an item; before the first sound, its text is part of the prompt."""
        item, after = message.item, message.previous_id
        if item.id in self.items:
            self.peer.send_error(ErrorCode.INVALID_PAYLOAD, "$.item.id: there is such an item")
            return
        if after not in (None, FIRST) and after not in self.items:
            text = "$.previous_item_id: there is no such item"
            self.peer.send_error(ErrorCode.ITEM_NOT_FOUND, text)
            return
        if isinstance(item.call, ToolResult):
            self.loop.tools.returned(item.call)
        self.loop.input.show(item.pictures)
        parts = tuple(attrs.evolve(part, picture=b"") for part in item.parts)
        item = attrs.evolve(item, id=item.id or self.new_id(), parts=parts)
        if self.peer.is_active:
            self.add(item, self.last_id if after is None else after)
        else:
            self.keep(item, after)

    def prompt(self, message: ClientMessage | None = None) -> str:
        """The instructions, and the text of the items that come before the first sound."""
        instructions, items = self.settings.instructions, list(self.items.values())
        if isinstance(message, oa.Configure | oa.Respond) and message.instructions is not None:
            instructions = message.instructions
        elif isinstance(message, oa.CreateItem):
            items.append(message.item)
        return oa.as_prompt(instructions, items)

    def delete_item(self, message: oa.DeleteItem) -> None:
        """Forget an item."""
        if self._knows(message.item_id):
            self._forget(message.item_id)
            self.peer.send(oa.ItemDeleted(item_id=message.item_id))

    def retrieve_item(self, message: oa.RetrieveItem) -> None:
        """Send an item again."""
        if self._knows(message.item_id):
            self.peer.send(oa.ItemStep(kind="retrieved", item=self.items[message.item_id]))

    def truncate_item(self, message: oa.TruncateItem) -> None:
        """Note how much of an item was played, and forget the words of the rest."""
        if not self._knows(message.item_id):
            return
        wrong = self.truncate(message) if self.step.behaves(CUTS_WORDS) else ""
        if wrong:
            self.peer.send_error(ErrorCode.INVALID_PAYLOAD, wrong)
        else:
            self.peer.send(
                oa.ItemTruncated(
                    item_id=message.item_id,
                    content_index=message.content_index,
                    audio_end_ms=message.audio_end_ms,
                )
            )

    def truncate(self, message: oa.TruncateItem) -> str:
        """Cut an item of the model's; returns why that is impossible, or an empty text."""
        item, index = self.items[message.item_id], message.content_index
        if item.role != "assistant":
            return f"$.item_id: only what the model said can be cut, this is of the {item.role}"
        if self.response is not None and item.id == oa.item_of(self.response.id):
            return "$.item_id: the response is in progress, cancel it first"
        if index >= len(item.parts) or item.parts[index].kind != "output_audio":
            return f"$.content_index: part {index} has no sound"
        part = item.parts[index]
        samples = message.audio_end_ms * OUTPUT_RATE_HZ // MS_PER_S
        length = part.ends[-1][0] if part.ends else 0
        if samples > length:
            length_ms = length * MS_PER_S // OUTPUT_RATE_HZ
            return f"$.audio_end_ms: {message.audio_end_ms}, the sound has only {length_ms} ms"
        ends = tuple(end for end in part.ends if end[0] <= samples)
        text = part.text[: ends[-1][1] if ends else 0]
        cut = attrs.evolve(part, text=text, ends=(*ends, (samples, len(text))))
        parts = (*item.parts[:index], cut, *item.parts[index + 1 :])
        self._replace(attrs.evolve(item, parts=parts))
        return ""

    def _knows(self, item_id: str) -> bool:
        if item_id not in self.items:
            self.peer.send_error(ErrorCode.ITEM_NOT_FOUND, "$.item_id: there is no such item")
        return item_id in self.items

    # -- the response ---------------------------------------------------------------------------

    def speak(self, speech: Speech) -> None:
        """Send a second of the response: its text and sound, or its text."""
        if self.response is None or self.response.id != speech.response_id:
            self.end_response("completed")
            self.begin_response(speech)
        assert self.response is not None
        held, made = speech.metrics.kv_cache_length, speech.metrics.n_tokens
        response, self.words = self.response, self.words + speech.text
        is_first = not response.output_tokens and self.step.behaves(RESPONSE_OPTIONS)
        before = response.ends[-1][0] if response.ends else 0
        end = before + len(speech.pcm) // SAMPLE_BYTES, len(self.words)
        self.response = attrs.evolve(
            response,
            input_tokens=max(held - made, 0) if is_first else response.input_tokens,
            output_tokens=response.output_tokens + made,
            ends=(*response.ends, end),
        )
        if self.response.modality == "audio" and (speech.text or speech.pcm):
            coding = self.settings.output_format
            pcm = self.sound.to_rate(speech.pcm, rate_of(coding))
            self.peer.send(attrs.evolve(speech, pcm=pcm, coding=coding))
        elif speech.text:
            self._send_step(self.response.id, "text_delta", text=speech.text)
        if speech.end_of_turn:
            self.end_response("completed")

    @property
    def is_speaking(self) -> bool:
        """Whether the model is in a turn: a response is in progress, or a call has ended it."""
        return self.response is not None or self.is_mid_turn

    @property
    def is_too_long(self) -> bool:
        """Whether the response in progress has as many tokens as it may have."""
        response = self.response
        return response is not None and 0 < response.max_tokens <= response.output_tokens

    def cancels(self, message: oa.CancelResponse, *, is_asked: bool) -> bool:
        """Whether a client cancels the response in progress or asked for; else send an error."""
        names = {None, self.response.id} if self.response else {None} if is_asked else set()
        if message.response_id in names:
            return True
        code = ErrorCode.RESPONSE_CANCEL_NOT_ACTIVE
        self.peer.send_error(code, "there is no such response in progress")
        return False

    def end_unbegun(
        self,
        status: oa.ResponseStatus,
        reason: oa.ResponseReason = "",
        *,
        calls: Sequence[ToolCalled] = (),
        **why: Any,
    ) -> None:
        """Begin and end a response without speech: one that does not come, or only calls."""
        response = self._new_response(self.loop.next_response_id)
        self.loop.responses += 1
        self.peer.send(oa.ReplyState(response=response))
        items = self._send_calls(response.id, calls, 0)
        response = attrs.evolve(response, status=status, reason=reason, items=items, **why)
        self.peer.send(oa.ReplyState(response=response))

    def _send_calls(self, name: str, calls: Sequence[ToolCalled], at: int) -> tuple[oa.Item, ...]:
        """Send calls as items of a response, from a place in it on."""
        items = []
        for index, made in enumerate(calls, at):
            item = oa.Item(id=self.new_id(), role="assistant", call=made.call)
            bare = attrs.evolve(made.call, arguments="")
            begun, previous = attrs.evolve(item, status="in_progress", call=bare), self.last_id
            self.keep(item)
            self._send_step(name, "item_added", item=begun, index=index)
            self.peer.send(oa.ItemStep(kind="added", item=begun, previous_id=previous))
            for kind in ("call_delta", "call_done", "item_done"):
                self._send_step(name, kind, item=item, index=index)
            self.peer.send(oa.ItemStep(kind="done", item=item, previous_id=previous))
            items.append(item)
        return tuple(items)

    def _new_response(self, response_id: str) -> oa.RealtimeResponse:
        asked, self.asked = self.asked, oa.Respond()
        return oa.RealtimeResponse(
            id=response_id,
            modality=asked.modality or self.settings.modality,
            metadata=asked.metadata,
            max_tokens=asked.max_tokens,
            conversation_id=self.id,
            fault=ErrorCode.UNSUPPORTED if asked.is_unheard else "",
            message=UNHEARD if asked.is_unheard else "",
        )

    def begin_response(self, speech: Speech) -> None:
        """Begin a response, by its first second."""
        response_id = speech.response_id
        self.words, self.sound.spoken = "", bytes(HISTORY_BYTES)
        self.response = self._new_response(response_id)
        self.peer.send(oa.ReplyState(response=self.response))
        if self.id:
            self._send_left(speech.metrics.kv_cache_length)
        item = oa.Item(id=oa.item_of(response_id), role="assistant", status="in_progress")
        self._send_step(response_id, "item_added", item=item)
        previous = self.last_id
        self.keep(item)
        self.peer.send(oa.ItemStep(kind="added", item=item, previous_id=previous))
        self._send_step(response_id, "part_added", modality=self.response.modality)

    def _send_step(self, response_id: str, kind: oa.ReplyKind, **fields: Any) -> None:
        self.peer.send(oa.ReplyStep(kind=kind, response_id=response_id, **fields))

    def _send_left(self, held: int) -> None:
        """Tell how much of the model's context is left, and of the session's time."""
        limit = self.step.limits.context_tokens
        now_s = self.step.opened.created_ms // MS_PER_S + self.step.now_ns // NS_PER_S
        left = oa.RateLimit(
            limit=limit,
            remaining=max(limit - held, 0),
            reset_s=max(self.settings.expires_at - now_s, 0),
        )
        self.peer.send(left)

    def end_response(
        self,
        status: Any,
        reason: oa.ResponseReason = "",
        *,
        fault: str = "",
        message: str = "",
        calls: Sequence[ToolCalled] = (),
    ) -> None:
        """End the response in progress, if there is one, with calls after its speech.

        Without calls the model's turn ends, also one whose response has ended by a call.
        """
        response, self.response = self.response, None
        self.is_mid_turn = response is not None and bool(calls)
        if response is None:
            return
        is_sound, name, words = response.modality == "audio", response.id, self.words
        if is_sound:
            self._send_step(name, "audio_done")
        self._send_step(name, "transcript_done" if is_sound else "text_done", text=words)
        self._send_step(name, "part_done", modality=response.modality, text=words)
        kind: oa.PartKind = "output_audio" if is_sound else "output_text"
        parts = (oa.Part(kind=kind, text=words, ends=response.ends),)
        end: oa.ItemStatus = "completed" if status == "completed" else "incomplete"
        item = oa.Item(id=oa.item_of(name), role="assistant", status=end, parts=parts)
        item, ids = whole(self.step, item), list(self.items)
        at = ids.index(item.id) if item.id in self.items else 0
        previous = ids[at - 1] if at else None
        if item.id in self.items:
            self._replace(item)
        self._send_step(name, "item_done", item=item)
        self.peer.send(oa.ItemStep(kind="done", item=item, previous_id=previous))
        ended = attrs.evolve(
            response,
            status=status,
            reason=reason,
            fault=fault or response.fault,
            message=message if fault else response.message,
            items=(item, *self._send_calls(name, calls, 1)),
        )
        self.peer.send(oa.ReplyState(response=ended))

    # -- the user's words -----------------------------------------------------------------------

    def user_transcribed(self, event: ev.UserTranscribed) -> None:
        """Take words of the client; they are sent once the item of their sound is there."""
        if not self.utterances or self.utterances[-1].is_whole:
            self.utterances.append(Utterance(event.start_ms, event.end_ms))
        last = self.utterances[-1]
        last.text, last.end_ms, last.is_whole = last.text + event.text, event.end_ms, event.is_last
        if event.is_last and self.peer.is_active:
            self._place_words()

    def add_sound(self, item: oa.Item, end_ms: int) -> None:
        """Add an item of the client's sound, which ends there, and the words that belong to it."""
        self.add(item, self.last_id)
        self.spans.append((item.id, end_ms))
        self._place_words()

    def _place_words(self) -> None:
        for utterance in [it for it in self.utterances if it.is_whole]:
            item_id = next((name for name, end_ms in self.spans if utterance.start_ms < end_ms), "")
            if item_id:
                self.utterances.remove(utterance)
                self._send_words(item_id, utterance)

    def unwritten(self, since_ms: int) -> list[str]:
        """Return the items of sound since then that have no words yet, if they are transcribed."""
        late = [name for name, end_ms in self.spans if end_ms > since_ms and name in self.items]
        is_written = bool(self.settings.transcriber)
        return [it for it in late if is_written and not self.items[it].parts[0].text]

    def _send_words(self, item_id: str, utterance: Utterance) -> None:
        item, text = self.items.get(item_id), utterance.text.strip()
        if item is None or not text or not self.settings.transcriber:
            return
        words = " ".join(filter(None, [*(part.text for part in item.parts), text]))
        self._replace(attrs.evolve(item, parts=(oa.Part(kind="input_audio", text=words),)))
        took_ms = utterance.end_ms - utterance.start_ms
        self.peer.send(oa.InputStep(kind="transcript_delta", item_id=item_id, text=text))
        done = oa.InputStep(kind="transcript_done", item_id=item_id, text=words, at_ms=took_ms)
        self.peer.send(done)
