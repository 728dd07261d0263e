"""A chat's turns with tools: what the model is given, and what the client is told of its calls."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.model import Prefill, Text, Tool, ToolCall, ToolResult, TurnChunk, TurnResult
from tests.sessions.chatting import Run, active, question

TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
CALLS = (ToolCall(name="clock", arguments="{}"), ToolCall(name="clock", arguments='{"a": 1}'))


def answer(run: Run, index: int, lease: int, **result: Any) -> None:
    """Let the model answer a turn with calls."""
    run.step(ev.SlotLeased, lease=lease, slot=0)
    run.step(ev.TurnPrefilled, prefill=Prefill(index=index, input_tokens=9))
    if result.get("text"):
        run.step(ev.TurnProgress, chunk=TurnChunk(index=index, step=0, text=result["text"]))
    made = {"text": "", "reason": "tool_calls", "calls": CALLS, **result}
    run.step(ev.TurnDone, result=TurnResult(index=index, generated_tokens=7, **made))
    run.step(ev.BackendReleased, lease=lease)


def asked(**fields: Any) -> dict[str, Any]:
    """A question with tools."""
    return question(tools=TOOLS, **fields)


def test_calls_are_told_with_the_end_and_named() -> None:
    """A client could not say which call a result belongs to."""
    run = active()
    run.ask(asked())
    answer(run, 0, 1, text="One moment.")
    done = run.sent[-1]
    assert (done["text"], done["reason"]) == ("One moment.", "tool_calls")
    assert [call["function"] for call in done["tool_calls"]] == [
        {"name": "clock", "arguments": "{}"},
        {"name": "clock", "arguments": '{"a": 1}'},
    ]
    run.ask(asked())
    answer(run, 1, 2)
    ids = [call["id"] for sent in (done, run.sent[-1]) for call in sent["tool_calls"]]
    assert len(set(ids)) == 4
    assert all(each.startswith("call_") for each in ids)


def test_an_answer_without_calls_has_no_field_for_them() -> None:
    """Clients that know no tools would find a field that they do not know."""
    run = active()
    run.ask(asked())
    answer(run, 0, 1, text="Hi", reason="turn_end", calls=())
    assert "tool_calls" not in run.sent[-1]


@pytest.mark.parametrize(("choice", "count"), [("auto", 1), ("none", 0)])
def test_the_model_is_shown_the_tools_that_it_may_call(choice: str, count: int) -> None:
    """A client that wants no calls would get some."""
    run = active()
    run.ask(asked(tool_choice=choice))
    run.step(ev.SlotLeased, lease=1, slot=0)
    (start,) = run.of(ef.StartTurn)
    assert start.turn.tools == (Tool(name="clock", parameters='{"type":"object"}'),) * count


def test_the_model_is_given_calls_and_results() -> None:
    """It would answer as if nothing had been called."""
    run = active()
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": "One moment.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "10:30"},
    ]
    run.ask({"messages": messages})
    run.step(ev.SlotLeased, lease=1, slot=0)
    (start,) = run.of(ef.StartTurn)
    assert [message.content for message in start.turn.messages[1:]] == [
        (Text(text="One moment."), ToolCall(id="a", name="clock", arguments="{}")),
        (ToolResult(call_id="a", output="10:30"),),
    ]
    assert start.turn.has_tools


def test_a_turn_that_is_refused_for_its_tools_ends_with_the_reason() -> None:
    """A client of a model without tools would not know why."""
    run = active()
    run.ask(asked())
    run.step(ev.SlotLeased, lease=1, slot=0)
    run.step(ev.TurnFailed, index=0, refused="tools: this server's model has none")
    assert run.sent[-1]["error"]["code"] == "invalid_payload"
    assert run.sent[-1]["error"]["message"] == "tools: this server's model has none"
