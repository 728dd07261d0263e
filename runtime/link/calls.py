"""A model call, the same for units, turns and chunks, in this process and behind a link.

    begin(input) -> progress* -> done | failed, then commit | undo; cut at any moment

- An effect asks for a call, an event is its progress or its result; a failed one raises. Units,
  turns and chunks differ in their input and result only: `StartUnit -> UnitDone`,
  `StartTurn -> TurnPrefilled, TurnProgress..., TurnDone`, `RunChunk -> ChunkDone`.
- A unit is then committed (`StartFinalize -> FinalizeDone`) or undone (`Rollback -> RollbackDone`).
- The calls of one slot never overlap, except `cut`.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.model import Cut

from ..model.backends.base import (
    Backend,
    BackendError,
    BackendSession,
    Chats,
    ModelSession,
    Transcribes,
    TranscriptSession,
    TurnSession,
)


def failure_of(
    effect: object, error: BackendError, at_ns: int, refused: str = ""
) -> ev.Event | None:
    """Make the event of a call that failed; None for one that has none.

    `refused`: why a turn was refused before it began.
    """
    is_full = error.context_full
    match effect:
        case ef.OpenBackend():
            return ev.BackendOpenFailed(at_ns=at_ns, lease=effect.lease, context_full=is_full)
        case ef.StartUnit():
            return ev.UnitFailed(at_ns=at_ns, index=effect.unit.index, context_full=is_full)
        case ef.StartFinalize():
            return ev.FinalizeFailed(at_ns=at_ns, index=effect.index)
        case ef.Rollback():
            return ev.RollbackFailed(at_ns=at_ns, index=effect.index)
        case ef.StartTurn():
            index = effect.turn.index
            return ev.TurnFailed(at_ns=at_ns, index=index, context_full=is_full, refused=refused)
        case ef.RunChunk():
            place = {"utterance": effect.chunk.utterance, "index": effect.chunk.index}
            return ev.ChunkFailed(at_ns=at_ns, context_full=is_full, **place)
        case ef.Rebuild():
            return ev.RebuildFailed(at_ns=at_ns, lease=effect.lease)
    return None


@attrs.define(eq=False, kw_only=True)
class HeldModel:
    """What a backend holds on a slot for one session, and the calls on it.

    Attributes:
        now_ns: the time of its events.
        opened, turn, transcript: one of them, once a call has opened it.
    """

    backend: Backend
    slot: int
    now_ns: Callable[[], int]
    opened: BackendSession | None = None
    turn: TurnSession | None = None
    transcript: TranscriptSession | None = None

    @property
    def held(self) -> ModelSession | None:
        """What must be released."""
        return self.opened or self.turn or self.transcript

    async def begin(self, effect: ef.OpenBackend | ef.StartTurn | ef.RunChunk) -> None:
        """Have the backend hold what the effect's calls are made on; `BackendError`: it does not.

        Of a turn nothing is computed yet; of a chunk the transcription is opened.
        """
        backend, slot = self.backend, self.slot
        match effect:
            case ef.OpenBackend():
                self.opened = await backend.open(effect.opening, slot=slot)
            case ef.StartTurn():
                if not isinstance(backend, Chats):
                    raise BackendError(f"model {backend.info.name} does not chat")
                self.turn = await backend.chat(effect.turn, slot=slot)
            case ef.RunChunk():
                if not isinstance(backend, Transcribes):
                    raise BackendError(f"model {backend.info.name} does not transcribe")
                self.transcript = await backend.transcribe(slot=slot)

    async def call(
        self,
        effect: ef.StartUnit | ef.StartFinalize | ef.Rollback | ef.RunChunk,
        cut: Cut | None = None,
    ) -> ev.Event:
        """Compute a unit or a chunk, or commit or undo the last unit; `cut`: where a unit stops."""
        if isinstance(effect, ef.RunChunk):
            if self.transcript is None:
                await self.begin(effect)
            assert self.transcript is not None
            heard = await self.transcript.run_chunk(effect.chunk)
            return ev.ChunkDone(at_ns=self.now_ns(), result=heard)
        opened = self.opened
        if opened is None:
            raise BackendError(f"a {type(effect).__name__} of a session without units")
        if isinstance(effect, ef.StartUnit):
            result = await opened.run_unit(effect.unit, cut)
            return ev.UnitDone(at_ns=self.now_ns(), result=result)
        if isinstance(effect, ef.StartFinalize):
            done = await opened.finalize(effect.index, interrupted=effect.interrupted)
            return ev.FinalizeDone(at_ns=self.now_ns(), finalized=done)
        await opened.rollback(effect.index)
        return ev.RollbackDone(at_ns=self.now_ns(), index=effect.index)

    async def prefill(self) -> ev.TurnPrefilled:
        """Feed the conversation of a turn."""
        prefill = await self._taken_turn().prefill()
        return ev.TurnPrefilled(at_ns=self.now_ns(), prefill=prefill)

    async def generate(
        self, emit: Callable[[ev.TurnProgress], None], cut: int | None = None
    ) -> ev.TurnDone:
        """Answer a turn; `emit` gets the pieces, `cut` is the token before which it stops."""
        result = await self._taken_turn().generate(
            lambda chunk: emit(ev.TurnProgress(at_ns=self.now_ns(), chunk=chunk)), cut
        )
        return ev.TurnDone(at_ns=self.now_ns(), result=result)

    def cut(self, unit: int | None = None) -> None:
        """Cut a turn, also before it begins, or this unit if it runs; never blocks."""
        if self.turn is not None:
            self.turn.interrupt()
        elif self.opened is not None and unit is not None:
            self.opened.interrupt(unit)

    async def release(self) -> None:
        """Free everything; the slot is clean then."""
        if self.held is not None:
            await self.held.release()
        self.opened = self.turn = self.transcript = None

    def _taken_turn(self) -> TurnSession:
        if self.turn is None:
            raise BackendError("a step of a turn that was not taken")
        return self.turn
