"""Both dialects alike: round trips, what is asked of them by `Dialect`, and frames gone wrong."""

from __future__ import annotations

import contextlib
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.codec import parse_frame
from protocol.dialects import DIALECTS
from protocol.dialects.base import Context, Dialect
from protocol.dialects.duplex_v1 import DUPLEX_V1
from protocol.dialects.opening import OPENING, choose
from protocol.dialects.realtime import REALTIME
from protocol.errors import FieldError, FrameError, LocalProtocolError, RemoteProtocolError
from protocol.messages import (
    Append,
    ClientMessage,
    Closed,
    CloseRequest,
    Created,
    Init,
    Listen,
    Metrics,
    Request,
    ServerMessage,
    Speech,
)

from .strategies import (
    client_messages,
    error_reports,
    json_objects,
    mutated_bodies,
    mutated_texts,
    queue_events,
    server_messages,
)

CONTEXT = Context(mode="video", sliding_windows=("off", "basic", "context"))
DIALECT_NAMES = sorted(DIALECTS)
EVERY_DIALECT: tuple[Dialect, ...] = (REALTIME, DUPLEX_V1, OPENING)
KINDS = {Init: Request.INIT, Append: Request.APPEND, CloseRequest: Request.CLOSE}

with_slow_data = settings(suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow])


def client_frames(name: str) -> st.SearchStrategy[str]:
    """Frames of a dialect's client."""
    return client_messages(name).map(DIALECTS[name].encode_request)


def server_frames(name: str) -> st.SearchStrategy[str]:
    """Frames of a dialect's server."""
    return server_messages.flatmap(lambda message: st.sampled_from(DIALECTS[name].encode(message)))


# -- the client's side --------------------------------------------------------------------------


@pytest.mark.parametrize("name", DIALECT_NAMES)
@with_slow_data
@given(data=st.data())
def test_the_server_reads_what_the_client_wrote(name: str, data: st.DataObject) -> None:
    """Else a setting, a flag or a frame is lost on its way to the model."""
    message: ClientMessage = data.draw(client_messages(name))
    dialect = DIALECTS[name]
    body = parse_frame(dialect.encode_request(message))
    request = dialect.classify(body)
    assert request is KINDS[type(message)]
    assert dialect.parse(request, body, CONTEXT) == message
    assert OPENING.classify(body) is request
    assert OPENING.parse(request, body, CONTEXT) == message


@pytest.mark.parametrize("name", DIALECT_NAMES)
@given(data=st.data())
@with_slow_data
def test_what_the_other_dialect_says_is_misplaced(name: str, data: st.DataObject) -> None:
    """Else a session can change its dialect in its middle."""
    other = next(dialect for dialect in DIALECTS.values() if dialect.name != name)
    body = parse_frame(data.draw(client_frames(name)))
    expected = Request.CLOSE if body["type"] == "session.close" else Request.MISPLACED
    assert other.classify(body) is expected


def take(dialect: Dialect, body: dict[str, object], context: Context) -> None:
    """Classify and parse as a session does; only a FieldError may come of it."""
    request = dialect.classify(body)
    assert isinstance(request, Request)
    with contextlib.suppress(FieldError):
        message = dialect.parse(request, body, context)
        assert KINDS[type(message)] is request
    choose(body)


@pytest.mark.parametrize("dialect", EVERY_DIALECT, ids=lambda dialect: dialect.name)
@given(body=json_objects, mode=st.sampled_from(["video", "audio"]))
def test_no_object_crashes_a_dialect(dialect: Dialect, body: dict[str, object], mode: Any) -> None:
    """Else a strange client ends its session with an internal error."""
    take(dialect, body, Context(mode=mode))


@pytest.mark.parametrize("name", DIALECT_NAMES)
@with_slow_data
@given(data=st.data())
def test_no_mutated_message_crashes_a_dialect(name: str, data: st.DataObject) -> None:
    """Else a client with one bug in one field ends its session with an internal error."""
    body = data.draw(mutated_bodies(client_frames(name)))
    for dialect in EVERY_DIALECT:
        take(dialect, body, CONTEXT)


@pytest.mark.parametrize("name", DIALECT_NAMES)
@settings(with_slow_data, max_examples=50)
@given(data=st.data())
def test_no_mutated_text_crashes_a_dialect(name: str, data: st.DataObject) -> None:
    """Else a truncated or damaged frame does what no damaged frame may do."""
    with contextlib.suppress(FrameError):
        body = parse_frame(data.draw(mutated_texts(client_frames(name))))
        take(DIALECTS[name], dict(body), CONTEXT)


