"""Full replay: runs the model again on the logged inputs, then the machine on its new outputs.

Rules:
- The model's inputs are the effects of logic replay. Each call has one shape, whatever it computes
  (`HeldModel`): it is made again where the log has its result, and compared with that.
- The environment's part stays as recorded: a call without a result is not made, and an opening or a
  unit that failed is not run again, since its rollback left no trace. A unit or a turn is cut where
  its recording was cut.
- The model's new outputs, with the recorded times, costs and indices, replace the recorded ones,
  and step a second machine, which gives the frames that the client would have got.
- After a difference the model goes on, on its own outputs, so that the units that differ can be
  counted; the first is explained. `replay.assess.run` forces the recorded decisions instead, and
  judges each unit by itself.
- A turn is answered to its end at the first recorded piece; its pieces then replace the recorded
  ones, one by one. One that was cut is run once more up to the cut, to compare its result there;
  one that failed is compared up to the failure.
- A session that moved to another worker and was rebuilt exactly is not rebuilt here: the model that
  lost nothing must come to the same.
- The log must be sound: a model that missed an input cannot be compared.

If a fork changes the opening of the model, the units before the fork's own are *held*: the model is
forced to the recorded decisions (`backends.base.Forces`), since its own would differ. So decisions
and speech in their results are the recording's; the inputs, and the model's state after them, are
the model's own. A replay holds them again.

**The environment.** A full replay on this machine can be compared with a recording only if the two
fingerprints are equal, line by line, and the backend is deterministic. The backend chooses the
lines; in a log, a missing `numerics` stands for version 1 of a backend's arithmetic.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from types import MappingProxyType
from typing import Any, Final

import anyio
import attrs

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.limits import OF_MODE, VOICE_STEPS, Work
from protocol.values.model import Cut, PastUnit, Unit, UnitResult
from recorder.format.format import Fields, Record
from recorder.format.mapping import LoggedStep
from recorder.read.past import PastUnits, voiced
from recorder.read.scan import Damage
from runtime.model.backends.base import (
    Backend,
    BackendInfo,
    Choice,
    Forced,
    ForcedResult,
    Forces,
    HeldModel,
    Rebuilds,
)
from runtime.model.models import load_backend
from runtime.settings.settings import QUANTIZATIONS

from ..shared.commands import Watch, unwatched
from ..shared.recordings import below, typed
from .difference import Difference, cause_of, name_of
from .logic import Replayer
from .outputs import compare_forced, compare_outputs, is_near_tie, logits_differ, snr_db
from .report import Divergence, FullReport, Kind, Mismatch, UnitDifference

# -- the environment -------------------------------------------------------------------------------


class ModelUnavailableError(Exception):
    """The log does not name its model, or the model is not available here or cannot be forced."""


def model_of(head: Fields) -> str | None:
    """Return the name of the model in a log's head; None if the head has no name."""
    return typed(below(head, "config"), "model", str)


DTYPES: Final = MappingProxyType({"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"})
"""The names in `load_backend` of a fingerprint's dtypes."""


NUMERICS: Final = "numerics"
FIRST_NUMERICS: Final = "1"
"""The version of the arithmetic of logs without that line."""


@attrs.frozen
class Loading:
    """A model and how it computes: the arguments of `load_backend`.

    With several `slots` these may wait for each other; so no session may wait for another one's.
    """

    name: str
    device: str | None = None
    dtype: str | None = None
    deterministic: bool = False
    slots: int = 1
    voice_steps: int = VOICE_STEPS
    quantize: str | None = None

    def load(self) -> Backend:
        """Load it, with one slot for replay; `ValueError` if it is not available here."""
        how = attrs.asdict(self)
        name, slots = how.pop("name"), how.pop("slots")
        return load_backend(name, slots, is_live=slots == 1, **how)


