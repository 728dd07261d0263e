"""Calls of tools in an answer's text, told apart while it is written.

A call is `<tool_call>`, a JSON object with the `name` of a tool that was offered and an object of
`arguments`, and `</tool_call>`. Text that may be the beginning of one is held back, with the white
space before it, until that is decided. What turns out to be no call, or is one too many or too
long, is text again, its marks included. An answer that ends within a call ends with it as text.

**The text of a call in the silent lane of a unit** is read by the definition of its tool. It has no
id. In the form `minicpm4_xml` it is
`<function name="N"><param name="P">BODY</param>...</function>`: the body of a string is the string,
any other body is JSON, and the schema of the parameter says which. In the form `openai_json` it is
`{"name": "N", "arguments": {...}}`. Arguments are then checked against the schema.

*XML* is read by expat, which expands no entities here: a document type is an error, so there are
none to expand. Text next to the parameters is ignored, a child element ends the text of its
parameter, and of two parameters of one name the last one counts, as the makers' own reader has it.

*Schemas* are checked by the rules in this file, so that a recording is read in the same way with
any version of any library. The keywords are `type`, `properties`, `required`,
`additionalProperties`, `items`, `enum`, `anyOf`, `oneOf` (read as `anyOf`) and `$ref` to a place in
the same schema. All others, such as `minimum`, `pattern` and `const`, are not checked. A node
needs a type, alternatives or a `$ref`: without one of these a body cannot be read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Final, NoReturn
from xml.parsers import expat

import attrs

from protocol.values.errors import FrameError
from protocol.values.frames import count_keys
from protocol.values.limits import SILENT_CHARS_MAX, TOOL_CHARS_MAX
from protocol.values.model import CALLS_MAX, Span, Tool, ToolCall

# -- calls in the silent lane ----------------------------------------------------------------------


Schema = Mapping[str, Any]

INTEGER: Final = re.compile(r"[+-]?[0-9]+")


def read_xml(text: str, tools: Sequence[Tool]) -> ToolCall:
    """Read a call of the form `minicpm4_xml`; `CallInvalid` says why it is not a call."""
    name, bodies = _elements(text)
    schema = _schema_of(name, tools)
    properties = schema.get("properties", {})
    arguments = {}
    for key, body in bodies:
        if key not in properties:
            raise CallInvalid(f"{name} has no parameter {key[:64]!r}")
        arguments[key] = _cast(body, properties[key], schema, key)
    return _checked(name, arguments, schema)


def read_json(text: str, tools: Sequence[Tool]) -> ToolCall:
    """Read a call of the form `openai_json`, as `read_xml` does."""
    found = _json(text, "the call")
    if not isinstance(found, dict) or not {"name"} <= found.keys() <= {"name", "arguments"}:
        raise CallInvalid("a call has a name and arguments")
    name, arguments = found["name"], found.get("arguments", {})
    if not isinstance(arguments, dict):
        raise CallInvalid("arguments are an object")
    return _checked(name, arguments, _schema_of(name, tools))


def _checked(name: str, arguments: dict[str, Any], schema: Schema) -> ToolCall:
    if schema:
        _check(arguments, schema, schema, "arguments", count(1))
    return ToolCall(name=name, arguments=written(arguments))


def _schema_of(name: object, tools: Sequence[Tool]) -> Schema:
    for tool in tools:
        if tool.name == name:
            schema: Schema = json.loads(tool.parameters or "{}")
            return schema
    raise CallInvalid(f"there is no tool {str(name)[:64]!r}")


def _json(text: str, what: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse)
        count_keys({"": value})  # It bounds the depth.
    except (FrameError, RecursionError, ValueError) as error:
        raise CallInvalid(f"{what} is not JSON") from error
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


# -- XML ----------------------------------------------------------------------------------------


def _elements(text: str) -> tuple[str, list[tuple[str, str]]]:
    """The name of the function, and the name and body of each parameter."""
    path: list[str] = []
    names: list[str] = []
    bodies: list[str] = []
    is_cut = False

    def start(tag: str, attributes: Mapping[str, str]) -> None:
        nonlocal is_cut
        if len(path) < 2:
            wanted = ("function", "param")[len(path)]
            if tag != wanted or "name" not in attributes:
                raise CallInvalid(f"<{tag[:64]}> stands where a named <{wanted}> belongs")
            names.append(attributes["name"])
            bodies.append("")
        is_cut = len(path) >= 2
        path.append(tag)

    def end(_: str) -> None:
        path.pop()

    def data(characters: str) -> None:
        if len(path) == 2 and not is_cut:
            bodies[-1] += characters

    def refuse(*_: object) -> None:
        raise CallInvalid("a call has no document type")

    parser = expat.ParserCreate("utf-8")  # whatever the text declares
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = data, refuse
    try:
        parser.Parse(text.encode(), True)
    except (expat.ExpatError, UnicodeEncodeError) as error:
        raise CallInvalid("the call is not XML") from error
    return names[0], list(zip(names[1:], bodies[1:], strict=True))


def _cast(body: str, schema: Schema, root: Schema, path: str) -> Any:
    """The value of a parameter's body, of the first type or alternative that it fits."""
    schema = _resolved(schema, root)
    for branch in _alternatives(schema):
        try:
            return _cast(body, branch, root, path)
        except CallInvalid:
            continue
    types = _types(schema)
    if "null" in types and body in ("", "null"):
        return None
    for kind in types:
        value = _value(body, kind)
        if value is not None and TYPES[kind](value):
            return value
    raise CallInvalid(f"{path} is not {_listed(types)}")


