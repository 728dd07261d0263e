"""The description of the wire: made of the tables, and held to what they do."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import attrs
import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from docs.site.protocol import example
from protocol.values.errors import FieldError, invalid
from protocol.values.limits import APPEND_SAMPLES_MAX, Mode
from protocol.values.messages import ServerMessage
from protocol.values.model import SAMPLE_BYTES, SlidingWindow
from protocol.values.requests import Append, BadPicture, ClientMessage, Request
from protocol.values.state import SessionKind, session_kind_of
from protocol.wire.codec import (
    FLAG,
    IMAGE_URL,
    IMAGE_URL_HEADS,
    INTEGER,
    TEXT,
    USER_TEXT,
    Context,
    ParseState,
    Value,
    choice,
    encode_base64,
    input_sound,
    integer,
    number,
    parse_frame,
    text,
)
from protocol.wire.dialects import DIALECTS, MODES_OF
from protocol.wire.schema import Message, answer_example, attribute_docs, request_schema
from protocol.wire.table import (
    DROPPED,
    Field,
    Items,
    Object,
    Row,
    Rule,
    Table,
    items,
    one,
    text_or_array,
    variants,
    walk,
)
from replay.redact.frames import held
from tests.fuzz import case
from tests.fuzz.drawing import bodies_of
from tests.project.sampling import sample
from tests.strategies.media import MEDIA
from tests.strategies.messages import client_messages, mutated_bodies, server_messages
from tests.transcripts.wire_schema import Sender, conforms, problems

Json = dict[str, Any]

MESSAGES = {
    f"{message.dialect} {'/'.join(message.session_kinds)} {message.kind or 'request'}": message
    for name in MODES_OF
    for message in case.described(name)
}
REQUESTS = {name: message for name, message in MESSAGES.items() if message.sender == "client"}
ANSWERS = {name: message for name, message in MESSAGES.items() if message.sender == "server"}
PAIRS = [(name, mode) for name, modes in MODES_OF.items() for mode in modes]


def mode_of(message: Message) -> Mode:
    """The first mode in which a message is described."""
    return next(
        mode
        for mode in MODES_OF[message.dialect]
        if session_kind(message.dialect, mode) in message.session_kinds
    )


def session_kind(name: str, mode: Mode) -> SessionKind:
    return session_kind_of(mode, is_request=name == "legacy-chat")


def parse(message: Message, body: Json) -> ClientMessage:
    """Read a body as the server does."""
    dialect = DIALECTS[message.dialect]
    context = Context(mode=mode_of(message), sliding_windows=get_args(SlidingWindow))
    return dialect.parse(dialect.classify(body), body, context)


def filled(value: Any) -> Any:
    """Put files where an example names them."""
    if isinstance(value, dict):
        return {name: filled(below) for name, below in value.items()}
    if isinstance(value, list):
        return [filled(item) for item in value]
    for medium in MEDIA:
        if value == f"<base64 {medium.name}>":
            return encode_base64(medium.samples[0])
    return value


def media_of(field: Field) -> list[str]:
    """What a field's base64 may hold."""
    kind = field.kind.item if isinstance(field.kind, Items) else field.kind
    media: list[str] = kind.schema.get("x-antiphon-media", [])
    return media


@attrs.frozen(kw_only=True)
class Told:
    """Something.

    Attributes:
        a: one, which is
            long: really.
        b: two.
    """

    a: object = None
    b: object = None


def described(*rows: Row) -> Json:
    """The schema of what rows read."""
    return request_schema(Table(Told, *rows))


def reads(body: Json, *rows: Row) -> object:
    """What rows make of a body."""
    return Table(Told, *rows).parse(body)


# -- the rows -------------------------------------------------------------------------------------


def test_limits_and_defaults_are_those_of_the_rows() -> None:
    """A client's author would be told other limits than the server's."""
    rows = (
        Field("a", text(5, 2), attr=DROPPED, doc=""),
        Field("b", integer(1, 9), 3, attr=DROPPED),
        Field("c", number(0, 1, "above "), 0.5, attr=DROPPED),
        Field("d", choice(("x", "y")), None, attr=DROPPED),
        Field("e", FLAG, True, attr=DROPPED),
    )
    assert described(*rows) == {
        "type": "object",
        "properties": {
            "a": {"type": "string", "minLength": 2, "maxLength": 5},
            "b": {"type": ["integer", "null"], "minimum": 1, "maximum": 9, "default": 3},
            "c": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1, "default": 0.5},
            "d": {"type": ["string", "null"], "enum": ["x", "y", None]},
            "e": {"type": ["boolean", "null"], "default": True},
        },
        "required": ["a"],
    }


