"""Assembles audio of any chunking into exact units, and drops the oldest that wait.

- A unit is exactly `UNIT_SAMPLES` samples; the rest waits for more.
- The frames and flags of an append belong to the unit in which its last sample falls.
- `force_listen` forces every unit up to and including its own (B6).
- At most `UNITS_PENDING_MAX` units wait; when more arrive the oldest is dropped and its
  `force_listen` passes to the next (B7).
"""

from __future__ import annotations

from collections import deque

import attrs

from ..values.limits import UNITS_PENDING_MAX
from ..values.model import UNIT_BYTES


@attrs.frozen(kw_only=True)
class Frame:
    """A picture of an append; `media` is the number of its decoding.

    `jpeg` is empty until a picture of another kind is decoded.
    """

    media: int
    jpeg: bytes


@attrs.frozen(kw_only=True)
class Attachments:
    """The extras of an append's audio; `max_slice_nums` is None if absent."""

    input_id: str = ""
    frames: tuple[Frame, ...] = ()
    force_listen: bool = False
    max_slice_nums: int | None = None


@attrs.frozen(kw_only=True)
class PendingUnit:
    """A full second of input that waits: float32 LE, `UNIT_SAMPLES` samples.

    `ordinal` is its second of the session's input, from 0; dropped ones count.
    """

    ordinal: int
    pcm: bytes
    attached: Attachments


@attrs.define
class Assembler:
    """Audio that does not fill a unit yet, with its attachments."""

    remainder: bytearray = attrs.Factory(bytearray)
    attached: Attachments = Attachments()
    ordinal: int = 0

    def add(self, pcm: bytes, attached: Attachments) -> list[PendingUnit]:
        """Add an append's audio; returns the units that are full now, oldest first.

        `pcm` is float32 LE, any whole number of samples above 0.
        """
        if len(self.remainder) + len(pcm) < UNIT_BYTES:  # a small piece, of which there are many
            self.remainder += pcm
            self.attached = self._merge(attached, whole=True)
            return []
        audio = bytes(self.remainder) + pcm
        spans = range(0, len(audio) - UNIT_BYTES + 1, UNIT_BYTES)
        last_begin = (len(audio) - 1) // UNIT_BYTES * UNIT_BYTES
        units = []
        for begin in spans:
            merged = self._merge(attached, whole=begin == last_begin)
            unit = audio[begin : begin + UNIT_BYTES]
            units.append(PendingUnit(ordinal=self.ordinal, pcm=unit, attached=merged))
            self.ordinal += 1
            self.attached = Attachments()
        self.remainder = bytearray(audio[len(spans) * UNIT_BYTES :])
        if self.remainder:
            self.attached = self._merge(attached, whole=True)
        return units

    def frames_before(self, pcm: bytes) -> int:
        """Count the frames of the unit in which the last sample of an append would fall."""
        is_same = len(self.remainder) + len(pcm) <= UNIT_BYTES
        return len(self.attached.frames) if is_same else 0

    def force_listen(self) -> None:
        """Force the next unit to listen."""
        self.attached = attrs.evolve(self.attached, force_listen=True)

    def decide_frame(self, media: int, jpeg: bytes) -> None:
        """Give a frame its picture, or forget a damaged one: `jpeg` is empty."""
        self.attached = _decided(self.attached, media, jpeg)

    def _merge(self, new: Attachments, *, whole: bool) -> Attachments:
        """Join the unit's attachments with new ones; not `whole`: the last sample falls later."""
        slices = new.max_slice_nums if whole else None
        return Attachments(
            input_id=new.input_id,
            frames=self.attached.frames + (new.frames if whole else ()),
            force_listen=self.attached.force_listen or new.force_listen,
            max_slice_nums=self.attached.max_slice_nums if slices is None else slices,
        )


@attrs.define
class WaitingUnits:
    """The waiting units, oldest first, `most` at most."""

    units: deque[PendingUnit] = attrs.Factory(deque)
    most: int = UNITS_PENDING_MAX

    def __len__(self) -> int:
        return len(self.units)

    def push(self, unit: PendingUnit) -> PendingUnit | None:
        """Add the newest; return the unit dropped for it, if any (B7)."""
        self.units.append(unit)
        if len(self.units) <= self.most:
            return None
        dropped = self.units.popleft()
        if dropped.attached.force_listen:
            self.units[0] = _forced(self.units[0])
        return dropped

    def force_listen(self) -> None:
        """Force every waiting unit to listen (B6)."""
        self.units = deque(_forced(unit) for unit in self.units)

    def force_next(self) -> bool:
        """Force the oldest waiting unit to listen; False without one."""
        if self.units:
            self.units[0] = _forced(self.units[0])
        return bool(self.units)

    def pop_ready(self, undecided_media: set[int]) -> PendingUnit | None:
        """Take the oldest; None without one, or while its media is being decoded."""
        if not self.units:
            return None
        if any(frame.media in undecided_media for frame in self.units[0].attached.frames):
            return None
        return self.units.popleft()

    def decide_frame(self, media: int, jpeg: bytes) -> None:
        """Give a frame its picture, or forget a damaged one, whose unit runs without it."""
        self.units = deque(
            attrs.evolve(unit, attached=_decided(unit.attached, media, jpeg)) for unit in self.units
        )


def _forced(unit: PendingUnit) -> PendingUnit:
    return attrs.evolve(unit, attached=attrs.evolve(unit.attached, force_listen=True))


def _decided(attached: Attachments, media: int, jpeg: bytes) -> Attachments:
    return attrs.evolve(attached, frames=decided(attached.frames, media, jpeg))


def decided(frames: tuple[Frame, ...], media: int, jpeg: bytes) -> tuple[Frame, ...]:
    """Give the frame of a number its picture; it is left out if `jpeg` is empty."""
    return tuple(
        attrs.evolve(frame, jpeg=jpeg) if frame.media == media else frame
        for frame in frames
        if jpeg or frame.media != media
    )
