"""The input of a duplex session that waits for the model: units of sound, pictures, tools' results.

- A unit is exactly `UNIT_SAMPLES` samples; the rest waits for more.
- The frames and flags of an append belong to the unit in which its last sample falls.
- `force_listen` forces every unit up to and including its own (B6).
- At most `UNITS_PENDING_MAX` units wait; when more arrive the oldest is dropped and its
  `force_listen` passes to the next (B7).
- A picture is decoded outside and comes back by number; its unit waits for it. The model gets the
  JPEG that came back, or the one that was sent where none did. A wrong or damaged picture is left
  out, and the client is told.

Calls of tools (`ToolCalls`) come back as input, with other events for the model:

made in silence -> sent to the client, and `started` to the model -> result -> fed to the model

- The model knows a call by a short name, `t1`, `t2`..., the client by an id. What is not a
  call of a tool that was offered, or one too many, is answered by an error, and never sent.
- A call that was sent has exactly one end: its result, its time, or the session's (B12). Another
  result is refused, and so is one of a call that the session has not sent.
- Events are fed with the next unit: first what started, then the rest in the order in which it
  came, `INPUT_CHARS_MAX` characters at most. Those of a unit that is undone are fed again.
- The client's speech, and interrupts, touch no call; an interrupt ends the unit's silent part, as
  its budget does, and what was being written goes on in the next.
- The time of calls stands still from when the session leaves its slot until its model is rebuilt:
  also in the queue, and while the client is away without a slot.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import attrs

from ..values import effects as ef
from ..values import events as ev
from ..values import limits
from ..values.errors import ErrorCode
from ..values.frames import Refused
from ..values.messages import ToolCalled
from ..values.model import (
    SAMPLE_BYTES,
    UNIT_BYTES,
    UNIT_SAMPLES,
    Silent,
    Span,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
    UnitInput,
)
from ..values.requests import Append, BadPicture, ClientMessage, See, TellModel
from ..wire.media import image_kind
from .core import Peer, Step, Timers

_EARLY: Final = f"a frame before any audio, {limits.FRAMES_MAX} of them wait already"
_TOO_MANY_FRAMES: Final = (
    f"video frames were left out: a second has {limits.UNIT_FRAMES_MAX} at most"
)


@attrs.frozen(kw_only=True)
class CameraFrame:
    """A picture of an append; `media` is the number of its decoding.

    `jpeg` is empty until a picture of another kind is decoded.
    """

    media: int
    jpeg: bytes


@attrs.frozen(kw_only=True)
class Attachments:
    """The extras of an append's audio; `max_slice_nums` is None if absent."""

    input_id: str = ""
    frames: tuple[CameraFrame, ...] = ()
    force_listen: bool = False
    max_slice_nums: int | None = None


@attrs.frozen(kw_only=True)
class PendingUnit:
    """A full second of input that waits: float32 LE, `UNIT_SAMPLES` samples.

    `ordinal` is its second of the session's input, from 0; dropped ones count.
    """

    ordinal: int
    pcm: bytes
    attached: Attachments


@attrs.define
class Assembler:
    """Audio that does not fill a unit yet, with its attachments."""

    remainder: bytearray = attrs.Factory(bytearray)
    attached: Attachments = Attachments()
    ordinal: int = 0

    def add(self, pcm: bytes, attached: Attachments) -> list[PendingUnit]:
        """Add an append's audio; returns the units that are full now, oldest first.

        `pcm` is float32 LE, any whole number of samples above 0.
        """
        if len(self.remainder) + len(pcm) < UNIT_BYTES:  # a small piece, of which there are many
            self.remainder += pcm
            self.attached = self._merge(attached, whole=True)
            return []
        audio = bytes(self.remainder) + pcm
        spans = range(0, len(audio) - UNIT_BYTES + 1, UNIT_BYTES)
        last_begin = (len(audio) - 1) // UNIT_BYTES * UNIT_BYTES
        units = []
        for begin in spans:
            merged = self._merge(attached, whole=begin == last_begin)
            unit = audio[begin : begin + UNIT_BYTES]
            units.append(PendingUnit(ordinal=self.ordinal, pcm=unit, attached=merged))
            self.ordinal += 1
            self.attached = Attachments()
        self.remainder = bytearray(audio[len(spans) * UNIT_BYTES :])
        if self.remainder:
            self.attached = self._merge(attached, whole=True)
        return units

    def frames_before(self, pcm: bytes) -> int:
        """Count the frames of the unit in which the last sample of an append would fall."""
        is_same = len(self.remainder) + len(pcm) <= UNIT_BYTES
        return len(self.attached.frames) if is_same else 0

    def force_listen(self) -> None:
        """Force the next unit to listen."""
        self.attached = attrs.evolve(self.attached, force_listen=True)

    def decide_frame(self, media: int, jpeg: bytes) -> None:
        """Give a frame its picture, or forget a damaged one: `jpeg` is empty."""
        self.attached = _decided(self.attached, media, jpeg)

    def _merge(self, new: Attachments, *, whole: bool) -> Attachments:
        """Join the unit's attachments with new ones; not `whole`: the last sample falls later."""
        slices = new.max_slice_nums if whole else None
        return Attachments(
            input_id=new.input_id,
            frames=self.attached.frames + (new.frames if whole else ()),
            force_listen=self.attached.force_listen or new.force_listen,
            max_slice_nums=self.attached.max_slice_nums if slices is None else slices,
        )


