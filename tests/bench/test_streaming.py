"""The bench of live transcription: it runs, its sums are right. No time is judged here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

import anyio
import attrs
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from protocol.values.model import INPUT_RATE_HZ
from runtime.commands.bench import BenchError, machine_facts
from runtime.commands.demo import served
from runtime.model.backends.minicpmo.anchor import Anchor
from runtime.model.backends.minicpmo.model import DuplexModel
from tests.bench.streaming import (
    HELDOUT,
    PARTS,
    PIECE_SAMPLES,
    PIECES_A_SECOND,
    TAIL_SAMPLES,
    FlatResult,
    LiveResult,
    Part,
    Phrase,
    SpokenWord,
    Spread,
    StreamingResult,
    Told,
    Utterance,
    delay_of,
    find_seconds,
    find_words,
    load_phrases,
    make_stream,
    make_utterance,
    measure_flat,
    measure_live,
    show,
    spread_of,
    streaming_command,
    sum_up_live,
    words_of,
)
from tests.models import random_model
from tests.sessions.in_memory import numbers

PHRASES: Final = 2
SECONDS: Final = 2 * PARTS


@pytest.fixture(scope="module")
def body() -> dict[str, Any]:
    """A short run's JSON: a server in a process of its own, and sound at the pace of speech."""
    words = ["--json", "--model", "scripted", "--phrases", str(PHRASES)]
    done = CliRunner().invoke(streaming_command, words)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DuplexModel:
    """One with random weights and room for the stream."""
    return random_model.load(tmp_path_factory.mktemp("model"), slots=1)


@pytest.fixture(scope="module")
def flat(model: DuplexModel) -> FlatResult:
    """A short stream."""
    return measure_flat(model, load_phrases(5), SECONDS)


# -- the whole ----------------------------------------------------------------------------------


def test_every_word_is_timed(body: dict[str, Any]) -> None:
    """A chart of the delays breaks, or is of some words alone and does not say so."""
    assert set(body) == {field.name for field in attrs.fields(StreamingResult)}
    live = body["live"]
    assert set(live) == {field.name for field in attrs.fields(LiveResult)}
    assert all(math.isfinite(number) for number in numbers(body))
    words = sum(len(words_of(phrase)) for phrase in load_phrases(PHRASES))
    assert (live["utterances"], live["words"]) == (PHRASES, words)
    # The script hears nothing in a second of which a word's last moment alone is.
    assert live["missed"] == sum(live["missed_words"].values()) <= words // 3
    for name in ("delay", "wait", "server"):
        assert set(live[name]) == {field.name for field in attrs.fields(Spread)}
        assert live[name]["count"] == words - live["missed"] - live["early"]
    assert body["flat"] is None


def test_a_delay_is_its_wait_and_the_server_s_part(body: dict[str, Any]) -> None:
    """The server is blamed for the second that must be full first, or not for its own part."""
    live = body["live"]
    assert 0 <= live["wait"]["p50_ms"] <= live["wait"]["max_ms"]
    assert live["server"]["p50_ms"] >= 20, "the script takes so long"
    assert live["delay"]["max_ms"] >= live["wait"]["max_ms"]
    assert live["delay"]["max_ms"] >= live["server"]["p50_ms"]
    assert 0 < live["wait_share"] < 1


