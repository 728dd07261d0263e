"""The sans-IO client: it follows the server's state, and sends nothing that would be refused."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from protocol.machine.client import ClientConnection
from protocol.values.errors import ErrorCode, FrameError, LocalProtocolError, RemoteProtocolError
from protocol.values.limits import FRAME_BYTES_MAX, Mode
from protocol.values.messages import (
    Closed,
    Created,
    Delta,
    ErrorReport,
    Interrupted,
    Listen,
    Metrics,
    Paused,
    Prefilled,
    Queued,
    QueueDone,
    QueuePlace,
    Response,
    Resumed,
    ServerMessage,
)
from protocol.values.model import DuplexConfig
from protocol.values.requests import (
    Append,
    Ask,
    ChatMessage,
    ClientMessage,
    CloseRequest,
    Init,
    Interrupt,
    Pause,
    Report,
    Resume,
    See,
    TextPart,
)
from protocol.values.state import BEGINNINGS, TRANSITIONS, Gate, State, session_kind_of
from protocol.wire.codec import parse_frame
from protocol.wire.dialects import DIALECTS
from tests.strategies.messages import jpeg_header, noise, server_messages

CREATED = Created(session_id="sess_1", prompt_length=9, recording="on")
LISTEN = Listen(session_id="sess_1", input_id="input_1", metrics=Metrics(kv_cache_length=9))
APPEND = Append(pcm=noise(4000))
INIT = Init(instructions="be brief")
NAMES = ("realtime", "duplex-v1", "legacy-duplex")
"""The dialects of duplex sessions."""
HELLO = Ask(messages=(ChatMessage(role="user", content=(TextPart(text="Hello!"),)),))
PLACE = QueuePlace(position=1, estimated_wait_s=2, ticket_id="ticket_1", queue_length=1)
DELTA = Delta(session_id="s", response_id="r", input_id="i", text="Hi")
RESPONSE = Response(
    session_id="s",
    response_id="r",
    input_id="i",
    text="Hi",
    pcm=b"",
    reason="turn_end",
    streaming=True,
    input_tokens=9,
    generated_tokens=1,
    recording_id="",
    metrics=Metrics(kv_cache_length=0, recording="off"),
)
FAILED = ErrorReport(code=ErrorCode.INFERENCE_ERROR, message="turn 0 failed")
REFUSED = ErrorReport(code=ErrorCode.INVALID_PAYLOAD, message="$.input.messages: 0 items")


def hear(client: ClientConnection, name: str, *messages: ServerMessage) -> list[ServerMessage]:
    """Let the client receive what a server sends."""
    frames = [frame for message in messages for frame in DIALECTS[name].encode(message)]
    return [heard for frame in frames for heard in client.receive(frame)]


def active(name: str = "realtime", mode: Any = "video") -> ClientConnection:
    """A client whose session is configured."""
    client = ClientConnection(name, mode)
    hear(client, name, QueueDone())
    client.send(INIT)
    hear(client, name, CREATED)
    return client


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_session(name: str) -> None:
    """Else the command line, the bench and the SDK cannot hold a conversation."""
    client = ClientConnection(name, "video")
    assert client.state is State.QUEUED
    hear(client, name, QueueDone())
    assert client.state is State.CONNECTED
    assert parse_frame(client.send(INIT))["type"] in {"session.init", "session.update", "prepare"}
    assert [type(message) for message in hear(client, name, CREATED)] == [Created]
    assert client.state is State.ACTIVE
    assert "audio" in client.send(APPEND)
    assert len(hear(client, name, LISTEN)) == 1
    assert client.send(CloseRequest(reason="user_stop"))
    hear(client, name, Closed(session_id="sess_1", reason="client", client_reason="user_stop"))
    assert client.state is State.CLOSED
    assert client.connection_closed(1000, "stopped")
    assert client.closed_with == (1000, "stopped")


def queued() -> ClientConnection:
    """A client that waits."""
    return ClientConnection("realtime", "video")


def connected() -> ClientConnection:
    """A client whose turn has come."""
    client = queued()
    hear(client, "realtime", QueueDone())
    return client


def opening() -> ClientConnection:
    """A client whose init is on the way."""
    client = connected()
    client.send(INIT)
    return client


def closing() -> ClientConnection:
    """A client that has said goodbye."""
    client = active()
    client.send(CloseRequest())
    return client


def lost() -> ClientConnection:
    """A client whose connection is gone."""
    client = active()
    client.connection_closed(1006, "")
    return client


MAKERS: dict[str, Any] = {maker.__name__: maker for maker in (queued, connected, opening, closing)}
MAKERS |= {"active": active, "lost": lost}
ALLOWED = {
    "queued": {"close"},
    "connected": {"init", "close"},
    "opening": {"close"},
    "active": {"append", "close"},
    "closing": set(),
    "lost": set(),
}


@pytest.mark.parametrize("stage", MAKERS)
@pytest.mark.parametrize("verb", ["init", "append", "close"])
def test_what_the_server_would_refuse_is_not_sent(stage: str, verb: str) -> None:
    """Else a client's own bug costs a round trip and an error event."""
    client = MAKERS[stage]()
    message = {"init": INIT, "append": APPEND, "close": CloseRequest()}[verb]
    if verb in ALLOWED[stage]:
        assert client.send(message)
    else:
        with pytest.raises(LocalProtocolError, match=f"{verb} in state"):
            client.send(message)


