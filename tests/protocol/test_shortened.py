"""A large frame that is refused is recorded without most of it, and answered in the same words.

That holds for whatever reason it is refused: no JSON, no place now, wrong fields, or no room.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.machine.reception import SHORTENED_BYTES_MIN
from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.effects import Effect
from protocol.values.frames import KEPT_CHARS, Frame, Shortened, Utf8Text
from protocol.values.limits import CHAT_FRAME_BYTES_MAX, FRAME_BYTES_MAX, FRAMES_MAX, Mode
from protocol.values.model import Opened
from protocol.wire.dialects.shared import KNOWN_TYPES
from recorder.format.format import size_bytes
from recorder.format.mapping import event_of, event_record
from recorder.read.reader import read
from recorder.storage.store import Store
from replay.redact.content import Policy, Tally
from replay.redact.frames import FrameEditor
from replay.redact.redaction import EventEditor
from replay.rerun.logic import replay
from runtime.model.backends.scripted import ScriptedBackend
from tests.fuzz.case import fill
from tests.fuzz.drawing import all_messages, bodies, broken
from tests.sessions.in_memory import append_sound, base64, close_frame, init_frame, pcm, world
from tests.strategies.messages import jpeg_header

LIMITS: Final = ev.SessionLimits(
    session_s=60,
    init_wait_s=30,
    cleanup_wait_s=10,
    context_tokens=8192,
    models=("m",),
    sound_bytes=64_000,
)
SOUND: Final = append_sound(bytes(60_000))
RECORDED_BYTES_MAX: Final = 3 * KEPT_CHARS
PADDING: Final = "x" * 10_000
TYPES: Final = sorted(
    KNOWN_TYPES
    | {"prepare", "audio_chunk", "video_frame", "pause", "resume", "stop", "interrupt"}
    | {"client_diagnostic", "input_audio_buffer.commit", "session.create", "no such type"}
)
BODIES: Final[tuple[dict[str, Any], ...]] = (
    *({"type": kind, "padding": PADDING} for kind in TYPES),
    {"type": "session.update", "session": {"instructions": PADDING}},
    {"type": "session.update", "model": "m", "padding": PADDING},
    {"type": "session.update", "model": None, "session": None, "padding": PADDING},
    {"padding": PADDING, "type": "input.append"},
    {"type": PADDING},
    {"type": 7, "padding": PADDING},
    {PADDING: 1},
    {"messages": [{"role": "user", "content": PADDING}]},
    {str(number): [number] for number in range(2_000)},
    {"type": "input.append", "input": {"audio": PADDING + "?"}},
    {"type": "input.append", "input": PADDING},
    {"type": "input.append", "input": {"audio": base64(pcm())[:-8] + "AADAfw=="}},
    {"type": "input.append", "input": {"messages": [{"role": "user", "content": [PADDING]}]}},
    {"type": "input_audio_buffer.append", "audio": PADDING + "?"},
    {"type": "input_audio_buffer.append", "audio": base64(bytes(9_999)), "unknown": 1},
    {"type": "input_audio_buffer.append", "audio": base64(bytes(10_000)), "unknown": 1},
    {"type": "audio_chunk", "audio": 7, "frame": PADDING},
    {"type": "video_frame", "frame": base64(jpeg_header(64, 48) + bytes(9_999)), "unknown": 1},
    {"type": "prepare", "config": {"top_k": PADDING}},
    {"type": "session.init", "payload": {"config": {PADDING[:40]: 1, "top_k": "x"}, "x": PADDING}},
    {"type": "session.update", "session": {"type": "realtime", "instructions": PADDING}},
    {"type": "session.update", "model": "another", "padding": PADDING},
    {"type": "session.create", "model": "another", "padding": PADDING},
    {"messages": [], "padding": PADDING},
    {str(number): PADDING[:200] for number in range(50)} | {"type": "input.append"},
)
FRAMES: Final[tuple[Frame, ...]] = (
    *map(json.dumps, BODIES),
    Utf8Text(json.dumps({"type": "input.append", "padding": "é" * 10_000}).encode()),
    json.dumps([PADDING]),
    PADDING,
    '{"a": "' + PADDING + '", "a": 1}',
    "[" * 10_000,
    "[" + "1," * 70_000 + "1]",
    bytes(10_000),
    None,
    json.dumps({"type": "session.close", "reason": PADDING}),
    json.dumps({"type": "input.append"}),
)
WAITED: Final = ev.Admitted(at_ns=1)
LEASED: Final = ev.SlotLeased(at_ns=1, lease=1, slot=0)
OPENED: Final = ev.BackendOpened(at_ns=1, lease=1, opened=Opened(prompt_length=9))
CHOSEN: Final = ev.FrameReceived(at_ns=1, frame='{"type": "session.update", "model": "m"}')
PICTURE: Final = json.dumps({"type": "video_frame", "frame": base64(jpeg_header(64, 48))})
SESSIONS: Final[dict[str, tuple[Mode, ev.Endpoint, tuple[ev.Event, ...]]]] = {
    "queued": ("video", "realtime", ()),
    "queued, 002": ("video", "duplex", ()),
    "connected": ("audio", "realtime", (LEASED,)),
    "opening": (
        "audio",
        "realtime",
        (LEASED, ev.FrameReceived(at_ns=1, frame='{"type": "session.init", "payload": {}}')),
    ),
    "active": (
        "video",
        "realtime",
        (
            LEASED,
            ev.FrameReceived(at_ns=1, frame='{"type": "session.init", "payload": {}}'),
            OPENED,
        ),
    ),
    "connected, 002": ("audio", "duplex", (LEASED,)),
    "active, 002, with all the frames it may have": (
        "video",
        "duplex",
        (
            LEASED,
            ev.FrameReceived(at_ns=1, frame='{"type": "prepare"}'),
            OPENED,
            *[ev.FrameReceived(at_ns=1, frame=PICTURE)] * FRAMES_MAX,
        ),
    ),
    "chat": ("chat", "realtime", (WAITED,)),
    "request": ("chat", "chat", (WAITED,)),
    "transcription that waits": ("transcription", "realtime", ()),
    "transcription": ("transcription", "realtime", (LEASED,)),
    "transcription with a model": ("transcription", "realtime", (LEASED, CHOSEN)),
    "transcription whose buffer is full": (
        "transcription",
        "realtime",
        (LEASED, CHOSEN, ev.FrameReceived(at_ns=1, frame=SOUND)),
    ),
}


def begun(name: str) -> Session:
    """Make a session that stands somewhere."""
    mode, endpoint, events = SESSIONS[name]
    opened = ev.ConnectionOpened(
        recording_id="rec-1",
        created_ms=1,
        mode=mode,
        seed=1,
        limits=LIMITS,
        recording="off",
        endpoint=endpoint,
    )
    session, _ = Session.open(opened)
    for event in events:
        session.step(event)
    return session


def heard(frame: Frame, *, has_room: bool = True) -> ev.FrameReceived:
    """Make the event of a frame."""
    return ev.FrameReceived(at_ns=2, frame=frame, has_room=has_room)


def recorded(event: ev.Event) -> ev.Event:
    """Write an event to a record and read it back."""
    _, fields = event_record(event)
    return event_of(fields, event.at_ns)


def is_refusal(effects: tuple[Effect, ...]) -> bool:
    """Whether a frame was answered by an error, and by nothing but what follows from that."""
    sent = [json.loads(effect.frame) for effect in effects if isinstance(effect, ef.Send)]
    is_error = any(body["type"] == "error" for body in sent) or any(
        isinstance(effect, ef.Close) and effect.code in (1003, 1009) for effect in effects
    )
    took = (ef.DecodeMedia, ef.OpenBackend, ef.RunChunk, ef.StartUnit)
    return is_error and not any(isinstance(effect, took) for effect in effects)


def check(name: str, frame: Frame, *, has_room: bool = True) -> ev.FrameReceived:
    """Hold what is kept of a frame to the frame: the same answer and state, live and read back."""
    whole, live, again = begun(name), begun(name), begun(name)
    event = heard(frame, has_room=has_room)
    short = live.shortened(event)
    effects: list[tuple[Effect, ...]] = [whole.step(event), live.step(short)]
    if not isinstance(short.frame, Utf8Text):
        effects.append(again.step(recorded(short)))
        assert again.digest() == whole.digest()
        assert again.counts == whole.counts
    assert effects == effects[:1] * len(effects)
    assert live.digest() == whole.digest()
    assert live.counts == whole.counts
    is_large = frame is not None and len(frame) >= SHORTENED_BYTES_MIN
    assert (short is not event) == (is_large and is_refusal(effects[0]))
    return short


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: str(frame)[:40])
@pytest.mark.parametrize("name", SESSIONS)
def test_what_is_kept_of_a_frame_leads_to_the_same(
    name: str, frame: Frame, *, has_room: bool
) -> None:
    """A replay would answer otherwise than the server did, or the server otherwise than before."""
    short = check(name, frame, has_room=has_room)
    if short.shortened is not None:
        assert size_bytes(event_record(short)[1]) < RECORDED_BYTES_MAX


@given(data=st.data())
def test_so_it_does_whatever_is_wrong_with_it(data: st.DataObject) -> None:
    """A field that nobody thought of would be refused in other words by a replay."""
    body = data.draw(st.sampled_from(all_messages()).flatmap(bodies).flatmap(broken))
    frame = json.dumps(fill(body))
    padded = json.dumps({"padding": PADDING, **fill(body)})
    name = data.draw(st.sampled_from([*SESSIONS]))
    check(name, data.draw(st.sampled_from([frame, padded])))


@pytest.mark.parametrize("frame", ["x" * (CHAT_FRAME_BYTES_MAX + 1), bytes(FRAME_BYTES_MAX + 1)])
@pytest.mark.parametrize("name", ["connected", "chat", "request", "transcription"])
def test_one_that_is_too_long_is_kept_by_its_start(name: str, frame: str | bytes) -> None:
    """It would be written whole, for it is refused before it is read."""
    short = check(name, frame)
    assert short.shortened is not None
    assert short.shortened.size_bytes == len(frame)
    assert size_bytes(event_record(short)[1]) < RECORDED_BYTES_MAX


def test_it_says_what_the_frame_was() -> None:
    """Of a flood nothing could be told afterwards."""
    frame = json.dumps({"type": "input.append", "padding": PADDING})
    kept = begun("chat").shortened(heard(frame))
    assert kept.frame == '{"type":"input.append","padding":""}'
    assert kept.shortened is not None
    assert kept.shortened.size_bytes == len(frame)
    assert kept.shortened.head == frame[:KEPT_CHARS]
    whole = hashlib.blake2b(frame.encode(), digest_size=16).hexdigest()
    assert kept.shortened.blake2b == whole


def test_what_is_taken_or_short_is_kept_whole() -> None:
    """What the model heard would be gone from the recording."""
    taken = json.dumps({"type": "session.init", "payload": {"system_prompt": PADDING}})
    assert begun("connected").shortened(heard(taken)).shortened is None
    assert begun("queued").shortened(heard(taken)).shortened is None, "it is taken later"
    short = json.dumps({"type": "input.append", "padding": "x" * (SHORTENED_BYTES_MIN - 45)})
    assert begun("chat").shortened(heard(short)).shortened is None


def test_a_shortened_frame_is_never_taken() -> None:
    """A fork that is elsewhere by then would set a session up by what is left of a message."""
    frame = json.dumps({"type": "session.init", "payload": {"system_prompt": PADDING}})
    kept = begun("opening").shortened(heard(frame))
    assert kept.shortened is not None
    session = begun("connected")
    (effect,) = session.step(kept)
    assert "invalid_payload" in str(effect)
    assert session.state == "CONNECTED"


def test_in_a_fork_it_is_refused_as_it_was() -> None:
    """What is left of a message would be answered for what is missing from it."""
    frame = json.dumps({"type": "input.append", "input": {"audio": PADDING + "?"}})
    kept = begun("active").shortened(heard(frame))
    assert kept.shortened is not None
    (effect,) = begun("connected").step(kept)
    assert "$.input.audio: a string of 10001 characters that is not base64" in str(effect)


def test_a_redacted_log_does_not_hold_what_it_was_told() -> None:
    """The answer names a model in the client's own words."""
    frame = json.dumps({"type": "session.update", "model": "of the Smiths", "padding": PADDING})
    kept = begun("transcription").shortened(heard(frame))
    policy = Policy(kinds=frozenset({"audio"}))
    edited = EventEditor(frames=FrameEditor(policy=policy, tally=Tally())).edit(kept)
    assert "Smiths" in str(kept.shortened)
    assert "Smiths" not in str(edited.shortened)  # type: ignore[union-attr]


