"""Every word that was said is in a session's page, among the voices, and who spoke when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from protocol.values.limits import NS_PER_S
from protocol.values.messages import Delta, Metrics, Response
from protocol.wire.dialects import LEGACY_CHAT, REALTIME, Dialect
from recorder.format.format import Record
from recorder.read.reader import LogReader
from replay.eval.evaluate import scores_json
from replay.eval.scores import score
from replay.story.inspect import to_json
from tests.browser.view_pages import narrate, texts_of
from tests.replay.evaluated import Duplex, facts_of, loud
from tests.replay.test_logs import HEAD, OPENED, Scene
from tests.replay.test_view import GOLDEN, SAMPLED, golden


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_every_word_of_inspect_is_in_the_page(name: str) -> None:
    """An answer would be missing from the voices: of a chat that is not streamed, all of them."""
    told, inspected = golden(name)
    (story,) = told["story"]
    page = set(texts_of(told))
    asked = {each.text for each in inspected.said}  # joined here; a passage each in the page
    texts = {*texts_of(to_json(inspected))} - asked
    assert texts - page == set()
    stories = (*inspected.units, *inspected.turns, *inspected.utterances)
    words = {word for each in stories for word in each.text.split()}
    said = [text for voice, *_, text, _ in story["said"] if voice == "model"]
    heard = {word for text in said for word in text.split()}
    assert (words & words_sent(GOLDEN[name])) - heard == set()
    users = {
        word for voice, *_, text, _ in story["said"] if voice == "user" for word in text.split()
    }
    assert {word for text in asked for word in text.split()} - users == set()


def words_sent(path: Path) -> set[str]:
    """Read the words of all texts in a log's sent frames, but for errors and ends."""
    texts: list[str] = []
    with LogReader(path) as reader:
        for record in reader:
            if isinstance(record, Record) and record.kind == "tx":
                frame = json.loads(str(record.fields["frame"]))
                texts += [frame[key] for key in ("text", "text_delta", "delta") if frame.get(key)]
    return {word for text in texts for word in text.split()}


@pytest.mark.parametrize("pieces", [(), ("Good ", "morn"), ("Good ", "morning.")])
@pytest.mark.parametrize("dialect", [REALTIME, LEGACY_CHAT], ids=lambda dialect: dialect.name)
def test_an_answer_is_said_once(dialect: Dialect, pieces: tuple[str, ...]) -> None:
    """What was answered at once would be missing, or what was streamed would be there twice."""
    ids: dict[str, Any] = {"session_id": "s", "response_id": "r", "input_id": "i"}
    answer = Response(
        **ids,
        text="Good morning.",
        pcm=b"",
        reason="turn_end",
        streaming=bool(pieces),
        input_tokens=1,
        generated_tokens=2,
        recording_id="",
        metrics=Metrics(kv_cache_length=3),
    )
    endpoint = "chat" if dialect is LEGACY_CHAT else "realtime"
    items = Scene(attrs.evolve(OPENED, mode="chat", endpoint=endpoint)).records[1:]
    for message in [*(Delta(**ids, text=text) for text in pieces), answer]:
        for frame in dialect.encode(message):
            items.append(Record(kind="tx", seq=len(items), at_ns=5, fields={"frame": frame}))
    (story,) = narrate(HEAD, items)["story"]
    assert "".join(text for _, _, _, text, _ in story["said"]) == "Good morning."


# -- who spoke when --------------------------------------------------------------------------------


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
