"""A client of OpenAI's Realtime API at another address, or of its beta, is refused at once."""

from __future__ import annotations

import json
from typing import Any, Final, get_args

import pytest

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.errors import FieldError
from protocol.values.limits import Mode
from protocol.values.state import State
from protocol.wire.codec import Context, parse_frame
from protocol.wire.dialects import DIALECTS, OPENAI
from runtime.commands.schema import CHANNELS
from runtime.serve.routing import SPOKEN, NotServedError, route
from tests.protocol.test_early import LIMITS

MODES: Final[tuple[Mode, ...]] = get_args(Mode)
UPDATE: Final = json.dumps(
    {
        "type": "session.update",
        "session": {
            "type": "realtime",
            "instructions": "Be brief.",
            "audio": {"input": {"format": {"type": "audio/pcm", "rate": 24000}}},
        },
    }
)


class Client:
    """A session on `/v1/realtime`, and what it says and asks for."""

    def __init__(self, mode: Mode, *, is_served: bool = False) -> None:
        opened = ev.ConnectionOpened(
            recording_id="rec-1", created_ms=1, mode=mode, seed=1, limits=LIMITS, recording="off"
        )
        self.session, effects = Session.open(opened)
        self.effects = list(effects)
        self.now_ns = 0
        if is_served:
            self.step(*((ev.Admitted,) if mode == "chat" else (ev.SlotLeased,)), mode=mode)

    def step(self, kind: type[Any], *, mode: Mode = "video", **fields: Any) -> list[ef.Effect]:
        """Step an event a millisecond later; returns what came of it."""
        if kind is ev.SlotLeased:
            fields |= {"lease": 1, "slot": 0}
        self.now_ns += 1_000_000
        found = list(self.session.step(kind(at_ns=self.now_ns, **fields)))
        self.effects += found
        return found

    def say(self, frame: str) -> list[ef.Effect]:
        """Send a frame; returns what came of it."""
        return self.step(ev.FrameReceived, frame=frame)


def error_of(effects: list[ef.Effect]) -> tuple[str, str]:
    """The code and the text of the one error that is sent."""
    [send] = [effect for effect in effects if isinstance(effect, ef.Send)]
    body = parse_frame(send.frame)
    error = body["error"]
    if isinstance(error, dict):
        return error["code"], error["message"]
    return str(body["code"]), str(error)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_served", [False, True], ids=["queued", "served"])
@pytest.mark.parametrize("update", [UPDATE, UPDATE.replace("{", '{"model": "m", ', 1)])
def test_an_update_of_openai_ends_the_connection(
    mode: Mode, update: str, *, is_served: bool
) -> None:
    """Its 16-bit sound is read as floats, or it waits in a queue for a slot that it cannot use."""
    client = Client(mode, is_served=is_served)
    effects = client.say(update)
    code, text = error_of(effects)
    assert code == "invalid_event"
    for name in ("session.init", "duplex-v1", "mode=transcription"):
        assert name in text
    [close] = [effect for effect in effects if isinstance(effect, ef.Close)]
    assert (close.code, close.reason) == (1000, "invalid_event")
    assert client.session.end_reason == "rejected"
    if mode != "chat":
        given_back = ef.Release if is_served else ef.LeaveQueue
        assert any(isinstance(effect, given_back) for effect in effects)
    assert not any(isinstance(effect, ef.OpenBackend) for effect in client.effects)


@pytest.mark.parametrize("mode", MODES)
def test_a_slot_that_comes_too_late_is_given_back(mode: Mode) -> None:
    """The slot was on its way when the client was refused, and is lost."""
    if mode == "chat":
        return
    client = Client(mode)
    client.say(UPDATE)
    effects = client.step(ev.SlotLeased)
    assert [type(effect) for effect in effects] == [ef.Release]
    client.step(ev.BackendReleased, lease=1)
    assert client.session.is_finished


def test_an_update_for_a_transcription_of_openai_ends_it_too() -> None:
    """It holds the slot for half a minute, and is told that its model is missing."""
    client = Client("transcription", is_served=True)
    model = {"transcription": {"model": "whisper-1"}}
    session = {"type": "transcription", "audio": {"input": model}}
    client.say(json.dumps({"type": "session.update", "session": session}))
    assert client.session.state is State.CLOSED


def test_a_transcription_client_that_says_both_is_taken() -> None:
    """A client of 003 that fills in OpenAI's fields as well no longer gets along with us."""
    client = Client("transcription", is_served=True)
    body = {"type": "session.update", "model": "tiny", "session": {"type": "transcription"}}
    [send] = [it for it in client.say(json.dumps(body)) if isinstance(it, ef.Send)]
    assert "model_not_found" in send.frame  # it was read: there is no model in these limits
    assert client.session.state is State.CONNECTED


@pytest.mark.parametrize("session", [{"instructions": "hi"}, {"type": 7}, {"type": ["realtime"]}])
def test_an_update_of_ours_is_none_of_openai(session: dict[str, Any]) -> None:
    """A client of 000 is turned away."""
    client = Client("audio", is_served=True)
    body = {"type": "session.update", "session": {"instructions": "hi", **session}}
    effects = client.say(json.dumps(body))
    assert any(isinstance(effect, ef.OpenBackend) for effect in effects)


