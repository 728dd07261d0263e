"""Calls of the silent lane are read as the makers' own package reads them."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.values.model import Tool
from runtime.model.backends.tool_calls import NODES_MAX, READERS, CallInvalid, check_parameters
from tests.models.makers import TOOLS, recorded

GOLDEN = recorded()
ALL = tuple(TOOLS.values())
XML = "minicpm4_xml"
DOCTYPE = (
    '<!DOCTYPE function [<!ENTITY a "b">]>'
    '<function name="tide"><param name="harbour">&a;</param></function>'
)


def tool(parameters: object) -> Tool:
    """A tool whose parameters have a schema."""
    return Tool(name="t", parameters=json.dumps(parameters))


def of_a(schema: object, **more: object) -> Tool:
    """A tool with one parameter, `a`."""
    return tool({"type": "object", "properties": {"a": schema}, **more})


@pytest.mark.parametrize("form", tuple(READERS))
@pytest.mark.parametrize("case", GOLDEN["calls"], ids=lambda case: str(case["arguments"])[:30])
def test_a_call_is_read_as_it_was_written(case: dict[str, Any], form: str) -> None:
    """Each call that the makers' package writes is read, with the types of its arguments."""
    assert case[form]["reads_back"]
    call = READERS[form](case[form]["text"], ALL)
    assert call.name == case["name"]
    assert json.dumps(json.loads(call.arguments)) == json.dumps(case["arguments"])


@pytest.mark.parametrize("case", GOLDEN["bad_calls"], ids=lambda case: case["text"][:40])
def test_a_doubtful_call_is_read_or_refused_as_by_the_makers(case: dict[str, Any]) -> None:
    """What their reader refuses is refused, and what it reads is read with the same arguments."""
    tools = [TOOLS[case["definition"]]]
    if "error" in case:
        with pytest.raises(CallInvalid):
            READERS[case["serializer"]](case["text"], tools)
        return
    call = READERS[case["serializer"]](case["text"], tools)
    read = {"name": call.name, "arguments": json.loads(call.arguments)}
    assert read == case["reads_as"]


OF_OUR_PARSERS = ("unknown field of a function", "tool of the Realtime API's flat form")
"""Definitions whose fields are judged by the tables of the dialects, before there is a `Tool`."""


@pytest.mark.parametrize(
    "case",
    [case for case in GOLDEN["bad_tools"] if case["about"] not in OF_OUR_PARSERS],
    ids=lambda case: case["about"],
)
def test_a_definition_is_judged_as_by_the_makers(case: dict[str, Any]) -> None:
    """A schema by which calls cannot be read is refused."""
    parameters = json.dumps(case["tool"]["function"].get("parameters", {}))
    if case["ok"]:
        check_parameters(parameters)
    else:
        with pytest.raises(ValueError, match="parameters"):
            check_parameters(parameters)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (DOCTYPE, "no document type"),
        ('<function name="tide">&a;</function>', "not XML"),
        ('<function name="tide"><param name="harbour">\ud800</param></function>', "not XML"),
        (
            '<function name="tide"><param name="hours">1_0</param></function>',
            "hours is not integer",
        ),
        ('<function name="door"></function>', "there is no tool 'door'"),
    ],
)
def test_the_model_is_told_what_is_wrong(text: str, why: str) -> None:
    """The error is the result that the model gets, so it names the mistake."""
    with pytest.raises(CallInvalid, match=why):
        READERS[XML](text, ALL)


@pytest.mark.parametrize(
    ("definition", "body", "value"),
    [
        (of_a({"anyOf": [{"type": "integer"}, {"type": "string"}]}), "7", 7),
        (of_a({"anyOf": [{"type": "integer"}, {"type": "string"}]}), "seven", "seven"),
        (of_a({"$ref": "#/$defs/b"}, **{"$defs": {"b": {"type": "number"}}}), "1.5", 1.5),
        (of_a({"type": ["string", "null"]}), "null", None),
        (of_a({"type": ["integer", "null"]}), "", None),
        (of_a({"type": "boolean"}), "false", False),
    ],
)
def test_a_body_is_read_by_its_schema(definition: Tool, body: str, value: object) -> None:
    """The first alternative or type that fits wins."""
    text = f'<function name="t"><param name="a">{body}</param></function>'
    call = READERS[XML](text, [definition])
    assert json.loads(call.arguments) == {"a": value}


