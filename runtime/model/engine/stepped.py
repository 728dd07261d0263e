"""The interface of a model on the engine: its calls are generators of requests.

The protocols cover sessions, chat turns, streaming requests and transcriptions; the model's `info`
says which of them it has. A generator yields a request, is sent the answer, and continues until it
returns; the engine runs those of all sessions together. Calls run only in the engine's thread,
unless marked as thread-safe. A call that makes a generator is thread-safe: first it prepares
pictures and prompts, without changing anything. Semantics are those of `runtime.model.backends`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, runtime_checkable

from protocol.values.model import (
    Chunk,
    ChunkResult,
    Cut,
    Finalized,
    Opened,
    Opening,
    PastUnit,
    Prefill,
    Turn,
    TurnChunk,
    TurnResult,
    Unit,
    UnitResult,
)

from ..backends.base import BackendInfo
from ..backends.forcing import Forced, ForcedResult
from ..backends.streams import Anchoring, Extended, Part, Sampled, SamplingParams


class Stepped(Protocol):
    """What a model holds for a session, a turn, a request or a transcription."""

    def release(self) -> None:
        """Free everything it holds."""
        ...


class SteppedSession(Stepped, Protocol):
    """One session's state."""

    @property
    def opened(self) -> Opened:
        """The result of opening."""
        ...

    def open(self) -> Generator[Any, Any, Opened]:
        """Prefill the prompt; on failure, the slot is left empty."""
        ...

    def unit(self, unit: Unit, cut: Cut | None) -> Generator[Any, Any, UnitResult]:
        """Prefill and generate one unit."""
        ...

    def forced_unit(
        self, unit: Unit, cut: Cut | None, forced: Forced
    ) -> Generator[Any, Any, ForcedResult]:
        """Prefill and generate one unit as it was recorded."""
        ...

    def interrupt(self, index: int) -> None:
        """Cut unit `index`; thread-safe, also before the unit begins."""
        ...

    def finalize(self, index: int, *, interrupted: bool) -> Generator[Any, Any, Finalized]:
        """Feed the terminator and `</unit>`, then slide the window."""
        ...

    def rollback(self, index: int) -> None:
        """Restore the state before unit `index`."""
        ...

    def rebuild(
        self, past: PastUnit, *, exact: bool, is_last: bool
    ) -> Generator[Any, Any, Finalized]:
        """Feed a past unit and its finalize; unless `exact`, it may wait until one `is_last`."""
        ...


class SteppedTurn(Stepped, Protocol):
    """One chat turn."""

    def measure(self) -> int:
        """Lay the conversation out; return the number of its pictures. Thread-safe."""
        ...

    def see(self, place: int) -> Generator[Any, Any, None]:
        """Encode a picture, unless the turn is cut."""
        ...

    def prefill(self) -> Generator[Any, Any, Prefill]:
        """Feed the conversation, after all its pictures."""
        ...

    def generate(
        self, emit: Callable[[TurnChunk], None], cut: int | None
    ) -> Generator[Any, Any, TurnResult]:
        """Answer; `emit` gets each piece, in the thread that drives the generator."""
        ...

    def interrupt(self) -> None:
        """Cut the turn, also before it begins; thread-safe. `prefill` then raises."""
        ...


class SteppedAnchor(Stepped, Protocol):
    """One streaming request."""

    def extend(
        self, prompt: Sequence[Part], params: SamplingParams, emit: Callable[[Sampled], None]
    ) -> Generator[Any, Any, Extended]:
        """Compute a chunk and answer it; `emit` gets each token, in the driving thread."""
        ...

    def interrupt(self) -> None:
        """Cut the request for good; thread-safe."""
        ...


@runtime_checkable
class SteppedStreams(Protocol):
    """A stepped model that takes streaming input."""

    def anchor(self, anchoring: Anchoring, *, slot: int) -> SteppedAnchor:
        """Begin a request in an empty slot."""
        ...

    def token_id(self, name: str) -> int | None:
        """The id of a token by its name, or None."""
        ...


class SteppedTranscript(Stepped, Protocol):
    """One transcription."""

    def chunk(self, chunk: Chunk) -> Generator[Any, Any, ChunkResult]:
        """Transcribe a second."""
        ...


class SteppedModel(Protocol):
    """A model that answers requests in batches; `info` says which calls it has."""

    @property
    def info(self) -> BackendInfo:
        """Its metadata; constant while it runs."""
        ...

    def compute(self, works: Any) -> list[Any]:
        """Answer requests of one bucket, in their order."""
        ...

    def session(self, opening: Opening, *, slot: int) -> SteppedSession:
        """Open a session in an empty slot."""
        ...

    def chat(self, turn: Turn, *, slot: int) -> SteppedTurn:
        """Begin a turn in an empty slot."""
        ...

    def transcript(self, *, slot: int) -> SteppedTranscript:
        """Begin a transcription in an empty slot."""
        ...
