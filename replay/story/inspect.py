"""Reports what happened in a session from its log: its states, units, drops, errors and end.

Values are those recorded. Only the states come from stepping the session, so they end at a
divergence. Damage is counted and skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import attrs
from cattrs import unstructure

from protocol.values.limits import NS_PER_MS
from protocol.values.state import State
from protocol.wire.table import IGNORED_PATHS_MAX
from recorder.format.format import Fields, Record
from recorder.read.scan import Damage
from recorder.storage.listing import WALL_MS_MAX, session_id_in
from recorder.storage.marks import Marks
from runtime.measures.conversation import TrackedToolCall

from ..rerun.full import model_of
from ..rerun.logic import Replayer
from ..shared.recordings import typed
from . import reading
from .model_calls import OUTPUTS, ModelCall, Outcome


@attrs.frozen(kw_only=True)
class StateSpan:
    """A state, and when it was entered."""

    state: State
    at_ns: int


UtteranceOutcome = Outcome | Literal["done"]
"""The result of an utterance; `pending`: its end was not heard, or not yet."""


@attrs.define(kw_only=True)
class UtteranceStory:
    """One utterance of a transcription, from the start of its first chunk in the model.

    Attributes:
        index: counts the session's utterances; those without sound are not given to the model.
        done_ns: when its last chunk was heard, or failed, if recorded.
        chunks: seconds that the model heard, with the silence at the end.
        kv_length: tokens in the KV cache after its last chunk.
        longest_us: the longest time of a chunk, by the backend's clock.
    """

    index: int
    started_ns: int
    done_ns: int | None = None
    outcome: UtteranceOutcome = "pending"
    chunks: int = 0
    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    kv_length: int | None = None
    longest_us: int = 0


@attrs.frozen(kw_only=True)
class Inspection:
    """One session; lists are in order.

    Attributes:
        session_id: as its client and the server's log know it.
        model: None if the log does not name it.
        mode: None if its first event is lost.
        wall_ms: Unix milliseconds of its start.
        duration_ns: from its start to its last record.
        states: from QUEUED on.
        shortened: the client's refused frames that are kept shortened.
        fields_ignored: the client's fields without a meaning in its dialect.
        ignored: their paths, each once, the first ones.
        damage_count: of the log; with damage the values have gaps.
        diverged_seq: the record from which the machine differs and the states are unknown.
    """

    recording_id: str | None
    session_id: str | None
    model: str | None
    mode: str | None
    dialect: str | None
    seed: int | None
    wall_ms: int | None
    duration_ns: int
    states: tuple[StateSpan, ...]
    frames_received: int
    shortened: tuple[reading.ShortenedFrame, ...]
    frames_sent: int
    fields_ignored: int
    ignored: tuple[str, ...]
    units: tuple[ModelCall, ...]
    turns: tuple[ModelCall, ...]
    utterances: tuple[UtteranceStory, ...]
    drops: tuple[reading.Drop, ...]
    moves: tuple[reading.Move, ...]
    absences: tuple[reading.Absence, ...]
    playback: tuple[reading.Playback, ...]
    said: tuple[reading.UserWords, ...]
    calls: tuple[TrackedToolCall, ...]
    errors: tuple[reading.ErrorSent, ...]
    marks: tuple[reading.Mark, ...]
    end: reading.End
    records: int
    damage_count: int
    diverged_seq: int | None


def to_json(inspection: Inspection) -> dict[str, Any]:
    """Write an inspection as plain values, for JSON."""
    plain: dict[str, Any] = unstructure(inspection)
    for kind, names in _FIELDS_SHOWN.items():
        entries = [{"cut": one.get("stopped"), **one} for one in plain[kind]]
        plain[kind] = [{name: one[name] for name in names} for one in entries]
    return plain


_FIELDS_SHOWN: Final[Mapping[str, tuple[str, ...]]] = {
    "units": (
        *("index", "started_ns", "done_ns", "finalized_ns", "outcome", "forced", "frames"),
        *("text", "audio_ms", "end_of_turn", "cut", "kv_length", "costs"),
    ),
    "turns": (
        *("index", "started_ns", "prefilled_ns", "done_ns", "outcome", "input_tokens"),
        *("generated_tokens", "text", "audio_ms", "kv_length", "costs", "calls"),
    ),
    "drops": ("at_ns", "ordinal", "input_id"),
    "playback": ("at_ns", "played_ms", "behind_ms"),
    "said": ("at_ns", "start_ms", "end_ms", "text"),
    "errors": ("at_ns", "code", "message"),
}
"""The fields shown of each."""


def inspect(head: Fields, items: Iterable[Record | Damage]) -> Inspection:
    """Read a session, given the fields of its `session` record, all records in order and damage."""
    inspector = Inspector()
    for item in items:
        inspector.take(item)
    return inspector.inspection(head)


def with_marks(inspection: Inspection, later: Marks) -> Inspection:
    """Add the marks next to the log."""
    more = [
        reading.Mark(at_ns=it.at_ms * NS_PER_MS, text=it.text, by=it.by or None, is_later=True)
        for it in later.marks
    ]
    marks = sorted([*inspection.marks, *more], key=lambda it: it.at_ns)
    return attrs.evolve(inspection, marks=tuple(marks))


class Inspector(reading.SessionStory):
    """A story that keeps its states and its model calls without their outputs."""

    def __init__(self) -> None:
        self.replayer: Final = Replayer(go_on=True)
        super().__init__(self.replayer, leaves_out=OUTPUTS)
        self._states: list[StateSpan] = []
        self._kept: list[ModelCall] = []
        self._utterances: dict[int, UtteranceStory] = {}
        self._ignored: dict[str, None] = {}

    def take(self, item: Record | Damage) -> reading.DecodedRecord | None:
        """Take the next record, or damage."""
        decoded, session = super().take(item), self.session
        if decoded is None:
            return None
        if session is not None and not self.replayer.is_stopped:
            state = StateSpan(state=session.state, at_ns=decoded.record.at_ns)
            if not self._states or self._states[-1].state is not state.state:
                self._states.append(state)
            if len(self._ignored) < IGNORED_PATHS_MAX:
                self._ignored |= dict.fromkeys(getattr(session.accepted, "ignored", ()))
        if decoded.ended is not None:
            self._keep(decoded.ended)
        return decoded

    def _keep(self, call: ModelCall) -> None:
        if call.kind != "chunk":
            self._kept.append(call)
            return
        index, result = call.place[0], call.chunk
        begun = UtteranceStory(index=index, started_ns=call.started_ns)
        utterance = self._utterances.setdefault(index, begun)
        if result is not None:
            utterance.done_ns = call.done_ns
            utterance.outcome = "done" if call.is_last else utterance.outcome
            utterance.chunks += 1
            utterance.text += result.text
            utterance.prompt_tokens += result.prompt_tokens
            utterance.completion_tokens += result.generated_tokens
            utterance.kv_length = result.kv_length
            utterance.longest_us = max(utterance.longest_us, result.costs.wall_us)
        elif call.done_ns is not None:
            utterance.done_ns, utterance.outcome = call.done_ns, call.outcome

    def inspection(self, head: Fields) -> Inspection:
        """Return the inspection, once all records are taken."""
        last, self.model_calls.current = self.model_calls.current, None
        if last is not None:
            self._keep(last)
        session, opened, divergence = self.session, self.opened, self.replayer.report().divergence
        ended = session.end_reason if session is not None else None
        wall_ms = typed(head, "wall_ms", int)
        own: dict[str, Any] = {name: tuple(getattr(self, name)) for name in _LISTS}
        own |= {name: getattr(self, name) for name in _NUMBERS}
        return Inspection(
            recording_id=typed(head, "recording_id", str),
            session_id=session_id_in(head),
            model=model_of(head),
            mode=opened.mode if opened is not None else None,
            dialect=session.dialect_name if session is not None else None,
            seed=typed(head, "seed", int),
            wall_ms=wall_ms if wall_ms is not None and 0 <= wall_ms <= WALL_MS_MAX else None,
            states=tuple(self._states),
            fields_ignored=0 if session is None else session.counts["fields_ignored"],
            ignored=tuple(self._ignored)[:IGNORED_PATHS_MAX],
            units=tuple(it for it in self._kept if it.kind == "unit"),
            turns=tuple(it for it in self._kept if it.kind == "turn"),
            utterances=tuple(self._utterances.values()),
            absences=tuple(self.absences.found),
            said=tuple(self.user_words),
            calls=tuple(self.calls.found.values()),
            end=attrs.evolve(self.end, reason=self.end.reason or ended),
            diverged_seq=divergence.seq if divergence is not None else None,
            **own,
        )


_LISTS: Final = ("shortened", "drops", "moves", "playback", "errors", "marks")
_NUMBERS: Final = ("duration_ns", "frames_received", "frames_sent", "records", "damage_count")
"""The fields of an inspection that are the story's own."""
