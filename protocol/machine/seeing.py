"""What a duplex session sees: camera frames, from their arrival to the unit that has them.

A frame is decoded outside and comes back by number; its unit waits for it. The model sees a JPEG as
it was sent, and any other picture as the JPEG that came back. A damaged frame is left out, and the
client is told.
"""

from __future__ import annotations

from typing import Final

import attrs

from ..values import events as ev
from ..values.errors import ErrorCode
from ..values.limits import FRAMES_MAX, UNIT_FRAMES_MAX
from ..values.requests import Append, ClientMessage, See
from ..values.utf8 import Refused
from ..wire.media import kind_of
from .forking import Forking
from .units import Assembler, Attachments, Frame, WaitingUnits, decided

_EARLY: Final = f"a frame before any audio, {FRAMES_MAX} of them wait already"
_TOO_MANY_FRAMES: Final = f"video frames were left out: a second has {UNIT_FRAMES_MAX} at most"


@attrs.define(kw_only=True, eq=False)
class Seeing(Forking):
    """The input of a duplex session that waits for the model.

    Attributes:
        undecided_media: numbers of frames that are being decoded.
        seen: frames sent by themselves, for the next audio (002).
    """

    undecided_media: set[int] = attrs.Factory(set)
    assembler: Assembler = attrs.Factory(Assembler)
    waiting: WaitingUnits = attrs.Factory(WaitingUnits)
    seen: tuple[Frame, ...] = ()

    def forget_client(self) -> None:
        """Forget seconds that wait, and the part of one."""
        super().forget_client()
        self.undecided_media.clear()
        self.seen, self.waiting = (), WaitingUnits()
        self.assembler.remainder, self.assembler.attached = bytearray(), Attachments()

    def start_if_due(self) -> None:
        """Start the oldest waiting unit, if one may start."""
        raise NotImplementedError

    def see(self, message: See) -> None:
        """Keep a frame for the next audio (002, video_frame)."""
        if self.opened.mode != "audio":  # nothing is seen there, and the dialect has counted it
            self.show((message.jpeg,))

    def show(self, pictures: tuple[bytes, ...]) -> None:
        """Keep pictures for the next audio."""
        self.seen += tuple(self._decode(picture) for picture in pictures)

    def refused(self, message: ClientMessage) -> Refused | None:
        """Refuse a frame for which there is no room."""
        is_early = len(self.seen) >= FRAMES_MAX
        if not isinstance(message, See) or self.opened.mode == "audio":
            return super().refused(message)
        if not (is_early or self._is_seen_out):
            return None
        text, ignored = _EARLY if is_early else _TOO_MANY_FRAMES, len(message.ignored)
        return Refused(code=ErrorCode.INVALID_PAYLOAD, message=text, ignored=ignored)

    @property
    def _is_seen_out(self) -> bool:
        """Whether the current second of input has all the frames it may have."""
        frames = len(self.seen) + len(self.assembler.attached.frames)
        return frames >= UNIT_FRAMES_MAX

    def decode_all(self, message: Append) -> tuple[Frame, ...]:
        """Have an append's frames decoded, as many as its second may still have."""
        frames, before = message.frames, len(self.seen) + self.assembler.frames_before(message.pcm)
        if before + len(frames) > UNIT_FRAMES_MAX:
            self.complain(ErrorCode.INVALID_PAYLOAD, _TOO_MANY_FRAMES)
            frames = frames[: max(UNIT_FRAMES_MAX - before, 0)]
        return tuple(self._decode(jpeg) for jpeg in frames)

    def _decode(self, picture: bytes) -> Frame:
        is_jpeg = kind_of(picture) == "JPEG"
        media = self.decode("jpeg" if is_jpeg else "image", picture)
        self.undecided_media.add(media)
        return Frame(media=media, jpeg=picture if is_jpeg else b"")

    def _decide(self, media: int, jpeg: bytes) -> None:
        """Give a frame its picture, wherever it waits; without one it is forgotten."""
        self.seen = decided(self.seen, media, jpeg)
        self.assembler.decide_frame(media, jpeg)
        self.waiting.decide_frame(media, jpeg)

    def media_decoded(self, event: ev.MediaDecoded) -> None:
        """Note a decoded frame, whose unit may start, or a voice."""
        super().media_decoded(event)
        if event.media in self.undecided_media:
            self.undecided_media.discard(event.media)
            for jpeg in event.pictures:
                self._decide(event.media, jpeg)
        self.start_if_due()

    def media_rejected(self, event: ev.MediaRejected) -> None:
        """Tell the client of a damaged frame, and run the unit without it; or handle a voice."""
        super().media_rejected(event)
        media = event.media
        if self.is_closed or media not in self.undecided_media:
            return
        self.undecided_media.discard(media)
        self._decide(media, b"")
        self.complain(ErrorCode.INVALID_PAYLOAD, f"a video frame was left out: {event.reason}")
        self.start_if_due()
