"""Full replay of a turn of chat: the model answers again, its pieces compared as the log has them.

The model prefills when the log tells that the recorded one had, and answers, to the end, when the
log tells of the first piece; its pieces then take the place of the recorded ones, one by one. A
turn that was cut is run once more, to just where it was cut: what it left behind there is compared
too. A turn that failed is compared as far as it had come: what the environment did stays.
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
class Running:
    """A turn that the model is at again.

    Attributes:
        effect: what it was asked.
        held: the turn on the model.
        chunks: its pieces that the log has not told of yet.
        result: its end; None before the first piece was asked for.
        failure: what it failed with instead.
    """

    effect: ef.StartTurn
    held: TurnSession
    chunks: deque[TurnChunk] = attrs.Factory(deque)
    result: TurnResult | None = None
    failure: Exception | None = None


class TurnReplay:
    """The turns of one session, run again.

    Args:
        backend: the model.

    Attributes:
        turns: how many it has answered.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend: Final = backend
        self._asked: ef.StartTurn | None = None
        self._running: Running | None = None
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
                return await self._progressed(event, recorded)
            case ev.TurnDone(result=recorded):
                return await self._done(event, recorded)
            case ev.TurnFailed() | ev.BackendLost():
                self._asked = None
                await self.close()
        return Verdict()

    async def close(self) -> None:
        """Give the turn back to the model."""
        running, self._running = self._running, None
        if running is not None:
            await running.held.release()

    async def _prefilled(self, event: ev.TurnPrefilled, recorded: Prefill) -> Verdict:
        asked, self._asked = self._asked, None
        if asked is None or asked.turn.index != recorded.index:
            return Verdict()
        self._running, made = await self._prefill(asked)
        self.turns += 1
        kept = attrs.evolve(made, cost_us=recorded.cost_us)
        return Verdict(
            event=attrs.evolve(event, prefill=kept), found=compare_prefills(recorded, made)
        )

    async def _prefill(self, asked: ef.StartTurn) -> tuple[Running, Prefill]:
        if not isinstance(self._backend, Chats):
            raise BackendError("the model does not chat")
        held: TurnSession = await self._backend.chat(asked.turn, slot=0)
        try:
            return Running(effect=asked, held=held), await held.prefill()
        except BaseException:
            await held.release()
            raise

    async def _answer(self, running: Running, cut: int | None = None) -> None:
        """Answer to the end; a failure counts once the log goes beyond it."""
        if running.result is None and running.failure is None:
            try:
                running.result = await running.held.generate(running.chunks.append, cut)
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
            return Verdict(found=Difference(path="", recorded="a piece", came_out="the end"))
        made = running.chunks.popleft()
        return Verdict(
            event=attrs.evolve(event, chunk=made),
            found=compare_chunks(recorded, made),
            snr=snr_db(recorded.pcm, made.pcm),
        )

    async def _done(self, event: ev.TurnDone, recorded: TurnResult) -> Verdict:
        running = self._running
        if running is None:
            return Verdict()
        if recorded.cut is not None:
            await self.close()
            running = self._running = (await self._prefill(running.effect))[0]
            await self._answer(running, recorded.cut)
            running.chunks.clear()
        await self._answer(running)
        await self.close()
        if running.failure is not None:
            raise running.failure
        made = running.result
        assert made is not None
        if running.chunks:
            return Verdict(found=Difference(path="", recorded="the end", came_out="another piece"))
        return Verdict(
            event=attrs.evolve(event, result=attrs.evolve(made, costs=recorded.costs)),
            found=compare_turns(recorded, made),
            snr=snr_db(recorded.pcm, made.pcm),
        )
