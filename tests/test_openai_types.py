"""What the server says in OpenAI's dialects is read, strictly, by the types of its own package."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.live.client_event import ClientEvent
from openai.types.live.connect_client_event import ConnectClientEvent
from openai.types.live.fork_client_event import ForkClientEvent
from openai.types.live.server_event import ServerEvent
from openai.types.realtime.realtime_client_event import RealtimeClientEvent
from openai.types.realtime.realtime_server_event import RealtimeServerEvent
from pydantic import TypeAdapter

from protocol.values.behaviour import WHOLE_PARTS
from protocol.values.errors import ErrorCode, FieldError
from protocol.wire.codec import Context
from protocol.wire.dialects import DIALECTS
from tests.strategies.messages import server_messages
from tests.transcripts.reading import Transcript, example, load_all

TYPES: Final[dict[str, TypeAdapter[Any]]] = {
    "live": TypeAdapter(ServerEvent),
    "openai": TypeAdapter(RealtimeServerEvent),
}
TRANSCRIPTS: Final = [it for it in load_all() if it.dialect in TYPES]


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda it: it.name)
def test_a_transcript_is_read_by_the_package(transcript: Transcript) -> None:
    """A client of the package would get an event that its types do not have."""
    for body in transcript.bodies("receive"):
        found = TYPES[transcript.dialect].validate_json(json.dumps(example(body)), strict=True)
        assert found.type == body["type"]


TEXTS: Final[dict[str, tuple[str, type[Any]]]] = {
    "input_text": ("text", str),
    "output_text": ("text", str),
    "input_audio": ("transcript", str | None),  # type: ignore[dict-item]
    "output_audio": ("transcript", str | None),  # type: ignore[dict-item]
}
"""What the JavaScript Agents SDK needs of each part of an item, as its schemas have it."""


def parts_of(body: Any) -> list[dict[str, Any]]:
    """All parts of items in a message."""
    if isinstance(body, list):
        return [part for each in body for part in parts_of(each)]
    if not isinstance(body, dict):
        return []
    own = body["content"] if body.get("object") == "realtime.item" and "content" in body else []
    return own + [part for each in body.values() for part in parts_of(each)]


@pytest.mark.parametrize(
    "transcript",
    [it for it in load_all() if it.dialect != "vllm-omni"],  # which has a client of its own
    ids=lambda it: it.name,
)
def test_a_part_has_its_text(transcript: Transcript) -> None:
    """A Node process of the Agents SDK dies of the first thing that its user says."""
    parts = [part for body in transcript.bodies("receive") for part in parts_of(body)]
    for part in parts if transcript.behaviour >= WHOLE_PARTS else ():
        name, kind = TEXTS[part["type"]]
        assert name in part
        assert isinstance(example(part[name]), kind)


ASKED: Final[Mapping[str, tuple[Any, ...]]] = {
    "live": (ClientEvent, ConnectClientEvent, ForkClientEvent),
    "openai": (RealtimeClientEvent,),
}


def words_in(union: object) -> Iterator[str]:
    """The types of the events in a union of the package's."""
    for kind in get_args(get_args(union)[0]):
        yield from get_args(kind.model_fields["type"].annotation)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name, unions in ASKED.items()
        for kind in sorted({word for union in unions for word in words_in(union)})
    ],
)
def test_an_event_of_the_package_is_served_or_refused_by_name(name: str, kind: str) -> None:
    """A client reads that an event of its own package is none."""
    dialect = DIALECTS[name]
    body = {"type": kind}
    if kind in dialect.types:
        return
    with pytest.raises(FieldError) as refused:
        dialect.parse(dialect.classify(body), body, Context(mode="audio"))
    assert refused.value.code is ErrorCode.UNSUPPORTED
    assert kind in refused.value.message


@pytest.mark.parametrize("name", TYPES)
@given(data=st.data())
@settings(max_examples=6 * settings.default.max_examples, deadline=None)
def test_any_message_is_read_by_the_package(name: str, data: st.DataObject) -> None:
    """A value that no transcript shows would break a client."""
    message = data.draw(server_messages(name, "audio"))
    for frame in DIALECTS[name].encode(message):
        found = TYPES[name].validate_json(frame, strict=True)
        assert found.type == json.loads(frame)["type"]
