"""Conversations for the tests of `antiphon eval`: who speaks when is known to the sample."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
from click.testing import CliRunner, Result

from protocol.values import events as ev
from recorder.format.format import Record
from recorder.read.reader import LogReader
from replay.assess.command import eval_command
from replay.eval.scores import Facts, conversation_scores, gather, score
from runtime.measures.conversation import Conversation, Scores, Span, Text
from tests.replay.exported import Talk
from tests.replay.test_logs import HEAD, OPENED
from tests.sessions.in_memory import init_frame

SECOND: Final = 48_000
"""Ticks."""
NS: Final = 1_000_000_000


def loud(*seconds: tuple[float, float], length: float = 1.0) -> bytes:
    """Make sound at 16 kHz that is loud from and to some seconds, and silent elsewhere."""
    at = np.arange(round(16_000 * length))
    pcm = np.zeros(len(at), "<f4")
    for begin, end in seconds:
        here = slice(round(16_000 * begin), round(16_000 * end))
        pcm[here] = 0.1 * np.sin(2 * np.pi * 220 / 16_000 * at[here] + 0.5)
    return pcm.tobytes()


def voice(seconds: float) -> bytes:
    """Make sound of the model."""
    return np.full(round(24_000 * seconds), 0.25, "<f4").tobytes()


class Duplex(Talk):
    """A session whose model may speak at once; its user is searched for speech if `is_searched`."""

    def __init__(self, *, is_searched: bool = False) -> None:
        limits = attrs.evolve(OPENED.limits, barge_in=is_searched)
        super().__init__(attrs.evolve(OPENED, mode="audio", limits=limits))
        self.activate(init_frame(config={"force_listen_count": 0}))

    def hear(self, at_s: float, pcm: bytes, **fields: object) -> None:
        """Let sound of the user come, at a time; nothing else answers its search for speech."""
        self.at(round(at_s * NS))
        self.say(pcm, **fields)
        self._asked = [it for it in self._asked if type(it).__name__ != "DetectSpeech"]

    def speak(
        self, at_s: float, index: int, seconds: float = 0, text: str = "", **how: Any
    ) -> None:
        """Let the model answer a unit, with so much sound, or listen."""
        self.at(round(at_s * NS))
        self.reply(index, voice(seconds), text, **how)

    def found(self, kind: type[ev.SpeechStarted | ev.SpeechStopped], at_ms: int) -> None:
        """Let the server find where speech begins or stops."""
        self.post(kind, at_ms=at_ms)

    def facts(self, at_s: float) -> Facts:
        """End the session at a time, and gather its facts."""
        self.at(round(at_s * NS))
        self.finish()
        return facts_of(self.records)


def facts_of(records: Iterable[Record], head: dict[str, Any] = HEAD) -> Facts:
    """Gather the facts of records."""
    return gather(head, records)


def facts_in(log: Path) -> Facts:
    """Gather the facts of a log."""
    with LogReader(log) as reader:
        return gather(reader.head.fields, reader)


def scores_in(log: Path) -> Scores:
    """Measure a log."""
    return score(facts_in(log))


def spans(*seconds: tuple[float, float]) -> tuple[Span, ...]:
    """Make spans from seconds."""
    return tuple(Span(round(begin * SECOND), round(end * SECOND)) for begin, end in seconds)


def talk(
    user: Iterable[tuple[float, float]],
    model: Iterable[tuple[float, float]],
    *,
    end: float = 60,
    words: Iterable[tuple[float, int]] = (),
    **more: Iterable[float],
) -> Conversation:
    """Make a conversation from seconds."""
    return Conversation(
        user=spans(*user),
        model=spans(*model),
        texts=tuple(Text(round(at * SECOND), count) for at, count in words),
        end=round(end * SECOND),
        **{name: tuple(round(at * SECOND) for at in ats) for name, ats in more.items()},
    )


def measured(conversation: Conversation) -> dict[str, Any]:
    """Measure a conversation, and leave out what is absent."""
    found = conversation_scores(conversation)
    return {name: value for name, value in found.items() if value is not None}


def call(*arguments: object) -> Result:
    """Run `antiphon eval`; it must never end in a traceback."""
    result = CliRunner().invoke(eval_command, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def told(*arguments: object) -> Any:
    """Run it for a script, and read its JSON."""
    return json.loads(call(*arguments, "--json").stdout)
