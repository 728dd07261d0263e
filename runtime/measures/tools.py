"""The calls of tools in a duplex session: made, answered, spoken of; and what is measured of them.

A call is followed by the name that the model gave it, from the silent part that closes it. Its
result is what the next unit feeds; the speech after that counts as the model's answer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import attrs

from protocol.machine.tools import UNANSWERED
from protocol.values import events as ev
from protocol.values import model

from .conversation import Span, ns_of, times
from .measure import Total, Value


@attrs.frozen(kw_only=True)
class CallStory:
    """A call of a tool in a duplex session.

    Attributes:
        at_ns: when it was sent; of one that was not, when it was refused.
        ended_ns: when its result, or an error in its place, was fed to the model, if it was.
        spoken_ns: when the model spoke next, if it did.
        result: what was fed.
        is_answered: the client's result was fed, and no error in its place.
    """

    at_ns: int
    call: str
    name: str = ""
    arguments: str = ""
    ended_ns: int | None = None
    spoken_ns: int | None = None
    result: str = ""
    is_answered: bool = False


class CallStories:
    """Follows the calls of a session; without texts, an hour of them takes some kilobytes."""

    def __init__(self, *, keeps_texts: bool = True) -> None:
        self.found: dict[str, CallStory] = {}
        self._keeps_texts: Final = keeps_texts
        self._faults: set[str] = set()
        self._silent: list[str] = []  # calls whose result was fed, and the model did not speak
        self._made = 0

    def take(self, event: ev.Event) -> list[CallStory]:
        """Take an event: what the model did in silence, or said; returns the calls that it made."""
        match event:
            case ev.FinalizeDone(at_ns=at_ns, finalized=done) if done.silent is not None:
                return [self._called(at_ns, it) for it in done.silent.spans if it.kind == "call"]
            case ev.UnitDone(at_ns=at_ns, result=result) if not result.is_listen:
                for call in self._silent:
                    self.found[call] = attrs.evolve(self.found[call], spoken_ns=at_ns)
                self._silent.clear()
        return []

    def _called(self, at_ns: int, span: model.Span) -> CallStory:
        self._made += 1
        call = f"t{self._made}"
        if span.fault:
            self._faults.add(call)
        text = span.arguments if self._keeps_texts else ""
        made = CallStory(at_ns=at_ns, call=call, name=span.name, arguments=text)
        self.found[call] = made
        return made

    def fed(self, each: model.UnitInput, at_ns: int) -> list[CallStory]:
        """Take an event that a unit feeds, maybe again; returns the call whose result it is."""
        story = self.found.get(each.call)
        if each.kind != "result" or story is None:
            return []
        if each.call not in self._silent:
            self._silent.append(each.call)
        self.found[each.call] = story = attrs.evolve(
            story,
            ended_ns=at_ns,
            result=each.text if self._keeps_texts else "",
            is_answered=each.call not in self._faults and each.text not in UNANSWERED,
        )
        return [story]


def tool_scores(calls: Iterable[CallStory], user: Sequence[Span]) -> dict[str, Value | None]:
    """Measure the calls of a session, given the user's speech; nothing without a call."""
    made = [*calls]
    if not made:
        return {}
    answered = [it for it in made if it.is_answered]
    return {
        "tool_calls": Total(len(made)),
        "tool_calls_unanswered": Total(len(made) - len(answered)),
        "tool_call_delay": times(_delays(made, user)),
        "tool_result_delay": times(
            (it.at_ns, it.ended_ns - it.at_ns) for it in answered if it.ended_ns is not None
        ),
        "tool_speech_delay": times(
            (it.ended_ns, it.spoken_ns - it.ended_ns)
            for it in answered
            if it.ended_ns is not None and it.spoken_ns is not None
        ),
    }


def _delays(calls: Iterable[CallStory], user: Sequence[Span]) -> Iterator[tuple[int, int]]:
    """When each call was made, and how long after the user's last word."""
    for it in calls:
        index = bisect_right(user, it.at_ns, key=lambda span: ns_of(span.begin)) - 1
        ended_ns = ns_of(user[index].end) if index >= 0 else it.at_ns + 1
        if ended_ns <= it.at_ns:
            yield it.at_ns, it.at_ns - ended_ns
