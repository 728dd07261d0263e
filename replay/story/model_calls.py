"""The questions to the model, and their results.

A model call is a unit, a turn of chat, or a second of a transcription, in the same terms for all,
so that they are compared and shown in one way. Values are those recorded; one is held at a time.

A question is an effect, and its answer an event: both are named by a call and its number, which is
a unit's or a turn's index, a chunk's in its utterance, or the lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any, Final, Literal, TypeVar

import attrs

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values import model
from protocol.values.requests import Part, TextPart
from recorder.format.format import Record, Value

CallName = Literal["open", "unit", "finalize", "rollback", "turn", "chunk", "rebuild", "release"]
Call = tuple[CallName, int]
Answer = TypeVar("Answer", bound=ev.Event)

QUESTIONS: Final[Mapping[type, tuple[CallName, str]]] = {
    ef.OpenBackend: ("open", "lease"),
    ef.StartUnit: ("unit", "unit.index"),
    ef.StartFinalize: ("finalize", "index"),
    ef.Rollback: ("rollback", "index"),
    ef.StartTurn: ("turn", "turn.index"),
    ef.RunChunk: ("chunk", "chunk.index"),
    ef.Rebuild: ("rebuild", "lease"),
    ef.Release: ("release", "lease"),
}
"""By the effect: the call, and the field of its number."""
ANSWERS: Final[Mapping[type, tuple[CallName, str]]] = {
    ev.BackendOpened: ("open", "lease"),
    ev.BackendOpenFailed: ("open", "lease"),
    ev.UnitDone: ("unit", "result.index"),
    ev.UnitFailed: ("unit", "index"),
    ev.FinalizeDone: ("finalize", "finalized.index"),
    ev.FinalizeFailed: ("finalize", "index"),
    ev.RollbackDone: ("rollback", "index"),
    ev.RollbackFailed: ("rollback", "index"),
    ev.TurnPrefilled: ("turn", "prefill.index"),
    ev.TurnProgress: ("turn", "chunk.index"),
    ev.TurnDone: ("turn", "result.index"),
    ev.TurnFailed: ("turn", "index"),
    ev.ChunkDone: ("chunk", "result.index"),
    ev.ChunkFailed: ("chunk", "index"),
    ev.Rebuilt: ("rebuild", "lease"),
    ev.RebuildFailed: ("rebuild", "lease"),
    ev.BackendReleased: ("release", "lease"),
}
"""By the event: the call, and the field of its number. A turn is answered in pieces."""


def asked(effect: ef.Effect) -> Call | None:
    """Name the call that an effect asks for; None if it asks the model for nothing."""
    return _named(effect, QUESTIONS)


def answered(event: ev.Event) -> Call | None:
    """Name the model's call that an event answers, if any."""
    return _named(event, ANSWERS)


def renumbered(event: Answer, number: int, **also: int) -> Answer:
    """Make an answer that of question `number`; `also` sets fields next to the number."""
    where, _, inner = ANSWERS[type(event)][1].rpartition(".")
    changes: dict[str, Any] = {inner: number, **also}
    if where:
        changes = {where: attrs.evolve(getattr(event, where), **changes)}
    return attrs.evolve(event, **changes)


def _named(fact: object, table: Mapping[type, tuple[CallName, str]]) -> Call | None:
    if type(fact) not in table:
        return None
    name, path = table[type(fact)]
    number: Any = reduce(getattr, path.split("."), fact)
    return name, int(number)


ModelCallKind = Literal["unit", "turn", "chunk"]
Failure = Literal["failed", "context_full"]
Outcome = (
    Literal["pending", "lost", "listen", "speech", "withheld", "ended", "heard"]
    | model.StopReason
    | Failure
)
"""The result of a model call.

`pending`: no result yet, or none came; `lost`: its worker was lost; `withheld`: a unit spoke, and
was interrupted (B6); `ended`: the session was over when its result came; `heard`: a second was
transcribed; `failed` and `context_full` are the model's. The others are those of turns.
"""
UNANSWERED: Final = frozenset({"pending", "lost", "failed", "context_full"})
OUTPUTS: Final = frozenset({"pcm", "decided_ids", "fed_ids", "codec_ids", "finalized_ids"})
"""Large outputs, which a caller that keeps many model calls leaves out."""

_START_EFFECTS: Final[Mapping[object, ModelCallKind]] = {
    "StartUnit": "unit",
    "StartTurn": "turn",
    "StartChunk": "chunk",
}
"""By a model call's first effect, whose field named by the kind holds the question."""


