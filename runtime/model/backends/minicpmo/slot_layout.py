"""The layout of a unit in slots, in which a duplex model calls tools: tokens, grammar, prompt.

    <unit> [user_video] [user_audio] [input_event] ai_spoken ai_non_spoken </unit>

A checkpoint has this layout if its tokenizer has the 24 tokens of `NEW`, with consecutive ids; it
is then that of every duplex session, or of those with tools (`Policy.always`). The makers' package
lays out training data so (`minicpm-o5-sdk` 0.0.6): no weights of theirs are published yet, and what
their serving code chooses may turn out to differ. Nothing here computes.

*Speech.* A unit listens (`<|listen|>`), or it speaks: `<|speak|>`, text or `<|tts_pad|>`, at the
end of a turn `<|turn_eos|>`, then `<|chunk_eos|>`. A turn ends before the model listens again.

*The silent part* is `<|no_action|>`, or spans one behind the other (thoughts, calls, text) and
`<|non_spoken_eos|>`. Where the budget ends it, `<|non_spoken_budget_reached|>` is fed, and an open
span goes on in the next unit with its next token. Ids that the grammar does not have at a place
are never decided there.

*Text* from outside is encoded by a tokenizer without control tokens, so it never becomes one.

The words of the prompt around the list of tools are the makers': they are read from their package,
by its public names, or from `slots.json` in the checkpoint's folder, which also has the values of
`Policy`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs

from protocol.values.limits import SILENT_CHARS_MAX
from protocol.values.model import Silent, SilentEnd, Span, SpanKind, Tool, UnitInput

from ....settings.extras import install
from ..base import SILENT_STEPS_MIN
from ..tool_calls import READERS, span_of

# -- tokens and grammar -------------------------------------------------------------------------

NEW: Final = (
    *("<user_video_slot>", "</user_video_slot>", "<user_audio_slot>", "</user_audio_slot>"),
    *("<input_event_slot>", "</input_event_slot>"),
    *("<tool_response_event>", "</tool_response_event>", "<tool_call_id>", "</tool_call_id>"),
    *("<|tool_started|>", "<|event_budget_reached|>", "<|tool_response_streaming|>"),
    *("<standalone_event>", "</standalone_event>", "<ai_spoken_slot>", "</ai_spoken_slot>"),
    *("<ai_non_spoken_slot>", "</ai_non_spoken_slot>", "<|no_action|>", "<|non_spoken_eos|>"),
    *("<|non_spoken_budget_reached|>", "<|non_spoken_hold|>", "<|non_spoken_abort|>"),
)
"""The tokens of the layout, in the order of their ids."""
OLDER: Final = (
    *("<unit>", "</unit>", "<image>", "</image>", "<slice>", "</slice>", "<|listen|>"),
    *("<|speak|>", "<|chunk_eos|>", "<|turn_eos|>", "<|tts_pad|>", "<|im_start|>", "<|im_end|>"),
    *("<|audio_start|>", "<|audio_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>"),
)
"""The tokens that it has from the layout before."""

TEXT: Final = "text"
MEDIA: Final = "media"
"""Names of all ordinary ids, and of all embeddings."""

_AFTER_SOUND: Final = {"<input_event_slot>": "events", "<ai_spoken_slot>": "spoken"}
_AFTER_PICTURES: Final = {"<user_audio_slot>": "sound", **_AFTER_SOUND}
_BEGINS: Final = {TEXT: "plain", "<think>": "think", "<tool_call>": "tool"}
_MORE: Final = {
    **_BEGINS,
    "<|non_spoken_eos|>": "silent",
    "<|non_spoken_budget_reached|>": "silent",
}
GRAMMAR: Final[Mapping[str, Mapping[str, str]]] = {
    "start": {"<unit>": "unit"},
    "unit": {"<user_video_slot>": "video", **_AFTER_PICTURES},
    "video": {"<image>": "image", "<slice>": "slice", "</user_video_slot>": "seen"},
    "image": {MEDIA: "image", "</image>": "video"},
    "slice": {MEDIA: "slice", "</slice>": "video"},
    "seen": _AFTER_PICTURES,
    "sound": {MEDIA: "sound", "</user_audio_slot>": "heard"},
    "heard": _AFTER_SOUND,
    "events": {
        "<tool_response_event>": "call",
        "<standalone_event>": "standalone",
        "</input_event_slot>": "noted",
    },
    "call": {"<tool_call_id>": "id"},
    "id": {TEXT: "id", "</tool_call_id>": "answer"},
    "answer": {"<|tool_started|>": "answered", "<tool_response>": "result"},
    "result": {TEXT: "result", "</tool_response>": "answered"},
    "answered": {"</tool_response_event>": "events"},
    "standalone": {TEXT: "standalone", "</standalone_event>": "events"},
    "noted": {"<ai_spoken_slot>": "spoken"},
    "spoken": {"<|listen|>": "said", "<|speak|>": "speaking"},
    "speaking": {
        TEXT: "words",
        "<|tts_pad|>": "last",
        "<|turn_eos|>": "last",
        "<|chunk_eos|>": "said",
    },
    "words": {TEXT: "words", "<|turn_eos|>": "last", "<|chunk_eos|>": "said"},
    "last": {"<|chunk_eos|>": "said"},
    "said": {"</ai_spoken_slot>": "quiet"},
    # Here the place that the silent part of the unit before left comes into its own.
    "quiet": {"<ai_non_spoken_slot>": "first"},
    "first": {**_BEGINS, "<|no_action|>": "silent", "<|non_spoken_eos|>": "silent"},
    "more": _MORE,
    "plain": _MORE,
    "think": {TEXT: "think", "</think>": "more", "<|non_spoken_budget_reached|>": "silent"},
    "tool": {TEXT: "tool", "</tool_call>": "more", "<|non_spoken_budget_reached|>": "silent"},
    "silent": {"</ai_non_spoken_slot>": "closed"},
    "closed": {"</unit>": "start"},
}
"""Place and token to the next place, as the makers' parser has it."""
OPEN: Final[Mapping[str, SpanKind]] = {"plain": "text", "think": "think", "tool": "call"}
"""The places within a span, in which a unit may end and the next begin, and what it is."""
ENDS: Final[Mapping[str, SilentEnd]] = {"<|no_action|>": "no_action", "<|non_spoken_eos|>": "eos"}
"""What ends a silent part, if the model decides it."""
FED: Final = "<|non_spoken_budget_reached|>"
"""What ends it otherwise, and is fed."""


