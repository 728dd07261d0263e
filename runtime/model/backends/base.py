"""The server's interface to a model: `Backend`, its errors, the calls of it, forced decoding.

A backend is shared by all sessions; a `ModelSession` holds the state of one (B8): of a session of
units (`BackendSession`), a chat turn, or a transcription. A unit, a turn and a chunk are one call,
`run`. Calls on a session never overlap (B1, B4), except `interrupt`, which may come at any moment
from any task. Values are plain (`protocol.values.model`), so that a backend can be in another
process. Nothing here uses a clock.

In forced decoding a model takes the recorded decisions, and its own are compared with them. A
differing unit changes all later input, so later units would prove nothing about the model. Forcing
changes only the decisions: each recorded one is fed, the model also decides on the same input, and
a `Choice` holds a difference. Decisions that the recording lacks are the model's own.

A model call is the same for units, turns and chunks, in this process and behind a link:

    begin(input) -> progress* -> done | failed, then commit | undo; cut at any moment

- An effect asks for a call, an event is its progress or its result; a failed one raises. Units,
  turns and chunks differ in their input and result only: `StartUnit -> UnitDone`,
  `StartTurn -> TurnPrefilled, TurnProgress..., TurnDone`, `RunChunk -> ChunkDone`.
- The server, a worker and a full replay make all their calls by `HeldModel`.
- A unit is then committed (`StartFinalize -> FinalizeDone`) or undone (`Rollback -> RollbackDone`).
- The calls of one slot never overlap, except `cut`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, Protocol, TypeVar, runtime_checkable

import attrs

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values import model as md

OPEN_TRIES: Final = 3
"""A remote that restarts, or still frees its last session, accepts at the second or third try."""
OPEN_PAUSE_S: Final = 0.25
"""Before the second try; doubled for each further one."""
SILENT_STEPS_MIN: Final = 8
"""Steps of a silent part that no cut takes away: so each call that is begun is ended."""


class BackendError(Exception):
    """A call failed; its changes can be rolled back, unless a subclass says otherwise."""

    context_full: ClassVar[bool] = False


class ContextFull(BackendError):  # noqa: N818 - names say what happened
    """The unit's worst case does not fit the context; nothing was fed (B10)."""

    context_full = True


class BackendRefused(BackendError):  # noqa: N818
    """The request cannot be served; a retry would be refused too."""


class BackendGone(BackendError):  # noqa: N818
    """The backend or its worker is lost, with all its sessions."""


class DeviceLost(BackendGone):
    """The device is lost to this process too: only another process can use it again."""


@attrs.frozen(kw_only=True)
class BackendInfo:
    """A backend's metadata and capabilities.

    Attributes:
        name: as given to `--model`.
        modes: session modes served: of `video`, `audio`, `chat` and `transcription`.
        slots: maximum concurrent sessions.
        context_limit: maximum tokens in a session's KV cache.
        can_rollback: a failed unit can be undone exactly (B3).
        deterministic: the same inputs and seed give the same bytes in the same environment.
        fingerprint: facts that a full replay must find equal: weights, versions, device, threads.
        speaks: it gives speech, else only text; the only value that may change while it runs.
        can_rebuild: its sessions are `Rebuilds`.
        can_speak: it honours `Unit.force_speak`.
        varies: the part not proven to be deterministic; empty if `deterministic`.
        tools: its chat takes tools (`Turn.tools`), and tells calls apart from text.
        duplex_tools: its units have a silent part (`Finalized.silent`), in which it calls tools
            (`Opening.tools`), and take events (`Unit.inputs`).
        voices: names of the only voices that it has, of which it takes the one that is nearest to
            reference audio; empty if it speaks with the voice of that.
    """

    name: str
    modes: tuple[str, ...]
    slots: int
    context_limit: int
    sliding_windows: tuple[md.SlidingWindow, ...]
    can_rollback: bool
    deterministic: bool
    fingerprint: Mapping[str, str]
    speaks: bool = True
    can_rebuild: bool = False
    can_speak: bool = False
    varies: str = ""
    tools: bool = False
    duplex_tools: bool = False
    voices: tuple[str, ...] = ()