def _value(body: str, kind: str) -> Any:
    """A body as a value that is to be of a type; None if it cannot be."""
    if kind == "string":
        return body
    if kind == "integer":
        return int(body) if INTEGER.fullmatch(body) else None
    try:
        return _json(body, "it")
    except CallInvalid:
        return None


READERS: Final[Mapping[str, Callable[[str, Sequence[Tool]], ToolCall]]] = {
    "minicpm4_xml": read_xml,
    "openai_json": read_json,
}
"""By the name of the form."""

# -- schemas ------------------------------------------------------------------------------------

TYPES: Final[Mapping[str, Callable[[object], bool]]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
    ),
}
"""Whether a value is of a type."""
NODES_MAX: Final = 512
"""Nodes of a schema, and values of its enums, with each `$ref` written out."""
DEPTH_MAX: Final = 64
"""Of a schema in this sense."""
CHECKS_MAX: Final = 20_000
"""Parts of a value that are checked, each against one node: some 20 ms."""


def _types(schema: Schema) -> Sequence[str]:
    types = schema.get("type", ())
    return (types,) if isinstance(types, str) else types


def _alternatives(schema: Schema) -> Sequence[Schema]:
    return (*schema.get("anyOf", ()), *schema.get("oneOf", ()))


def _listed(types: Sequence[str]) -> str:
    return " or ".join(types) or "as any alternative has it"


def _resolved(schema: Schema, root: Schema) -> Schema:
    while "$ref" in schema:
        schema = _target(schema["$ref"], root)
    return schema


