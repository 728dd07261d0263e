"""How sound is written in OpenAI's dialects."""

from __future__ import annotations

from typing import Final, Literal, get_args

Coding = Literal["audio/pcm", "audio/pcmu", "audio/pcma"]
"""Signed 16-bit LE samples, or a byte each by G.711's mu-law or A-law."""
CODINGS: Final[tuple[Coding, ...]] = get_args(Coding)
LIVE_RATES_HZ: Final = (24_000, 16_000)
"""Of PCM; the first one if nothing else is said."""
G711_RATE_HZ: Final = 8_000


def rate_of(coding: Coding) -> int:
    """Samples a second, if nothing else is said."""
    return LIVE_RATES_HZ[0] if coding == "audio/pcm" else G711_RATE_HZ
