"""The conversation by turns: a question in, its media decoded, a slot waited for, an answer out.

asked -> decoded -> queued -> running -> answered

A turn holds a slot only from prefill to its end; between turns a chat holds none. At most one turn
is in progress. Its answer is sent as it is made (streaming) or at once, and always ends: with a
`Response`, with an error, or with the session (`break_off`).

A connection that carries a single request (004) is a chat of one turn, which needs no init: it
closes with its answer or its first error.
"""

from __future__ import annotations

from enum import StrEnum

import attrs

from ..values import effects as ef
from ..values import events as ev
from ..values.behaviour import LAST_PIECE
from ..values.digest import derive_id
from ..values.errors import CLOSE_INTERNAL_ERROR, CLOSE_TOO_BIG, ErrorCode, FrameError
from ..values.messages import Delta, ErrorReport, Metrics, Prefilled, QueueDone, Response
from ..values.requests import Ask, ChatMessage, Init, TextPart
from ..values.state import Course, Gate, State
from ..values.turn import Prefill, StopReason, TurnResult
from .core import Core
from .pending_turn import PendingTurn
from .unit_loop import Phase


class Stage(StrEnum):
    """How far a turn is."""

    DECODING = "decoding"
    QUEUED = "queued"
    RUNNING = "running"


@attrs.define
class ActiveTurn:
    """The turn under way.

    Attributes:
        pending: what was asked, and its media.
        index: which turn of the session it is, from 0.
        input_id: what asked for it.
        response_id: its answer.
        stage: how far it is.
        prefill: what prefill told; None before.
        text: the answer so far.
        pcm: its speech so far, piece by piece, where it is told at once; else it has been sent.
        tokens: tokens generated so far.
        codes: speech codes so far.
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


@attrs.define(kw_only=True, eq=False)
class Chat(Core):
    """What a chat remembers between events.

    Attributes:
        turns: turns asked for so far.
        turn: the one under way; None between turns.
        instructions: the system message of turns that bring none; empty where there is none.
    """

    course = Course.CHAT

    turns: int = 0
    turn: ActiveTurn | None = None
    instructions: str = ""

    def begin(self) -> None:
        """Ask for room; a slot is waited for with each turn."""
        self.do(ef.Admit())

    def admitted(self) -> None:
        """The client may say how it wants the session."""
        self.queue_done()

    def admission_refused(self, code: ErrorCode) -> None:
        """There is no room, or no slot for the turn: it is over without an answer."""
        self.turn = None
        super().admission_refused(code)

    @property
    def gate(self) -> Gate:
        """What the client's messages are judged by."""
        return super().gate if self.turn is None else Gate.TURN

    @property
    def counts(self) -> dict[str, int]:
        """Turns asked for."""
        return {"turns": self.turns, **super().counts}

    def init(self, init: Init) -> None:
        """Take the system message of turns that bring none."""
        self.cancel_timer("init")
        self.instructions = init.instructions
        self.set_timer("idle", self.opened.limits.idle_s)
        self.create(is_chat=True)

    # -- in -------------------------------------------------------------------------------------

    def ask(self, ask: Ask) -> None:
        """Take a question; there is no turn under way."""
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
        """Put the session's system message before a conversation that has none."""
        if not self.instructions or ask.messages[0].role == "system":
            return ask
        prompt = ChatMessage(role="system", content=(TextPart(text=self.instructions),))
        return attrs.evolve(ask, messages=(prompt, *ask.messages))

    @property
    def is_busy(self) -> bool:
        """The model is at work for a turn."""
        return self.turn is not None and self.turn.stage is Stage.RUNNING

    def media_decoded(self, event: ev.MediaDecoded) -> None:
        """Take a part of the question in."""
        if self.turn is not None and self.turn.pending.awaits(event.media):
            self.turn.pending.decoded(event)
            self._queue_if_due()

    def media_rejected(self, event: ev.MediaRejected) -> None:
        """A part of the question is damaged: the turn is over, and the client may ask again."""
        if self.is_closed or self.turn is None or not self.turn.pending.awaits(event.media):
            return
        for other in self.turn.pending.undecided:
            if other != event.media:
                self.do(ef.CancelDecode(media=other))
        self._answer_with(ErrorCode.INVALID_PAYLOAD, f"a content was refused: {event.reason}")

    def _queue_if_due(self) -> None:
        """Ask for a slot once the question is whole and the last turn's slot is back."""
        turn = self.turn
        if self.is_closed or turn is None or turn.stage is not Stage.DECODING:
            return
        if turn.pending.is_complete and self.lease is None and not self.waits_for_slot:
            turn.stage = Stage.QUEUED
            self.waits_for_slot = True
            self.do(ef.EnterQueue(mode="chat"))

    def slot_leased(self) -> None:
        """Start the turn on its slot."""
        turn, lease = self.turn, self.lease
        assert turn is not None, "a turn waits until it has a slot, or the session ends"
        assert turn.stage is Stage.QUEUED
        assert lease is not None
        if self.state is State.QUEUED:
            self.say(QueueDone())
        turn.stage = Stage.RUNNING
        self.call.begin(turn.index)
        self.do(ef.StartTurn(lease=lease, turn=turn.pending.to_turn(turn.index, self.opened.seed)))

    def slot_returned(self) -> None:
        """The last turn's slot is clean: the next may wait for one."""
        self._queue_if_due()

    # -- out ------------------------------------------------------------------------------------

    def _running(self, index: int) -> ActiveTurn | None:
        """The turn that the model reports; None if it is over, or another turn."""
        turn = self.turn
        is_it = turn is not None and turn.stage is Stage.RUNNING and turn.index == index
        return turn if is_it and not self.is_closed else None

    def _settled(self, index: int) -> ActiveTurn | None:
        """The call is over: the slot goes back; gives the turn, as `_running`."""
        if self.call.awaits(Phase.RUNNING, index):
            self.call.settle()
            self.release()
        return self._running(index)

    def turn_prefilled(self, event: ev.TurnPrefilled) -> None:
        """The question is in the model."""
        turn = self._running(event.prefill.index)
        if turn is not None:
            turn.prefill = event.prefill
            self.say(Prefilled(input_tokens=event.prefill.input_tokens))

    def turn_progressed(self, event: ev.TurnProgress) -> None:
        """Tell a piece of the answer, or keep it until all of it is there."""
        chunk = event.chunk
        turn = self._running(chunk.index)
        if turn is None:
            return
        turn.text += chunk.text
        turn.tokens += len(chunk.token_ids)
        turn.codes += len(chunk.codec_ids)
        if not turn.pending.ask.streaming:
            turn.pcm.append(chunk.pcm)
        elif chunk.text or chunk.pcm:
            self._say_piece(turn, chunk.text, chunk.pcm)

    def turn_done(self, event: ev.TurnDone) -> None:
        """Tell the end of the answer, and give the slot back."""
        result = event.result
        turn = self._settled(result.index)
        if turn is None:
            return
        turn.tokens = result.generated_tokens
        turn.codes += len(result.codec_ids)
        turn.text = result.text
        if not (turn.pending.ask.streaming and self.behaves(LAST_PIECE)):
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
        """There is no answer, or no further part."""
        self.failed(event.index, context_full=event.context_full, refused=event.refused)

    def failed(self, index: int, *, context_full: bool = False, refused: str = "") -> None:
        """There is no answer, or no further part: the turn ends, the chat goes on."""
        if self._settled(index) is None:
            return
        if context_full:
            refused = "the conversation does not fit the model's context"
        if refused:
            self._answer_with(ErrorCode.INVALID_PAYLOAD, refused)
        else:
            self.model_failed(index)

    def model_failed(self, index: int) -> None:
        """The model failed at the turn."""
        self._answer_with(ErrorCode.INFERENCE_ERROR, f"turn {index} failed")

    def backend_lost(self) -> None:
        """The model is gone, and the turn with it."""
        if not self.call.is_idle:
            self.failed(self.call.index)

    def cut(self) -> ef.CutTurn | None:
        """Cut the answer under way."""
        return None if self.call.is_idle else ef.CutTurn(index=self.call.index)

    def farewell(self) -> None:
        """The session ends during a turn: send the answer so far."""
        turn, self.turn = self.turn, None
        if turn is not None:
            self.say(self._response(turn, "interrupted", None))

    def _answer_with(self, code: ErrorCode, text: str) -> None:
        self.complain(code, text)
        self._go_on()

    def _go_on(self) -> None:
        """The turn is over: wait for the next."""
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