@attrs.define
class WaitingUnits:
    """The waiting units, oldest first, `most` at most."""

    units: deque[PendingUnit] = attrs.Factory(deque)
    most: int = limits.UNITS_PENDING_MAX

    def push(self, unit: PendingUnit) -> PendingUnit | None:
        """Add the newest; return the unit dropped for it, if any (B7)."""
        self.units.append(unit)
        if len(self.units) <= self.most:
            return None
        dropped = self.units.popleft()
        if dropped.attached.force_listen:
            self.units[0] = _forced(self.units[0])
        return dropped

    def force_listen(self) -> None:
        """Force every waiting unit to listen (B6)."""
        self.units = deque(_forced(unit) for unit in self.units)

    def force_next(self) -> bool:
        """Force the oldest waiting unit to listen; False without one."""
        if self.units:
            self.units[0] = _forced(self.units[0])
        return bool(self.units)

    def pop_ready(self, undecided_media: set[int]) -> PendingUnit | None:
        """Take the oldest; None without one, or while its media is being decoded."""
        if not self.units:
            return None
        frames = self.units[0].attached.frames
        if frames and any(frame.media in undecided_media for frame in frames):
            return None
        return self.units.popleft()

    def decide_frame(self, media: int, jpeg: bytes) -> None:
        """Give a frame its picture, or forget a damaged one, whose unit runs without it."""
        self.units = deque(
            attrs.evolve(unit, attached=_decided(unit.attached, media, jpeg)) for unit in self.units
        )


def _forced(unit: PendingUnit) -> PendingUnit:
    return attrs.evolve(unit, attached=attrs.evolve(unit.attached, force_listen=True))


def _decided(attached: Attachments, media: int, jpeg: bytes) -> Attachments:
    return attrs.evolve(attached, frames=decided(attached.frames, media, jpeg))


def decided(frames: tuple[CameraFrame, ...], media: int, jpeg: bytes) -> tuple[CameraFrame, ...]:
    """Give the frame of a number its picture; it is left out if `jpeg` is empty."""
    return tuple(
        attrs.evolve(frame, jpeg=jpeg) if frame.media == media else frame
        for frame in frames
        if jpeg or frame.media != media
    )


