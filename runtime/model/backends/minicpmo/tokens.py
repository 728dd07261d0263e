"""Token ids by name, text to ids, ids to text.

Names are the published tokenizer's; ids are looked up in `tokenizer.json`, never hard-coded.
Outside text (instructions) never yields a control token. `tokenizer_config.json` holds the ids that
a model must not decide (`bad_token_ids`), and at times the chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import attrs
from tokenizers import Tokenizer

from .chat_template import read_tool_words


@attrs.frozen(kw_only=True)
class ControlIds:
    """The ids of the control tokens, explained in model.md."""

    unit: int
    unit_end: int
    image: int
    image_end: int
    slice_: int
    slice_end: int
    im_start: int
    im_end: int
    audio_start: int
    audio_end: int
    tts_bos: int
    tts_pad: int
    listen: int
    speak: int
    turn_eos: int
    chunk_eos: int
    chunk_tts_eos: int


NAMES: dict[str, str] = {
    "unit": "<unit>",
    "unit_end": "</unit>",
    "image": "<image>",
    "image_end": "</image>",
    "slice_": "<slice>",
    "slice_end": "</slice>",
    "im_start": "<|im_start|>",
    "im_end": "<|im_end|>",
    "audio_start": "<|audio_start|>",
    "audio_end": "<|audio_end|>",
    "tts_bos": "<|tts_bos|>",
    "tts_pad": "<|tts_pad|>",
    "listen": "<|listen|>",
    "speak": "<|speak|>",
    "turn_eos": "<|turn_eos|>",
    "chunk_eos": "<|chunk_eos|>",
    "chunk_tts_eos": "<|chunk_tts_eos|>",
}
"""Field of `ControlIds` to token name."""


@attrs.frozen(kw_only=True)
class ChatIds:
    """The ids of the tokens used only in chat; None where a tokenizer lacks one."""

    think: int | None
    think_end: int | None
    image_id: int | None
    image_id_end: int | None
    tts_eos: int | None
    end: int | None


CHAT_NAMES: dict[str, str] = {
    "think": "<think>",
    "think_end": "</think>",
    "image_id": "<image_id>",
    "image_id_end": "</image_id>",
    "tts_eos": "<|tts_eos|>",
    "end": "</s>",
}
"""Field of `ChatIds` to token name."""
TOOL_MARKS: tuple[str, ...] = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""The marks of tools: tokens in some tokenizers, in others text."""
_IN_MARKS = re.compile(r"(?<=<)(?=/?tool_(?:call|response)>)")


class Tokens:
    """A tokenizer with its control ids.

    Attributes:
        size: one more than the tokenizer's highest id; a model's vocabulary may be larger.
        control: the ids of `ids`.
        forbidden: ids that are never decided, except `chunk_eos`, which has its own draw.
        terminators: ids that end a unit.
        endings: ids that end a chat answer.
        tools: the words that offer tools; None if the checkpoint's chat template has none.
        tool_marks: the ids of the marks of tools that are tokens.
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
        found: dict[str, int] = {}
        for field, name in NAMES.items():
            index = self._tokenizer.token_to_id(name)
            if index is not None:
                found[field] = index
        missing = [name for field, name in NAMES.items() if field not in found]
        if missing:
            raise ValueError(f"tokenizer.json has no control tokens {missing}")
        self.ids = ControlIds(**found)
        token_id = self._tokenizer.token_to_id
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
        marks = {name: token_id(name) for name in TOOL_MARKS}
        self.tool_marks = {name: index for name, index in marks.items() if index is not None}

    def find(self, name: str) -> int | None:
        """The id of a token, text or control, by its name; None if there is none."""
        index: int | None = self._tokenizer.token_to_id(name)
        return index

    def encode(self, text: str) -> list[int]:
        """Text to ids; control tokens are spelled out, not recognised."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def spell(self, text: str) -> list[int]:
        """As `encode`; marks of tools are spelled out too, which are no control tokens."""
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