def test_nothing_is_computed_twice(flat: FlatResult) -> None:
    """The figures of a long stream are of other parts than they say, or history costs again."""
    assert (flat.seconds, flat.is_whole, flat.computed_again) == (SECONDS, True, 0)
    assert [part.chunks for part in flat.parts] == [SECONDS // PARTS] * PARTS
    held = 0
    for part in flat.parts:
        assert part.computed == part.own == part.kv_length - held
        assert part.cpu_ms >= part.step_ms > 0
        held = part.kv_length
    assert flat.last_of_first == pytest.approx(flat.parts[-1].cpu_ms / flat.parts[0].cpu_ms, 0.01)
    assert flat.last_of_first_step > 0


@pytest.mark.soak  # `test_nothing_is_computed_twice` has the same stream.
def test_history_that_is_computed_again_is_found(
    model: DuplexModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bench would say 0 whatever the model did."""
    feed = Anchor._feed

    def twice(anchor: Anchor, rows: Any) -> Any:
        length = anchor.length
        yield from feed(anchor, rows)
        anchor.length = length
        return (yield from feed(anchor, rows))

    monkeypatch.setattr(Anchor, "_feed", twice)
    found = measure_flat(model, load_phrases(5), PARTS)
    assert found.computed_again == sum(part.own for part in found.parts) > 0


def test_a_stream_that_does_not_fit_is_told(tmp_path: Path) -> None:
    """Ten minutes are reported of which the model heard one."""
    model = random_model.load(tmp_path, random_model.SMALL, slots=1)
    found = measure_flat(model, load_phrases(5), 6 * PARTS)
    assert not found.is_whole
    assert found.seconds == sum(part.chunks for part in found.parts) < 6 * PARTS
    assert found.computed_again == 0
    again = measure_flat(model, load_phrases(5), PARTS)
    assert again.parts[0].own == again.parts[0].kv_length, "the slot was left full"


def test_a_context_without_room_is_one_line(tmp_path: Path) -> None:
    """Somebody reads a traceback where a sentence would do."""
    small = {"max_position_embeddings": 64}
    model = random_model.load(tmp_path, random_model.SMALL, small, slots=1)
    with pytest.raises(BenchError, match="64 tokens has no room"):
        measure_flat(model, load_phrases(1), PARTS)


@pytest.mark.parametrize("has_words", [True, False])
def test_the_tables_show_it_all(flat: FlatResult, has_words: bool) -> None:
    """Somebody runs the bench for two minutes and sees an error instead of a table."""
    told = said("good morning", ["good morning"] if has_words else [])
    live = sum_up_live([told], find_words)
    found = StreamingResult(machine=machine_facts(), model="tiny", live=live, flat=flat)
    console = Console(record=True, width=100)
    show(console, found)
    text = console.export_text()
    assert ("morning (1)" in text) is not has_words
    assert "2 words in 1 phrases" in text
    assert f"One stream of {SECONDS} s" in text
    assert "0 tokens computed again" in text
    assert "context was full" not in text
    show(console, attrs.evolve(found, flat=attrs.evolve(flat, is_whole=False)))
    assert "context was full" in console.export_text()
    show(console, attrs.evolve(found, flat=None))
    assert "no long stream" in console.export_text()


def test_a_model_that_does_not_transcribe_is_one_line(tmp_path: Path) -> None:
    """A session fails somewhere, and nobody knows that the model was the wrong one."""
    silent = random_model.write_checkpoint(tmp_path, random_model.SMALL, {"transcribes": False})
    done = CliRunner().invoke(streaming_command, ["--model", str(silent)])
    assert done.exit_code == 1
    assert 'has no "transcribes": true' in done.output
    done = CliRunner().invoke(streaming_command, ["--model", str(tmp_path / "nowhere")])
    assert done.exit_code == 1
    assert "unknown model" in done.output


def test_a_session_that_fails_is_one_line(tmp_path: Path) -> None:
    """A traceback of groups says nothing to whoever ran the bench."""

    async def run() -> None:
        async with served("scripted", tmp_path) as url:
            await measure_live(url, "nobody", load_phrases(1), find_words)

    with pytest.raises(BenchError, match="nobody"):
        anyio.run(run, backend="trio")


# -- what is said -------------------------------------------------------------------------------


def test_words_take_their_letters_part_of_a_phrase() -> None:
    """Delays are measured from where no word ends."""
    phrase = Phrase(text="a bee sees", samples=np.zeros(30, np.float32), start=3, end=25)
    assert words_of(phrase) == [
        SpokenWord(text="a", end=3 + 4),
        SpokenWord(text="bee", end=3 + 12),
        SpokenWord(text="sees", end=25),
    ]


def test_words_end_anywhere_in_their_second() -> None:
    """All words would wait equally long, which no client's do."""
    (phrase,) = load_phrases(1)
    ends = [make_utterance(phrase, place).words[0].end for place in range(50)]
    tenths = {end % INPUT_RATE_HZ * 10 // INPUT_RATE_HZ for end in ends}
    assert tenths == set(range(10))


def test_an_utterance_is_a_phrase_with_quiet_around_it() -> None:
    """A word is said where it is not, or its second is never full."""
    for place, phrase in enumerate(load_phrases(7)):
        utterance = make_utterance(phrase, place)
        last = utterance.words[-1].end
        lead = last - phrase.end
        assert 0 <= lead < INPUT_RATE_HZ
        spoken = utterance.samples[lead : lead + len(phrase.samples)]
        assert float(np.abs(spoken - phrase.samples).max()) < 0.01
        assert float(np.abs(utterance.samples[:lead]).max(initial=0)) < 0.01
        assert TAIL_SAMPLES <= len(utterance.samples) - last < TAIL_SAMPLES + PIECE_SAMPLES * 2
        assert np.array_equal(np.concatenate(utterance.pieces), utterance.samples)
        assert {len(piece) for piece in utterance.pieces} == {PIECE_SAMPLES}


def test_phrases_are_taken_evenly() -> None:
    """A few phrases would all be the same sentence; more than there are would be refused."""
    assert len({phrase.text for phrase in load_phrases(10)}) >= 8
    many = load_phrases(200)
    assert len(many) == 200
    assert len({phrase.text for phrase in many}) > 20


def test_without_the_fixtures_it_says_so(tmp_path: Path) -> None:
    """An installed package ends in a traceback."""
    with pytest.raises(BenchError, match="source tree"):
        load_phrases(1, tmp_path)
    assert (HELDOUT / "manifest.json").is_file()


def test_the_stream_is_of_whole_phrases() -> None:
    """The model hears words that are cut off, once a minute."""
    phrases = load_phrases(8)
    speech = make_stream(phrases, 10)
    assert len(speech.samples) == 10 * INPUT_RATE_HZ
    first = phrases[0].samples
    assert float(np.abs(speech.samples[: len(first)] - first).max()) < 0.01
    assert float(np.abs(speech.samples[-PIECE_SAMPLES:]).max()) < 0.01


# -- sums ---------------------------------------------------------------------------------------


def said(text: str, deltas: list[str], at_s: float = 1.05) -> Told:
    """Two seconds that were sent on time, and deltas of the first one."""
    phrase = Phrase(text=text, samples=np.zeros(INPUT_RATE_HZ, np.float32), start=0, end=8000)
    words = tuple(words_of(phrase))
    utterance = Utterance(samples=np.zeros(2 * INPUT_RATE_HZ, np.float32), words=words)
    return Told(
        utterance=utterance,
        sent_s=tuple(number / PIECES_A_SECOND for number in range(1, 2 * PIECES_A_SECOND + 1)),
        closed_s=2.01,
        deltas=tuple((delta, at_s) for delta in deltas),
    )


@pytest.mark.parametrize(
    ("deltas", "arrivals"),
    [
        (["Play ", "some music."], [0, 1, 1]),
        (["pl", "ay", " some mus", "ic"], [1, 2, 3]),
        (["play music"], [0, None, 0]),
        (["well, play, so some", " MUSIC"], [0, 0, 1]),
        (["played some", "thing"], [None, None, None]),
        ([], [None, None, None]),
    ],
)
def test_a_word_comes_with_its_last_letter(deltas: list[str], arrivals: list[int | None]) -> None:
    """A word that is wrong costs all that follow, or half of one counts as all."""
    assert find_words(said("play some music", []).utterance, 0, deltas) == arrivals


def test_the_script_s_words_name_their_second() -> None:
    """The scripted server is found to have missed all words, or none ever."""
    words = tuple(SpokenWord(text="w", end=end) for end in (1, 16_000, 16_001, 40_000))
    utterance = Utterance(samples=np.zeros(48_000, np.float32), words=words)
    deltas = ["amber-3.0 ", "basil-3.1 "]
    assert find_seconds(utterance, 3, deltas) == [0, 0, 1, None]
    assert find_seconds(utterance, 4, deltas) == [None] * 4


@pytest.mark.parametrize(
    ("end", "arrived_s", "late", "parts"),
    [
        (1, 1.05, 0, (0.9, 0.0, 0.05)),  # sent with the first piece, written of its second
        (16_000, 1.05, 0, (0.0, 0.0, 0.05)),  # with the last one
        (1, 2.005, 1, (0.9, 1.0, 0.005)),  # a second later than it could
        (1, 2.25, 2, (0.9, 1.01, 0.24)),  # only when the utterance was closed
        (30_000, 2.25, 1, (0.1, 0.01, 0.24)),
    ],
)
def test_a_delay_is_taken_apart(
    end: int, arrived_s: float, late: int, parts: tuple[float, ...]
) -> None:
    """The model's lateness is the server's, or what must be waited for is."""
    delay = delay_of(said("hello", []), end, arrived_s)
    assert delay is not None
    assert delay.late == late
    assert (delay.wait_s, delay.late_s, delay.server_s) == pytest.approx(parts)
    assert delay.whole_s == pytest.approx(sum(parts))


def test_a_word_before_its_judged_end_has_no_delay() -> None:
    """Delays below zero make the others look short."""
    assert delay_of(said("hello", []), 16_001, 1.9) is None
    assert delay_of(said("hello", []), 1, 0.9) is None


def test_what_is_missed_is_told() -> None:
    """A model that writes nothing is the quickest of all."""
    missing, early = said("good morning", ["good"]), said("good morning", ["good morning"], 0.9)
    live = sum_up_live([missing, early], find_words)
    assert (live.words, live.missed, live.early, live.late) == (4, 1, 2, 0)
    assert live.missed_words == {"morning": 1}
    assert live.delay is not None
    assert live.delay.count == 1
    assert live.delay.p50_ms == pytest.approx(1050 - 200)
    assert live.wait_share == pytest.approx(800 / 850, abs=0.001)
    silent = sum_up_live([said("good", [])], find_words)
    assert (silent.missed, silent.delay, silent.wait, silent.server) == (1, None, None, None)
    assert silent.wait_share is None


@given(st.lists(st.floats(0, 10), min_size=1, max_size=200))
def test_percentiles_are_by_nearest_rank(durations_s: list[float]) -> None:
    """A figure is one that nobody measured."""
    spread = spread_of(durations_s)
    assert spread is not None
    ranked = sorted(durations_s)
    for figure, share in ((spread.p50_ms, 0.5), (spread.p90_ms, 0.9), (spread.p99_ms, 0.99)):
        rank = max(0, math.ceil(share * len(ranked) - 1e-9) - 1)
        assert figure == pytest.approx(ranked[rank] * 1000, abs=0.001)
    assert spread.max_ms == pytest.approx(ranked[-1] * 1000, abs=0.001)


def test_the_keys_are_documented() -> None:
    """A reader of the JSON has to guess what a figure is."""
    text = Path(__file__).parents[2].joinpath("docs", "performance.md").read_text("utf-8")
    classes = (StreamingResult, LiveResult, Spread, FlatResult, Part)
    names = {field.name for each in classes for field in attrs.fields(each)}
    assert sorted(name for name in names if f"`{name}`" not in text) == []
