"""What a recording's export has in it, for tests of dialects whose sound comes in pieces."""

from __future__ import annotations

import subprocess
import wave
from pathlib import Path
from typing import Final

import numpy as np

from runtime import RUN

LOUD: Final = 1000
"""Of 32767: speech, or a tone."""


def loud_s(log: Path, folder: Path) -> tuple[float, float]:
    """Export a log as WAV; the seconds in which its user is heard, and its model."""
    path = folder / "export.wav"
    command = [*RUN, "export", str(log), "--to", "wav", "-o", str(path), "--force"]
    subprocess.run(command, check=True, capture_output=True)
    with wave.open(str(path)) as file:
        rate_hz = file.getframerate()
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, 2)
    tenths = samples[: len(samples) // (rate_hz // 10) * (rate_hz // 10)].astype(np.int64)
    peaks = np.abs(tenths).reshape(-1, rate_hz // 10, 2).max(axis=1)
    user, model = (float((peaks[:, voice] > LOUD).sum() / 10) for voice in (0, 1))
    return user, model