def test_a_text_after_a_row_is_what_the_field_means() -> None:
    """The text would be lost, or that of another field."""
    rows = (Field("a", TEXT), "The first.", Field("b", TEXT, doc="The second."))
    table = Table(Told, Object("c", *rows), Field("d", TEXT), "The last.")
    properties = request_schema(table)["properties"]
    found = {**properties["c"]["properties"], "d": properties["d"]}
    meant = {name: schema["description"] for name, schema in found.items()}
    assert meant == {"a": "The first.", "b": "The second.", "d": "The last."}


def test_one_row_is_read_written_described_shown_redacted_and_tried() -> None:
    """A field would have to be named in several places, and one of them be forgotten."""
    table = Table(Told, Field("wire_a", text(7, holds=USER_TEXT), attr="a"), tag={"type": "told"})
    body = {"type": "told", "wire_a": "word"}
    assert table.parse(body) == Told(a="word")
    assert table.write(Told(a="word")) == body
    assert request_schema(table)["properties"]["wire_a"] == {
        "type": "string",
        "maxLength": 7,
        "description": "One, which is long: really.",
    }
    assert answer_example(table) == {"type": "told", "wire_a": "a"}
    assert held([table]) == {"type": None, "wire_a": USER_TEXT}
    drawn = bodies_of(request_schema(table))
    assert find(drawn, lambda made: len(made["wire_a"]) > 2)["type"] == "told"


BINARY = {
    f"{name} {field.name}": (field, message.dialect)
    for name, message in REQUESTS.items()
    for _, table in DIALECTS[message.dialect].requests(mode_of(message))
    for field in walk(table.shape.rows)
    if isinstance(field, Field) and "/" in "".join(media_of(field))
}
"""The fields that take files; raw samples can be of any bytes."""


@pytest.mark.parametrize("name", BINARY)
def test_what_base64_may_hold_is_what_its_reader_takes(name: str) -> None:
    """A field would be said to take WAV files that its reader refuses."""
    field, dialect = BINARY[name]
    context = Context(mode=MODES_OF[dialect][0])
    taken = set()
    for medium in MEDIA:
        coded = encode_base64(medium.samples[0])
        value: object = [coded] if isinstance(field.kind, Items) else coded
        at = ParseState({}, "$", "", context, {"rate_hz": 16_000})
        try:
            found = field.kind.read(Value(path="$.a", value=value), at)
        except FieldError:
            continue
        if isinstance(found, tuple) and any(isinstance(one, BadPicture) for one in found):
            continue
        taken.add(medium.name)
    assert taken == {*media_of(field)}


@pytest.mark.parametrize("samples_min", [1, 4000, 4001, 4002])
def test_the_lengths_of_sound_are_those_of_its_samples(samples_min: int) -> None:
    """A tool would refuse sound that the server takes."""
    schema = input_sound(samples_min).schema
    for samples, name in ((samples_min, "minLength"), (APPEND_SAMPLES_MAX, "maxLength")):
        assert len(encode_base64(bytes(SAMPLE_BYTES * samples))) == schema[name]


def test_a_refusal_of_unknown_fields_is_described() -> None:
    """A tool would let a setting pass that the server refuses."""
    schema = described(Object("config", closed=True))
    assert schema["properties"]["config"]["additionalProperties"] is False
    assert "additionalProperties" not in schema
    with pytest.raises(FieldError, match=r"\$\.config\.x: unknown field"):
        reads({"config": {"x": 1}}, Object("config", closed=True))


def test_every_kind_of_an_object_is_described_by_itself() -> None:
    """Only the first kind of content would be known to a tool."""
    tables = (
        Table(Told, Field("text", TEXT, attr="a"), tag={"type": "a"}),
        Table(Told, Field("count", INTEGER, attr="b"), tag={"type": "b"}),
    )
    schema = described(Field("x", variants("type", *tables), attr="a"))["properties"]["x"]
    assert schema["x-antiphon-tag"] == "type"
    first, second = schema["oneOf"]
    assert first["properties"].keys() == {"type", "text"}
    assert second["properties"].keys() == {"type", "count"}
    assert second["properties"]["type"]["const"] == "b"
    assert second["required"] == ["type", "count"]