@attrs.frozen(kw_only=True)
class ModelCall:
    """One unit, one turn of chat, or one chunk of a transcription.

    Attributes:
        index: counts those of the session; of chunks, those of all utterances.
        seq: the record of its question.
        started_ns: when the model was asked, on the session's clock.
        prefilled_ns: when a turn's conversation was in the model, if recorded.
        done_ns: when its result or failure came, if it did.
        forced: the unit had to listen.
        frames: video frames that a unit saw.
        place: of a chunk: the utterance, and the chunk's index in it.
        is_last: of a chunk: the utterance ends with it.
        input_hash: of all inputs of the model.
        input_tokens: of a turn's conversation.
        vision_slices: image slices fed; 0 for a turn, as `vision_tokens` (embeddings).
        fed_ids: of a turn those of its prefill.
        codec_ids: speech codes.
        kv_length: tokens in the KV cache after it.
        kv_added: tokens new in the KV cache since the unit before or the opening; for a turn, all.
        generated_tokens: of a turn; 0 for a unit.
        logits_hash: of the first token's logits.
        text: the words spoken, even if withheld.
        streamed: a turn's text from its pieces; empty for a unit.
        pcm: float32 LE, 24 kHz mono.
        stopped: the step before which it was interrupted; of a turn, the token.
        chunk: the result of a chunk.
        calls: tools that a turn's answer calls.
        finalized_ids: token ids fed after a unit; None if it was not finalized.
        finalized_kv_added: tokens added by that to the KV cache, or removed.
    """

    kind: ModelCallKind
    index: int
    seq: int
    started_ns: int
    prefilled_ns: int | None = None
    done_ns: int | None = None
    finalized_ns: int | None = None
    outcome: Outcome = "pending"
    forced: bool = False
    frames: int = 0
    place: tuple[int, int] = (0, 0)
    is_last: bool = False
    input_hash: str = ""
    input_tokens: int | None = None
    vision_slices: int = 0
    vision_tokens: int = 0
    decided_ids: tuple[int, ...] = ()
    fed_ids: tuple[int, ...] = ()
    codec_ids: tuple[int, ...] = ()
    kv_length: int | None = None
    kv_added: int = 0
    generated_tokens: int = 0
    logits_hash: str = ""
    text: str = ""
    streamed: str = ""
    pcm: bytes = b""
    audio_ms: int = 0
    end_of_turn: bool = False
    stopped: model.Cut | int | None = None
    costs: model.Costs | None = None
    chunk: model.ChunkResult | None = None
    calls: tuple[model.ToolCall, ...] = ()
    finalized_ids: tuple[int, ...] | None = None
    finalized_kv_added: int | None = None

    @property
    def is_answered(self) -> bool:
        """Whether the model answered."""
        return self.outcome not in UNANSWERED

    @property
    def took_ns(self) -> int | None:
        """From the question to the answer, if one came."""
        return None if self.done_ns is None else self.done_ns - self.started_ns

    @property
    def cut(self) -> str:
        """Where it was interrupted, as `stage step`; empty if it was not."""
        if isinstance(self.stopped, int):
            return f"token {self.stopped}"
        return "" if self.stopped is None else f"{self.stopped.stage} {self.stopped.step}"


