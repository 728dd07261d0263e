"""What behaviour 1 changed in a chat, beside what older recordings hold."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.behaviour import NEWEST
from tests.sessions.chatting import PCM, Run, active, answer, base64, question


def test_a_prompt_of_the_session_is_that_of_turns_without_one() -> None:
    """A client that says its prompt once is refused, or is answered without it."""
    run = Run()
    run.step(ev.Admitted)
    run.say({"type": "session.init", "payload": {"system_prompt": "Be brief."}})
    assert run.kinds[-1] == "session.created"
    run.ask(question())
    answer(run, 0, "a")
    own = {"role": "system", "content": "Be long."}
    run.ask({"messages": [own, *question()["messages"]]})
    answer(run, 1, "b", lease=2)
    first, second = (start.turn.messages for start in run.of(ef.StartTurn))
    assert [(message.role, message.content[0].text) for message in first] == [
        ("system", "Be brief."),
        ("user", "hello"),
    ]
    assert [message.content[0].text for message in second] == ["Be long.", "hello"]


def test_a_prompt_of_an_older_recording_is_refused() -> None:
    """Else its refusal replays as a session that is set up."""
    run = Run(behaviour=0)
    run.step(ev.Admitted)
    run.say({"type": "session.init", "payload": {"system_prompt": "Be brief."}})
    assert run.kinds[-1] == "error"


@pytest.mark.parametrize(
    ("payload", "behaviour", "is_told"),
    [({}, NEWEST, False), ({"notices": True}, NEWEST, True), ({}, 0, True)],
    ids=["did not ask", "asked for notices", "an older recording"],
)
def test_only_who_asked_for_notices_is_told_that_the_server_goes_away(
    payload: dict[str, Any], behaviour: int, *, is_told: bool
) -> None:
    """A client that does not know the event gives up on it."""
    run = Run(behaviour=behaviour)
    run.step(ev.Admitted)
    run.say({"type": "session.init", "payload": payload})
    run.ask(question())
    run.step(ev.SlotLeased, lease=1, slot=0)
    run.step(ev.DrainBegan, wait_s=30)
    assert ("session.going_away" in run.kinds) is is_told
    assert not run.session.is_finished


def test_an_older_recording_has_the_last_of_the_sound_in_done() -> None:
    """Else it replays with a frame more."""
    run = Run("chat", behaviour=0)
    run.step(ev.Admitted)
    run.say(question(tts={"enabled": True}))
    answer(run, 0, "Good ", "day", pcm=PCM)
    assert run.kinds == ["prefill_done", "chunk", "chunk", "done"]
    assert run.sent[-1]["audio_data"] == base64(PCM)


def test_the_last_of_the_sound_is_the_same_bytes_in_realtime() -> None:
    """There it always went in a delta."""
    sent = []
    for behaviour in (0, NEWEST):
        run = active(behaviour)
        run.ask(question(tts={"enabled": True}))
        answer(run, 0, "Good ", "day", pcm=PCM)
        sent.append(run.sent[2:])  # the session is told otherwise set up
    assert sent[0] == sent[1]
    assert run.kinds[-2:] == ["audio", "response.done"]