def test_a_string_or_objects_is_described_as_either() -> None:
    """A plain string as a message's content would be refused by tools."""
    inner = one(Table(Told, Field("a", TEXT)))
    schema = described(Field("x", text_or_array(text(7), items(inner, 3, 1), str), attr="a"))
    string, array = schema["properties"]["x"]["anyOf"]
    assert string == {"type": "string", "maxLength": 7}
    assert (array["minItems"], array["maxItems"]) == (1, 3)
    assert array["items"]["required"] == ["a"]


def test_one_of_several_names_is_required_but_none_of_them() -> None:
    """A message with the second name of a field would be called incomplete."""
    schema = described(Field("new", TEXT, attr="a", also=("old",)))
    assert "required" not in schema
    assert schema["anyOf"] == [{"required": ["new"]}, {"required": ["old"]}]
    assert schema["properties"]["old"]["x-antiphon-same"] == "new"


def test_the_first_row_s_mistake_is_told() -> None:
    """Old sessions would be told another mistake than they were."""
    rows = (Field("a", INTEGER), Rule(refuse), Field("b", INTEGER))
    for body, told in (
        ({"b": "x"}, "$.a: required field is missing"),
        ({"a": 1, "b": "x"}, "$: refused"),
    ):
        with pytest.raises(FieldError) as caught:
            reads(body, *rows)
        assert caught.value.message == told


def refuse(at: ParseState) -> None:
    """A rule that is never kept."""
    raise invalid(at.path, "refused")


def test_what_is_written_last_may_be_read_first() -> None:
    """Either the order of errors or that of the fields would have to change."""
    rows = (Field("a", INTEGER, rank=1), Field("b", INTEGER))
    assert [*Table(Told, *rows).write(Told(a=1, b=2))] == ["b", "a"]


