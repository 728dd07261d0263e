"""All dialects alike: round trips, what is asked of them by `Dialect`, and frames gone wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.values.errors import FieldError, FrameError, LocalProtocolError, RemoteProtocolError
from protocol.values.limits import Mode
from protocol.values.messages import (
    Closed,
    Created,
    Delta,
    GoingAway,
    Listen,
    Metrics,
    Paused,
    Prefilled,
    Response,
    ServerMessage,
    Speech,
    TranscriptDelta,
)
from protocol.values.omni import AckPlayback, BargeIn, ClearOutput, CommitTurn, Heartbeat
from protocol.values.openai import (
    CancelResponse,
    ClearSound,
    CommitSound,
    Configure,
    CreateItem,
    DeleteItem,
    ItemStep,
    Mute,
    Respond,
    RetrieveItem,
    TruncateItem,
    Unmute,
    Update,
)
from protocol.values.requests import (
    Append,
    AppendSound,
    Ask,
    ChooseModel,
    ClientMessage,
    CloseRequest,
    Commit,
    Init,
    Interrupt,
    Pause,
    Played,
    Report,
    Request,
    Resume,
    See,
)
from protocol.wire.codec import Context, parse_frame
from protocol.wire.dialects import (
    DIALECTS,
    DUPLEX_V1,
    LEGACY_CHAT,
    LEGACY_DUPLEX,
    LIVE,
    OMNI,
    OPENAI,
    OPENAI_TRANSCRIPTION,
    OPENING,
    REALTIME,
    TRANSCRIPTION,
    TRANSCRIPTION_RESPONSES,
    Dialect,
    choose,
)
from tests.project.sampling import sample
from tests.sessions.told import (
    told_in_duplex_v1,
    told_in_legacy_chat,
    told_in_legacy_duplex,
    told_in_live,
    told_in_omni,
    told_in_openai,
    told_in_realtime,
)
from tests.strategies.messages import (
    client_messages,
    error_reports,
    json_objects,
    listens,
    mutated_bodies,
    mutated_texts,
    queue_events,
    server_messages,
    speeches,
)

CASES: tuple[tuple[str, Mode], ...] = (
    ("realtime", "video"),
    ("realtime", "chat"),
    ("duplex-v1", "video"),
    ("legacy-duplex", "video"),
    ("legacy-chat", "chat"),
    ("transcription", "transcription"),
    ("transcription-responses", "transcription"),
    ("live", "audio"),
    ("openai", "audio"),
    ("openai-transcription", "transcription"),
    ("vllm-omni", "video"),
)
in_every_case = pytest.mark.parametrize(("name", "mode"), CASES)
MODES: tuple[Mode, ...] = ("video", "audio", "chat", "transcription")
SHARED_ENDPOINT: tuple[Dialect, ...] = (REALTIME, DUPLEX_V1, OPENING)
"""The dialects of `/v1/realtime`, which has a `session.close` whatever the dialect."""
TYPED: tuple[Dialect, ...] = (
    *SHARED_ENDPOINT,
    LEGACY_DUPLEX,
    TRANSCRIPTION,
    TRANSCRIPTION_RESPONSES,
    LIVE,
    OPENAI,
    OPENAI_TRANSCRIPTION,
    OMNI,
)
"""The dialects whose client messages have a type."""
EVERY_DIALECT: tuple[Dialect, ...] = (*TYPED, LEGACY_CHAT)
KINDS: dict[type[ClientMessage], set[Request]] = {
    Init: {Request.INIT},
    Append: {Request.APPEND},
    Ask: {Request.INIT, Request.APPEND},
    CloseRequest: {Request.CLOSE},
    See: {Request.SEE},
    Pause: {Request.PAUSE},
    Resume: {Request.RESUME},
    Interrupt: {Request.INTERRUPT},
    Report: {Request.REPORT},
    Played: {Request.PLAYED},
    ChooseModel: {Request.INIT},
    AppendSound: {Request.APPEND},
    Commit: {Request.COMMIT},
    Mute: {Request.MUTE},
    Unmute: {Request.UNMUTE},
    Update: {Request.UPDATE},
    Configure: {Request.UPDATE},
    CommitSound: {Request.COMMIT},
    ClearSound: {Request.CLEAR},
    Respond: {Request.RESPOND},
    CancelResponse: {Request.CANCEL},
    CreateItem: {Request.CREATE_ITEM},
    DeleteItem: {Request.DELETE_ITEM},
    RetrieveItem: {Request.RETRIEVE_ITEM},
    TruncateItem: {Request.TRUNCATE_ITEM},
    CommitTurn: {Request.COMMIT},
    Heartbeat: {Request.HEARTBEAT},
    BargeIn: {Request.INTERRUPT},
    ClearOutput: {Request.CLEAR_OUTPUT},
    AckPlayback: {Request.PLAYED},
}


def context_of(mode: Mode) -> Context:
    """A session's mode, on a backend that honours every window."""
    return Context(mode=mode, sliding_windows=("off", "basic", "context"))


