"""The input of a duplex session that waits for the model: sound cut into units, and pictures.

- A unit is exactly `UNIT_SAMPLES` samples; the rest waits for more.
- The frames and flags of an append belong to the unit in which its last sample falls.
- `force_listen` forces every unit up to and including its own (B6).
- At most `UNITS_PENDING_MAX` units wait; when more arrive the oldest is dropped and its
  `force_listen` passes to the next (B7).
- A picture is decoded outside and comes back by number; its unit waits for it. The model gets the
  JPEG that came back, or the one that was sent where none did. A wrong or damaged picture is left
  out, and the client is told.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import attrs

from ..values import effects as ef
from ..values import events as ev
from ..values.errors import ErrorCode
from ..values.limits import FRAMES_MAX, UNIT_FRAMES_MAX, UNITS_PENDING_MAX
from ..values.model import SAMPLE_BYTES, UNIT_BYTES, UNIT_SAMPLES
from ..values.requests import Append, BadPicture, ClientMessage, See
from ..values.utf8 import Refused
from ..wire.media import kind_of
from .core import Step
from .peer import Peer

_EARLY: Final = f"a frame before any audio, {FRAMES_MAX} of them wait already"
_TOO_MANY_FRAMES: Final = f"video frames were left out: a second has {UNIT_FRAMES_MAX} at most"


@attrs.frozen(kw_only=True)
class CameraFrame:
    """A picture of an append; `media` is the number of its decoding.

    `jpeg` is empty until a picture of another kind is decoded.
    """

    media: int
    jpeg: bytes


@attrs.frozen(kw_only=True)
class Attachments:
    """The extras of an append's audio; `max_slice_nums` is None if absent."""

    input_id: str = ""
    frames: tuple[CameraFrame, ...] = ()
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
        frames = self.units[0].attached.frames
        if frames and any(frame.media in undecided_media for frame in frames):
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


def decided(frames: tuple[CameraFrame, ...], media: int, jpeg: bytes) -> tuple[CameraFrame, ...]:
    """Give the frame of a number its picture; it is left out if `jpeg` is empty."""
    return tuple(
        attrs.evolve(frame, jpeg=jpeg) if frame.media == media else frame
        for frame in frames
        if jpeg or frame.media != media
    )


