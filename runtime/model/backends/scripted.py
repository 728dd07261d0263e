"""A backend without a model, which plays a script; what it plays of units is here.

A script is a pure function of a unit and the session's seed, so the same session gives the same
bytes. Time passes only in `anyio.sleep`, so tests can use virtual time. An interrupt, also one
before its unit begins, takes effect before the next of `Step.steps` equal steps, and
`run(unit, cut)` stops there with the same bytes (B6). A forced unit takes and counts the
recorded ids, and keeps its scripted speech. Where a session has tools, a script of its own calls
them and says what they returned: the calls are written four characters a step, in the silent
parts of as many units as that takes. `force_listen` and `generate_audio` override the
script; sampling settings and windows are ignored. `Rules` checks the callers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal

import anyio
import attrs

from protocol.values import model as md
from protocol.values.records import digest

from . import base
from . import scripted_chat as chats
from .tool_calls import span_of

SLOTS: Final = 4
"""Enough for a demonstration; a script costs nothing."""
CONTEXT_LIMIT: Final = 8192
"""The model's own, as are the counts below (model.md)."""
PROMPT_TOKENS_MIN: Final = 10
VOICE_BYTES_PER_TOKEN: Final = md.UNIT_BYTES // 10
PREFILL_TOKENS: Final = 11
FRAME_TOKENS: Final = 64
"""Embeddings of a frame, without its two markers; frames are not sliced here."""
FINALIZE_TOKENS: Final = 2
EVENT_TOKENS: Final = 7
"""Of an event, without its text."""
SILENT_BUDGET: Final = 25
"""Steps of a silent part."""
NO_ACTION_ID: Final = 151_767
SILENT_EOS_ID: Final = 151_768
_MARKS: Final = {"call": (151_657, 151_658), "think": (151_667, 151_668), "text": (0, 1)}
_OPENERS: Final = frozenset(opener for opener, _ in _MARKS.values())
Token = tuple[int, md.Span | None]
"""An id, and what it closes."""


@attrs.frozen(kw_only=True)
class Speaks:
    """The model speaks; `pcm` is float32 LE, 24 kHz mono."""

    text: str
    pcm: bytes
    end_of_turn: bool = False


@attrs.frozen(kw_only=True)
class Call:
    """A call other than a unit: its duration, and any fault at its end."""

    duration_s: float = 0.0
    fault: chats.Fault | None = None


@attrs.frozen(kw_only=True)
class Step:
    """The outcome of one unit; by default, the model listens.

    Attributes:
        fault: instead: `context_full` before feeding, `hang` in prefill, others at generate's end.
        generate_s: seconds of generate, over all its steps.
        steps: steps of generate, at least 1; a unit can be cut before each of them.
        rollback: its rollback after a failure.
        silent: what the model begins to write in silence, by kind and text; only with tools.
        silent_s: seconds of a step of the silent part.
        silent_fails: that part fails, and is undone.
    """

    speech: Speaks | None = None
    fault: chats.Fault | None = None
    prefill_s: float = 0.05
    generate_s: float = 0.02
    steps: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    finalize: Call = Call(duration_s=0.037)
    rollback: Call = Call()
    silent: tuple[md.Span, ...] = ()
    silent_s: float = 0.015
    silent_fails: bool = False


Script = Callable[[md.Unit, int], Step]
"""Decides a unit from its value and the session's seed; must be pure."""


AS_ASKED: Final = Speaks(text="as you ask.", pcm=chats.tone(0, 0, samples=12_000), end_of_turn=True)
"""What a unit says that may not listen where its script does."""


def default_script(unit: md.Unit, seed: int) -> Step:
    """Listen for three units, speak for two, and so on; the second is shorter and ends the turn."""
    if unit.index % 5 < 3:
        return Step()
    last = unit.index % 5 == 4
    text = f"that was second {unit.index}." if last else f"this is second {unit.index}, "
    pcm = chats.tone(unit.index, seed, samples=18_000 if last else md.OUTPUT_RATE_HZ)
    speech = Speaks(text=text, pcm=pcm, end_of_turn=last)
    return Step(speech=speech, prefill_s=0.08, generate_s=0.4, steps=8)


