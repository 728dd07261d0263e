"""Sessions made of what a client sends alone: everything that they ask for is answered at once.

`play` steps a real `Session`, a second for each frame, and gives its events; what the model and the
decoder say is the `Answers`' to decide. `write_events` makes their log, as a server would.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import attrs

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.limits import NS_PER_MS, NS_PER_S
from protocol.values.model import Finalized, Opened, Prefill, TurnChunk, TurnResult, UnitResult
from recorder.format.format import Fields, Record
from recorder.write.files import new_file
from replay.rerun.logic import LogRegenerator, head_record, write
from tests.replay.test_logs import HEAD, OPENED

Frame = str | bytes | None


class Answers:
    """What the model and the decoder say; a test says it otherwise."""

    def opened(self) -> Opened:
        """Say what a model holds after a prompt."""
        return Opened(prompt_length=12)

    def unit(self, index: int) -> UnitResult:
        """Say what a model makes of a unit."""
        return UnitResult(index=index, is_listen=False, text=f"unit {index}", kv_length=20 + index)

    def finalized(self, index: int) -> Finalized:
        """Say what a finalized unit is."""
        return Finalized(index=index, kv_length=21 + index)

    def prefill(self, index: int) -> Prefill:
        """Say what a model holds of a conversation."""
        return Prefill(index=index, input_tokens=30)

    def chunks(self, index: int) -> tuple[TurnChunk, ...]:
        """Say an answer in pieces."""
        return (TurnChunk(index=index, step=0, text=f"turn {index}", token_ids=(1,)),)

    def turn(self, index: int) -> TurnResult:
        """Say how an answer ends."""
        return TurnResult(index=index, text=f"turn {index}", generated_tokens=1)

    def media(self, effect: ef.DecodeMedia) -> dict[str, Any]:
        """Say what was decoded, as fields of `MediaDecoded`."""
        return {"pcm": b"" if effect.kind in {"jpeg", "image"} else bytes(6400)}


NO_ANSWERS: Final = Answers()


def play(
    frames: Iterable[Frame], answers: Answers = NO_ANSWERS, opened: ev.ConnectionOpened = OPENED
) -> list[ev.Event]:
    """Play a client that sends frames, one a second, and then is gone."""
    regenerator, events = LogRegenerator(), list[ev.Event]()
    now_ns = 0

    def post(event: ev.Event) -> None:
        waiting = deque([event])
        while waiting and not (regenerator.session and regenerator.session.is_finished):
            next_event = attrs.evolve(waiting.popleft(), at_ns=now_ns)
            events.append(next_event)
            for effect in regenerator.step(next_event).effects:
                waiting.extend(_answer(effect, answers, len(events)))

    post(opened)
    for frame in frames:
        now_ns += NS_PER_S
        post(ev.FrameReceived(at_ns=0, frame=frame))
    now_ns += NS_PER_MS
    post(ev.PeerGone(at_ns=0))
    return events


def _answer(effect: ef.Effect, answers: Answers, lease: int) -> tuple[ev.Event, ...]:
    match effect:
        case ef.Admit():
            return (ev.Admitted(at_ns=0),)
        case ef.EnterQueue():
            return (ev.SlotLeased(at_ns=0, lease=lease, slot=0),)
        case ef.OpenBackend(lease=held):
            return (ev.BackendOpened(at_ns=0, lease=held, opened=answers.opened()),)
        case ef.DecodeMedia(media=number):
            return (ev.MediaDecoded(at_ns=0, media=number, **answers.media(effect)),)
        case ef.StartUnit(unit=unit):
            return (ev.UnitDone(at_ns=0, result=answers.unit(unit.index)),)
        case ef.StartFinalize(index=index):
            return (ev.FinalizeDone(at_ns=0, finalized=answers.finalized(index)),)
        case ef.StartTurn(turn=turn):
            return (
                ev.TurnPrefilled(at_ns=0, prefill=answers.prefill(turn.index)),
                *(ev.TurnProgress(at_ns=0, chunk=chunk) for chunk in answers.chunks(turn.index)),
                ev.TurnDone(at_ns=0, result=answers.turn(turn.index)),
            )
        case ef.Release(lease=held):
            return (ev.BackendReleased(at_ns=0, lease=held),)
    return ()


def regenerate(
    path: Path,
    head: Fields,
    events: Iterable[ev.Event],
    *,
    is_open: bool = False,
    is_durable: bool = True,
) -> int:
    """Write the log of a session that is made of events; return the number of events.

    Args:
        head: the fields of its `session` record.
        events: from `ConnectionOpened` on, in order.
        is_open: the log has no `fin`, as that of a session which still runs.
        is_durable: return only once it is on the device.

    No file is left by `RegenerationError` (the machine refuses an event), `RecordInvalid` (a value
    cannot be stored) or `OSError` (the disk refused, or the file exists).
    """
    regenerator = LogRegenerator()

    def records() -> Iterator[Record]:
        yield head_record(head)
        for event in events:
            yield from regenerator.step(event).records
        if not is_open:
            yield regenerator.end()

    with new_file(path) as part:
        write(part, records(), is_durable=is_durable)
    return regenerator.events


def write_events(
    folder: Path, events: Iterable[ev.Event], *, is_open: bool = False, **head: Any
) -> Path:
    """Write the log of events."""
    path = folder / f"{HEAD['recording_id']}.session.zst"
    regenerate(path, {**HEAD, **head}, events, is_open=is_open, is_durable=False)
    return path
