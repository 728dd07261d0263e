"""An utterance that the model fails at is answered, and over; what comes next begins afresh.

At the end stands what sessions of old do otherwise, here and elsewhere in a transcription.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from protocol.values import effects as ef
from protocol.values import events as ev
from tests.sessions.transcribing import SECOND, Talk, done_of, ready

CODES: Final = pytest.mark.parametrize(
    ("context_full", "code"), [(True, "context_full"), (False, "inference_error")]
)


def fail(talk: Talk, *, context_full: bool) -> list[Any]:
    """Have the model fail at the chunk that it was given."""
    (asked,) = talk.due(ef.RunChunk)
    at = {"utterance": asked.chunk.utterance, "index": asked.chunk.index}
    return talk.step(ev.ChunkFailed, **at, context_full=context_full)


@CODES
@pytest.mark.parametrize("is_final", [True, False])
def test_an_utterance_that_fails_is_answered_and_the_next_begins_afresh(
    context_full: bool, code: str, is_final: bool
) -> None:
    """One utterance that is too long, or one hiccup, ends a session."""
    talk = ready()
    talk.append(SECOND * 3)
    talk.commit(final=is_final)
    talk.hear("so far ")
    error, done = fail(talk, context_full=context_full)
    assert (error["type"], error["code"]) == ("error", code)
    assert (done["type"], done["text"]) == ("transcription.done", "so far ")
    talk.append(SECOND)
    talk.commit(final=True)
    assert done_of(talk.hear_out())["text"] == "1.0 1.1!"


@CODES
def test_a_client_that_reads_done_may_begin_as_it_always_does(
    context_full: bool, code: str
) -> None:
    """Its commit is taken for the utterance that was ended, and it waits for ever."""
    talk = ready()
    talk.commit()
    talk.append(SECOND)
    assert [body.get("code") for body in fail(talk, context_full=context_full)] == [code, None]
    talk.commit()
    talk.append(SECOND)
    talk.commit(final=True)
    assert done_of(talk.hear_out())["text"] == "1.0 1.1!"


@CODES
def test_a_client_that_knows_of_nothing_gets_the_rest_and_an_end(
    context_full: bool, code: str
) -> None:
    """It speaks on, commits, and waits for ever."""
    talk = ready()
    talk.commit()
    talk.append(SECOND * 2)
    fail(talk, context_full=context_full)
    assert talk.append(SECOND) == []
    assert talk.due(ef.RunChunk) == []  # kept, and used after the commit
    talk.commit(final=True)
    assert done_of(talk.hear_out())["text"] == "1.0 1.1!"
    assert code


def test_a_final_commit_without_sound_after_it_is_answered() -> None:
    """A client that sends its last commit a moment late waits for ever."""
    talk = ready()
    talk.commit()
    talk.append(SECOND)
    fail(talk, context_full=True)
    assert done_of(talk.commit(final=True))["text"] == ""


def test_discarded_sound_takes_no_room() -> None:
    """After an utterance that failed nothing may be appended any more."""
    talk = ready()
    talk.append(SECOND * 4)
    talk.commit()
    talk.step(ev.ChunkFailed, utterance=0, index=0)
    assert talk.append(SECOND * 4) == []
    assert talk.append(SECOND * 4)[0]["code"] == "buffer_full"