CONTEXT = context_of("video")

with_slow_data = settings(suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow])


def client_frames(name: str, mode: Mode) -> st.SearchStrategy[str]:
    """Frames of a dialect's client."""
    return client_messages(name, mode).map(DIALECTS[name].encode_request)


def server_frames(name: str, mode: Mode) -> st.SearchStrategy[str]:
    """Frames of a dialect's server."""
    return server_messages(name, mode).flatmap(
        lambda message: st.sampled_from(DIALECTS[name].encode(message))
    )


# -- the client's side --------------------------------------------------------------------------


@in_every_case
@with_slow_data
@given(data=st.data())
def test_the_server_reads_what_the_client_wrote(name: str, mode: Mode, data: st.DataObject) -> None:
    """Else a setting, a flag or a frame is lost on its way to the model."""
    message: ClientMessage = data.draw(client_messages(name, mode))
    dialect = DIALECTS[name]
    body = parse_frame(dialect.encode_request(message))
    request = dialect.classify(body)
    assert request in KINDS[type(message)]
    assert dialect.parse(request, body, context_of(mode)) == message


@pytest.mark.parametrize("name", ["realtime", "duplex-v1"])
@with_slow_data
@given(data=st.data())
def test_the_first_message_is_read_before_a_dialect_is_chosen(
    name: str, data: st.DataObject
) -> None:
    """Else the init that picks a dialect is not the init that the dialect would have read."""
    message: ClientMessage = data.draw(client_messages(name))
    body = parse_frame(DIALECTS[name].encode_request(message))
    request = OPENING.classify(body)
    assert request is DIALECTS[name].classify(body)
    assert OPENING.parse(request, body, CONTEXT) == message


@pytest.mark.parametrize(("name", "other"), [("realtime", DUPLEX_V1), ("duplex-v1", REALTIME)])
@given(data=st.data())
@with_slow_data
def test_what_the_other_dialect_says_is_misplaced(
    name: str, other: Dialect, data: st.DataObject
) -> None:
    """Else a session can change its dialect in its middle."""
    body = parse_frame(data.draw(client_frames(name, "video")))
    expected = Request.CLOSE if body["type"] == "session.close" else Request.MISPLACED
    assert other.classify(body) is expected


def take(dialect: Dialect, body: dict[str, object], context: Context) -> None:
    """Classify and parse as a session does; only a FieldError may come of it."""
    request = dialect.classify(body)
    assert isinstance(request, Request)
    with contextlib.suppress(FieldError):
        message = dialect.parse(request, body, context)
        assert request in KINDS[type(message)]
    choose(body)


@pytest.mark.slow
@pytest.mark.parametrize("dialect", EVERY_DIALECT, ids=lambda dialect: dialect.name)
@given(body=json_objects, mode=st.sampled_from(MODES))
def test_no_object_crashes_a_dialect(dialect: Dialect, body: dict[str, object], mode: Any) -> None:
    """Else a strange client ends its session with an internal error."""
    take(dialect, body, Context(mode=mode))


@pytest.mark.slow
@in_every_case
@with_slow_data
@given(data=st.data())
def test_no_mutated_message_crashes_a_dialect(name: str, mode: Mode, data: st.DataObject) -> None:
    """Else a client with one bug in one field ends its session with an internal error."""
    body = data.draw(mutated_bodies(client_frames(name, mode)))
    for dialect in EVERY_DIALECT:
        take(dialect, body, context_of(mode))


