"""One session of the duplex model: open, run a unit, finalize, roll back, rebuild, release.

This file keeps the order of calls, and the state before the unit, for `rollback`. Opening, units,
finalizing and rebuilding are generators of requests (`work.py`), which `EngineSession` has the
engine run; `UnitRun` (`unit.py`) has what a unit does.

`interrupt` may come from any thread: the named unit stops before its next step of the language
model, the speech decoder or the vocoder. The result says where, and `unit(unit, cut)` stops there
again. An interrupt before its unit begins waits for it, since the caller believes it running.

A rebuild that need not be exact feeds past units in long prefills: a `DecidedUnit` applies the
rules of `unit.py` to known decisions and feeds nothing; its rows wait in `WaitingRows` for those of
later units. The same units give the same splits, but other splits than those recorded, so keys and
values may differ from the recorded session's by rounding.
"""

from __future__ import annotations

import logging
import time
from typing import Final, Literal

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.values import model as md

from ..base import BackendError, BackendGone, ContextFull, Forced, ForcedResult, require_recorded
from . import state as states
from .audio import samples_of
from .checkpoint import CODES_A_UNIT
from .device import pin
from .logits import TokenLogits
from .runner import ModelRunner, failing
from .sampling import Candidates, Teacher, draws, fed_max
from .slot_layout import SilentRun
from .tokens import Tokens
from .unit import Pictures, Setting, UnitRun, input_hash
from .vision import Slicing, read_jpeg
from .vocoder import Prepare
from .work import Feed, LlmOutput, Steps

_log = logging.getLogger("antiphon.model")

FINALIZE_TOKENS: Final = 2
"""The terminator and `</unit>`."""
REBUILT_FIELDS: Final = ("input_hash", "decided_ids", "fed_ids", "kv_length")
"""What a past unit must have as recorded in any rebuild, ..."""
EXACT_FIELDS: Final = (*REBUILT_FIELDS, "logits_hash")
"""... in an exact one, ..."""
SPOKEN_FIELDS: Final = ("codec_ids", "cut")
"""... and also with speech."""

UNDECIDED: Final = md.Silent(end="failed")
"""The silent part of a unit whose worker was lost before it was finalized."""

Phase = Literal["new", "ready", "ran", "failed", "collected", "lost", "released"]
"""`collected`: rows of a rebuild wait to be fed."""


