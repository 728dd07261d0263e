"""Simpler events: without sound, pictures, words and numbers that a failure may not need.

A client's frame keeps its fields: sound becomes silence of the same length, because units are made
from it, and words are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs

from protocol.values import events as ev

from ..redact.content import Kind, Policy, Tally, hide_picture, mute
from ..redact.frames import FrameEditor
from ..redact.redaction import without_media
from ..story.questions import ANSWERS

Step = Callable[[ev.Event], ev.Event]

_FILES: Final[frozenset[Kind]] = frozenset({"audio", "video", "image", "voice"})
_WORDS: Final[frozenset[Kind]] = frozenset({"text", "prompt"})
_RESULTS: Final[Mapping[type, str]] = {
    ev.BackendOpened: "opened",
    **{answer: path.partition(".")[0] for answer, (_, path) in ANSWERS.items() if "." in path},
}
"""The field of a model's result, by event."""
_NUMBERS: Final = ("decided_ids", "fed_ids", "token_ids", "codec_ids")
_TRACES: Final = ("input_hash", "logits_hash", "margin", "costs")


def _frame_step(kinds: frozenset[Kind], *, is_shorter: bool = False) -> Step:
    def step(event: ev.Event) -> ev.Event:
        if not isinstance(event, ev.FrameReceived):
            return event
        editor = FrameEditor(policy=Policy(kinds=kinds), tally=Tally(), is_shorter=is_shorter)
        return attrs.evolve(event, frame=editor.edit(event.frame, event.at_ns))

    return step


def _result_step(*names: str) -> Step:
    """Give some fields of a model's result their defaults, or empty values."""

    def step(event: ev.Event) -> ev.Event:
        where = _RESULTS.get(type(event))
        if where is None:
            return event
        made: Any = getattr(event, where)
        fields = {field.name: field for field in attrs.fields(type(made))}
        empty = {
            name: type(getattr(made, name))()
            if fields[name].default is attrs.NOTHING
            else fields[name].default
            for name in names
            if name in fields
        }
        return attrs.evolve(event, **{where: attrs.evolve(made, **empty)})

    return step


def _silence(event: ev.Event) -> ev.Event:
    if isinstance(event, ev.MediaDecoded):
        return without_media(event, lambda jpeg: hide_picture(jpeg, "remove"))
    where = _RESULTS.get(type(event))
    made: Any = None if where is None else getattr(event, where)
    if where is None or not getattr(made, "pcm", b""):
        return event
    return attrs.evolve(event, **{where: attrs.evolve(made, pcm=mute(made.pcm))})


STEPS: Final[tuple[Step, ...]] = (
    _frame_step(_FILES),
    _silence,
    _result_step("pcm"),
    _result_step(*_NUMBERS),
    _result_step(*_TRACES),
    _frame_step(_WORDS, is_shorter=True),
    _result_step("text"),
)
"""In the order of the search: the largest savings first."""
