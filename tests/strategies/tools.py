"""Strategies for tools of a chat: offers, calls, and conversations with calls and results."""

from __future__ import annotations

import orjson
from hypothesis import strategies as st

from protocol.values.model import Tool, ToolCall, ToolResult
from protocol.values.requests import ChatMessage, TextPart

names = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
_leaves = st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8)
_schemas = st.dictionaries(
    st.text(max_size=8),
    st.recursive(_leaves, lambda below: st.lists(below, max_size=2), max_leaves=4),
    max_size=3,
)
tools = st.lists(
    st.builds(
        Tool,
        name=names,
        description=st.text(max_size=20),
        parameters=st.just("") | _schemas.map(lambda made: orjson.dumps(made).decode()),
    ),
    max_size=3,
).map(tuple)


@st.composite
def calls(draw: st.DrawFn) -> tuple[ToolCall, ...]:
    """Calls of one answer, each with an id of its own."""
    ids = draw(st.lists(st.text(min_size=1, max_size=64), max_size=3, unique=True))
    return tuple(
        ToolCall(id=each, name=draw(names), arguments=draw(st.text(max_size=20))) for each in ids
    )


@st.composite
def tool_exchanges(draw: st.DrawFn) -> list[ChatMessage]:
    """An answer with calls, and their results in any order; at times none."""
    made = draw(calls())
    if not made:
        return []
    said = tuple(TextPart(text=text) for text in draw(st.lists(st.text(max_size=9), max_size=1)))
    results = [ToolResult(call_id=call.id, output=draw(st.text(max_size=20))) for call in made]
    return [
        ChatMessage(role="assistant", content=(*said, *made)),
        *(ChatMessage(role="tool", content=(it,)) for it in draw(st.permutations(results))),
    ]
