"""Token ids by name, text to ids, ids to text.

Names are the published tokenizer's; ids are looked up in `tokenizer.json`, never hard-coded.
Outside text (instructions) never yields a control token. `tokenizer_config.json` holds the ids that
a model must not decide (`bad_token_ids`), and at times the chat template.

A chat template is a program in Jinja, which is not run: the prompt is laid out by our own code
(`chat_prompt.py`), so only what differs between checkpoints is read: two string literals, the text
before the list of tools and the text after it. A template without them, or of another form than
Qwen3's (`<tool_call>`, `<tool_response>`), has no tools here.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
from tokenizers import Tokenizer

from protocol.values.model import Tool

from .slot_layout import NEW, OLDER, SlotLayout, read_policy

# -- the words of a chat template that offer tools ----------------------------------------------

TEMPLATE_CHARS_MAX: Final = 262_144
"""Fifty times the published template."""
TEMPLATE_FILE: Final = "chat_template.jinja"
"""Where newer checkpoints have it; older ones in `tokenizer_config.json`, as `chat_template`."""
_BODY: Final = r"(?:(?!\1)[^\\]|\\.)*"
_BEFORE: Final = re.compile(rf"""(["'])({_BODY}<tools>)\1""", re.DOTALL)
_AFTER: Final = re.compile(rf"""(["'])((?:\\n|\s)*</tools>{_BODY})\1""", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED: Final[Mapping[str, str]] = {"n": "\n", "t": "\t", "r": "\r"}
_MESSAGE_END: Final = "<|im_end|>"
_MARKS: Final = ("tool_calls", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@attrs.frozen
class ToolWords:
    """The text before and after the list of tools, without line breaks at its outer ends."""

    before: str
    after: str


def read_tool_words(folder: Path) -> ToolWords | None:
    """Read the words of a checkpoint; None if its chat template has no tools.

    `ValueError`: the template is not text, or too long.
    """
    path = folder / TEMPLATE_FILE
    if path.exists():
        return tool_words(path.read_text(encoding="utf-8"), path.name)
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return None
    config = json.loads(path.read_text(encoding="utf-8"))
    template = config.get("chat_template") if isinstance(config, dict) else None
    if template is None:
        return None
    return tool_words(template, f"{path.name}: chat_template")


def tool_words(template: object, where: str = "chat_template") -> ToolWords | None:
    """Find the words in a template; `ValueError` as of `read_tool_words`."""
    if not isinstance(template, str) or len(template) > TEMPLATE_CHARS_MAX:
        raise ValueError(f"{where} is not text of at most {TEMPLATE_CHARS_MAX} characters")
    before, after = _BEFORE.search(template), _AFTER.search(template)
    if before is None or after is None or not all(mark in template for mark in _MARKS):
        return None
    end = _unescaped(after[2]).partition(_MESSAGE_END)[0]
    return ToolWords(before=_unescaped(before[2]).lstrip("\n"), after=end.strip("\n"))


def _unescaped(literal: str) -> str:
    return _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[1]), literal)


# -- ids ----------------------------------------------------------------------------------------


def _named(token: str) -> Any:
    """A field with the id of the token of a name."""
    return attrs.field(metadata={"token": token})


@attrs.frozen(kw_only=True)
class ControlIds:
    """The ids of the control tokens, explained in model.md."""

    unit: int = _named("<unit>")
    unit_end: int = _named("</unit>")
    image: int = _named("<image>")
    image_end: int = _named("</image>")
    slice_: int = _named("<slice>")
    slice_end: int = _named("</slice>")
    im_start: int = _named("<|im_start|>")
    im_end: int = _named("<|im_end|>")
    audio_start: int = _named("<|audio_start|>")
    audio_end: int = _named("<|audio_end|>")
    tts_bos: int = _named("<|tts_bos|>")
    tts_pad: int = _named("<|tts_pad|>")
    listen: int = _named("<|listen|>")
    speak: int = _named("<|speak|>")
    turn_eos: int = _named("<|turn_eos|>")
    chunk_eos: int = _named("<|chunk_eos|>")
    chunk_tts_eos: int = _named("<|chunk_tts_eos|>")


@attrs.frozen(kw_only=True)
class ChatIds:
    """The ids of the tokens used only in chat; None where a tokenizer lacks one."""

    think: int | None = _named("<think>")
    think_end: int | None = _named("</think>")
    image_id: int | None = _named("<image_id>")
    image_id_end: int | None = _named("</image_id>")
    tts_eos: int | None = _named("<|tts_eos|>")
    end: int | None = _named("</s>")


def _names(kind: type[ControlIds | ChatIds]) -> dict[str, str]:
    return {field.name: field.metadata["token"] for field in attrs.fields(kind)}


NAMES: Final = _names(ControlIds)
CHAT_NAMES: Final = _names(ChatIds)
"""Fields to token names."""
TOOL_MARKS: tuple[str, ...] = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""The marks of tools: tokens in some tokenizers, in others text."""
_IN_MARKS = re.compile(r"(?<=<)(?=/?tool_(?:call|response)>)")


class Tokens:
    """A tokenizer with its control ids.

    Attributes:
        size: one more than the tokenizer's highest id; a model's vocabulary may be larger.
        control: the ids of `ids`, and of slots; never text.
        forbidden: ids that are never decided, except `chunk_eos`, which has its own draw.
        terminators: ids that end a unit.
        endings: ids that end a chat answer.
        tools: the words that offer tools; None if the checkpoint's chat template has none.
        tool_marks: the ids of the marks of tools that are tokens in chat: special ones are not.
        unchatted: the ids that an answer of chat never has: those of slots only.
        slots: the layout of units in which the model calls tools; None: it has the older one.
    """

    def __init__(self, folder: Path) -> None:
        """Load the tokenizer of a checkpoint.

        `OSError`: `tokenizer.json` is missing; `ValueError`: a file is malformed, or a control
        token is missing.
        """
        raw = (folder / "tokenizer.json").read_text(encoding="utf-8")
        try:
            self._tokenizer = Tokenizer.from_str(raw)
        except Exception as error:  # The library raises plain `Exception`.
            raise ValueError(f"tokenizer.json cannot be read: {error}") from error
        self._tokenizer.encode_special_tokens = True
        token_id = self._tokenizer.token_to_id
        ids = {field: token_id(name) for field, name in NAMES.items()}
        found = {field: index for field, index in ids.items() if index is not None}
        if missing := [name for field, name in NAMES.items() if field not in found]:
            raise ValueError(f"tokenizer.json has no control tokens {missing}")
        self.ids = ControlIds(**found)
        self.chat = ChatIds(**{field: token_id(name) for field, name in CHAT_NAMES.items()})
        self.size: int = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.control: frozenset[int] = frozenset(found.values())
        bad = _bad_ids(folder / "tokenizer_config.json", self.size)
        self.forbidden: tuple[int, ...] = tuple(sorted({self.ids.tts_pad, *bad}))
        self.terminators: frozenset[int] = frozenset(
            (self.ids.listen, self.ids.chunk_eos, self.ids.chunk_tts_eos)
        )
        endings = (self.chat.tts_eos, self.ids.im_end, self.chat.end)
        self.endings: frozenset[int] = frozenset(index for index in endings if index is not None)
        self.tools = read_tool_words(folder)
        added = self._tokenizer.get_added_tokens_decoder()
        marks = {name: index for name in TOOL_MARKS if (index := token_id(name)) is not None}
        special = {index for index in marks.values() if index in added and added[index].special}
        self.tool_marks = {name: index for name, index in marks.items() if index not in special}
        self.slots = self._slots(raw, folder)
        self.unchatted: tuple[int, ...] = ()
        if self.slots is not None:
            self.control |= self.slots.control
            self.unchatted = tuple(sorted({*self.slots.of(*NEW), *special}))

    def for_session(self, tools: Sequence[Tool]) -> Tokens:
        """Itself, or without slots for a session whose units have the older layout."""
        if tools or self.slots is None or self.slots.policy.always:
            return self
        older = copy.copy(self)
        older.slots, older.forbidden = None, tuple(sorted({*self.forbidden, *self.unchatted}))
        return older

    def _slots(self, raw: str, folder: Path) -> SlotLayout | None:
        ids = {name: self.find(name) for name in (*NEW, *OLDER)}
        first = ids[NEW[0]]
        if first is None or any(ids[name] != first + i for i, name in enumerate(NEW)):
            return None
        known = {name: index for name, index in ids.items() if index is not None}
        if missing := [name for name in OLDER if name not in known]:
            raise ValueError(f"tokenizer.json has the tokens of slots, but no {missing}")
        # Without its added tokens a tokenizer has nothing that text could become.
        plain = Tokenizer.from_str(json.dumps({**json.loads(raw), "added_tokens": []}))

        def encode(text: str) -> list[int]:
            found: list[int] = plain.encode(text, add_special_tokens=False).ids
            return found

        return SlotLayout(
            ids=known,
            encode=encode,
            decode=self.decode,
            control=frozenset(self._tokenizer.get_added_tokens_decoder()) | self.control,
            policy=read_policy(folder),
        )

    def find(self, name: str) -> int | None:
        """The id of a token, text or control, by its name; None if there is none."""
        index: int | None = self._tokenizer.token_to_id(name)
        return index

    def encode(self, text: str) -> list[int]:
        """Text to ids; control tokens are spelled out, not recognised."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def spell(self, text: str) -> list[int]:
        """As `encode`; marks of tools are spelled out too, which are not control tokens."""
        if not self.tool_marks:
            return self.encode(text)
        return [index for piece in _IN_MARKS.split(text) for index in self.encode(piece)]

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text, without special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


def _bad_ids(path: Path, size: int) -> list[int]:
    """The ids that a tokenizer's config forbids; empty without the file."""
    if not path.exists():
        return []
    raw = json.loads(path.read_text(encoding="utf-8"))
    bad = raw.get("bad_token_ids", []) if isinstance(raw, dict) else None
    if not isinstance(bad, list) or not all(type(i) is int and 0 <= i < size for i in bad):
        raise ValueError(f"{path.name}: bad_token_ids is not a list of ids below {size}")
    return bad


# -- ids to text --------------------------------------------------------------------------------

BROKEN: Final = "\ufffd"
HELD_MAX: Final = 16
"""Maximum tokens held back; a character has four bytes, and most tokens have one."""


@attrs.define
class TextStream:
    """The text of one answer.

    `text`: everything returned so far; `waiting`: ids whose text is not fully returned; `given`:
    characters of that text already returned.
    """

    tokens: Tokens
    text: str = ""
    waiting: list[int] = attrs.field(factory=list)
    given: int = 0

    def add(self, index: int) -> str:
        """Take the next id; return the characters that it completes."""
        self.waiting.append(index)
        text = self.tokens.decode(self.waiting)
        if text.endswith(BROKEN) and len(self.waiting) < HELD_MAX:
            return self._give(text[:-1])
        new = self._give(text)
        self.waiting, self.given = [], 0
        return new

    def end(self) -> str:
        """Return the text held back of an incomplete character."""
        return self._give(self.tokens.decode(self.waiting))

    @property
    def held(self) -> str:
        """The text held back, as `end` would return it."""
        return self.tokens.decode(self.waiting)[self.given :]

    def _give(self, text: str) -> str:
        new, self.given = text[self.given :], max(self.given, len(text))
        self.text += new
        return new
