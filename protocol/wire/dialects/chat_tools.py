"""Tools of a turn of chat, as clients send them: in the form of OpenAI's chat completions.

Everything here is shown to the model, and nothing is run. A schema is bounded and otherwise not
read. Objects that describe a tool or a call are closed, so that a setting without effect is
noticed.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from ...values.limits import CALL_ID_CHARS_MAX, TOOL_CHARS_MAX, TOOL_DEPTH_MAX, TOOLS_MAX
from ...values.requests import ChatMessage, Part
from ...values.tools import CALLS_MAX, TOOL_NAME, Tool, ToolCall, ToolResult
from ...values.turn import Role
from ..codec import Value, invalid
from ..field import DROPPED, Field
from ..kinds import NAMED, PROMPTED, SAID, Holds, Kind, because, choice, text
from ..nested import Variants, items, one, variants
from ..reading import Reading, as_object
from ..strict import Nested, nested_in
from ..table import Object, Row, Table

TOOL_NAMED: Final = Holds("name", "name", TOOL_NAME)
_NAME_RULE: Final = "a name of a tool has 1 to 64 letters, digits, _ and -"


def _name(value: Value, _: Reading) -> str:
    name = value.text()
    if not TOOL_NAME.fullmatch(name):
        raise invalid(value.path, f"{len(name)} characters that are no name: {_NAME_RULE}")
    return name


NAME: Final = Kind(
    read=_name,
    schema={"type": "string", "pattern": f"^{TOOL_NAME.pattern}$", "examples": ["clock"]},
    holds=TOOL_NAMED,
)
CALL_ID: Final = text(CALL_ID_CHARS_MAX, 1, holds=NAMED)


def _schema(value: Value, _: Reading) -> str:
    """Read a JSON Schema as text, bounded in depth and length."""
    found = as_object(value.value, value.path)
    level: list[Nested] = [dict(found)]
    for _level in range(TOOL_DEPTH_MAX):
        level = nested_in(level)
    if level:
        raise invalid(value.path, f"more than {TOOL_DEPTH_MAX} levels")
    text = orjson.dumps(found).decode()
    if len(text) > TOOL_CHARS_MAX:
        raise invalid(
            value.path, f"{len(text)} characters of JSON, at most {TOOL_CHARS_MAX} are allowed"
        )
    return text


_SCHEMA: Final = Kind(
    read=_schema,
    write=lambda schema: orjson.loads(schema) if schema else None,
    schema={"type": "object", "properties": {}},
)


def _not_strict(value: Value, _: Reading) -> None:
    if value.flag():
        raise invalid(value.path, "true, but the model's tokens are not constrained to a schema")


_TOOL: Final = Table(
    Tool,
    Object(
        "function",
        (
            Field("name", NAME),
            Field("description", text(TOOL_CHARS_MAX, holds=PROMPTED), "", omit=True),
            Field("parameters", _SCHEMA, "", omit=True, example={"type": "object"}),
            Field(
                "strict",
                Kind(read=_not_strict, schema={"type": "boolean", "const": False}),
                None,
                attr=DROPPED,
                doc="Only false: the model's tokens are not constrained to a schema.",
            ),
        ),
        is_required=True,
        closed=True,
    ),
    tag={"type": "function"},
    closed=True,
)
CALL: Final = Table(
    ToolCall,
    Field("id", CALL_ID, example="call_0c9e41d7a355"),
    Object(
        "function",
        (
            Field("name", NAME),
            Field("arguments", text(TOOL_CHARS_MAX, holds=SAID), example="{}"),
        ),
        is_required=True,
        closed=True,
    ),
    tag={"type": "function"},
    closed=True,
)
CALLS: Final = items(variants("type", CALL), CALLS_MAX)
"""Calls in a client's message."""
MADE_CALLS: Final = items(one(CALL), CALLS_MAX)
"""Calls in an answer of the server."""
_CHOICE: Final = because(
    choice(("auto", "none")), "the model cannot be made to call a tool, or one of them"
)
TOOL_ROWS: Final[tuple[Row, ...]] = (
    Field("tools", items(variants("type", _TOOL), TOOLS_MAX), (), omit=True, rank=3),
    Field("tool_choice", _CHOICE, "auto", omit=True, rank=3),
)
"""The tools of a turn."""


def calls_of(message: ChatMessage) -> tuple[ToolCall, ...]:
    """The calls of a message of the assistant."""
    return tuple(part for part in message.content if isinstance(part, ToolCall))


def results_of(message: ChatMessage) -> tuple[ToolResult, ...]:
    """The result in a tool's message, if it is one."""
    return tuple(part for part in message.content if isinstance(part, ToolResult))


def messages_of(content: Kind, words: Kind) -> Variants:
    """Make the kind of a message by its role; `content` is that of words and media."""
    parts = "Text, or parts of several kinds."
    said = Field("content", content, holds=SAID, doc=parts)
    answer = Field("content", content, (), get=_without_calls, omit=True, holds=SAID, doc=parts)
    called = Field("tool_calls", CALLS, (), get=calls_of, omit=True, doc=_CALLED)
    answered = Field(
        "tool_call_id",
        CALL_ID,
        get=lambda message: results_of(message)[0].call_id,
        doc="The call that it answers.",
    )
    output = Field(
        "content",
        words,
        get=lambda message: results_of(message)[0].output,
        doc="Its result, for the model.",
    )
    return variants(
        "role",
        _of_role("user", "A user's message.", said),
        _of_role("system", "How the model is to answer; only the first message.", said),
        _of_role("assistant", "An earlier answer.", answer, called),
        _of_role("tool", "What a tool returned.", answered, output),
        write=lambda message: message.role,
    )


_CALLED: Final = "Calls of tools in it; right behind it stands the result of each."


def _of_role(role: Role, doc: str, *rows: Row) -> Table:
    def make(values: dict[str, Any]) -> ChatMessage:
        said = values["content"]
        if role == "tool":
            said = (ToolResult(call_id=values["tool_call_id"], output=said),)
        return ChatMessage(role=role, content=(*said, *values.get("tool_calls", ())))

    return Table(ChatMessage, *rows, tag={"role": role}, make=make, doc=doc)


def _without_calls(message: ChatMessage) -> tuple[Part, ...]:
    return tuple(part for part in message.content if not isinstance(part, ToolCall))


def check_answered(path: str, messages: tuple[ChatMessage, ...]) -> None:
    """Check that each call has its result right behind it, and each result its call.

    `FieldError` names the message.
    """
    waiting: set[str] = set()
    for index, message in enumerate(messages):
        results, here = results_of(message), f"{path}[{index}]"
        if waiting and not results:
            raise invalid(f"{here}.role", f"{message.role}, but calls before it have no result")
        for result in results:
            if result.call_id not in waiting:
                raise invalid(f"{here}.tool_call_id", "no call right before it, or answered twice")
            waiting.remove(result.call_id)
        calls = calls_of(message)
        waiting |= {call.id for call in calls}
        if len(waiting) < len(calls):
            raise invalid(f"{here}.tool_calls", "two calls of one id")
    if waiting:
        last = len(messages) - 1
        raise invalid(f"{path}[{last}].role", f"{messages[last].role}, but calls have no result")


def chars_of(tools: tuple[Tool, ...], messages: tuple[ChatMessage, ...]) -> int:
    """Characters of tools, of their calls and of their results."""
    calls = (len(call.arguments) for message in messages for call in calls_of(message))
    results = (len(result.output) for message in messages for result in results_of(message))
    offered = (len(tool.description) + len(tool.parameters) for tool in tools)
    return sum(offered) + sum(calls) + sum(results)