CallScript = Callable[[Step, md.Unit, Sequence[md.Tool]], Step]
"""Adds to what the script decided of a unit, in a session with tools; must be pure."""


def calling(
    name: str = "", arguments: str = "{}", *, at: int = 2, every: int = 10, says: str = "it is {}."
) -> CallScript:
    """Call a tool, by default the first, at a unit and every so many later; say what it returned.

    `says`: with the result in place of `{}`.
    """

    def decide(step: Step, unit: md.Unit, tools: Sequence[md.Tool]) -> Step:
        if unit.index % every == at:
            body = f'{{"name": "{name or tools[0].name}", "arguments": {arguments}}}'
            step = attrs.evolve(step, silent=(md.Span(kind="call", text=body),))
        results = [each.text for each in unit.inputs if each.kind == "result"]
        if not results:
            return step
        text = says.replace("{}", results[0][: chats.SHOWN_CHARS])
        pcm = chats.tone(unit.index, 0, samples=12_000)
        return attrs.evolve(step, speech=Speaks(text=text, pcm=pcm, end_of_turn=True))

    return decide


@attrs.define
class SilentWriter:
    """What a session writes in silence: what its units begin, in as many units as that takes."""

    tools: Sequence[md.Tool]
    _unwritten: deque[Token] = attrs.Factory(deque)

    def begin(self, step: Step) -> int:
        """Begin what a unit has; return how many steps its silent part takes, but for its end."""
        if step.silent_fails:
            return 0
        for span in step.silent:
            opener, closer = _MARKS[span.kind]
            pieces = range(0, len(span.text), chats.TOKEN_CHARS)
            ids = [
                chats.draw("silent", span.text[at : at + chats.TOKEN_CHARS])[0] * 587
                for at in pieces
            ]
            self._unwritten.extend((index, None) for index in (opener, *ids))
            whole = span_of(span.text, self.tools) if span.kind == "call" else span
            self._unwritten.append((closer, whole))
        return min(len(self._unwritten), SILENT_BUDGET)

    def write(self, step: Step, cut: int | None = None) -> md.Silent:
        """Write as far as the budget goes, or up to the step before which it is cut."""
        if step.silent_fails:
            return md.Silent(end="failed", is_open=self._is_writing)
        if not self._unwritten:
            return md.Silent(end="no_action", decided_ids=(NO_ACTION_ID,))
        count = min(len(self._unwritten), SILENT_BUDGET) if cut is None else cut
        tokens = [self._unwritten.popleft() for _ in range(count)]
        end: md.SilentEnd = "budget" if cut is None else "cut"
        ids = [index for index, _ in tokens]
        if not self._unwritten and count < SILENT_BUDGET:
            ids, end = [*ids, SILENT_EOS_ID], "eos"
        spans = tuple(span for _, span in tokens if span is not None)
        return md.Silent(end=end, spans=spans, is_open=self._is_writing, decided_ids=tuple(ids))

    def rewrite(self, step: Step, silent: md.Silent | None) -> md.Silent | None:
        """Write what was recorded; None: nothing was written. `BackendError` if it differs."""
        if silent is None or silent.end != "failed":
            self.begin(step)
        for index in () if silent is None else silent.decided_ids:
            if index in (NO_ACTION_ID, SILENT_EOS_ID):
                continue
            if not self._unwritten or self._unwritten.popleft()[0] != index:
                raise base.BackendError("the silent part differs from the recorded one")
        return silent

    @property
    def _is_writing(self) -> bool:
        """Whether something that was begun is not written to its end."""
        return bool(self._unwritten) and self._unwritten[0][0] not in _OPENERS


