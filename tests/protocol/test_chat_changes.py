"""A chat: its session's prompt, the notice that the server goes away, the end of its sound."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.values import effects as ef
from protocol.values import events as ev
from tests.sessions.chatting import PCM, Run, active, answer, question


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


@pytest.mark.parametrize(
    ("payload", "is_told"),
    [({}, False), ({"notices": True}, True)],
    ids=["did not ask", "asked for notices"],
)
def test_only_who_asked_for_notices_is_told_that_the_server_goes_away(
    payload: dict[str, Any], *, is_told: bool
) -> None:
    """A client that does not know the event gives up on it."""
    run = Run()
    run.step(ev.Admitted)
    run.say({"type": "session.init", "payload": payload})
    run.ask(question())
    run.step(ev.SlotLeased, lease=1, slot=0)
    run.step(ev.DrainBegan, wait_s=30)
    assert ("session.going_away" in run.kinds) is is_told
    assert not run.session.is_finished


def test_the_last_of_the_sound_goes_in_a_delta() -> None:
    """A client that plays the deltas would miss the end of the answer."""
    run = active()
    run.ask(question(tts={"enabled": True}))
    answer(run, 0, "Good ", "day", pcm=PCM)
    assert run.kinds[-2:] == ["audio", "response.done"]