def require_tools(info: BackendInfo, turn: md.Turn) -> None:
    """Refuse a turn with tools that the model does not have (`BackendRefused`)."""
    if turn.has_tools and not info.tools:
        raise BackendRefused("tools: this server's model has none")


Piece = md.Prefill | md.TurnChunk
"""The progress of a turn: its prefill, then the pieces of its answer."""
Emit = Callable[[Piece], None]
Call_contra = TypeVar("Call_contra", contravariant=True)
Result_co = TypeVar("Result_co", covariant=True)


def ignore(_: Piece) -> None:
    """Take the progress of a call, and do nothing."""


class ModelSession(Protocol[Call_contra, Result_co]):
    """What a backend holds on a slot, and the calls on it: units, one chat turn, or chunks."""

    async def run(self, call: Call_contra, /, cut: md.Cut | None = None) -> Result_co:
        """Compute a unit, the turn, or the utterance's next chunk; chunk 0 begins an utterance.

        It stops at `cut`, or where it is interrupted; the result says where.

        Raises:
            ContextFull: the worst case does not fit; nothing was fed.
            BackendRefused: this turn can never be served; the text tells the client why.
            BackendError: it failed, or was cut before its answer. Call `rollback` before the next
                unit, release the turn; of a transcription the utterance is lost.
            BackendGone: the session is lost.
        """
        ...

    async def release(self) -> None:
        """Free everything it holds; never raises if it is lost."""
        ...


class TurnSession(ModelSession[md.Turn, md.TurnResult], Protocol):
    """One chat turn on a backend.

    If interrupted before the answer, `run` raises at its next step. Else the answer ends
    before its next token, without further speech: `TurnResult.cut` is that token's number, or
    `generated_tokens` if only speech after the last token is cut. Within speech, unemitted speech
    is discarded, and the cut counts as before the next token. So emitted pieces are the first of
    the whole answer, and `run` with a cut gives its result again, byte for byte, without the speech
    right before that token. Calls of the turn's tools are in the result, not in the text, and are
    not spoken; text that may belong to one is held back, and dropped by a cut.
    """

    async def run(
        self, call: md.Turn, /, cut: md.Cut | None = None, *, emit: Emit = ignore
    ) -> md.TurnResult:
        """Feed the conversation, then answer; `cut` is the token before which it stops.

        `emit` gets the progress in order, in the event loop, and never blocks; the texts of all
        pieces join to the result's `text`.
        """
        ...

    def interrupt(self, index: int) -> None:
        """Cut the turn, whose number is `index`, also before it runs; never blocks."""
        ...


TranscriptSession = ModelSession[md.Chunk, md.ChunkResult]
"""One transcription on a backend, by utterance and chunk."""


class BackendSession(ModelSession[md.Unit, md.UnitResult], Protocol):
    """One session's state on a backend: its caches, carries, RNG counters and history."""

    @property
    def opened(self) -> md.Opened:
        """The result of opening."""
        ...

    def interrupt(self, index: int) -> None:
        """Cut unit `index` at its next step; no effect if it is not running.

        In its finalize the silent part is cut before its next step, as if by the budget, but not
        before `SILENT_STEPS_MIN` steps.
        """
        ...

    async def finalize(self, index: int, *, interrupted: bool) -> md.Finalized:
        """Feed the terminator and `</unit>` of the last unit, then slide the window.

        If `interrupted`, the answer was withheld, so the terminator is `chunk_eos` (B6). After a
        `BackendError` the state is unknown: release the session.

        With `BackendInfo.duplex_tools` the silent part is decided first, step by step, up to its
        budget. If that fails, it is undone to the end of the speech and closed without a span
        (`SilentEnd` `failed`), and the unit is finalized all the same (B3).
        """
        ...

    async def rollback(self, index: int) -> None:
        """Restore the state before unit `index` exactly (B3); after `BackendError`, release it."""
        ...


class Backend(Protocol):
    """One model and its weights, shared by all sessions."""

    @property
    def info(self) -> BackendInfo:
        """Its metadata; constant while it runs, except `speaks`."""
        ...

    async def open(self, opening: md.Opening, *, slot: int) -> BackendSession:
        """Open a session on `slot` (0 to `info.slots` - 1) and prefill its prompt.

        Raises:
            ContextFull: the prompt does not fit.
            BackendRefused: this opening can never be served; the text tells the client why, and
                begins with `tools` if it would be without them.
            BackendError: it failed; the slot is left empty.
        """
        ...


