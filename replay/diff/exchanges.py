"""A log as a stream of exchanges: what was asked of the model, and what came of it.

An exchange is a unit, a turn of chat, or a second of a transcription; all are told in the same
terms, so that they are compared and shown alike. Rules: what was recorded is told, no machine is
stepped; damage is counted and passed by; one exchange is held at a time.

It compares nothing: see `compare`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal

import attrs

from protocol import events as ev
from protocol.model import Opened, UnitResult
from protocol.turn import TurnChunk
from recorder.mapping import MappingError, event_of
from recorder.records import Fields, Record, Value
from recorder.scan import Damage

from ..inspection import Outcome, TurnOutcome
from ..words import shortened_in

UNANSWERED: Final = frozenset({"pending", "failed", "context_full"})
ExchangeKind = Literal["unit", "turn", "chunk"]
READ_KINDS: Final = frozenset({"prepare", "unit", "finalize", "turn", "chunk", "event"})
"""Records whose events are read; what clients sent is not, for it is long."""


_BEGINNINGS: Final[Mapping[str, ExchangeKind]] = {
    "StartUnit": "unit",
    "StartTurn": "turn",
    "RunChunk": "chunk",
}
"""By the effect that an exchange begins with; the field that it is named by has what was asked."""


@attrs.frozen(kw_only=True)
class Exchange:
    """One unit, one turn of chat, or one chunk of a transcription.

    Attributes:
        kind: which of them.
        index: counts the session's; of chunks, those of all utterances.
        started_ns: when the model was asked, on the session's clock.
        done_ns: when its result or failure came; None where neither did.
        outcome: what became of it.
        forced: the unit had to listen.
        input_hash: of all that the model took in.
        input_tokens: of a turn's conversation; 0 for a unit.
        vision_slices: image slices fed; 0 for a turn.
        vision_tokens: likewise, vision embeddings.
        decided_ids: token ids.
        fed_ids: token ids; of a turn those of its prefill.
        codec_ids: speech codes.
        kv_added: tokens in the KV cache after a unit that were not there after the one before it,
            or after the opening; for a turn, all of them.
        generated_tokens: of a turn; 0 for a unit.
        logits_hash: of the first token's logits.
        text: what was said, also where it was withheld.
        streamed: a turn's text as its pieces told it; empty for a unit.
        pcm: likewise; float32 LE, 24 kHz mono.
        end_of_turn: the model's turn ends with this unit.
        cut: where it was interrupted, as `stage step`; empty where it was not.
        finalized_ids: token ids fed after a unit; None where it was not finalized.
        finalized_kv_added: what that added to the KV cache, or took from it; None likewise.
    """

    kind: ExchangeKind
    index: int
    started_ns: int
    done_ns: int | None = None
    outcome: Outcome | TurnOutcome | Literal["heard"] = "pending"
    forced: bool = False
    input_hash: str = ""
    input_tokens: int = 0
    vision_slices: int = 0
    vision_tokens: int = 0
    decided_ids: tuple[int, ...] = ()
    fed_ids: tuple[int, ...] = ()
    codec_ids: tuple[int, ...] = ()
    kv_added: int = 0
    generated_tokens: int = 0
    logits_hash: str = ""
    text: str = ""
    streamed: str = ""
    pcm: bytes = b""
    end_of_turn: bool = False
    cut: str = ""
    finalized_ids: tuple[int, ...] | None = None
    finalized_kv_added: int | None = None

    @property
    def is_answered(self) -> bool:
        """Whether the model made something of it."""
        return self.outcome not in UNANSWERED

    @property
    def took_ns(self) -> int | None:
        """From the question to the answer; None where there is none."""
        return None if self.done_ns is None else self.done_ns - self.started_ns


class Story:
    """One log, exchange by exchange; iterate it once.

    Args:
        items: its records in order, and its damage.

    Attributes:
        connected: its first event; None before that was read.
        asked: what the model was opened with, as its record tells; empty where it was not.
        opened: what the model made of that.
        drops: seconds of input lost so far.
        shortened: refused messages that are kept shortened, so far.
        shortened_bytes: of all of them, as they came.
        span_ns: the session's time so far.
        end_reason: why the session ended; None where its log has no end.
        damage_count: damage passed by so far.
    """

    def __init__(self, items: Iterable[Record | Damage]) -> None:
        self.connected: ev.ConnectionOpened | None = None
        self.asked: Mapping[str, Value] = {}
        self.opened: Opened | None = None
        self.drops = 0
        self.shortened = self.shortened_bytes = 0
        self.span_ns = 0
        self.end_reason: str | None = None
        self.damage_count = 0
        self._items: Final = items
        self._current: Exchange | None = None
        self._is_over = False
        self._kv_length = 0
        self._chunks = 0
        self._chunk: tuple[Value, Value] = (None, None)

    def __iter__(self) -> Iterator[Exchange]:
        """Yield each exchange as soon as nothing more can become of it."""
        for item in self._items:
            if isinstance(item, Damage):
                self.damage_count += 1
                continue
            self.span_ns = max(self.span_ns, item.at_ns)
            begun = self._begin(item) if item.kind == "effect" else None
            if begun is not None:
                if self._current is not None:
                    yield self._current
                self._current = begun
            elif item.kind == "effect":
                self._take_effect(item.fields)
            elif (short := shortened_in(item)) is not None:
                self.shortened += 1
                self.shortened_bytes += short.size_bytes
            elif item.kind in READ_KINDS:
                self._take_event(item)
            elif item.kind == "fin":
                reason = item.fields.get("reason")
                self.end_reason = reason if isinstance(reason, str) else None
        if self._current is not None:
            yield self._current

    def _begin(self, record: Record) -> Exchange | None:
        """Read what begins with an effect, if something does."""
        name = record.fields.get("type")
        kind = _BEGINNINGS.get(name) if isinstance(name, str) else None
        asked = record.fields.get(kind) if kind is not None else None
        if kind is None or not isinstance(asked, Mapping):
            return None
        index = asked.get("index")
        if not isinstance(index, int):
            return None
        if kind == "chunk":
            index, self._chunks = self._chunks, self._chunks + 1
            self._chunk = (asked.get("utterance"), asked.get("index"))
        forced = asked.get("force_listen") is True
        return Exchange(kind=kind, index=index, started_ns=record.at_ns, forced=forced)

    def _take_effect(self, fields: Fields) -> None:
        match fields.get("type"):
            case "OpenBackend":
                opening = fields.get("opening")
                self.asked = opening if isinstance(opening, Mapping) else {}
            case "StartFinalize" if fields.get("interrupted") is True:
                self._change("unit", fields.get("index"), outcome="withheld")
            case "DropUnit":
                self.drops += 1
            case "Close":
                self._is_over = True

    def _take_event(self, record: Record) -> None:
        try:
            event = event_of(record.fields, record.at_ns)
        except MappingError:
            return
        at_ns = record.at_ns
        match event:
            case ev.ConnectionOpened():
                self.connected = event
            case ev.BackendOpened(opened=opened):
                self.opened, self._kv_length = opened, opened.prompt_length
            case ev.PeerGone() | ev.SendFailed():
                self._is_over = True
            case ev.UnitDone(result=result):
                self._change("unit", result.index, done_ns=at_ns, **self._made(result))
            case ev.UnitFailed(index=index, context_full=full):
                outcome = "context_full" if full else "failed"
                self._change("unit", index, done_ns=at_ns, outcome=outcome)
            case ev.ChunkDone() | ev.ChunkFailed():
                self._take_chunk(event)
            case ev.FinalizeDone(finalized=done):
                added = done.kv_length - self._kv_length
                self._change(
                    "unit", done.index, finalized_ids=done.fed_ids, finalized_kv_added=added
                )
            case _:
                self._take_turn(event)

    def _take_chunk(self, event: ev.ChunkDone | ev.ChunkFailed) -> None:
        """Take what was written of the chunk under way; what concerns another is stale."""
        at_ns, number = event.at_ns, self._chunks - 1
        if isinstance(event, ev.ChunkFailed):
            if (event.utterance, event.index) == self._chunk:
                outcome = "context_full" if event.context_full else "failed"
                self._change("chunk", number, done_ns=at_ns, outcome=outcome)
            return
        result = event.result
        if (result.utterance, result.index) == self._chunk:
            before = self._kv_length if result.index else 0
            self._kv_length = result.kv_length
            self._change(
                "chunk",
                number,
                done_ns=at_ns,
                outcome="heard",
                input_hash=result.input_hash,
                decided_ids=result.token_ids,
                fed_ids=result.fed_ids,
                kv_added=result.kv_length - before,
                text=result.text,
            )

    def _take_turn(self, event: ev.Event) -> None:
        match event:
            case ev.TurnPrefilled(prefill=made):
                names = ("input_hash", "fed_ids", "input_tokens")
                self._change("turn", made.index, **{name: getattr(made, name) for name in names})
            case ev.TurnProgress(chunk=chunk):
                self._add(chunk)
            case ev.TurnDone(at_ns=at_ns, result=result) if self._current is not None:
                self._change(
                    "turn",
                    result.index,
                    done_ns=at_ns,
                    outcome=result.reason,
                    text=result.text,
                    pcm=self._current.pcm + result.pcm,
                    codec_ids=self._current.codec_ids + result.codec_ids,
                    kv_added=result.kv_length,
                    generated_tokens=result.generated_tokens,
                    logits_hash=result.logits_hash,
                    cut="" if result.cut is None else f"token {result.cut}",
                )
            case ev.TurnFailed(at_ns=at_ns, index=index, context_full=full):
                outcome = "context_full" if full else "failed"
                self._change("turn", index, done_ns=at_ns, outcome=outcome)

    def _add(self, chunk: TurnChunk) -> None:
        turn = self._current
        if turn is not None:
            self._change(
                "turn",
                chunk.index,
                text=turn.text + chunk.text,
                streamed=turn.streamed + chunk.text,
                pcm=turn.pcm + chunk.pcm,
                decided_ids=turn.decided_ids + chunk.token_ids,
                codec_ids=turn.codec_ids + chunk.codec_ids,
            )

    def _made(self, result: UnitResult) -> dict[str, Any]:
        outcome = "listen" if result.is_listen else "speech"
        if self._is_over:
            outcome = "ended"
        elif result.cut is not None:
            outcome = "withheld"
        names = (
            *("input_hash", "vision_slices", "vision_tokens", "decided_ids", "fed_ids"),
            *("codec_ids", "logits_hash", "text", "pcm"),
        )
        kv_added, self._kv_length = result.kv_length - self._kv_length, result.kv_length
        return {
            **{name: getattr(result, name) for name in names},
            "kv_added": kv_added,
            "outcome": outcome,
            "end_of_turn": result.end_of_turn,
            "cut": "" if result.cut is None else f"{result.cut.stage} {result.cut.step}",
        }

    def _change(self, kind: str, index: Value, **changes: Any) -> None:
        """Note what became of the exchange under way; what concerns another is stale."""
        current = self._current
        if current is not None and (current.kind, current.index) == (kind, index):
            self._current = attrs.evolve(current, **changes)
