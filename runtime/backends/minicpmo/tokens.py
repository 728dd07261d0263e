"""Token ids by name, text to ids, ids to text.

The names are the published tokenizer's; ids are looked up, never written down. Text from outside
(instructions) never yields a control token, whatever it spells.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs
from tokenizers import Tokenizer


@attrs.frozen(kw_only=True)
class ControlIds:
    """The ids of the control tokens; see model.md for what each does."""

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
"""The field of `ControlIds` to the token's name in the tokenizer."""

GENERATED = ("tts_bos", "listen", "speak", "turn_eos", "chunk_eos", "chunk_tts_eos")
"""The control tokens that a model may decide; all others are forbidden."""


class Tokens:
    """A tokenizer with the control ids at hand."""

    def __init__(self, path: Path) -> None:
        """Load `tokenizer.json`.

        Args:
            path: the file.

        Raises:
            ValueError: a control token is missing.
        """
        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.encode_special_tokens = True
        ids: dict[str, int] = {}
        for field, name in NAMES.items():
            index = self._tokenizer.token_to_id(name)
            if index is None:
                raise ValueError(f"{path}: control token {name} is missing")
            ids[field] = index
        self.ids = ControlIds(**ids)
        self.size: int = self._tokenizer.get_vocab_size()
        self.control: frozenset[int] = frozenset(ids.values())
        allowed = {ids[name] for name in GENERATED}
        self.forbidden: tuple[int, ...] = tuple(sorted(self.control - allowed))
        self.terminators: frozenset[int] = frozenset(
            (self.ids.listen, self.ids.chunk_eos, self.ids.chunk_tts_eos)
        )

    def encode(self, text: str) -> list[int]:
        """Text to ids; control tokens are spelled out, not recognised."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text; control tokens are left out."""
        kept = [index for index in ids if index not in self.control]
        text: str = self._tokenizer.decode(kept, skip_special_tokens=False)
        return text

    def text_ids(self, ids: Iterable[int]) -> tuple[int, ...]:
        """The ids that stand for text."""
        return tuple(index for index in ids if index not in self.control)
