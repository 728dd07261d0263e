"""The conversation by turns: a question in, its media decoded, a slot waited for, an answer out.

asked -> decoded -> queued -> running -> answered

A turn holds a slot from prefill to its end alone; between turns a chat holds none. At most one turn
is under way. Its answer is told as it is made (streaming) or at once, and always ends: with a
`Response`, with an error, or with the session (`break_off`).

A connection that carries a single request (004) is the same, but for its end: it closes with its
answer or its first error.
"""

from __future__ import annotations

from enum import StrEnum

import attrs

from . import effects as ef
from . import events as ev
from .behaviour import LAST_PIECE
from .core import Core
from .digest import derive_id
from .errors import CLOSE_INTERNAL_ERROR, ErrorCode
from .messages import Delta, Metrics, Prefilled, QueueDone, Response
from .pending_turn import PendingTurn
from .requests import Ask, ChatMessage, TextPart
from .state import Course, State
from .turn import Prefill, StopReason, TurnChunk, TurnResult


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


@attrs.define
class Chat:
    """What a chat remembers between events.

    Attributes:
        core: the session's state and voice.
        media: the number of the next thing to be decoded.
        turns: turns asked for so far.
        turn: the one under way; None between turns.
        instructions: the system message of turns that bring none; empty where there is none.
    """

    core: Core = attrs.field(eq=False)
    media: int = 0
    turns: int = 0
    turn: ActiveTurn | None = None
    instructions: str = ""

    # -- in -------------------------------------------------------------------------------------

    def ask(self, ask: Ask) -> None:
        """Take a question; there is no turn under way."""
        core, recording_id = self.core, self.core.opened.recording_id
        core.fields_ignored += len(ask.ignored)
        if not ask.record:
            core.forget_recording()
        core.cancel_timer("idle")
        core.cancel_timer("init")
        pending, decodes = PendingTurn.of(self._instructed(ask), self.media)
        self.media += len(decodes)
        self.turn = ActiveTurn(
            pending=pending,
            index=self.turns,
            input_id=ask.input_id or derive_id("input", recording_id, self.turns),
            response_id=derive_id("resp", recording_id, self.turns),
        )
        self.turns += 1
        for decode in decodes:
            core.do(decode)
        self._queue_if_due()

    def _instructed(self, ask: Ask) -> Ask:
        """Put the session's system message before a conversation that has none."""
        if not self.instructions or ask.messages[0].role == "system":
            return ask
        prompt = ChatMessage(role="system", content=(TextPart(text=self.instructions),))
        return attrs.evolve(ask, messages=(prompt, *ask.messages))

    @property
    def is_answering(self) -> bool:
        """The model is at work for a turn."""
        return self.turn is not None and self.turn.stage is Stage.RUNNING

    def awaits(self, media: int) -> bool:
        """Whether `media` belongs to the turn under way."""
        return self.turn is not None and self.turn.pending.awaits(media)

    def media_decoded(self, event: ev.MediaDecoded) -> None:
        """Take a part of the question in."""
        assert self.turn is not None
        self.turn.pending.decoded(event)
        self._queue_if_due()

    def media_rejected(self, media: int, reason: str) -> None:
        """A part of the question is damaged: the turn is over, and the client may ask again."""
        if self.core.is_closed or self.turn is None:
            return
        for other in self.turn.pending.undecided:
            if other != media:
                self.core.do(ef.CancelDecode(media=other))
        self._give_up(ErrorCode.INVALID_PAYLOAD, f"a content was refused: {reason}")

    def _queue_if_due(self) -> None:
        """Ask for a slot once the question is whole and the last turn's slot is back."""
        core, turn = self.core, self.turn
        if core.is_closed or turn is None or turn.stage is not Stage.DECODING:
            return
        if turn.pending.is_complete and core.lease is None and not core.waits_for_slot:
            turn.stage = Stage.QUEUED
            core.waits_for_slot = True
            core.do(ef.EnterQueue(mode="chat"))

    def slot_leased(self, lease: int) -> None:
        """Start the turn on its slot."""
        core, turn = self.core, self.turn
        assert turn is not None, "a turn waits until it has a slot, or the session ends"
        assert turn.stage is Stage.QUEUED
        if core.state is State.QUEUED:
            core.say(QueueDone())
        turn.stage = Stage.RUNNING
        core.running_turn = turn.index
        core.do(ef.StartTurn(lease=lease, turn=turn.pending.to_turn(turn.index, core.opened.seed)))

    def slot_returned(self) -> None:
        """The last turn's slot is clean: the next may wait for one."""
        self._queue_if_due()

    # -- out ------------------------------------------------------------------------------------

    def _running(self, index: int) -> ActiveTurn | None:
        """The turn that the model tells of; None where it is over, or another's."""
        turn = self.turn
        is_it = turn is not None and turn.stage is Stage.RUNNING and turn.index == index
        return turn if is_it and not self.core.is_closed else None

    def prefilled(self, prefill: Prefill) -> None:
        """The question is in the model."""
        turn = self._running(prefill.index)
        if turn is not None:
            turn.prefill = prefill
            self.core.say(Prefilled(input_tokens=prefill.input_tokens))

    def progressed(self, chunk: TurnChunk) -> None:
        """Tell a piece of the answer, or keep it until all of it is there."""
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

    def done(self, result: TurnResult) -> None:
        """Tell the end of the answer, and give the slot back."""
        core, turn = self.core, self._running(result.index)
        if core.running_turn == result.index:
            core.running_turn = None
            core.release()
        if turn is None:
            return
        turn.tokens = result.generated_tokens
        turn.codes += len(result.codec_ids)
        turn.text = result.text
        if not (turn.pending.ask.streaming and core.behaves(LAST_PIECE)):
            turn.pcm.append(result.pcm)
        elif result.pcm:
            self._say_piece(turn, "", result.pcm)
        core.say(self._response(turn, result.reason, result))
        self._go_on()

    def _say_piece(self, turn: ActiveTurn, text: str, pcm: bytes) -> None:
        self.core.say(
            Delta(
                session_id=self.core.session_id,
                response_id=turn.response_id,
                input_id=turn.input_id,
                text=text,
                pcm=pcm,
            )
        )

    def failed(self, index: int, *, context_full: bool, refused: str = "") -> None:
        """There is no answer, or no more of it: the turn ends, the chat goes on."""
        core, turn = self.core, self._running(index)
        if core.running_turn == index:
            core.running_turn = None
            core.release()
        if turn is None:
            return
        if context_full:
            text = "the conversation does not fit the model's context"
            self._give_up(ErrorCode.INVALID_PAYLOAD, text)
        elif refused:
            self._give_up(ErrorCode.INVALID_PAYLOAD, refused)
        elif core.course is Course.REQUEST:
            core.refuse(
                ErrorCode.INFERENCE_ERROR, "the turn failed", close_code=CLOSE_INTERNAL_ERROR
            )
        else:
            self._give_up(ErrorCode.INFERENCE_ERROR, f"turn {index} failed")

    def backend_lost(self) -> None:
        """The model is gone, and the turn with it."""
        if self.core.running_turn is not None:
            self.failed(self.core.running_turn, context_full=False)

    def refused(self) -> None:
        """There is no slot for the turn, nor a place in the queue: it is over without an answer."""
        self.turn = None

    def break_off(self) -> None:
        """The session ends amid a turn: tell what there is of its answer."""
        turn, self.turn = self.turn, None
        if turn is not None:
            self.core.say(self._response(turn, "interrupted", None))

    def _give_up(self, code: ErrorCode, text: str) -> None:
        self.core.complain(code, text)
        self._go_on(answered=False)

    def _go_on(self, *, answered: bool = True) -> None:
        """The turn is over: wait for the next, or end where there can be none."""
        self.turn = None
        if self.core.course is Course.REQUEST:
            self.core.end("answered" if answered else "rejected")
        elif self.core.is_draining:
            self.core.end("server_shutdown")
        elif not self.core.is_closed:
            self.core.set_timer("idle", self.core.opened.limits.idle_s)

    def _response(
        self, turn: ActiveTurn, reason: StopReason, result: TurnResult | None
    ) -> Response:
        core, streaming = self.core, turn.pending.ask.streaming
        return Response(
            session_id=core.session_id,
            response_id=turn.response_id,
            input_id=turn.input_id,
            text=turn.text,
            pcm=b"".join(turn.pcm),
            reason=reason,
            streaming=streaming,
            input_tokens=0 if turn.prefill is None else turn.prefill.input_tokens,
            generated_tokens=turn.tokens,
            recording_id=core.recording_id,
            metrics=self._metrics(turn, result),
        )

    def _metrics(self, turn: ActiveTurn, result: TurnResult | None) -> Metrics:
        prefill_us = 0 if turn.prefill is None else turn.prefill.cost_us
        recording = self.core.recording
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
