"""A chat turn on a remote backend: a session of mode `turn_based`, for one append.

Our turn carries the whole conversation, so each turn has its own session. Sources: see
`llama_omni_answer`. Rules:
- `prefill` ends with the first word of the answer: the server sends nothing before.
- Only the session's end stops an answer: an interrupt stops waiting, and `release` closes it.
- The server may still be freeing the last session: a refusal is retried, as an opening is.
- A piece is a delta without its tokens, so pieces are counted if the server omits `n_tokens`, or
  the answer was cut. A listen is ignored, as is sound that was not requested.
- A server that sends nothing new in time, or too much, or ends the session, fails only this turn.
  It counts as gone only if it is unreachable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import anyio
import attrs

from protocol.values.digest import digest
from protocol.values.limits import TURN_WAIT_S
from protocol.values.model import Prefill, StopReason, Turn, TurnChunk, TurnResult

from . import llama_omni_wire as wire
from .base import OPEN_PAUSE_S, OPEN_TRIES, BackendError, BackendGone
from .llama_omni_answer import SECOND_BYTES
from .llama_omni_channel import Channel, gone, told
from .llama_omni_http import Address
from .llama_omni_question import chat_init_message, question_message

PREFILL_WAIT_S: Final = TURN_WAIT_S - 20.0
"""A server in the other mode reloads its model. Below the session machine's own limit."""
PIECE_WAIT_S: Final = 60.0
"""The server waits up to 3 s for its own sound; a slow one takes longer per word."""
ANSWER_S_MAX: Final = 1800.0
"""8192 tokens, the maximum of a request, at 5 a second."""
SPEECH_BYTES_MAX: Final = 1800 * SECOND_BYTES
"""Speech as long as an answer may take."""
_Said = wire.Listen | wire.Text | wire.Audio | wire.Done