def loading_of(head: Fields, name: str) -> Loading:
    """Choose settings with which a model computes as the log with this head did, if known."""
    fingerprint = below(head, "fingerprint")
    device, dtype = typed(fingerprint, "device", str), typed(fingerprint, "dtype", str)
    if device is None or dtype is None:
        return Loading(name)  # A model that has neither: a script.
    is_exact = below(head, "config").get("deterministic") is True
    where = "cpu" if device == "cpu" else _gpu()
    steps = typed(fingerprint, "voice_steps", str) or ""
    quantize = typed(fingerprint, "quantize", str)
    return Loading(
        name,
        device=where,
        dtype=DTYPES.get(dtype),
        deterministic=is_exact and where == "cuda",
        voice_steps=int(steps) if re.fullmatch("[1-9][0-9]?", steps) else VOICE_STEPS,
        quantize=quantize if quantize in QUANTIZATIONS else None,
    )


def _gpu() -> str | None:
    """The GPU if there is one; otherwise the default, and the report shows the difference."""
    import torch  # It costs a second: only a log that was made on a GPU pays it.

    return "cuda" if torch.cuda.is_available() else None


def load_model(
    head: Fields, model: str | None, load: Callable[[Loading], Backend]
) -> tuple[str, Backend]:
    """Load the model of the log with this head, or another `model`; return its name too.

    `load` loads a model, as `Loading.load` does. `ModelUnavailableError`: none is named, or `load`
    failed.
    """
    name = model if model is not None else model_of(head)
    if name is None:
        raise ModelUnavailableError("the log does not say which model made it")
    try:
        return name, load(loading_of(head, name))
    except Exception as error:  # any error means that there is no model
        text = f"the model {name!r} cannot be loaded: {error}"
        raise ModelUnavailableError(text) from error


