"""Sessions by turns: a question, its media decoded, a slot leased, an answer.

asked -> decoded -> queued -> running -> answered, or cancelled on the way

- A turn holds a slot from prefill to its end; between turns a session has no slot. At most one turn
  is in progress. Its answer is sent in pieces (streaming) or at once, and always ends: with a
  `Response`, an error, or the session.
- The client's conversation becomes the model's: text and raw sound at the model's rate are ready;
  files are decoded outside and come back by number. A video becomes its pictures and its sound,
  second by second.
- `Chat` has many turns (001); `SingleRequest` one without an init, and closes after its answer or
  error (004).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from operator import attrgetter
from typing import ClassVar, Final

import attrs

from ..values import effects as ef
from ..values import events as ev
from ..values import model as tn
from ..values import requests as rq
from ..values.errors import CLOSE_INTERNAL_ERROR, CLOSE_TOO_BIG, REFUSALS, ErrorCode, FrameError
from ..values.limits import AUDIO_SUM_S_MAX, SLICES_MAX
from ..values.messages import Delta, EndReason, Metrics, Prefilled, QueueDone, Response
from ..values.model import CALLS_MAX, INPUT_RATE_HZ, SAMPLE_BYTES, ToolCall, ToolResult
from ..values.openai import CancelResponse
from ..values.state import Gate, SessionKind, State
from .core import Call, Decode, Peer, Phase, Recording, Step, Timers, decode_voice
from .kind import Handlers, Kind, Slot

SECOND_BYTES: Final = INPUT_RATE_HZ * SAMPLE_BYTES
VIDEO_SLICES: Final = 1
"""Slices a picture of a video, by default: there are many pictures, and each counts."""

Contents = tuple[tn.Content, ...]


def _decode(part: rq.Part, decode: Decode) -> int | Contents:
    match part:
        case rq.TextPart(text=text):
            return (tn.Text(text=text),)
        case ToolCall() | ToolResult():
            return (part,)
        case rq.ImagePart(data=data):
            return decode("image", data)
        case rq.AudioPart(data=data, is_file=False, rate_hz=rate) if rate == INPUT_RATE_HZ:
            return (tn.Sound(pcm=data),)
        case rq.AudioPart(data=data, is_file=is_file, rate_hz=rate):
            return decode("audio", data, rate_hz=0 if is_file else rate)
        case rq.VideoPart(data=data, stack_frames=stack):
            return decode("video", data, stack_frames=stack)


@attrs.define
class PendingTurn:
    """A turn that was asked for, and the media that it waits for.

    Attributes:
        ask: the request without the conversation: its files are not held twice.
        contents: by message, the decoded form of each content.
        undecided: message and content of each media number; None for the voice.
        sound_bytes: sound of its files, decoded.
    """

    ask: rq.Ask
    roles: tuple[tn.Role, ...]
    has_video: bool
    contents: list[list[Contents]]
    undecided: dict[int, tuple[int, int] | None]
    voice_pcm: bytes = b""
    sound_bytes: int = 0

    @classmethod
    def of(cls, ask: rq.Ask, decode: Decode) -> PendingTurn:
        """Take a turn, and have its media decoded."""
        pending = cls(
            ask=attrs.evolve(ask, messages=()),
            roles=tuple(message.role for message in ask.messages),
            has_video=any(
                isinstance(part, rq.VideoPart)
                for message in ask.messages
                for part in message.content
            ),
            contents=[[() for _ in message.content] for message in ask.messages],
            undecided={},
        )
        for at, message in enumerate(ask.messages):
            for place, part in enumerate(message.content):
                found = _decode(part, decode)
                if isinstance(found, int):
                    pending.undecided[found] = (at, place)
                else:
                    pending.contents[at][place] = found
        voice = None if ask.speech is None else ask.speech.voice
        if voice is not None:
            asked = decode_voice(voice, decode)
            if isinstance(asked, int):
                pending.undecided[asked] = None
            else:
                pending.voice_pcm = asked
        return pending

    @property
    def is_complete(self) -> bool:
        """Whether all media is decoded."""
        return not self.undecided

    def awaits(self, media: int) -> bool:
        """Whether `media` belongs to the turn."""
        return media in self.undecided

    def decoded(self, event: ev.MediaDecoded) -> None:
        """Take decoded media."""
        place = self.undecided.pop(event.media)
        if place is None:
            self.voice_pcm = event.pcm
        else:
            at, index = place
            self.contents[at][index] = tuple(_contents(event))
            self.sound_bytes += 0 if event.pictures else len(event.pcm)

    def to_turn(self, index: int, seed: int) -> tn.Turn:
        """Make the backend's request; the conversation is the model's from then on."""
        ask = self.ask
        slices = ask.max_slice_nums or (VIDEO_SLICES if self.has_video else SLICES_MAX)
        contents, self.contents = self.contents, []
        return tn.Turn(
            index=index,
            messages=tuple(
                tn.Message(role=role, content=tuple(part for known in message for part in known))
                for role, message in zip(self.roles, contents, strict=True)
            ),
            config=ask.config,
            speech=None if ask.speech is None else self._speech(ask.speech),
            max_slice_nums=slices,
            use_image_id=ask.use_image_id,
            omni=ask.omni,
            thinking=ask.thinking,
            tts_template=ask.tts_template,
            seed=seed,
            tools=() if ask.tool_choice == "none" else ask.tools,
        )

    def _speech(self, asked: rq.SpeechRequest) -> tn.SpeechConfig:
        pcm = self.voice_pcm
        if asked.voice_ms_max is not None:
            pcm = pcm[: asked.voice_ms_max * SECOND_BYTES // 1000]
        return tn.SpeechConfig(mode=asked.mode, language=asked.language, voice_pcm=pcm)


def _contents(event: ev.MediaDecoded) -> Iterator[tn.Content]:
    """Lay media out: a picture, a sound, or a video's pictures with the sound of their second."""
    if not event.pictures:
        yield tn.Sound(pcm=event.pcm)
        return
    for second, jpeg in enumerate(event.pictures):
        yield tn.Picture(jpeg=jpeg)
        pcm = event.pcm[second * SECOND_BYTES : (second + 1) * SECOND_BYTES]
        if pcm:
            yield tn.Sound(pcm=pcm)
        if second < len(event.stacked):
            yield tn.Picture(jpeg=event.stacked[second])


