"""What a model must be to run on the engine: its calls are generators of requests.

Each class here is a face that a model shows: its sessions and their units, and where it can, turns
of chat, requests with streaming input, transcriptions. A generator yields a request, is sent the
answer, and goes on until it returns; the engine drives those of all sessions together. What says
that it may be called from any thread is; all else runs in the engine's thread alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, runtime_checkable

from protocol.model import Cut, Finalized, Opened, Opening, Unit, UnitResult
from protocol.transcript import Chunk, ChunkResult
from protocol.turn import Prefill, Turn, TurnChunk, TurnResult

from ..backends.base import BackendInfo
from ..backends.forcing import Forced, ForcedResult
from ..backends.streams import Anchoring, Extended, Part, Sampled, SamplingParams


class SteppedSession(Protocol):
    """One session's state, whose calls are generators of requests."""

    @property
    def opened(self) -> Opened:
        """What opening gave."""
        ...

    def open(self) -> Generator[Any, Any, Opened]:
        """Prefill the prompt; where that fails, the slot is as empty as before."""
        ...

    def look(self, unit: Unit) -> Any:
        """Prepare a unit's pictures; called from any thread, changes nothing."""
        ...

    def unit(self, unit: Unit, pictures: Any, cut: Cut | None) -> Generator[Any, Any, UnitResult]:
        """Prefill and generate one unit."""
        ...

    def interrupt(self, index: int) -> None:
        """Cut unit `index`; called from any thread, also before the unit has begun."""
        ...

    def finalize(self, index: int, *, interrupted: bool) -> Generator[Any, Any, Finalized]:
        """Feed the terminator and `</unit>`, then slide the window."""
        ...

    def rollback(self, index: int) -> None:
        """Restore the state from before unit `index`."""
        ...

    def release(self) -> None:
        """Give back everything the session holds."""
        ...


@runtime_checkable
class SteppedForces(Protocol):
    """A stepped session whose units can be forced."""

    def look(self, unit: Unit) -> Any:
        """See `SteppedSession.look`."""
        ...

    def forced_unit(
        self, unit: Unit, pictures: Any, cut: Cut | None, forced: Forced
    ) -> Generator[Any, Any, ForcedResult]:
        """Prefill and generate one unit as it was recorded."""
        ...


class SteppedModel(Protocol):
    """A model whose sessions are generators of requests, and that answers requests in batches."""

    @property
    def info(self) -> BackendInfo:
        """What it is; constant while it runs."""
        ...

    def compute(self, works: Any) -> list[Any]:
        """Answer requests of one bucket, in their order."""
        ...

    def session(self, opening: Opening, *, slot: int) -> SteppedSession:
        """A session in an empty slot."""
        ...


class SteppedTurn(Protocol):
    """One turn of chat, whose calls are generators of requests."""

    def measure(self) -> int:
        """Lay the conversation out; gives how many pictures it has. Called from any thread."""
        ...

    def look(self, place: int) -> Any:
        """Prepare a picture, unless the turn is cut; called from any thread, changes nothing."""
        ...

    def see(self, place: int, slices: Any) -> Generator[Any, Any, None]:
        """Take in what `look` made."""
        ...

    def prefill(self) -> Generator[Any, Any, Prefill]:
        """Feed the conversation, once all pictures were seen."""
        ...

    def generate(
        self, emit: Callable[[TurnChunk], None], cut: int | None
    ) -> Generator[Any, Any, TurnResult]:
        """Answer; `emit` is told each piece, in the thread that drives the generator."""
        ...

    def interrupt(self) -> None:
        """Cut the turn; called from any thread, also before it has begun.

        What of the prefill is still to come raises `BackendError`, at its next step.
        """
        ...

    def release(self) -> None:
        """Give back everything the turn holds."""
        ...


@runtime_checkable
class SteppedChats(Protocol):
    """A stepped model that answers turns of chat."""

    def chat(self, turn: Turn, *, slot: int) -> SteppedTurn:
        """A turn in an empty slot."""
        ...


class SteppedAnchor(Protocol):
    """One request with streaming input, whose chunks are generators of requests."""

    def look(self, prompt: Sequence[Part], params: SamplingParams) -> Any:
        """Prepare the next chunk; called from any thread, changes nothing."""
        ...

    def extend(
        self, looked: Any, params: SamplingParams, emit: Callable[[Sampled], None]
    ) -> Generator[Any, Any, Extended]:
        """Compute a chunk and answer it; `emit` is told each token, in the driving thread."""
        ...

    def interrupt(self) -> None:
        """Cut the request for good; called from any thread."""
        ...

    def release(self) -> None:
        """Give back everything the request holds."""
        ...


@runtime_checkable
class SteppedStreams(Protocol):
    """A stepped model that takes streaming input."""

    def anchor(self, anchoring: Anchoring, *, slot: int) -> SteppedAnchor:
        """A request in an empty slot."""
        ...

    def token_id(self, name: str) -> int | None:
        """The id of a token by its name; None where there is none."""
        ...


class SteppedTranscript(Protocol):
    """One transcription, whose chunks are generators of requests."""

    def chunk(self, chunk: Chunk) -> Generator[Any, Any, ChunkResult]:
        """Hear a second, and write what is known by then."""
        ...

    def release(self) -> None:
        """Give back everything the transcription holds."""
        ...


@runtime_checkable
class SteppedTranscribes(Protocol):
    """A stepped model that can transcribe, if its `info.modes` says so."""

    def transcript(self, *, slot: int) -> SteppedTranscript:
        """A transcription in an empty slot."""
        ...
