"""The measures again, by counting cells of time: a second implementation that must agree.

A voice is an array of cells, true where it is heard. Nothing is shared with `replay.eval` but the
definitions in words and the numbers in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from replay.eval.scores import score
from runtime.measures.conversation import Conversation, Ratio, Span, Text, Times, Total, ns_of
from tests.golden.logs import SAMPLE
from tests.project.sampling import sample
from tests.replay.evaluated import facts_in, facts_of, measured
from tests.replay.test_logs import Scene, scenes

Cells = NDArray[np.bool_]
Run = tuple[int, int]
CELL: Final = 4_800
"""Ticks: a tenth of a second."""
CELL_NS: Final = 100_000_000


def runs(cells: Cells) -> list[Run]:
    """Where a voice begins and ends."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], cells, [False]]).astype(int)))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


@attrs.define
class Naive:
    """A conversation; `s` is how many cells are a second."""

    user: Cells
    model: Cells
    s: int
    words: list[tuple[int, int]] = attrs.field(factory=list)

    def over(self, run: Run) -> Run | None:
        """The model's stretch over which a stretch of the user begins."""
        begin = run[0]
        is_over = begin > 0 and self.model[begin] and self.model[begin - 1]
        if not is_over:
            return None
        return next((a, b) for a, b in runs(self.model) if a <= begin < b)

    def yields(self, run: Run) -> bool:
        """The model is silent by the end of the speech, or two seconds after its begin."""
        over = self.over(run)
        assert over is not None
        return over[1] <= run[1] or over[1] <= run[0] + 2 * self.s

    def is_word(self, run: Run) -> bool:
        """A backchannel of the user."""
        return run[1] - run[0] < self.s and self.over(run) is not None and not self.yields(run)

    def turns(self) -> tuple[list[Run], list[str]]:
        """The user's turns, and its pauses."""
        speech = [run for run in runs(self.user) if not self.is_word(run)]
        found: list[Run] = []
        pauses: list[str] = []
        for index, run in enumerate(speech):
            found.append(run)
            if not index:
                continue
            before, begin = found[-2][1], run[0]
            if begin - before >= 2 * self.s:
                continue
            starts = [a for a, b in runs(self.model) if before <= a < begin < b]
            if starts or not self.model[before:begin].any():
                pauses.append("mistaken" if starts else "quiet")
                found[-2:] = [(found[-2][0], run[1])]
        return found, pauses

    def scores(self) -> dict[str, Any]:
        """The measures as numbers of cells."""
        user, model = runs(self.user), runs(self.model)
        turns, pauses = self.turns()
        delays, taken, judged, unanswered = [], 0, 0, 0
        firsts: list[int | None] = []
        for index, (begin, end) in enumerate(turns):
            has_next = index + 1 < len(turns)
            until = turns[index + 1][0] if has_next else len(self.model)
            answers = [a for a, b in model if begin < a < until and b > end]
            judged += bool(answers) or has_next or until - end >= 4 * self.s
            taken += bool(answers)
            if answers:
                firsts.append(answers[0] - end if answers[0] >= end else None)
            delays += [a - end for a in answers[:1] if a >= end]
            silent = until - end >= 4 * self.s and not self.model[end : end + 4 * self.s].any()
            unanswered += silent
        barge_ins = [run for run in user if self.over(run) and not self.is_word(run)]
        stops = [self.over(run)[1] - run[0] for run in barge_ins if self.yields(run)]  # type: ignore[index]
        early = [(a, b) for a, b in model if self.user[a]]
        words = [(a, b) for a, b in early if b - a < self.s and self.user[a:b].all()]
        starts = [run for run in early if run not in words]
        false = [
            (a, b)
            for a, b in model
            if not self.user[a] and b - a < self.s and b < len(self.user) and self.user[b]
        ]
        unasked, since = 0, 0
        for a, b in model:
            unasked += 0 if self.user[since:a].any() else b - a
            since = a
        return {
            "response_delay": delays,
            "first": firsts[:1],
            "take_over_rate": (taken, judged),
            "unanswered": unanswered,
            "pause_take_over_rate": (pauses.count("mistaken"), len(pauses)),
            "barge_ins": len(barge_ins),
            "barge_in_yield_rate": (len(stops), len(barge_ins)),
            "barge_in_stop_latency": stops,
            "barge_in_words": [
                sum(n for at, n in self.words if run[0] <= at < self.over(run)[1])  # type: ignore[index]
                for run in barge_ins
            ],
            "user_backchannels": sum(map(self.is_word, user)),
            "model_backchannels": len(words),
            "early_starts": len(starts),
            "false_starts": len(false),
            "overlap": int((self.user & self.model).sum()),
            "talk_over": sum(int(self.user[a:b].sum()) for a, b in starts),
            "self_talk": unasked,
        }


