"""Sessions made without a server, for the tests of replay: a machine, a journal, and a player.

`Scene` feeds a real `Session` with events and has the real `Journal` number its records, as the
driver does, but decides itself what the world does next. `play` turns numbers into what may
happen then, so that Hypothesis can draw whole sessions. `write_log` puts records into a file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import anyio
import attrs
from hypothesis import strategies as st

from protocol.machine.core import Phase
from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.errors import ErrorCode
from protocol.values.messages import QueuePlace
from protocol.values.model import Costs, Cut, Finalized, Opened, UnitResult
from recorder.format.format import Record
from recorder.format.mapping import SCHEMA, fin_fields
from recorder.read.reader import read
from recorder.write.log import SessionLog
from recorder.write.writer import Recorder
from runtime.session.journal import Journal
from tests.sessions.in_memory import append_frame, base64, close_frame, init_frame
from tests.strategies.messages import jpeg_header, noise, wav

RECORDING_ID: Final = "rec-000001"
HEAD: Final[dict[str, Any]] = {
    "recording_id": RECORDING_ID,
    "schema": SCHEMA,
    "config": {"model": "scripted", "deterministic": True, "mode": "video"},
    "fingerprint": {"backend": "scripted", "version": "1"},
    "seed": 7,
    "wall_ms": 1_700_000_000_001,
    "parent": None,
}
LIMITS: Final = ev.SessionLimits(
    session_s=300, init_wait_s=30, cleanup_wait_s=10, context_tokens=2000
)
OPENED: Final = ev.ConnectionOpened(
    recording_id=RECORDING_ID,
    created_ms=1_700_000_000_001,
    mode="video",
    seed=7,
    limits=LIMITS,
    recording="on",
)

JPEG: Final = base64(jpeg_header(64, 48))
VOICE: Final = base64(wav(8000))
INIT: Final = init_frame()
APPEND: Final = append_frame()
INITS: Final = (
    INIT,
    init_frame(voice={"ref_audio_base64": VOICE, "tts_ref_audio_base64": VOICE}),
    init_frame(config={"temperature": 0, "generate_audio": False}, max_slice_nums=3),
    init_frame(config={"temperature": "hot"}),
    json.dumps({"type": "session.update", "session": {"instructions": "be kind"}}),
)
APPENDS: Final = (
    APPEND,
    append_frame(0.25),
    append_frame(2.5),
    append_frame(force_listen=True),
    append_frame(video_frames=[JPEG]),
    append_frame(7.0, video_frames=[JPEG, JPEG], force_listen=True, max_slice_nums=2),
    json.dumps({"type": "input_audio_buffer.append", "audio": base64(noise(16_000))}),
)
ODD_FRAMES: Final = (
    '{"type":"nope"}',
    '{"type":7}',
    "{}",
    '{"type":"input.append","input":{"audio":"not base64"}}',
    '{"type":"session.init","payload":{}}',
    '{"type":"session.close","reason":"\\ud800"}',
    "[" * 40,
    "no JSON",
    b"\x00\x01",
    None,
)


class _Kept:
    """A log that keeps its records in memory, as far as a `Journal` asks for one."""

    is_full = False

    def __init__(self, records: list[Record]) -> None:
        self._records = records

    def append(self, *records: Record, urgent: bool) -> None:
        self._records += records


class Scene:
    """A session and its log, and a world that answers what the session asks for.

    Attributes:
        records: the log so far.
        now_ns: the session's clock.
    """

    def __init__(self, opened: ev.ConnectionOpened = OPENED) -> None:
        head = {**HEAD, "config": {**HEAD["config"], "mode": opened.mode}}
        self.records = [Record(kind="session", seq=0, at_ns=0, fields=head)]
        self.now_ns = 0
        kept = cast("SessionLog", _Kept(self.records))
        self._journal = Journal(lambda _: kept, on_failure=lambda: None)
        self._kv_length = 40
        self._waiting = self._leaving = self._peer_is_gone = False
        self._asked: list[ef.Effect] = []
        self._timers: dict[str, ef.SetTimer] = {}
        self._journal.append_event(opened)
        self.session, effects = Session.open(opened)
        self._after(opened, effects)

    # -- what happens ---------------------------------------------------------------------------

    def post(self, kind: type[Any], **fields: object) -> None:
        """Post an event, now."""
        event = kind(at_ns=self.now_ns, **fields)
        self._journal.append_event(event)
        self._after(event, self.session.step(event))

    def send(self, frame: str | bytes | None) -> None:
        """Be sent a frame by the client."""
        self.post(ev.FrameReceived, frame=frame)

    def wait(self, milliseconds: int) -> None:
        """Let time pass; a timer fires where it is due."""
        self.now_ns += milliseconds * 1_000_000
        for timer in sorted(self._timers.values(), key=lambda timer: timer.at_ns):
            if timer.at_ns <= self.now_ns and self._timers.get(timer.name) is timer:
                del self._timers[timer.name]
                self.post(ev.TimerFired, name=timer.name, generation=timer.generation)

    def lease(self) -> None:
        """Give the session a slot."""
        self._waiting = False
        self.post(ev.SlotLeased, lease=1, slot=0)

    def activate(self, init: str = INIT) -> None:
        """Bring the session to ACTIVE."""
        self.lease()
        self.send(init)
        self.answer()

    def unit(self, number: int = 0, *, frame: str = APPEND) -> None:
        """Send a second, and let the model answer and finalize it."""
        self.send(frame)
        self.answer(number)
        self.answer()
        self.wait(400)

    def answer(self, number: int = 0) -> bool:
        """Answer the oldest thing that the session waits for; `number` decides how."""
        if self._leaving:
            self._leaving = False
            self.post(ev.TicketLeft)
        elif self._asked:
            self._answer(self._asked.pop(0), number)
        else:
            return False
        return True

    def finish(self) -> None:
        """End the session as a client does, answer all it asks for, and write `fin`."""
        self.send(close_frame())
        while not self.session.is_finished:
            assert self.answer()
        self.fin()

    def fin(self) -> None:
        """Write `fin`, as the driver does."""
        fields = fin_fields(self.session, self.session.end_reason)
        seq = len(self.records)
        self.records.append(Record(kind="fin", seq=seq, at_ns=self.now_ns, fields=fields))

    # -- what the session asks for --------------------------------------------------------------

    def _after(self, event: ev.Event, effects: tuple[ef.Effect, ...]) -> None:
        self._journal.append_effects(self.session, event, effects)
        for effect in effects:
            match effect:
                case ef.EnterQueue():
                    self._waiting = True
                case ef.LeaveQueue():
                    self._waiting, self._leaving = False, True
                case ef.SetTimer():
                    self._timers[effect.name] = effect
                case ef.CancelTimer():
                    self._timers.pop(effect.name, None)
                case ef.Send() | ef.Close() | ef.DropUnit():
                    pass
                case ef.Interrupt():
                    pass
                case _:
                    self._asked.append(effect)

    def _answer(self, effect: ef.Effect, number: int) -> None:
        fails = number % 13 == 12
        match effect:
            case ef.OpenBackend(lease=lease) if fails:
                self.post(ev.BackendOpenFailed, lease=lease, context_full=number % 2 == 0)
            case ef.OpenBackend(lease=lease):
                opened = Opened(prompt_length=40, fed_ids=(1, -1, 2))
                self.post(ev.BackendOpened, lease=lease, opened=opened)
            case ef.DecodeMedia(media=media) if fails:
                self.post(ev.MediaRejected, media=media, reason="it is damaged")
            case ef.DecodeMedia(media=media, kind=kind):
                pcm = noise(8000) if kind == "wav" else b""
                self.post(ev.MediaDecoded, media=media, pcm=pcm)
            case ef.StartUnit(unit=unit) if fails:
                self.post(ev.UnitFailed, index=unit.index, context_full=number % 7 == 0)
            case ef.StartUnit(unit=unit):
                self.post(ev.UnitDone, result=self.result(unit.index, number))
            case ef.StartFinalize(index=index) if fails:
                self.post(ev.FinalizeFailed, index=index)
            case ef.StartFinalize(index=index):
                self._kv_length += 2
                done = Finalized(index=index, kv_length=self._kv_length, fed_ids=(3, 4), cost_us=9)
                self.post(ev.FinalizeDone, finalized=done)
            case ef.Rollback(index=index):
                self.post(ev.RollbackFailed if fails else ev.RollbackDone, index=index)
            case ef.Release(lease=lease):
                self._asked.clear()
                self.post(ev.BackendReleased, lease=lease)

    def result(self, index: int, number: int) -> UnitResult:
        """Make a unit's result: listening or speaking, whole or cut, with numbers of all kinds."""
        speaks = number % 3 == 1
        self._kv_length += 20 + number % 17
        return UnitResult(
            index=index,
            is_listen=not speaks,
            text=f'wörd "{number}"\n' if speaks else "",
            pcm=noise(240, number % 5) if speaks else b"",
            end_of_turn=speaks and number % 2 == 0,
            kv_length=self._kv_length,
            decided_ids=(number, 7, 151_705),
            fed_ids=(number, 7),
            codec_ids=(1, 2, 3) if speaks else (),
            cut=Cut(stage="llm", step=number % 4) if number % 11 == 10 else None,
            input_hash="00" * 16,
            margin=number / 7,
            costs=Costs(prefill_us=number, generate_us=3 * number, wall_us=1000 + number),
        )

    # -- by numbers -----------------------------------------------------------------------------

    def play(self, moves: Iterable[tuple[int, int]]) -> None:
        """Let something happen for each move: what kind of thing, and which of them."""
        for kind, number in moves:
            if self.session.is_finished:
                break
            _PLAYS[kind % len(_PLAYS)](self, number)

    def _go_on(self, number: int) -> None:
        """What the session waits for comes; else the client goes on."""
        if self._waiting and number % 4 == 0:
            place = QueuePlace(
                position=1 + number % 3,
                estimated_wait_s=number,
                ticket_id="ticket_0",
                queue_length=4,
            )
            self.post(ev.TicketMoved, place=place)
        elif self._waiting:
            self.lease()
        elif not self.answer(number):
            self._send_one(number, INITS if self.session.state == "CONNECTED" else APPENDS)

    def _speak(self, number: int) -> None:
        self._send_one(number, APPENDS)

    def _blunder(self, number: int) -> None:
        harmless = (*ODD_FRAMES[:5], *INITS) * 3
        self._send_one(number, (*harmless, *ODD_FRAMES, close_frame()))

    def _send_one(self, number: int, frames: Sequence[str | bytes | None]) -> None:
        if not self._peer_is_gone:
            self.send(frames[number % len(frames)])

    def _pass_time(self, number: int) -> None:
        self.wait(number * (30 if number % 10 else 3000))

    def _break(self, number: int) -> None:
        """Something goes wrong, or comes too late."""
        stale = partial(self.post, ev.UnitDone, result=self.result(999, number))
        breaks: list[Callable[[], None]] = [
            stale,
            partial(self.post, ev.TimerFired, name="session", generation=999),
            partial(self.post, ev.FinalizeDone, finalized=Finalized(index=999, kv_length=1)),
            partial(self.post, ev.RecordingFailed),
            partial(self.post, ev.BackendOpened, lease=9, opened=Opened(prompt_length=1)),
        ]
        ends: list[Callable[[], None]] = [
            partial(self.post, ev.DrainBegan, wait_s=number),
            partial(self.post, ev.Draining),
            self._vanish,
            self._lose_backend,
            self._refuse,
        ]
        happens = [*breaks * 3, *ends]
        happens[number % len(happens)]()

    def _vanish(self) -> None:
        if not self._peer_is_gone:
            self._peer_is_gone = True
            self.post(ev.PeerGone)

    def _lose_backend(self) -> None:
        busy = self.session.phase is not Phase.IDLE
        if busy and not any(isinstance(effect, ef.Release) for effect in self._asked):
            self._asked.clear()
            self.post(ev.BackendLost, lease=1)

    def _refuse(self) -> None:
        if self._waiting:
            self._waiting = False
            code = ErrorCode.QUEUE_FULL
            self.post(ev.AdmissionRefused, code=code)


