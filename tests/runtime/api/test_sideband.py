"""What an attached client gets of a session: events of the API's own types, in order."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import pytest
from openai.types.live.connect_server_event import ConnectServerEvent
from pydantic import TypeAdapter

from protocol.values.errors import FrameError
from protocol.wire.audio import compress
from protocol.wire.dialects.live import UNSUPPORTED
from recorder.format.format import Record
from recorder.read.scan import Damage
from runtime.api.tail import Sideband, refused
from tests.transcripts.reading import example, load_all

TYPES: Final[TypeAdapter[Any]] = TypeAdapter(ConnectServerEvent)
ASKED: Final = ("session.start", "session.input_audio.append", "session.input_audio.mute")
ASKED_TOO: Final = ("session.input_audio.unmute", "session.update", "session.close")


def told(sideband: Sideband, items: Iterable[Record | Damage]) -> list[Any]:
    """The events of a log, each checked."""
    events = [TYPES.validate_json(it, strict=True) for one in items for it in sideband.frames(one)]
    assert not any(event.model_extra for event in events)
    return events


def started(rate: int = 24_000, coding: str = "audio/pcm") -> dict[str, Any]:
    """The beginning of a session."""
    session = {
        **{"id": "sess_000000000000", "expires_at": 1, "model": "tiny", "status": "active"},
        **{"audio": {"format": {"type": coding, "rate": rate}}, "store": True},
    }
    return {"type": "session.started", "event_id": "event_1", "session": session}


def sound(pcm16: bytes, kind: str = "session.output_audio.delta", **more: Any) -> dict[str, Any]:
    """A message with sound."""
    name = "audio" if kind.endswith("append") else "delta"
    return {"type": kind, name: base64.b64encode(pcm16).decode(), **more}


def log(*messages: dict[str, Any] | str) -> list[Record]:
    """A log of messages; those of the client are appends and `session.close`."""
    asked = ("append", "session.close")
    return [
        Record(kind="fin", seq=seq, at_ns=seq, fields={"reason": "client"})
        if it == "fin"
        else Record(
            kind="rx" if it["type"].endswith(asked) else "tx",  # type: ignore[index]
            seq=seq,
            at_ns=seq,
            fields={"frame": json.dumps(it, separators=(",", ":"))},
        )
        for seq, it in enumerate(messages)
    ]


def samples(text: str) -> np.ndarray:
    """The samples of an event's sound."""
    return np.frombuffer(base64.b64decode(text), "<i2")


