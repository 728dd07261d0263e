"""An utterance that the model fails at is answered, and over; what comes next begins afresh.

At the end stands what sessions of old do otherwise, here and elsewhere in a transcription.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.behaviour import COMMIT_BEGINS_ANEW, HINTS_REFUSED, LINE_BREAKS, NO_MODEL_TOLD
from protocol.values.state import State
from tests.sessions.in_memory import base64
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


# -- sessions of old ------------------------------------------------------------------------------


def test_in_a_session_of_old_the_final_commit_ends_what_failed() -> None:
    """Recordings made before another commit began a new utterance no longer replay."""
    talk = ready(behaviour=COMMIT_BEGINS_ANEW - 1)
    talk.append(SECOND * 3)
    talk.commit()
    fail(talk, context_full=True)
    for _ in range(9):
        assert talk.append(SECOND * 4) == []
    assert talk.due(ef.RunChunk) == []
    assert talk.commit(final=True) == []
    talk.append(SECOND)
    talk.commit(final=True)
    assert done_of(talk.hear_out())["text"] == "1.0 1.1!"


def test_a_session_of_old_takes_hints_and_refuses_line_breaks() -> None:
    """Recordings made before it was otherwise no longer replay."""
    talk = Talk(behaviour=min(HINTS_REFUSED, LINE_BREAKS) - 1)
    assert talk.say({"type": "session.update", "model": "tiny", "language": "de"}) == []
    assert talk.stands_in(State.ACTIVE)
    frame = {"type": "input_audio_buffer.append", "audio": base64(SECOND) + "\n"}
    assert talk.code(frame) == "invalid_audio"


def test_a_session_of_old_says_that_it_lasted_too_long() -> None:
    """Recordings of clients that chose no model no longer replay."""
    talk = Talk(behaviour=NO_MODEL_TOLD - 1)
    timer = next(it for it in talk.due(ef.SetTimer) if it.name == "init")
    (body,) = talk.step(ev.TimerFired, name="init", generation=timer.generation)
    assert body["error"] == "the session is over: it has lasted as long as a session may"