@runtime_checkable
class Rebuilds(Protocol):
    """A `BackendSession` that can be brought to the state of another one's past."""

    async def rebuild(self, past: Sequence[md.PastUnit], *, exact: bool) -> md.Finalized:
        """Feed 1 to `PAST_UNITS_MAX` done units with their finalize; return the last one's.

        They follow the units fed so far, without failed ones. Recorded decisions are forced.
        `exact`: unit by unit, as recorded, so that all that follows has the same bytes. Otherwise
        in long prefills (fast), so that the state may differ by rounding.

        Raises:
            BackendError: it failed, or `exact` found another result than the recorded one (input,
                first logits, ids, tokens in the cache); release the session.
            BackendGone: the session is lost.
        """
        ...


@runtime_checkable
class Chats(Protocol):
    """A backend that answers chat turns; its `info.modes` has `chat`."""

    async def chat(self, *, slot: int) -> TurnSession:
        """Take an empty slot for a turn, which a `BackendError` leaves empty."""
        ...


@runtime_checkable
class Transcribes(Protocol):
    """A backend that transcribes; its `info.modes` has `transcription`."""

    async def transcribe(self, *, slot: int) -> TranscriptSession:
        """Take an empty slot for a transcription, which a `BackendError` leaves empty."""
        ...


@runtime_checkable
class Closes(Protocol):
    """A backend with resources that must be closed explicitly."""

    async def aclose(self) -> None:
        """Free everything, hanging calls included; the last call to the backend."""
        ...


@runtime_checkable
class Remote(Protocol):
    """A backend on another machine, which may be unreachable when the server starts."""

    async def check(self) -> None:
        """Check that it serves; `BackendError` if it does not, or not yet."""
        ...


@runtime_checkable
class CanBeLost(Protocol):
    """A backend that may be lost while no call is in flight, as one in another process."""

    async def wait_gone(self) -> None:
        """Wait until it is lost for good; from then on all its calls raise `BackendGone`."""
        ...


@runtime_checkable
class Located(Protocol):
    """A backend in another process."""

    @property
    def where(self) -> str:
        """Its address or process, for operators."""
        ...


# -- forced decoding ----------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Forced:
    """A unit's recorded decisions: token ids and speech codes, as in its `UnitResult`."""

    decided_ids: tuple[int, ...]
    codec_ids: tuple[int, ...]

    @classmethod
    def of(cls, result: md.UnitResult) -> Forced:
        """Take a recorded result's decisions."""
        return cls(decided_ids=result.decided_ids, codec_ids=result.codec_ids)


@attrs.frozen(kw_only=True)
class Choice:
    """A decision in which the model differs from the recording.

    Attributes:
        stage: `llm` decides tokens, `tts` speech codes.
        step: number of the decision in the stage, from 0.
        recorded: the id that was recorded, and fed.
        own: the id that the model would have decided.
        margin: logit of `own` minus that of `recorded`, penalties included; negative if the less
            likely one was drawn. None if `recorded` was ruled out, or there are no logits.
        draw_gap: distance of the random number, in [0, 1), from one that draws `recorded`. None if
            none does, and at temperature 0.
    """

    stage: Literal["llm", "tts"]
    step: int
    recorded: int
    own: int
    margin: float | None = None
    draw_gap: float | None = None


@attrs.frozen(kw_only=True)
class ListenDecision:
    """The first decision of a forced unit that was free to decide: to be silent or to be heard.

    `listen` is silence. Inside an open turn so is `turn_eos`: the turn goes on after a `listen`.

    Attributes:
        is_open: a turn of the model was open when the unit began.
        was_silent, is_silent: the recorded decision, and the model's own.
        margin: the best logit of silence minus the best of all other tokens, penalties and
            `listen_prob_scale` included; None if one of them was ruled out.
        listen, turn_end: probabilities of `listen` and `turn_eos` in [0, 1], without penalties.
    """

    is_open: bool
    was_silent: bool
    is_silent: bool
    margin: float | None
    listen: float
    turn_end: float


