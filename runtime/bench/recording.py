"""What recording costs: CPU a unit, bytes a unit, and how long a `Send` waits for the log.

A real `Session` is given the events of a talkative video session, and the real `Journal` and
`Recorder` keep what comes of it. No server and no model runs, so that what is measured is the log's
alone: the CPU of the journal's calls in the session's task, and that of the recorder's thread.

- `busy`: unit after unit, as fast as the log takes them. The baseline runs in the same way: the
  same records as lines of JSON with base64 for bytes, a unit's lines compressed by zstd at level 3
  and written. That is what one writes who needs no blocks, checksums or chain.
- `paced`: a unit a second in each session, as in service, where caches are cold and clocks low.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import anyio
import attrs
import orjson
import pybase64
import zstandard

from protocol import effects as ef
from protocol import events as ev
from protocol.dialects.realtime import REALTIME
from protocol.model import Costs, Finalized, Opened, UnitResult
from protocol.requests import Append, Init
from protocol.session import Session
from recorder.log import SessionLog
from recorder.records import Fields, Record
from recorder.store import Store
from recorder.writer import Recorder

from ..connection import Ready
from ..identity import Identity, SystemIdentities
from ..journal import Journal, OpenLog
from .material import Speech, Times, camera_frame, output_second, sum_up

BUSY_UNITS: Final = 200
"""A second or two of work; differences of a tenth show in it."""
WARM_UP_UNITS: Final = 10
UNITS_MADE: Final = 40
"""Different units; they come again after twice as much as the recorder remembers of a log."""
TOKENS: Final = 12
CODES: Final = 25
ZSTD_LEVEL: Final = 3
RECORDER_THREAD: Final = "antiphon-recorder"

Found = TypeVar("Found")


@attrs.frozen(kw_only=True)
class Cost:
    """CPU milliseconds a unit.

    Attributes:
        session_ms: in the session's task, mapping included.
        thread_ms: in the recorder's thread; for the baseline, encoding and writing.
        total_ms: both.
    """

    session_ms: float
    thread_ms: float
    total_ms: float


@attrs.frozen(kw_only=True)
class Paced:
    """Sessions at one unit a second each; `send_wait` is from append to written."""

    sessions: int
    cost: Cost
    send_wait: Times


@attrs.frozen(kw_only=True)
class RecordingResult:
    """What recording took.

    Attributes:
        unit_bytes: what is in a unit.
        busy: CPU, unit after unit.
        baseline: CPU of the baseline.
        of_baseline: the one in terms of the other.
        file_bytes: in the log, a unit.
        baseline_file_bytes: in the baseline's file.
        plain_bytes: of the same as lines of JSON, uncompressed.
        paced: with one session and with many.
    """

    unit_bytes: dict[str, int]
    busy: Cost
    baseline: Cost
    of_baseline: float
    file_bytes: int
    baseline_file_bytes: int
    plain_bytes: int
    paced: list[Paced]


async def measure_recording(
    speech: Speech, folder: Path, *, seconds: int, sessions_many: int
) -> RecordingResult:
    """Measure it all.

    Args:
        speech: what is said, by both.
        folder: takes the logs.
        seconds: of the paced runs, each.
        sessions_many: sessions of the second one.
    """
    units = [_make_unit(speech, number) for number in range(UNITS_MADE)]
    busy, file_bytes = await _run_busy(units, folder)
    baseline, baseline_bytes, plain_bytes = await _run_baseline(units, folder)
    paced = [
        await _run_paced(units, folder, sessions=sessions, seconds=seconds)
        for sessions in (1, sessions_many)
    ]
    append = units[0].append
    return RecordingResult(
        unit_bytes={
            "pcm_in": len(append.pcm),
            "jpeg_in": sum(map(len, append.frames)),
            "frame_in": len(units[0].frame),
            "pcm_out": len(units[0].pcm),
        },
        busy=busy,
        baseline=baseline,
        of_baseline=round(busy.total_ms / baseline.total_ms, 3),
        file_bytes=file_bytes,
        baseline_file_bytes=baseline_bytes,
        plain_bytes=plain_bytes,
        paced=paced,
    )


# -- a session ----------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class _Unit:
    append: Append
    frame: str
    pcm: bytes


def _make_unit(speech: Speech, number: int) -> _Unit:
    append = Append(
        pcm=speech.second(number, gain=0.8 + 0.0007 * number), frames=(camera_frame(number),)
    )
    return _Unit(
        append=append,
        frame=REALTIME.encode_request(append),
        pcm=output_second(speech, number),
    )


class _Talker:
    """A session and its journal, fed with what a server would tell it.

    Attributes:
        cpu_ns: of the journal's calls so far.
        waits_ms: how long each unit's frames waited for the log.
    """

    def __init__(self, open_log: OpenLog, identity: Identity) -> None:
        self.cpu_ns = 0
        self.waits_ms: list[float] = []
        self._began_ns = time.monotonic_ns()
        self._journal = Journal(open_log, on_failure=_fail)
        self._index = -1
        self._kv_length = 40
        limits = ev.SessionLimits(
            session_s=3600, init_wait_s=30, cleanup_wait_s=10, context_tokens=1 << 30
        )
        opened = ev.ConnectionOpened(
            recording_id=identity.recording_id,
            created_ms=identity.created_ms,
            mode="video",
            seed=identity.seed,
            limits=limits,
            recording="on",
        )
        self._journal.append_event(opened)
        self._session, effects = Session.open(opened)
        self._journal.append_effects(self._session, opened, effects)
        self._post(ev.SlotLeased, lease=1, slot=0)
        self._post(ev.FrameReceived, frame=REALTIME.encode_request(Init(instructions="be brief")))
        self._post(ev.BackendOpened, lease=1, opened=Opened(prompt_length=40))
        self.cpu_ns = 0

    async def unit(self, unit: _Unit) -> None:
        """Hear, answer and finalize a second, and wait until the answer may be sent."""
        self._index += 1
        effects, _ = self._post(ev.FrameReceived, frame=unit.frame)
        for decode in [effect for effect in effects if isinstance(effect, ef.DecodeMedia)]:
            effects, _ = self._post(ev.MediaDecoded, media=decode.media)
        assert any(isinstance(effect, ef.StartUnit) for effect in effects)
        result = self._result(unit)
        began_ns = time.perf_counter_ns()
        _, ready = self._post(ev.UnitDone, result=result)
        await ready()
        self.waits_ms.append((time.perf_counter_ns() - began_ns) / 1e6)
        kv_length = self._kv_length = self._kv_length + 2
        done = Finalized(index=self._index, kv_length=kv_length, fed_ids=(7, 8), cost_us=37_000)
        self._post(ev.FinalizeDone, finalized=done)

    def _result(self, unit: _Unit) -> UnitResult:
        self._kv_length += 70 + TOKENS
        return UnitResult(
            index=self._index,
            is_listen=False,
            text="so the answer to it is",
            pcm=unit.pcm,
            kv_length=self._kv_length,
            decided_ids=tuple(range(100, 100 + TOKENS)),
            fed_ids=tuple(range(100, 100 + TOKENS)),
            codec_ids=tuple((self._index * 37 + code * 91) % 6561 for code in range(CODES)),
            input_hash="5" * 32,
            logits_hash="7" * 32,
            margin=1.25,
            vision_slices=1,
            vision_tokens=64,
            costs=Costs(prefill_us=60_000, generate_us=300_000, llm_us=200_000, wall_us=360_000),
        )

    def _post(self, kind: type[Any], **fields: object) -> tuple[tuple[ef.Effect, ...], Ready]:
        event = kind(at_ns=time.monotonic_ns() - self._began_ns, **fields)
        before_ns = time.thread_time_ns()
        self._journal.append_event(event)
        self.cpu_ns += time.thread_time_ns() - before_ns
        effects = self._session.step(event)
        before_ns = time.thread_time_ns()
        ready = self._journal.append_effects(self._session, event, effects)
        self.cpu_ns += time.thread_time_ns() - before_ns
        return effects, ready

    async def finish(self) -> None:
        """End the log."""
        await self._journal.finish(time.monotonic_ns() - self._began_ns, {"reason": "client"})


def _fail() -> None:
    raise AssertionError("the log failed")


# -- the recorder -------------------------------------------------------------------------------


def _open_in(recorder: Recorder, folder: Path, identity: Identity) -> OpenLog:
    path = Store(folder).path(identity.recording_id)
    fields: Fields = {"recording_id": identity.recording_id, "schema": {"machine": 1}}
    return lambda on_failure: recorder.open(path, fields, at_ns=0, on_failure=on_failure)


@contextmanager
def _recorder() -> Iterator[tuple[Recorder, Callable[[], int]]]:
    """Run a recorder; with it comes a clock of its thread's CPU, in nanoseconds."""
    with Recorder() as recorder:
        threads = [thread for thread in threading.enumerate() if thread.name == RECORDER_THREAD]
        assert len(threads) == 1
        identity = threads[0].ident
        assert identity is not None
        clock = time.pthread_getcpuclockid(identity)
        yield recorder, partial(time.clock_gettime_ns, clock)