@attrs.define(eq=False)
class Input:
    """The sound and pictures of a duplex session that wait for the model.

    Attributes:
        undecided_media: numbers of pictures that are being decoded.
        pictures: sent by themselves, for the next audio (002).
        units_dropped: waiting units lost to newer input (B7).
    """

    step: Step
    peer: Peer
    undecided_media: set[int] = attrs.Factory(set)
    assembler: Assembler = attrs.Factory(Assembler)
    waiting: WaitingUnits = attrs.Factory(WaitingUnits)
    pictures: tuple[CameraFrame, ...] = ()
    units_dropped: int = 0

    @property
    def samples_waiting(self) -> int:
        """Samples that no unit in the model has yet."""
        remainder = len(self.assembler.remainder) // SAMPLE_BYTES
        return len(self.waiting.units) * UNIT_SAMPLES + remainder

    def forget(self, ordinal: int) -> None:
        """Forget all input; the next unit is the second of the session's input with a number."""
        self.undecided_media.clear()
        self.pictures, self.waiting = (), WaitingUnits()
        self.assembler = Assembler(ordinal=ordinal)

    def raise_waiting_limit(self, units: int) -> None:
        """Let more units wait than usual."""
        self.waiting.most = max(units, limits.UNITS_PENDING_MAX)

    def catch_up(self) -> None:
        """Let no more units wait than usual, once no more do."""
        if len(self.waiting.units) <= limits.UNITS_PENDING_MAX:
            self.waiting.most = limits.UNITS_PENDING_MAX

    def attach(self, message: Append, input_id: str) -> Attachments:
        """Have the pictures of an append decoded; returns what belongs to its sound."""
        has_frames = message.frames or self.pictures or self.assembler.attached.frames
        attached = Attachments(
            input_id=input_id,
            frames=self.pictures + self._decode_all(message) if has_frames else (),
            force_listen=message.force_listen,
            max_slice_nums=message.max_slice_nums,
        )
        self.pictures = ()
        return attached

    def drop(self, unit: PendingUnit) -> None:
        """Report a dropped unit, and forget its pictures (B7)."""
        self.units_dropped += 1
        self.step.do(
            ef.DropUnit(
                ordinal=unit.ordinal,
                input_id=unit.attached.input_id,
                force_listen_passed=unit.attached.force_listen,
            )
        )
        for frame in unit.attached.frames:
            if frame.media in self.undecided_media:
                self.undecided_media.discard(frame.media)
                self.step.do(ef.CancelDecode(media=frame.media))

    # -- pictures -------------------------------------------------------------------------------

    def see(self, message: See) -> None:
        """Keep a picture for the next audio (002, video_frame)."""
        if self.step.opened.mode != "audio":  # it has none, and the dialect has counted it
            self.show((message.jpeg,))

    def show(self, pictures: tuple[bytes, ...]) -> None:
        """Keep pictures for the next audio."""
        self.pictures += tuple(self._decode(picture) for picture in pictures)

    def refusal(self, message: ClientMessage) -> Refused | None:
        """Refuse a picture for which there is no room."""
        if not isinstance(message, See) or self.step.opened.mode == "audio":
            return None
        is_early = len(self.pictures) >= limits.FRAMES_MAX
        frames = len(self.pictures) + len(self.assembler.attached.frames)
        if not is_early and frames < limits.UNIT_FRAMES_MAX:
            return None
        text, ignored = _EARLY if is_early else _TOO_MANY_FRAMES, len(message.ignored)
        return Refused(code=ErrorCode.INVALID_PAYLOAD, message=text, ignored=ignored)

    def _decode_all(self, message: Append) -> tuple[CameraFrame, ...]:
        """Have an append's pictures decoded, as many as its second may still have."""
        frames = tuple(frame for frame in message.frames if isinstance(frame, bytes))
        for frame in message.frames:
            if isinstance(frame, BadPicture):
                self._leave_out(frame.reason)
        before = len(self.pictures) + self.assembler.frames_before(message.pcm)
        if before + len(frames) > limits.UNIT_FRAMES_MAX:
            self.peer.send_error(ErrorCode.INVALID_PAYLOAD, _TOO_MANY_FRAMES)
            frames = frames[: max(limits.UNIT_FRAMES_MAX - before, 0)]
        return tuple(self._decode(jpeg) for jpeg in frames)

    def _decode(self, picture: bytes) -> CameraFrame:
        is_jpeg = image_kind(picture) == "JPEG"
        media = self.step.decode("jpeg" if is_jpeg else "image", picture)
        self.undecided_media.add(media)
        return CameraFrame(media=media, jpeg=picture if is_jpeg else b"")

    def _decide(self, media: int, jpeg: bytes) -> None:
        """Give a frame its picture, wherever it waits; without one it is forgotten."""
        self.pictures = decided(self.pictures, media, jpeg)
        self.assembler.decide_frame(media, jpeg)
        self.waiting.decide_frame(media, jpeg)

    def media_decoded(self, event: ev.MediaDecoded) -> None:
        """Note a decoded picture, whose unit may start."""
        if event.media in self.undecided_media:
            self.undecided_media.discard(event.media)
            for jpeg in event.pictures:
                self._decide(event.media, jpeg)

    def media_rejected(self, event: ev.MediaRejected) -> bool:
        """Tell the client of a damaged picture; returns whether its unit may run without it."""
        if self.peer.is_closed or event.media not in self.undecided_media:
            return False
        self.undecided_media.discard(event.media)
        self._decide(event.media, b"")
        self._leave_out(event.reason)
        return True

    def _leave_out(self, reason: str) -> None:
        text = f"a video frame was left out: {reason}"
        self.peer.send_error(ErrorCode.INVALID_PAYLOAD, text)


# -- the calls of tools, and events for the model -----------------------------------------------

