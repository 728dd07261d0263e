"""The delay of a word's text: a real server, a real WebSocket, real-time speech.

One session says held-out phrases (`streaming_material`), each an utterance of its own: committed
when it begins, sent in pieces of 100 ms by the clock, closed after a second of quiet. The next
begins when the server has answered it. A word's delay runs from sending its last sample to the
client's socket until the first delta with the word is received and parsed. Its parts are the wait
until the word's second is full, further seconds that the model hears first (such words are `late`),
and the server's, from a second's last byte to the delta. A delta's second is taken to be the last
full one when it came, which holds while a second of sound takes less than a second to process.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import anyio
import attrs
import numpy as np

from protocol.values.messages import ErrorReport, TranscriptDelta, TranscriptDone
from protocol.values.model import INPUT_RATE_HZ

from ...client.errors import ClientError, SessionClosedError
from ...client.sdk import transcribe
from ...client.transcription import TranscriptionSession
from .material import MS
from .output import BenchError
from .streaming_material import (
    PIECE_SAMPLES,
    Find,
    Phrase,
    Utterance,
    make_utterance,
)

PIECES_A_SECOND: Final = INPUT_RATE_HZ // PIECE_SAMPLES
ANSWER_WAIT_S: Final = 60.0
"""For a closed utterance: many times the processing of all its seconds on a busy machine."""


@attrs.frozen(kw_only=True)
class Spread:
    """Percentiles of durations in milliseconds, by nearest rank."""

    count: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float


def spread_of(durations_s: Sequence[float]) -> Spread | None:
    """Sum up durations; None if there are none."""
    if not durations_s:
        return None
    ranks = np.percentile(durations_s, (50, 90, 99, 100), method="inverted_cdf")
    p50_ms, p90_ms, p99_ms, max_ms = (round(float(rank) * MS, 3) for rank in ranks)
    return Spread(
        count=len(durations_s), p50_ms=p50_ms, p90_ms=p90_ms, p99_ms=p99_ms, max_ms=max_ms
    )


@attrs.frozen(kw_only=True)
class Told:
    """The result of one utterance; times are seconds of one clock, those of pieces when sent."""

    utterance: Utterance
    sent_s: tuple[float, ...]
    closed_s: float
    deltas: tuple[tuple[str, float], ...]


@attrs.frozen(kw_only=True)
class Delay:
    """The delay of one word.

    Attributes:
        wait_s: from its end until its second was full.
        late: further seconds that the model heard before it wrote the word.
        late_s: how long these took.
        server_s: from the last byte of the last of them to the delta.
    """

    wait_s: float
    late: int
    late_s: float
    server_s: float

    @property
    def whole_s(self) -> float:
        """From the word's end to the delta."""
        return self.wait_s + self.late_s + self.server_s


@attrs.frozen(kw_only=True)
class LiveResult:
    """The delays of all words.

    Attributes:
        missed: words never written.
        missed_words: these words with their counts.
        early: words written before their estimated end; they have no delay.
        late: other words that the model wrote a second or more after it could.
        delay: from a word's end to its first delta; null if no word came.
        wait: of that, until the second was full: structural, a chunk is a second.
        server: of that, from the last byte of a second to its delta.
        wait_share: the waits' share of all delays.
    """

    utterances: int
    words: int
    missed: int
    missed_words: dict[str, int]
    early: int
    late: int
    delay: Spread | None
    wait: Spread | None
    server: Spread | None
    wait_share: float | None


# -- measuring ----------------------------------------------------------------------------------


async def measure_live(
    url: str,
    model: str,
    phrases: Sequence[Phrase],
    find: Find,
    tell: Callable[[str], None] = lambda _: None,
) -> LiveResult:
    """Say phrases, at least one, to a server in sequence, and measure their words.

    `find` returns the delta of each word. `BenchError` if the session fails or ends early.
    """
    told: list[Told] = []
    try:
        async with transcribe(url, model=model) as session:
            for place, phrase in enumerate(phrases):
                tell(f"phrase {place + 1} of {len(phrases)}: {phrase.text}")
                told.append(await _say(session, make_utterance(phrase, place)))
    except ClientError as error:
        raise BenchError(f"the session failed: {error}") from error
    return sum_up_live(told, find)