@pytest.mark.parametrize(
    ("definition", "arguments"),
    [
        (of_a({"type": "string", "enum": ["x", "y"]}), {"a": "z"}),
        (of_a({"type": "integer", "enum": [1]}), {"a": True}),
        (of_a({"type": "integer"}), {"a": 1.5}),
        (of_a({"type": "integer"}, additionalProperties=False), {"b": 1}),
        (of_a({"type": "integer"}, additionalProperties={"type": "string"}), {"b": 1}),
        (of_a({"type": "array", "items": {"type": "string"}}), {"a": ["x", 1]}),
        (of_a({"oneOf": [{"type": "string"}, {"type": "null"}]}), {"a": 1}),
        (of_a({"type": "object", "required": ["c"]}), {"a": {}}),
    ],
)
def test_arguments_that_do_not_fit_are_refused(definition: Tool, arguments: object) -> None:
    """Each keyword that is checked refuses something."""
    check_parameters(definition.parameters)
    text = json.dumps({"name": "t", "arguments": arguments})
    with pytest.raises(CallInvalid, match="arguments"):
        READERS["openai_json"](text, [definition])


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN"])
def test_a_number_that_is_not_finite_is_refused(number: str) -> None:
    """JSON has no such number, so no client could read the arguments."""
    for kind in ("integer", "number"):
        text = f'{{"name": "t", "arguments": {{"a": {number}}}}}'
        with pytest.raises(CallInvalid):
            READERS["openai_json"](text, [of_a({"type": kind})])


def test_a_schema_that_grows_by_references_is_refused() -> None:
    """Written out, ten levels of two references each have a thousand nodes."""
    pair = [[{"$ref": f"#/$defs/d{level + 1}"}] * 2 for level in range(10)]
    defs: dict[str, object] = {f"d{level}": {"anyOf": each} for level, each in enumerate(pair)}
    grown = of_a({"$ref": "#/$defs/d0"}, **{"$defs": {**defs, "d10": {"type": "string"}}})
    with pytest.raises(ValueError, match=f"more than {NODES_MAX} nodes"):
        check_parameters(grown.parameters)


def test_a_schema_that_is_deep_long_or_odd_is_refused() -> None:
    """Each would be accepted, and break or hold up the reading of calls."""
    chain: dict[str, object] = {
        f"d{it}": {"anyOf": [{"$ref": f"#/$defs/d{it + 1}"}]} for it in range(80)
    }
    defs = {"$defs": {**chain, "d80": {"type": "string"}}}
    for schema, why in (
        (of_a({"$ref": "#/$defs/d0"}, **defs), "deeper"),
        (of_a({"type": "integer", "enum": list(range(NODES_MAX))}), "nodes"),
        (tool({"type": "object", "required": [[1]]}), "required"),
    ):
        with pytest.raises(ValueError, match=why):
            check_parameters(schema.parameters)


def test_what_is_too_much_to_check_is_refused() -> None:
    """One call would hold up the sessions of all."""
    alike = [{"type": "integer", "enum": [it]} for it in range(100)]
    many = of_a({"type": "array", "items": {"anyOf": alike}})
    check_parameters(many.parameters)
    text = json.dumps({"name": "t", "arguments": {"a": [99] * 1000}})
    with pytest.raises(CallInvalid, match=r"no alternative|too much"):
        READERS["openai_json"](text, [many])


@pytest.mark.parametrize("name", ["foo", "gbk", "cp1252"])
def test_an_encoding_that_the_text_declares_counts_for_nothing(name: str) -> None:
    """The reader would break, or the client get other letters."""
    text = (
        f'<?xml version="1.0" encoding="{name}"?>'
        '<function name="tide"><param name="harbour">é€</param></function>'
    )
    assert json.loads(READERS[XML](text, ALL).arguments) == {"harbour": "é€"}


@given(
    text=st.text(st.sampled_from('<>/="&;! function name param tide[]CDATA{}:,\\0'), max_size=60)
)
def test_no_text_breaks_the_reader(text: str) -> None:
    """Whatever a model writes is a call or an error."""
    for form in READERS:
        for whole in (
            text,
            f'<function name="tide"><param name="harbour">{text}</param></function>',
        ):
            with contextlib.suppress(CallInvalid):
                READERS[form](whole, ALL)
