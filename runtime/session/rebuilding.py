"""Bringing a model on a new slot to a session's past (B11).

The log is read and stepped in a thread, some units at a time, so that a long past takes little
memory. Recorded units are forced; the chunks of an open utterance are transcribed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Final, TypeVar

import anyio.to_thread
import attrs

from protocol.values.model import PAST_UNITS_MAX, PastUnit
from recorder.read.past import Past
from recorder.read.reader import LogReader

from ..model.backends.base import BackendError, Rebuilds, Transcribes
from .opening import try_to_open
from .tenure import Tenure

Result = TypeVar("Result")


BATCH_BYTES: Final = 32 * 1024 * 1024
"""Sound and pictures that are handed to the model at once; a unit may have 64 MiB of pictures."""

open_log = LogReader
"""Opens a log for reading; a simulated disk has its own."""


async def in_thread(work: Callable[[], Result]) -> Result:
    """Read or step a log off the event loop."""
    return await anyio.to_thread.run_sync(work)


@attrs.frozen(kw_only=True)
class Feed:
    """What a rebuild fed: units or chunks, and the units of each long prefill (none: exact)."""

    steps: int
    batches: tuple[int, ...] = ()


async def bring_back(tenure: Tenure, past: Past, *, exact: bool) -> Feed:
    """Open the model, or its transcription, and feed it the past.

    Raises:
        BackendError: the model cannot, found another result than the recorded one, or the session
            ended meanwhile; or the log is damaged.
        BackendGone: the worker is lost.
    """
    units, batches = past.units(), list[int]()
    while batch := await in_thread(partial(_take, units)):
        if tenure.is_over.is_set():
            raise BackendError("the session is over")
        held = tenure.held or await _open(tenure, past)
        if not isinstance(held, Rebuilds):
            raise BackendError("the model cannot be brought to a past")
        await held.rebuild(batch, exact=exact)
        batches.append(len(batch))
    if past.is_damaged:
        raise BackendError("the log has a gap")
    if past.chunks:
        await _hear_again(tenure, past)
        return Feed(steps=len(past.chunks))
    if tenure.held is None:
        await _open(tenure, past)
    return Feed(steps=sum(batches), batches=() if exact else tuple(batches))


def _take(units: Iterator[PastUnit]) -> list[PastUnit]:
    """Take the next units, `PAST_UNITS_MAX` and about `BATCH_BYTES` at most; none at the end."""
    batch, size = list[PastUnit](), 0
    for past in islice(units, PAST_UNITS_MAX):
        batch.append(past)
        size += len(past.unit.pcm) + sum(map(len, past.unit.frames))
        if size >= BATCH_BYTES:
            break
    return batch


async def _open(tenure: Tenure, past: Past) -> object:
    if past.opening is None:
        raise BackendError("the log holds no opening of the model")
    tenure.held = await try_to_open(tenure.backend, past.opening, tenure.lease.slot, tenure.is_over)
    return tenure.held


async def _hear_again(tenure: Tenure, past: Past) -> None:
    assert isinstance(tenure.backend, Transcribes)
    tenure.transcript = await tenure.backend.transcribe(slot=tenure.lease.slot)
    for chunk, recorded in past.chunks:
        if tenure.is_over.is_set():
            raise BackendError("the session is over")
        result = await tenure.transcript.run_chunk(chunk)
        if result.token_ids != recorded.token_ids and tenure.backend.info.deterministic:
            text = f"chunk {chunk.index} of utterance {chunk.utterance} came out otherwise"
            raise BackendError(text)
