"""Plays a case to a server over any connection, and then checks that the server still serves.

The client sends, waits, breaks, and closes as the case says. The judge finds wrong answers, this
one missing ones. A well-behaved client, the probe, must get a session after any case.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Final, Protocol

import anyio
import attrs

from protocol.values.model import UNIT_SAMPLES
from protocol.values.modes import OF_MODE
from protocol.values.state import Course
from protocol.values.utf8 import frame_bytes

from .case import OPENAI_DIALECTS, SENDS, TOLD, Case, Step
from .judge import Judge
from .media import MATERIAL_BYTES_MAX, fill

PROBE_AUDIO: Final = {"$pcm": UNIT_SAMPLES}
WAIT_S_MAX: Final = 700.0
"""Longer than any session may last."""
SILENCE_S: Final = 1.0
"""After the end: time for messages that must not come."""


class Broken(Exception):  # noqa: N818 - an end, not an error
    """The connection takes nothing more; the judge knows why."""


class FuzzerError(BaseException):
    """The fuzzer itself is broken; no `Exception`, so that no server or Hypothesis handles it."""


@contextmanager
def ours() -> Iterator[None]:
    """Turn an error within the block into `FuzzerError`."""
    try:
        yield
    except Broken:
        raise
    except Exception as error:
        raise FuzzerError(f"{type(error).__name__}: {error}") from error


def own_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The fuzzer's own error in a group, or the group."""
    for error in group.exceptions:
        found = own_of(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, FuzzerError):
            return found
    return group


class Wire(Protocol):
    """One connection to a server; its judge gets what arrives."""

    async def send(self, frame: str | bytes | None) -> None:
        """Send a message; None is one above every limit. Raises `Broken`."""

    async def raw(self, data: bytes, /) -> None:
        """Put bytes on the connection unchanged. Raises `Broken`."""

    async def fault(self, name: str) -> None:
        """Cause one of `case.FAULTS`. Raises `Broken`."""

    async def leave(self) -> None:
        """Close in order, if it is open."""


Connect = Callable[[str, Judge], AbstractAsyncContextManager[Wire]]
"""Opens a connection to a path and query, for a judge."""


@attrs.frozen(kw_only=True)
class Pace:
    """Time limits.

    Attributes:
        answer_s: for an answer; longer is a hang.
        quiet_s: after messages in a row, before the next wait.
        wait_scale: multiplies a case's waits.
        silence_s: after the end, for messages that must not come.
    """

    answer_s: float
    quiet_s: float
    wait_scale: float = 1.0
    silence_s: float = SILENCE_S


class Player:
    """Plays one case."""

    def __init__(self, case: Case, judge: Judge, connect: Connect, pace: Pace) -> None:
        self._case = case
        self._judge = judge
        self._connect = connect
        self._pace = pace
        self._is_deaf = False
        self._is_mute = False
        self._is_left = False
        self._occupant: AbstractAsyncContextManager[Wire] | None = None

    async def play(self) -> None:
        """Play it to the end of its connection."""
        try:
            if self._case.steps and self._case.steps[0].kind == "occupy":
                await self._occupy()
            async with self._connect(self._case.connect, self._judge) as wire:
                try:
                    for step in self._case.steps:
                        await self._do(step, wire)
                    await self._finish(wire)
                except Broken:
                    await self._judge.until(lambda: False, self._pace.answer_s)
                await anyio.sleep(self._pace.silence_s)
                await wire.leave()
        finally:
            await self._vacate()

    async def _do(self, step: Step, wire: Wire) -> None:
        judge = self._judge
        if judge.is_over or self._is_left or step.kind in TOLD:
            return
        judge.did(step)
        match step.kind:
            case kind if kind in SENDS:
                with ours():
                    frame = frame_of(step, OF_MODE[self._case.mode].frame_bytes_max)
                    judge.says(frame)
                await wire.send(frame)
            case "await" if step.value == "turn":
                await self._await_turn()
            case "await":
                await self._await_answer()
            case "raw":
                judge.broke = True
                await wire.raw(bytes.fromhex(step.value))
            case "wait_s":
                await anyio.sleep(min(float(step.value), WAIT_S_MAX) * self._pace.wait_scale)
            case "fault":
                await self._break(step.value, wire)
            case "leave":
                self._is_left = judge.broke = True
                await wire.leave()
            case "vacate":
                await self._vacate()

    async def _break(self, name: str, wire: Wire) -> None:
        self._is_left |= name == "reset"
        self._is_mute |= name == "half_close"
        self._is_deaf |= name == "stall"
        self._judge.broke |= name in {"reset", "half_close", "stall"}
        await wire.fault(name)

    # -- waiting --------------------------------------------------------------------------------

    async def _await_turn(self) -> None:
        judge = self._judge
        if self._is_deaf or judge.holds_slot or self._case.course is Course.REQUEST:
            return
        begun = await judge.until(lambda: judge.has_slot, self._pace.answer_s)
        if not begun and not judge.queued:
            judge.found("hang", "no answer to a connection")

    async def _await_answer(self) -> None:
        judge = self._judge
        if self._is_deaf or judge.owed is None:
            return
        if not judge.is_sure:
            await judge.until(lambda: False, self._pace.quiet_s)
            judge.settle()
        elif not await judge.until(lambda: judge.owed is None, self._pace.answer_s):
            judge.miss()

    # -- the end --------------------------------------------------------------------------------

    async def _finish(self, wire: Wire) -> None:
        """Close as a client should, unless the case has left; the server must follow."""
        judge = self._judge
        if self._is_left or self._is_deaf:
            return
        if self._case.course is Course.REQUEST and not judge.said:
            judge.broke = True
            await wire.leave()
            return
        await self._await_answer()
        if self._case.course is Course.TRANSCRIPTION or self._case.dialect in OPENAI_DIALECTS:
            # These have no goodbye.
            judge.broke = True
            await wire.leave()
            return
        if not judge.is_over and not self._is_mute and self._case.course is not Course.REQUEST:
            goodbye = close_of(self._case.dialect)
            judge.did(Step(kind="bye", value=goodbye))
            judge.says(json.dumps(goodbye))
            await wire.send(json.dumps(goodbye))
        if not await judge.until(lambda: False, self._pace.answer_s):
            judge.found("hang", f"no end in {judge.state}")

    # -- the other client -----------------------------------------------------------------------

    async def _occupy(self) -> None:
        other = Judge(attrs.evolve(self._case, steps=()))
        self._occupant = self._connect(self._case.connect, other)
        await self._occupant.__aenter__()
        await other.until(lambda: other.has_slot, self._pace.answer_s)
        self._judge.holds_slot = other.has_slot

    async def _vacate(self) -> None:
        self._judge.holds_slot = False
        occupant, self._occupant = self._occupant, None
        if occupant is not None:
            await occupant.__aexit__(None, None, None)