def test_a_refused_init_may_be_mended() -> None:
    """Else one bad setting costs the client its place."""
    client = opening()
    report = ErrorReport(code=ErrorCode.INVALID_PAYLOAD, message="$.payload.config.top_k: 0")
    assert hear(client, "realtime", report) == [report]
    assert client.gate is Gate.CONNECTED
    assert client.send(INIT)


def test_an_error_of_the_server_leaves_an_init_under_way() -> None:
    """Else the client sends a second init and is told that it is out of place."""
    client = opening()
    hear(client, "realtime", ErrorReport(code=ErrorCode.INFERENCE_ERROR, message="lost"))
    with pytest.raises(LocalProtocolError):
        client.send(INIT)


def test_nothing_can_be_sent_after_close_even_when_the_server_goes_on() -> None:
    """Else a client that is leaving goes on sending audio (001, session.close)."""
    client = connected()
    client.send(INIT)
    client.send(CloseRequest())
    hear(client, "realtime", CREATED, LISTEN)
    with pytest.raises(LocalProtocolError):
        client.send(APPEND)


def test_frames_are_not_sent_in_audio_mode() -> None:
    """Else a client pays for video that nobody looks at."""
    client = active(mode="audio")
    with pytest.raises(LocalProtocolError, match="1 video frames in mode=audio"):
        client.send(Append(pcm=noise(4000), frames=(jpeg_header(64, 48),)))
    assert client.send(APPEND)


def test_a_setting_that_cannot_be_sent_leaves_the_client_as_it_was() -> None:
    """Else a client waits for an answer to what it never sent."""
    client = ClientConnection("duplex-v1", "video")
    hear(client, "duplex-v1", QueueDone())
    with pytest.raises(LocalProtocolError):
        client.send(Init(instructions="", config=DuplexConfig(deferred_finalize=False)))
    assert client.send(INIT)


@pytest.mark.parametrize("frame", ["", "[]", b"{}", "{}", '{"type":"nothing"}'])
def test_a_strange_frame_is_the_servers_fault(frame: str | bytes) -> None:
    """Else a client dies of an internal error when its server is broken."""
    with pytest.raises(RemoteProtocolError):
        queued().receive(frame)


@pytest.mark.parametrize(("stage", "message"), [("queued", CREATED), ("lost", LISTEN)])
def test_an_answer_out_of_place_is_the_servers_fault(stage: str, message: ServerMessage) -> None:
    """Else a client believes to be in a session that it is not in."""
    client = MAKERS[stage]()
    before = client.state
    with pytest.raises(RemoteProtocolError, match="no transition"):
        hear(client, "realtime", message)
    assert client.state is before


