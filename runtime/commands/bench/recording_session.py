"""A video session without server or model: a real `Session` and `Journal`, fed with events."""

from __future__ import annotations

import time
from typing import Any, Final

import attrs

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.model import Costs, Finalized, Opened, UnitResult
from protocol.values.requests import Append, Init
from protocol.wire.dialects.realtime import REALTIME
from recorder.format.records import Fields, Record

from ...net.connection import Ready
from ...session.identity import Identity
from ...session.journal import Journal, OpenLog
from .material import Speech, camera_frame, output_second

TOKENS: Final = 12
CODES: Final = 25


@attrs.frozen(kw_only=True)
class TalkUnit:
    """A second: its sound and picture, the frame that carries them, and the answer."""

    append: Append
    frame: str
    pcm: bytes


def make_unit(speech: Speech, number: int) -> TalkUnit:
    """Make a second that differs from all others."""
    append = Append(
        pcm=speech.second(number, gain=0.8 + 0.0007 * number), frames=(camera_frame(number),)
    )
    return TalkUnit(
        append=append,
        frame=REALTIME.encode_request(append),
        pcm=output_second(speech, number),
    )


class Talker:
    """A session and its journal, fed with a server's events; counts CPU, and waits for the log."""

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

    async def unit(self, unit: TalkUnit) -> None:
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

    def _result(self, unit: TalkUnit) -> UnitResult:
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


class Kept:
    """A log in memory, with the interface that `Journal` uses."""

    is_full = False
    steps_of_all = 0

    def __init__(self) -> None:
        self.records: list[Record] = []

    def append(self, *records: Record, urgent: bool) -> None:  # noqa: ARG002
        """Take records."""
        self.records += records

    async def written(self, seq: int) -> None:
        """Wait for nothing."""

    async def finish(self, fields: Fields, *, at_ns: int) -> None:
        """Wait for nothing."""