@attrs.define(kw_only=True, eq=False)
class SingleRequest(Chat):
    """One turn a connection (004)."""

    course = Course.REQUEST
    has_opening = False
    goodbye_in = frozenset()

    def admitted(self) -> None:
        """The client has so long to ask."""
        self.set_timer("init", self.opened.limits.init_wait_s)

    def frame_refused(self, error: FrameError, _code: ErrorCode) -> None:
        """Answer a frame that is beyond repair, as any mistake."""
        self.say(ErrorReport(code=ErrorCode.INVALID_PAYLOAD, message=error.reason))
        is_too_big = error.close_code == CLOSE_TOO_BIG
        self.end("rejected", close_code=CLOSE_TOO_BIG if is_too_big else None)

    def complain(self, code: ErrorCode, message: str) -> None:
        """Send an `error`, and close."""
        super().complain(code, message)
        self.end("rejected")

    def model_failed(self, index: int) -> None:
        """The model failed at the turn."""
        self.give_up(f"turn {index} failed")

    def give_up(self, _text: str) -> None:
        """The model does not answer any more."""
        self.refuse(ErrorCode.INFERENCE_ERROR, "the turn failed", close_code=CLOSE_INTERNAL_ERROR)

    def shut_down(self) -> None:
        """The server goes away."""
        self.refuse(ErrorCode.SERVICE_UNAVAILABLE, "the server shuts down")

    def _go_on(self) -> None:
        """The turn is over, and the connection with it."""
        self.turn = None
        self.end("answered")
