"""The utterances of a transcription, told from its log: what `inspect` collects of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from protocol import events as ev
from protocol.transcript import ChunkResult
from recorder.records import Value

from .inspection import UtteranceStory


class Utterances:
    """Collects utterances, chunk by chunk."""

    def __init__(self) -> None:
        self._told: Final[dict[int, UtteranceStory]] = {}
        self._last: tuple[int, int] | None = None

    @property
    def told(self) -> tuple[UtteranceStory, ...]:
        """Those that there are, in order."""
        return tuple(self._told.values())

    def note_start(self, at_ns: int, chunk: Value) -> None:
        """Take note of a chunk that the machine asks for, as its record has it."""
        if not isinstance(chunk, Mapping):
            return
        utterance, index, is_last = (chunk.get(name) for name in ("utterance", "index", "is_last"))
        if not isinstance(utterance, int) or not isinstance(index, int):
            return
        self._last = (utterance, index) if is_last is True else None
        self._told.setdefault(utterance, UtteranceStory(index=utterance, started_ns=at_ns))

    def note_event(self, event: ev.Event) -> None:
        """Take note of what the model wrote, or that it failed."""
        match event:
            case ev.ChunkDone(at_ns=at_ns, result=result) if result.utterance in self._told:
                self._heard(at_ns, result)
            case ev.ChunkFailed(at_ns=at_ns, utterance=index, context_full=is_full):
                self._change(index, done_ns=at_ns, outcome="context_full" if is_full else "failed")

    def _heard(self, at_ns: int, result: ChunkResult) -> None:
        story = self._told[result.utterance]
        self._change(
            result.utterance,
            done_ns=at_ns,
            chunks=story.chunks + 1,
            text=story.text + result.text,
            prompt_tokens=story.prompt_tokens + result.prompt_tokens,
            completion_tokens=story.completion_tokens + result.generated_tokens,
            kv_length=result.kv_length,
            longest_us=max(story.longest_us, result.costs.wall_us),
        )
        if self._last == (result.utterance, result.index):
            self._change(result.utterance, outcome="done")

    def _change(self, index: int, **changes: Any) -> None:
        story = self._told.get(index)
        if story is not None:
            self._told[index] = attrs.evolve(story, **changes)
