"""The prompt of one chunk of a streaming request, checked before any computation or decoding.

Text is encoded, ids are used as they are. A picture is `<image>`, its embeddings, `</image>`, then
its slices in `<slice>` and `</slice>`, as in a duplex unit. Sound is ten embeddings a second
without marks; it is one stream across chunks, so only whole seconds are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch
from torch import Tensor

from protocol.values.errors import FieldError
from protocol.values.limits import CHAT_TEXT_CHARS_MAX
from protocol.values.model import SAMPLE_BYTES, UNIT_BYTES, UNIT_SAMPLES, Picture, Sound, Text

from ..base import BackendRefused, ContextFull
from ..streams import Part
from .chat_prompt import Words
from .config import ModelConfig
from .slices import Slicing, read_jpeg
from .sound import samples_of
from .tokens import Tokens
from .work import See

Piece = Words | See | Tensor
"""Ids, the request for a slice of a picture, or a second of sound, (16000,)."""


@attrs.frozen(kw_only=True, eq=False)
class Looked:
    """A prompt that fits: its pieces in feeding order, and their total rows."""

    pieces: tuple[Piece, ...]
    rows: int


@attrs.define(kw_only=True)
class Look:
    """Checks the prompt of one chunk without changing state; safe from any thread.

    `slices_max`: maximum slices per picture; `room`: rows left in the slot; `rows`: used so far.
    """

    config: ModelConfig
    tokens: Tokens
    slices_max: int
    room: int
    rows: int = 0

    def at(self, prompt: Sequence[Part]) -> Looked:
        """Check a prompt.

        `ContextFull`: it does not fit. `BackendRefused`: a part is malformed; the text names it.
        """
        pieces = [piece for place, part in enumerate(prompt) for piece in self._part(place, part)]
        return Looked(pieces=tuple(pieces), rows=self.rows)

    def _part(self, place: int, part: Part) -> Iterator[Piece]:
        match part:
            case Text(text=text):
                yield self._text(text)
            case Picture(jpeg=jpeg):
                yield from self._picture(place, jpeg)
            case Sound(pcm=pcm):
                yield from self._sound(place, pcm)
            case _:
                yield self._ids(place, part.ids)

    def _take(self, rows: int) -> None:
        self.rows += rows
        if self.rows > self.room:
            raise ContextFull(
                f"the prompt needs {self.rows} tokens or more; {self.room} of "
                f"{self.config.context_limit} are free"
            )

    def _text(self, text: str) -> Words:
        if len(text) > CHAT_TEXT_CHARS_MAX:  # Not worth encoding: no context could hold it.
            raise ContextFull(f"the text has {len(text)} characters, over {CHAT_TEXT_CHARS_MAX}")
        ids = tuple(self.tokens.encode(text))
        self._take(len(ids))
        return Words(ids=ids)

    def _ids(self, place: int, ids: tuple[int, ...]) -> Words:
        self._take(len(ids))
        for at, index in enumerate(ids):
            if not 0 <= index < self.tokens.size:
                raise BackendRefused(
                    f"prompt[{place}].ids[{at}] is {index}, not below {self.tokens.size}"
                )
        return Words(ids=ids)

    def _sound(self, place: int, pcm: bytes) -> Iterator[Tensor]:
        if not pcm or len(pcm) % UNIT_BYTES:
            raise BackendRefused(
                f"prompt[{place}].pcm has {len(pcm) / SAMPLE_BYTES:g} samples, not whole seconds "
                f"of {UNIT_SAMPLES}"
            )
        self._take(len(pcm) // UNIT_BYTES * self.config.audio.embeddings)
        samples = samples_of(pcm, f"prompt[{place}].pcm")
        yield from torch.split(samples, UNIT_SAMPLES)

    def _picture(self, place: int, jpeg: bytes) -> Iterator[Piece]:
        from protocol.wire.media import (
            check_frame,  # Here: it needs libraries that the model does not.
        )

        path, cutter = f"prompt[{place}].jpeg", Slicing.of(self.config.vision)
        try:
            width, height = check_frame(path, jpeg)
        except FieldError as error:
            raise BackendRefused(str(error)) from error
        count = cutter.count(width, height, self.slices_max)
        self._take(count * (self.config.vision.queries + 2))
        try:
            pixels = read_jpeg(jpeg)
        except ValueError as error:
            raise BackendRefused(f"{path} cannot be decoded") from error
        ids = self.tokens.ids
        for index, picture in enumerate(cutter.cut(pixels, self.slices_max)):
            begin, end = (ids.slice_, ids.slice_end) if index else (ids.image, ids.image_end)
            yield from (Words(ids=(begin,)), See(picture=picture), Words(ids=(end,)))