class ModelCallStory:
    """Follows a session's model calls, without fields left out; each begins when the last ends."""

    def __init__(self, leaves_out: frozenset[str] = frozenset()) -> None:
        self.current: ModelCall | None = None
        self._leaves_out: Final = leaves_out
        self._kv_length = self._chunks = 0

    def begin(self, record: Record) -> ModelCall | None:
        """Take an effect; return the model call before, if this one begins another."""
        kind = _START_EFFECTS.get(record.fields.get("type"))
        asked = record.fields.get(kind) if kind is not None else None
        index = asked.get("index") if isinstance(asked, Mapping) else None
        if kind is None or not isinstance(asked, Mapping) or not isinstance(index, int):
            return None
        frames, place = asked.get("frames"), (0, 0)
        if kind == "chunk":
            if not isinstance(utterance := asked.get("utterance"), int):
                return None
            place, index, self._chunks = (utterance, index), self._chunks, self._chunks + 1
        last, self.current = (
            self.current,
            ModelCall(
                kind=kind,
                index=index,
                seq=record.seq,
                started_ns=record.at_ns,
                forced=asked.get("force_listen") is True,
                frames=len(frames) if isinstance(frames, list | tuple) else 0,
                place=place,
                is_last=asked.get("is_last") is True,
            ),
        )
        return last

    def withhold(self, index: Value) -> None:
        """Note that nothing was sent of a unit, which was interrupted."""
        self._change("unit", index, outcome="withheld")

    def take(self, event: ev.Event, *, is_over: bool) -> None:
        """Take any event, stale for an old model call; `is_over`: the session had ended before."""
        at_ns = event.at_ns
        match event:
            case ev.BackendOpened(opened=opened):
                self._kv_length = opened.prompt_length
            case ev.UnitDone(result=result):
                self._take_unit(at_ns, result, is_over=is_over)
            case ev.UnitFailed(index=index, context_full=is_full):
                self._fail("unit", index, at_ns, is_full=is_full)
            case ev.FinalizeDone(finalized=done):
                added = done.kv_length - self._kv_length
                facts = {"finalized_ids": done.fed_ids, "finalized_kv_added": added}
                self._change("unit", done.index, finalized_ns=at_ns, **facts)
            case ev.BackendLost() if self.current is not None and self.current.done_ns is None:
                current = self.current
                self._change(current.kind, current.index, outcome="lost")
            case ev.ChunkDone(result=result):
                self._take_chunk(at_ns, result)
            case ev.ChunkFailed(utterance=utterance, index=index, context_full=is_full):
                self._fail("chunk", self._chunk(utterance, index), at_ns, is_full=is_full)
            case _:
                self._take_turn(event)

    def _take_unit(self, at_ns: int, result: model.UnitResult, *, is_over: bool) -> None:
        outcome = "listen" if result.is_listen else "speech"
        outcome = "ended" if is_over else outcome if result.cut is None else "withheld"
        same = (
            *("input_hash", "vision_slices", "vision_tokens", "decided_ids", "fed_ids"),
            *("codec_ids", "logits_hash", "text", "pcm", "end_of_turn", "kv_length", "costs"),
        )
        added, self._kv_length = result.kv_length - self._kv_length, result.kv_length
        facts = {name: getattr(result, name) for name in same}
        facts |= {"stopped": result.cut, "audio_ms": audio_ms(result.pcm), "kv_added": added}
        self._change("unit", result.index, done_ns=at_ns, outcome=outcome, **facts)

    def _chunk(self, utterance: int, index: int) -> int | None:
        """The index of an utterance's chunk; None if it is not the current one."""
        current = self.current
        is_it = current is not None and current.place == (utterance, index)
        return current.index if is_it and current is not None else None

    def _take_chunk(self, at_ns: int, result: model.ChunkResult) -> None:
        index = self._chunk(result.utterance, result.index)
        if index is None:
            return
        before, self._kv_length = self._kv_length if result.index else 0, result.kv_length
        same = ("input_hash", "fed_ids", "text")
        facts: dict[str, Any] = {name: getattr(result, name) for name in same}
        facts |= {"decided_ids": result.token_ids, "kv_added": result.kv_length - before}
        self._change("chunk", index, done_ns=at_ns, outcome="heard", chunk=result, **facts)

    def _take_turn(self, event: ev.Event) -> None:
        match event:
            case ev.TurnPrefilled(at_ns=at_ns, prefill=made):
                names = ("input_hash", "fed_ids", "input_tokens")
                facts = {name: getattr(made, name) for name in names}
                self._change("turn", made.index, prefilled_ns=at_ns, **facts)
            case ev.TurnProgress(chunk=chunk) if self.current is not None:
                ids = chunk.token_ids
                more = self._added(chunk, text=chunk.text, streamed=chunk.text, decided_ids=ids)
                count = self.current.generated_tokens + len(ids)
                self._change("turn", chunk.index, generated_tokens=count, **more)
            case ev.TurnDone(at_ns=at_ns, result=result) if self.current is not None:
                same = ("text", "kv_length", "generated_tokens", "logits_hash", "costs", "calls")
                facts = self._added(result) | {name: getattr(result, name) for name in same}
                facts |= {"outcome": result.reason, "stopped": result.cut}
                facts |= {"done_ns": at_ns, "kv_added": result.kv_length}
                self._change("turn", result.index, **facts)
            case ev.TurnFailed(at_ns=at_ns, index=index, context_full=is_full):
                self._fail("turn", index, at_ns, is_full=is_full)

    def _added(self, made: model.TurnChunk | model.TurnResult, **more: Any) -> dict[str, Any]:
        turn = self.current
        assert turn is not None
        more |= {"pcm": made.pcm, "codec_ids": made.codec_ids, "audio_ms": audio_ms(made.pcm)}
        return {name: getattr(turn, name) + value for name, value in more.items()}

    def _fail(self, kind: ModelCallKind, index: int | None, at_ns: int, *, is_full: bool) -> None:
        self._change(kind, index, done_ns=at_ns, outcome="context_full" if is_full else "failed")

    def _change(self, kind: ModelCallKind, index: Value, **changes: Any) -> None:
        current = self.current
        if current is not None and (current.kind, current.index) == (kind, index):
            kept = {n: value for n, value in changes.items() if n not in self._leaves_out}
            self.current = attrs.evolve(current, **kept)


def audio_ms(pcm: bytes) -> int:
    """Return the length of the model's sound."""
    return len(pcm) // model.SAMPLE_BYTES * 1000 // model.OUTPUT_RATE_HZ


def spoken_ms(call: ModelCall | None) -> int:
    """Return the length of the sound that a client got of a model call so far."""
    if call is None or call.outcome in ("withheld", "ended"):
        return 0
    return call.audio_ms


def calls_text(calls: Iterable[model.ToolCall]) -> str:
    """Write calls in one line, such as `[calls clock {}]`; empty without any."""
    return " ".join(f"[calls {call.name} {call.arguments}]" for call in calls)


def asked_texts(content: Iterable[Part]) -> list[str]:
    """The texts of a question, and in its place a tool's result, such as `[returns 10:30]`."""
    return [
        part.text if isinstance(part, TextPart) else f"[returns {part.output}]"
        for part in content
        if isinstance(part, TextPart | model.ToolResult)
    ]