def test_a_redacted_log_does_not_hold_its_start() -> None:
    """What was refused was said all the same."""
    kept = begun("chat").shortened(heard(json.dumps({"type": "input.append", "text": PADDING})))
    policy = Policy(kinds=frozenset({"audio"}))
    edited = EventEditor(frames=FrameEditor(policy=policy, tally=Tally())).edit(kept)
    assert isinstance(edited, ev.FrameReceived)
    assert edited.shortened == attrs.evolve(kept.shortened, head="")


def test_a_redacted_log_does_not_hold_the_hash_of_a_few_bytes() -> None:
    """A name of which only the length was hidden would be found by trying names."""
    short = Shortened(size_bytes=1 << 30, blake2b="ab", head="Smith", read_bytes=5)
    event = ev.FrameReceived(at_ns=0, frame=None, shortened=short)
    edited = EventEditor(frames=FrameEditor(policy=Policy(), tally=Tally())).edit(event)
    assert isinstance(edited, ev.FrameReceived)
    assert edited.shortened == attrs.evolve(short, head="", blake2b="")


@pytest.mark.anyio
async def test_a_flood_of_refused_frames_is_recorded_in_a_few_bytes(tmp_path: Path) -> None:
    """24 clients would have the recorder write 20 MB over and over, and a disk would be full."""
    flood = json.dumps({"type": "input.append", "padding": os.urandom(50_000).hex()})
    async with world(ScriptedBackend(), record_to=tmp_path) as server:
        peer = server.connect("chat")
        await peer.heard("session.queue_done")
        peer.send(*[flood, flood.replace("append", "upend")] * 20, close_frame())
        await peer.over()
        await server.quiet()
    codes = [event["error"]["code"] for event in peer.all("error")]
    assert codes == ["not_ready", "unknown_event"] * 20
    (log,) = Store(tmp_path).logs()
    assert log.file_bytes < 200_000
    assert replay(read(log.path)).identical


