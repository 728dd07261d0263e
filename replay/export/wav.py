"""A stereo WAV: the user left, the model right, 16 bits at 48 kHz, on the session's clock.

Frame `n` is heard `n / 48000` seconds after the session's start; see `timeline` for where sound
stands and `mixer` for how it comes to 48 kHz. Ten minutes are 115 MB, written a second at a time.
"""

from __future__ import annotations

from typing import BinaryIO

import soundfile

from .mixer import CHANNELS, STEREO_HZ, Mixer
from .moments import Sound
from .timeline import Timeline


def write_wav(timeline: Timeline, file: BinaryIO) -> None:
    """Write both voices.

    Args:
        timeline: the session.
        file: takes it; it can be sought in.
    """
    mixer = Mixer()
    with soundfile.SoundFile(
        file, "w", STEREO_HZ, CHANNELS, subtype="PCM_16", format="WAV"
    ) as sound:
        for moment in timeline:
            if isinstance(moment, Sound):
                for frames in mixer.add(moment):
                    sound.write(frames)
        for frames in mixer.finish(timeline.duration_ns):
            sound.write(frames)