_PLAYS: Final = (
    *(Scene._go_on,) * 9,
    *(Scene._speak,) * 3,
    Scene._pass_time,
    Scene._blunder,
    Scene._break,
)
_MOVES: Final = st.tuples(st.integers(0, len(_PLAYS) - 1), st.integers(0, 199))


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    """Sessions in which anything may happen, by numbers; most of them become ACTIVE."""
    scene = Scene()
    start = draw(st.integers(0, len(INITS)))
    if start < len(INITS):
        scene.activate(INITS[start])
    scene.play(draw(st.lists(_MOVES, min_size=30, max_size=80)))
    if scene.session.is_finished:
        scene.fin()
    return scene


def busy_scene() -> Scene:
    """Make a finished session of 27 units: listening, speech, a cut, a failure, drops, errors."""
    scene = Scene()
    scene.activate()
    for number in range(20):
        scene.unit(number)
    scene.send(APPENDS[3])
    scene.send(APPENDS[3])
    scene.answer(10)
    scene.answer()
    scene.send(APPENDS[5])
    while scene.answer(7):
        scene.wait(300)
    scene.send(ODD_FRAMES[0])
    scene.finish()
    return scene


def renumbered(records: Iterable[Record]) -> list[Record]:
    """Give records their numbers anew, so that none is missing."""
    return [attrs.evolve(record, seq=seq) for seq, record in enumerate(records)]