def frame_of(step: Step, bytes_max: int) -> str | bytes | None:
    """A step's message, with its markers replaced, or `MarkerError`; None above `bytes_max`."""
    match step.kind:
        case "send":
            frame: str | bytes = json.dumps(fill(step.value), ensure_ascii=False)
        case "send_text":
            frame = str(step.value)
        case "send_binary":
            frame = bytes(min(int(step.value), MATERIAL_BYTES_MAX))
        case _:
            size = int(step.value)
            return None if size > bytes_max else "\u00e9" * (size // 2)
    return None if frame_bytes(frame) > bytes_max else frame


def close_of(dialect: str) -> dict[str, Any]:
    """A dialect's message that ends a session."""
    return {"type": "stop" if dialect == "legacy-duplex" else "session.close"}


# -- afterwards -----------------------------------------------------------------------------------


def probe_case(case: Case, *, with_sound: bool) -> Case:
    """The case of a well-behaved client after another case, with a second of sound if wanted."""
    steps = [Step(kind="await", value="turn"), Step(kind="send", value=init_of(case))]
    steps.append(Step(kind="await", value="answer"))
    if with_sound and case.course is Course.DUPLEX and case.script in {"default", "speaks"}:
        steps += [Step(kind="send", value=append_of(case)), Step(kind="await", value="answer")]
    if case.course is Course.TRANSCRIPTION:
        steps += [Step(kind="send", value=append_of(case))] if with_sound else []
        commit = {"type": "input_audio_buffer.commit", "final": True}
        steps += [Step(kind="send", value=commit), Step(kind="await", value="answer")]
    return attrs.evolve(case, steps=tuple(steps), slots=None)


async def probe(
    case: Case, judge: Judge, connect: Connect, pace: Pace, *, with_sound: bool
) -> None:
    """Play a well-behaved client after a case, and add its findings to the case's."""
    good = probe_case(case, with_sound=with_sound)
    other = Judge(good)
    await Player(good, other, connect, pace).play()
    for finding in other.findings:
        judge.found(finding.kind, f"afterwards: {finding.label}", finding.detail)


def init_of(case: Case) -> dict[str, Any]:
    """The shortest first message of a session."""
    match case.dialect:
        case "duplex-v1":
            return {"type": "session.update", "session": {"instructions": ""}}
        case "legacy-duplex":
            return {"type": "prepare", "system_prompt": ""}
        case "legacy-chat":
            return {"messages": [{"role": "user", "content": "hello"}], "tts": {"enabled": False}}
        case "transcription":
            return {"type": "session.update", "model": "tiny"}
        case "transcription-responses":
            return {"type": "session.create", "model": "tiny"}
        case "live":
            return {"type": "session.start", "session": {"model": "tiny"}}
        case "openai":
            return {"type": "session.update", "session": {"type": "realtime"}}
        case "openai-transcription":
            return {"type": "session.update", "session": {"type": "transcription"}}
    return {"type": "session.init", "payload": {}}


def append_of(case: Case) -> dict[str, Any]:
    """A message with a second of sound."""
    match case.dialect:
        case "legacy-duplex":
            return {"type": "audio_chunk", "audio": PROBE_AUDIO}
        case "live":
            return {"type": "session.input_audio.append", "audio": PROBE_AUDIO}
        case "realtime":
            return {"type": "input.append", "input": {"audio": PROBE_AUDIO}}
    return {"type": "input_audio_buffer.append", "audio": PROBE_AUDIO}