def test_a_session_that_is_under_way_goes_on() -> None:
    """A second update ends a session, and wire errors are to change nothing."""
    client = Client("chat", is_served=True)
    client.say('{"type": "session.init", "payload": {}}')
    code, _ = error_of(client.say(UPDATE))
    assert code == "invalid_event"
    assert client.session.state is State.ACTIVE


# -- the handshake --------------------------------------------------------------------------------

FOREIGN: Final = [
    pytest.param({}, (("openai-beta", "realtime=v1"),), (), id="header"),
    pytest.param({"mode": ("audio",)}, (("openai-beta", "x"),), (), id="header with a mode"),
    pytest.param({}, (), ("realtime", "openai-beta.realtime-v1"), id="beta subprotocol"),
    pytest.param(
        {"model": ("m",)},
        (("openai-beta", "realtime=v1"),),
        ("realtime", "openai-insecure-api-key.sk-1"),
        id="header with a model and a key",
    ),
]


@pytest.mark.parametrize(("query", "headers", "subprotocols"), FOREIGN)
def test_a_handshake_of_openai_is_refused_with_what_is_spoken(
    query: dict[str, tuple[str, ...]], headers: Any, subprotocols: Any
) -> None:
    """Its client takes the silence for a slow network."""
    with pytest.raises(NotServedError) as caught:
        route(
            "/v1/realtime",
            query,
            MODES,
            default="video",
            headers=headers,
            subprotocols=subprotocols,
        )
    refusal = caught.value
    assert (refusal.status, refusal.code) == (400, "dialect_not_served")
    dialects = refusal.details["dialects"]
    assert isinstance(dialects, list)
    assert [each["dialect"] for each in dialects] == list(SPOKEN)
    assert "sk-1" not in str(refusal) + str(refusal.details)


def test_the_list_has_only_what_the_model_serves() -> None:
    """A client is sent from one refusal to the next."""
    headers = [("openai-beta", "realtime=v1")]
    with pytest.raises(NotServedError) as caught:
        route("/v1/realtime", {}, ("audio", "chat"), default="audio", headers=headers)
    dialects = caught.value.details["dialects"]
    assert isinstance(dialects, list)
    modes = {each["dialect"]: each["modes"] for each in dialects}
    assert modes["realtime"] == ["audio", "chat"]
    assert "transcription" not in modes


def test_the_list_is_the_reference_s() -> None:
    """A dialect is served, and the list does not name it."""
    assert SPOKEN.keys() == DIALECTS.keys()
    for name, (address, _) in SPOKEN.items():
        path = address.partition("?")[0]
        assert any(name in it.dialects and it.address == path for it in CHANNELS)


SPOKEN_THERE: Final = [
    pytest.param({"model": ("tiny",)}, (), "tiny", id="model without a mode"),
    pytest.param({}, ("realtime",), "", id="subprotocol"),
    pytest.param({}, ("realtime", "openai-insecure-api-key.sk-1"), "", id="browser"),
]


@pytest.mark.parametrize(("query", "subprotocols", "label"), SPOKEN_THERE)
def test_a_client_of_ga_is_served(query: dict[str, Any], subprotocols: Any, label: str) -> None:
    """The clients that people have fall into another dialect, and fail confusingly."""
    found = route("/v1/realtime", query, MODES, default="video", subprotocols=subprotocols)
    assert (found.endpoint, found.dialect.name) == ("openai", "openai")
    assert (found.mode, found.label) == ("audio", label)


def test_the_package_may_leave_the_model_out() -> None:
    """`client.realtime.connect()` lands in a dialect that waits for another first message."""
    sent = (("x-stainless-lang", "python"),)
    found = route("/v1/realtime", {}, MODES, default="video", headers=sent)
    assert (found.dialect.name, found.label) == ("openai", "")
    found = route("/v1/realtime", {"mode": ("audio",)}, MODES, default="video", headers=sent)
    assert found.endpoint == "realtime"


def test_a_call_is_refused_by_its_name() -> None:
    """`client.realtime.connect(call_id=...)` hangs."""
    with pytest.raises(NotServedError) as caught:
        route("/v1/realtime", {"call_id": ("rtc_1",)}, MODES, default="video")
    assert (caught.value.status, caught.value.code) == (400, "invalid_query")
    assert "model=" in caught.value.message


@pytest.mark.parametrize("query", [{"model": ("m",)}, {"mode": ("transcription",)}])
def test_a_client_of_003_may_name_its_model_in_the_address(
    query: dict[str, tuple[str, ...]],
) -> None:
    """An unmodified client of the server of 003 is taken for one of OpenAI."""
    found = route("/v1/realtime", query | {"model": ("m",)}, MODES, default="transcription")
    assert found.mode == "transcription"


def test_a_mode_in_the_address_is_enough() -> None:
    """A proxy adds `model` to each address, and a client of ours is turned away."""
    query = {"mode": ("audio",), "model": ("m",)}
    assert route("/v1/realtime", query, MODES, default="video").mode == "audio"


def test_a_transcription_at_the_wrong_address_is_told_the_right_one() -> None:
    """A client of the API thinks that nothing here transcribes."""
    body = {"type": "session.update", "session": {"type": "transcription"}}
    context = Context(mode="audio")
    with pytest.raises(FieldError) as raised:
        OPENAI.parse(OPENAI.classify(body), body, context)
    expected = "$.session.type: transcription is for ?intent=transcription"
    assert raised.value.message == expected