FLOODS: Final[dict[str, tuple[Mode, list[str], str]]] = {
    "base64 that is none": (
        "chat",
        [init_frame()],
        json.dumps(
            {
                "type": "input.append",
                "input": {
                    "messages": [
                        {"role": "user", "content": [{"type": "audio", "data": "%" * 400_000}]}
                    ]
                },
            }
        ),
    ),
    "sound without room": (
        "transcription",
        [json.dumps({"type": "session.update", "model": "scripted"})],
        append_sound(os.urandom(2_000_000)),
    ),
}


@pytest.mark.parametrize("name", FLOODS)
@pytest.mark.anyio
async def test_a_flood_that_is_refused_for_what_it_holds_takes_no_more(
    name: str, tmp_path: Path
) -> None:
    """A client would fill the disk by sending what it knows to be wrong."""
    mode, begin, flood = FLOODS[name]
    async with world(ScriptedBackend(), record_to=tmp_path, transcription_buffer_mb=1) as server:
        peer = server.connect(mode)
        if mode == "chat":
            await peer.heard("session.queue_done")
        peer.send(*begin, *[flood] * 20)
        await peer.heard("error", 20)
        peer.vanish()
        await server.quiet()
    assert {json.dumps(event) for event in peer.all("error")} == {json.dumps(peer.events[-1])}
    (log,) = Store(tmp_path).logs()
    assert log.file_bytes < 200_000
    assert replay(read(log.path)).identical
