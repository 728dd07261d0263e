"""What hears a session's user in addition to the model."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from ..media.speech_detector import EnergyJudge, Judge
from .transcriber import Transcriber


@attrs.frozen
class Ears:
    """Outside of the session: what they find comes to it as events.

    Attributes:
        make_judge: makes what finds the user's speech.
        transcriber: writes down what the user says; None: it is not written down.
    """

    make_judge: Callable[[], Judge] = EnergyJudge
    transcriber: Transcriber | None = None


EARS = Ears()
"""Of a server that was given none: energy, and nothing is written down."""
