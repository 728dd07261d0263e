"""Every word that was said is in a session's page, among the voices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.values.messages import Delta, Metrics, Response, ServerMessage
from protocol.wire.codec import parse_frame
from protocol.wire.dialects import LEGACY_CHAT, REALTIME, Dialect
from recorder.format.records import Record
from recorder.read.reader import LogReader
from replay.story.dictated import Dictated
from replay.story.inspection import to_json
from replay.view.story import Dialogue
from tests.browser.view_pages import texts_of
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
    dialogue = Dialogue(Dictated())
    answered: list[ServerMessage] = [*(Delta(**ids, text=text) for text in pieces), answer]
    for message in answered:
        for frame in dialect.encode(message):
            record = Record(kind="tx", seq=1, at_ns=5, fields={"frame": frame})
            dialogue.send(record, dialect.decode(parse_frame(frame), "chat"))
    dialogue.end()
    assert "".join(text for _, _, _, text, _ in dialogue.words) == "Good morning."
