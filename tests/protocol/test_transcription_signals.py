"""The second set of names of 003: a commit ends sound, and a request asks for its text."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.values import effects as ef
from protocol.values import events as ev
from tests.sessions.transcribing import SECOND, Talk

COMMIT = {"type": "input_audio_buffer.commit"}
CREATE = {"type": "response.create"}
BOTH = {"type": "input_audio_buffer.commit", "final": True}


def ready() -> Talk:
    """A session whose client knows the second set of names."""
    talk = Talk()
    assert talk.say({"type": "session.create", "model": "tiny"}) == []
    return talk


def texts(bodies: list[Any]) -> list[str]:
    """What each utterance's end says."""
    return [body["text"] for body in bodies if body["type"] == "response.done"]


@pytest.mark.parametrize("signals", [(COMMIT, CREATE), (CREATE, COMMIT), (BOTH,)])
def test_an_utterance_is_done_once_both_have_come(signals: tuple[dict[str, Any], ...]) -> None:
    """A client that keeps to the order of 003 waits for its answer for ever."""
    talk = ready()
    talk.append(SECOND)
    for signal in signals:
        assert talk.hear_out() == []
        assert talk.say(signal) == []
        if signal != signals[-1]:
            assert texts(talk.hear_out()) == []
    assert texts(talk.hear_out()) == ["0.0 0.1!"]


def test_nothing_is_told_before_it_is_asked_for() -> None:
    """Deltas begin with `response.create`, and come while there is more sound to be sent."""
    talk = ready()
    talk.append(SECOND)
    talk.say(COMMIT)
    assert talk.due(ef.RunChunk) == []
    talk.say(CREATE)
    assert [body["type"] for body in talk.hear("hi")] == ["response.text.delta"]


def test_utterances_are_asked_for_oldest_first() -> None:
    """A client that sends several at once is answered each of them, in order."""
    talk = ready()
    for _ in range(2):
        talk.append(SECOND)
        talk.say(COMMIT)
    talk.say(CREATE)
    assert texts(talk.hear_out()) == ["0.0 0.1!"]
    talk.say(CREATE)
    assert texts(talk.hear_out()) == ["1.0 1.1!"]


def test_a_commit_on_nothing_ends_what_comes_next_only_if_it_is_asked_for() -> None:
    """Clients commit before their sound as well, and such a one must not wait for ever."""
    talk = ready()
    talk.say(COMMIT)
    talk.append(SECOND)
    talk.say(BOTH)
    assert texts(talk.hear_out()) == ["0.0 0.1!"]
    talk.say(COMMIT)
    assert texts(talk.say(CREATE)) == [""]


def test_both_at_once_ask_for_all_that_waits() -> None:
    """Else an utterance that was never asked for stands before all that follow."""
    talk = ready()
    talk.append(SECOND)
    talk.say(COMMIT)
    talk.append(SECOND)
    talk.say(BOTH)
    assert texts(talk.hear_out()) == ["0.0 0.1!", "1.0 1.1!"]


@pytest.mark.parametrize("signals", [(CREATE, COMMIT), (COMMIT, CREATE)])
def test_after_a_failure_each_turn_has_its_answer(signals: tuple[dict[str, Any], ...]) -> None:
    """The commit of the utterance that failed may come or not: no answer is one turn late."""
    for commits in (True, False):
        talk = ready()
        talk.say(CREATE)
        talk.append(SECOND)
        chunk = talk.due(ef.RunChunk)[0].chunk
        talk.step(ev.ChunkFailed, utterance=chunk.utterance, index=chunk.index)
        if commits:
            talk.say(COMMIT)
        talk.frames.clear()
        talk.append(SECOND)
        for signal in signals:
            talk.say(signal)
        assert [text for text in texts(talk.frames + talk.hear_out()) if text]
