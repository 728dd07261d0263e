"""The measures of `antiphon eval`, on conversations whose answers are known to the sample."""

from __future__ import annotations

from pathlib import Path

import attrs
import numpy as np
import pytest
from click.testing import CliRunner

from protocol.values import events as ev
from protocol.values.model import INPUT_RATE_HZ, UnitResult
from protocol.values.requests import Append
from protocol.wire.audio import to_pcm16
from recorder.format.format import SUFFIX, Record
from recorder.read.reader import LogReader
from replay.eval.condition import STATISTICS
from replay.eval.evaluate import MEASURES, OWN_VOICE, Summary, percentile
from replay.eval.scores import OF_WORDS, gather, score
from replay.redact.redaction import redact_command
from runtime.measures.conversation import (
    KINDS,
    TICK_HZ,
    TICKS_PER_MS,
    Ratio,
    Times,
    Total,
    TrackedToolCall,
    ns_of,
    tool_scores,
)
from runtime.measures.talk import Piece, Talk
from runtime.telemetry.metrics import Metrics
from tests.golden.logs import LOGS
from tests.replay.evaluated import (
    NS,
    Duplex,
    facts_in,
    facts_of,
    loud,
    measured,
    scores_in,
    spans,
    talk,
)
from tests.replay.exported import CHAT, GOLDEN
from tests.replay.test_logs import HEAD, write_log
from tests.runtime.session.test_barge_in import converse
from tests.runtime.telemetry.test_talk_meter import recorded_in, told_by
from tests.sessions.telemetry import meter_log

FRAME = 20 * TICKS_PER_MS
TRANSCRIPTION = GOLDEN / "v1-transcription-queue.session.zst"


def seconds(value: object) -> list[tuple[float, float]]:
    """When each single moment was, and how much."""
    assert isinstance(value, Times)
    return [(at_ns / NS, amount / NS) for at_ns, amount in value.values]


# -- turns ----------------------------------------------------------------------------------------


def test_an_answer_is_measured_from_the_end_of_the_turn() -> None:
    """The one number that people ask for would be another."""
    found = measured(talk([(1, 3), (10, 11)], [(3.5, 6), (11.25, 14)]))
    assert seconds(found["response_delay"]) == [(3, 0.5), (11, 0.25)]
    assert seconds(found["time_to_first_audio"]) == [(3, 0.5)]
    assert found["take_over_rate"] == Ratio(2, 2)
    assert found["unanswered"] == Total(0)
    assert found["self_talk"] == Total(0)
    assert "pause_take_over_rate" not in found
    assert "barge_in_stop_latency" not in found


def test_a_pause_ends_no_turn_and_one_in_which_the_model_speaks_is_a_mistake() -> None:
    """A user who thinks would be an unanswered one, and a model that cuts in a quick one."""
    found = measured(talk([(1, 2), (3, 4)], [(4.5, 6)]))
    assert seconds(found["response_delay"]) == [(4, 0.5)]
    assert found["pause_take_over_rate"] == Ratio(0, 1)
    found = measured(talk([(1, 2), (3, 4)], [(2.5, 3.25), (4.5, 6)]))
    assert seconds(found["response_delay"]) == [(4, 0.5)]
    assert (found["pause_take_over_rate"], found["false_starts"]) == (Ratio(1, 1), Total(1))
    assert found["take_over_rate"] == Ratio(1, 1)


def test_a_short_answer_between_two_turns_is_no_mistake() -> None:
    """In a quick exchange each answer would be one."""
    found = measured(talk([(1, 2), (3.5, 4)], [(2.25, 3), (4.5, 6)]))
    assert seconds(found["response_delay"]) == [(2, 0.25), (4, 0.5)]
    assert "pause_take_over_rate" not in found
    assert found["false_starts"] == Total(0)