async def _run_busy(units: Sequence[_Unit], folder: Path) -> tuple[Cost, int]:
    with _recorder() as (recorder, thread_ns):
        identity = SystemIdentities().draw()
        talker = _Talker(_open_in(recorder, folder, identity), identity)
        for number in range(WARM_UP_UNITS):
            await talker.unit(units[number % len(units)])
        began_bytes = recorder.statistics.file_bytes
        began_ns = thread_ns()
        talker.cpu_ns = 0
        for number in range(WARM_UP_UNITS, WARM_UP_UNITS + BUSY_UNITS):
            await talker.unit(units[number % len(units)])
        cost = _cost(talker.cpu_ns, thread_ns() - began_ns, BUSY_UNITS)
        file_bytes = (recorder.statistics.file_bytes - began_bytes) // BUSY_UNITS
        await talker.finish()
    return cost, file_bytes


async def _run_paced(units: Sequence[_Unit], folder: Path, *, sessions: int, seconds: int) -> Paced:
    with _recorder() as (recorder, thread_ns):
        identities = SystemIdentities()
        talkers = []
        for _ in range(sessions):
            identity = identities.draw()
            talkers.append(_Talker(_open_in(recorder, folder, identity), identity))
        began_ns = thread_ns()
        async with anyio.create_task_group() as tasks:
            for number, talker in enumerate(talkers):
                tasks.start_soon(_pace, talker, units, seconds, number / sessions)
        spent_ns = thread_ns() - began_ns
        for talker in talkers:
            await talker.finish()
    return Paced(
        sessions=sessions,
        cost=_cost(sum(talker.cpu_ns for talker in talkers), spent_ns, sessions * seconds),
        send_wait=sum_up([ms for talker in talkers for ms in talker.waits_ms]),
    )