@attrs.frozen(kw_only=True)
class ForcedResult:
    """The result of a forced unit, with the recorded decisions, and the differences in order.

    `listen_decision` is None if the unit was not free to decide, or the model has no logits.
    """

    result: md.UnitResult
    choices: tuple[Choice, ...]
    listen_decision: ListenDecision | None = None


@runtime_checkable
class Forces(Protocol):
    """A `BackendSession` with forced decoding."""

    async def run_forced(
        self, unit: md.Unit, forced: Forced, cut: md.Cut | None = None
    ) -> ForcedResult:
        """Prefill and generate one unit as it was recorded; see `ModelSession.run`.

        `BackendError` if it failed, or the model lacks an id.
        """
        ...


@runtime_checkable
class CallsTools(Protocol):
    """A `BackendSession` whose units have a silent part; its `info.duplex_tools` is true."""

    async def finalize_again(
        self, index: int, *, interrupted: bool, silent: md.Silent | None, forced: bool
    ) -> md.Finalized:
        """Finalize a unit whose silent part was recorded, which is cut where that was cut.

        `silent`: None: the worker was lost before it was done; nothing is decided, and what is open
        stays open. `forced`: the recorded ids are decided. See `BackendSession.finalize`.
        """
        ...


def require_recorded(recorded: md.UnitResult, made: ForcedResult, names: Sequence[str]) -> None:
    """Require the model's own decisions, and these fields of its result, to be the recorded ones.

    `BackendError` names the first that differs.
    """
    for name in names:
        if getattr(recorded, name) != getattr(made.result, name):
            raise BackendError(f"unit {recorded.index}: {name} differs from the recorded one")
    for choice in made.choices:
        raise BackendError(
            f"unit {recorded.index}: decision {choice.step} of {choice.stage} differs from the "
            "recorded one"
        )


# -- calls -----------------------------------------------------------------------------------------


OPENED_BY: Final[Mapping[type[ef.Effect], type[ef.Effect]]] = {
    ef.OpenBackend: ef.OpenBackend,
    ef.StartUnit: ef.OpenBackend,
    ef.StartFinalize: ef.OpenBackend,
    ef.Rollback: ef.OpenBackend,
    ef.StartTurn: ef.StartTurn,
    ef.RunChunk: ef.RunChunk,
}
"""Each call, and the one that opens what it is made on."""
DONE: Final[Mapping[type[ef.Effect], type[ev.UnitDone | ev.TurnDone | ev.ChunkDone]]] = {
    ef.StartUnit: ev.UnitDone,
    ef.StartTurn: ev.TurnDone,
    ef.RunChunk: ev.ChunkDone,
}
"""What a call comes to."""


def failure_of(
    effect: object, error: BackendError, at_ns: int, refused: str = ""
) -> ev.Event | None:
    """Make the event of a call that failed; None for one that has none.

    `refused`: why an opening, or a turn before it began, was refused.
    """
    is_full = error.context_full
    match effect:
        case ef.OpenBackend():
            is_lost = isinstance(error, BackendGone)
            return ev.BackendOpenFailed(
                at_ns=at_ns,
                lease=effect.lease,
                context_full=is_full,
                is_lost=is_lost,
                refused=refused,
            )
        case ef.StartUnit():
            return ev.UnitFailed(at_ns=at_ns, index=effect.unit.index, context_full=is_full)
        case ef.StartFinalize():
            return ev.FinalizeFailed(at_ns=at_ns, index=effect.index)
        case ef.Rollback():
            return ev.RollbackFailed(at_ns=at_ns, index=effect.index)
        case ef.StartTurn():
            index = effect.turn.index
            return ev.TurnFailed(at_ns=at_ns, index=index, context_full=is_full, refused=refused)
        case ef.RunChunk():
            place = {"utterance": effect.chunk.utterance, "index": effect.chunk.index}
            return ev.ChunkFailed(at_ns=at_ns, context_full=is_full, **place)
        case ef.Rebuild():
            return ev.RebuildFailed(at_ns=at_ns, lease=effect.lease)
    return None