@pytest.mark.slow
@in_every_case
@settings(with_slow_data, max_examples=sample(50, 20))
@given(data=st.data())
def test_no_mutated_text_crashes_a_dialect(name: str, mode: Mode, data: st.DataObject) -> None:
    """Else a truncated or damaged frame does what no damaged frame may do."""
    with contextlib.suppress(FrameError):
        body = parse_frame(data.draw(mutated_texts(client_frames(name, mode))))
        take(DIALECTS[name], dict(body), context_of(mode))


@pytest.mark.parametrize("reason", [None, 5, "", [], {"a": 1}, "x" * 65, "\0" * 5000])
@pytest.mark.parametrize("dialect", SHARED_ENDPOINT, ids=lambda dialect: dialect.name)
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
@pytest.mark.parametrize("dialect", TYPED, ids=lambda dialect: dialect.name)
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
    """What of a message a dialect can tell; each says so in its file's docstring."""
    return _TOLD[name](message)


_TOLD: dict[str, Callable[[ServerMessage], ServerMessage]] = {
    "realtime": told_in_realtime,
    "duplex-v1": told_in_duplex_v1,
    "legacy-duplex": told_in_legacy_duplex,
    "legacy-chat": told_in_legacy_chat,
    "transcription": lambda message: message,
    "transcription-responses": lambda message: message,
    "live": told_in_live,
    "openai": told_in_openai,
    "openai-transcription": told_in_openai,
    "vllm-omni": told_in_omni,
}


def joined(messages: list[ServerMessage]) -> ServerMessage:
    """Join the parts of what is told in several frames, as a client does."""
    first = messages[0]
    for part in messages[1:]:
        match first, part:
            case ItemStep(), ItemStep() if first == part:
                pass  # told in two words
            case Closed(), Closed():
                pass  # an error's, and the `stopped` after it (002)
            case (Speech(end_of_turn=False), Speech()) | (Delta(), Delta()):
                first = attrs.evolve(part, text=first.text + part.text, pcm=first.pcm + part.pcm)
            case Delta(text=""), Response(pcm=b""):
                first = attrs.evolve(part, pcm=first.pcm)
            case _:
                raise AssertionError(f"{part} after {first}")
    return first


def read_back(name: str, mode: Mode, message: ServerMessage) -> ServerMessage:
    """What a client makes of a message's frames."""
    dialect = DIALECTS[name]
    frames = dialect.encode(message)
    return joined([part for frame in frames for part in dialect.decode(parse_frame(frame), mode)])


@in_every_case
@with_slow_data
@given(data=st.data())
def test_the_client_reads_what_the_server_wrote(name: str, mode: Mode, data: st.DataObject) -> None:
    """Else a listener loses a word, a sound, or the reason why the session ended."""
    message = data.draw(server_messages(name, mode))
    assert read_back(name, mode, message) == told(message, name)


@given(message=listens | speeches)
def test_a_unit_reads_alike_in_every_dialect(message: Listen | Speech) -> None:
    """Else what a user hears depends on the protocol of the client."""

    def heard(outcome: Any) -> Any:
        metrics = outcome.metrics
        counts = (metrics.kv_cache_length, metrics.n_tokens, metrics.wall_clock_ms)
        if isinstance(outcome, Listen):
            return counts
        return (*counts, outcome.text, outcome.pcm, outcome.end_of_turn)

    names = ("realtime", "duplex-v1", "legacy-duplex")
    read = [read_back(name, "video", message) for name in names]
    assert {type(outcome) for outcome in read} == {type(message)}
    assert {heard(outcome) for outcome in read} == {heard(message)}


@given(message=queue_events | error_reports)
def test_queue_and_errors_read_alike_in_every_dialect(message: ServerMessage) -> None:
    """Else a client must know its dialect before it can wait in the queue."""
    frames = {dialect.encode(message) for dialect in SHARED_ENDPOINT}
    assert len(frames) == 1
    body = parse_frame(frames.pop()[0])
    assert all(dialect.decode(body) == (message,) for dialect in SHARED_ENDPOINT)
    legacy = {dialect.encode(message) for dialect in (LEGACY_CHAT, LEGACY_DUPLEX)}
    assert len(legacy) == 1