@pytest.mark.parametrize("reason", [None, 5, "", [], {"a": 1}, "x" * 65, "\0" * 5000])
@pytest.mark.parametrize("dialect", EVERY_DIALECT, ids=lambda dialect: dialect.name)
def test_a_close_is_never_refused(dialect: Dialect, reason: object) -> None:
    """Else a client that wants to leave is kept, and its slot with it."""
    body = {"type": "session.close", "reason": reason, "else": 1}
    assert dialect.classify(body) is Request.CLOSE
    message = dialect.parse(Request.CLOSE, body, CONTEXT)
    expected = reason[:64] if isinstance(reason, str) and reason else None
    assert message == CloseRequest(reason=expected)


BAD_TYPES = [
    ({"type": "session.reset"}, "unknown_event", "$.type: a string of 13 characters that names"),
    ({"type": ""}, "unknown_event", "$.type: a string of 0 characters that names"),
    ({}, "missing_field", "$.type: required field is missing"),
    ({"type": None}, "missing_field", "$.type: required field is missing"),
    ({"type": 5}, "invalid_payload", "$.type: an integer, a string is needed"),
    ({"type": ["session.init"]}, "invalid_payload", "$.type: an array of 1 items, a string"),
]


@pytest.mark.parametrize(("body", "code", "text"), BAD_TYPES)
@pytest.mark.parametrize("dialect", EVERY_DIALECT, ids=lambda dialect: dialect.name)
def test_an_unknown_type_is_explained(
    dialect: Dialect, body: dict[str, object], code: str, text: str
) -> None:
    """Else a client author does not learn that the event's name is wrong."""
    assert dialect.classify(body) is Request.UNKNOWN
    with pytest.raises(FieldError) as caught:
        dialect.parse(Request.UNKNOWN, body, CONTEXT)
    assert caught.value.code == code
    assert caught.value.message.startswith(text)


# -- the server's side --------------------------------------------------------------------------


def told(message: ServerMessage, name: str) -> ServerMessage:
    """What of a message a dialect can tell: 000 has no ids, and fewer words for the end."""
    if name == "realtime" or isinstance(message, Created):
        return message
    if isinstance(message, Listen):
        return attrs.evolve(message, session_id="", input_id="")
    if isinstance(message, Speech):
        return attrs.evolve(message, session_id="", response_id="", input_id="")
    if isinstance(message, Closed):
        words = {"invalid_frame": "backend_error", "cancelled": "client"}
        reason: Any = words.get(message.reason, message.reason)
        return Closed(session_id="", reason=reason)
    return message


def joined(messages: list[ServerMessage]) -> ServerMessage:
    """Join the parts of a unit's speech, as a client does."""
    first = messages[0]
    for part in messages[1:]:
        assert isinstance(first, Speech)
        assert isinstance(part, Speech)
        assert not first.end_of_turn
        first = attrs.evolve(part, text=first.text + part.text, pcm=first.pcm + part.pcm)
    return first


@pytest.mark.parametrize("name", DIALECT_NAMES)
@given(message=server_messages)
def test_the_client_reads_what_the_server_wrote(name: str, message: ServerMessage) -> None:
    """Else a listener loses a word, a sound, or the reason why the session ended."""
    dialect = DIALECTS[name]
    frames = dialect.encode(message)
    parts = [part for frame in frames for part in dialect.decode(parse_frame(frame))]
    assert joined(parts) == told(message, name)


@given(message=queue_events | error_reports)
def test_queue_and_errors_read_alike_in_every_dialect(message: ServerMessage) -> None:
    """Else a client must know its dialect before it can wait in the queue."""
    frames = {dialect.encode(message) for dialect in EVERY_DIALECT}
    assert len(frames) == 1
    body = parse_frame(frames.pop()[0])
    assert all(dialect.decode(body) == (message,) for dialect in EVERY_DIALECT)


@pytest.mark.parametrize("name", DIALECT_NAMES)
@with_slow_data
@given(data=st.data())
def test_no_mutated_answer_crashes_the_client(name: str, data: st.DataObject) -> None:
    """Else a client dies of a server that is newer than itself."""
    body = data.draw(mutated_bodies(server_frames(name)))
    with contextlib.suppress(RemoteProtocolError):
        DIALECTS[name].decode(body)