@attrs.define(eq=False, kw_only=True)
class HeldModel:
    """What a backend holds on a slot for one session, and the calls on it.

    Attributes:
        now_ns: the time of its events.
        held: what calls are made on, once one has opened it.
        is_cut: it was cut, also before its turn began.
    """

    backend: Backend
    slot: int
    now_ns: Callable[[], int]
    held: ModelSession[Any, Any] | None = None
    is_cut: bool = False
    _opened_by: type[ef.Effect] | None = None

    @property
    def opened(self) -> BackendSession | None:
        """The session of units, if it is one."""
        is_of_units = self._opened_by is ef.OpenBackend
        return self.held if is_of_units else None  # type: ignore[return-value]

    async def begin(self, effect: ef.Effect) -> None:
        """Have the backend hold what the effect's calls are made on; nothing is computed yet.

        `BackendError`: it does not, or it holds something else.
        """
        backend, slot, opened_by = self.backend, self.slot, OPENED_BY.get(type(effect))
        if self.held is None:
            match effect:
                case ef.OpenBackend():
                    self.held = await backend.open(effect.opening, slot=slot)
                case ef.StartTurn():
                    if not isinstance(backend, Chats):
                        raise BackendError(f"model {backend.info.name} does not chat")
                    self.held = await backend.chat(slot=slot)
                    if self.is_cut:
                        self.held.interrupt(effect.turn.index)
                case ef.RunChunk():
                    if not isinstance(backend, Transcribes):
                        raise BackendError(f"model {backend.info.name} does not transcribe")
                    self.held = await backend.transcribe(slot=slot)
            self._opened_by = opened_by
        if self.held is None or self._opened_by is not opened_by:
            raise BackendError(f"a {type(effect).__name__} out of order")

    async def call(
        self,
        effect: ef.Effect,
        cut: md.Cut | None = None,
        emit: Callable[[ev.Event], None] = lambda _: None,
    ) -> ev.Event:
        """Make a call, and `begin` before it; `emit` gets the progress of a turn."""
        if self._opened_by is None or self._opened_by is not OPENED_BY.get(type(effect)):
            await self.begin(effect)
        held: Any = self.held

        def progress(piece: Piece) -> None:
            at_ns = self.now_ns()
            if isinstance(piece, md.Prefill):
                emit(ev.TurnPrefilled(at_ns=at_ns, prefill=piece))
            else:
                emit(ev.TurnProgress(at_ns=at_ns, chunk=piece))

        match effect:
            case ef.StartUnit(unit=asked) | ef.RunChunk(chunk=asked):
                result = await held.run(asked, cut)
                return DONE[type(effect)](at_ns=self.now_ns(), result=result)
            case ef.StartTurn(turn=turn):
                require_tools(self.backend.info, turn)
                result = await held.run(turn, cut, emit=progress)
                return ev.TurnDone(at_ns=self.now_ns(), result=result)
            case ef.StartFinalize(index=index, interrupted=interrupted):
                done = await held.finalize(index, interrupted=interrupted)
                return ev.FinalizeDone(at_ns=self.now_ns(), finalized=done)
            case ef.Rollback(index=index):
                await held.rollback(index)
                return ev.RollbackDone(at_ns=self.now_ns(), index=index)
        assert isinstance(effect, ef.OpenBackend), effect
        return ev.BackendOpened(at_ns=self.now_ns(), lease=effect.lease, opened=held.opened)

    async def finalize_again(
        self, effect: ef.StartFinalize, silent: md.Silent | None, *, forced: bool
    ) -> ev.Event:
        """Make the call of a recorded finalize; `CallsTools` has the meaning of `silent`."""
        if not isinstance(self.held, CallsTools):
            return await self.call(effect)
        done = await self.held.finalize_again(
            effect.index, interrupted=effect.interrupted, silent=silent, forced=forced
        )
        return ev.FinalizeDone(at_ns=self.now_ns(), finalized=done)

    def cut(self, index: int | None = None) -> None:
        """Cut a turn, also before it begins, or this unit if it runs; never blocks."""
        self.is_cut = self.is_cut or index is None
        held: Any = self.held
        if self._opened_by is ef.StartTurn or (index is not None and self.opened is not None):
            held.interrupt(-1 if index is None else index)

    async def release(self) -> None:
        """Free everything; the slot is clean then."""
        if self.held is not None:
            await self.held.release()
        self.held = self._opened_by = None