async def _pace(talker: _Talker, units: Sequence[_Unit], seconds: int, late_s: float) -> None:
    began_s = anyio.current_time() + late_s
    for number in range(seconds):
        await anyio.sleep_until(began_s + number)
        await talker.unit(units[number % len(units)])


def _cost(session_ns: int, thread_ns: int, units: int) -> Cost:
    return Cost(
        session_ms=round(session_ns / 1e6 / units, 4),
        thread_ms=round(thread_ns / 1e6 / units, 4),
        total_ms=round((session_ns + thread_ns) / 1e6 / units, 4),
    )


# -- the baseline -------------------------------------------------------------------------------


class _Kept:
    """A log that only keeps its records, as far as a `Journal` asks for one."""

    is_full = False

    def __init__(self) -> None:
        self.records: list[Record] = []

    def append(self, *records: Record, urgent: bool) -> None:  # noqa: ARG002
        """Take records."""
        self.records += records

    async def written(self, seq: int) -> None:
        """Wait for nothing."""

    async def finish(self, fields: Fields, *, at_ns: int) -> None:
        """Wait for nothing."""


async def _run_baseline(units: Sequence[_Unit], folder: Path) -> tuple[Cost, int, int]:
    kept = _Kept()
    talker = _Talker(lambda _: cast("SessionLog", kept), SystemIdentities().draw())
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    spent_ns = plain_bytes = file_bytes = 0
    with (folder / "baseline.jsonl.zst").open("wb", buffering=0) as file:
        for number in range(WARM_UP_UNITS + BUSY_UNITS):
            if number == WARM_UP_UNITS:
                talker.cpu_ns = spent_ns = plain_bytes = file_bytes = 0
            await talker.unit(units[number % len(units)])
            before_ns = time.thread_time_ns()
            lines = b"".join(map(_line, kept.records))
            packed = compressor.compress(lines)
            os.write(file.fileno(), packed)
            spent_ns += time.thread_time_ns() - before_ns
            plain_bytes += len(lines)
            file_bytes += len(packed)
            kept.records.clear()
    cost = _cost(talker.cpu_ns, spent_ns, BUSY_UNITS)
    return cost, file_bytes // BUSY_UNITS, plain_bytes // BUSY_UNITS


def _line(record: Record) -> bytes:
    body = {"kind": record.kind, "seq": record.seq, "at_ns": record.at_ns, "fields": record.fields}
    return orjson.dumps(body, default=_base64, option=orjson.OPT_APPEND_NEWLINE)


def _base64(value: object) -> str:
    assert isinstance(value, bytes)
    return pybase64.b64encode(value).decode("ascii")
