"""What the server asks of a model: the `Backend` protocol and its errors.

A backend is shared by all sessions; a `BackendSession` is the explicit state of one of them (B8), a
`TurnSession` that of one turn of chat, a `TranscriptSession` that of one transcription. Calls on
one of them never overlap: the session machine starts the next only after the last one's result
(B1, B4). `interrupt` alone may come at any moment, from any task.

What crosses is plain values (`protocol.model`), so that a backend can live in another process.
Times are real for a real model and virtual for the scripted one; nothing here asks for a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Final, Protocol, runtime_checkable

import attrs

from protocol.model import Cut, Finalized, Opened, Opening, SlidingWindow, Unit, UnitResult
from protocol.transcript import Chunk, ChunkResult
from protocol.turn import Prefill, Turn, TurnChunk, TurnResult

OPEN_TRIES: Final = 3
"""A remote that restarts, or still frees its last session, is there at the second or third."""
OPEN_PAUSE_S: Final = 0.25
"""Before the second try; each further pause is twice as long."""


class BackendError(Exception):
    """A call failed; what it changed can be rolled back, unless a subclass says otherwise."""

    context_full: ClassVar[bool] = False


class ContextFull(BackendError):  # noqa: N818 - names say what happened
    """The unit's worst case does not fit the context; nothing was fed (B10)."""

    context_full = True


class BackendRefused(BackendError):  # noqa: N818
    """It cannot do what is asked; asked again it would say the same."""


class BackendGone(BackendError):  # noqa: N818
    """The backend or its worker is lost, with all the sessions it held."""


class DeviceLost(BackendGone):
    """So is its device, while this process lives: only another process can have it again."""


@attrs.frozen(kw_only=True)
class BackendInfo:
    """What a backend is and can do.

    Attributes:
        name: as given to `--model`.
        modes: the session modes that it serves: of `video`, `audio`, `chat` and
            `transcription`.
        slots: sessions that it can hold at once.
        context_limit: most tokens in a session's KV cache.
        sliding_windows: the window policies that it honours; others are refused.
        can_rollback: a failed unit can be undone exactly (B3).
        deterministic: the same inputs and seed give the same bytes in the same environment.
        fingerprint: what a full replay must find equal: weights, versions, device, threads.
        speaks: it gives speech; else text alone. The one thing here that may change while it runs.
        varies: what is not proven to be the same bytes; empty where it is `deterministic`.
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
    varies: str = ""


class BackendSession(Protocol):
    """One session's state on a backend: its caches, carries, RNG counters and history."""

    @property
    def opened(self) -> Opened:
        """What opening gave."""
        ...

    async def run_unit(self, unit: Unit, cut: Cut | None = None) -> UnitResult:
        """Prefill and generate one unit.

        Args:
            unit: what was heard and seen.
            cut: stop at just this point, as a recording says; None runs until `interrupt`.

        Returns:
            The result, with `cut` set where it was interrupted.

        Raises:
            ContextFull: the worst case does not fit; nothing was fed.
            BackendError: it failed; call `rollback` before the next unit.
            BackendGone: the session is lost.
        """
        ...

    def interrupt(self, index: int) -> None:
        """Cut unit `index` at its next step; without effect if it is not running."""
        ...

    async def finalize(self, index: int, *, interrupted: bool) -> Finalized:
        """Feed the terminator and `</unit>`, then slide the window.

        Args:
            index: the unit that ran last.
            interrupted: its answer was withheld, so `chunk_eos` is fed as its terminator (B6).

        Raises:
            BackendError: the session's state is unknown; release it.
        """
        ...

    async def rollback(self, index: int) -> None:
        """Restore the state from before unit `index` exactly (B3).

        Raises:
            BackendError: it cannot; release the session.
        """
        ...

    async def release(self) -> None:
        """Give back everything the session holds; it never raises for a session that is lost."""
        ...