def compare(talk: Conversation, naive: Naive, ns: Callable[[int], int]) -> None:
    """Compare both; what is absent has nothing to count. `ns` are nanoseconds of cells."""
    found, expected = measured(talk), naive.scores()
    first = [it for it in expected.pop("first") if it is not None]
    assert _amounts(found.get("time_to_first_audio")) == [*map(ns, first)]
    for name, value in expected.items():
        has = found.get(name)
        if isinstance(value, list):
            assert _amounts(has) == [it if name in COUNTED else ns(it) for it in value], name
        elif isinstance(value, tuple):
            assert (has is None) == (value[1] == 0), name
            assert has is None or has == Ratio(*value), name
        elif name == "talk_over":
            assert has is None or has.part == ns(value), name
        elif has is not None:
            assert has == Total(ns(value) if name in TIMED else value), name


COUNTED: Final = {"barge_in_words"}
TIMED: Final = {"overlap", "self_talk"}


def _amounts(value: Times | None) -> list[int]:
    return [] if value is None else [amount for _, amount in value.values]


def spans_of(cells: Cells) -> tuple[Span, ...]:
    """The same as spans."""
    return tuple(Span(a * CELL, b * CELL) for a, b in runs(cells))


@st.composite
def voices(draw: st.DrawFn, length: int) -> Cells:
    """Draw a voice: stretches, with half a second or more between them."""
    cells, at = np.zeros(length, bool), draw(st.integers(0, 30))
    for stretch, gap in draw(st.lists(st.tuples(st.integers(1, 40), st.integers(5, 50)))):
        cells[at : at + stretch] = True
        at += stretch + gap
    return cells


LENGTH: Final = 300


@given(
    voices(LENGTH), voices(LENGTH), st.lists(st.tuples(st.integers(0, LENGTH), st.integers(1, 9)))
)
@settings(max_examples=8 * settings.default.max_examples, deadline=None)
def test_intervals_and_cells_agree(user: Cells, model: Cells, words: Sequence[Run]) -> None:
    """A mistake in a measure would be seen by no one."""
    talk = Conversation(
        user=spans_of(user),
        model=spans_of(model),
        texts=tuple(Text(at * CELL, count) for at, count in sorted(words)),
        end=LENGTH * CELL,
    )
    compare(talk, Naive(user, model, 10, [*words]), lambda cells: cells * CELL_NS)


@pytest.mark.parametrize("log", SAMPLE, ids=lambda log: log.name)
def test_both_agree_on_golden_logs_to_the_sample(log: Path) -> None:
    """Lengths that are no whole tenths of a second would be rounded."""
    talk = facts_in(log).conversation
    ticks = max((span.end for span in (*talk.user, *talk.model)), default=0)
    cells = {name: np.zeros(max(ticks, talk.end), bool) for name in ("user", "model")}
    for name, voice in cells.items():
        for span in getattr(talk, name):
            voice[span.begin : span.end] = True
    words = [(text.begin, text.words) for text in talk.texts]
    if not talk.pauses and talk.end >= ticks:
        compare(talk, Naive(cells["user"], cells["model"], 48_000, words), ns_of)


@given(scenes())
@example(Scene())
@settings(max_examples=sample(60, 25), deadline=None)
def test_any_session_is_measured(scene: Scene) -> None:
    """A log of a session that went wrong would stop the evaluation of its folder."""
    facts = facts_of(scene.records)
    assert score(facts) == score(facts_of(scene.records))
    talk = facts.conversation
    for voice in (talk.user, talk.model):
        assert all(a.end < b.begin and a.ticks > 0 for a, b in pairwise(voice))
    assert facts.late_units is not None
    assert facts.late_units <= facts.answered_units