class LlamaOmniTurn:
    """One turn on the server, which must not exceed the server's abilities."""

    def __init__(self, address: Address, turn: Turn) -> None:
        self.is_released = False
        self._address, self._turn = address, turn
        self._channel: Channel | None = None
        self._is_reached = False
        self._awaited = "session.created"
        self._scope: anyio.CancelScope | None = None
        self._is_cut = False
        self._first: _Said | None = None
        self._texts: list[str] = []
        self._chars = self._pieces = self._speech_bytes = 0
        self._kv_length = 0

    async def prefill(self) -> Prefill:
        """Open a session, ask, and wait for the first word, for `PREFILL_WAIT_S`."""
        began_s = anyio.current_time()
        with self._telling():
            with self._bounded(PREFILL_WAIT_S) as scope:
                channel = await self._begin()
                await channel.link.send(question_message(self._turn))
                first = await self._receive()
            if self._is_cut:
                raise BackendError("the turn was cut")
            if scope.cancelled_caught:
                text = f"expected {self._awaited} in {PREFILL_WAIT_S:g} s, got none"
                raise BackendError(text)
        self._first = first
        return Prefill(
            index=self._turn.index,
            input_tokens=first.metrics.kv_length or 0,
            input_hash=digest(self._turn.messages),
            cost_us=first.metrics.prefill_us or _us_since(began_s),
        )

    async def generate(
        self, emit: Callable[[TurnChunk], None], cut: int | None = None
    ) -> TurnResult:
        """Emit the answer, for at most `ANSWER_S_MAX`; `BackendError` for an unsupported `cut`."""
        if cut is not None:
            raise BackendError("a remote answer cannot be stopped at a given token")
        assert self._first is not None, "prefill comes first"
        began_s, done = anyio.current_time(), None
        with self._telling():
            with self._bounded(ANSWER_S_MAX) as scope:
                event: _Said = self._first
                while not isinstance(event, wire.Done):
                    self._take(event, emit)
                    event = await self._receive_piece()
                self._finish(event, emit)
                done = event
            if done is None and not self._is_cut:
                assert scope.cancelled_caught
                raise BackendError(f"expected an answer that ends in {ANSWER_S_MAX:g} s, got none")
        return self._result(done, _us_since(began_s))

    def interrupt(self) -> None:
        """Stop waiting for the turn."""
        self._is_cut = True
        if self._scope is not None:
            self._scope.cancel()

    async def release(self) -> None:
        """Close the session on the server and its WebSocket; a failure is logged."""
        if self.is_released:
            return
        self.interrupt()
        try:
            await self._let_go()
        finally:
            self.is_released = True

    # -- inside ---------------------------------------------------------------------------------

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Name the server in errors; once reached, its end fails only this turn."""
        try:
            with told(self._address):
                yield
        except BackendGone as error:
            if not self._is_reached:
                raise
            raise BackendError(str(error)) from error

    @contextmanager
    def _bounded(self, wait_s: float) -> Iterator[anyio.CancelScope]:
        """Bound a wait, by time and by `interrupt`."""
        with anyio.move_on_after(wait_s) as self._scope:
            if self._is_cut:
                self._scope.cancel()
            yield self._scope

    async def _begin(self) -> Channel:
        """Open a session; a refusal is retried, since the last one may still be being freed."""
        await anyio.lowlevel.checkpoint()  # begin nothing for a cut turn
        tries = 0
        while True:
            self._is_reached = False
            try:
                self._channel = await Channel.connect(self._address)
                self._is_reached = True
                await self._channel.begin(chat_init_message(self._turn), wire.TURN_BASED)
            except BackendGone:
                await self._let_go()
                tries += 1
                if tries == OPEN_TRIES:
                    raise
            else:
                self._awaited = "an answer"
                return self._channel
            await anyio.sleep(OPEN_PAUSE_S * 2 ** (tries - 1))

    async def _let_go(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def _receive(self) -> _Said:
        """Wait for the server's next event.

        `BackendGone`: the session or its connection has ended; `BackendError`: the event must not
        come now.
        """
        assert self._channel is not None
        event = await self._channel.receive()
        if isinstance(event, wire.Closed):
            raise gone(event)
        if isinstance(event, wire.Created):
            raise BackendError("expected an answer, got session.created once more")
        return event

    async def _receive_piece(self) -> _Said:
        """Wait for a continuation of the answer, for at most `PIECE_WAIT_S`."""
        with anyio.move_on_after(PIECE_WAIT_S) as patience:
            while True:
                event = await self._receive()
                if isinstance(event, wire.Done) or self._is_piece(event):
                    return event
        assert patience.cancelled_caught
        raise BackendError(f"expected more of an answer in {PIECE_WAIT_S:g} s, got none")

    def _is_piece(self, event: _Said) -> bool:
        match event:
            case wire.Text(text=text):
                return bool(text)
            case wire.Audio(pcm=pcm):
                return bool(pcm) and self._turn.speech is not None
        return False

    def _take(self, event: _Said, emit: Callable[[TurnChunk], None]) -> None:
        """Emit a piece of the answer."""
        self._kv_length = event.metrics.kv_length or self._kv_length
        if not self._is_piece(event):
            return
        text = event.text if isinstance(event, wire.Text) else ""
        pcm = event.pcm if isinstance(event, wire.Audio) else b""
        self._chars += len(text)
        self._speech_bytes += len(pcm)
        if self._chars > wire.ANSWER_CHARS_MAX:
            text = f"expected at most {wire.ANSWER_CHARS_MAX} characters of answer, got more"
            raise BackendError(text)
        if self._speech_bytes > SPEECH_BYTES_MAX:
            limit_s = SPEECH_BYTES_MAX // SECOND_BYTES
            raise BackendError(f"expected at most {limit_s} s of speech, got more")
        self._texts.append(text)
        emit(TurnChunk(index=self._turn.index, step=self._pieces, text=text, pcm=pcm))
        self._pieces += 1

    def _finish(self, done: wire.Done, emit: Callable[[TurnChunk], None]) -> None:
        """Take the end, whose text is the whole answer, new if nothing came before."""
        self._take(wire.Text(text="" if self._chars else done.text, metrics=done.metrics), emit)

    def _result(self, done: wire.Done | None, wall_us: int) -> TurnResult:
        """Make the result of the answer; None: it was cut."""
        metrics = wire.Metrics() if done is None else done.metrics
        told_tokens = self._pieces if metrics.tokens is None else metrics.tokens
        reason: StopReason = "turn_end"
        if done is None:
            reason = "interrupted"
        elif done.reason == "length":
            reason = "length"
        return TurnResult(
            index=self._turn.index,
            text="".join(self._texts),
            reason=reason,
            generated_tokens=told_tokens,
            kv_length=self._kv_length,
            cut=self._pieces if done is None else None,
            costs=attrs.evolve(metrics.costs(wall_us=wall_us), prefill_us=0),
        )


def _us_since(began_s: float) -> int:
    return round((anyio.current_time() - began_s) * wire.US_PER_S)