@pytest.mark.parametrize("dialect", EVERY_DIALECT, ids=lambda dialect: dialect.name)
def test_an_answer_of_an_unknown_type_is_the_servers_fault(dialect: Dialect) -> None:
    """Else a client waits for ever for an answer that it has already had."""
    with pytest.raises(RemoteProtocolError):
        dialect.decode({"type": "response.done"})


# -- before a dialect is chosen -----------------------------------------------------------------

OPENING_TABLE = [
    ({"type": "session.init"}, Request.INIT, "realtime"),
    ({"type": "session.init", "payload": {}, "session": {}}, Request.INIT, "realtime"),
    ({"type": "session.update", "session": {}}, Request.INIT, "duplex-v1"),
    ({"type": "session.update", "session": {}, "model": "m"}, Request.INIT, "duplex-v1"),
    ({"type": "session.update", "session": "no object"}, Request.INIT, "duplex-v1"),
    ({"type": "session.update"}, Request.INIT, "duplex-v1"),
    ({"type": "session.update", "model": None}, Request.INIT, "duplex-v1"),
    ({"type": "session.update", "model": "m"}, Request.MISPLACED, None),
    ({"type": "session.update", "model": "m", "session": None}, Request.MISPLACED, None),
    ({"type": "session.update", "model": "m", "session": "s"}, Request.MISPLACED, None),
    ({"type": "input.append"}, Request.APPEND, None),
    ({"type": "input_audio_buffer.append"}, Request.APPEND, None),
    ({"type": "session.close"}, Request.CLOSE, None),
    ({"type": "input_audio_buffer.commit"}, Request.UNKNOWN, None),
    ({}, Request.UNKNOWN, None),
]


@pytest.mark.parametrize(("body", "request_kind", "chosen"), OPENING_TABLE)
def test_the_first_init_picks_the_dialect(
    body: dict[str, object], request_kind: Request, chosen: str | None
) -> None:
    """Else a client is answered in a language that it does not speak."""
    assert OPENING.classify(body) is request_kind
    dialect = choose(body)
    assert (dialect.name if dialect else None) == chosen


def test_an_update_of_another_protocol_stays_misplaced_in_duplex_v1() -> None:
    """Else a transcription client is told of a missing field that it was never to have."""
    body = {"type": "session.update", "model": "m"}
    assert DUPLEX_V1.classify(body) is Request.MISPLACED
    for dialect in EVERY_DIALECT:
        with pytest.raises(FieldError) as caught:
            dialect.parse(Request.MISPLACED, body, CONTEXT)
        assert caught.value.code == "invalid_event"


CREATED = Created(session_id="s", prompt_length=1, recording="on")
LISTEN = Listen(session_id="s", input_id="i", metrics=Metrics(kv_cache_length=1))


@pytest.mark.parametrize("message", [CREATED, LISTEN, Closed(session_id="s", reason="client")])
def test_nothing_of_a_session_is_said_before_the_dialect_is_chosen(message: ServerMessage) -> None:
    """Else our own bug becomes a frame that no client can read."""
    with pytest.raises(LocalProtocolError):
        OPENING.encode(message)


@pytest.mark.parametrize("name", DIALECT_NAMES)
@pytest.mark.parametrize("reason", ["peer_gone", "refused"])
def test_an_end_that_nobody_hears_has_no_frame(name: str, reason: Any) -> None:
    """Else our own bug is sent as a reason that no client knows."""
    with pytest.raises(LocalProtocolError):
        DIALECTS[name].encode(Closed(session_id="s", reason=reason))


def test_the_opening_dialect_writes_nothing_but_a_close() -> None:
    """Else a client that has not chosen sends what the server cannot place."""
    assert parse_frame(OPENING.encode_request(CloseRequest())) == {"type": "session.close"}
    with pytest.raises(LocalProtocolError):
        OPENING.encode_request(Init(instructions=""))


def test_the_registry_holds_what_a_client_can_speak() -> None:
    """Else a recording of a session cannot be read again by its dialect's name."""
    assert {name: dialect.name for name, dialect in DIALECTS.items()} == {
        "realtime": "realtime",
        "duplex-v1": "duplex-v1",
    }
    assert OPENING.name == "opening"