def _target(ref: object, root: Schema, path: str = "") -> Schema:
    """What a local reference names; `ValueError` if that is not a schema."""
    if not isinstance(ref, str) or not ref.startswith("#/"):
        raise ValueError(f"{path}: $ref {str(ref)[:64]!r} does not begin with #/")
    node: Any = root
    for part in ref[2:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        node = node.get(key) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        raise ValueError(f"{path}: $ref {ref[:64]!r} names no schema")
    return node


def _check(value: Any, schema: Schema, root: Schema, path: str, checks: Iterator[int]) -> None:
    """Raise `CallInvalid` if a value does not fit a schema, or is too much to check."""
    if next(checks) > CHECKS_MAX:
        raise CallInvalid("there is too much in it to check")
    schema = _resolved(schema, root)
    types = _types(schema)
    if types and not any(TYPES[kind](value) for kind in types):
        raise CallInvalid(f"{path} is not {_listed(types)}")
    if "enum" in schema and not any(_equal(value, one) for one in schema["enum"]):
        raise CallInvalid(f"{path} is not one of the allowed values")
    branches = _alternatives(schema)
    if branches and not any(_fits(value, branch, root, checks) for branch in branches):
        raise CallInvalid(f"{path} fits no alternative")
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            _check(item, schema["items"], root, f"{path}[{index}]", checks)
    if not isinstance(value, dict):
        return
    for key in schema.get("required", ()):
        if key not in value:
            raise CallInvalid(f"{path} has no {key!r}")
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    for key, item in value.items():
        if key in properties:
            _check(item, properties[key], root, f"{path}.{key}", checks)
        elif others is False:
            raise CallInvalid(f"{path} has no field {key[:64]!r}")
        elif others is not True:
            _check(item, others, root, f"{path}.{key[:64]}", checks)


def _fits(value: Any, schema: Schema, root: Schema, checks: Iterator[int]) -> bool:
    try:
        _check(value, schema, root, "", checks)
    except CallInvalid:
        return False
    return True


def _equal(one: object, other: object) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def check_parameters(parameters: str) -> None:
    """Check the schema of a tool's parameters; `ValueError` says why calls could not be read."""
    schema = json.loads(parameters or "{}")
    if schema:
        _check_node(schema, schema, "parameters", (), count(1))


def _check_node(
    node: object,
    root: Schema,
    path: str,
    refs: tuple[str, ...],
    nodes: Iterator[int],
    *,
    depth: int = 1,
) -> None:
    if not isinstance(node, dict):
        raise ValueError(f"{path} is not an object")
    values = node.get("enum")
    for _ in range(1 + (len(values) if isinstance(values, list) else 0)):
        if next(nodes) > NODES_MAX:
            raise ValueError(f"parameters have more than {NODES_MAX} nodes")
    if depth > DEPTH_MAX:
        raise ValueError(f"parameters nest deeper than {DEPTH_MAX}")
    if "$ref" in node:
        ref = node["$ref"]
        if ref in refs:
            raise ValueError(f"{path}: $ref {ref[:64]!r} leads to itself")
        _check_node(_target(ref, root, path), root, path, (*refs, ref), nodes, depth=depth + 1)
        return
    for name, each in _inner(node, path):
        _check_node(each, root, f"{path}.{name[:64]}", refs, nodes, depth=depth + 1)


def _inner(node: Schema, path: str) -> Iterator[tuple[str, object]]:
    """Check the keywords of one node, which is no `$ref`; yield the schemas in it."""
    types = node.get("type", [])
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise ValueError(f"{path}.type is neither a text nor a list of texts")
    if unknown := [kind for kind in types if kind not in TYPES]:
        raise ValueError(f"{path}.type {unknown[0][:64]!r} is unknown")
    if not types and "anyOf" not in node and "oneOf" not in node:
        raise ValueError(f"{path} has no type")
    for key in ("anyOf", "oneOf", "required", "enum"):
        if not isinstance(node.get(key, []), list):
            raise ValueError(f"{path}.{key} is not a list")
    if not all(isinstance(name, str) for name in node.get("required", [])):
        raise ValueError(f"{path}.required is not a list of texts")
    for key in ("anyOf", "oneOf"):
        if node.get(key, [0]) == []:
            raise ValueError(f"{path}.{key} is empty")
        yield from ((f"{key}[{index}]", each) for index, each in enumerate(node.get(key, [])))
    properties = node.get("properties", {})
    if not isinstance(properties, dict):
        raise ValueError(f"{path}.properties is not an object")
    yield from properties.items()
    for key in ("items", "additionalProperties"):
        if key in node and not (key != "items" and isinstance(node[key], bool)):
            yield key, node[key]


BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"
CALL_CHARS_MAX: Final = TOOL_CHARS_MAX + 256
"""Characters between the marks: the arguments, the name, and what joins them."""


@attrs.define
class CallStream:
    """The text of one answer to a turn that offers tools.

    Attributes:
        tools: those that may be called.
        calls: complete so far.
        ends: calls that are over, those that became text included.
        is_open: the text is within a call.
    """

    tools: Sequence[Tool]
    calls: list[ToolCall] = attrs.Factory(list)
    ends: int = 0
    is_open: bool = False
    _held: str = ""
    _searched: int = 0

    @property
    def is_holding(self) -> bool:
        """Whether some text is held back."""
        return bool(self._held)

    def add(self, text: str) -> str:
        """Take the next text; return what belongs to no call."""
        self._held += text
        return "".join(self._decided())

    def end(self) -> str:
        """Return the text held back, at the end of the answer."""
        text, self._held, self.is_open = self._held, "", False
        return text

    def _decided(self) -> Iterator[str]:
        while True:
            mark = END if self.is_open else BEGIN
            at = self._held.find(mark, max(0, self._searched - len(mark)))
            self._searched = len(self._held)
            if self.is_open and (at < 0 or at > CALL_CHARS_MAX):
                if len(self._held) > CALL_CHARS_MAX:
                    self.is_open, self.ends = False, self.ends + 1
                    yield self._take(self._held.find(BEGIN) + len(BEGIN))
                    continue
                return
            if at < 0:
                yield self._take(_certain(self._held))
                return
            if self.is_open:
                yield self._close(at)
            else:
                yield self._take(len(self._held[:at].rstrip()))
                self.is_open = True

    def _close(self, at: int) -> str:
        """Take a whole call, which ends before `at`; return it as text if it is invalid."""
        self.is_open, self.ends = False, self.ends + 1
        body = self._held[self._held.find(BEGIN) + len(BEGIN) : at]
        text = self._take(at + len(END))
        try:
            call = read_call(body, self.tools)
        except CallInvalid:
            return text
        if len(self.calls) == CALLS_MAX:
            return text
        self.calls.append(call)
        return ""

    def _take(self, count: int) -> str:
        text, self._held, self._searched = self._held[:count], self._held[count:], 0
        return text


def _certain(text: str) -> int:
    """The length of the text before what may begin a call."""
    for chars in range(min(len(BEGIN) - 1, len(text)), 0, -1):
        if text.endswith(BEGIN[:chars]):
            return len(text[:-chars].rstrip())
    return len(text.rstrip())


# -- the text between the marks -------------------------------------------------------------------


class CallInvalid(ValueError):  # noqa: N818 - names say what happened
    """The text is not a call of a tool that was offered; the message tells the model why."""


def read_call(text: str, tools: Sequence[Tool]) -> ToolCall:
    """Read a call, which has no id yet; `CallInvalid`."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise CallInvalid("the call is not JSON") from None
    if not isinstance(found, dict) or found.keys() != {"name", "arguments"}:
        raise CallInvalid("a call has a name and arguments")
    if all(tool.name != found["name"] for tool in tools):
        raise CallInvalid("there is no tool of this name")
    return ToolCall(name=found["name"], arguments=written(found["arguments"]))


def written(arguments: object) -> str:
    """Write arguments as the chat template does."""
    if not isinstance(arguments, dict):
        raise CallInvalid("arguments are an object")
    try:
        count_keys(arguments)  # It bounds the depth.
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (FrameError, ValueError):
        raise CallInvalid("the arguments are not what JSON can hold") from None
    if len(text) > TOOL_CHARS_MAX:
        raise CallInvalid(f"arguments of more than {TOOL_CHARS_MAX} characters")
    return text


FAULT_CHARS_MAX: Final = 256
"""Of what the model is told about a call: it names what its author may have made long."""


def span_of(
    text: str, tools: Sequence[Tool], read: Callable[[str, Sequence[Tool]], ToolCall] = read_call
) -> Span:
    """Read a call that a model wrote in the silent part of its units, in the form of `read`."""
    if len(text) > SILENT_CHARS_MAX:
        return Span(kind="call", text=text[:SILENT_CHARS_MAX], fault="the call is too long")
    try:
        call = read(text, tools)
    except CallInvalid as error:
        return Span(kind="call", text=text, fault=str(error)[:FAULT_CHARS_MAX])
    return Span(kind="call", text=text, name=call.name, arguments=call.arguments)
