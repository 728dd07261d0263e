"""Full replay of a turn of chat: the model answers again, and its pieces are compared in order.

The model prefills at the recorded prefill, and at the first recorded piece it answers to the end;
its pieces then replace the recorded ones, one by one. A turn that was cut is run once more up to
the cut, to compare its result there. A turn that failed is compared up to the failure.
"""

from __future__ import annotations

from collections import deque

import attrs

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.model import Prefill, TurnChunk, TurnResult
from runtime.model.backends.base import BackendError, Chats, TurnSession

from .difference import Difference
from .outputs import compare_outputs, snr_db
from .verdicts import Rerun, Verdict, finding_of


@attrs.define
class Running:
    """A turn that the model runs again.

    `chunks` are its pieces that the log has not reached; `result` is None before the first piece is
    asked for, `failure` the error that ended it.
    """

    effect: ef.StartTurn
    chunks: deque[TurnChunk] = attrs.Factory(deque)
    result: TurnResult | None = None
    failure: Exception | None = None


class TurnReplay(Rerun[TurnSession]):
    """The turns of one session, run again."""

    name = "turns"

    _running: Running | None = None

    async def renew(self, event: ev.Event) -> Verdict:
        """Run a turn's prefill, pieces or end."""
        match event:
            case ev.TurnPrefilled(prefill=recorded):
                return await self._prefilled(event, recorded)
            case ev.TurnProgress(chunk=recorded):
                return await self._progressed(event, recorded)
            case ev.TurnDone(result=recorded):
                return await self._done(event, recorded)
            case ev.TurnFailed() | ev.BackendLost():
                self.asked.clear()
                await self.close()
        return Verdict()

    async def close(self) -> None:
        """Give the turn back to the model."""
        self._running = None
        await super().close()

    async def _prefilled(self, event: ev.TurnPrefilled, recorded: Prefill) -> Verdict:
        asked = self.asked.pop(ef.StartTurn, None)
        if asked is None or asked.turn.index != recorded.index:
            return Verdict()
        made = await self._prefill(asked)
        self.made += 1
        kept = attrs.evolve(made, cost_us=recorded.cost_us)
        return self._verdict(attrs.evolve(event, prefill=kept), compare_outputs(recorded, made))

    def _verdict(
        self, event: ev.Event | None, found: Difference | None, snr: float | None = None
    ) -> Verdict:
        return Verdict(event=event, finding=finding_of(found, snr), index=self.made - 1)

    async def _prefill(self, asked: ef.StartTurn) -> Prefill:
        if not isinstance(self.backend, Chats):
            raise BackendError("the model does not chat")
        self.held = await self.backend.chat(asked.turn, slot=0)
        try:
            made = await self.held.prefill()
        except BaseException:
            await self.close()
            raise
        self._running = Running(effect=asked)
        return made

    async def _answer(self, running: Running, cut: int | None = None) -> None:
        """Answer to the end; a failure counts once the log goes beyond it."""
        if running.result is None and running.failure is None:
            assert self.held is not None
            try:
                running.result = await self.held.generate(running.chunks.append, cut)
            except Exception as failure:
                running.failure = failure

    async def _progressed(self, event: ev.TurnProgress, recorded: TurnChunk) -> Verdict:
        running = self._running
        if running is None:
            return Verdict()
        await self._answer(running)
        if not running.chunks:
            if running.failure is not None:
                raise running.failure
            difference = Difference(path="", recorded="a piece", came_out="the end")
            return self._verdict(None, difference)
        made = running.chunks.popleft()
        snr = snr_db(recorded.pcm, made.pcm)
        return self._verdict(attrs.evolve(event, chunk=made), compare_outputs(recorded, made), snr)

    async def _done(self, event: ev.TurnDone, recorded: TurnResult) -> Verdict:
        running = self._running
        if running is None:
            return Verdict()
        if recorded.cut is not None:
            await self.close()
            await self._prefill(running.effect)
            running = self._running
            assert running is not None
            await self._answer(running, recorded.cut)
            running.chunks.clear()
        await self._answer(running)
        await self.close()
        if running.failure is not None:
            raise running.failure
        made = running.result
        assert made is not None
        if running.chunks:
            difference = Difference(path="", recorded="the end", came_out="another piece")
            return self._verdict(None, difference)
        kept = attrs.evolve(made, costs=recorded.costs)
        snr = snr_db(recorded.pcm, made.pcm)
        return self._verdict(attrs.evolve(event, result=kept), compare_outputs(recorded, made), snr)
