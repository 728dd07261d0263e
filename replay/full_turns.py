"""Full replay of a turn of chat: the model answers again, its pieces compared as the log has them.

The model runs when the log tells that the recorded one had prefilled, to the end of its answer; the
pieces then take the place of the recorded ones, one by one. A turn that was cut is run once more,
to just where it was cut: what it left behind there is compared too.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import attrs

from protocol import effects as ef
from protocol import events as ev
from protocol.turn import Prefill, TurnChunk, TurnResult
from runtime.backends.base import Backend, BackendError, Chats, TurnSession

from .difference import Difference
from .outputs import compare_chunks, compare_prefills, compare_turns, snr_db


@attrs.frozen(kw_only=True)
class Verdict:
    """What a recorded event of a turn is worth, and what it is to be replaced by.

    Attributes:
        event: the event with the model's new output; None where there is none.
        found: the first difference, or None.
        snr: of PCM that differs (`outputs.snr_db`).
    """

    event: ev.Event | None = None
    found: Difference | None = None
    snr: float | None = None


@attrs.define
class Answered:
    """A turn that the model has answered again.

    Attributes:
        effect: what it was asked.
        prefill: what it made of the conversation.
        chunks: its pieces that the log has not told of yet.
        result: its end.
    """

    effect: ef.StartTurn
    prefill: Prefill
    chunks: deque[TurnChunk]
    result: TurnResult


class TurnReplay:
    """The turns of one session, run again.

    Args:
        backend: the model.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend: Final = backend
        self._asked: ef.StartTurn | None = None
        self._answered: Answered | None = None
        self.turns = 0

    def note(self, effect: ef.Effect) -> None:
        """Keep what the machine asks the model for."""
        if isinstance(effect, ef.StartTurn):
            self._asked = effect

    async def renew(self, event: ev.Event) -> Verdict:
        """Make the model's part of an event again.

        Raises:
            Exception: whatever the model raises, a bug of its own too.
        """
        match event:
            case ev.TurnPrefilled(prefill=recorded):
                return await self._prefilled(event, recorded)
            case ev.TurnProgress(chunk=recorded):
                return self._progressed(event, recorded)
            case ev.TurnDone(result=recorded):
                return await self._done(event, recorded)
            case ev.TurnFailed():
                self._asked = self._answered = None
        return Verdict()

    async def _prefilled(self, event: ev.TurnPrefilled, recorded: Prefill) -> Verdict:
        asked, self._asked = self._asked, None
        if asked is None or asked.turn.index != recorded.index:
            return Verdict()
        self._answered = answered = await self._run(asked, None)
        self.turns += 1
        kept = attrs.evolve(answered.prefill, cost_us=recorded.cost_us)
        return Verdict(
            event=attrs.evolve(event, prefill=kept),
            found=compare_prefills(recorded, answered.prefill),
        )

    def _progressed(self, event: ev.TurnProgress, recorded: TurnChunk) -> Verdict:
        answered = self._answered
        if answered is None:
            return Verdict()
        if not answered.chunks:
            return Verdict(found=Difference(path="", recorded="a piece", came_out="the end"))
        made = answered.chunks.popleft()
        return Verdict(
            event=attrs.evolve(event, chunk=made),
            found=compare_chunks(recorded, made),
            snr=snr_db(recorded.pcm, made.pcm),
        )

    async def _done(self, event: ev.TurnDone, recorded: TurnResult) -> Verdict:
        answered, self._answered = self._answered, None
        if answered is None:
            return Verdict()
        if recorded.cut is not None:
            answered = await self._run(answered.effect, recorded.cut)
        elif answered.chunks:
            return Verdict(found=Difference(path="", recorded="the end", came_out="another piece"))
        made = answered.result
        return Verdict(
            event=attrs.evolve(event, result=attrs.evolve(made, costs=recorded.costs)),
            found=compare_turns(recorded, made),
            snr=snr_db(recorded.pcm, made.pcm),
        )

    async def _run(self, asked: ef.StartTurn, cut: int | None) -> Answered:
        if not isinstance(self._backend, Chats):
            raise BackendError("the model does not chat")
        chunks: deque[TurnChunk] = deque()
        held: TurnSession = await self._backend.chat(asked.turn, slot=0)
        try:
            prefill = await held.prefill()
            result = await held.generate(chunks.append, cut)
        finally:
            await held.release()
        return Answered(effect=asked, prefill=prefill, chunks=chunks, result=result)