class TurnSession(Protocol):
    """One turn of chat on a backend: prefilled once, generated once, then released.

    What `interrupt` does:

    - A turn that is not answered yet has failed: `prefill` raises at its next step.
    - An answer ends before its next token, and there is no more speech of it. `TurnResult.cut` is
      that token's number, `generated_tokens` where only the speech behind the last token is cut.
    - Amid speech, what was not told of that speech is discarded, and the cut counts as one before
      the next token. Pieces that were told stay.

    So the pieces of a cut answer are always the first pieces of the whole one, and `generate` with
    `cut` gives its result again, byte for byte. It does not begin speech that stands right before
    that token; pieces of it that were told are found in the whole answer.
    """

    async def prefill(self) -> Prefill:
        """Feed the conversation and the generation prompt.

        Raises:
            ContextFull: it does not fit, with room for one token at least; nothing was fed.
            BackendError: it failed, or was cut; release the turn.
            BackendGone: the turn is lost.
        """
        ...

    async def generate(
        self, emit: Callable[[TurnChunk], None], cut: int | None = None
    ) -> TurnResult:
        """Answer, once `prefill` is done.

        Args:
            emit: told each piece as it is made, in order, from the event loop; it never blocks.
            cut: stop before this generated token, as a recording says; None runs until `interrupt`.

        Returns:
            The end; the texts of all pieces joined are its `text`.

        Raises:
            BackendError: it failed; release the turn.
            BackendGone: the turn is lost.
        """
        ...

    def interrupt(self) -> None:
        """Cut the turn, also where it has not begun; never blocks."""
        ...

    async def release(self) -> None:
        """Give back everything the turn holds; it never raises for a turn that is lost."""
        ...


class TranscriptSession(Protocol):
    """One transcription on a backend: utterance after utterance, chunk by chunk."""

    async def run_chunk(self, chunk: Chunk) -> ChunkResult:
        """Hear a second of an utterance, and write what was heard.

        Args:
            chunk: the next of its utterance; index 0 begins one, and forgets the last.

        Raises:
            ContextFull: it does not fit; nothing was fed.
            BackendError: it failed, and the utterance is lost; the next may begin.
            BackendGone: the session is lost.
        """
        ...

    async def release(self) -> None:
        """Give back everything the session holds; it never raises for a session that is lost."""
        ...


class Backend(Protocol):
    """One model and its weights, shared by all sessions."""

    @property
    def info(self) -> BackendInfo:
        """What it is; constant while it runs, but for `speaks`."""
        ...

    async def open(self, opening: Opening, *, slot: int) -> BackendSession:
        """Open a session on `slot` (0 to `info.slots` - 1) and prefill its prompt.

        Raises:
            ContextFull: the prompt does not fit.
            BackendRefused: it never will take this one.
            BackendError: it failed; the slot is as empty as before.
        """
        ...


@runtime_checkable
class Chats(Protocol):
    """A backend that answers turns of chat; its `info.modes` has `chat`."""

    async def chat(self, turn: Turn, *, slot: int) -> TurnSession:
        """Take a turn on `slot`, which is empty; it computes nothing yet.

        Raises:
            BackendRefused: it never will take this one; the text says why, to the client.
            BackendError: the turn cannot be taken; the slot is as empty as before.
        """
        ...


@runtime_checkable
class Transcribes(Protocol):
    """A backend that writes what it hears; its `info.modes` has `transcription`."""

    async def transcribe(self, *, slot: int) -> TranscriptSession:
        """Take a transcription on `slot`, which is empty; it computes nothing yet.

        Raises:
            BackendError: it cannot be taken; the slot is as empty as before.
        """
        ...


@runtime_checkable
class Closes(Protocol):
    """A backend that holds something which is not given back by forgetting it."""

    async def aclose(self) -> None:
        """Let go of everything, calls that hang included; nobody asks anything of it after this."""
        ...


@runtime_checkable
class Remote(Protocol):
    """A backend on another machine, which may be away when the server starts."""

    async def check(self) -> None:
        """Ask whether it serves, before anybody waits for it.

        Raises:
            BackendError: it does not, or not yet.
        """
        ...
