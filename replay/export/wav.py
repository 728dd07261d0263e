"""A stereo WAV: the user left, the model right, 16 bits at 48 kHz, on the session's clock.

Frame `n` is heard `n / 48000` seconds after the session's start; `timeline` places sound and
`mixer` brings it to 48 kHz. Ten minutes are 115 MB, written a second at a time.
"""

from __future__ import annotations

import wave
from typing import BinaryIO

from .mixer import CHANNELS, PCM16_BYTES, STEREO_HZ, Mixer
from .moments import Sound
from .timeline import Timeline


def write_wav(timeline: Timeline, file: BinaryIO) -> None:
    """Write both voices to a file that can seek.

    `OSError`: writing failed; `TooLongError`: the session is longer than sound can be written.
    """
    mixer = Mixer()
    with wave.open(file, "wb") as sound:
        sound.setparams((CHANNELS, PCM16_BYTES, STEREO_HZ, 0, "NONE", "not compressed"))
        for moment in timeline:
            if isinstance(moment, Sound):
                for frames in mixer.add(moment):
                    sound.writeframesraw(frames.tobytes())
        for frames in mixer.finish(timeline.duration_ns):
            sound.writeframesraw(frames.tobytes())
