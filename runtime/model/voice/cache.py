"""Keys and values of past rows, as immutable pieces, and the published rules that cut them.

A cache is a sequence of pieces; a piece has the keys and values of some rows side by side, shape
(..., rows, 2 * head width). The prompt's pieces belong to its voice: sessions share them, and they
are never copied. A chunk adds one piece and changes no other, so an older state stays valid.

`P` is the number of the prompt's frames. A cache of more than `P` + `KEPT` rows loses what is
between its first `P` and its last `KEPT`:

- after the encoder's upsampling the oldest rows come first: the prompt and the newest rows stay;
- in the flow the newest rows come first: the newest `P` and the end of the prompt stay;
- before the encoder's upsampling there is half a row a frame. The published code stores these rows
  twice, one copy behind the other, cuts both as one, and reads the first half (`cut_halved`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

KEPT: Final = 100
"""Rows at the end of a cache that survive the cut."""


@attrs.frozen(eq=False)
class Piece:
    """Keys and values of some rows, (..., rows, 2 * D); `is_shared`: they are the voice's."""

    rows: Tensor
    is_shared: bool = False

    def part(self, start: int, stop: int) -> Piece:
        """Some of its rows; a session's own are copied, so that the others are freed."""
        rows = self.rows[..., start:stop, :]
        return Piece(rows if self.is_shared else rows.clone(), self.is_shared)

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.rows.shape[-2]


Pieces = tuple[Piece, ...]


def count(pieces: Sequence[Piece]) -> int:
    """Number of rows in all pieces."""
    return sum(piece.count for piece in pieces)


def _part(pieces: Sequence[Piece], start: int, stop: int) -> Iterator[Piece]:
    """The rows from `start` to `stop`."""
    for piece in pieces:
        low, high = max(0, start), min(piece.count, stop)
        if low < high:
            yield piece if high - low == piece.count else piece.part(low, high)
        start, stop = start - piece.count, stop - piece.count


def cut(pieces: Pieces, prompt: int) -> Pieces:
    """Keep the first `prompt` rows and the last `KEPT`."""
    rows = count(pieces)
    if rows <= prompt + KEPT:
        return pieces
    return (*_part(pieces, 0, prompt), *_part(pieces, rows - KEPT, rows))


def cut_halved(pieces: Pieces, prompt: int) -> Pieces:
    """Keep what `cut` would keep in the first half of the rows stored twice."""
    rows = count(pieces)
    if 2 * rows <= prompt + KEPT:
        return pieces
    half = (prompt + KEPT) // 2
    twice = (*pieces, *pieces)
    kept = [*_part(twice, 0, min(half, prompt))]
    if half > prompt:  # A prompt below two seconds: the rows before the end of the second copy.
        kept += _part(twice, 2 * rows - KEPT, 2 * rows - KEPT + half - prompt)
    return tuple(kept)


def joined(pieces: Sequence[Piece], *at: int) -> Tensor:
    """The rows of a cache at the leading indices `at`, (..., rows, 2 * D)."""
    return torch.cat([piece.rows[at] for piece in pieces], dim=-2)