@attrs.define(eq=False)
class Input:
    """The sound and pictures of a duplex session that wait for the model.

    Attributes:
        undecided_media: numbers of pictures that are being decoded.
        pictures: sent by themselves, for the next audio (002).
        units_dropped: waiting units lost to newer input (B7).
    """

    step: Step
    peer: Peer
    undecided_media: set[int] = attrs.Factory(set)
    assembler: Assembler = attrs.Factory(Assembler)
    waiting: WaitingUnits = attrs.Factory(WaitingUnits)
    pictures: tuple[CameraFrame, ...] = ()
    units_dropped: int = 0

    @property
    def samples_waiting(self) -> int:
        """Samples that no unit in the model has yet."""
        remainder = len(self.assembler.remainder) // SAMPLE_BYTES
        return len(self.waiting.units) * UNIT_SAMPLES + remainder

    def forget(self, ordinal: int) -> None:
        """Forget all input; the next unit is the second of the session's input with a number."""
        self.undecided_media.clear()
        self.pictures, self.waiting = (), WaitingUnits()
        self.assembler = Assembler(ordinal=ordinal)

    def let_wait(self, units: int) -> None:
        """Let more units wait than usual."""
        self.waiting.most = max(units, UNITS_PENDING_MAX)

    def catch_up(self) -> None:
        """Let no more units wait than usual, once no more do."""
        if len(self.waiting.units) <= UNITS_PENDING_MAX:
            self.waiting.most = UNITS_PENDING_MAX

    def attach(self, message: Append, input_id: str) -> Attachments:
        """Have the pictures of an append decoded; returns what belongs to its sound."""
        has_frames = message.frames or self.pictures or self.assembler.attached.frames
        attached = Attachments(
            input_id=input_id,
            frames=self.pictures + self._decode_all(message) if has_frames else (),
            force_listen=message.force_listen,
            max_slice_nums=message.max_slice_nums,
        )
        self.pictures = ()
        return attached

    def drop(self, unit: PendingUnit) -> None:
        """Report a dropped unit, and forget its pictures (B7)."""
        self.units_dropped += 1
        self.step.do(
            ef.DropUnit(
                ordinal=unit.ordinal,
                input_id=unit.attached.input_id,
                force_listen_passed=unit.attached.force_listen,
            )
        )
        for frame in unit.attached.frames:
            if frame.media in self.undecided_media:
                self.undecided_media.discard(frame.media)
                self.step.do(ef.CancelDecode(media=frame.media))

    # -- pictures -------------------------------------------------------------------------------

    def see(self, message: See) -> None:
        """Keep a picture for the next audio (002, video_frame)."""
        if self.step.opened.mode != "audio":  # it has none, and the dialect has counted it
            self.show((message.jpeg,))

    def show(self, pictures: tuple[bytes, ...]) -> None:
        """Keep pictures for the next audio."""
        self.pictures += tuple(self._decode(picture) for picture in pictures)

    def refusal(self, message: ClientMessage) -> Refused | None:
        """Refuse a picture for which there is no room."""
        if not isinstance(message, See) or self.step.opened.mode == "audio":
            return None
        is_early = len(self.pictures) >= FRAMES_MAX
        frames = len(self.pictures) + len(self.assembler.attached.frames)
        if not is_early and frames < UNIT_FRAMES_MAX:
            return None
        text, ignored = _EARLY if is_early else _TOO_MANY_FRAMES, len(message.ignored)
        return Refused(code=ErrorCode.INVALID_PAYLOAD, message=text, ignored=ignored)

    def _decode_all(self, message: Append) -> tuple[CameraFrame, ...]:
        """Have an append's pictures decoded, as many as its second may still have."""
        frames = tuple(frame for frame in message.frames if isinstance(frame, bytes))
        for frame in message.frames:
            if isinstance(frame, BadPicture):
                self._leave_out(frame.reason)
        before = len(self.pictures) + self.assembler.frames_before(message.pcm)
        if before + len(frames) > UNIT_FRAMES_MAX:
            self.peer.send_error(ErrorCode.INVALID_PAYLOAD, _TOO_MANY_FRAMES)
            frames = frames[: max(UNIT_FRAMES_MAX - before, 0)]
        return tuple(self._decode(jpeg) for jpeg in frames)

    def _decode(self, picture: bytes) -> CameraFrame:
        is_jpeg = kind_of(picture) == "JPEG"
        media = self.step.decode("jpeg" if is_jpeg else "image", picture)
        self.undecided_media.add(media)
        return CameraFrame(media=media, jpeg=picture if is_jpeg else b"")

    def _decide(self, media: int, jpeg: bytes) -> None:
        """Give a frame its picture, wherever it waits; without one it is forgotten."""
        self.pictures = decided(self.pictures, media, jpeg)
        self.assembler.decide_frame(media, jpeg)
        self.waiting.decide_frame(media, jpeg)

    def media_decoded(self, event: ev.MediaDecoded) -> None:
        """Note a decoded picture, whose unit may start."""
        if event.media in self.undecided_media:
            self.undecided_media.discard(event.media)
            for jpeg in event.pictures:
                self._decide(event.media, jpeg)

    def media_rejected(self, event: ev.MediaRejected) -> bool:
        """Tell the client of a damaged picture; returns whether its unit may run without it."""
        if self.peer.is_closed or event.media not in self.undecided_media:
            return False
        self.undecided_media.discard(event.media)
        self._decide(event.media, b"")
        self._leave_out(event.reason)
        return True

    def _leave_out(self, reason: str) -> None:
        text = f"a video frame was left out: {reason}"
        self.peer.send_error(ErrorCode.INVALID_PAYLOAD, text)