@pytest.mark.parametrize(
    ("model", "end", "rate", "unanswered"),
    [
        ([], 7, Ratio(0, 1), 1),
        ([], 6, Ratio(0, 1), 1),
        ([], 5.99, None, None),
        ([(6.5, 8)], 9, Ratio(1, 1), 1),
        ([(5.5, 8)], 9, Ratio(1, 1), 0),
    ],
)
def test_silence_of_four_seconds_is_no_answer(
    model: list[tuple[float, float]], end: float, rate: Ratio | None, unanswered: int | None
) -> None:
    """A session that ends would count as a model that is silent, or the other way round."""
    found = measured(talk([(1, 2)], model, end=end))
    assert found.get("take_over_rate") == rate
    assert found.get("unanswered") == (None if unanswered is None else Total(unanswered))


def test_a_paused_session_answers_no_turn() -> None:
    """A model that may not answer would be blamed for it."""
    assert "take_over_rate" not in measured(talk([(1, 2)], [], end=30, pauses=[4.0]))
    assert measured(talk([(1, 2)], [], end=30, pauses=[0.5]))["unanswered"] == Total(1)


def test_a_turn_that_goes_on_before_an_answer_is_not_taken_over() -> None:
    """A user who has to ask again would be no failure."""
    found = measured(talk([(1, 2), (5, 6)], [(6.5, 8)]))
    assert found["take_over_rate"] == Ratio(1, 2)
    assert found["unanswered"] == Total(0)


