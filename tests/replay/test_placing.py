"""Where sound is heard: by one rule, whoever tells of it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pybase64
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol.values.limits import NS_PER_S
from recorder.format.format import Fields, Record
from recorder.read.reader import LogReader
from recorder.read.scan import Damage
from replay.export.timeline import Timeline
from replay.view.story import PEAKS_A_SECOND
from runtime.measures.conversation import RATE_HZ, VOICES, Voice
from runtime.measures.talk import HELD_UP_S_MAX, JITTER_MS, Line, Sound, sample_at, time_of
from tests.browser.view_pages import narrate
from tests.golden.logs import SAMPLE
from tests.replay.exported import exported, peaks, read_stereo
from tests.replay.test_export import talk_of_impulses
from tests.replay.test_logs import HEAD, Scene, scenes, write_log

Stretch = tuple[int, int]
JITTER_NS = JITTER_MS * 1_000_000


def joined(spans: Iterable[Stretch]) -> list[Stretch]:
    """Join what follows at once, or as soon as a page draws it so."""
    found: list[Stretch] = []
    for begin, end in spans:
        if found and begin - found[-1][1] <= JITTER_NS:
            found[-1] = (found[-1][0], end)
        elif end > begin:
            found.append((begin, end))
    return found


def in_export(head: Fields, items: Iterable[Record | Damage], voice: Voice) -> list[Stretch]:
    """When a voice is heard in what is exported."""
    sounds = (one for one in Timeline(head, items) if isinstance(one, Sound))
    return joined((one.begin_ns, one.end_ns) for one in sounds if one.voice == voice)


def in_view(head: Fields, items: Iterable[Record | Damage], voice: Voice) -> list[Stretch]:
    """When it is heard in the page."""
    pieces = (piece for piece in narrate(head, items)["sound"] if piece["voice"] == voice)
    return joined((piece["begin_ns"], piece["end_ns"]) for piece in pieces)


@pytest.mark.slow
@pytest.mark.parametrize("voice", VOICES)
@pytest.mark.parametrize("log", SAMPLE, ids=lambda log: log.name.removesuffix(".session.zst"))
def test_a_page_and_a_file_agree_on_every_golden_log(log: Path, voice: Voice) -> None:
    """Whoever listens to the page and cuts the WAV would cut at another word."""
    with LogReader(log) as reader:
        head, items = reader.head.fields, list(reader)
    assert in_view(head, items, voice) == in_export(head, items, voice)


@pytest.mark.slow
@settings(max_examples=25)
@given(scenes(), st.sampled_from(VOICES))
def test_a_page_and_a_file_agree_on_any_session(scene: Scene, voice: Voice) -> None:
    """Some odd session would be told in two ways."""
    assert in_view(HEAD, scene.records, voice) == in_export(HEAD, scene.records, voice)


def test_a_sample_is_at_the_same_time_in_the_page_and_in_the_file(tmp_path: Path) -> None:
    """Both voices could be whole, and a little beside each other in one of the two."""
    talk = talk_of_impulses()
    stereo = read_stereo(exported(write_log(tmp_path, talk.records), "wav"))
    pieces: list[dict[str, Any]] = narrate(HEAD, talk.records)["sound"]
    for channel, voice in enumerate(VOICES):
        drawn: list[float] = []
        for piece in (piece for piece in pieces if piece["voice"] == voice):
            pairs = np.frombuffer(pybase64.b64decode(piece["peaks"]), np.int8).reshape(-1, 2)
            bins = np.flatnonzero(pairs[:, 1] > 32)
            drawn += (piece["begin_ns"] / NS_PER_S + bins / PEAKS_A_SECOND).tolist()
        heard = [at / 48_000 for at in peaks(stereo[:, channel])]
        assert len(heard) == len(drawn) == 3
        apart = [late - early for late, early in zip(heard, drawn, strict=True)]
        assert all(-1 / 16_000 <= each < 1 / PEAKS_A_SECOND for each in apart)


def test_what_was_captured_ends_where_it_came() -> None:
    """The user's last word would stand a second after the answer to it."""
    line = Line("user")
    assert line.place(5 * NS_PER_S, 16_000, is_captured=True) == 4 * 16_000
    assert line.place(6 * NS_PER_S, 8_000, is_captured=True) == 88_000
    assert line.place(6 * NS_PER_S, 16_000, is_captured=True) == 88_000
    assert (line.moved, line.begin) == (8_000, 80_000), "what came before it moved into the gap"
    assert line.place(20 * NS_PER_S, 8_000, is_captured=False) == 320_000, "a question is a file"
    assert Line("user").place(NS_PER_S, 32_000, is_captured=True) == 0, "not before the session"


_ARRIVALS = st.lists(
    st.tuples(st.integers(0, 3 * NS_PER_S), st.integers(1, 40_000), st.booleans()), max_size=30
)


@settings(max_examples=60)
@given(st.sampled_from(VOICES), _ARRIVALS)
@example("user", [(1, 1, True), (0, 1, False)])
def test_sounds_keep_their_order_and_never_lie_upon_each_other(
    voice: Voice, arrivals: list[tuple[int, int, bool]]
) -> None:
    """Two words would be heard at once, or a word before it was sent."""
    line, at_ns, placed = Line(voice), 0, list[Stretch]()
    for wait_ns, samples, is_captured in arrivals:
        at_ns += wait_ns
        before, settled_ns = line.end, line.settled_ns(at_ns)
        begin = line.place(at_ns, samples, is_captured=is_captured)
        assert line.end == begin + samples
        if begin > before:  # else it is late, behind what came before
            edge = begin + samples if is_captured else begin
            off_ns = time_of(voice, edge) - at_ns
            assert abs(off_ns) <= NS_PER_S / RATE_HZ[voice]
            assert off_ns <= 0 if is_captured else sample_at(voice, at_ns) == begin
        moved_from = line.begin + line.moved
        for index, (first, end) in enumerate(placed):
            if line.moved and first >= moved_from:
                assert time_of(voice, first - line.moved) >= settled_ns
                placed[index] = (first - line.moved, end - line.moved)
        assert time_of(voice, begin) >= settled_ns
        placed.append((begin, line.end))
        assert all(first[1] <= second[0] for first, second in pairwise(placed))


def test_what_a_network_held_up_is_heard_when_it_was_said() -> None:
    """All that the user said after a stall would stand seconds late, to the end of the session."""
    line = Line("user")
    stall_s, line_begin = 4, line.place(10 * NS_PER_S, 160_000, is_captured=True)
    assert (line_begin, line.end) == (0, 160_000)
    for _ in range(stall_s):
        line.place((10 + stall_s) * NS_PER_S, 16_000, is_captured=True)
    assert (line.begin, line.end) == (160_000, 160_000 + 16_000 * stall_s)
    line.place(15 * NS_PER_S, 16_000, is_captured=True)
    assert line.end == 15 * 16_000, "on time again"


def test_a_flood_is_heard_late_and_moves_nothing_for_long() -> None:
    """A file that is sent at once would push aside what was said a minute before."""
    line = Line("user")
    line.place(60 * NS_PER_S, 16_000, is_captured=True)
    for _ in range(30):
        line.place(60 * NS_PER_S, 16_000, is_captured=True)
    assert line.begin == (59 - HELD_UP_S_MAX) * 16_000
    assert line.end == line.begin + 31 * 16_000
