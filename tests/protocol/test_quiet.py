"""Sound that is only kept leaves a session as stepping each message by itself does."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import attrs

from protocol.machine.session import Session
from protocol.values import events as ev
from protocol.values.effects import Effect
from protocol.values.errors import LocalProtocolError
from tests.golden.logs import SAMPLE
from tests.protocol.test_likeness import events_in
from tests.sessions.in_memory import base64

KEPT_MIN = {
    **{"realtime": 100, "duplex-v1": 3, "transcription": 1000, "live": 50},
    "amid a call": 100,
}
"""Messages that must have been kept, by dialect, or nothing was tried.

A chunk of `legacy-duplex` is answered at once, so none is kept.
"""
BATCH_MAX = 12
SAMPLES = (1, 320, 320, 1600, 4000, 4001, 15_999)
"""Of pieces: a second fills up now and then."""
MORE: Sequence[dict[str, Any]] = (
    *({},) * 8,
    {"force_listen": True},
    {"max_slice_nums": 3},
    {"input_id": "mine"},
    {"event_id": "k1"},
    {"unknown": 1},
)


def pieces_like(frame: str, chance: Random) -> Iterator[str]:
    """A run of small appends, drawn, in the words of a recorded one."""
    body = json.loads(frame)
    place = body.get("input") if isinstance(body.get("input"), dict) else body
    name = "audio" if "audio" in place else "audio_base64"
    if not isinstance(place.get(name), str):
        return
    for _ in range(chance.randrange(1, BATCH_MAX)):
        width = chance.choice((2, 4, 4))
        place[name] = base64(chance.randbytes(1) * width * chance.choice(SAMPLES))
        more = chance.choice(MORE)
        yield json.dumps(body | more if place is body else body | {"input": place | more})
    if chance.random() < 0.2:
        yield json.dumps({"type": "session.close"} if chance.random() < 0.1 else {"type": "x"})


def with_pieces(event: ev.Event, chance: Random) -> list[Any]:
    """An event, and behind a recorded append a run of others like it, at the same time."""
    text = event.frame if isinstance(event, ev.FrameReceived) else None
    if not isinstance(text, str) or not is_whole(event) or "audio" not in text[:200]:
        return [event]
    return [event, *(attrs.evolve(event, frame=frame) for frame in pieces_like(text, chance))]


def is_whole(event: ev.Event) -> bool:
    """Whether it is a message of a client, recorded whole."""
    return isinstance(event, ev.FrameReceived) and event.shortened is None


def step_together(session: Session, events: Sequence[ev.FrameReceived]) -> tuple[int, list[Effect]]:
    """Step messages as a driver does; returns how many were kept, and all effects."""
    count, effects = 0, list[Effect]()
    while events:
        messages = session.read_ahead([event.frame for event in events])
        if messages:
            session.keep(events[0].at_ns, messages)
        else:
            effects += step(session, events[0])
        count += len(messages)
        events = events[max(1, len(messages)) :]
    return count, effects


def step(session: Session, event: ev.Event) -> tuple[Effect, ...]:
    """Step an event as a driver does."""
    if isinstance(event, ev.FrameReceived) and event.shortened is None:
        event = session.shortened(event)
    return session.step(event)


def test_messages_that_come_together() -> None:
    """A recording of a busy server replays to another state, or a second of sound is cut wrong."""
    compare(seed=0)


def compare(seed: int) -> None:
    """Give sessions of all recordings the same drawn messages, together and one by one."""
    kept = Counter[str]()
    for path in SAMPLE:
        chance = Random(f"{seed} {path.name}")
        opened, *events = events_in(path)
        assert isinstance(opened, ev.ConnectionOpened)
        (together, _), (singly, _) = Session.open(opened), Session.open(opened)
        for event in events:
            batch = with_pieces(event, chance)
            try:
                wanted = [effect for each in batch for effect in step(singly, each)]
            except LocalProtocolError:
                break  # what was drawn has led away from the log
            if is_whole(event):
                is_amid = not together.kind.slot.call.is_idle
                count, effects = step_together(together, batch)
                kept["amid a call"] += count * is_amid
                kept[together.dialect_name] += count
            else:
                effects = list(together.step(event))
            assert effects == wanted, (path, event)
            assert together.digest() == singly.digest(), (path, event)
            assert (together.accepted, together.sent) == (singly.accepted, singly.sent)
            assert together.counts == singly.counts
            assert together.frames_received == singly.frames_received
    assert all(kept[name] >= least for name, least in KEPT_MIN.items()), kept
