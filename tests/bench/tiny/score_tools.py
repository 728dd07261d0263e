"""`tiny`'s one tool, measured; see `score.py` for the registry.

A clock is offered, with another tool or without, and the time is asked in writing or aloud. The
result of a call is one of six hours, so its answer shows that it was read. The clock's name and
descriptions are those of the training; the other tools and the voices are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from protocol.values.model import Message, Sound, SpeechConfig, Text, Tool, ToolCall, ToolResult
from runtime.model.backends.minicpmo.model import DuplexModel
from tests.bench.tiny.score_chat import ask, message, questions, seconds_of
from tests.bench.tiny.staging import read_manifest, read_speech, together

TIME: Final = "what time is it"
SPELLINGS: Final = ("what time is it", "What time is it?")
SCHEMA: Final = '{"type":"object","properties":{}}'
CLOCKS: Final = (
    Tool(name="clock", description="Tells the time.", parameters=SCHEMA),
    Tool(name="clock"),
    Tool(name="clock", description="The current time."),
)
OTHER: Final = Tool(
    name="send_mail",
    description="Sends a letter to a friend.",
    parameters='{"type":"object","properties":{"to":{"type":"string"}}}',
)
OFFERS: Final = tuple(
    offer for clock in CLOCKS for offer in ((clock,), (clock, OTHER), (OTHER, clock))
)
HOURS: Final = ("one", "two", "three", "six", "nine", "twelve")


CALL: Final = ToolCall(name="clock", arguments="{}")
OFTEN: Final = 24
"""Times that the time is asked without a clock."""
TOLD_S: Final = (0.9, 1.8)
"""How long an answer that tells a time may sound; it was taught with 1.1 to 1.3 s."""

Case = tuple[tuple[Message, ...], tuple[Tool, ...], str]
"""A conversation, what is offered, and the answer; an empty one is a call of the clock."""


def _exchange(question: Message, time: str) -> tuple[Message, ...]:
    """A question for the time, its call, and the result."""
    return (
        question,
        Message(role="assistant", content=(ToolCall(id="c", name="clock", arguments="{}"),)),
        Message(role="tool", content=(ToolResult(call_id="c", output=time),)),
    )


def _right(model: DuplexModel, cases: Sequence[Case]) -> float:
    """The share of conversations that are answered as they should be."""
    courses = (
        ask(model, place, *messages, tools=tools)
        for place, (messages, tools, _) in enumerate(cases)
    )
    return float(
        np.mean(
            [
                (found.text, found.calls) == (text, () if text else (CALL,))
                for (_, found), (_, _, text) in zip(together(model, courses), cases, strict=True)
            ]
        )
    )


def _told_aloud(model: DuplexModel, cases: Sequence[Case]) -> float:
    """The share of answers with the right words, and with sound of a fitting length."""
    courses = (
        ask(model, place, *messages, tools=tools, speech=SpeechConfig())
        for place, (messages, tools, _) in enumerate(cases)
    )
    return float(
        np.mean(
            [
                found[1].text == text and TOLD_S[0] <= seconds_of(*found) <= TOLD_S[1]
                for found, (_, _, text) in zip(together(model, courses), cases, strict=True)
            ]
        )
    )


def score_tools(model: DuplexModel, folder: Path) -> dict[str, float]:
    """Calls of a clock, answers to its results, and answers that need none."""
    heard = [
        message(Sound(pcm=read_speech(folder, item).astype("<f4").tobytes()))
        for item in read_manifest(folder)
        if item.phrase == TIME
    ]
    typed = [message(text) for text in SPELLINGS]
    known = {item.phrase: item.answer for item in questions(folder)}
    usual = known.pop(TIME)
    asked = (typed[0], heard[0])
    told: list[Case] = [
        (_exchange(asked[(at + hour) % 2], f"{name} o'clock"), tools, f"It is {name} o'clock.")
        for at, tools in enumerate(OFFERS)
        for hour, name in enumerate(HOURS)
    ]
    again: list[Case] = [
        ((*messages, Message(role="assistant", content=(Text(text=said),)), typed[0]), tools, "")
        for messages, tools, said in told[::2]
    ]
    others: list[Case] = [
        ((message(phrase),), OFFERS[place % len(OFFERS)], answer)
        for place, (phrase, answer) in enumerate(known.items())
    ]
    without: list[Case] = [((typed[at % 2],), (OTHER,), usual) for at in range(OFTEN)]
    return {
        "called_typed": _right(model, [((it,), tools, "") for it in typed for tools in OFFERS]),
        "called_spoken": _right(model, [((it,), tools, "") for it in heard for tools in OFFERS]),
        "called_again": _right(model, again),
        "result_told": _right(model, told),
        "told_aloud": _told_aloud(model, told[::5]),
        "others_answered": _right(model, others),
        "without_clock": _right(model, without),
    }
