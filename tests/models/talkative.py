"""`antiphon` with a scripted model that talks all the time, with the voice of `fixtures/speech`.

`talk` is to be called in its process before `main`.

A tone, as which the scripted model speaks elsewhere, has no syllables by which it is known again.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
import soundfile

from protocol.values.model import INPUT_RATE_HZ, OUTPUT_RATE_HZ
from runtime.model.backends.scripted import ScriptedBackend, Speaks, Step

SPEECH: Final = Path(__file__).parents[2] / "fixtures" / "speech" / "heldout"
SECONDS: Final = 20


def voice() -> list[bytes]:
    """Seconds of speech, 24 kHz."""
    spoken = [soundfile.read(path)[0] for path in islice(sorted(SPEECH.glob("*.flac")), 0, None, 4)]
    sound = np.concatenate(spoken)[: SECONDS * INPUT_RATE_HZ]
    at = np.arange(SECONDS * OUTPUT_RATE_HZ) * INPUT_RATE_HZ / OUTPUT_RATE_HZ
    faster = np.interp(at, np.arange(len(sound)), sound).astype("<f4")
    return [second.tobytes() for second in np.split(faster, SECONDS)]


def talk() -> None:
    """Have the scripted model say that, in each session of this process."""
    steps = [Step(speech=Speaks(text="and so on, ", pcm=second)) for second in voice()]
    ScriptedBackend.__init__.__defaults__ = (lambda unit, _: steps[unit.index % SECONDS],)
