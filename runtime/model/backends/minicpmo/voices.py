"""Selects the vocoder for a checkpoint's `assets/token2wav`, and reports missing parts.

Pieces of sound are `tiny`'s; the published files need the public package, in a process of its own
(`token2wav.py`). Without either, or without the package, a model gives only text, and logs why.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from .token2wav import FILES, PYTHON, Options, Token2Wav
from .token2wav_link import VoiceUnavailable, check
from .token2wav_worker import INSTALL
from .vocoder import PieceVocoder, Vocoder

PIECES: Final = "pieces.safetensors"

_log = logging.getLogger("antiphon.model")


def lacking(folder: Path, options: Options | None = None) -> tuple[str, ...]:
    """List what a voice lacks, a line each, as `antiphon doctor` shows it; loads nothing.

    Only loading can tell whether the files are whole, and whether a GPU has room.
    """
    if (folder / PIECES).exists():
        return ()
    absent = [name for name in FILES if not (folder / name).is_file()]
    if len(absent) == len(FILES):
        return (f"no vocoder in {folder}: neither {PIECES} nor {', '.join(FILES)}",)
    lines = [f"{folder / name} is missing" for name in absent]
    try:
        python = (options or Options.from_environment()).python
        missing = check(python)["missing"]
    except ValueError as error:
        return (*lines, str(error))
    if missing:
        lines.append(
            f"{python} lacks {', '.join(missing)}: make a virtual environment for the vocoder, "
            f"{INSTALL} in it, and set {PYTHON} to its python"
        )
    return tuple(lines)


def load_vocoder(folder: Path, *, slots: int) -> Vocoder | None:
    """Load the vocoder for the folder's files; None if there is none, with the reason logged.

    `OSError`: a file of `tiny`'s cannot be read; `ValueError`: its files do not fit each other.
    """
    if (folder / PIECES).exists():
        return PieceVocoder.load(folder)
    reasons = lacking(folder)
    if not reasons:
        try:
            return Token2Wav(folder, Options.from_environment(), slots=slots)
        except VoiceUnavailable as error:
            reasons = (str(error),)
    for reason in reasons:
        _log.warning("text alone, without speech: %s", reason)
    return None
