"""The chat skills of `tiny`, measured; see `score.py` for the registry.

Each question is a turn of its own with the default settings, on the held-out renderings of the
duplex scores: whole files, with a tenth of a second of quiet at both ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np

from protocol.values.model import (
    OUTPUT_RATE_HZ,
    SAMPLE_BYTES,
    ChatConfig,
    Content,
    Message,
    Picture,
    Sound,
    SpeechConfig,
    Text,
    Tool,
    Turn,
    TurnChunk,
    TurnResult,
)
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.work import Steps
from tests.bench.tiny.staging import (
    SEEING,
    Course,
    Heldout,
    picture,
    read_manifest,
    read_speech,
    together,
)

Answer = tuple[list[TurnChunk], TurnResult]

UNKNOWN: Final = "I do not know that."
"""Its answer to an unknown question."""
SYSTEM: Final = ("", "You are a helpful assistant.", "Be brief.")
"""Instructions, in turn; the first is none."""
SPELLINGS: Final = ("{}", "{}?", "{}.")
ALOUD_S: Final = (0.4, 8.0)
"""Minimum and maximum seconds of a spoken answer: the shortest answer has 0.8, the longest 3.6."""


def message(*content: Content | str) -> Message:
    """A message of the user."""
    parts = (Text(text=part) if isinstance(part, str) else part for part in content)
    return Message(role="user", content=tuple(parts))


def ask(
    model: DuplexModel,
    place: int,
    *messages: Message,
    speech: SpeechConfig | None = None,
    tools: tuple[Tool, ...] = (),
) -> Course[Answer]:
    """Answer a conversation; `place` in the list of questions gives the seed and instructions."""
    text = SYSTEM[place % len(SYSTEM)]
    system = [Message(role="system", content=(Text(text=text),))] if text else []
    turn = Turn(
        index=0,
        messages=(*system, *messages),
        config=ChatConfig(),
        speech=speech,
        max_slice_nums=1,
        use_image_id=True,
        omni=False,
        thinking=False,
        seed=place,
        tools=tools,
    )

    def course(slot: int) -> Steps[Answer]:
        chunks, session = list[TurnChunk](), model.chat(slot=slot)
        try:
            for picture in range(session.measure(turn)):
                yield from session.see(picture)
            yield from session.prefill()
            return chunks, (yield from session.generate(chunks.append))
        finally:
            session.release()

    return course


def questions(folder: Path) -> list[Heldout]:
    """One rendering of each phrase."""
    return list({item.phrase: item for item in read_manifest(folder) if item.answer}.values())


def _earlier(items: Sequence[Heldout], place: int) -> tuple[Message, ...]:
    """Earlier turns: none, one or two phrases with their answers."""
    before = [items[(place + 7 * (turn + 1)) % len(items)] for turn in range(place % 3)]
    said = []
    for item in before:
        said += [message(item.phrase)]
        said += [Message(role="assistant", content=(Text(text=item.answer),))]
    return tuple(said)


def score_chat_typed(model: DuplexModel, folder: Path) -> dict[str, float]:
    """All phrases, typed in three spellings, after no, one or two turns; and unknown ones."""
    items = questions(folder)
    courses, asked = [], list(product(items, SPELLINGS))
    for place, (item, spelling) in enumerate(asked):
        typed = spelling.format(item.phrase.capitalize() if place % 2 else item.phrase)
        courses.append(ask(model, place, *_earlier(items, place), message(typed)))
    right = [
        result.text == item.answer and result.reason == "turn_end"
        for (item, _), (_, result) in zip(asked, together(model, courses), strict=True)
    ]
    strange = sorted({item.phrase for item in read_manifest(folder) if not item.answer})
    strangers = (ask(model, place, message(phrase)) for place, phrase in enumerate(strange))
    honest = [result.text == UNKNOWN for _, result in together(model, strangers)]
    return {
        "phrases": len(items),
        "questions": len(right),
        "answered_right": float(np.mean(right)),
        "unknown_admitted": float(np.mean(honest)),
    }


def score_chat_spoken(model: DuplexModel, folder: Path) -> dict[str, float]:
    """All held-out renderings as sound contents; and unknown speech."""
    right: dict[bool, list[bool]] = {True: [], False: []}
    items = read_manifest(folder)
    sounds = (Sound(pcm=read_speech(folder, item).astype("<f4").tobytes()) for item in items)
    courses = (ask(model, place, message(sound)) for place, sound in enumerate(sounds))
    for item, (_, result) in zip(items, together(model, courses), strict=True):
        right[bool(item.answer)].append(result.text == (item.answer or UNKNOWN))
    return {
        "renderings": len(right[True]),
        "answered_right": float(np.mean(right[True])),
        "unknown_admitted": float(np.mean(right[False])),
    }


def score_chat_colour(
    model: DuplexModel, folder: Path, pictures: Sequence[tuple[str, bytes]]
) -> dict[str, float]:
    """The colour that it names, asked in text and in speech; pictures: colour names and JPEGs."""
    spoken = [item for item in read_manifest(folder) if item.phrase == SEEING]
    asked, courses = [], []
    for place, (name, jpeg) in enumerate(pictures):
        pcm = read_speech(folder, spoken[place % len(spoken)]).astype("<f4").tobytes()
        questions: dict[str, Content] = {"typed": Text(text=SEEING), "spoken": Sound(pcm=pcm)}
        for way, question in questions.items():
            asked.append((way, name))
            courses.append(ask(model, place, message(Picture(jpeg=jpeg), question)))
    right: dict[str, list[bool]] = {"typed": [], "spoken": []}
    for (way, name), (_, result) in zip(asked, together(model, courses), strict=True):
        right[way].append(result.text == f"I see {name}.")
    return {f"named_right_{way}": float(np.mean(named)) for way, named in right.items()}


def seconds_of(chunks: list[TurnChunk], result: TurnResult) -> float:
    """How long an answer sounds."""
    pcm = sum(len(chunk.pcm) for chunk in chunks) + len(result.pcm)
    return pcm / SAMPLE_BYTES / OUTPUT_RATE_HZ


def score_chat_aloud(model: DuplexModel, folder: Path) -> dict[str, float]:
    """All phrases, typed, answered in speech: the same words, and sound of a fitting length."""
    right, sounded, seconds = [], [], []
    items = questions(folder)
    courses = (
        ask(model, place, message(item.phrase), speech=SpeechConfig())
        for place, item in enumerate(items)
    )
    for item, (chunks, result) in zip(items, together(model, courses), strict=True):
        seconds.append(seconds_of(chunks, result))
        right.append(result.text == item.answer)
        sounded.append(right[-1] and ALOUD_S[0] <= seconds[-1] <= ALOUD_S[1])
    return {
        "answered_right": float(np.mean(right)),
        "answered_aloud": float(np.mean(sounded)),
        "seconds_mean": round(float(np.mean(seconds)), 2),
    }


def colour_pictures(
    colours: Mapping[str, Sequence[tuple[int, int, int]]], sizes: Sequence[tuple[int, int]]
) -> list[tuple[str, bytes]]:
    """A picture of each shade (RGB), with the sizes (width, height) in turn."""
    return [
        (name, picture(shade, sizes[index % len(sizes)], index))
        for name, shades in colours.items()
        for index, shade in enumerate(shades)
    ]
