"""The sans-IO client: it follows the server's state, and sends nothing that would be refused."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from protocol.client import ClientConnection, split_pcm
from protocol.codec import parse_frame
from protocol.dialects import DIALECTS
from protocol.errors import ErrorCode, FrameError, LocalProtocolError, RemoteProtocolError
from protocol.limits import APPEND_SAMPLES_MAX, APPEND_SAMPLES_MIN
from protocol.messages import (
    Append,
    Closed,
    Created,
    ErrorReport,
    Init,
    Listen,
    Metrics,
    QueueDone,
    ServerMessage,
)
from protocol.model import DuplexConfig
from protocol.state import TRANSITIONS, Gate, State

from .strategies import jpeg_header, noise, server_messages

CREATED = Created(session_id="sess_1", prompt_length=9, recording="on")
LISTEN = Listen(session_id="sess_1", input_id="input_1", metrics=Metrics(kv_cache_length=9))
APPEND = Append(pcm=noise(4000))
INIT = Init(instructions="be brief")
NAMES = sorted(DIALECTS)


def hear(client: ClientConnection, name: str, *messages: ServerMessage) -> list[ServerMessage]:
    """Let the client receive what a server sends."""
    frames = [frame for message in messages for frame in DIALECTS[name].encode(message)]
    return [heard for frame in frames for heard in client.receive(frame)]


def active(name: str = "realtime", mode: Any = "video") -> ClientConnection:
    """A client whose session is configured."""
    client = ClientConnection(name, mode)
    hear(client, name, QueueDone())
    client.init(INIT)
    hear(client, name, CREATED)
    return client


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_session(name: str) -> None:
    """Else the command line, the bench and the SDK cannot hold a conversation."""
    client = ClientConnection(name, "video")
    assert client.state is State.QUEUED
    hear(client, name, QueueDone())
    assert client.state is State.CONNECTED
    assert parse_frame(client.init(INIT))["type"] in {"session.init", "session.update"}
    assert hear(client, name, CREATED) == [CREATED]
    assert client.state is State.ACTIVE
    assert "audio" in client.append(APPEND)
    assert len(hear(client, name, LISTEN)) == 1
    client.close("user_stop")
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
    client.init(INIT)
    return client


def closing() -> ClientConnection:
    """A client that has said goodbye."""
    client = active()
    client.close()
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
    send = {
        "init": lambda: client.init(INIT),
        "append": lambda: client.append(APPEND),
        "close": client.close,
    }[verb]
    if verb in ALLOWED[stage]:
        assert send()
    else:
        with pytest.raises(LocalProtocolError, match=f"{verb} in state"):
            send()


def test_a_refused_init_may_be_mended() -> None:
    """Else one bad setting costs the client its place."""
    client = opening()
    report = ErrorReport(code=ErrorCode.INVALID_PAYLOAD, message="$.payload.config.top_k: 0")
    assert hear(client, "realtime", report) == [report]
    assert client.gate is Gate.CONNECTED
    assert client.init(INIT)


def test_an_error_of_the_server_leaves_an_init_under_way() -> None:
    """Else the client sends a second init and is told that it is out of place."""
    client = opening()
    hear(client, "realtime", ErrorReport(code=ErrorCode.INFERENCE_ERROR, message="lost"))
    with pytest.raises(LocalProtocolError):
        client.init(INIT)


def test_nothing_can_be_sent_after_close_even_when_the_server_goes_on() -> None:
    """Else a client that is leaving goes on sending audio (001, session.close)."""
    client = connected()
    client.init(INIT)
    client.close()
    hear(client, "realtime", CREATED, LISTEN)
    with pytest.raises(LocalProtocolError):
        client.append(APPEND)


def test_frames_are_not_sent_in_audio_mode() -> None:
    """Else a client pays for video that nobody looks at."""
    client = active(mode="audio")
    with pytest.raises(LocalProtocolError, match="1 video frames in mode=audio"):
        client.append(Append(pcm=noise(4000), frames=(jpeg_header(64, 48),)))
    assert client.append(APPEND)


def test_a_setting_that_cannot_be_sent_leaves_the_client_as_it_was() -> None:
    """Else a client waits for an answer to what it never sent."""
    client = ClientConnection("duplex-v1", "video")
    hear(client, "duplex-v1", QueueDone())
    with pytest.raises(LocalProtocolError):
        client.init(Init(instructions="", config=DuplexConfig(top_k=1)))
    assert client.init(INIT)


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


class ClientAgainstTable(RuleBasedStateMachine):
    """Any server, any caller: the client is where the table says, and raises only its errors."""

    def __init__(self) -> None:
        super().__init__()
        self.client = ClientConnection("realtime", "video")
        self.state = State.QUEUED

    @rule(message=server_messages)
    def receive(self, message: ServerMessage) -> None:
        row = TRANSITIONS[self.state]
        with contextlib.suppress(RemoteProtocolError):
            hear(self.client, "realtime", message)
        self.state = row.get(type(message), self.state)

    @rule(message=st.sampled_from([INIT, APPEND, None]))
    def send(self, message: Init | Append | None) -> None:
        with contextlib.suppress(LocalProtocolError):
            if isinstance(message, Init):
                self.client.init(message)
            elif message is None:
                self.client.close()
            else:
                self.client.append(message)

    @rule(text=st.text(max_size=10))
    def noise(self, text: str) -> None:
        with contextlib.suppress(FrameError, RemoteProtocolError):
            self.client.receive(text)

    @invariant()
    def agree(self) -> None:
        assert self.client.state is self.state


TestClientAgainstTable = ClientAgainstTable.TestCase


# -- cutting audio ------------------------------------------------------------------------------


@given(st.integers(4000, 200_000), st.sampled_from([4000, 16_000, 23_456, 156_000]))
def test_pieces_are_joined_to_what_was_cut(samples: int, chunk_samples: int) -> None:
    """Else words are lost at the seams, or an append is refused for its length."""
    pcm = bytes(4 * samples)
    pieces = split_pcm(pcm, chunk_samples)
    lengths = [len(piece) // 4 for piece in pieces]
    assert b"".join(pieces) == pcm
    assert all(APPEND_SAMPLES_MIN <= length <= APPEND_SAMPLES_MAX for length in lengths)
    assert all(length == chunk_samples for length in lengths[:-1])
    assert lengths[-1] < chunk_samples + APPEND_SAMPLES_MIN


@pytest.mark.parametrize(
    ("pcm", "chunk_samples"),
    [(bytes(15_996), 16_000), (bytes(64_001), 16_000), (bytes(64_000), 3999), (b"", 160_000)],
)
def test_audio_that_cannot_be_cut_is_the_callers_mistake(pcm: bytes, chunk_samples: int) -> None:
    """Else a caller's short or odd audio is padded or lost without a word."""
    with pytest.raises(LocalProtocolError):
        split_pcm(pcm, chunk_samples)
