"""The frames that a client has not heard, read from the log of its session."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from protocol.values.effects import Send
from recorder.format.errors import LogDamaged
from recorder.format.mapping import KINDS
from recorder.format.records import Fields, Record
from recorder.read.scan import Damage

from . import rebuilding

BATCH_CHARS: Final = 1024 * 1024
"""Frames that are read at once: some seconds of speech."""
EVERY: Final = 16
"""One frame of so many is found at once; those between are read over."""


class Places:
    """Where frames stand in the log: the `seq` of every sixteenth."""

    def __init__(self) -> None:
        self._seqs: list[int] = []

    def note(self, fields: Fields, seq: int) -> None:
        """Take the place of a frame's record; they come in order."""
        ordinal = fields["ordinal"]
        assert isinstance(ordinal, int)
        if ordinal % EVERY == 0:
            self._seqs.append(seq)

    def before(self, ordinal: int) -> int:
        """A place at or before that of a frame."""
        return self._seqs[ordinal // EVERY] if self._seqs else 0


async def frames_of(path: Path, *, from_seq: int, first: int, until: int) -> AsyncGenerator[str]:
    """Give the frames of these ordinals, `until` excluded, in order.

    `LogDamaged` if one is missing; `Unreadable` and `OSError` if there is no log.
    """
    with await rebuilding.in_thread(lambda: rebuilding.open_log(path)) as reader:
        items = reader.at(from_seq)
        while first < until:
            frames = await rebuilding.in_thread(partial(_take, items, first, until))
            for frame in frames:
                yield frame
            first += len(frames)


def _take(items: Iterator[Record | Damage], first: int, until: int) -> list[str]:
    """Read the next frames, about `BATCH_CHARS` and one at least."""
    taken, size = list[str](), 0
    for item in items:
        if isinstance(item, Damage):
            break
        ordinal = item.fields.get("ordinal") if item.kind == KINDS[Send] else None
        if not isinstance(ordinal, int) or ordinal < first:
            continue
        if ordinal != first + len(taken):
            break
        frame = str(item.fields["frame"])
        taken.append(frame)
        size += len(frame)
        if size >= BATCH_CHARS or first + len(taken) == until:
            return taken
    raise LogDamaged(f"frame {first + len(taken)} is not in the log")