async def _say(session: TranscriptionSession, utterance: Utterance) -> Told:
    """Say an utterance by the clock, and read its text to the end."""
    sent_s: list[float] = []
    closed_s = 0.0

    async def send() -> None:
        nonlocal closed_s
        began_s = anyio.current_time()
        with suppress(SessionClosedError):  # The events still to be read give the reason.
            for number, piece in enumerate(utterance.pieces, 1):
                # A piece exists once it was fully spoken.
                await anyio.sleep_until(began_s + number / PIECES_A_SECOND)
                await session.append(piece)
                sent_s.append(anyio.current_time())
            await session.finish()
            closed_s = anyio.current_time()

    failures: list[Exception] = []
    deltas: list[tuple[str, float]] = []
    with anyio.move_on_after(ANSWER_WAIT_S + len(utterance.samples) / INPUT_RATE_HZ) as waiting:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            try:
                deltas = await _read(session)
            except (ClientError, BenchError) as error:
                failures.append(error)  # Not raised in the nursery, which would wrap it in a group.
                tasks.cancel_scope.cancel()
    if failures:
        raise failures[0]
    if waiting.cancelled_caught:
        raise BenchError(f"an utterance was not answered within {ANSWER_WAIT_S:g} s")
    return Told(utterance=utterance, sent_s=tuple(sent_s), closed_s=closed_s, deltas=tuple(deltas))


async def _read(session: TranscriptionSession) -> list[tuple[str, float]]:
    deltas: list[tuple[str, float]] = []
    async for event in session:
        match event:
            case TranscriptDelta(text=text):
                deltas.append((text, anyio.current_time()))
            case TranscriptDone():
                return deltas
            case ErrorReport(message=message, code=code):
                raise BenchError(f"the server reported an error: {message} ({code})")
    raise AssertionError("a session that is over raises")


# -- sums ---------------------------------------------------------------------------------------


def delay_of(told: Told, end: int, arrived_s: float) -> Delay | None:
    """Split a word's delay; `end` is the sample after its last.

    None if its delta came before its second was full: its end was estimated too late.
    """
    full_s = [*told.sent_s[PIECES_A_SECOND - 1 :: PIECES_A_SECOND], told.closed_s]
    second = (end - 1) // INPUT_RATE_HZ
    written = bisect_right(full_s, arrived_s) - 1
    if written < second:
        return None
    return Delay(
        wait_s=full_s[second] - told.sent_s[(end - 1) // PIECE_SAMPLES],
        late=written - second,
        late_s=full_s[written] - full_s[second],
        server_s=arrived_s - full_s[written],
    )


def sum_up_live(told: Sequence[Told], find: Find) -> LiveResult:
    """Sum up all words, of the utterances in order."""
    missed: Counter[str] = Counter()
    delays: list[Delay] = []
    early = 0
    for number, each in enumerate(told):
        texts = [text for text, _ in each.deltas]
        words = each.utterance.words
        for word, place in zip(words, find(each.utterance, number, texts), strict=True):
            if place is None:
                missed[word.text] += 1
            elif (delay := delay_of(each, word.end, each.deltas[place][1])) is None:
                early += 1
            else:
                delays.append(delay)
    whole_s = sum(delay.whole_s for delay in delays)
    return LiveResult(
        utterances=len(told),
        words=sum(len(each.utterance.words) for each in told),
        missed=missed.total(),
        missed_words=dict(sorted(missed.items())),
        early=early,
        late=sum(delay.late > 0 for delay in delays),
        delay=spread_of([delay.whole_s for delay in delays]),
        wait=spread_of([delay.wait_s for delay in delays]),
        server=spread_of([delay.server_s for delay in delays]),
        wait_share=round(sum(it.wait_s for it in delays) / whole_s, 3) if delays else None,
    )