class Stage(StrEnum):
    """The progress of a turn."""

    DECODING = "decoding"
    QUEUED = "queued"
    RUNNING = "running"


@attrs.define
class ActiveTurn:
    """The turn in progress.

    Attributes:
        prefill: None until the model reports it.
        pcm: its speech so far, piece by piece, unless streaming has sent it.
        codes: speech codes so far.
        made: what the model was asked, in a session that may outlive its worker.
        pieces: parts of the answer that the model gave.
        repeated: pieces of them that it gives again, since its worker was lost; None: it was not.
    """

    pending: PendingTurn
    index: int
    input_id: str
    response_id: str
    stage: Stage = Stage.DECODING
    prefill: tn.Prefill | None = None
    text: str = ""
    pcm: list[bytes] = attrs.Factory(list)
    tokens: int = 0
    codes: int = 0
    made: tn.Turn | None = None
    pieces: int = 0
    repeated: int | None = None


@attrs.define(eq=False)
class TurnLoop:
    """The turns of a session; `turn` is None between them."""

    step: Step
    timers: Timers
    recording: Recording
    peer: Peer
    slot: Slot
    call: Call
    kind: TurnKind
    turns: int = 0
    turn: ActiveTurn | None = None

    @property
    def counts(self) -> dict[str, int]:
        """Turns asked for."""
        return {"turns": self.turns, "units": 0, "units_dropped": 0, "appends": 0}

    @property
    def units_waiting(self) -> int:
        """None: a turn has no units."""
        return 0

    @property
    def is_busy(self) -> bool:
        """Whether the model works for a turn."""
        turn = self.turn
        return turn is not None and (turn.stage is Stage.RUNNING or turn.repeated is not None)

    # -- in -------------------------------------------------------------------------------------

    def ask(self, ask: rq.Ask) -> None:
        """Begin a turn; none is in progress."""
        self.slot.place = None
        self.timers.cancel("idle")
        self.timers.cancel("init")
        self.turn = ActiveTurn(
            pending=PendingTurn.of(ask, self.step.decode),
            index=self.turns,
            input_id=ask.input_id or self.step.derive("input", self.turns),
            response_id=self.step.derive("resp", self.turns),
        )
        self.turns += 1
        self._queue_if_due()

    @property
    def is_quiet(self) -> bool:
        """Whether the client hears nothing of the queue: a lost answer waits to go on."""
        return self.turn is not None and self.turn.repeated is not None

    @property
    def may_sleep(self) -> bool:
        """Whether it can do without a slot: it has one for a turn only, and the turn goes on."""
        return True

    def sleep(self) -> None:
        """Go on with the turn."""

    def wake(self) -> None:
        """Go on with the turn."""

    def admission_refused(self, code: ErrorCode) -> None:
        """Refuse the session, or end the turn without an answer."""
        turn = self.turn
        if turn is not None and turn.repeated is not None:
            self._give_up(turn)
            return
        self.turn = None
        self.kind.refuse(code, REFUSALS[code])

    def media_decoded(self, event: ev.MediaDecoded) -> None:
        """Take a part of the question."""
        if self.turn is not None and self.turn.pending.awaits(event.media):
            self.turn.pending.decoded(event)
            seconds = self.turn.pending.sound_bytes // SECOND_BYTES
            if seconds > AUDIO_SUM_S_MAX and not self.peer.is_closed:
                most = f"at most {AUDIO_SUM_S_MAX} are allowed"
                self._refuse_content(f"{seconds} seconds of sound in all, {most}")
            self._queue_if_due()

    def media_rejected(self, event: ev.MediaRejected) -> None:
        """End the turn for a damaged part; the client may ask again."""
        turn = self.turn
        if not self.peer.is_closed and turn is not None and turn.pending.awaits(event.media):
            del turn.pending.undecided[event.media]
            self._refuse_content(event.reason)

    def _refuse_content(self, reason: str) -> None:
        self._cancel_decoding()
        self.answer_with(ErrorCode.INVALID_PAYLOAD, f"a content was refused: {reason}")

    def _cancel_decoding(self) -> None:
        for media in () if self.turn is None else self.turn.pending.undecided:
            self.step.do(ef.CancelDecode(media=media))

    def _queue_if_due(self) -> None:
        turn = self.turn
        if self.peer.is_closed or turn is None or turn.stage is not Stage.DECODING:
            return
        if turn.pending.is_complete and self.slot.lease is None and not self.slot.is_waiting:
            turn.stage = Stage.QUEUED
            self.slot.enter_queue("chat", ahead=turn.repeated is not None)

    def slot_leased(self) -> None:
        """Start the turn on its slot."""
        turn, lease = self.turn, self.slot.lease
        assert lease is not None
        if turn is None or turn.stage is not Stage.QUEUED:  # it was lost while the slot came
            self.slot.release()
            return
        self.timers.cancel("rebuild")
        if self.peer.state is State.QUEUED:
            self.peer.send(QueueDone())
        turn.stage = Stage.RUNNING
        self.call.begin(turn.index)
        made = turn.made or turn.pending.to_turn(turn.index, self.step.opened.seed)
        turn.made = made if self.recording.outlives_worker else None
        self.step.do(ef.StartTurn(lease=lease, turn=made))

    def slot_returned(self) -> None:
        """Let the next turn queue: the last one's slot is clean."""
        self._queue_if_due()

    # -- out ------------------------------------------------------------------------------------

    def _running(self, index: int) -> ActiveTurn | None:
        """Return the turn of a model's report; None if it is over, or another."""
        turn = self.turn
        is_it = turn is not None and turn.stage is Stage.RUNNING and turn.index == index
        return turn if is_it and not self.peer.is_closed else None

    def _settled(self, index: int) -> ActiveTurn | None:
        """Settle the call and its slot; returns the turn, as `_running`."""
        if self.call.awaits(Phase.RUNNING, index):
            self.call.settle()
            self.slot.release()
        return self._running(index)

    def turn_prefilled(self, event: ev.TurnPrefilled) -> None:
        """Go on to the answer: the question is in the model."""
        turn = self._running(event.prefill.index)
        if turn is not None and turn.prefill is None:
            turn.prefill = event.prefill
            self.peer.send(Prefilled(input_tokens=event.prefill.input_tokens))

    def turn_progressed(self, event: ev.TurnProgress) -> None:
        """Send a piece of the answer, or keep it until the answer is complete."""
        chunk = event.chunk
        turn = self._running(chunk.index)
        if turn is None:
            return
        if turn.repeated:
            turn.repeated -= 1
            return
        turn.pieces += 1
        turn.text += chunk.text
        turn.tokens += len(chunk.token_ids)
        turn.codes += len(chunk.codec_ids)
        if not turn.pending.ask.streaming:
            turn.pcm.append(chunk.pcm)
        elif chunk.text or chunk.pcm:
            self._send_piece(turn, chunk.text, chunk.pcm)

    def turn_done(self, event: ev.TurnDone) -> None:
        """Send the end of the answer, and release the slot."""
        result = event.result
        turn = self._settled(result.index)
        if turn is None:
            return
        turn.tokens = result.generated_tokens
        turn.codes += len(result.codec_ids)
        turn.text = result.text
        if not turn.pending.ask.streaming:
            turn.pcm.append(result.pcm)
        elif result.pcm:
            self._send_piece(turn, "", result.pcm)
        self.peer.send(self._response(turn, result.reason, result))
        self._over()

    def _send_piece(self, turn: ActiveTurn, text: str, pcm: bytes) -> None:
        self.peer.send(
            Delta(
                session_id=self.peer.session_id,
                response_id=turn.response_id,
                input_id=turn.input_id,
                text=text,
                pcm=pcm,
            )
        )

    def turn_failed(self, event: ev.TurnFailed) -> None:
        """End a turn that failed."""
        self.failed(event.index, context_full=event.context_full, refused=event.refused)

    def failed(self, index: int, *, context_full: bool = False, refused: str = "") -> None:
        """End a turn without an answer, or without the rest; the chat goes on."""
        if self._settled(index) is None:
            return
        if context_full:
            refused = "the conversation does not fit the model's context"
        if refused:
            self.answer_with(ErrorCode.INVALID_PAYLOAD, refused)
        else:
            self.kind.model_failed(index)

    def backend_lost(self) -> None:
        """Have the turn answered on another slot, once, or end it: the backend is lost.

        What was sent is not sent again: the model gives the same pieces with the same seed.
        """
        turn = None if self.call.is_idle else self._running(self.call.index)
        may_repeat = self.step.limits.can_repeat or (turn is not None and not turn.pieces)
        if turn is None or turn.made is None or turn.repeated is not None or not may_repeat:
            if not self.call.is_idle:
                self.failed(self.call.index)
            return
        turn.repeated, turn.stage = turn.pieces, Stage.DECODING
        self.call.settle()
        self.timers.set("rebuild", self.step.limits.rebuild_wait_s)
        self.slot.release()

    def rebuild_timed_out(self) -> None:
        """End a turn that waited too long for another slot, or the session."""
        if self.turn is not None:
            self._give_up(self.turn)
        else:
            self.kind.end("timeout")

    def _give_up(self, turn: ActiveTurn) -> None:
        """End a turn whose model is lost, and that finds no other."""
        if self.slot.is_waiting:
            self.step.do(ef.LeaveQueue())
        self.timers.cancel("rebuild")
        self.kind.model_failed(turn.index)

    def cancel(self) -> None:
        """End the turn with the answer so far; its slot is returned when the model confirms it."""
        turn = self.turn
        assert turn is not None
        self._cancel_decoding()
        if self.slot.is_waiting and (turn.stage is Stage.QUEUED or turn.repeated is not None):
            self.step.do(ef.LeaveQueue())
        if turn.stage is Stage.RUNNING:
            self.step.do(ef.CutTurn(index=turn.index))
        self.timers.cancel("rebuild")
        self.finish()
        self.kind.turn_over()

    def cut(self) -> ef.CutTurn | None:
        """Cut the answer in progress."""
        return None if self.call.is_idle else ef.CutTurn(index=self.call.index)

    def finish(self) -> None:
        """Send the answer so far: the session ends during a turn."""
        turn, self.turn = self.turn, None
        if turn is not None:
            self.peer.send(self._response(turn, "interrupted", None))

    def answer_with(self, code: ErrorCode, text: str) -> None:
        """End the turn with an error."""
        self.kind.send_error(code, text)
        self._over()

    def _over(self) -> None:
        self.turn = None
        self.kind.turn_over()

    def _response(
        self, turn: ActiveTurn, reason: tn.StopReason, result: tn.TurnResult | None
    ) -> Response:
        return Response(
            session_id=self.peer.session_id,
            response_id=turn.response_id,
            input_id=turn.input_id,
            text=turn.text,
            pcm=b"".join(turn.pcm),
            reason=reason,
            streaming=turn.pending.ask.streaming,
            input_tokens=0 if turn.prefill is None else turn.prefill.input_tokens,
            generated_tokens=turn.tokens,
            recording_id=self.recording.id,
            metrics=self._metrics(turn, result),
            tool_calls=() if result is None else self._named(turn, result.calls),
        )

    def _named(self, turn: ActiveTurn, calls: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
        """Give the calls of an answer their ids, which no other turn has."""
        first = turn.index * CALLS_MAX
        return tuple(
            attrs.evolve(call, id=self.step.derive("call", first + place))
            for place, call in enumerate(calls)
        )

    def _metrics(self, turn: ActiveTurn, result: tn.TurnResult | None) -> Metrics:
        prefill_us = 0 if turn.prefill is None else turn.prefill.cost_us
        recording = self.recording.state
        if result is None:
            return Metrics(kv_cache_length=0, prefill_ms=prefill_us / 1000, recording=recording)
        costs = result.costs
        return Metrics(
            kv_cache_length=result.kv_length,
            prefill_ms=prefill_us / 1000,
            generate_ms=costs.generate_us / 1000,
            wall_clock_ms=(prefill_us + costs.wall_us) / 1000,
            cost_llm_ms=costs.llm_us / 1000,
            cost_tts_ms=costs.tts_us / 1000,
            cost_token2wav_ms=costs.token2wav_us / 1000,
            n_tokens=result.generated_tokens,
            n_tts_tokens=turn.codes,
            recording=recording,
        )


_HANDLERS: Final[Handlers] = {
    rq.Ask: attrgetter("ask"),
    ev.MediaDecoded: attrgetter("loop.media_decoded"),
    ev.MediaRejected: attrgetter("loop.media_rejected"),
    ev.TurnPrefilled: attrgetter("loop.turn_prefilled"),
    ev.TurnProgress: attrgetter("loop.turn_progressed"),
    ev.TurnDone: attrgetter("loop.turn_done"),
    ev.TurnFailed: attrgetter("loop.turn_failed"),
}


@attrs.define(eq=False)
class TurnKind(Kind):
    """A kind of session by turns."""

    loop: TurnLoop = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        parts = self.step, self.timers, self.recording, self.peer, self.slot
        self.loop = self.slot_user = TurnLoop(*parts, self.slot.call, self)

    def begin(self) -> None:
        """Ask for room; each turn waits for its own slot."""
        self.step.do(ef.Admit())

    @property
    def gate(self) -> Gate:
        """The gate that judges the client's messages."""
        return super().gate if self.loop.turn is None else Gate.TURN

    def ask(self, ask: rq.Ask) -> None:
        """Begin a turn; none is in progress."""
        self.loop.ask(ask)

    def model_failed(self, index: int) -> None:
        """Tell the client that the model failed at the turn."""
        raise NotImplementedError

    def turn_over(self) -> None:
        """Go on after the turn."""
        raise NotImplementedError


@attrs.define(eq=False)
class Chat(TurnKind):
    """A chat of many turns (001).

    `instructions` is the system message of turns that have none; it may be empty.
    """

    session_kind = SessionKind.CHAT
    handlers: ClassVar[Handlers] = {
        **_HANDLERS,
        rq.Init: attrgetter("init"),
        CancelResponse: attrgetter("cancel"),
    }

    instructions: str = ""

    def admitted(self) -> None:
        """Wait for the client's init."""
        self.first_slot()

    def init(self, init: rq.Init) -> None:
        """Take the system message of turns that have none."""
        self.timers.cancel("init")
        self.instructions = init.instructions
        self.timers.set("idle", self.step.limits.idle_s)
        self.peer.send_created(prompt_length=0, is_chat=True)

    def ask(self, ask: rq.Ask) -> None:
        """Begin a turn; none is in progress."""
        if self.instructions and ask.messages[0].role != "system":
            prompt = rq.ChatMessage(role="system", content=(rq.TextPart(text=self.instructions),))
            ask = attrs.evolve(ask, messages=(prompt, *ask.messages))
        super().ask(ask)

    def cancel(self, message: CancelResponse) -> None:
        """End the answer; one that has ended meanwhile is not missed."""
        turn = self.loop.turn
        if turn is not None and message.response_id in (None, turn.response_id):
            self.loop.cancel()

    def model_failed(self, index: int) -> None:
        """Tell the client that the model failed at the turn."""
        self.loop.answer_with(ErrorCode.INFERENCE_ERROR, f"turn {index} failed")

    def turn_over(self) -> None:
        """Wait for the next turn."""
        if self.is_draining:
            self.end("server_shutdown")
        elif not self.peer.is_closed:
            self.timers.set("idle", self.step.limits.idle_s)

    def finish(self, _reason: EndReason) -> None:
        """Send the answer so far: the session ends during a turn."""
        if self.peer.is_active:
            self.loop.finish()


@attrs.define(eq=False)
class SingleRequest(TurnKind):
    """One turn a connection (004)."""

    session_kind = SessionKind.REQUEST
    has_opening = False
    closed_in = frozenset()
    handlers: ClassVar[Handlers] = {**_HANDLERS, ev.AnswerCancelled: attrgetter("cancelled")}

    def admitted(self) -> None:
        """Wait for the request, for a limited time."""
        self.timers.set("init", self.step.limits.init_wait_s)

    def frame_refused(self, error: FrameError, _code: ErrorCode) -> None:
        """Answer an unreadable frame like any other mistake."""
        self.peer.send_error(ErrorCode.INVALID_PAYLOAD, error.reason)
        is_too_big = error.close_code == CLOSE_TOO_BIG
        self.end("rejected", close_code=CLOSE_TOO_BIG if is_too_big else None)

    def send_error(self, code: ErrorCode, message: str) -> None:
        """Send an `error`, and close."""
        self.peer.send_error(code, message)
        self.end("rejected")

    def model_failed(self, index: int) -> None:
        """End the session: the model failed at the turn."""
        self.give_up(f"turn {index} failed")

    def turn_over(self) -> None:
        """End the session: its turn is answered."""
        self.end("answered")

    def cancelled(self, _event: ev.AnswerCancelled) -> None:
        """End the session with the answer so far, or without one before it began."""
        if self.peer.is_active:
            self.loop.finish()
            self.end("answered")
        else:
            self.end("cancelled")

    def give_up(self, _text: str) -> None:
        """End the session: the model does not answer."""
        self.refuse(ErrorCode.INFERENCE_ERROR, "the turn failed", close_code=CLOSE_INTERNAL_ERROR)

    def shut_down(self) -> None:
        """End the session: the server shuts down."""
        self.refuse(ErrorCode.SERVICE_UNAVAILABLE, "the server shuts down")
