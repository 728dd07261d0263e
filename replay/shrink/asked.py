"""What a session has asked for and was not told yet: so that an answer has its question.

Events come from outside (frames, a lost peer, a shutdown), or they answer an effect. Where events
were left out, effects are other ones, or have other numbers. `fit` gives an answer the number of
the question that waits for it, and leaves out one that no question waits for: what is left could
have happened.

It judges no time, and does not look at what an answer says.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar

import attrs

from protocol import effects as ef
from protocol import events as ev

OUTSIDE: Final = (
    *(ev.ConnectionOpened, ev.FrameReceived, ev.PeerGone, ev.SendFailed),
    *(ev.RecordingFailed, ev.Flooded, ev.DrainBegan, ev.Draining),
)
"""Events that answer nothing; each may come at any time."""
_MODEL_CALLS: Final = ("open", "unit", "finalize", "rollback", "turn", "utterance", "chunk")

Answer = TypeVar("Answer", bound=ev.Event)


@attrs.define
class Asked:
    """The questions that are open.

    Attributes:
        numbers: by what was asked: the lease, unit or turn that it is about.
        media: what is being decoded: the number that the answer has, and the one that it must have.
        timers: that are set, and their generations.
        lease: the slot that the session holds.
    """

    numbers: dict[str, int] = attrs.Factory(dict)
    media: dict[int, int] = attrs.Factory(dict)
    timers: dict[str, int] = attrs.Factory(dict)
    lease: int | None = None
    _is_gone: bool = False
    _chunks: int = 0

    def note(self, effects: Iterable[ef.Effect]) -> tuple[int, ...]:
        """Take what a step asks for.

        Returns:
            The numbers of the media among it, whose answers are still to be named in `media`.
        """
        media: list[int] = []
        for effect in effects:
            match effect:
                case ef.EnterQueue():
                    self.numbers["queue"] = 0
                case ef.LeaveQueue():
                    self.numbers["leave"] = 0
                case ef.Admit():
                    self.numbers["admit"] = 0
                case ef.OpenBackend(lease=lease):
                    self.numbers["open"] = lease
                case ef.StartUnit(unit=unit):
                    self.numbers["unit"] = unit.index
                case ef.StartFinalize(index=index):
                    self.numbers["finalize"] = index
                case ef.Rollback(index=index):
                    self.numbers["rollback"] = index
                case ef.StartTurn(turn=turn):
                    self.numbers |= {"turn": turn.index, "prefill": turn.index}
                case ef.RunChunk(chunk=chunk):
                    self.numbers |= {"utterance": chunk.utterance, "chunk": chunk.index}
                case ef.Release(lease=lease):
                    self.numbers["release"] = lease
                case ef.SetTimer(name=name, generation=generation):
                    self.timers[name] = generation
                case ef.CancelTimer(name=name):
                    self.timers.pop(name, None)
                case ef.DecodeMedia(media=number):
                    media.append(number)
        return tuple(media)

    def fit(self, event: ev.Event) -> ev.Event | None:
        """Fit an event to what was asked.

        Returns:
            The event with the numbers of its question; None: nobody asked.
        """
        if isinstance(event, OUTSIDE):
            return self._from_outside(event)
        match event:
            case ev.TimerFired(name=name):
                generation = self.timers.pop(name, None)
                return None if generation is None else attrs.evolve(event, generation=generation)
            case ev.MediaDecoded(media=old) | ev.MediaRejected(media=old):
                number = self.media.pop(old, None)
                return None if number is None else attrs.evolve(event, media=number)
            case ev.TurnPrefilled() | ev.TurnProgress() | ev.TurnDone() | ev.TurnFailed():
                return self._of_turn(event)
            case ev.SlotLeased() | ev.BackendReleased() | ev.BackendLost():
                return self._of_slot(event)
            case ev.ChunkDone() | ev.ChunkFailed():
                return self._of_chunk(event)
        return self._of_queue(event) or self._of_call(event)

    def _from_outside(self, event: ev.Event) -> ev.Event | None:
        """Nothing comes of a peer that is gone."""
        if self._is_gone and isinstance(event, ev.FrameReceived | ev.PeerGone):
            return None
        self._is_gone = self._is_gone or isinstance(event, ev.PeerGone)
        return event

    def _of_queue(self, event: ev.Event) -> ev.Event | None:
        match event:
            case ev.TicketMoved():
                return event if "queue" in self.numbers else None
            case ev.Admitted():
                return self._answer(event, "admit")
            case ev.AdmissionRefused():
                return self._answer(event, "admit") or self._answer(event, "queue")
            case ev.TicketCancelled():
                return self._answer(event, "queue")
            case ev.TicketLeft() if "leave" in self.numbers:
                return self._answer(event, "queue")
        return None

    def _of_slot(
        self, event: ev.SlotLeased | ev.BackendReleased | ev.BackendLost
    ) -> ev.Event | None:
        match event:
            case ev.SlotLeased(lease=lease):
                if self._answer(event, "queue") is None:
                    return None
                self.lease = lease
                return event
            case ev.BackendReleased():
                held, self.lease = self.numbers.pop("release", None), None
                return None if held is None else attrs.evolve(event, lease=held)
            case ev.BackendLost() if self.lease is not None:
                for call in (*_MODEL_CALLS, "prefill"):
                    self.numbers.pop(call, None)
                return attrs.evolve(event, lease=self.lease)
        return None

    def _of_turn(self, event: ev.Event) -> ev.Event | None:
        index = self.numbers.get("turn")
        if index is None:
            return None
        match event:
            case ev.TurnPrefilled(prefill=prefill) if self.numbers.pop("prefill", None) is not None:
                self._chunks = 0
                return attrs.evolve(event, prefill=attrs.evolve(prefill, index=index))
            case ev.TurnProgress(chunk=chunk) if "prefill" not in self.numbers:
                step, self._chunks = self._chunks, self._chunks + 1
                return attrs.evolve(event, chunk=attrs.evolve(chunk, index=index, step=step))
            case ev.TurnDone(result=result) if "prefill" not in self.numbers:
                del self.numbers["turn"]
                return attrs.evolve(event, result=attrs.evolve(result, index=index))
            case ev.TurnFailed():
                del self.numbers["turn"]
                self.numbers.pop("prefill", None)
                return attrs.evolve(event, index=index)
        return None

    def _of_chunk(self, event: ev.ChunkDone | ev.ChunkFailed) -> ev.Event | None:
        index = self.numbers.pop("chunk", None)
        if index is None:
            return None
        utterance = self.numbers.pop("utterance")
        if isinstance(event, ev.ChunkFailed):
            return attrs.evolve(event, utterance=utterance, index=index)
        result = attrs.evolve(event.result, utterance=utterance, index=index)
        return attrs.evolve(event, result=result)

    def _of_call(self, event: ev.Event) -> ev.Event | None:
        match event:
            case ev.BackendOpened() | ev.BackendOpenFailed():
                lease = self.numbers.pop("open", None)
                return None if lease is None else attrs.evolve(event, lease=lease)
            case ev.UnitDone(result=result):
                index = self.numbers.pop("unit", None)
                done = None if index is None else attrs.evolve(result, index=index)
                return None if done is None else attrs.evolve(event, result=done)
            case ev.UnitFailed():
                return self._indexed(event, "unit")
            case ev.FinalizeDone(finalized=finalized):
                index = self.numbers.pop("finalize", None)
                made = None if index is None else attrs.evolve(finalized, index=index)
                return None if made is None else attrs.evolve(event, finalized=made)
            case ev.FinalizeFailed():
                return self._indexed(event, "finalize")
            case ev.RollbackDone() | ev.RollbackFailed():
                return self._indexed(event, "rollback")
        return None

    def _indexed(
        self,
        event: ev.UnitFailed | ev.FinalizeFailed | ev.RollbackDone | ev.RollbackFailed,
        question: str,
    ) -> ev.Event | None:
        index = self.numbers.pop(question, None)
        return None if index is None else attrs.evolve(event, index=index)

    def _answer(self, event: Answer, question: str) -> Answer | None:
        """Take a question back that is about nothing of a number."""
        return None if self.numbers.pop(question, None) is None else event