class SteppedSession:
    """One session in one slot, which must be empty; its generators never overlap."""

    def __init__(self, runner: ModelRunner, tokens: Tokens, opening: md.Opening, slot: int) -> None:
        self._runner, self._opening = runner, opening
        self._tokens = tokens.for_session(opening.tools)
        self._takes_events = self._tokens is tokens
        self._slot = slot
        self._slicing = Slicing.of(runner.config.vision)
        self._setting: Setting
        self._state: states.SessionState
        self._before: states.SessionState
        self._phase: Phase = "new"
        self._terminator, self._spoke = tokens.ids.listen, False
        self._running = -1
        self._interrupted = -1
        self._waiting = WaitingRows(slot=slot)
        self.opened: md.Opened

    def open(self) -> Steps[md.Opened]:
        """Read the reference audio; then prefill the prompt. On failure, the slot is left empty.

        `ContextFull`: the prompt does not fit; `BackendError`: the reference audio is malformed.
        """
        vocoder, is_spoken = self._runner.vocoder, self._opening.config.generate_audio
        reference = samples_of(self._opening.voice.tts_pcm, states.MALFORMED).numpy()
        return self._opening_steps(
            vocoder.open(reference) if vocoder is not None and is_spoken else None
        )

    def _opening_steps(self, voice: object) -> Steps[md.Opened]:
        self._require("new")
        try:
            return (yield from self._open(voice))
        except BaseException:
            self.release()
            raise

    def _open(self, voice: object) -> Steps[md.Opened]:
        self._setting = Setting(
            parts=self._runner.parts,
            tokens=self._tokens,
            vocoder=self._runner.vocoder,
            opening=self._opening,
            slot=self._slot,
            voice=voice,
        )
        if voice is not None:
            self._runner.reserve(self._slot, 0, speech=1, is_new=True)
            yield Prepare(voice=voice)
        filled: states.Prefilled = yield from states.prefill(
            self._runner, self._tokens, self._opening, self._slot
        )
        self._state = states.SessionState(layout=filled.layout, length=filled.layout.length)
        self._before, self._phase = self._state, "ready"
        self.opened = md.Opened(
            prompt_length=self._state.length,
            fed_ids=filled.fed_ids,
            takes_events=self._takes_events,
        )
        return self.opened

    def look(self, unit: md.Unit) -> Pictures:
        """Decode and slice a unit's frames, in any thread; `BackendError` if one is invalid."""
        try:
            pixels = [read_jpeg(jpeg) for jpeg in unit.frames]
        except ValueError as error:
            raise BackendError(f"unit {unit.index} has a frame that cannot be decoded") from error
        like = self._runner.llm.keys
        return [
            [pin(part, like) for part in self._slicing.cut(frame, unit.max_slice_nums)]
            for frame in pixels
        ]

    def unit(self, unit: md.Unit, cut: md.Cut | None) -> Steps[md.UnitResult]:
        """Look at a unit; then prefill and generate it; see `ModelSession.run`.

        `ContextFull`: the worst case does not fit; nothing was fed. `BackendError`: it failed, or
        was called out of order.
        """
        return self._unit(unit, self.look(unit), cut, None)

    def forced_unit(self, unit: md.Unit, cut: md.Cut | None, forced: Forced) -> Steps[ForcedResult]:
        """Look at a unit; then run it as it was recorded; see `unit` and `Forces.run_forced`.

        `ContextFull`: the worst case does not fit; nothing was fed. `BackendError`: it failed, was
        called out of order, or the model lacks an id.
        """
        return self._forced_unit(unit, self.look(unit), cut, forced)

    def _forced_unit(
        self, unit: md.Unit, pictures: Pictures, cut: md.Cut | None, forced: Forced
    ) -> Steps[ForcedResult]:
        teacher = Teacher(forced, self._runner.config.tts.eos)
        result = yield from self._unit(unit, pictures, cut, teacher)
        choices, listen_decision = tuple(teacher.choices), teacher.listen_decision
        return ForcedResult(result=result, choices=choices, listen_decision=listen_decision)

    def _unit(
        self,
        unit: md.Unit,
        pictures: Pictures,
        cut: md.Cut | None,
        teacher: Teacher | None,
        *,
        past: md.UnitResult | None = None,
        is_mute: bool = False,
    ) -> Steps[md.UnitResult]:
        self._require("ready")
        self._check(unit, pictures, cut, is_mute=is_mute)

        def stop(stage: md.Stage, step: int) -> bool:
            if cut is not None:
                return cut == md.Cut(stage=stage, step=step)
            return self._interrupted == unit.index

        before = self._state
        if before.audio_units == self._runner.config.audio.units:
            before = before.but(overwritten=self._runner.first_block(self._slot))
        self._state = self._before = before
        self._running, self._phase = unit.index, "failed"
        run = UnitRun(
            setting=self._setting,
            unit=unit,
            pictures=pictures,
            state=self._state,
            stop=stop,
            teacher=teacher,
            past=past,
            is_mute=is_mute,
        )
        with failing(f"unit {unit.index}"):
            result = yield from run.run()
        self._state, self._terminator, self._phase = run.state, run.terminator, "ran"
        self._spoke = bool(run.fed)
        return result

    def interrupt(self, index: int) -> None:
        """Cut unit `index` before its next step; safe from any thread."""
        self._interrupted = index

    def finalize(self, index: int, *, interrupted: bool) -> Steps[md.Finalized]:
        """Feed the terminator and `</unit>`, then slide; see `BackendSession.finalize`.

        An interrupted unit ends with `chunk_eos`, and its turn's speech state is dropped.
        `BackendError` if called out of order.
        """
        return self._finalize(index, interrupted=interrupted)

    def finalize_again(
        self, index: int, *, interrupted: bool, silent: md.Silent | None, forced: bool
    ) -> Steps[md.Finalized]:
        """Finalize a unit whose silent part was recorded; see `CallsTools.finalize_again`."""
        recorded = silent or UNDECIDED
        return self._finalize(index, interrupted=interrupted, recorded=recorded, forced=forced)

    def _finalize(
        self,
        index: int,
        *,
        interrupted: bool,
        recorded: md.Silent | None = None,
        forced: bool = False,
    ) -> Steps[md.Finalized]:
        self._require("ran", index)
        began = time.perf_counter_ns()
        self._phase = "lost"  # Until it is complete: a window may have moved keys and values.
        silent: md.Silent | None = None
        fed: tuple[int, ...] = (self._last(interrupted=interrupted), self._tokens.ids.unit_end)
        before, run = self._state, self._silent_run(self._state)
        if run is None:
            yield from self._feed_ids(fed)
        else:
            rest = fed[:1] + run.opening()
            try:
                with failing(f"the silent part of unit {index}"):
                    rest = yield from self._decide_silently(run, rest, recorded, forced=forced)
            except Exception as error:
                if forced or isinstance(error, BackendGone):
                    raise
                _log.warning("the silent part of unit %d failed", index, exc_info=True)
                self._state = before
                run.give_up()
                rest = fed[:1] + run.opening()
            yield from self._feed_ids((*rest, *run.closing()))
            fed = (*fed[:1], *run.opening(), *run.decided, *run.closing())
            silent = run.silent()
        self._state = self._closed(before, len(fed), run, interrupted=interrupted)
        yield from self._slide()
        self._phase = "ready"
        return md.Finalized(
            index=index,
            kv_length=self._state.length,
            fed_ids=fed,
            cost_us=(time.perf_counter_ns() - began) // 1000,
            silent=silent,
        )

    def _last(self, *, interrupted: bool) -> int:
        """The id that ends a unit's speech."""
        ids = self._tokens.ids
        if self._tokens.slots is not None:
            return ids.chunk_eos if self._spoke else ids.listen
        return ids.chunk_eos if interrupted else self._terminator

    def _silent_run(self, state: states.SessionState) -> SilentRun | None:
        """The silent part of the last unit; None if the layout has none."""
        if self._tokens.slots is None:
            return None
        return SilentRun(self._tokens.slots, state.silent_state, self._opening.tools, self._spoke)

    def _decide_silently(
        self, run: SilentRun, waiting: tuple[int, ...], recorded: md.Silent | None, *, forced: bool
    ) -> Steps[tuple[int, ...]]:
        """Decide the silent part up to its end; return the ids that are not fed yet."""
        config, index = self._opening.config, self._running
        numbers = draws(self._opening.seed, index, "silent", run.budget)
        for number in numbers:
            if recorded is not None:
                run.follow(recorded)
            elif self._interrupted == index:
                run.cut()
            if run.end is not None:
                break
            fed = yield from self._feed_ids(waiting)

            def rule(logits: Candidates, number: float = float(number)) -> int:
                logits.forbid(run.forbidden())
                logits.forbid_from(self._tokens.size)
                return logits.choose(number, config.temperature, config.top_k, config.top_p)

            if recorded is not None and forced:
                token = recorded.decided_ids[len(run.decided)]
            else:
                fed.logits.require_finite()
                token = fed.logits.settle(rule)
            run.take(token)
            waiting = (token,)
        return waiting

    def _feed_ids(self, ids: tuple[int, ...]) -> Steps[LlmOutput]:
        start, rows = self._state.length, self._runner.parts.embed(ids)
        fed: LlmOutput = yield Feed(slot=self._slot, start=start, rows=rows)
        self._state = self._state.but(length=start + len(ids))
        return fed

    def _closed(
        self, state: states.SessionState, count: int, run: SilentRun | None, *, interrupted: bool
    ) -> states.SessionState:
        """The state after the `count` ids that close a unit are fed."""
        length = state.length + count
        speech = states.Speech() if interrupted else state.speech
        self._runner.tts.trim(self._slot, speech.length)  # It is not undone any more.
        text_ids = () if interrupted else state.text_ids  # Withheld text was never spoken.
        text = tuple(index for index in text_ids if index not in self._tokens.control)
        span = states.Span(length=length - state.layout.length, text_ids=text)
        return state.but(
            layout=attrs.evolve(state.layout, spans=(*state.layout.spans, span)),
            length=length,
            speech=speech,
            overwritten=None,
            text_ids=(),
            silent_state=state.silent_state if run is None else run.left(),
        )

    def _slide(self) -> Steps[None]:
        window = self._opening.config.sliding_window
        self._state = yield from states.slide(
            self._runner, self._tokens, self._slot, self._state, window
        )

    def rebuild(self, past: md.PastUnit, *, exact: bool, is_last: bool) -> Steps[md.Finalized]:
        """Look at a past unit; then feed it and its finalize; see `Rebuilds.rebuild`.

        Unless `exact`, units without speech wait to be fed together, at most until one `is_last`.
        """
        return self._rebuild(past, self.look(past.unit), exact=exact, is_last=is_last)

    def _rebuild(
        self, past: md.PastUnit, pictures: Pictures, *, exact: bool, is_last: bool
    ) -> Steps[md.Finalized]:
        if self._phase == "collected":
            self._phase = "ready"
        self._require("ready")
        if past.unit.index <= self._running:
            raise BackendError(f"unit {past.unit.index} is not after unit {self._running}")
        try:
            if exact or past.is_voiced:
                yield from self._waiting.feed(self._state.length, is_last=True)
                finalized = yield from self._run_again(past, pictures, exact=exact)
            else:
                finalized = yield from self._collect(past, pictures)
                yield from self._waiting.feed(self._state.length, is_last=is_last)
        except BaseException:
            self._phase = "lost"
            raise
        self._phase = "collected" if self._waiting.rows else "ready"
        return finalized

    def _run_again(
        self, past: md.PastUnit, pictures: Pictures, *, exact: bool
    ) -> Steps[md.Finalized]:
        unit, recorded = past.unit, past.result
        teacher = Teacher(Forced.of(recorded), self._runner.config.tts.eos)
        result = yield from self._unit(
            unit, pictures, recorded.cut, teacher, past=recorded, is_mute=not past.is_voiced
        )
        fields = EXACT_FIELDS if exact else REBUILT_FIELDS
        choices = tuple(teacher.choices) if exact else ()
        require_recorded(
            recorded,
            ForcedResult(result=result, choices=choices),
            (*fields, *SPOKEN_FIELDS * past.is_voiced),
        )
        again = self.finalize_again(
            unit.index, interrupted=past.interrupted, silent=past.silent, forced=True
        )
        return (yield from again)

    def _collect(self, past: md.PastUnit, pictures: Pictures) -> Steps[md.Finalized]:
        unit, recorded = past.unit, past.result
        self._check(unit, pictures, recorded.cut, is_mute=True)
        run = DecidedUnit(
            setting=self._setting,
            unit=unit,
            pictures=pictures,
            state=self._state,
            stop=lambda stage, step: recorded.cut == md.Cut(stage=stage, step=step),
            is_mute=True,
            recorded=recorded.decided_ids,
        )
        with failing(f"unit {unit.index}"):
            yield from run.collect()
        made = attrs.evolve(
            recorded,
            input_hash=input_hash(unit),
            decided_ids=tuple(run.decided),
            fed_ids=tuple(run.fed),
            kv_length=run.state.length,
        )
        require_recorded(recorded, ForcedResult(result=made, choices=()), REBUILT_FIELDS)
        self._running, self._terminator = unit.index, run.terminator
        self._spoke = bool(run.fed)
        fed: tuple[int, ...] = (self._last(interrupted=past.interrupted), self._tokens.ids.unit_end)
        part = self._silent_run(run.state)
        if part is not None:
            with failing(f"unit {unit.index}"):
                part.repeat(past.silent or UNDECIDED)
            fed = (*fed[:1], *part.opening(), *part.decided, *part.closing())
        state = self._closed(run.state, len(fed), part, interrupted=past.interrupted)
        self._waiting.rows += [*run.rows, self._runner.parts.embed(fed)]
        self._before = self._state = state
        limit, window = self._runner.config.context_limit, self._opening.config.sliding_window
        if states.slid(state.layout, self._tokens, window, limit) is not state.layout:
            yield from self._waiting.feed(state.length, is_last=True)
            yield from self._slide()
        silent = None if part is None else part.silent()
        return md.Finalized(
            index=unit.index, kv_length=self._state.length, fed_ids=fed, silent=silent
        )

    def rollback(self, index: int) -> None:
        """Restore the state before unit `index`; `BackendError` if called out of order."""
        if self._phase == "ready" and index > self._running:
            return  # Refused before it began, as for a broken frame: nothing to undo.
        self._require("failed" if self._phase == "failed" else "ran", index)
        if self._before.overwritten is not None:
            self._runner.audio.put(self._slot, 0, self._before.overwritten)
        self._state = self._before.but(overwritten=None)
        self._interrupted, self._phase = -1, "ready"

    def release(self) -> None:
        """Wipe the slot; idempotent, and any other call fails afterwards."""
        if self._phase != "released":
            self._phase = "released"
            self._runner.clear(self._slot)
            self._waiting.rows.clear()
            for name in ("_setting", "_state", "_before"):  # They do not exist before `open`.
                self.__dict__.pop(name, None)

    def _require(self, phase: Phase, index: int | None = None) -> None:
        if self._phase != phase or (index is not None and index != self._running):
            wanted = phase if index is None else f"{phase} with unit {index}"
            raise BackendError(
                f"call out of order: session is {self._phase} with unit {self._running}, "
                f"not {wanted}"
            )

    def _check(
        self, unit: md.Unit, pictures: Pictures, cut: md.Cut | None, *, is_mute: bool = False
    ) -> None:
        if len(unit.pcm) != md.UNIT_BYTES:
            raise BackendError(f"unit {unit.index} has {len(unit.pcm)} bytes, not {md.UNIT_BYTES}")
        if cut is not None and cut.stage == "prefill":
            raise BackendError("prefill is one step here, and a unit is never cut in it")
        if not (is_mute or self._state.speech.is_complete):
            raise BackendError("the open turn was rebuilt without its speech")
        config, fed = self._runner.config, fed_max(self._opening.config)
        slices = sum(len(picture) for picture in pictures) * (config.vision.queries + 2)
        most = 1 + slices + config.audio.embeddings + fed + FINALIZE_TOKENS
        if self._tokens.slots is not None:
            most += max(0, len(self._tokens.slots.end_of_turn) - fed)
            is_seen = self._state.has_seen or bool(pictures)
            most += self._tokens.slots.rows_max(unit.inputs, is_seen=is_seen)
        if self._state.length + most > config.context_limit:
            raise ContextFull(
                f"unit {unit.index} may need {most} tokens; "
                f"{self._state.length} of {config.context_limit} are used"
            )
        speech, capacity = 0, self._runner.tts.capacity
        if self._setting.speaks and not self._setting.forces(unit):
            speech = self._state.speech.length + fed + 1 + CODES_A_UNIT
        if speech > capacity:
            raise ContextFull(f"the turn may need {speech} of {capacity} places")
        own = 0 if is_mute else speech
        self._runner.reserve(self._slot, self._state.length + most, speech=own)


