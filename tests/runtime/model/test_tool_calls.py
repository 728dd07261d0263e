"""Calls of tools in an answer's text, told apart piece by piece."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.values.limits import TOOL_CHARS_MAX
from protocol.values.model import CALLS_MAX, Tool, ToolCall
from runtime.model.backends.tool_calls import BEGIN, CALL_CHARS_MAX, END, CallStream

TOOLS = (Tool(name="clock"), Tool(name="lamp"))


def call(name: str = "clock", arguments: str = "{}") -> str:
    """A call as a model writes it."""
    return f'{BEGIN}\n{{"name": "{name}", "arguments": {arguments}}}\n{END}'


def read(pieces: Sequence[str]) -> tuple[str, list[ToolCall], list[str]]:
    """What is left of an answer as text, its calls, and the text piece by piece."""
    stream = CallStream(TOOLS)
    said = [stream.add(piece) for piece in pieces]
    said.append(stream.end())
    return "".join(said), stream.calls, said


def test_a_call_is_taken_out_of_the_text() -> None:
    """A user would read JSON, and the client would know of no call."""
    text, calls, _ = read(["One moment.\n", call("lamp", '{"on": true}'), "\n", call()])
    assert text.rstrip() == "One moment."
    assert calls == [
        ToolCall(name="lamp", arguments='{"on": true}'),
        ToolCall(name="clock", arguments="{}"),
    ]


@given(
    parts=st.lists(
        st.sampled_from(
            [
                *("Hello", " ", "\n", "<", "<tool", "tool_call>", "</tool_call>", "<tool_call>"),
                *(
                    call(),
                    call("lamp", '{"a": [1, "<tool_call>"]}'),
                    call("door"),
                    call("clock", "7"),
                ),
                *(f"{BEGIN}{{{END}", f"{BEGIN}{END}", "<tools>", "x < y", "é", "\u2028"),
            ]
        ),
        max_size=8,
    ),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_the_result_does_not_depend_on_the_pieces(parts: list[str], cuts: list[int]) -> None:
    """A tag that comes in two tokens would be sent as text, or a call be lost."""
    whole = "".join(parts)
    bounds = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    pieces = [whole[a:b] for a, b in pairwise(bounds)]
    text, calls, _ = read(pieces)
    assert (text, calls) == read([whole])[:2] == read([*whole])[:2]
    for each in calls:
        assert each.name in {"clock", "lamp"}
        assert isinstance(json.loads(each.arguments), dict)
    if not calls:
        assert text == whole


@pytest.mark.parametrize(
    "body",
    [
        "no JSON",
        "[]",
        '"clock"',
        '{"name": "clock"}',
        '{"arguments": {}}',
        '{"name": "door", "arguments": {}}',
        '{"name": 7, "arguments": {}}',
        '{"name": ["clock"], "arguments": {}}',
        '{"name": "clock", "arguments": []}',
        '{"name": "clock", "arguments": "{}"}',
        '{"name": "clock", "arguments": {}, "more": 1}',
        '{"name": "clock", "arguments": {"a": NaN}}',
        '{"name": "clock", "arguments": {"a": 1e999}}',
        '{"name": "clock", "arguments": {"a": "\\ud800"}}',
        '{"name": "clock", "arguments": ' + '{"a":' * 400 + "1" + "}" * 400 + "}",
        '{"name": "clock", "arguments": ' + "[" * 8000 + "]" * 8000 + "}",
        '{"name": "clock", "arguments": {"a": "' + "x" * TOOL_CHARS_MAX + '"}}',
    ],
)
def test_what_is_no_call_is_text_again(body: str) -> None:
    """What a model writes would be lost without a word."""
    text = f"So: {BEGIN}{body}{END} and on"
    assert read([*text])[:2] == (text, [])
    assert read([text])[:2] == (text, [])


def test_a_call_that_does_not_end_is_text_at_the_end() -> None:
    """The end of an answer would be missing."""
    for text in (f"a {BEGIN}", f'a {BEGIN}\n{{"name": "clo', "a <tool_", "a \n "):
        assert read([*text])[:2] == (text, [])


def test_a_call_without_end_is_held_within_a_bound() -> None:
    """A model that writes on and on would fill memory, and its client hear nothing."""
    stream = CallStream(TOOLS)
    said = stream.add(BEGIN)
    for _ in range(CALL_CHARS_MAX + 1000):
        said += stream.add("x")
        assert len(stream._held) <= CALL_CHARS_MAX + len(BEGIN)
    assert said.startswith(BEGIN)
    assert len(said) == len(BEGIN) + CALL_CHARS_MAX + 1000
    assert read([said, call()])[1] == [ToolCall(name="clock", arguments="{}")]


def test_calls_beyond_the_most_are_text() -> None:
    """A session would give a client more calls than it may send back."""
    text, calls, _ = read([call() * (CALLS_MAX + 2)])
    assert len(calls) == CALLS_MAX
    assert text == call() * 2


def test_arguments_are_written_as_the_template_writes_them() -> None:
    """A model would find its own call in another form than it was trained on."""
    _, (made,), _ = read([call("clock", '{"zone":"Zürich","n":[1,2.50]}')])
    assert made.arguments == '{"zone": "Zürich", "n": [1, 2.5]}'