def mismatches(head: Fields, info: BackendInfo) -> tuple[Mismatch, ...]:
    """List the differences between the environment of the log with this head and this one."""
    there = {name: str(line) for name, line in below(head, "fingerprint").items()}
    here = {name: str(line) for name, line in info.fingerprint.items()}
    if NUMERICS in here:
        there.setdefault(NUMERICS, FIRST_NUMERICS)
    found = [
        Mismatch(name=name, recorded=there.get(name), here=here.get(name))
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
    there_too = below(head, "config").get("deterministic") is not False
    if not (info.deterministic and there_too):
        found.append(
            Mismatch(name="deterministic", recorded=str(there_too), here=str(info.deterministic))
        )
    return tuple(found)


# -- the replay ------------------------------------------------------------------------------------


RELEASE_WAIT_S: Final = 10.0
"""A model that takes longer to release a session keeps it to the end of the process."""
UNITS_KEPT: Final = 100
"""Units that differ, listed one by one; for some models all of them do."""
FORK: Final = "fork"
"""The field of the `config` of a fork's head that holds its changes."""
IS_HELD: Final = "is_held"
"""The entry of `FORK` for the units before `parent.unit`."""
OWN_FIELDS: Final = (
    *("fed_ids", "kv_length", "vision_slices", "vision_tokens", "logits_hash", "margin"),
)
"""The fields of a held unit's result that are the model's own."""
KEPT_FIELDS: Final = ("index", "costs", "cost_us")
"""The fields of a result that stay as recorded."""
RESULT_OF: Final[dict[type[ev.Event], str]] = {
    ev.BackendOpened: "opened",
    ev.UnitDone: "result",
    ev.FinalizeDone: "finalized",
    ev.TurnPrefilled: "prefill",
    ev.TurnProgress: "chunk",
    ev.TurnDone: "result",
    ev.ChunkDone: "result",
}
"""By event: the field with the model's output."""

Judge = Callable[[Unit, UnitResult, ForcedResult], None]
"""Called with a unit that was forced and not held: its input, recorded result and new one."""


def held_units(head: Fields) -> int:
    """Return how many units, from the first on, were held in the log with this head."""
    is_held = below(below(head, "config"), FORK).get(IS_HELD) is True
    unit = typed(below(head, "parent"), "unit", int)
    return unit if is_held and unit is not None else 0


def hold(recorded: UnitResult, forced: UnitResult) -> UnitResult:
    """Combine the result of a held unit: decisions and speech recorded, the rest as forced."""
    return attrs.evolve(recorded, **{name: getattr(forced, name) for name in OWN_FIELDS})


async def replay_fully(
    head: Fields,
    items: Iterable[Record | Damage],
    load: Callable[[Loading], Backend],
    *,
    model: str | None = None,
    anyway: bool = False,
    watch: Watch = unwatched,
) -> FullReport:
    """Run a log's model again, or another `model`, and compare its outputs with the recorded ones.

    Args:
        head: the fields of the log's `session` record.
        items: the log's records in order, `session` first, and its damage.
        load: loads a model, as `Loading.load` does.
        anyway: compare although the environment differs.
        watch: called with 0 when the model is loaded, then with the number of calls made again.

    `ModelUnavailableError`: no model is named, `load` failed, or it cannot be forced.
    """
    name, backend = load_model(head, model, load)
    watch(0)
    environment, fingerprint = mismatches(head, backend.info), dict(backend.info.fingerprint)
    compared = anyway or not environment
    report = FullReport(
        model=name, environment=environment, fingerprint=fingerprint, compared=compared
    )
    if not compared:
        return report
    calls = ModelRerun(backend=backend, held_units=held_units(head))
    run = _FullReplay(calls, report)
    try:
        for item in items:
            made = calls.made
            await run.feed(item)
            if calls.made > made:
                watch(calls.made - made)
            if run.is_stopped:
                break
    finally:
        await calls.close()
    run.finish()
    return report


# -- verdicts -------------------------------------------------------------------------------------


@attrs.frozen
class Finding:
    """A difference between the model's output and the recorded one.

    `snr_db` is for PCM (`outputs.snr_db`), `choice` for a forced decision that differs.
    """

    difference: Difference
    snr_db: float | None = None
    choice: Choice | None = None


@attrs.frozen(kw_only=True)
class Verdict:
    """The verdict on a recorded event.

    `event` has the model's new output, if any, to replace it; `index` is of its call, if it has
    one.
    """

    event: ev.Event | None = None
    finding: Finding | None = None
    index: int | None = None


def note_change(changed: dict[int, UnitDifference], step: LoggedStep, verdict: Verdict) -> None:
    """Keep the first difference of a unit, of the first `UNITS_KEPT` units that differ."""
    finding, unit = verdict.finding, verdict.index
    if finding is None or unit is None or unit in changed or len(changed) >= UNITS_KEPT:
        return
    found, choice = finding.difference, finding.choice
    values = (found.path, found.recorded, found.came_out, finding.snr_db)
    tie = None if choice is None else (choice.margin, choice.draw_gap, is_near_tie(choice))
    changed[unit] = UnitDifference(unit, step.record.seq, *values, *(tie or (None, None, None)))


class _FullReplay:
    """A full replay in progress, record by record; after `is_stopped` it takes no more."""

    def __init__(self, calls: ModelRerun, report: FullReport) -> None:
        self.is_stopped = False
        self._calls, self._report = calls, report
        self._recorded, self._renewed = Replayer(), Replayer()
        self._work: Work | None = None
        self._changed: Final[dict[int, UnitDifference]] = {}
        self._indices: Final[set[int]] = set()

    async def feed(self, item: Record | Damage) -> None:
        """Take the next record; run the model if the record holds an output of the model."""
        step = self._recorded.feed(item)
        event = None if step is None else await self._renew(step)
        if not self.is_stopped:
            self._renewed.feed(item, instead=event)
            self.is_stopped = self._recorded.is_stopped

    def finish(self) -> None:
        """Complete the report."""
        report, calls = self._report, self._calls
        if self._work is not None:
            setattr(report, f"{self._work}s", calls.made)
            setattr(report, f"{self._work}s_changed", len(self._indices))
        report.units_held, report.logits_changed = calls.units_held, calls.logits_changed
        report.changed = tuple(self._changed.values())
        report.recorded, report.renewed = self._recorded.report(), self._renewed.report()

    async def _renew(self, step: LoggedStep) -> ev.Event | None:
        """Make the model's part of an event again; None if it has no part, or it failed."""
        if isinstance(step.event, ev.ConnectionOpened):
            self._work = OF_MODE[step.event.mode].work
        last_unit = self._recorded.last_unit
        try:
            verdict = await self._calls.renew(step.event, step.effects)
        except ModelUnavailableError:
            raise
        except Exception as error:  # the backend's bug is a result, too
            came_out = f"{type(error).__name__}: {error}"
            finding = Finding(Difference("", "a result", came_out))
            self._keep_first(step, finding, last_unit, "model_failed")
            self.is_stopped = True
            return None
        self._take(step, verdict, last_unit)
        return verdict.event

    def _take(self, step: LoggedStep, verdict: Verdict, last_unit: int | None) -> None:
        """Keep a difference; a unit keeps its first. `last_unit` is None without units."""
        finding, index = verdict.finding, verdict.index
        if finding is None:
            return
        place = index if last_unit is not None and index is not None else last_unit
        self._keep_first(step, finding, place, "model")
        if index is None:
            return
        if last_unit is not None and index not in self._indices:
            note_change(self._changed, step, verdict)
        self._indices.add(index)

    def _keep_first(self, step: LoggedStep, finding: Finding, unit: int | None, kind: Kind) -> None:
        if self._report.divergence is None:
            record, found = step.record, finding.difference
            place = (record.seq, name_of(record), record.at_ns, unit)
            values = (found.path, found.recorded, found.came_out)
            cause = cause_of(record, step.event)
            self._report.divergence = Divergence(kind, *place, *values, cause, finding.snr_db)


# -- the model's calls ----------------------------------------------------------------------------


@attrs.define
class _Turn:
    """A turn that the model runs again.

    `pieces` are its progress that the log has not reached; `failure` is the error that ended it.
    """

    effect: ef.StartTurn
    pieces: deque[ev.Event] = attrs.Factory(deque)
    done: ev.Event | None = None
    failure: Exception | None = None


@attrs.define(eq=False, kw_only=True)
class ModelRerun:
    """The model calls of one session, each made again where the log has its result.

    `held_units` units, from the first on, were held to another recording. With `judge` the model is
    forced to the recorded decisions, and each unit that was not held is judged. `made` is the
    number of units, turns and chunks, `units_held` that of held units, and `logits_changed` the
    first unit whose first logits differ.
    """

    _backend: Backend
    _held_units: int = 0
    _judge: Judge | None = None
    made: int = attrs.field(default=0, init=False)
    _model: HeldModel = attrs.field(init=False)
    _asked: dict[type[ef.Effect], Any] = attrs.field(factory=dict, init=False)
    _opening: ef.OpenBackend | None = attrs.field(default=None, init=False)
    _turn: _Turn | None = attrs.field(default=None, init=False)
    _units: PastUnits = attrs.field(factory=PastUnits, init=False)
    _past: list[PastUnit] = attrs.field(factory=list, init=False)
    units_held: int = attrs.field(default=0, init=False)
    logits_changed: int | None = attrs.field(default=None, init=False)

    @_model.default
    def _no_model(self) -> HeldModel:
        return HeldModel(backend=self._backend, slot=0, now_ns=lambda: 0)

    async def renew(self, event: ev.Event, effects: Iterable[ef.Effect] = ()) -> Verdict:
        """Make the call again whose output an event holds; then note the calls of its effects.

        `ModelUnavailableError`: the model cannot be forced or rebuilt. Other exceptions are the
        model's.
        """
        self._note(self._units.take(event))
        verdict = await self._renew(event)
        for effect in effects:
            self._asked[type(effect)] = effect
            if isinstance(effect, ef.OpenBackend):
                self._opening = effect
            self._note(self._units.take(effect))
        return verdict

    def _note(self, past: PastUnit | None) -> None:
        """Keep a past unit, which a rebuild in long prefills would feed again."""
        if past is not None:
            self._past.append(past)

    async def close(self) -> None:
        """Give the session back to the backend; a release that takes too long is left."""
        with anyio.move_on_after(RELEASE_WAIT_S, shield=True):
            await self._release()

    async def _renew(self, event: ev.Event) -> Verdict:
        match event:
            case ev.BackendOpened():
                return await self._open(event)
            case ev.UnitDone():
                return await self._run_unit(event)
            case ev.FinalizeDone():
                asked = self._asked.get(ef.StartFinalize)
                if asked is None or self._model.opened is None:
                    return Verdict()
                if asked.index == event.finalized.index:
                    del self._asked[ef.StartFinalize]
                    forced = self._judge is not None or self._is_held(asked.index)
                    silent = event.finalized.silent
                    made = await self._model.finalize_again(asked, silent, forced=forced)
                    return self._compare(event, made)
            case ev.ChunkDone(result=recorded):
                asked = self._asked.pop(ef.RunChunk, None)
                place = (recorded.utterance, recorded.index)
                if asked is not None and (asked.chunk.utterance, asked.chunk.index) == place:
                    made = await self._model.call(asked)
                    self.made += 1
                    return self._compare(event, made)
            case ev.TurnPrefilled(prefill=recorded):
                asked = self._asked.pop(ef.StartTurn, None)
                if asked is not None and asked.turn.index == recorded.index:
                    self._turn = await self._answer(asked)
                    self.made += 1
                    return self._compare(event, self._turn.pieces.popleft())
            case ev.TurnProgress() if self._turn is not None:
                return await self._take_piece(event, self._turn)
            case ev.TurnDone() if self._turn is not None:
                return await self._end_turn(event, self._turn)
            case ev.UnitFailed():
                self._asked.pop(ef.StartUnit, None)
            case ev.TurnFailed() | ev.ChunkFailed() | ev.BackendLost():
                self._asked.pop(ef.StartTurn, None)
                self._asked.pop(ef.RunChunk, None)
                if self._turn is not None:
                    await self._release()
            case ev.Rebuilt():
                await self._rebuild(event)
        return Verdict()

    def _compare(
        self, event: ev.Event, made: ev.Event, forced: ForcedResult | None = None
    ) -> Verdict:
        """Compare the output in a recorded event with the new one, and put the new one in it."""
        name = RESULT_OF[type(event)]
        recorded, result = getattr(event, name), getattr(made, name)
        if forced is None:
            found, choice = compare_outputs(recorded, result), None
        else:
            found, choice = compare_forced(recorded, forced)
        snr = snr_db(recorded.pcm, result.pcm) if hasattr(recorded, "pcm") else None
        kept = {it: getattr(recorded, it) for it in KEPT_FIELDS if hasattr(recorded, it)}
        renewed: Any = attrs.evolve(event, **{name: attrs.evolve(result, **kept)})
        index: int | None = self.made - 1  # of a turn or a chunk, among those made again
        if isinstance(event, ev.UnitDone | ev.FinalizeDone | ev.BackendOpened):
            index = getattr(recorded, "index", None)
        finding = None if found is None else Finding(found, snr, choice)
        return Verdict(event=renewed, finding=finding, index=index)

    async def _release(self) -> None:
        self._turn = None
        model, self._model = self._model, self._no_model()
        await model.release()

    # -- units ----------------------------------------------------------------------------------

    async def _open(self, event: ev.BackendOpened) -> Verdict:
        asked = self._opening
        if asked is None or event.lease != asked.lease or self._model.held is not None:
            return Verdict()
        await self._model.begin(asked)
        opened = self._model.opened
        assert opened is not None
        if self._judge is not None and not isinstance(opened, Forces):
            name = self._backend.info.name
            raise ModelUnavailableError(f"the model {name!r} cannot be forced")
        return self._compare(event, attrs.evolve(event, opened=opened.opened))

    async def _run_unit(self, event: ev.UnitDone) -> Verdict:
        recorded, asked = event.result, self._asked.get(ef.StartUnit)
        if asked is None or self._model.opened is None or recorded.index != asked.unit.index:
            return Verdict()
        del self._asked[ef.StartUnit]
        forced = await self._play(asked, recorded)
        made = forced.result
        self.made += 1
        if self.logits_changed is None and logits_differ(recorded, made):
            self.logits_changed = recorded.index
        if self._is_held(recorded.index):
            self.units_held += 1
        elif self._judge is not None:
            self._judge(asked.unit, recorded, forced)
        return self._compare(event, attrs.evolve(event, result=made), forced)

    async def _play(self, asked: ef.StartUnit, recorded: UnitResult) -> ForcedResult:
        """Run a unit as it was cut, forced if it was held or is judged."""
        opened, is_held = self._model.opened, self._is_held(recorded.index)
        if not isinstance(opened, Forces) or not (is_held or self._judge is not None):
            made = await self._model.call(asked, recorded.cut)
            assert isinstance(made, ev.UnitDone)
            return ForcedResult(result=made.result, choices=())
        forced = await opened.run_forced(asked.unit, Forced.of(recorded), recorded.cut)
        if not is_held:
            return forced
        return ForcedResult(result=hold(recorded, forced.result), choices=())

    def _is_held(self, index: int) -> bool:
        """Whether a unit was held to another recording; only a model with forcing holds units."""
        return index < self._held_units and isinstance(self._model.opened, Forces)

    async def _rebuild(self, event: ev.Rebuilt) -> None:
        """Finalize what was lost before its finalize; rebuild as recorded, if in long prefills."""
        asked = self._asked.pop(ef.StartFinalize, None)
        if self._model.opened is None or self._opening is None:
            return
        if not event.batches:
            if asked is not None:
                await self._model.finalize_again(asked, None, forced=True)
            return
        await self._release()
        lost, self._units.last = self._units.last, None
        self._note(lost)
        await self._model.begin(self._opening)
        opened = self._model.opened
        if not isinstance(opened, Rebuilds):
            raise ModelUnavailableError(f"the model {self._backend.info.name!r} cannot be rebuilt")
        units = voiced(self._past)
        for size in event.batches:
            await opened.rebuild(list(islice(units, size)), exact=False)

    # -- turns ----------------------------------------------------------------------------------

    async def _answer(self, asked: ef.StartTurn, cut: Cut | None = None) -> _Turn:
        """Run a turn to its end; a failure after its prefill counts once the log is beyond it."""
        turn = _Turn(asked)
        try:
            turn.done = await self._model.call(asked, cut, turn.pieces.append)
        except Exception as failure:
            if not turn.pieces:
                await self._release()
                raise
            turn.failure = failure
        return turn

    async def _take_piece(self, event: ev.TurnProgress, turn: _Turn) -> Verdict:
        if turn.pieces:
            return self._compare(event, turn.pieces.popleft())
        if turn.failure is not None:
            raise turn.failure
        return self._otherwise("a piece", "the end")

    async def _end_turn(self, event: ev.TurnDone, turn: _Turn) -> Verdict:
        if event.result.cut is not None:
            await self._release()
            cut = Cut(stage="llm", step=event.result.cut)
            turn = await self._answer(turn.effect, cut)
            turn.pieces.clear()
        await self._release()
        if turn.failure is not None:
            raise turn.failure
        assert turn.done is not None
        if turn.pieces:
            return self._otherwise("the end", "another piece")
        return self._compare(event, turn.done)

    def _otherwise(self, recorded: str, came_out: str) -> Verdict:
        finding = Finding(Difference("", recorded, came_out))
        return Verdict(finding=finding, index=self.made - 1)