@pytest.mark.parametrize(
    ("stage", "code", "ordered"),
    [
        ("active", 1000, False),
        ("lost", 1000, True),
        ("queued", 1000, True),
        ("queued", 1013, False),
    ],
)
def test_a_lost_connection_is_told_from_an_end(stage: str, code: int, ordered: bool) -> None:
    """Else a client reconnects after a goodbye, or not after a loss."""
    client = MAKERS[stage]()
    assert client.connection_closed(code, "") is ordered
    assert client.state is State.CLOSED


def test_an_unknown_dialect_is_the_callers_mistake() -> None:
    """Else a misspelt option fails in the middle of a session."""
    with pytest.raises(LocalProtocolError, match="there are realtime, duplex-v1"):
        ClientConnection("opening", "video")


# -- chat ---------------------------------------------------------------------------------------


def chatting() -> ClientConnection:
    """A client of mode=chat between two turns."""
    client = ClientConnection("realtime", "chat")
    hear(client, "realtime", QueueDone())
    assert parse_frame(client.send(Init(instructions="")))["payload"] == {}
    hear(client, "realtime", Created(session_id="s", prompt_length=0, recording="on", is_chat=True))
    return client


def test_a_chat_goes_turn_by_turn() -> None:
    """Else a chat ends with its first answer, or two questions are asked at once."""
    client = chatting()
    for _ in range(2):
        assert client.send(HELLO)
        assert client.gate is Gate.TURN
        with pytest.raises(LocalProtocolError, match="append in state ACTIVE during a turn"):
            client.send(HELLO)
        heard = hear(client, "realtime", Queued(place=PLACE), DELTA, RESPONSE)
        assert heard == [Queued(place=PLACE), DELTA, RESPONSE]
        assert client.gate is Gate.ACTIVE
    assert client.send(CloseRequest())


@pytest.mark.parametrize("report", [FAILED, REFUSED])
def test_a_turn_that_fails_leaves_the_chat(report: ErrorReport) -> None:
    """Else one bad picture ends a conversation."""
    client = chatting()
    client.send(HELLO)
    assert hear(client, "realtime", report) == [report]
    assert client.send(HELLO)


def test_a_chat_may_be_left_in_the_middle_of_an_answer() -> None:
    """Else a user who has heard enough must wait for the end."""
    client = chatting()
    client.send(HELLO)
    assert client.send(CloseRequest(reason="enough"))
    hear(client, "realtime", DELTA, RESPONSE)
    assert client.gate is Gate.CLOSED
    with pytest.raises(LocalProtocolError):
        client.send(HELLO)
    hear(client, "realtime", Closed(session_id="s", reason="client", client_reason="enough"))
    assert client.connection_closed(1000, "stopped")


def test_a_session_that_ends_in_a_turn_can_be_told_nothing_more() -> None:
    """Else a client asks into a connection that is about to close."""
    client = chatting()
    client.send(HELLO)
    hear(client, "realtime", Closed(session_id="s", reason="server_shutdown"))
    assert client.gate is Gate.CLOSED


def test_audio_and_turns_are_not_mixed() -> None:
    """Else a caller's mistake is told by the server, in words about a field."""
    with pytest.raises(LocalProtocolError, match="no frame for Append in mode=chat"):
        chatting().send(APPEND)
    with pytest.raises(LocalProtocolError, match="no frame for Ask in mode=video"):
        active().send(HELLO)


def test_a_long_answer_is_received() -> None:
    """Else minutes of speech in one frame look like a broken server."""
    client = chatting()
    client.send(HELLO)
    frame = '{"type":"response.done","session_id":"s","response_id":"r","text":"x"}'
    frame += " " * FRAME_BYTES_MAX
    assert len(client.receive(frame)) == 1