@pytest.mark.parametrize(
    ("rate", "coding"), [(24_000, "audio/pcm"), (16_000, "audio/pcm"), (8_000, "audio/pcmu")]
)
def test_both_voices_are_sound_of_one_rate(rate: int, coding: Any) -> None:
    """An attached client, which does not choose the format, could not play what it gets."""
    wave = (np.sin(np.arange(rate) * 2 * np.pi * 440 / rate) * 9_000).astype("<i2")
    data = compress(wave.tobytes(), coding)
    piece = sound(data[: len(data) // 2], "session.input_audio.append")
    events = told(Sideband(0), log(started(rate, coding), piece, piece, sound(data), sound(data)))
    assert [it.type for it in events] == ["session.started", *[piece["type"]] * 2] + [
        "session.output_audio.delta"
    ] * 2
    assert sum(len(samples(it.audio)) for it in events[1:3]) == 24_000
    assert [(it.start_ms, it.end_ms) for it in events[3:]] == [(0, 1000), (1000, 2000)]
    for event in events[3:]:
        found = samples(event.delta)
        assert len(found) == 24_000
        assert abs(int(np.abs(found).max()) - 9_000) < 400
    if rate == 24_000:
        assert base64.b64decode(events[3].delta) == data


def test_what_is_past_is_counted_and_not_told() -> None:
    """A client that attaches late would get all of it, or a wrong place for what it hears."""
    second = sound(bytes(48_000))
    past = [started(), sound(bytes(960), "session.input_audio.append"), second, second]
    events = told(Sideband(4), log(*past, second, "fin"))
    assert [it.type for it in events] == [
        *("session.started", "session.output_audio.delta", "session.closed")
    ]
    assert (events[1].start_ms, events[1].end_ms) == (2000, 3000)


def test_a_session_that_lost_its_client_is_closed() -> None:
    """An attached client would not know how the session ended."""
    sideband = Sideband(0)
    (_, closed) = told(sideband, log(started(), "fin"))
    assert (closed.type, closed.reason, closed.usage.seconds) == (
        *("session.closed", "connection_lost"),
        0,
    )
    assert sideband.is_over


def test_nothing_follows_the_end() -> None:
    """A client would be told twice that the session is over."""
    session = started()["session"]
    closed = {"type": "session.closed", "event_id": "event_2", "reason": "close_requested"}
    closed |= {"session": session, "usage": {"seconds": 0}}
    events = told(Sideband(9), log(started(), {"type": "session.close"}, closed, "fin"))
    assert [it.type for it in events] == ["session.started", "session.closed"]
    assert events[1].reason == "close_requested"
    assert told(Sideband(0), log("fin")) == []


def test_numbers_of_a_connection_are_left_out() -> None:
    """The numbers with which a session is resumed are for its own client."""
    resumable = {"type": "session.resumable", "token": "", "seq": 1, "ack": 0}
    events = told(Sideband(0), log(started() | {"seq": 0, "ack": 1}, resumable))
    assert [it.type for it in events] == ["session.started"]


def test_sound_that_the_session_does_not_take_is_left_out() -> None:
    """A client could break those that listen to it."""
    odd, kind = bytes(3), "session.input_audio.append"
    wrong = [sound(odd, kind), {"type": kind, "audio": "%"}, {"type": kind}, sound(b"", kind)]
    early = sound(bytes(960), kind)
    damage = Damage(offset=0, length=1, reason="record", detail="", first_seq=None, records=0)
    records = [*log(early, started(), *wrong), damage]
    records.append(Record(kind="rx", seq=99, at_ns=0, fields={"frame": b"\0"}))
    records.append(Record(kind="rx", seq=99, at_ns=0, fields={"frame": "no json"}))
    assert [it.type for it in told(Sideband(0), records)] == ["session.started"]


def test_all_that_a_server_says_is_of_the_types() -> None:
    """An event of the session would be none of those that an attached client knows."""
    found = 0
    for transcript in load_all():
        if transcript.dialect != "live":
            continue
        said = [example(it) for it in transcript.bodies("receive")]
        at = next((n for n, it in enumerate(said) if it["type"] == "session.started"), None)
        if at is not None:
            found += len(told(Sideband(0), log(*said[at:])))
    assert found > 20


@pytest.mark.parametrize("kind", [*ASKED, *ASKED_TOO, *sorted(UNSUPPORTED)])
def test_what_would_change_the_session_is_refused_by_its_name(kind: str) -> None:
    """A client would wait for what it asked for, or have changed the session."""
    event = TYPES.validate_json(refused(json.dumps({"type": kind, "event_id": "e"})), strict=True)
    assert (event.type, event.error.code) == ("error", "unsupported")
    assert (event.error.type, event.error.client_event_id) == ("invalid_request_error", "e")
    assert kind in event.error.message


@pytest.mark.parametrize(
    ("frame", "code"),
    [('{"type":"x"}', "unknown_event"), ("{}", "missing_field"), ('{"type":1}', "invalid_payload")],
)
def test_what_names_no_event_is_told(frame: str, code: str) -> None:
    """A client with a typing error would not find it."""
    event = TYPES.validate_json(refused(frame), strict=True)
    assert event.error.code == code
    assert event.error.client_event_id is None


@pytest.mark.parametrize("frame", [None, b"x", "x", "[]"])
def test_what_cannot_be_read_ends_the_connection(frame: Any) -> None:
    """A client that speaks something else would be answered for ever."""
    with pytest.raises(FrameError):
        refused(frame)
