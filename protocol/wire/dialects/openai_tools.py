"""Tools in OpenAI's realtime APIs: calls and results as items, and as delegated responses.

- A call comes whole: its arguments are one piece, for what a model writes is not JSON, and is
  read when it is closed.
- The Live API delegates a call to a backend, whose response it is; ids that belong to a call are
  made of the call's own.
"""

from __future__ import annotations

from typing import Any, Final

from ...values.limits import CALL_ID_CHARS_MAX, INPUT_CHARS_MAX, MS_PER_S
from ...values.messages import ToolCalled
from ...values.model import ToolCall, ToolResult
from ...values.openai import Item
from ..codec import Fields, Reading, Value, as_object
from ..kinds import INTEGER, TEXT, USER_TEXT, Kind, text
from ..table import Field, Object, Table, Variants, computed, fixed

CALLED: Final = "Functions that the client runs; called if the model can."
OUTPUT: Final = "function_call_output"


# -- items ----------------------------------------------------------------------------------------


def result_rows(at: str = "") -> tuple[Field, Field]:
    """The rows of what a tool returned, whose attributes are at a place in the value."""
    call_id, output = text(CALL_ID_CHARS_MAX, 1), text(INPUT_CHARS_MAX, holds=USER_TEXT)
    doc = "What the tool returned; the model gets it with the next second."
    return (
        Field(
            "call_id", call_id, attr=f"{at}call_id", example="call_0c9e41d7a355", doc="The call."
        ),
        Field("output", output, attr=f"{at}output", example="half past nine", doc=doc),
    )


def result_item(*rows: Field) -> Table:
    """Make the table of an item that is the result of a call; its first rows differ."""
    rows = (*rows, *result_rows("call."))
    return Table(Item, *rows, tag={"type": OUTPUT}, make=tool_item, doc="The result of a call.")


def tool_item(values: dict[str, Any]) -> Item:
    """Make an item of a call, or of a result, from its attributes."""
    called = {name: value for name, value in values.items() if name.startswith("call.")}
    own = {name: value for name, value in values.items() if name not in called}
    part = {name.removeprefix("call."): value for name, value in called.items()}
    if "output" in part:
        return Item(role="user", call=ToolResult(**part), **own)
    return Item(role="assistant", call=ToolCall(**part), **own)


def any_item(message: Table, *others: Table) -> Variants:
    """The kind of an item that is a message, or belongs to tools."""
    tables = {"message": message, **{table.kind: table for table in others}}

    def read(value: Value, at: Reading) -> Any:
        word = as_object(value.value, value.path).get("type")
        table = tables.get(word) if isinstance(word, str) else None
        return (table or message).parse_below(value, at)

    def write(item: Item) -> dict[str, object]:
        word = {ToolCall: "function_call", ToolResult: OUTPUT}.get(type(item.call), "message")
        return tables[word].write(item)

    return Variants(read=read, write=write, schema={}, tag="type", tables=tables)


# -- delegated responses --------------------------------------------------------------------------

_ARGUMENTS: Final = "response.function_call_arguments"
_ITEM_DONE: Final = "response.output_item.done"


def _id_of(prefix: str, called: ToolCalled) -> str:
    return f"{prefix}_{called.call.id.partition('_')[2]}"


def _events(called: ToolCalled) -> tuple[dict[str, object], ...]:
    """The events of a response that is a call, as the Responses API has them."""
    call, at = called.call, {"output_index": 0}
    item = {"type": "function_call", "id": _id_of("item", called), "call_id": call.id}
    begun = {**item, "status": "in_progress", "name": call.name, "arguments": ""}
    done = {**begun, "status": "completed", "arguments": call.arguments}
    response: dict[str, object] = {"object": "response", "id": _id_of("resp", called)}
    response |= {"output": [], "usage": None}
    written = {**at, "item_id": item["id"]}
    return (
        {"type": "response.created", "response": {**response, "status": "in_progress"}},
        {"type": "response.output_item.added", **at, "item": begun},
        {"type": f"{_ARGUMENTS}.delta", **written, "delta": call.arguments},
        {"type": f"{_ARGUMENTS}.done", **written, "name": call.name, "arguments": call.arguments},
        {"type": _ITEM_DONE, **at, "item": done},
        {"type": "response.completed", "response": {**response, "status": "completed"}},
    )


def called(values: dict[str, Any]) -> ToolCalled | None:
    """Make the call of the event that has the whole call."""
    if values["event"].get("type") != _ITEM_DONE:
        return None
    item = Fields(values["event"], "$.event").required("item", lambda value: value)
    fields = Fields(as_object(item.value, item.path), item.path)
    words = {name: fields.required(name, Value.text) for name in ("name", "arguments")}
    call = ToolCall(id=fields.required("call_id", Value.text), **words)
    return ToolCalled(session_id="", call=call, unit=0)


def _named(name: str, prefix: str, doc: str) -> Field:
    example = f"{prefix}_0c9e41d7a355"
    return computed(name, TEXT, lambda called: _id_of(prefix, called), example=example, doc=doc)


def _event(at: int) -> tuple[Field, Field]:
    """The rows of one of the events."""
    event = Field(
        "event",
        Kind(read=lambda value, _: as_object(value.value, value.path), schema={"type": "object"}),
        get=lambda called: {**_events(called)[at], "sequence_number": at},
        attr="event",
        example={"type": _ITEM_DONE, "output_index": 0, "item": {"type": "function_call"}},
        doc="Of the Responses API, in this order: response.created, response.output_item.added, "
        "response.function_call_arguments.delta and .done, response.output_item.done with the "
        "whole call, response.completed.",
    )
    return _named("delegation_id", "dlg", "The delegation."), event


EVENTS: Final = tuple(map(_event, range(6)))
"""The rows of each event of a delegated call."""
DELEGATION: Final = (
    Object(
        "delegation",
        _named("id", "dlg", "The delegation."),
        fixed("type", "delegation"),
        fixed("target", "responses"),
        _named("response_id", "resp", "The response that is the call."),
        doc="What is delegated: a call of a tool.",
    ),
    computed(
        "offset_ms",
        INTEGER,
        lambda called: (called.unit + 1) * MS_PER_S,
        example=3000,
        doc="Where in the session.",
    ),
)
"""The rows of the delegation of a call."""
