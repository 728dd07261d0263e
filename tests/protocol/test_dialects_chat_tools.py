"""Tools of a turn of chat on the wire: their fields, their bounds, and what stands where."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.values.errors import FieldError
from protocol.values.limits import CHAT_TEXT_CHARS_MAX, TOOL_CHARS_MAX, TOOL_DEPTH_MAX, TOOLS_MAX
from protocol.values.model import CALLS_MAX, Tool, ToolCall, ToolResult
from protocol.values.requests import ChatMessage, Request, TextPart
from protocol.wire.codec import parse_frame
from protocol.wire.dialects import LEGACY_CHAT, REALTIME
from tests.protocol.test_dialects_chat_inputs import CHAT, HELLO, ask, ask_of_001, explained_in_both

FUNCTION: dict[str, Any] = {
    "name": "clock",
    "description": "Tells the time.",
    "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
}
CLOCK: dict[str, Any] = {"type": "function", "function": FUNCTION}
CALL: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "clock", "arguments": '{"zone": "UTC"}'},
}
CALLED: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "call_1", "content": "10:30"}


def offer(**changes: object) -> dict[str, Any]:
    """The fields of a turn with a clock whose function is changed."""
    return {"tools": [{"type": "function", "function": {**FUNCTION, **changes}}]}


def talk(*messages: object) -> dict[str, Any]:
    """The fields of a turn with a greeting, and these messages behind it."""
    return {"messages": [*HELLO, *messages]}


def nested(levels: int) -> dict[str, Any]:
    """An object of so many levels."""
    return {} if levels == 1 else {"a": nested(levels - 1)}


def test_tools_and_choice_are_taken_in_both_dialects() -> None:
    """A client's tools would be ignored, and the model would never know of them."""
    for parse in (ask, ask_of_001):
        taken = parse(tools=[CLOCK], tool_choice="none")
        assert taken.tools == (
            Tool(
                name="clock",
                description="Tells the time.",
                parameters='{"type":"object","properties":{"zone":{"type":"string"}}}',
            ),
        )
        assert taken.tool_choice == "none"
        assert parse().tools == ()
        assert parse().tool_choice == "auto"


def test_calls_and_results_are_taken() -> None:
    """The model would not learn what a tool returned."""
    said = {**CALLED, "content": "One moment."}
    taken = ask(**talk(said, RESULT, {"role": "user", "content": "and now?"}))
    call = ToolCall(id="call_1", name="clock", arguments='{"zone": "UTC"}')
    assert taken.messages[1:3] == (
        ChatMessage(role="assistant", content=(TextPart(text="One moment."), call)),
        ChatMessage(role="tool", content=(ToolResult(call_id="call_1", output="10:30"),)),
    )
    assert ask(**talk(CALLED, RESULT)).messages[1].content == (call,)


def test_results_may_come_in_any_order() -> None:
    """Tools that run at once would have to wait for each other."""
    second = {**CALL, "id": "call_2"}
    called = {**CALLED, "tool_calls": [CALL, second]}
    later = {**RESULT, "tool_call_id": "call_2"}
    assert len(ask(**talk(called, later, RESULT)).messages) == 4


def test_as_many_tools_as_are_allowed_are_taken() -> None:
    """A client within the bounds would be refused."""
    tools = [{"type": "function", "function": {"name": f"tool_{at}"}} for at in range(TOOLS_MAX)]
    assert len(ask(tools=tools).tools) == TOOLS_MAX
    assert ask(**offer(parameters=nested(TOOL_DEPTH_MAX))).tools[0].parameters.count("a") == 15
    assert ask(**offer(parameters=None, description=None, strict=False)).tools[0].parameters == ""