def speech_ids(text: str, seed: int, *, end_of_turn: bool, ids_max: int) -> tuple[int, ...]:
    """Make the ids that a speaking unit feeds: at most one less than it may decide."""
    words = chats.draw("words", text, seed)[: len(text) // chats.TOKEN_CHARS]
    ids = (chats.SPEAK_ID, *(word * 587 for word in words), *(chats.TURN_EOS_ID,) * end_of_turn)
    return ids[: ids_max - 1]


def force(made: md.UnitResult, forced: base.Forced) -> base.ForcedResult:
    """Replace a unit's ids by recorded ones; see `Forces.run_forced`."""
    ends = forced.decided_ids[-1:] in {(chats.CHUNK_EOS_ID,), (chats.LISTEN_ID,)}
    fed_ids = forced.decided_ids[:-1] if ends else forced.decided_ids
    pairs = zip(forced.decided_ids, made.decided_ids, strict=False)
    choices = [
        base.Choice(stage="llm", step=step, recorded=recorded, own=own)
        for step, (recorded, own) in enumerate(pairs)
        if recorded != own
    ]
    result = attrs.evolve(
        made,
        kv_length=made.kv_length - len(made.fed_ids) + len(fed_ids),
        decided_ids=forced.decided_ids,
        fed_ids=fed_ids,
        codec_ids=forced.codec_ids,
    )
    return base.ForcedResult(result=result, choices=tuple(choices))


class ScriptedBackend:
    """Plays scripts.

    Args:
        script: decides the units.
        chat: decides the chat turns.
        transcription: decides the chunks of transcriptions.
        opening: decides the outcome of opening.
        release: the outcome of every release.
        rebuild: the outcome of every past unit of a rebuild.
        slots: maximum concurrent sessions.
        context_limit: tokens.
        can_rollback: whether a failed unit can be undone.
        can_speak: whether a unit can be made to speak.
        tools: whether its chat takes tools.
        duplex_tools: whether its duplex sessions take tools.
        calls: decides the calls of sessions with tools.
        sliding_windows: the windows that it accepts; none of them slides.
    """

    def __init__(
        self,
        script: Script = default_script,
        *,
        chat: chats.ChatScript = chats.default_answer,
        transcription: chats.HearingScript = chats.default_hearing,
        opening: Callable[[md.Opening], Call] = lambda _: Call(),
        release: Call = Call(),
        rebuild: Call = Call(),
        slots: int = SLOTS,
        context_limit: int = CONTEXT_LIMIT,
        can_rollback: bool = True,
        can_speak: bool = True,
        tools: bool = True,
        duplex_tools: bool = False,
        calls: CallScript = calling(),  # noqa: B008 - a pure function
        sliding_windows: tuple[md.SlidingWindow, ...] = ("off",),
    ) -> None:
        self.script, self.calls = script, calls
        self._answer, self._transcription = chat, transcription
        self.release, self.rebuild = release, rebuild
        self.rules = chats.Rules(slots, context_limit)
        self.violations, self.held_slots = self.rules.violations, self.rules.held_slots
        self._opening = opening
        self.info = base.BackendInfo(
            name="scripted",
            modes=("video", "audio", "chat", "transcription"),
            slots=slots,
            context_limit=context_limit,
            sliding_windows=sliding_windows,
            can_rollback=can_rollback,
            deterministic=True,
            can_rebuild=True,
            can_speak=can_speak,
            fingerprint={"backend": "scripted", "version": "1"},
            tools=tools,
            duplex_tools=duplex_tools,
        )

    async def open(self, opening: md.Opening, *, slot: int) -> ScriptedSession:
        """Open a session; a cancelled one leaves the slot empty."""
        self.rules.hold(slot)
        try:
            await _perform(self._opening(opening), "open")
            prompt_length = PROMPT_TOKENS_MIN + len(opening.instructions) // chats.TOKEN_CHARS
            prompt_length += len(opening.voice.llm_pcm) // VOICE_BYTES_PER_TOKEN
            if prompt_length > self.info.context_limit:
                raise base.ContextFull(f"a prompt of {prompt_length} tokens")
        except BaseException:
            self.held_slots.discard(slot)
            raise
        return ScriptedSession(self, opening, slot, md.Opened(prompt_length=prompt_length))

    async def chat(self, *, slot: int) -> chats.ScriptedTurn:
        """Take a slot for a turn."""
        self.rules.hold(slot)
        return chats.ScriptedTurn(self.rules, self._answer, slot)

    async def transcribe(self, *, slot: int) -> chats.ScriptedTranscript:
        """Take a transcription."""
        self.rules.hold(slot)
        return chats.ScriptedTranscript(self.rules, self._transcription, slot)


_Phase = Literal["ready", "ran", "failed", "broken", "released"]
_ALLOWED: Final[dict[_Phase, tuple[tuple[str, ...], str]]] = {
    "ready": (("run_unit", "rebuild", "release"), "B1/B3: no unit has run or failed"),
    "ran": (("finalize", "release"), "B1: the unit that ran is not finalized"),
    "failed": (("rollback", "release"), "B3: the unit that failed is not rolled back"),
    "broken": (("release",), "B3: the session's state is unknown"),
    "released": ((), "B5: the session is released"),
}
"""By phase: the allowed calls, and the rule that any other breaks."""


class ScriptedSession:
    """One session's state (B8)."""

    def __init__(self, backend: ScriptedBackend, opening: md.Opening, slot: int, opened: md.Opened):
        self._backend, self._rules = backend, backend.rules
        self._opening = opening
        self._slot = slot
        self.opened = opened
        self._phase: _Phase = "ready"
        self._running: str | None = None
        self._index = -1
        self._step = Step()
        self._cut: md.Cut | None = None
        self._interrupted_index: int | None = None
        self._kv_length = opened.prompt_length
        self._writer = SilentWriter(opening.tools)

    async def run(self, unit: md.Unit, cut: md.Cut | None = None) -> md.UnitResult:
        """Play one unit."""
        expected = max(unit.index, self._index + 1)  # a replay omits failed units
        with self._call("run_unit", unit.index, expected=expected):
            self._index = unit.index
            self._step = step = self._decide(unit)
            await _perform(Call(duration_s=step.prefill_s), "prefill")
            if step.fault == "hang":
                await anyio.sleep_forever()
            self._cut = await self._generate(cut)
            if self._cut is None and step.fault is not None:
                self._phase = "failed" if step.fault == "fail" else "broken"
                await _perform(Call(fault=step.fault), "generate")
            result = _result(unit, step, self._cut, self._opening, self._kv_length)
            self._kv_length = result.kv_length
            self._phase = "ran"
            return result

    async def run_forced(
        self, unit: md.Unit, forced: base.Forced, cut: md.Cut | None = None
    ) -> base.ForcedResult:
        """Play one unit with recorded ids."""
        made = force(await self.run(unit, cut), forced)
        self._kv_length = made.result.kv_length
        return made

    def interrupt(self, index: int) -> None:
        """Cut unit `index` before its next step, also before it begins; then its silent part."""
        self._interrupted_index = index

    async def finalize(self, index: int, *, interrupted: bool) -> md.Finalized:
        """Write in silence, then close the unit."""
        return await self._finalize(index, interrupted, self._write_silently)

    async def finalize_again(
        self, index: int, *, interrupted: bool, silent: md.Silent | None, forced: bool
    ) -> md.Finalized:
        """Close the unit, with its silent part as it was recorded, or up to where it was cut."""

        async def write() -> md.Silent | None:
            if silent is None or forced:
                return self._writer.rewrite(self._step, silent)
            is_cut = silent.end == "cut"
            return await self._write_silently(len(silent.decided_ids) if is_cut else None)

        return await self._finalize(index, interrupted, write)

    async def _finalize(
        self, index: int, interrupted: bool, write: Callable[[], Awaitable[md.Silent | None]]
    ) -> md.Finalized:
        with self._call("finalize", index, expected=self._index):
            if self._cut is not None and not interrupted:
                self._rules.violate(f"B6: unit {index} was cut, its finalize does not say so")
            silent = await write() if self._opening.tools else None
            await _perform(self._step.finalize, "finalize")
            self._phase = "ready"
            return self._closed(silent, interrupted=interrupted)

    async def _write_silently(self, cut: int | None = None) -> md.Silent:
        """Let the steps of the silent part pass, up to where it is cut."""
        for step in range(self._writer.begin(self._step)):
            is_cut = self._interrupted_index == self._index and step >= base.SILENT_STEPS_MIN
            if cut == step or is_cut:
                return self._writer.write(self._step, step)
            await anyio.sleep(self._step.silent_s)
        return self._writer.write(self._step)

    def _closed(self, silent: md.Silent | None, *, interrupted: bool) -> md.Finalized:
        written = () if silent is None else silent.decided_ids
        self._kv_length += FINALIZE_TOKENS + len(written)
        return md.Finalized(
            index=self._index,
            kv_length=self._kv_length,
            fed_ids=(
                chats.CHUNK_EOS_ID if interrupted or self._step.speech else chats.LISTEN_ID,
                *written,
                chats.UNIT_END_ID,
            ),
            cost_us=round(self._step.finalize.duration_s * chats.US_PER_S),
            silent=silent,
        )

    async def rollback(self, index: int) -> None:
        """Undo the failed unit, whose tokens were never counted (B3)."""
        with self._call("rollback", index, expected=self._index):
            if not self._backend.info.can_rollback:
                self._rules.violate("B3: rollback of a backend that cannot")
            await _perform(self._step.rollback, "rollback")
            self._phase = "ready"

    async def rebuild(self, past: Sequence[md.PastUnit], *, exact: bool) -> md.Finalized:
        """Play past units with their recorded ids."""
        if not 1 <= len(past) <= md.PAST_UNITS_MAX:
            self._rules.violate(f"B1: {len(past)} past units, not 1 to {md.PAST_UNITS_MAX}")
        for each in past:
            finalized = await self._rebuild(each, exact=exact)
        return finalized

    async def _rebuild(self, past: md.PastUnit, *, exact: bool) -> md.Finalized:
        unit, recorded = past.unit, past.result
        with self._call("rebuild", unit.index, expected=max(unit.index, self._index + 1)):
            self._index, self._cut = unit.index, recorded.cut
            self._step = self._decide(unit)
            await _perform(self._backend.rebuild, "rebuild")
            result = _result(unit, self._step, self._cut, self._opening, self._kv_length)
            made = force(result, base.Forced.of(recorded))
            if not exact:
                made = attrs.evolve(made, choices=())
            base.require_recorded(recorded, made, ("input_hash", "fed_ids", "kv_length"))
            self._kv_length = made.result.kv_length
            self._phase = "ready"
            tools = self._opening.tools
            silent = self._writer.rewrite(self._step, past.silent) if tools else None
            return self._closed(silent, interrupted=past.interrupted)

    async def release(self) -> None:
        """Free the slot."""
        with self._call("release", self._index, expected=self._index):
            await _perform(self._backend.release, "release")
            self._backend.held_slots.discard(self._slot)
            self._phase = "released"

    @contextmanager
    def _call(self, name: str, index: int, *, expected: int) -> Iterator[None]:
        """Check the order of calls; a call without a proper end leaves `broken`."""
        if self._running is not None:
            rule = "B4" if name == "release" else "B1"
            self._rules.violate(f"{rule}: {name} while {self._running} is in flight")
        allowed, rule = _ALLOWED[self._phase]
        if name not in allowed:
            self._rules.violate(f"{rule}; {name} was called")
        if index != expected:
            self._rules.violate(f"B9: {name} of unit {index}, not {expected}")
        self._running = name
        self._phase = "broken"
        try:
            yield
        finally:
            self._running = None

    def _decide(self, unit: md.Unit) -> Step:
        """Ask the script; refuse a unit whose worst case does not fit, before it is fed (B10)."""
        if len(unit.pcm) != md.UNIT_BYTES:
            self._rules.violate(f"B1: unit {unit.index} has {len(unit.pcm)} bytes of PCM")
        step, tools = self._backend.script(unit, self._opening.seed), self._opening.tools
        if tools:
            step = self._backend.calls(step, unit, tools)
        worst = self._kv_length + _prefill_tokens(unit) + FINALIZE_TOKENS
        worst += SILENT_BUDGET if tools else 0
        worst += self._opening.config.max_new_speak_tokens_per_chunk
        if step.fault == "context_full" or worst > self._backend.info.context_limit:
            self._phase = "ready"
            raise base.ContextFull(f"unit {unit.index} may need {worst} tokens")
        if unit.force_listen:
            return attrs.evolve(step, speech=None)
        return attrs.evolve(step, speech=AS_ASKED) if unit.force_speak and not step.speech else step

    async def _generate(self, cut: md.Cut | None) -> md.Cut | None:
        """Let the steps pass; return where it was cut, or None."""
        for step in range(self._step.steps):
            here = md.Cut(stage="llm", step=step)
            if self._interrupted_index == self._index or cut == here:
                return here
            await anyio.sleep(self._step.generate_s / self._step.steps)
        return None


async def _perform(call: Call, name: str) -> None:
    await anyio.sleep(call.duration_s)
    if call.fault == "hang":
        await anyio.sleep_forever()
    if call.fault is not None:
        raise chats.FAULTS[call.fault](f"the script says so ({name}: {call.fault})")


def _result(
    unit: md.Unit, step: Step, cut: md.Cut | None, opening: md.Opening, kv_length: int
) -> md.UnitResult:
    """Make a unit's result; for a cut unit, the share of its finished steps."""
    speech = step.speech or Speaks(text="", pcm=b"")
    text, pcm = speech.text, speech.pcm if opening.config.generate_audio else b""
    ids: tuple[int, ...] = ()
    if step.speech:
        ids_max = opening.config.max_new_speak_tokens_per_chunk
        ids = speech_ids(text, opening.seed, end_of_turn=speech.end_of_turn, ids_max=ids_max)
    done = step.steps if cut is None else cut.step
    samples = len(pcm) // md.SAMPLE_BYTES * done // step.steps
    fed_ids = ids[: len(ids) * done // step.steps]
    terminator = () if cut else (chats.CHUNK_EOS_ID if step.speech else chats.LISTEN_ID,)
    prefill_us = round(step.prefill_s * chats.US_PER_S)
    llm_us = round(step.generate_s * chats.US_PER_S) * done // step.steps
    wall_us = prefill_us + llm_us
    return md.UnitResult(
        index=unit.index,
        is_listen=cut is not None or step.speech is None,
        text=text[: len(text) * done // step.steps],
        pcm=pcm[: samples * md.SAMPLE_BYTES],
        end_of_turn=cut is None and speech.end_of_turn,
        kv_length=kv_length + _prefill_tokens(unit) + len(fed_ids),
        decided_ids=fed_ids + terminator,
        fed_ids=fed_ids,
        codec_ids=tuple(range(0, 37 * -(-samples // chats.CODE_SAMPLES), 37)),
        cut=cut,
        input_hash=digest(
            (unit.pcm, unit.frames, unit.force_listen, unit.max_slice_nums)
            + ((True,) if unit.force_speak else ())
            + ((unit.inputs,) if unit.inputs else ())
        ),
        vision_slices=len(unit.frames),
        vision_tokens=len(unit.frames) * FRAME_TOKENS,
        costs=md.Costs(prefill_us=prefill_us, generate_us=llm_us, llm_us=llm_us, wall_us=wall_us),
    )


def _prefill_tokens(unit: md.Unit) -> int:
    tokens = PREFILL_TOKENS + len(unit.frames) * (FRAME_TOKENS + 2)
    for each in unit.inputs:
        tokens += EVENT_TOKENS + -(-len(each.text) // chats.TOKEN_CHARS)
    return tokens