def test_an_answer_that_begins_early_has_no_delay() -> None:
    """It would be the quickest of all."""
    found = measured(talk([(1, 4), (10, 11)], [(3.5, 6), (12, 13)]))
    assert seconds(found["response_delay"]) == [(11, 1)]
    assert "time_to_first_audio" not in found
    assert (found["take_over_rate"], found["early_starts"]) == (Ratio(2, 2), Total(1))
    assert found["overlap"] == Total(NS // 2)
    assert found["talk_over"] == Ratio(NS // 2, 12 * NS)


# -- both at once ---------------------------------------------------------------------------------


def test_a_model_that_yields_is_measured_from_the_first_sample_over_it() -> None:
    """A slow stop would look quick."""
    said = [(4, 3), (5, 4), (6, 5)]
    found = measured(talk([(1, 2), (4.75, 8)], [(3, 6.5)], words=said))
    assert found["barge_ins"] == Total(1)
    assert found["barge_in_yield_rate"] == Ratio(1, 1)
    assert seconds(found["barge_in_stop_latency"]) == [(4.75, 1.75)]
    assert found["barge_in_words"] == Times(((round(4.75 * NS), 9),))
    assert found["overlap"] == Total(round(1.75 * NS))
    assert found["talk_over"].part == 0


def test_a_model_that_talks_on_does_not_yield() -> None:
    """A barge-in that is ignored would be a long stop."""
    found = measured(talk([(1, 2), (5, 6.5)], [(3, 9)]))
    assert found["barge_in_yield_rate"] == Ratio(0, 1)
    assert "barge_in_stop_latency" not in found


@pytest.mark.parametrize(
    ("user", "end", "kind"),
    [
        ((5, 5.5), 9, "backchannel"),
        ((5, 5.5), 7.01, "backchannel"),
        ((5, 5.5), 7, "yields"),
        ((5, 5.5), 5.25, "yields"),
        ((5, 5.99), 9, "backchannel"),
        ((5, 6), 9, "ignored"),
    ],
)
def test_a_word_of_the_user_is_a_backchannel_if_the_model_goes_on(
    user: tuple[float, float], end: float, kind: str
) -> None:
    """Each "mhm" would be a barge-in that was ignored."""
    found = measured(talk([(1, 2), user], [(3, end)]))
    assert found["user_backchannels"] == Total(kind == "backchannel")
    assert found["barge_ins"] == Total(kind != "backchannel")
    if kind == "backchannel":
        assert "barge_in_yield_rate" not in found
    else:
        assert found["barge_in_yield_rate"] == Ratio(kind == "yields", 1)


def test_a_word_of_the_model_while_the_user_speaks_is_a_backchannel() -> None:
    """It would be an early start, and talk-over."""
    found = measured(talk([(1, 6)], [(3, 3.5), (6.5, 8)]))
    assert (found["model_backchannels"], found["early_starts"]) == (Total(1), Total(0))
    assert found["talk_over"].part == 0
    assert found["overlap"] == Total(NS // 2)
    assert seconds(found["response_delay"]) == [(6, 0.5)]


def test_the_first_request_to_stop_in_each_stretch_counts() -> None:
    """A client that repeats it with each second would make the model look quick."""
    found = measured(talk([(1, 2)], [(3, 6), (8, 9)], stops=[2.0, 4.0, 5.0, 7.0, 8.75]))
    assert seconds(found["forced_stop_latency"]) == [(4, 2), (8.75, 0.25)]


def test_sound_that_answers_nothing_is_self_talk() -> None:
    """A model that talks to itself would be a good listener."""
    found = measured(talk([(2, 3)], [(0.5, 1), (3.5, 5), (9, 10.5)]))
    assert found["self_talk"] == Total(2 * NS)


def test_calls_of_tools_are_measured() -> None:
    """How long a tool took, and whether anyone answered it, could not be read from recordings."""
    found = scores_in(GOLDEN / "v1-duplex-tools.session.zst")
    assert (found["tool_calls"], found["tool_calls_unanswered"]) == (Total(4), Total(2))
    assert [round(took, 3) for _, took in seconds(found["tool_result_delay"])] == [2.138, 0.468]
    assert [round(took, 3) for _, took in seconds(found["tool_speech_delay"])] == [0.45, 1.45]
    assert "tool_calls" not in scores_in(GOLDEN / "v1-realtime-video.session.zst")


def test_a_call_is_measured_from_the_last_word_before_it() -> None:
    """Speech that goes on, or began after it, would count."""
    calls = [TrackedToolCall(at_ns=round(at * NS), call=f"t{at}") for at in (0.5, 2.5, 4.25)]
    found = tool_scores(calls, spans((1, 2), (3.5, 4), (4.2, 5), (6, 7)))
    assert seconds(found["tool_call_delay"]) == [(2.5, 0.5)]


def test_what_cannot_be_measured_is_absent() -> None:
    """A silent microphone would have no overlap: a good mark for nothing."""
    assert measured(talk([], [])) == {}
    assert measured(talk([], [(1, 2)])).keys() == {"self_talk"}
    heard = measured(talk([(1, 2)], [], end=3))
    assert heard == {"fdb_v1_take_over_rate": Ratio(0, 1)}


# -- the benchmark's ------------------------------------------------------------------------------


def test_the_benchmark_takes_short_speech_of_few_words_for_no_turn() -> None:
    """Its numbers could not be compared with ours."""
    for model, words, takes in [((3, 3.9), 3, False), ((3, 3.9), 4, True), ((3, 4), 1, True)]:
        found = measured(talk([(1, 2)], [model], words=[(3, words)]))
        assert found["fdb_v1_take_over_rate"] == Ratio(takes, 1)
        assert ("fdb_v1_latency" in found) is takes
    assert seconds(measured(talk([(1, 4)], [(3, 5)]))["fdb_v1_latency"]) == [(4, 0)]
    assert "fdb_v1_latency" not in measured(talk([(1, 2), (3, 4)], [(5, 7)]))


def test_the_benchmark_measures_overlaps_and_gaps() -> None:
    """The same, for v1.5."""
    user, model = [(1, 2), (2.6, 4), (6, 7), (9, 10)], [(3.5, 6.5), (7, 9.5)]
    found = measured(talk(user, model))
    assert seconds(found["fdb_v1_5_stop_latency"]) == [(3.5, 0.5), (6, 1), (9, 0.5)]
    # the model's sound is one stretch to it, so no beginning follows
    assert "fdb_v1_5_response_latency" not in found
    found = measured(talk([(1, 2), (3, 4)], [(4.25, 5), (7, 8)]))
    assert seconds(found["fdb_v1_5_response_latency"]) == [(4, 0.25)]


# -- from logs ------------------------------------------------------------------------------------


def test_a_log_is_measured_to_the_sample() -> None:
    """Milliseconds of the network and of rounding would be the model's."""
    session = Duplex()
    session.at(1_234_567_891)
    session.say(loud((0.4, 1)))
    session.at(2_300_000_017)
    session.reply(0)
    session.say(loud((0, 0.6)))
    session.at(2_777_777_777)
    session.reply(1, bytes(4 * 24_000), "one two")
    facts = session.facts(8)
    # 16 kHz: the first second ends when it came, the next begins 1 s before it came
    first, second = 1_234_567_891 * 16_000 // NS - 16_000, 2_300_000_017 * 16_000 // NS - 16_000
    model = -(-2_777_777_777 * 24_000 // NS)
    (user,) = facts.conversation.user
    assert (user.begin, user.end) == (3 * (first + 6_400), 3 * (second + 9_600))
    assert [(it.begin, it.end) for it in facts.conversation.model] == [
        (2 * model, 2 * model + 48_000)
    ]
    found = score(facts)
    delay = 2 * model - 3 * (second + 9_600)
    assert found["response_delay"] == Times(((ns_of(user.end), ns_of(delay)),))
    assert facts.speech_source == "energy"
    assert found["take_over_rate"] == Ratio(1, 1)


def test_sound_that_is_cut_ends_where_the_client_stops_it() -> None:
    """A model that was stopped would be heard to go on."""
    session = Duplex()
    session.hear(1, loud((0.2, 1)))
    session.speak(1.5, 0, 3, "a b c")
    session.hear(2, loud(), force_listen=True)
    session.speak(2.5, 1)
    facts = session.facts(8)
    assert facts.conversation.model == spans((1.5, 2.5))
    assert seconds(score(facts)["forced_stop_latency"]) == [(2, 0.5)]


def test_a_client_that_sends_ahead_is_seen() -> None:
    """Answers to a file that is sent early would look quick, and nothing would say why."""
    for at_s, lead in ((0.25, 0.75), (1, 0), (1.5, 0)):
        session = Duplex()
        session.hear(at_s, loud((0.2, 0.9)))
        session.speak(at_s + 0.125, 0)
        session.hear(at_s + 1, loud())
        session.speak(at_s + 1.125, 1)
        assert seconds(score(session.facts(8))["input_lead"]) == [(at_s, lead)]


def test_a_model_that_only_writes_is_not_silent() -> None:
    """A session without sound would be one in which no turn is answered."""
    session = Duplex()
    session.hear(1, loud((0.2, 0.6)))
    session.speak(1.5, 0, 0, "yes", ends=True)
    found = score(session.facts(9))
    assert "take_over_rate" not in found
    assert found["late_units"] == Total(0)


def test_gaps_within_a_response_are_underruns() -> None:
    """A model that is too slow to speak on would be one that speaks twice."""
    session = Duplex()
    session.hear(1, loud((0.2, 0.9)))
    session.speak(1.5, 0, 0.5, "a")
    session.hear(2, loud())
    session.speak(2.75, 1, 0.5, "b", ends=True)
    session.hear(3, loud())
    session.speak(6, 2, 0.5, "c", ends=True)
    facts = session.facts(9)
    assert facts.underruns == 1
    assert facts.conversation.model == spans((1.5, 3.25), (6, 6.5))
    assert score(facts)["late_units"] == Total(1)
    assert score(facts)["deadline_miss_rate"] == Ratio(1, 3)


def test_what_the_server_found_is_the_user_s_speech() -> None:
    """The measures would rest on another detector than the session did."""
    session = Duplex(is_searched=True)
    session.hear(1, loud())
    session.found(ev.SpeechStarted, 250)
    session.speak(1.25, 0)
    session.hear(2, loud())
    session.found(ev.SpeechStopped, 1_750)
    session.speak(2.5, 1, 1, "a")
    facts = session.facts(8)
    assert facts.speech_source == "log"
    assert facts.conversation.user == spans((0.25, 1.25))
    assert seconds(score(facts)["response_delay"]) == [(1.25, 1.25)]


def test_speech_that_does_not_stop_ends_with_the_sound() -> None:
    """The last words of a session would be lost."""
    session = Duplex(is_searched=True)
    session.hear(1, loud())
    session.found(ev.SpeechStarted, 400)
    session.speak(1.25, 0)
    assert session.facts(8).conversation.user == spans((0.4, 1))


def test_a_question_that_is_sent_at_once_is_answered_after_it(tmp_path: Path) -> None:
    """No turn would be taken, since each answer would come before its question had ended."""
    session = Duplex()
    session.hear(0.2, loud((0.3, 2.5), length=4))
    for index in range(3):
        session.speak(0.3 + index / 10, index)
    session.speak(0.6, 3, 1, "so it is", ends=True)
    facts = session.facts(0.9)
    found = score(facts)
    assert facts.conversation.user == spans((0.3, 2.5))
    assert facts.conversation.model == spans((4.1, 5.1))
    assert found["take_over_rate"] == found["fdb_v1_take_over_rate"] == Ratio(1, 1)
    assert seconds(found["response_delay"]) == [(2.5, 1.6)]
    assert seconds(found["input_lead"]) == [(0.2, 3.8)]
    metrics = Metrics()
    log = write_log(tmp_path, session.records)
    meter_log(log, metrics)
    assert told_by(metrics) == recorded_in([log])


@pytest.mark.parametrize("endpoint", ["realtime", "duplex", "live"])
def test_both_detectors_agree_on_a_recorded_session(endpoint: str, tmp_path: Path) -> None:
    """A folder of old and new recordings could not be compared."""
    for is_searched in (True, False):
        folder = tmp_path / str(is_searched)
        folder.mkdir()
        converse(endpoint, "qqqqVVVqqq", barge_in=is_searched, record_to=folder)
    logs = [next((tmp_path / name).glob("*" + SUFFIX)) for name in ("True", "False")]
    searched, heard = map(facts_in, logs)
    assert (searched.speech_source, heard.speech_source) == ("log", "energy")
    assert searched.conversation.user == heard.conversation.user
    assert len(heard.conversation.user) == 1
    found = score(searched)
    assert found["barge_in_yield_rate"] == Ratio(1, 1)
    assert score(heard)["barge_in_yield_rate"] == Ratio(0, 1)


def test_speech_found_in_whole_seconds_lies_where_its_pieces_came(tmp_path: Path) -> None:
    """Of a live session the server searches resampled seconds, after the last piece of each."""
    converse("live", barge_in=True, record_to=tmp_path, rate_hz=24_000, pieces=5)
    (log,) = tmp_path.glob("*" + SUFFIX)
    facts, metrics = facts_in(log), Metrics()
    (span,) = facts.conversation.user
    assert facts.speech_source == "log"
    assert abs(span.begin / TICK_HZ - 4.05) < 0.03
    assert abs(span.end / TICK_HZ - 6) < 0.03
    meter_log(log, metrics)
    assert told_by(metrics) == recorded_in([log])


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 24_000])
@pytest.mark.parametrize("samples", [7, 160, 8_000])
def test_sound_at_any_rate_and_in_any_pieces_is_heard_where_it_is(
    rate_hz: int, samples: int
) -> None:
    """Sound is searched at its own rate, and lies on the grid of 16 kHz."""
    at = np.arange(4 * rate_hz)
    is_loud = (at >= rate_hz) & (at < 2.5 * rate_hz)
    sound = (is_loud * 3000 * np.sin(2 * np.pi * 440 / rate_hz * at)).astype("<i2")
    heard = Talk()
    for end in range(samples, len(at) + samples, samples):
        piece = Piece(sound[end - samples : end].tobytes(), rate_hz, is_whole=True)
        heard.received(min(end, len(at)) * NS // rate_hz, piece)
    (span,) = heard.conversation(4 * NS).user
    assert abs(span.begin - TICK_HZ) <= 2 * FRAME
    assert abs(span.end - 2.5 * TICK_HZ) <= 2 * FRAME


def test_sound_after_a_gap_is_held_in_16_bits_and_only_while_it_may_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A word would be cut where its sound is held no longer, or later pieces cost twice as much."""
    held: list[bytes] = []

    def hold(pcm: bytes) -> bytes:
        if len(pcm) == sound.nbytes // 400:  # a piece; speech is found in several at once
            held.append(pcm)
        return to_pcm16(pcm)

    monkeypatch.setattr("runtime.measures.talk.to_pcm16", hold)
    at = np.arange(8 * INPUT_RATE_HZ)
    is_loud = (at >= INPUT_RATE_HZ) & (at < 4 * INPUT_RATE_HZ)
    sound = (is_loud * 0.1 * np.sin(2 * np.pi * 440 / INPUT_RATE_HZ * at)).astype("<f4")
    heard = Talk()
    for index, piece in enumerate(np.split(sound, 400), start=1):
        heard.received(NS + index * NS // 50, Append(pcm=piece.tobytes()))
    (span,) = heard.conversation(9 * NS).user
    assert abs(span.begin - 2 * TICK_HZ) <= 2 * FRAME
    assert abs(span.end - 5 * TICK_HZ) <= 2 * FRAME
    assert 100 <= len(held) <= 102  # of two seconds


@pytest.mark.parametrize("name", ["v1-barge-in", "v1-openai", "v1-openai-resumed"])
def test_both_detectors_agree_on_golden_logs(name: str) -> None:
    """Sound at 24 kHz, moved by a network, or missing while a client is away would be elsewhere."""
    with LogReader(GOLDEN / f"{name}.session.zst") as reader:
        items = [*reader]
    names = {"DetectSpeech", "SpeechStarted", "SpeechStopped"}
    unsearched = [
        it for it in items if isinstance(it, Record) and it.fields.get("type") not in names
    ]
    searched, heard = (gather(HEAD, it).conversation.user for it in (items, unsearched))
    assert len(searched) == len(heard) == 2
    for one, other in zip(searched, heard, strict=True):
        assert abs(one.begin - other.begin) <= FRAME
        assert abs(one.end - other.end) <= FRAME


def test_a_client_that_sends_nothing_does_not_speak() -> None:
    """Speech before a gap would go on through it."""
    session = Duplex()
    session.hear(1, loud((0.5, 1)))
    session.speak(1.25, 0)
    session.hear(6, loud((0, 0.5)))
    session.speak(6.25, 1)
    assert session.facts(12).conversation.user == spans((0.5, 1), (5, 5.5))


@pytest.mark.parametrize("name", ["v1-barge-in", "v1-realtime-spoken"])
def test_what_a_redaction_took_out_is_not_silence(name: str, tmp_path: Path) -> None:
    """A user who is no longer heard would be one who said nothing."""
    log, redacted = GOLDEN / f"{name}{SUFFIX}", tmp_path / f"redacted{SUFFIX}"
    result = CliRunner().invoke(redact_command, [str(log), "--output", str(redacted)])
    assert result.exit_code == 0, result.output
    facts, before, after = facts_in(redacted), scores_in(log), scores_in(redacted)
    is_searched = name == "v1-barge-in"
    assert facts.lost == ({"words"} if is_searched else {"speech", "words"})
    assert all(after[each] == before[each] for each in after.keys() - {"near_tie_rate"})
    assert ("overlap" in after) is is_searched
    gone = before.keys() - after.keys()
    assert gone <= {*OF_WORDS, *(() if is_searched else before.keys())}
    assert "late_units" in after


class _Margins(Duplex):
    """A model that decides its first unit by nothing, and each later one more firmly."""

    def result(self, index: int, number: int) -> UnitResult:
        """Make a unit's result."""
        return attrs.evolve(super().result(index, number), margin=index / 3)


def test_margins_make_near_ties() -> None:
    """A decision that rounding could turn would look firm."""
    session = _Margins()
    for index in range(4):
        session.hear(index + 1, loud(), force_listen=index == 3)
        session.speak(index + 1.25, index)
    assert score(session.facts(8))["near_tie_rate"] == Ratio(1, 2)


# -- other modes ----------------------------------------------------------------------------------


def test_a_chat_is_measured_by_its_questions() -> None:
    """It would have the measures of a duplex session, all of them wrong."""
    facts = facts_in(CHAT)
    found = score(facts)
    asked = [it for it in facts.answers if it.piece_ns is not None]
    assert found["chat_response_delay"] == Times(
        tuple((it.asked_ns, it.piece_ns - it.asked_ns) for it in asked if it.piece_ns is not None)
    )
    assert found.keys() <= {name for name, it in MEASURES.items() if it.modes in ("chat", "all")}
    assert len(asked) == 3


def test_a_transcription_is_measured_by_its_words() -> None:
    """The same."""
    found = score(facts_in(TRANSCRIPTION))
    assert seconds(found["word_delay"]) == [(4.2, 0.2), (4.4, 0.4)]
    assert found.keys() == {"word_delay", "errors"}


# -- all of them ----------------------------------------------------------------------------------


def test_every_measure_has_its_kind_and_modes(tmp_path: Path) -> None:
    """The table would describe something else than what is computed."""
    seen = set()
    converse("realtime", "qqqqVVVqqq", barge_in=True, record_to=tmp_path)
    for log in (*LOGS, *tmp_path.glob("*" + SUFFIX)):
        for name, value in score(facts_in(log)).items():
            seen.add(name)
            assert KINDS[type(value)] == MEASURES[name].kind, name
    logged = {name for name, it in MEASURES.items() if it.modes != "forced"}
    elsewhere = {"forced_stop_latency", "near_tie_rate", OWN_VOICE}
    assert logged - seen == elsewhere - seen


def test_no_measure_s_name_ends_as_a_statistic_s() -> None:
    """A condition could mean two things."""
    ends = tuple(f"_{name}" for name in STATISTICS)
    assert [name for name in MEASURES if name.endswith(ends)] == []


def test_the_same_log_gives_the_same_measures(tmp_path: Path) -> None:
    """Two evaluations of a folder could not be compared."""
    session = Duplex()
    session.hear(1, loud((0.2, 0.9)))
    session.speak(1.5, 0, 0.5, "a", ends=True)
    session.facts(8)
    log = write_log(tmp_path, session.records)
    assert score(facts_in(log)) == score(facts_of(session.records)) == score(facts_in(log))


def test_percentiles_are_values_that_were_measured() -> None:
    """A summary of few values would show times that nobody waited."""
    assert [percentile([1, 2, 3, 4], of) for of in (25, 50, 90, 100)] == [1, 2, 4, 4]
    assert percentile(range(1, 101), 90) == 90
    summary = Summary()
    for log, delays in (("a", [1, 9]), ("b", [4]), ("c", [2])):
        values = tuple((0, delay * NS) for delay in delays)
        shares = {"take_over_rate": Ratio(len(delays), 4), "overlap": Total(NS)}
        summary.add(log, {"response_delay": Times(values), **shares})
    found = summary.statistics()
    delay, rate, overlap = (found[it] for it in ("response_delay", "take_over_rate", "overlap"))
    assert (delay.value, delay.median, delay.p90, delay.worst) == (2, 2, 9, 9)
    assert (delay.count, delay.recordings, delay.worst_log) == (4, 3, "a")
    assert (rate.value, rate.count, rate.worst, rate.worst_log) == (0.333333, 12, 0.25, "b")
    assert (overlap.value, overlap.median, overlap.count) == (3, 1, 3)