def write_log(folder: Path, records: Sequence[Record]) -> Path:
    """Write records into a log, in blocks as a recorder makes them; without `fin` it is open."""
    path = folder / f"{RECORDING_ID}.session.zst"
    recorder = Recorder(clock=lambda: 0.0, inline=True)
    log = recorder.open(path, records[0].fields, at_ns=0)
    for record in records[1:]:
        if record.kind == "fin":
            anyio.run(partial(log.finish, record.fields, at_ns=record.at_ns))
        else:
            log.append(record, urgent=record.kind == "tx")
    recorder.close()
    return path


def test_the_busy_scene_has_it_all() -> None:
    """The other tests of replay would pass on a session in which nothing happens."""
    records = busy_scene().records
    names = {record.fields.get("type", record.kind) for record in records}
    assert names >= {"StartUnit", "InterruptUnit", "Rollback", "DropUnit", "DecodeMedia", "Send"}
    assert names >= {"UnitFailed", "FinalizeDone", "Release", "state", "session", "fin"}
    assert [record.seq for record in records] == list(range(len(records)))


def test_a_written_scene_reads_back(tmp_path: Path) -> None:
    """The other tests of replay would not replay what a server's recorder writes."""
    records = busy_scene().records
    found = list(read(write_log(tmp_path, records)))
    assert [record.kind for record in found] == [record.kind for record in records]