# -- what a checkpoint chooses ------------------------------------------------------------------

FILE: Final = "slots.json"
EVENTS_MAX: Final = 1_024
"""Tokens of all events that a unit feeds: three pages of text; a window leaves room for them."""
TOO_LONG: Final = "error: this is too long"
"""In place of a text that goes beyond."""
BUDGET_MAX: Final = 64
"""Tokens of a unit's silent part: at 15 ms each, a second."""
MAKERS: Final = "minicpm_o5_sdk.tool_serializer"
"""The module of the makers' package that has the words of the prompt."""


_IS_TEXT: Final = attrs.validators.optional(attrs.validators.instance_of(str))


def _budget(value: object) -> tuple[int, ...]:
    budgets = [value] if isinstance(value, int) else value
    if not isinstance(budgets, list | tuple) or not budgets:
        raise ValueError("a budget is a number of tokens, or a list of them")
    if not all(type(each) is int and 1 <= each <= BUDGET_MAX for each in budgets):
        raise ValueError(f"a budget has numbers from 1 to {BUDGET_MAX}")
    return tuple(budgets)


@attrs.frozen(kw_only=True)
class Policy:
    """What a checkpoint may choose, with the makers' defaults.

    Attributes:
        call_form: of a call's text, one of `tool_calls.READERS`.
        listening, speaking: budgets of the silent part in tokens, of the first unit of a phase, of
            its second, and so on; the last one is repeated.
        thinks: False: an empty thought is fed where a silent part begins.
        always: False: a session without tools has the older layout, which the checkpoint knows too.
        before, after: the words around the list of tools; None: those of the makers' package.
    """

    call_form: str = attrs.field(default="minicpm4_xml", validator=attrs.validators.in_(READERS))
    listening: tuple[int, ...] = attrs.field(default=45, converter=_budget)
    speaking: tuple[int, ...] = attrs.field(default=25, converter=_budget)
    thinks: bool = attrs.field(default=True, validator=attrs.validators.instance_of(bool))
    always: bool = attrs.field(default=True, validator=attrs.validators.instance_of(bool))
    before: str | None = attrs.field(default=None, validator=_IS_TEXT)
    after: str | None = attrs.field(default=None, validator=_IS_TEXT)

    @property
    def digest(self) -> str:
        """SHA-256 of all choices, for a model's fingerprint."""
        return hashlib.sha256(json.dumps(attrs.asdict(self)).encode()).hexdigest()


