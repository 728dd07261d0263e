"""The server's interface to a model: the `Backend` protocol, its errors, and forced decoding.

A backend is shared by all sessions; a `BackendSession`, `TurnSession` (chat) or `TranscriptSession`
holds the state of one (B8). Calls on one of them never overlap (B1, B4), except `interrupt`, which
may come at any moment from any task. Values are plain (`protocol.values.model`), so that a backend
can be in another process. Nothing here uses a clock.

In forced decoding a model takes the recorded decisions, and its own are compared with them. A
differing unit changes all later input, so later units would prove nothing about the model. Forcing
changes only the decisions: each recorded one is fed, the model also decides on the same input, and
a `Choice` holds a difference. Decisions that the recording lacks are the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final, Literal, Protocol, runtime_checkable

import attrs

from protocol.values.model import (
    Chunk,
    ChunkResult,
    Cut,
    Finalized,
    Opened,
    Opening,
    PastUnit,
    Prefill,
    SlidingWindow,
    Turn,
    TurnChunk,
    TurnResult,
    Unit,
    UnitResult,
)

OPEN_TRIES: Final = 3
"""A remote that restarts, or still frees its last session, accepts at the second or third try."""
OPEN_PAUSE_S: Final = 0.25
"""Before the second try; doubled for each further one."""


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
    """

    name: str
    modes: tuple[str, ...]
    slots: int
    context_limit: int
    sliding_windows: tuple[SlidingWindow, ...]
    can_rollback: bool
    deterministic: bool
    fingerprint: Mapping[str, str]
    speaks: bool = True
    can_rebuild: bool = False
    can_speak: bool = False
    varies: str = ""
    tools: bool = False


def require_tools(info: BackendInfo, turn: Turn) -> None:
    """Refuse a turn with tools that the model does not have (`BackendRefused`)."""
    if turn.has_tools and not info.tools:
        raise BackendRefused("tools: this server's model has none")


class ModelSession(Protocol):
    """What a backend holds on a slot: a session, a chat turn or a transcription."""

    async def release(self) -> None:
        """Free everything it holds; never raises if it is lost."""
        ...


class BackendSession(ModelSession, Protocol):
    """One session's state on a backend: its caches, carries, RNG counters and history."""

    @property
    def opened(self) -> Opened:
        """The result of opening."""
        ...

    async def run_unit(self, unit: Unit, cut: Cut | None = None) -> UnitResult:
        """Prefill and generate one unit, stopping exactly at `cut` (None: at an `interrupt`).

        The result's `cut` is set if it was interrupted.

        Raises:
            ContextFull: the worst case does not fit; nothing was fed.
            BackendError: it failed; call `rollback` before the next unit.
            BackendGone: the session is lost.
        """
        ...

    def interrupt(self, index: int) -> None:
        """Cut unit `index` at its next step; no effect if it is not running."""
        ...

    async def finalize(self, index: int, *, interrupted: bool) -> Finalized:
        """Feed the terminator and `</unit>` of the last unit, then slide the window.

        If `interrupted`, the answer was withheld, so the terminator is `chunk_eos` (B6). After a
        `BackendError` the state is unknown: release the session.
        """
        ...

    async def rollback(self, index: int) -> None:
        """Restore the state before unit `index` exactly (B3); after `BackendError`, release it."""
        ...


class TurnSession(ModelSession, Protocol):
    """One chat turn on a backend: prefilled once, generated once, then released.

    If interrupted before the answer, `prefill` raises at its next step. Else the answer ends before
    its next token, without further speech: `TurnResult.cut` is that token's number, or
    `generated_tokens` if only speech after the last token is cut. Within speech, unemitted speech
    is discarded, and the cut counts as before the next token. So emitted pieces are the first of
    the whole answer, and `generate` with `cut` gives its result again, byte for byte, without the
    speech right before that token. Calls of the turn's tools are in the result, not in the text,
    and are not spoken; text that may belong to one is held back, and dropped by a cut.
    """

    async def prefill(self) -> Prefill:
        """Feed the conversation and the generation prompt.

        Raises:
            ContextFull: it does not fit with room for one token; nothing was fed.
            BackendError: it failed, or was cut; release the turn.
            BackendGone: the turn is lost.
        """
        ...

    async def generate(
        self, emit: Callable[[TurnChunk], None], cut: int | None = None
    ) -> TurnResult:
        """Answer, after `prefill`, stopping before token `cut` (None: at an `interrupt`).

        `emit` gets each piece in order, in the event loop, and never blocks; the texts of all
        pieces join to the result's `text`. `BackendError`: it failed; release the turn.
        `BackendGone`: the turn is lost.
        """
        ...

    def interrupt(self) -> None:
        """Cut the turn, also before it begins; never blocks."""
        ...


class TranscriptSession(ModelSession, Protocol):
    """One transcription on a backend, by utterance and chunk."""

    async def run_chunk(self, chunk: Chunk) -> ChunkResult:
        """Transcribe the utterance's next chunk; index 0 begins an utterance, and drops the last.

        Raises:
            ContextFull: it does not fit; nothing was fed.
            BackendError: it failed, and the utterance is lost; the next may begin.
            BackendGone: the session is lost.
        """
        ...


class Backend(Protocol):
    """One model and its weights, shared by all sessions."""

    @property
    def info(self) -> BackendInfo:
        """Its metadata; constant while it runs, except `speaks`."""
        ...

    async def open(self, opening: Opening, *, slot: int) -> BackendSession:
        """Open a session on `slot` (0 to `info.slots` - 1) and prefill its prompt.

        Raises:
            ContextFull: the prompt does not fit.
            BackendRefused: this opening can never be served.
            BackendError: it failed; the slot is left empty.
        """
        ...


@runtime_checkable
class Rebuilds(Protocol):
    """A `BackendSession` that can be brought to the state of another one's past."""

    async def rebuild(self, past: Sequence[PastUnit], *, exact: bool) -> Finalized:
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

    async def chat(self, turn: Turn, *, slot: int) -> TurnSession:
        """Take a turn on an empty slot; computes nothing yet.

        `BackendRefused`: this turn can never be served; the text tells the client why.
        `BackendError`: the turn cannot be taken; the slot is left empty.
        """
        ...


@runtime_checkable
class Transcribes(Protocol):
    """A backend that transcribes; its `info.modes` has `transcription`."""

    async def transcribe(self, *, slot: int) -> TranscriptSession:
        """Take a transcription on an empty slot, which a `BackendError` leaves empty."""
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
class Mortal(Protocol):
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
    def of(cls, result: UnitResult) -> Forced:
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
class Leaning:
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

    `leaning` is None if the unit was not free to decide, or the model has no logits.
    """

    result: UnitResult
    choices: tuple[Choice, ...]
    leaning: Leaning | None = None


@runtime_checkable
class Forces(Protocol):
    """A `BackendSession` with forced decoding."""

    async def run_forced(self, unit: Unit, forced: Forced, cut: Cut | None = None) -> ForcedResult:
        """Prefill and generate one unit as it was recorded; see `BackendSession.run_unit`.

        `BackendError` if it failed, or the model lacks an id.
        """
        ...


def require_recorded(recorded: UnitResult, made: ForcedResult, names: Sequence[str]) -> None:
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
