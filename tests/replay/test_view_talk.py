"""Who spoke when, in a session's page: as `antiphon eval` measures it."""

from __future__ import annotations

import attrs
import pytest

from protocol.values.limits import NS_PER_S
from recorder.format.records import Record
from replay.eval.evaluate import scores_json
from replay.eval.scores import score
from tests.browser.view_pages import narrate
from tests.replay.evaluated import Duplex, facts_of, loud
from tests.replay.test_logs import HEAD
from tests.replay.test_view import golden


def conversation() -> Duplex:
    """A question that is answered half a second later, and an answer that the user breaks into."""
    made = Duplex()
    made.hear(2, loud((0.2, 0.8)))
    made.speak(2.3, 0, 2, "one two three")
    made.hear(3, loud())
    made.speak(3.3, 1, 1.5, "four")
    made.hear(5, loud((0.1, 0.9)))
    made.speak(5.4, 2)
    for index, second in enumerate(range(6, 12), 3):
        made.hear(second, loud())
        made.speak(second + 0.2, index)
    made.at(12 * NS_PER_S)
    made.finish()
    return made


def test_tells_who_spoke_when_as_eval_does() -> None:
    """A page would show a response delay, and `eval` another one."""
    records = conversation().records
    (story,) = narrate(HEAD, records)["story"]
    expected = scores_json(score(facts_of(records)))
    measures = {it["name"]: it["value"] for it in story["measures"]}
    assert measures == {name: it["value"] for name, it in expected.items()}
    talk = story["talk"]
    first, _ = talk["turns"]
    assert seconds(first["end_ns"], first["delay_ns"]) == pytest.approx([1.8, 0.5], abs=0.06)
    assert first["delay_ns"] / NS_PER_S == pytest.approx(measures["response_delay"], abs=1e-6)
    (broke,) = talk["barge_ins"]
    assert seconds(broke["begin_ns"], broke["end_ns"]) == pytest.approx([4.1, 5.4], abs=0.06)
    assert broke["is_yielded_to"] is True
    both_ns = sum(end - begin for begin, end in talk["overlaps"])
    assert both_ns / NS_PER_S == pytest.approx(measures["overlap"], abs=1e-6)


def seconds(*times_ns: int) -> list[float]:
    """Write times in seconds."""
    return [time_ns / NS_PER_S for time_ns in times_ns]


@pytest.mark.parametrize("name", ["v1-realtime-chat", "v1-transcription-context-full"])
def test_tells_no_talk_of_what_is_no_conversation(name: str) -> None:
    """A chat would have response delays of nobody."""
    (story,) = golden(name)[0]["story"]
    assert story["talk"] is None
    assert story["measures"]


def test_tells_why_a_unit_listened() -> None:
    """Near-ties, and what had to be, would look like what the model wanted."""
    records = conversation().records
    (story,) = narrate(HEAD, records)["story"]
    assert not any("margin" in unit for unit in story["units"])  # a model without margins
    (story,) = narrate(HEAD, map(with_margin, records))["story"]
    assert {unit["margin"] for unit in story["units"]} == {0.25}
    assert (story["forced_units"], story["near_tie_logits"]) == (0, 0.5)


def with_margin(record: Record) -> Record:
    """Give the result of a unit a margin."""
    result = record.fields.get("result")
    if record.fields.get("type") != "UnitDone" or not isinstance(result, dict):
        return record
    return attrs.evolve(record, fields={**record.fields, "result": {**result, "margin": 0.25}})