_ERROR: Final = "error: "
_LATE: Final = f"{_ERROR}no answer in time"
_LOST: Final = f"{_ERROR}the call was lost"
_UNKNOWN: Final = "there is no tool of this name"
_MANY_OPEN: Final = "too many calls wait for a result"
_MANY: Final = "too many calls"
UNANSWERED: Final = frozenset(
    {_LATE, _LOST, *(f"{_ERROR}{fault}" for fault in (_UNKNOWN, _MANY_OPEN, _MANY))}
)
"""What the model is told in place of a result, but of calls that cannot be read."""


@attrs.frozen(kw_only=True)
class OpenCall:
    """A call without a result yet: the name by which the model knows it, and its deadline."""

    name: str
    deadline_ns: int


@attrs.define(eq=False)
class ToolCalls:
    """The calls of one session.

    Attributes:
        offered: the client's tools; none where the model calls none.
        made: calls that the model closed, those that were not sent included.
        allowed: names of the tools that the client takes calls of now; None: of all.
        is_serial: the client takes no call while another waits for its result.
        open: calls that were sent and have no end, by the client's id, the oldest first.
        started, waiting: events that no unit has fed yet.
        made_ns: when the last calls were sent, within a minute.
        texts_ns: when the last texts without a call came, within a second.
        failures: silent parts that failed in a row (B3).
        refusals: units that ended with a refused call, since the client last sent sound or a
            result; `is_refused`: the unit whose calls are being sent is such a unit.
        is_cut: the silent part in progress is being cut.
        takes_events: the model has a place for events without a call.
        stopped_ns: since when the time of open calls stands still, for the model is away (B11).
    """

    step: Step
    timers: Timers
    peer: Peer
    offered: tuple[Tool, ...] = ()
    allowed: tuple[str, ...] | None = None
    is_serial: bool = False
    made: int = 0
    open: dict[str, OpenCall] = attrs.Factory(dict)
    started: deque[UnitInput] = attrs.Factory(deque)
    waiting: deque[UnitInput] = attrs.Factory(deque)
    made_ns: deque[int] = attrs.Factory(deque)
    texts_ns: deque[int] = attrs.Factory(deque)
    failures: int = 0
    refusals: int = 0
    is_refused: bool = False
    is_cut: bool = False
    takes_events: bool = True
    stopped_ns: int | None = None

    # -- the model ------------------------------------------------------------------------------

    def take(self, silent: Silent, unit: int) -> list[ToolCalled]:
        """Take what the model did in silence after a unit's speech; returns calls to be sent."""
        self.failures = self.failures + 1 if silent.end == "failed" else 0
        made = [self._called(span, unit) for span in silent.spans if span.kind == "call"]
        self.is_refused = bool(made) and made[-1] is None
        return [call for call in made if call is not None]

    def _called(self, span: Span, unit: int) -> ToolCalled | None:
        self.made += 1
        name = f"t{self.made}"
        self.started.append(UnitInput(kind="started", call=name))
        fault = span.fault or self._refuse_call(span.name)
        if fault:
            self._return(name, f"{_ERROR}{fault}")
            return None
        now_ns, call_id = self.step.now_ns, self.step.derive("call", self.made)
        self.made_ns.append(now_ns)
        deadline_ns = now_ns + limits.CALL_RESULT_S * limits.NS_PER_S
        self.open[call_id] = OpenCall(name=name, deadline_ns=deadline_ns)
        if len(self.open) == 1:
            self.timers.set_at("calls", deadline_ns)
        call = ToolCall(id=call_id, name=span.name, arguments=span.arguments)
        return ToolCalled(session_id=self.peer.session_id, call=call, unit=unit)

    def _refuse_call(self, name: str) -> str:
        """Why a call is not sent, in words for the model; empty for one that is."""
        _forget(self.made_ns, self.step.now_ns - 60 * limits.NS_PER_S)
        is_allowed = self.allowed is None or name in self.allowed
        if not is_allowed or all(tool.name != name for tool in self.offered):
            return _UNKNOWN
        if len(self.open) >= (1 if self.is_serial else limits.CALLS_OPEN_MAX):
            return _MANY_OPEN
        if len(self.made_ns) >= limits.CALLS_A_MINUTE or self.made > limits.CALLS_SESSION_MAX:
            return _MANY
        return ""

    def _return(self, name: str, text: str) -> None:
        self.waiting.append(UnitInput(kind="result", call=name, text=text))

    def may_feed_refusals(self) -> bool:
        """Count a unit whose last call was refused; whether it may be answered in silence."""
        self.refusals += self.is_refused
        return self.refusals <= limits.REFUSALS_FED_MAX

    def next_inputs(self) -> tuple[UnitInput, ...]:
        """Take the events of the next unit."""
        inputs, chars = [*self.started], 0
        self.started.clear()
        while self.waiting:
            chars += len(self.waiting[0].text)
            if chars > limits.INPUT_CHARS_MAX and chars > len(self.waiting[0].text):
                break
            inputs.append(self.waiting.popleft())
        return tuple(inputs)

    def put_back(self, inputs: tuple[UnitInput, ...]) -> None:
        """Feed the events of a unit that is undone with the next one."""
        self.started.extendleft(it for it in reversed(inputs) if it.kind == "started")
        self.waiting.extendleft(it for it in reversed(inputs) if it.kind != "started")

    # -- the client -----------------------------------------------------------------------------

    def choose(
        self, tools: tuple[Tool, ...], *, is_open: bool = True, choice: ToolChoice = "auto"
    ) -> tuple[Tool, ...]:
        """Send calls only of some tools; returns those that the model has, if it is open."""
        names = {tool.name for tool in tools}
        if is_open:
            tools = tuple(tool for tool in self.offered if tool.name in names)
        self.allowed = () if choice == "none" else tuple(tool.name for tool in tools)
        return tools

    def refusal(self, message: ClientMessage, path: str = "$.tool_call_id") -> Refused | None:
        """Refuse a result that is not due, by the path of its call, and what has no room."""
        match message:
            case ToolResult(call_id=name, output=text):
                if name not in self.open:
                    words = f"{path}: no call of this session that waits for a result"
                    return Refused(code=ErrorCode.INVALID_PAYLOAD, message=words)
            case TellModel(text=text):
                if not (self.step.limits.duplex_tools and self.takes_events):
                    words = "this server's model takes no events"
                    return Refused(code=ErrorCode.INVALID_EVENT, message=words)
                since_ns = self.step.now_ns - limits.NS_PER_S
                if sum(at_ns > since_ns for at_ns in self.texts_ns) >= limits.TEXTS_A_SECOND:
                    words = f"at most {limits.TEXTS_A_SECOND} events a second: it is not kept"
                    return Refused(code=ErrorCode.NOT_READY, message=words)
            case _:
                return None
        chars = len(text) + sum(len(it.text) for it in self.waiting)
        if len(self.waiting) < limits.INPUTS_MAX and chars <= limits.INPUTS_CHARS_MAX:
            return None
        most = f"{limits.INPUTS_MAX} events and {limits.INPUTS_CHARS_MAX} characters"
        words = f"at most {most} wait for the model: it is not kept"
        return Refused(code=ErrorCode.NOT_READY, message=words)

    def returned(self, message: ToolResult) -> None:
        """Keep what a tool returned for the model."""
        self.refusals = 0
        self._return(self.open.pop(message.call_id).name, message.output)
        self._set_timer()

    def add_text(self, message: TellModel) -> None:
        """Keep an event for the model that belongs to no call."""
        _forget(self.texts_ns, self.step.now_ns - limits.NS_PER_S)
        self.texts_ns.append(self.step.now_ns)
        self.waiting.append(UnitInput(kind="text", text=message.text))

    def expire(self) -> None:
        """Close the calls whose time is over."""
        for call_id, call in list(self.open.items()):
            if call.deadline_ns <= self.step.now_ns:
                del self.open[call_id]
                self._return(call.name, _LATE)
        self._set_timer()

    def stop_time(self) -> None:
        """Let the time of open calls stand still: the model could not be given their results."""
        if self.open and self.stopped_ns is None:
            self.stopped_ns = self.step.now_ns
            self.timers.cancel("calls")

    def go_on(self) -> None:
        """Let it go on."""
        if self.stopped_ns is not None:
            away_ns = self.step.now_ns - self.stopped_ns
            for call_id, call in self.open.items():
                self.open[call_id] = attrs.evolve(call, deadline_ns=call.deadline_ns + away_ns)
            self.stopped_ns = None
            self._set_timer()

    def _set_timer(self) -> None:
        """Set the timer for the oldest call, unless an earlier one is still set."""
        if self.stopped_ns is not None:
            return
        first = next(iter(self.open.values()), None)
        if first is None:
            self.timers.cancel("calls")
        elif "calls" not in self.timers.pending:
            self.timers.set_at("calls", first.deadline_ns)

    def forget_client(self) -> None:
        """Close the calls that were sent to the client of the session that a fork began from."""
        for call in self.open.values():
            self._return(call.name, _LOST)
        self.open.clear()
        self.stopped_ns = None


def _forget(times_ns: deque[int], until_ns: int) -> None:
    while times_ns and times_ns[0] <= until_ns:
        times_ns.popleft()
