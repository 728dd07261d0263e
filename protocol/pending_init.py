"""An init that waits: for its reference audio to be decoded, then for the model to open.

Raw float32 voices are ready as they come; WAV files are decoded outside and come back by number.
"""

from __future__ import annotations

import attrs

from .effects import DecodeMedia
from .model import Opening, Voice
from .pending_turn import decode_voice
from .requests import Init, ReferenceAudio
from .requests import Voice as AskedVoice


@attrs.define
class PendingInit:
    """An accepted init and the voices it is still waiting for.

    Attributes:
        init: what the client asked for.
        voices: PCM by field name, float32 LE 16 kHz mono, as far as it is known.
        undecided: the media number of each voice that is being decoded, by field name.
    """

    init: Init
    voices: dict[str, bytes]
    undecided: dict[str, int]

    @classmethod
    def of(cls, init: Init, first_media: int) -> tuple[PendingInit, list[DecodeMedia]]:
        """Take an init in; say what has to be decoded, numbered from `first_media`."""
        pending = cls(init, {}, {})
        decodes: list[DecodeMedia] = []
        sources: dict[str, AskedVoice | None] = {
            "llm": init.ref_audio,
            "tts": init.tts_ref_audio,
        }
        for name, source in sources.items():
            if source is None:
                continue
            decode = decode_voice(source, first_media + len(decodes))
            if decode is not None:
                pending.undecided[name] = decode.media
                decodes.append(decode)
            elif isinstance(source, ReferenceAudio):
                pending.voices[name] = source.data
        return pending, decodes

    @property
    def is_complete(self) -> bool:
        """Every voice is known."""
        return not self.undecided

    def awaits(self, media: int) -> bool:
        """Whether `media` is one of its voices."""
        return media in self.undecided.values()

    def decoded(self, media: int, pcm: bytes) -> None:
        """Take a decoded voice in."""
        for name, number in list(self.undecided.items()):
            if number == media:
                self.voices[name] = pcm
                del self.undecided[name]

    def to_opening(self, seed: int) -> Opening:
        """What the backend is asked for; the spoken voice falls back on the heard one (000)."""
        llm = self.voices.get("llm", b"")
        voice = Voice(llm_pcm=llm, tts_pcm=self.voices.get("tts", llm))
        return Opening(
            instructions=self.init.instructions, voice=voice, config=self.init.config, seed=seed
        )
