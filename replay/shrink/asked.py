"""The open questions of a session, so that each answer has its question.

Events come from outside (frames, a lost peer, a shutdown), or answer an effect. After events were
left out, effects differ or have other numbers. `fit` gives an answer the number of its open
question, and drops one without a question. It checks neither times nor contents.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar

import attrs

from protocol.values import effects as ef
from protocol.values import events as ev

from ..story.questions import CallName, answered, asked, renumbered

OUTSIDE: Final = (
    *(
        ev.ConnectionOpened,
        ev.Forked,
        ev.FrameReceived,
        ev.PeerGone,
        ev.PeerAttached,
        ev.SendFailed,
    ),
    *(ev.RecordingFailed, ev.Flooded, ev.DrainBegan, ev.Draining),
)
"""Events that answer nothing; each may come at any time."""
_MODEL_CALLS: Final = (
    *("open", "unit", "finalize", "rollback", "turn", "utterance", "chunk"),
    "rebuild",
)

Answer = TypeVar("Answer", bound=ev.Event)


@attrs.define
class Asked:
    """The open questions, with the lease, unit or turn that they are about.

    `media` maps an answer's number to the one that it must get, `timers` a name to its generation.
    """

    numbers: dict[str, int] = attrs.Factory(dict)
    media: dict[int, int] = attrs.Factory(dict)
    timers: dict[str, int] = attrs.Factory(dict)
    lease: int | None = None
    _is_gone: bool = False
    _chunks: int = 0

    def note(self, effects: Iterable[ef.Effect]) -> tuple[int, ...]:
        """Note a step's questions; return its media, whose answers must be named in `media`."""
        media: list[int] = []
        for effect in effects:
            call = asked(effect)
            if call is not None:
                self.numbers[call[0]] = call[1]
            match effect:
                case ef.EnterQueue():
                    self.numbers["queue"] = 0
                case ef.LeaveQueue():
                    self.numbers["leave"] = 0
                case ef.Admit():
                    self.numbers["admit"] = 0
                case ef.DetectSpeech():
                    self.numbers["speech"] = 0
                case ef.StartUnit():
                    self.numbers["words"] = 0
                case ef.StartTurn(turn=turn):
                    self.numbers["prefill"] = turn.index
                case ef.RunChunk(chunk=chunk):
                    self.numbers["utterance"] = chunk.utterance
                case ef.SetTimer(name=name, generation=generation):
                    self.timers[name] = generation
                case ef.CancelTimer(name=name):
                    self.timers.pop(name, None)
                case ef.DecodeMedia(media=number):
                    media.append(number)
        return tuple(media)

    def fit(self, event: ev.Event) -> ev.Event | None:
        """The event with the numbers of its question; None without a question."""
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
            case ev.SpeechStarted() | ev.SpeechStopped():
                return event if "speech" in self.numbers else None
            case ev.UserTranscribed():
                return event if "words" in self.numbers else None
        call = answered(event)
        return self._of_queue(event) if call is None else self._of_call(event, call[0])

    def _from_outside(self, event: ev.Event) -> ev.Event | None:
        """None for an event of a peer that is gone, until it comes back."""
        if self._is_gone and isinstance(event, ev.FrameReceived | ev.PeerGone):
            return None
        if isinstance(event, ev.PeerGone | ev.PeerAttached):
            self._is_gone = isinstance(event, ev.PeerGone)
        if isinstance(event, ev.Forked):
            self._is_gone, self.lease = False, None
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
            case ev.SlotLeased(lease=lease) if self._answer(event, "queue") is not None:
                self.lease = lease
                return event
            case ev.BackendLost() if self.lease is not None:
                for call in (*_MODEL_CALLS, "prefill"):
                    self.numbers.pop(call, None)
                return attrs.evolve(event, lease=self.lease)
            case ev.LeaseRevoked() if self.lease is not None:
                return attrs.evolve(event, lease=self.lease)
        return None

    def _of_turn(
        self, event: ev.TurnPrefilled | ev.TurnProgress | ev.TurnDone | ev.TurnFailed
    ) -> ev.Event | None:
        index, is_prefill = self.numbers.get("turn"), isinstance(event, ev.TurnPrefilled)
        fits = isinstance(event, ev.TurnFailed) or is_prefill is ("prefill" in self.numbers)
        if index is None or not fits:
            return None
        if isinstance(event, ev.TurnProgress):
            step, self._chunks = self._chunks, self._chunks + 1
            return renumbered(event, index, step=step)
        self.numbers.pop("prefill", None)
        self._chunks = 0
        if not is_prefill:
            del self.numbers["turn"]
        return renumbered(event, index)

    def _of_call(self, event: ev.Event, call: CallName) -> ev.Event | None:
        number = self.numbers.pop(call, None)
        if call == "release":
            self.lease = None
        if number is None:
            return None
        also = {"utterance": self.numbers.pop("utterance")} if call == "chunk" else {}
        return renumbered(event, number, **also)

    def _answer(self, event: Answer, question: str) -> Answer | None:
        """Take back a question without a number."""
        return None if self.numbers.pop(question, None) is None else event
