"""Random scripts with every possible outcome, decided only by a seed; no test itself."""

from __future__ import annotations

from typing import Final

from protocol.values.model import OUTPUT_RATE_HZ, Chunk, Unit
from runtime.model.backends.scripted import Call, Script, Speaks, Step
from runtime.model.backends.scripted_chat import (
    WORDS,
    Fault,
    HearingScript,
    Transcribed,
    draw,
    tone,
)

_FAULTS: Final[dict[int, Fault]] = {0: "fail", 1: "gone", 2: "hang"}
_CHUNK_FAULTS: Final[dict[int, Fault]] = {3: "fail", 4: "fail", 5: "context_full", **_FAULTS}
_UNIT_FAULTS: Final[dict[int, Fault]] = {3: "context_full", **_FAULTS}


def random_script(seed: int) -> Script:
    """Make a script with every possible outcome, decided by `seed`."""

    def script(unit: Unit, session_seed: int) -> Step:
        dice = draw("script", seed, session_seed, unit.index)
        return Step(
            speech=_random_speech(unit.index, session_seed, dice) if dice[0] < 96 else None,
            fault="fail" if dice[3] < 25 else _UNIT_FAULTS.get(dice[4]),
            prefill_s=dice[1] / 1000,
            generate_s=dice[2] / 80 if dice[5] < 25 else dice[2] / 500,
            steps=1 + dice[6] % 19,
            finalize=Call(duration_s=dice[7] / 2000, fault=_FAULTS.get(dice[8])),
            rollback=Call(duration_s=dice[9] / 2000, fault=_FAULTS.get(dice[10] // 8)),
        )

    return script


def _random_speech(index: int, seed: int, dice: bytes) -> Speaks:
    last = dice[11] < 96
    samples = dice[12] * OUTPUT_RATE_HZ // 256 if last else OUTPUT_RATE_HZ
    text = f"word {dice[13]} " if dice[14] < 224 else ""
    return Speaks(text=text, pcm=tone(index, seed, samples=samples), end_of_turn=last)


def random_hearing(seed: int) -> HearingScript:
    """Make a script with every possible outcome, decided by `seed`."""

    def script(chunk: Chunk) -> Transcribed:
        dice = draw("hearing", seed, chunk.seed, chunk.utterance, chunk.index)
        text = "" if dice[0] < 64 else f"{WORDS[dice[1] % len(WORDS)]}-{chunk.index} "
        return Transcribed(text=text, takes_s=dice[2] / 200, fault=_CHUNK_FAULTS.get(dice[3] // 2))

    return script