@pytest.mark.slow
@in_every_case
@with_slow_data
@given(data=st.data())
def test_no_mutated_answer_crashes_the_client(name: str, mode: Mode, data: st.DataObject) -> None:
    """Else a client dies of a server that is newer than itself."""
    body = data.draw(mutated_bodies(server_frames(name, mode)))
    with contextlib.suppress(RemoteProtocolError):
        DIALECTS[name].decode(body, mode)


@pytest.mark.slow
@pytest.mark.parametrize("dialect", EVERY_DIALECT, ids=lambda dialect: dialect.name)
@given(body=json_objects, mode=st.sampled_from(MODES))
def test_no_object_crashes_the_client(dialect: Dialect, body: dict[str, object], mode: Any) -> None:
    """Else a client dies of a server that speaks something else."""
    with contextlib.suppress(RemoteProtocolError):
        dialect.decode(body, mode)


@pytest.mark.parametrize("dialect", EVERY_DIALECT, ids=lambda dialect: dialect.name)
def test_an_answer_of_an_unknown_type_is_the_servers_fault(dialect: Dialect) -> None:
    """Else a client waits for ever for an answer that it has already had."""
    with pytest.raises(RemoteProtocolError, match="no event of the server"):
        dialect.decode({"type": "session.gone"})


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
    for dialect in SHARED_ENDPOINT:
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


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, "peer_gone") for name in DIALECTS),
        *((name, "answered") for name in DIALECTS),
        *((name, "rejected") for name in DIALECTS if not name.startswith("transcription")),
        *((name, "pause_timeout") for name in ("realtime", "duplex-v1", "legacy-chat")),
        *((name, "refused") for name in ("duplex-v1", "legacy-duplex", "legacy-chat")),
        ("legacy-chat", "client"),
    ],
)
def test_an_end_that_nobody_hears_has_no_frame(name: str, reason: Any) -> None:
    """Else our own bug is sent as a reason that no client knows."""
    with pytest.raises(LocalProtocolError):
        DIALECTS[name].encode(Closed(session_id="s", reason=reason))


FOREIGN: list[tuple[str, ServerMessage]] = [
    ("realtime", Paused(timeout_s=1.0)),
    ("duplex-v1", Prefilled(input_tokens=1)),
    ("duplex-v1", Delta(session_id="s", response_id="r", input_id="i")),
    ("legacy-duplex", Prefilled(input_tokens=1)),
    ("legacy-chat", Created(session_id="s", prompt_length=1, recording="on")),
    ("legacy-chat", Paused(timeout_s=1.0)),
    ("transcription", Prefilled(input_tokens=1)),
    ("transcription-responses", GoingAway(seconds_left=1)),
    ("realtime", TranscriptDelta(text="a")),
]


@pytest.mark.parametrize(("name", "message"), FOREIGN)
def test_what_a_dialect_has_no_event_for_is_not_sent(name: str, message: ServerMessage) -> None:
    """Else our own bug becomes a frame that no client of this protocol can read."""
    with pytest.raises(LocalProtocolError, match="no frame for"):
        DIALECTS[name].encode(message)


FOREIGN_REQUESTS: list[tuple[str, ClientMessage]] = [
    ("realtime", Pause()),
    ("duplex-v1", Interrupt()),
    ("duplex-v1", See(jpeg=b"")),
    ("legacy-chat", CloseRequest()),
    ("legacy-chat", Init(instructions="")),
    ("transcription", CloseRequest()),
    ("realtime", Commit()),
]


@pytest.mark.parametrize(("name", "message"), FOREIGN_REQUESTS)
def test_what_a_client_cannot_say_is_its_callers_mistake(name: str, message: ClientMessage) -> None:
    """Else our own client sends what every server refuses."""
    with pytest.raises(LocalProtocolError, match=f"no frame for .* in {name}"):
        DIALECTS[name].encode_request(message)


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
        "legacy-duplex": "legacy-duplex",
        "legacy-chat": "legacy-chat",
        "transcription": "transcription",
        "transcription-responses": "transcription-responses",
        "live": "live",
        "openai": "openai",
        "openai-transcription": "openai-transcription",
        "vllm-omni": "vllm-omni",
    }
    assert OPENING.name == "opening"
