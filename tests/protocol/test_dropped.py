"""What a unit that is dropped leaves behind: no decoding of its frames, a second of silence."""

from __future__ import annotations

import json

import numpy as np
import simplejpeg

from protocol.machine.duplex import Duplex
from protocol.machine.live import Live
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.limits import UNITS_PENDING_MAX
from protocol.values.model import Finalized, Opened, UnitResult
from tests.protocol.test_early import Waiting, said
from tests.sessions.in_memory import append_frame, base64, init_frame

JPEG = base64(bytes(simplejpeg.encode_jpeg(np.zeros((16, 16, 3), np.uint8))))


def active() -> Waiting:
    """A session that takes sound and pictures."""
    client = Waiting("realtime", mode="video")
    client.step(ev.SlotLeased, lease=1, slot=0)
    client.say(init_frame())
    client.step(ev.BackendOpened, lease=1, opened=Opened(prompt_length=40))
    return client


def shown(client: Waiting, units: int) -> list[ef.Effect]:
    """Show two pictures with each of some seconds; returns what is done of the last."""
    frame = append_frame(video_frames=[JPEG, JPEG])
    return [client.step(ev.FrameReceived, frame=frame) for _ in range(units)][-1]  # type: ignore[return-value]


def test_frames_of_a_dropped_unit_are_cancelled() -> None:
    """Pictures that no unit needs would hold up those that came after them, and others'."""
    client = active()
    assert not any(isinstance(it, ef.CancelDecode) for it in shown(client, UNITS_PENDING_MAX))
    done = shown(client, 1)
    kinds = (ef.DropUnit, ef.CancelDecode)
    told = [effect for effect in done if isinstance(effect, kinds)]
    assert told == [
        ef.DropUnit(ordinal=0, input_id=told[0].input_id, force_listen_passed=False),  # type: ignore[union-attr]
        ef.CancelDecode(media=0),
        ef.CancelDecode(media=1),
    ]


def test_only_what_is_not_decoded_yet_is_cancelled() -> None:
    """The decoder would be told of media that it has forgotten."""
    client = active()
    shown(client, UNITS_PENDING_MAX)
    client.step(ev.MediaDecoded, media=1)
    done = shown(client, 1)
    assert [it for it in done if isinstance(it, ef.CancelDecode)] == [ef.CancelDecode(media=0)]
    late = client.step(ev.MediaRejected, media=0, reason="it is damaged")
    assert said(late) == []  # It was on its way; its unit is gone, and the client was told.
    kind = client.session.kind
    assert isinstance(kind, Duplex)
    assert kind.loop.input.undecided_media == set(range(2, 2 * UNITS_PENDING_MAX + 2))


def test_a_dropped_second_is_a_second_of_the_time_line_of_live() -> None:
    """All that was said after it came a second too early, and another unit's answer for its own."""
    client = Waiting("live", models=("m",))
    client.step(ev.SlotLeased, lease=1, slot=0)
    audio = {"format": {"type": "audio/pcm", "rate": 16_000}}
    client.say(json.dumps({"type": "session.start", "session": {"model": "m", "audio": audio}}))
    client.step(ev.BackendOpened, lease=1, opened=Opened(prompt_length=40))
    kind = client.session.kind
    assert isinstance(kind, Live)
    second = {"type": "session.input_audio.append", "audio": base64(bytes(32_000))}
    for _ in range(1 + UNITS_PENDING_MAX):
        assert client.say(json.dumps(second)) == []
    (silence,) = client.say(json.dumps(second))
    assert silence["delta"] == base64(bytes(32_000))
    assert kind.seconds == 1
    for index in range(1 + UNITS_PENDING_MAX):
        client.step(ev.UnitDone, result=UnitResult(index=index, is_listen=True))
        client.step(ev.FinalizeDone, finalized=Finalized(index=index, kv_length=50))
    assert kind.seconds == 2 + UNITS_PENDING_MAX
