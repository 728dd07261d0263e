"""The conversation by turns: a question, its media decoded, a slot leased, an answer.

asked -> decoded -> queued -> running -> answered

A turn holds a slot from prefill to its end; between turns a chat has no slot. At most one turn is
in progress. Its answer is sent in pieces (streaming) or at once, and always ends: with a
`Response`, an error, or the session.
"""

from __future__ import annotations

from enum import StrEnum

import attrs

from ..values import effects as ef
from ..values import events as ev
from ..values.digest import derive_id
from ..values.errors import ErrorCode
from ..values.messages import Delta, Metrics, Prefilled, QueueDone, Response
from ..values.requests import Ask, ChatMessage, Init, TextPart
from ..values.state import Course, Gate, State
from ..values.tools import CALLS_MAX, ToolCall
from ..values.turn import Prefill, StopReason, Turn, TurnResult
from .pending_turn import PendingTurn
from .resuming import Resuming
from .unit_loop import Phase


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
    prefill: Prefill | None = None
    text: str = ""
    pcm: list[bytes] = attrs.Factory(list)
    tokens: int = 0
    codes: int = 0
    made: Turn | None = None
    pieces: int = 0
    repeated: int | None = None


@attrs.define(kw_only=True, eq=False)
class Chat(Resuming):
    """A chat's state between events; `turn` is None between turns.

    `instructions` is the system message of turns that have none; it may be empty.
    """

    course = Course.CHAT

    turns: int = 0
    turn: ActiveTurn | None = None
    instructions: str = ""

    def begin(self) -> None:
        """Ask for room; each turn waits for its own slot."""
        self.do(ef.Admit())

    def admitted(self) -> None:
        """Wait for the client's init."""
        self.queue_done()

    def admission_refused(self, code: ErrorCode) -> None:
        """Refuse the session, or end the turn without an answer."""
        turn = self.turn
        if turn is not None and turn.repeated is not None:
            self._lost(turn)
            return
        self.turn = None
        super().admission_refused(code)

    @property
    def gate(self) -> Gate:
        """The gate that judges the client's messages."""
        return super().gate if self.turn is None else Gate.TURN

    @property
    def counts(self) -> dict[str, int]:
        """Turns asked for."""
        return {"turns": self.turns, **super().counts}

    @property
    def may_sleep(self) -> bool:
        """Whether it can do without a slot: it has one for a turn only, and the turn goes on."""
        return True

    def init(self, init: Init) -> None:
        """Take the system message of turns that have none."""
        self.cancel_timer("init")
        self.instructions = init.instructions
        self.set_timer("idle", self.opened.limits.idle_s)
        self.create(is_chat=True)

    # -- in -------------------------------------------------------------------------------------

    def ask(self, ask: Ask) -> None:
        """Begin a turn; none is in progress."""
        recording_id = self.opened.recording_id
        self.place = None
        self.cancel_timer("idle")
        self.cancel_timer("init")
        self.turn = ActiveTurn(
            pending=PendingTurn.of(self._instructed(ask), self.decode),
            index=self.turns,
            input_id=ask.input_id or derive_id("input", recording_id, self.turns),
            response_id=derive_id("resp", recording_id, self.turns),
        )
        self.turns += 1
        self._queue_if_due()

    def _instructed(self, ask: Ask) -> Ask:
        if not self.instructions or ask.messages[0].role == "system":
            return ask
        prompt = ChatMessage(role="system", content=(TextPart(text=self.instructions),))
        return attrs.evolve(ask, messages=(prompt, *ask.messages))

    @property
    def is_busy(self) -> bool:
        """Whether the model works for a turn."""
        turn = self.turn
        return turn is not None and (turn.stage is Stage.RUNNING or turn.repeated is not None)

    @property
    def hears_queue(self) -> bool:
        """Whether the client hears of the queue: not while a lost answer waits to go on."""
        return self.turn is None or self.turn.repeated is None

    def media_decoded(self, event: ev.MediaDecoded) -> None:
        """Take a part of the question."""
        if self.turn is not None and self.turn.pending.awaits(event.media):
            self.turn.pending.decoded(event)
            self._queue_if_due()

    def media_rejected(self, event: ev.MediaRejected) -> None:
        """End the turn for a damaged part; the client may ask again."""
        if self.is_closed or self.turn is None or not self.turn.pending.awaits(event.media):
            return
        for other in self.turn.pending.undecided:
            if other != event.media:
                self.do(ef.CancelDecode(media=other))
        self._answer_with(ErrorCode.INVALID_PAYLOAD, f"a content was refused: {event.reason}")

    def _queue_if_due(self) -> None:
        turn = self.turn
        if self.is_closed or turn is None or turn.stage is not Stage.DECODING:
            return
        if turn.pending.is_complete and self.lease is None and not self.waits_for_slot:
            turn.stage = Stage.QUEUED
            self.waits_for_slot = True
            self.do(ef.EnterQueue(mode="chat", ahead=turn.repeated is not None))

    def slot_leased(self) -> None:
        """Start the turn on its slot."""
        turn, lease = self.turn, self.lease
        assert lease is not None
        if turn is None or turn.stage is not Stage.QUEUED:  # it was lost while the slot came
            self.release()
            return
        self.cancel_timer("rebuild")
        if self.state is State.QUEUED:
            self.say(QueueDone())
        turn.stage = Stage.RUNNING
        self.call.begin(turn.index)
        made = turn.made or turn.pending.to_turn(turn.index, self.opened.seed)
        turn.made = made if self.outlives_worker else None
        self.do(ef.StartTurn(lease=lease, turn=made))

    def slot_returned(self) -> None:
        """Let the next turn queue: the last one's slot is clean."""
        self._queue_if_due()

    # -- out ------------------------------------------------------------------------------------

    def _running(self, index: int) -> ActiveTurn | None:
        """Return the turn of a model's report; None if it is over, or another."""
        turn = self.turn
        is_it = turn is not None and turn.stage is Stage.RUNNING and turn.index == index
        return turn if is_it and not self.is_closed else None

    def _settled(self, index: int) -> ActiveTurn | None:
        """Settle the call and its slot; returns the turn, as `_running`."""
        if self.call.awaits(Phase.RUNNING, index):
            self.call.settle()
            self.release()
        return self._running(index)

    def turn_prefilled(self, event: ev.TurnPrefilled) -> None:
        """Go on to the answer: the question is in the model."""
        turn = self._running(event.prefill.index)
        if turn is not None and turn.prefill is None:
            turn.prefill = event.prefill
            self.say(Prefilled(input_tokens=event.prefill.input_tokens))

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
            self._say_piece(turn, chunk.text, chunk.pcm)

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
            self._say_piece(turn, "", result.pcm)
        self.say(self._response(turn, result.reason, result))
        self._go_on()

    def _say_piece(self, turn: ActiveTurn, text: str, pcm: bytes) -> None:
        self.say(
            Delta(
                session_id=self.session_id,
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
            self._answer_with(ErrorCode.INVALID_PAYLOAD, refused)
        else:
            self.model_failed(index)

    def model_failed(self, index: int) -> None:
        """Tell the client that the model failed at the turn."""
        self._answer_with(ErrorCode.INFERENCE_ERROR, f"turn {index} failed")

    def backend_lost(self) -> None:
        """Have the turn answered on another slot, once, or end it: the backend is lost.

        What was sent is not sent again: the model gives the same pieces with the same seed.
        """
        turn = None if self.call.is_idle else self._running(self.call.index)
        may_repeat = self.opened.limits.can_repeat or (turn is not None and not turn.pieces)
        if turn is None or turn.made is None or turn.repeated is not None or not may_repeat:
            if not self.call.is_idle:
                self.failed(self.call.index)
            return
        turn.repeated, turn.stage = turn.pieces, Stage.DECODING
        self.call.settle()
        self.set_timer("rebuild", self.opened.limits.rebuild_wait_s)
        self.release()

    def timed_out(self, name: ev.TimerName) -> None:
        """Handle a timer that bounds the session, or a turn's wait for another slot."""
        if name == "rebuild" and self.turn is not None:
            self._lost(self.turn)
        else:
            super().timed_out(name)

    def _lost(self, turn: ActiveTurn) -> None:
        """End a turn whose model is lost, and that finds no other."""
        if self.waits_for_slot:
            self.do(ef.LeaveQueue())
        self.cancel_timer("rebuild")
        self.model_failed(turn.index)

    def cut(self) -> ef.CutTurn | None:
        """Cut the answer in progress."""
        return None if self.call.is_idle else ef.CutTurn(index=self.call.index)

    def farewell(self) -> None:
        """Send the answer so far: the session ends during a turn."""
        turn, self.turn = self.turn, None
        if turn is not None:
            self.say(self._response(turn, "interrupted", None))

    def _answer_with(self, code: ErrorCode, text: str) -> None:
        self.complain(code, text)
        self._go_on()

    def _go_on(self) -> None:
        self.turn = None
        if self.is_draining:
            self.end("server_shutdown")
        elif not self.is_closed:
            self.set_timer("idle", self.opened.limits.idle_s)

    def _response(
        self, turn: ActiveTurn, reason: StopReason, result: TurnResult | None
    ) -> Response:
        return Response(
            session_id=self.session_id,
            response_id=turn.response_id,
            input_id=turn.input_id,
            text=turn.text,
            pcm=b"".join(turn.pcm),
            reason=reason,
            streaming=turn.pending.ask.streaming,
            input_tokens=0 if turn.prefill is None else turn.prefill.input_tokens,
            generated_tokens=turn.tokens,
            recording_id=self.recording_id,
            metrics=self._metrics(turn, result),
            tool_calls=() if result is None else self._named(turn, result.calls),
        )

    def _named(self, turn: ActiveTurn, calls: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
        """Give the calls of an answer their ids, which no other turn has."""
        first = turn.index * CALLS_MAX
        return tuple(
            attrs.evolve(call, id=derive_id("call", self.opened.recording_id, first + place))
            for place, call in enumerate(calls)
        )

    def _metrics(self, turn: ActiveTurn, result: TurnResult | None) -> Metrics:
        prefill_us = 0 if turn.prefill is None else turn.prefill.cost_us
        recording = self.recording
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