# -- one request (004) --------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [True, False])
def test_a_single_request_is_asked_at_once_and_answered(waits: bool) -> None:
    """Else a client of 004 waits for a word that is never said."""
    client = ClientConnection("legacy-chat", "chat")
    assert client.state is State.CONNECTED
    assert client.send(HELLO)
    if waits:
        hear(client, "legacy-chat", Queued(place=PLACE))
        assert client.state is State.QUEUED
        hear(client, "legacy-chat", QueueDone())
    hear(client, "legacy-chat", Prefilled(input_tokens=9), DELTA)
    assert client.gate is Gate.TURN
    (done,) = hear(client, "legacy-chat", RESPONSE)
    assert isinstance(done, Response)
    assert client.gate is Gate.CLOSED
    with pytest.raises(LocalProtocolError):
        client.send(HELLO)
    assert client.connection_closed(1000, "answered")


def test_a_single_request_that_breaks_off_is_not_in_order() -> None:
    """Else a client takes half of an answer for all of it."""
    client = ClientConnection("legacy-chat", "chat")
    client.send(HELLO)
    hear(client, "legacy-chat", Prefilled(input_tokens=9), DELTA)
    assert not client.connection_closed(1000, "")


@pytest.mark.parametrize(("code", "ordered"), [(1000, True), (1011, False)])
def test_a_single_request_ends_with_its_first_error(code: int, ordered: bool) -> None:
    """Else a client asks again on a connection that is about to close."""
    client = ClientConnection("legacy-chat", "chat")
    client.send(HELLO)
    hear(client, "legacy-chat", REFUSED)
    with pytest.raises(LocalProtocolError):
        client.send(HELLO)
    assert client.connection_closed(code, "") is ordered


# -- pauses (002) -------------------------------------------------------------------------------


def test_a_pause_holds_from_word_to_word() -> None:
    """Else a client sends audio that is refused, or waits when it may speak."""
    client = active("legacy-duplex")
    assert parse_frame(client.send(Pause(timeout_s=5))) == {"type": "pause", "timeout": 5}
    hear(client, "legacy-duplex", Paused(timeout_s=5.0))
    assert client.gate is Gate.PAUSED
    for message in (APPEND, See(jpeg=b"")):
        with pytest.raises(LocalProtocolError, match="in state PAUSED"):
            client.send(message)
    assert client.send(Report())
    assert client.send(Interrupt())
    hear(client, "legacy-duplex", Interrupted())
    assert client.gate is Gate.PAUSED
    assert client.send(Resume())
    hear(client, "legacy-duplex", Resumed())
    assert client.send(APPEND)
    assert client.send(See(jpeg=jpeg_header(64, 48)))
    assert client.send(Interrupt())


def test_an_error_does_not_end_a_pause() -> None:
    """Else a client sends audio into a pause."""
    client = active("legacy-duplex")
    hear(client, "legacy-duplex", Paused(timeout_s=5.0), REFUSED)
    assert client.gate is Gate.PAUSED
    hear(client, "legacy-duplex", Closed(session_id="s", reason="pause_timeout"))
    assert client.gate is Gate.CLOSED
    assert client.connection_closed(1000, "pause_timeout")


def test_a_pause_after_goodbye_reopens_nothing() -> None:
    """Else a client that is leaving goes on sending."""
    client = active("legacy-duplex")
    client.send(CloseRequest())
    for message in (Paused(timeout_s=5.0), Resumed()):
        hear(client, "legacy-duplex", message)
        assert client.gate is Gate.CLOSED


def test_an_end_that_is_told_twice_is_heard_once() -> None:
    """Else a client believes that it stopped a session whose server went down (002)."""
    client = active("legacy-duplex")
    heard = hear(client, "legacy-duplex", Closed(session_id="s", reason="server_shutdown"))
    assert heard == [Closed(session_id="", reason="server_shutdown")]
    assert client.state is State.CLOSED
    assert client.connection_closed(1012, "server_shutdown")


