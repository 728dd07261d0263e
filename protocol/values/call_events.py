"""The events of the calls of a model that answer turns and transcribe chunks (see `events`)."""

from __future__ import annotations

import attrs

from .transcript import ChunkResult
from .turn import Prefill, TurnChunk, TurnResult


@attrs.frozen(kw_only=True)
class TurnPrefilled:
    """The model holds a turn's conversation, and goes on to answer it."""

    at_ns: int
    prefill: Prefill


@attrs.frozen(kw_only=True)
class TurnProgress:
    """The model has made a piece of its answer."""

    at_ns: int
    chunk: TurnChunk


@attrs.frozen(kw_only=True)
class TurnDone:
    """The answer is over."""

    at_ns: int
    result: TurnResult


@attrs.frozen(kw_only=True)
class TurnFailed:
    """The turn's answer failed, or its rest.

    Attributes:
        context_full: the turn does not fit the context.
        refused: the reason for the client, if the model cannot do what the turn asks for; empty: it
            failed.
    """

    at_ns: int
    index: int
    context_full: bool = False
    refused: str = ""


@attrs.frozen(kw_only=True)
class ChunkDone:
    """The model has written the text of a chunk."""

    at_ns: int
    result: ChunkResult


@attrs.frozen(kw_only=True)
class ChunkFailed:
    """A chunk and so its utterance failed; `context_full`: nothing of the chunk was fed (B10)."""

    at_ns: int
    utterance: int
    index: int
    context_full: bool = False