# -- past units in long prefills ----------------------------------------------------------------

_NOT_FED: Final = LlmOutput(
    hidden=torch.zeros(0), logits=TokenLogits(torch.zeros(0, device="cpu"), is_finite=True)
)
"""In place of the language model's output, which a decided unit does not have."""


@attrs.define(kw_only=True)
class DecidedUnit(UnitRun):
    """A unit whose decided ids are `recorded`; `rows` are what it feeds, (T, width) each."""

    recorded: tuple[int, ...]
    rows: list[Tensor] = attrs.field(factory=list)

    def collect(self) -> Steps[None]:
        """Collect the unit's rows; `IndexError` if a decision is missing, or the model lacks it."""
        yield from self._prefill()
        self._close((yield from self._answer(_NOT_FED)))

    def _feed(self, rows: Tensor) -> Steps[LlmOutput]:
        self.rows.append(rows)
        self.state = self.state.but(length=self.state.length + len(rows))
        return _NOT_FED
        yield  # A generator, as in `UnitRun`.

    def _choose(self, step: int, fed: LlmOutput, numbers: NDArray[np.float64]) -> int:  # noqa: ARG002
        return self.recorded[step]


@attrs.define(kw_only=True)
class WaitingRows:
    """Rows of finalized units that are not yet in the language model's slot."""

    slot: int
    rows: list[Tensor] = attrs.field(factory=list)

    def feed(self, end: int, *, is_last: bool) -> Steps[None]:
        """Feed whole blocks, or all if `is_last`; `end` is the session's length with all rows."""
        if not self.rows:
            return
        rows = torch.cat(self.rows)
        count = len(rows) if is_last else len(rows) // states.BLOCK * states.BLOCK
        self.rows = [rows[count:]] if count < len(rows) else []
        if count:
            yield from states.feed_blocks(self.slot, end - len(rows), rows[:count])