@pytest.mark.parametrize(("behaviour", "ignored"), [(0, True), (1, False)])
def test_a_field_is_known_from_its_behaviour_on(
    behaviour: int, ignored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old recording would be told of a field that its server did not know."""
    monkeypatch.setattr("protocol.values.behaviour.NEWEST", 1)
    table = Table(Append, Field("x", INTEGER, None, attr=DROPPED, since=1), lacks={"pcm": b""})
    made = table.parse({"x": 1}, Context(mode="video", behaviour=behaviour))
    assert made.ignored == (("$.x",) if ignored else ())


# -- what there is --------------------------------------------------------------------------------


def test_every_message_is_on_some_wire() -> None:
    """A message could not be found in the reference, or nobody could send it."""
    canonical = {cls for message in MESSAGES.values() for cls in message.canonical}
    assert canonical == {*get_args(ClientMessage), *get_args(ServerMessage)}


def test_every_request_but_mistakes_has_a_message() -> None:
    """An event of the reception table would be missing from the reference."""
    requests = {message.request for message in REQUESTS.values()}
    assert requests == {*Request} - {Request.MISPLACED, Request.UNKNOWN}


def objects(schema: Json) -> Iterator[Json]:
    """All objects of a schema, the message first."""
    if "properties" in schema:
        yield schema
        for below in schema["properties"].values():
            yield from objects(below)
    for key in ("oneOf", "anyOf"):
        for below in schema.get(key, ()):
            yield from objects(below)
    if "items" in schema:
        yield from objects(schema["items"])


def is_plain(schema: Json) -> bool:
    """Whether a field's name and type say all: an object, or one value."""
    words = [word for word in schema.get("enum", ()) if word is not None]
    return "properties" in schema or "const" in schema or len(words) == 1


@pytest.mark.parametrize("name", MESSAGES)
def test_every_field_has_a_meaning(name: str) -> None:
    """The reference would name a field and leave its reader guessing."""
    for schema in objects(MESSAGES[name].schema):
        for field, below in schema["properties"].items():
            assert below.get("description") or is_plain(below), field


@pytest.mark.parametrize("name", MESSAGES)
def test_every_message_has_a_meaning(name: str) -> None:
    """The reference would name a message and say nothing of it."""
    assert MESSAGES[name].description


def test_meanings_are_those_of_the_attributes() -> None:
    """A field would be explained by the words for another."""
    append = MESSAGES["duplex-v1 duplex input_audio_buffer.append"].canonical[0]
    doc = attribute_docs(append)["pcm"]
    schema = MESSAGES["duplex-v1 duplex input_audio_buffer.append"].schema
    assert schema["properties"]["audio"]["description"].lower() == doc.lower()


def test_an_attribute_may_be_explained_on_several_lines() -> None:
    """The end of a long explanation would be lost."""
    assert attribute_docs(Told) == {"a": "one, which is long: really.", "b": "two."}


# -- the schema and the server agree --------------------------------------------------------------


@pytest.mark.parametrize("name", REQUESTS)
def test_examples_are_taken(name: str) -> None:
    """Whoever copies an example from the reference gets an error."""
    body = filled(example(REQUESTS[name].schema))
    assert isinstance(parse(REQUESTS[name], body), REQUESTS[name].canonical)
    assert problems(REQUESTS[name].dialect, "client", body) == ()


def places(schema: Json, body: Any) -> Iterator[tuple[Json, Any, str, bool]]:
    """Each field of a body: its schema, the object it stands in, its name, whether it must be."""
    if not isinstance(body, dict):
        return
    for kind in schema.get("oneOf", [schema]):
        if "properties" not in kind or any(
            "const" in below and body.get(name) != below["const"]
            for name, below in kind["properties"].items()
        ):
            continue
        for name, below in kind["properties"].items():
            if name in body:
                yield below, body, name, name in kind.get("required", ())
                yield from places(below, body[name])
                for item in body[name] if isinstance(body[name], list) else ():
                    for items in (below, *below.get("anyOf", ())):
                        yield from places(items.get("items", {}), item)


def full(schema: Json) -> Any:
    """A body with every field but other names of one, each at its highest."""
    if "oneOf" in schema:
        return full(schema["oneOf"][0])
    made = {}
    for name, below in schema["properties"].items():
        if "x-antiphon-same" in below or "x-antiphon-after" in below:
            continue
        kinds = below.get("anyOf", [below])
        made[name] = value_of(kinds[-1] if kinds[-1].get("type") != "null" else kinds[0])
    return made


def value_of(schema: Json) -> Any:
    """The highest value of a field."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema.get("examples", schema["enum"])[0]
    if "contentEncoding" in schema:
        return filled(f"<base64 {schema['x-antiphon-media'][0]}>")
    if schema.get("pattern") == IMAGE_URL.schema["pattern"]:
        return IMAGE_URL_HEADS["JPEG"] + filled("<base64 image/jpeg>")
    if "items" in schema:
        return [value_of(schema["items"])]
    if "properties" in schema or "oneOf" in schema:
        return full(schema)
    if "additionalProperties" in schema:
        return {"name": value_of(schema["additionalProperties"])}
    if "maximum" in schema:
        return schema["maximum"]
    if "boolean" in schema.get("type", ()):
        return True
    return "x" * min(schema.get("maxLength", 3), 200)


def refused(message: Message, body: Json) -> bool:
    """Whether the server refuses a body."""
    try:
        parse(message, body)
    except FieldError:
        return True
    return False


def wrong_values(schema: Json, *, is_required: bool) -> Iterator[Any]:
    """Values just beyond what a field may be, and of other types."""
    kinds = schema.get("type", ())
    kinds = {kinds} if isinstance(kinds, str) else {*kinds}
    if not kinds:
        return
    if is_required:
        yield None
    if "minimum" in schema:
        yield schema["minimum"] - 1
    if "exclusiveMinimum" in schema:
        yield schema["exclusiveMinimum"]
    if "maximum" in schema:
        yield schema["maximum"] + 1
    if "maxLength" in schema and "contentEncoding" not in schema:
        yield "x" * (schema["maxLength"] + 1)
    if schema.get("minLength") and "contentEncoding" not in schema:
        yield "x" * (schema["minLength"] - 1)
    if "enum" in schema:
        yield "no such word"
    if "maxItems" in schema:
        yield [value_of(schema["items"])] * (schema["maxItems"] + 1)
    for kind, value in {"string": "x", "object": {}, "array": [], "boolean": True}.items():
        if kind not in kinds and (kind != "boolean" or "integer" not in kinds):
            yield value
    if not kinds & {"integer", "number"}:
        yield 7


@pytest.mark.parametrize("name", REQUESTS)
def test_the_schema_refuses_what_the_server_refuses(name: str) -> None:
    """A client that a tool made of the document would send what the server refuses."""
    message = REQUESTS[name]
    body = full(message.schema)
    assert problems(message.dialect, "client", body) == ()
    assert not refused(message, body)
    for index, (schema, _, field, is_required) in enumerate(places(message.schema, body)):
        for value in wrong_values(schema, is_required=is_required):
            wrong = copy.deepcopy(body)
            [*found] = places(message.schema, wrong)
            found[index][1][field] = value
            said = f"{field}: {json.dumps(value)[:60]}"
            assert refused(message, wrong), said
            assert not conforms(message.dialect, "client", wrong, message.session_kinds[0]), said


@pytest.mark.parametrize("name", REQUESTS)
def test_the_schema_needs_what_the_server_needs(name: str) -> None:
    """A client that follows the document would leave out what the server needs."""
    message = REQUESTS[name]
    body = full(message.schema)
    for index, (_, _, field, _) in enumerate(places(message.schema, body)):
        less = copy.deepcopy(body)
        [*found] = places(message.schema, less)
        del found[index][1][field]
        if message.kind and field == "type" and found[index][1] is less:
            continue
        is_refused = not conforms(message.dialect, "client", less, message.session_kinds[0])
        assert refused(message, less) is is_refused, field


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), PAIRS)
@given(data=st.data())
@settings(max_examples=sample(60, 25), deadline=None, suppress_health_check=list(HealthCheck))
def test_what_the_server_takes_conforms(name: str, mode: Mode, data: st.DataObject) -> None:
    """A tool would refuse to send what the server understands."""
    dialect = DIALECTS[name]
    frames = client_messages(name, mode).map(dialect.encode_request)
    body = data.draw(st.one_of(frames.map(parse_frame), mutated_bodies(frames)))
    context = Context(mode=mode, sliding_windows=get_args(SlidingWindow))
    try:
        dialect.parse(dialect.classify(body), body, context)
    except FieldError:
        return
    if mode == "audio":  # what is not looked at there is described as video has it
        body = json.loads(json.dumps(body))
        for holder in (body, body.get("input")):
            for field in ("video_frames", "frame_base64_list", "frame", "frame_base64"):
                if isinstance(holder, dict):
                    holder.pop(field, None)
        if body.get("type") == "video_frame":
            return
    assert problems(name, "client", body, session_kind(name, mode)) == ()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), PAIRS)
@given(data=st.data())
@settings(max_examples=sample(60, 25), deadline=None, suppress_health_check=list(HealthCheck))
def test_what_the_server_sends_conforms(name: str, mode: Mode, data: st.DataObject) -> None:
    """A strict client would stumble over a field that is not in the document."""
    message = data.draw(server_messages(name, mode))
    for frame in DIALECTS[name].encode(message):
        assert problems(name, "server", parse_frame(frame), session_kind(name, mode)) == ()


@pytest.mark.parametrize("name", ANSWERS)
def test_the_server_s_examples_conform(name: str) -> None:
    """The reference would show what its own tables do not allow."""
    for body in ANSWERS[name].examples:
        assert problems(ANSWERS[name].dialect, "server", body) == ()


@pytest.mark.parametrize(
    ("dialect", "sender", "body"),
    [
        ("realtime", "server", {"type": "session.queue_done", "more": 1}),
        ("realtime", "server", {"type": "session.queued", "position": 1}),
        ("realtime", "client", {"type": "session.init"}),
        ("duplex-v1", "client", {"type": "session.update", "session": {}}),
        ("legacy-chat", "client", {"messages": []}),
        ("legacy-duplex", "server", {"type": "session.created"}),
    ],
)
def test_what_is_not_described_does_not_conform(
    dialect: str, sender: Sender, body: Mapping[str, Any]
) -> None:
    """Transcripts with any mistake would be said to conform."""
    assert not conforms(dialect, sender, body)