LONG = "x" * TOOL_CHARS_MAX
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": {}}, "invalid_payload", "tools: an object, an array is needed"),
    ({"tools": [7]}, "invalid_payload", "tools[0]: an integer, an object is needed"),
    ({"tools": [CLOCK] * 65}, "invalid_payload", "tools: 65 items, allowed is 0 to 64"),
    ({"tools": [{}]}, "missing_field", "tools[0].type: required field is missing"),
    ({"tools": [{"type": "web"}]}, "invalid_payload", "tools[0].type: a string of 3 characters"),
    ({"tools": [{"type": "function"}]}, "missing_field", "tools[0].function: required"),
    (
        {"tools": [{"type": "function", "name": "clock"}]},
        "missing_field",
        "tools[0].function: required field is missing",
    ),
    ({"tools": [{**CLOCK, "cost": 1}]}, "invalid_payload", "tools[0].cost: unknown field, known"),
    (offer(name=None), "missing_field", "tools[0].function.name: required field is missing"),
    (offer(name="a b"), "invalid_payload", "tools[0].function.name: 3 characters that are no n"),
    (offer(name=""), "invalid_payload", "tools[0].function.name: 0 characters that are no name"),
    (offer(name="x" * 65), "invalid_payload", "tools[0].function.name: 65 characters that are"),
    (offer(name="uhr\u00e9"), "invalid_payload", "tools[0].function.name: 4 characters that"),
    (offer(description=LONG + "x"), "invalid_payload", "tools[0].function.description: 16385 c"),
    (offer(parameters=[]), "invalid_payload", "tools[0].function.parameters: an array of 0 ite"),
    (offer(parameters="{}"), "invalid_payload", "tools[0].function.parameters: a string of 2 c"),
    (
        offer(parameters=nested(TOOL_DEPTH_MAX + 1)),
        "invalid_payload",
        "tools[0].function.parameters: more than 16 levels",
    ),
    (
        offer(parameters={"description": LONG}),
        "invalid_payload",
        "tools[0].function.parameters: 16402 characters of JSON, at most 16384 are allowed",
    ),
    (offer(strict=True), "invalid_payload", "tools[0].function.strict: true, but the model's t"),
    (offer(cost=1), "invalid_payload", "tools[0].function.cost: unknown field, known are descri"),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "description": LONG}}] * 9},
        "invalid_payload",
        "messages: 147462 characters of text in all, at most 131072 are allowed",
    ),
    (
        {"tool_choice": "required"},
        "invalid_payload",
        "tool_choice: a string of 8 characters, allowed is auto, none: the model cannot be made",
    ),
    (
        {"tool_choice": {"type": "function", "function": {"name": "clock"}}},
        "invalid_payload",
        "tool_choice: an object, a string is needed: the model cannot be made to call a tool",
    ),
    (talk(CALLED), "invalid_payload", "messages[1].role: assistant, the last message is a use"),
    (
        talk(CALLED, *HELLO),
        "invalid_payload",
        "messages[2].role: user, but calls before it have no result",
    ),
    (
        talk({**CALLED, "tool_calls": [CALL, {**CALL, "id": "b"}]}, RESULT),
        "invalid_payload",
        "messages[2].role: tool, but calls have no result",
    ),
    (
        talk({**CALLED, "tool_calls": [CALL, CALL]}, RESULT),
        "invalid_payload",
        "messages[1].tool_calls: two calls of one id",
    ),
    (
        talk({**CALLED, "tool_calls": [CALL] * (CALLS_MAX + 1)}, RESULT),
        "invalid_payload",
        "messages[1].tool_calls: 17 items, allowed is 0 to 16",
    ),
    (talk(RESULT), "invalid_payload", "messages[1].tool_call_id: no call right before it"),
    (
        talk(CALLED, RESULT, RESULT),
        "invalid_payload",
        "messages[3].tool_call_id: no call right before it, or answered twice",
    ),
    (
        talk(CALLED, {**RESULT, "tool_call_id": "call_2"}),
        "invalid_payload",
        "messages[2].tool_call_id: no call right before it",
    ),
    (talk(CALLED, {"role": "tool", "content": "x"}), "missing_field", "messages[2].tool_call_id"),
    (
        talk(CALLED, {"role": "tool", "tool_call_id": "call_1"}),
        "missing_field",
        "messages[2].content: required field is missing",
    ),
    (
        talk(CALLED, {**RESULT, "content": [{"type": "text", "text": "x"}]}),
        "invalid_payload",
        "messages[2].content: an array of 1 items, a string is needed",
    ),
    (
        talk({**CALLED, "tool_calls": [{**CALL, "id": "x" * 65}]}, RESULT),
        "invalid_payload",
        "messages[1].tool_calls[0].id: 65 characters, allowed is 1 to 64",
    ),
    (
        talk({**CALLED, "tool_calls": [{**CALL, "function": {"name": "a"}}]}, RESULT),
        "missing_field",
        "messages[1].tool_calls[0].function.arguments: required field is missing",
    ),
    (
        talk(
            {**CALLED, "tool_calls": [{**CALL, "function": {"name": "a", "arguments": {}}}]}, RESULT
        ),
        "invalid_payload",
        "messages[1].tool_calls[0].function.arguments: an object, a string is needed",
    ),
]


@pytest.mark.parametrize(("fields", "code", "text"), BAD)
def test_a_bad_tool_is_explained_in_both_dialects(
    fields: dict[str, object], code: str, text: str
) -> None:
    """A client's author would have to guess what is wrong."""
    explained_in_both(fields, code, text)


def test_an_init_has_no_tools() -> None:
    """A client would offer tools once, and wonder why none is called."""
    body = {"type": "session.init", "payload": {"tools": [CLOCK]}}
    with pytest.raises(FieldError, match=r"payload.tools: tools, but in chat each turn brings"):
        REALTIME.parse(Request.INIT, body, CHAT)
    REALTIME.parse(Request.INIT, {"type": "session.init", "payload": {"tools": []}}, CHAT)


def test_tools_are_written_as_they_were_read() -> None:
    """Our own client would send what the server refuses."""
    fields = {"tools": [CLOCK], **talk(CALLED, RESULT), "tool_choice": "none"}
    written = parse_frame(LEGACY_CHAT.encode_request(ask(**fields)))
    assert written["tools"] == [CLOCK]
    assert written["tool_choice"] == "none"
    messages = written["messages"]
    assert isinstance(messages, list)
    assert messages[1] == {"role": "assistant", "tool_calls": [CALL]}
    assert messages[2] == RESULT
    assert CHAT_TEXT_CHARS_MAX > TOOL_CHARS_MAX