def read_policy(folder: Path) -> Policy:
    """Read a checkpoint's choices, with the words; `ValueError` names what is wrong or missing."""
    path = folder / FILE
    try:
        given = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        policy = Policy(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{FILE}: {error}") from error
    if policy.before is not None and policy.after is not None:
        return policy
    try:
        block = _words_of_makers(policy.call_form)
    except ImportError as error:
        raise ValueError(
            "the tokenizer has the tokens of tools in duplex, but the words of their prompt are "
            f"missing: {install('duplex-tools')}, or write before and after into {FILE}"
        ) from error
    return attrs.evolve(policy, before=block.preamble, after=block.guidelines)


def _words_of_makers(call_form: str) -> Any:
    makers = import_module(MAKERS)
    tools = makers.parse_and_validate_tools([{"type": "function", "function": {"name": "t"}}])
    return makers.get_o5_tool_serializer(call_form).render_tool_system_block(tools)


# -- the layout ---------------------------------------------------------------------------------

Rows = TypeVar("Rows")


@attrs.frozen(kw_only=True)
class SlotLayout:
    """The layout of one checkpoint.

    Attributes:
        ids: of the tokens of `NEW` and `OLDER`, by name.
        encode: ordinary text to ids.
        decode: ids to text.
        control: all ids of the tokenizer that are not text.
    """

    ids: Mapping[str, int]
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    control: frozenset[int]
    policy: Policy
    _names: Mapping[int, str] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        names = {index: name for name, index in self.ids.items()}
        object.__setattr__(self, "_names", names)

    def name(self, index: int) -> str:
        """The name of an id in `GRAMMAR`."""
        return self._names.get(index, TEXT)

    def all_but(self, names: Sequence[str]) -> tuple[int, ...]:
        """The control ids without those of some names."""
        return tuple(sorted(self.control - {self.ids[name] for name in names}))

    def of(self, *names: str) -> tuple[int, ...]:
        """The ids of some names."""
        return tuple(self.ids[name] for name in names)

    # The prompt and the input

    def prompt(
        self, instructions: str, tools: Sequence[Tool], *, has_voice: bool
    ) -> list[tuple[int, ...] | None]:
        """What stands before the first unit: ids, and None where the voice belongs."""
        parts: list[tuple[int, ...] | None] = [self.of("<|im_start|>")]
        parts += [self._text("system\n"), self._text(instructions)]
        if has_voice:
            parts += [self.of("<|audio_start|>"), None, self.of("<|audio_end|>")]
        if tools:
            before, after = self.policy.before or "", self.policy.after or ""
            listed = json.dumps([_definition(tool) for tool in tools], ensure_ascii=False)
            # Each by itself, as the model was trained: no token spans two of them.
            parts += map(self._text, (before, f"<tools>\n{listed}\n</tools>\n", after))
        return [*parts, self.of("<|im_end|>")]

    def _text(self, text: str) -> tuple[int, ...]:
        return tuple(self.encode(text))

    def head(
        self,
        pictures: Sequence[Sequence[Rows]],
        sound: Rows | None,
        inputs: Sequence[UnitInput],
        *,
        is_seen: bool,
    ) -> list[Any]:
        """What a unit feeds before it decides: ids, and media where its embeddings belong.

        `pictures` have their slices, the whole picture first. `is_seen`: the session has pictures.
        """
        parts: list[Any] = [self.of("<unit>")]
        if is_seen:
            parts.append(self.of("<user_video_slot>"))
            for slices in pictures:
                for index, each in enumerate(slices):
                    mark = "slice" if index else "image"
                    parts += [self.of(f"<{mark}>"), each, self.of(f"</{mark}>")]
            parts.append(self.of("</user_video_slot>"))
        if sound is not None:
            parts += [self.of("<user_audio_slot>"), sound, self.of("</user_audio_slot>")]
        return [*parts, (*self.events(inputs), *self.of("<ai_spoken_slot>"))]

    def events(self, inputs: Sequence[UnitInput]) -> tuple[int, ...]:
        """The slot of a unit's events; empty if it has none. Texts without room are an error."""
        if not inputs:
            return ()
        texts = [self._text(each.text) for each in inputs]
        room = EVENTS_MAX - 2 - sum(len(self._event(each, ())) for each in inputs)
        if sum(map(len, texts)) > room:
            texts = self._fitted(texts, room)
        parts = map(self._event, inputs, texts)
        events = [index for part in parts for index in part]
        return (*self.of("<input_event_slot>"), *events, *self.of("</input_event_slot>"))

    def _fitted(self, texts: Sequence[tuple[int, ...]], room: int) -> list[tuple[int, ...]]:
        """Put an error in the place of the texts that do not fit; the first ones go first."""
        refused = self._text(TOO_LONG)
        room -= sum(min(len(text), len(refused)) for text in texts)
        fitted = []
        for text in texts:
            more = max(0, len(text) - len(refused))
            fits = more <= max(room, 0)
            room -= more * fits
            fitted.append(text if fits else refused)
        return fitted

    def _event(self, event: UnitInput, text: tuple[int, ...]) -> tuple[int, ...]:
        if event.kind == "text":
            return (*self.of("<standalone_event>"), *text, *self.of("</standalone_event>"))
        body = self.of("<|tool_started|>")
        if event.kind == "result":
            body = (*self.of("<tool_response>"), *text, *self.of("</tool_response>"))
        call = (*self.of("<tool_call_id>"), *self._text(event.call), *self.of("</tool_call_id>"))
        marks = self.of("<tool_response_event>", "</tool_response_event>")
        return (marks[0], *call, *body, marks[1])

    @property
    def silent_max(self) -> int:
        """The most that any silent part decides."""
        return max(*self.policy.listening, *self.policy.speaking)

    def rows_max(self, inputs: Sequence[UnitInput], *, is_seen: bool) -> int:
        """The most rows of a unit that the older layout does not have."""
        slots = 2 * is_seen + len(("sound", "/sound", "spoken", "/spoken", "silent", "/silent"))
        return slots + len(self.events(inputs)) + len(("think", "/think")) + self.silent_max + 1

    # Speech

    def speech(self, step: int, *, is_open: bool) -> tuple[str, ...]:
        """The control tokens that a step of speech may decide; a turn `is_open` since before."""
        if step == 0:
            return ("<|speak|>",) if is_open else ("<|listen|>", "<|speak|>")
        if step == 1:
            return ("<|tts_pad|>", "<|turn_eos|>") if is_open else ()
        return ("<|turn_eos|>", "<|chunk_eos|>")

    @property
    def end_of_turn(self) -> tuple[int, ...]:
        """What a unit that must not speak feeds before its terminator, to end an open turn."""
        return self.of("<|speak|>", "<|turn_eos|>")


def _definition(tool: Tool) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = json.loads(tool.parameters or "{}")
    return {"type": "function", "function": function}


# -- the silent part ----------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class SilentState:
    """Where the silent part of the last unit left off.

    Attributes:
        place: in `GRAMMAR`, at which the next one begins.
        held: text ids of the open span.
        is_fresh: the last one was ended by the model, or there was none.
        speaks: the last unit spoke.
        count: units of this phase, of speaking or listening.
    """

    place: str = "first"
    held: tuple[int, ...] = ()
    is_fresh: bool = True
    speaks: bool = False
    count: int = 0


HELD_MAX: Final = SILENT_CHARS_MAX
"""Ids of an open span that are kept: a token has a character or more, but for rare ones."""


@attrs.define
class SilentRun:
    """The silent part of one unit, in progress.

    Attributes:
        silent_state: as the unit before left it.
        tools: those that may be called.
        speaks: this unit speaks.
        decided: so far.
    """

    slots: SlotLayout
    silent_state: SilentState
    tools: Sequence[Tool]
    speaks: bool
    decided: list[int] = attrs.field(factory=list)
    end: SilentEnd | None = None
    _place: str = ""
    _held: list[int] = attrs.field(factory=list)
    _spans: list[Span] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self._place, self._held = self.silent_state.place, list(self.silent_state.held)
        if self._has_pair:
            self._place = "more"

    @property
    def _has_pair(self) -> bool:
        return self.silent_state.is_fresh and not self.slots.policy.thinks

    @property
    def _count(self) -> int:
        return self.silent_state.count + 1 if self.speaks == self.silent_state.speaks else 1

    @property
    def budget(self) -> int:
        """Tokens that may be decided."""
        policy = self.slots.policy
        budgets = policy.speaking if self.speaks else policy.listening
        return budgets[min(self._count, len(budgets)) - 1]

    def opening(self) -> tuple[int, ...]:
        """What is fed between the speech and the first decision."""
        pair = ("<think>", "</think>") if self._has_pair else ()
        return self.slots.of("</ai_spoken_slot>", "<ai_non_spoken_slot>", *pair)

    def forbidden(self) -> tuple[int, ...]:
        """The ids that the next step may not decide."""
        allowed = [name for name in GRAMMAR[self._place] if name not in (TEXT, FED)]
        if self._place == "first":  # What ends an idle unit, and one whose budget ended before.
            allowed.remove("<|non_spoken_eos|>" if self.silent_state.is_fresh else "<|no_action|>")
        return self.slots.all_but(allowed)

    def take(self, index: int) -> None:
        """Take the next decision; one that the grammar does not have here is a `ValueError`."""
        name, place = self.slots.name(index), self._place
        is_unknown = index in self.slots.control and name == TEXT
        if is_unknown or name not in GRAMMAR[place]:
            raise ValueError(f"{name} is decided where it may not stand")
        self.decided.append(index)
        self._place = GRAMMAR[place][name]
        if name == TEXT:
            if len(self._held) < HELD_MAX:
                self._held.append(index)
        elif place in OPEN:
            self._close(OPEN[place])
        self.end = ENDS.get(name)
        if self.end is None and len(self.decided) == self.budget:
            self.end = "budget"

    def _close(self, kind: SpanKind) -> None:
        text = self.slots.decode(self._held)
        self._held.clear()
        if kind == "call":
            self._spans.append(span_of(text, self.tools, READERS[self.slots.policy.call_form]))
        else:
            self._spans.append(Span(kind=kind, text=text[:SILENT_CHARS_MAX]))

    def cut(self) -> None:
        """End it before its next step, unless it may not end yet."""
        if self.end is None and len(self.decided) >= SILENT_STEPS_MIN:
            self.end = "cut"

    def follow(self, recorded: Silent) -> None:
        """End it before its next step if a recorded one ended there for no reason of the model."""
        if self.end is None and recorded.end == "failed":
            self.give_up()
        elif recorded.end == "cut" and len(self.decided) == len(recorded.decided_ids):
            self.end = self.end or "cut"

    def repeat(self, recorded: Silent) -> None:
        """Take the decisions of a recorded one; `ValueError` if it cannot have been like that."""
        for index in recorded.decided_ids * (recorded.end != "failed"):
            self.take(index)
        self.follow(recorded)
        if self.end != recorded.end:
            raise ValueError(f"a silent part ends by {self.end}, not {recorded.end} as recorded")

    def give_up(self) -> None:
        """Decide nothing: forget what was decided, as after a failure."""
        self.decided.clear()
        self._spans.clear()
        self.__attrs_post_init__()
        self.end = "failed"

    def closing(self) -> tuple[int, ...]:
        """What is fed behind the decisions, of which the last is fed with it."""
        last = FED
        if self.end == "failed" and self._place not in OPEN:
            is_idle = self._place == "first" and self.silent_state.is_fresh
            last = "<|no_action|>" if is_idle else "<|non_spoken_eos|>"
        names = () if self.end in ENDS.values() else (last,)
        return self.slots.of(*names, "</ai_non_spoken_slot>", "</unit>")

    def silent(self) -> Silent:
        """The result; it must have ended."""
        assert self.end is not None
        return Silent(
            end=self.end,
            spans=tuple(self._spans),
            is_open=self._place in OPEN,
            decided_ids=tuple(self.decided),
        )

    def left(self) -> SilentState:
        """Where the next unit's silent part begins."""
        is_open = self._place in OPEN
        return SilentState(
            place=self._place if is_open else "first",
            held=tuple(self._held),
            is_fresh=not is_open and self.end in (*ENDS.values(), "failed"),
            speaks=self.speaks,
            count=self._count,
        )
