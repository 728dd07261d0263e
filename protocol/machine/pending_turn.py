"""A turn that waits for its media: the client's conversation becomes the model's.

Text and raw sound at the model's rate are ready; files are decoded outside and come back by number.
A video becomes its pictures and its sound, second by second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import attrs

from ..values.events import MediaDecoded
from ..values.limits import SLICES_MAX
from ..values.model import INPUT_RATE_HZ, SAMPLE_BYTES
from ..values.requests import (
    Ask,
    AudioPart,
    ImagePart,
    Part,
    SpeechRequest,
    TextPart,
    VideoPart,
    Voice,
    VoiceName,
)
from ..values.tools import ToolCall, ToolResult
from ..values.turn import Content, Message, Picture, Role, Sound, SpeechConfig, Text, Turn

SECOND_BYTES: Final = INPUT_RATE_HZ * SAMPLE_BYTES
VIDEO_SLICES: Final = 1
"""Slices a picture of a video, by default: there are many pictures, and each counts."""

Contents = tuple[Content, ...]


Decode = Callable[..., int]
"""Has media decoded outside (`Core.decode`); returns its number."""


def decode_voice(voice: Voice, decode: Decode) -> int | bytes:
    """Have reference audio decoded, or return it if it needs no decoding."""
    if isinstance(voice, VoiceName):
        return decode("voice", voice.name.encode())
    return decode("wav", voice.data) if voice.is_wav else voice.data


def _decode(part: Part, decode: Decode) -> int | Contents:
    match part:
        case TextPart(text=text):
            return (Text(text=text),)
        case ToolCall() | ToolResult():
            return (part,)
        case ImagePart(data=data):
            return decode("image", data)
        case AudioPart(data=data, is_wav=False, rate_hz=rate) if rate == INPUT_RATE_HZ:
            return (Sound(pcm=data),)
        case AudioPart(data=data, is_wav=is_wav, rate_hz=rate):
            return decode("audio", data, rate_hz=0 if is_wav else rate)
        case VideoPart(data=data, stack_frames=stack):
            return decode("video", data, stack_frames=stack)


@attrs.define
class PendingTurn:
    """A turn that was asked for, and the media that it waits for.

    Attributes:
        ask: the request without the conversation: its files are not held twice.
        contents: by message, the decoded form of each content.
        undecided: message and content of each media number; None for the voice.
    """

    ask: Ask
    roles: tuple[Role, ...]
    has_video: bool
    contents: list[list[Contents]]
    undecided: dict[int, tuple[int, int] | None]
    voice_pcm: bytes = b""

    @classmethod
    def of(cls, ask: Ask, decode: Decode) -> PendingTurn:
        """Take a turn, and have its media decoded."""
        pending = cls(
            ask=attrs.evolve(ask, messages=()),
            roles=tuple(message.role for message in ask.messages),
            has_video=any(
                isinstance(part, VideoPart) for message in ask.messages for part in message.content
            ),
            contents=[[() for _ in message.content] for message in ask.messages],
            undecided={},
        )
        for at, message in enumerate(ask.messages):
            for place, part in enumerate(message.content):
                found = _decode(part, decode)
                if isinstance(found, int):
                    pending.undecided[found] = (at, place)
                else:
                    pending.contents[at][place] = found
        voice = None if ask.speech is None else ask.speech.voice
        if voice is not None:
            asked = decode_voice(voice, decode)
            if isinstance(asked, int):
                pending.undecided[asked] = None
            else:
                pending.voice_pcm = asked
        return pending

    @property
    def is_complete(self) -> bool:
        """Whether all media is decoded."""
        return not self.undecided

    def awaits(self, media: int) -> bool:
        """Whether `media` belongs to the turn."""
        return media in self.undecided

    def decoded(self, event: MediaDecoded) -> None:
        """Take decoded media."""
        place = self.undecided.pop(event.media)
        if place is None:
            self.voice_pcm = event.pcm
        else:
            at, index = place
            self.contents[at][index] = tuple(_contents(event))

    def to_turn(self, index: int, seed: int) -> Turn:
        """Make the backend's request; the conversation is the model's from then on."""
        ask = self.ask
        slices = ask.max_slice_nums or (VIDEO_SLICES if self.has_video else SLICES_MAX)
        contents, self.contents = self.contents, []
        return Turn(
            index=index,
            messages=tuple(
                Message(role=role, content=tuple(part for known in message for part in known))
                for role, message in zip(self.roles, contents, strict=True)
            ),
            config=ask.config,
            speech=None if ask.speech is None else self._speech(ask.speech),
            max_slice_nums=slices,
            use_image_id=ask.use_image_id,
            omni=ask.omni,
            thinking=ask.thinking,
            tts_template=ask.tts_template,
            seed=seed,
            tools=() if ask.tool_choice == "none" else ask.tools,
        )

    def _speech(self, asked: SpeechRequest) -> SpeechConfig:
        pcm = self.voice_pcm
        if asked.voice_ms_max is not None:
            pcm = pcm[: asked.voice_ms_max * SECOND_BYTES // 1000]
        return SpeechConfig(mode=asked.mode, language=asked.language, voice_pcm=pcm)


def _contents(event: MediaDecoded) -> Iterator[Content]:
    """Lay media out: a picture, a sound, or a video's pictures with the sound of their second."""
    if not event.pictures:
        yield Sound(pcm=event.pcm)
        return
    for second, jpeg in enumerate(event.pictures):
        yield Picture(jpeg=jpeg)
        pcm = event.pcm[second * SECOND_BYTES : (second + 1) * SECOND_BYTES]
        if pcm:
            yield Sound(pcm=pcm)
        if second < len(event.stacked):
            yield Picture(jpeg=event.stacked[second])