def test_a_second_end_is_the_servers_fault_elsewhere() -> None:
    """Else the exception for 002 hides a broken server of another protocol."""
    client = active()
    end = Closed(session_id="s", reason="timeout")
    hear(client, "realtime", end)
    with pytest.raises(RemoteProtocolError, match="no transition"):
        hear(client, "realtime", end)


@pytest.mark.parametrize("message", [Pause(), Interrupt(), Report()])
def test_what_a_dialect_has_no_event_for_is_the_callers_mistake(message: ClientMessage) -> None:
    """Else a caller believes that a session is paused that goes on."""
    with pytest.raises(LocalProtocolError, match="no frame for"):
        active("realtime").send(message)


def test_a_frame_alone_is_not_sent_in_audio_mode() -> None:
    """Else a client pays for video that nobody looks at."""
    with pytest.raises(LocalProtocolError, match="1 video frames in mode=audio"):
        active("legacy-duplex", "audio").send(See(jpeg=jpeg_header(64, 48)))


@pytest.mark.parametrize(
    ("name", "mode"), [("duplex-v1", "chat"), ("legacy-duplex", "chat"), ("legacy-chat", "video")]
)
def test_a_mode_that_a_dialect_has_not_is_the_callers_mistake(name: str, mode: Any) -> None:
    """Else a client speaks a language in which its wish has no words."""
    with pytest.raises(LocalProtocolError, match=f"no mode={mode} in {name}"):
        ClientConnection(name, mode)


# -- against the table --------------------------------------------------------------------------


class ClientAgainstTable(RuleBasedStateMachine):
    """Any server, any caller: the client is where the table says, and raises only its errors."""

    name = "realtime"
    mode: Mode = "video"

    def __init__(self) -> None:
        super().__init__()
        self.client = ClientConnection(self.name, self.mode)
        self.session_kind = session_kind_of(self.mode, is_request=self.name == "legacy-chat")
        self.state = BEGINNINGS[self.session_kind]

    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        message: ServerMessage = data.draw(server_messages(self.name, self.mode))
        row = TRANSITIONS[self.session_kind][self.state]
        with contextlib.suppress(RemoteProtocolError):
            hear(self.client, self.name, message)
        self.state = row.get(type(message), self.state)

    @rule(message=st.sampled_from([INIT, APPEND, HELLO, See(jpeg=b""), CloseRequest()]))
    def send(self, message: ClientMessage) -> None:
        with contextlib.suppress(LocalProtocolError):
            self.client.send(message)

    @rule(message=st.sampled_from([Pause(), Resume(), Interrupt(), Report()]))
    def send_of_002(self, message: ClientMessage) -> None:
        with contextlib.suppress(LocalProtocolError):
            self.client.send(message)

    @rule(text=st.text(max_size=10))
    def noise(self, text: str) -> None:
        with contextlib.suppress(FrameError, RemoteProtocolError):
            self.client.receive(text)

    @invariant()
    def agree(self) -> None:
        assert self.client.state is self.state
        gates = {Gate(self.state.value), Gate.CLOSED}
        extra = {
            State.CONNECTED: {Gate.OPENING, Gate.TURN},
            State.ACTIVE: {Gate.PAUSED, Gate.TURN},
            State.QUEUED: {Gate.TURN},
        }
        assert self.client.gate in gates | extra.get(self.state, set())


class RealtimeChat(ClientAgainstTable):
    """A chat of 001."""

    mode: Mode = "chat"


class LegacyDuplex(ClientAgainstTable):
    """A session of 002."""

    name = "legacy-duplex"


class LegacyChat(ClientAgainstTable):
    """A request of 004."""

    name = "legacy-chat"
    mode: Mode = "chat"


TestRealtime = ClientAgainstTable.TestCase
TestRealtimeChat = RealtimeChat.TestCase
TestLegacyDuplex = LegacyDuplex.TestCase
TestLegacyChat = LegacyChat.TestCase
