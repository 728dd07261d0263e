"""What live transcription costs: `python -m tests.bench.streaming --help`.

**The delay of a word's text.** A real server, a real WebSocket, real-time speech. One session says
held-out phrases, each an utterance of its own: committed when it begins, sent in pieces of 100 ms
by the clock, closed after a second of quiet. The next begins when the server has answered it. A
word's delay runs from sending its last sample to the client's socket until the first delta with the
word is received and parsed. Its parts are the wait until the word's second is full, further seconds
that the model hears first (such words are `late`), and the server's, from a second's last byte to
the delta. A delta's second is taken to be the last full one when it came, which holds while a
second of sound takes less than a second to process.

A phrase's words are located by their lengths, with the following space, accurate to a tenth of a
second or so. A word came with the delta of its last letter. The text is aligned with the phrase, so
a wrong or missing word affects no other. The scripted model names the second that it heard.

**The cost of a second of sound as a stream grows.** Ten minutes through one anchor at full speed.
Only the model runs: one utterance in one slot, on this thread, whose CPU time is the cost. The same
sound repeats every tenth of the stream, so that all parts have equal input. The rows fed to the
language model are compared with each chunk's own: its prompt and generated tokens without the last,
which is never fed. More would mean recomputed history. Only attention may grow with the stream, up
to the model's window.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from difflib import SequenceMatcher
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import anyio
import attrs
import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from protocol.values.limits import NS_PER_MS
from protocol.values.messages import ErrorReport, TranscriptDelta, TranscriptDone
from protocol.values.model import INPUT_RATE_HZ, Chunk, ChunkResult
from runtime.client.duplex import TranscriptionSession
from runtime.client.errors import ClientError, SessionClosedError
from runtime.client.sdk import transcribe
from runtime.commands.bench import (
    MS,
    BenchError,
    Speech,
    machine_facts,
    machine_line,
    print_found,
    print_progress,
    table,
)
from runtime.commands.demo import served
from runtime.media.sound import read_wav
from runtime.model.backends.base import BackendError, ContextFull
from runtime.model.backends.minicpmo.anchor import Transcript
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.work import Compute, Feed, Work
from runtime.model.models import ModelUnknownError, ModelUnusableError, load_checkpoint
from runtime.net import process
from tests.models.blocking import alone

# -- phrases and their words ----------------------------------------------------------------------

HELDOUT: Final = Path(__file__).parents[2] / "fixtures" / "speech" / "heldout"
ROOM_DB: Final = -62.0
"""RMS of the quiet between phrases, relative to full scale: that of a quiet room."""
TAIL_SAMPLES: Final = INPUT_RATE_HZ
"""Quiet after a phrase until its utterance is closed, as a client would wait."""
PIECE_SAMPLES: Final = INPUT_RATE_HZ // 10
"""Of an append: 100 ms, as a microphone gives them; ten make a second."""
LEAD_TURN: Final = (5**0.5 - 1) / 2
"""Each phrase begins later in its second by this, modulo one, so that words end evenly in it."""
WORD: Final = re.compile(r"[\w']+")

_Samples = NDArray[np.float32]
Arrivals = list[int | None]
"""Each word's delta index; None if it never came."""


@attrs.frozen(kw_only=True)
class Phrase:
    """A held-out phrase of the fixtures.

    Attributes:
        text: in small letters.
        samples: 16 kHz mono, in [-1, 1].
        start: first sample of speech.
        end: the sample after the last of speech.
    """

    text: str
    samples: _Samples
    start: int
    end: int


@attrs.frozen(kw_only=True)
class SpokenWord:
    """A word, in small letters, and the utterance's sample after its estimated end."""

    text: str
    end: int


@attrs.frozen(kw_only=True)
class Utterance:
    """The speech between two final commits: 16 kHz mono in whole pieces, and its words."""

    samples: _Samples
    words: tuple[SpokenWord, ...]

    @property
    def pieces(self) -> list[_Samples]:
        """Its appends, in order."""
        return np.split(self.samples, len(self.samples) // PIECE_SAMPLES)


# -- the phrases --------------------------------------------------------------------------------


def load_phrases(count: int, folder: Path = HELDOUT) -> list[Phrase]:
    """Read held-out phrases, evenly out of all, or `BenchError`; repeated if too few."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except OSError as error:
        text = "bench streaming needs fixtures/speech/heldout, which only the source tree has"
        raise BenchError(text) from error
    known = [each for each in manifest["renderings"] if each["answer"]]
    if count <= len(known):
        chosen = [known[place * len(known) // count] for place in range(count)]
    else:
        chosen = [known[place % len(known)] for place in range(count)]
    return [
        Phrase(
            text=each["phrase"].lower(),
            samples=np.frombuffer(read_wav(folder / each["file"]), "<f4"),
            start=each["start"],
            end=each["end"],
        )
        for each in chosen
    ]


def words_of(phrase: Phrase) -> list[SpokenWord]:
    """Estimate where a phrase's words end, by their lengths; see the module's docstring."""
    words = phrase.text.split()
    letters = list(accumulate(len(word) + 1 for word in words))
    spoken = phrase.end - phrase.start
    return [
        SpokenWord(text=word, end=phrase.start + round(spoken * upto / letters[-1]))
        for word, upto in zip(words, letters, strict=True)
    ]


def make_utterance(phrase: Phrase, place: int) -> Utterance:
    """Say a phrase with quiet around it; its `place` from 0 decides where in the second."""
    lead = int(place * LEAD_TURN % 1 * INPUT_RATE_HZ)
    least = lead + max(len(phrase.samples), phrase.end + TAIL_SAMPLES)
    samples = quiet(-(-least // PIECE_SAMPLES) * PIECE_SAMPLES, place)
    samples[lead : lead + len(phrase.samples)] += phrase.samples
    words = tuple(attrs.evolve(word, end=lead + word.end) for word in words_of(phrase))
    return Utterance(samples=samples, words=words)


def quiet(samples: int, seed: int) -> _Samples:
    """Make the noise of a quiet room, (samples,), the same for the same seed."""
    noise = np.random.default_rng(seed).standard_normal(samples)
    made: _Samples = (noise * 10 ** (ROOM_DB / 20)).astype(np.float32)
    return made


# -- results ------------------------------------------------------------------------------------


def find_words(utterance: Utterance, number: int, deltas: Sequence[str]) -> Arrivals:
    """Find the delta of each word in the utterance's text."""
    del number
    found = list(WORD.finditer("".join(deltas).lower()))
    ends = list(accumulate(map(len, deltas)))
    arrivals: Arrivals = [None] * len(utterance.words)
    said = [word.text for word in utterance.words]
    heard = [match.group() for match in found]
    for block in SequenceMatcher(None, said, heard, autojunk=False).get_matching_blocks():
        for offset in range(block.size):
            last_letter = found[block.b + offset].end()
            arrivals[block.a + offset] = bisect_left(ends, last_letter)
    return arrivals


def find_seconds(utterance: Utterance, number: int, deltas: Sequence[str]) -> Arrivals:
    """As `find_words`, for the scripted model, which names the second that it heard."""
    seconds = [(word.end - 1) // INPUT_RATE_HZ for word in utterance.words]
    places = {delta.strip().partition("-")[2]: at for at, delta in enumerate(deltas)}
    return [places.get(f"{number}.{second}") for second in seconds]


Find = Callable[[Utterance, int, Sequence[str]], Arrivals]
"""`find_words` or `find_seconds`."""


# -- the delay of a word --------------------------------------------------------------------------

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


# -- the cost of a long stream --------------------------------------------------------------------

PARTS: Final = 10
"""Of the stream: its minutes, if it lasts ten."""
PAUSE_SAMPLES: Final = 2 * INPUT_RATE_HZ
"""Quiet between phrases: with less, ten minutes of text would not fit into `tiny`'s context."""
WARM_CHUNKS: Final = 3
"""Of an earlier utterance: first runs are slow."""


@attrs.frozen(kw_only=True)
class Part:
    """A tenth of the stream.

    Attributes:
        chunks: seconds processed.
        cpu_ms: mean CPU per chunk.
        step_ms: mean CPU per step of the language model: a chunk's prompt, or a token.
        own: of the computed tokens, prompts and generated tokens without each chunk's last.
        kv_length: tokens in the KV cache at its end.
    """

    chunks: int
    cpu_ms: float
    step_ms: float
    computed: int
    own: int
    kv_length: int


@attrs.frozen(kw_only=True)
class FlatResult:
    """The cost of a second in each part of a long stream.

    Attributes:
        seconds: of sound processed.
        is_whole: processed to its end; else the context was full before.
        last_of_first: CPU per chunk of the last part divided by the first.
        last_of_first_step: the same of `step_ms`, which does not depend on the amount of text.
        computed_again: tokens computed beyond the chunks' own; 0 is right.
    """

    seconds: int
    is_whole: bool
    parts: list[Part]
    last_of_first: float
    last_of_first_step: float
    computed_again: int


@attrs.frozen(kw_only=True)
class _Heard:
    """A chunk: CPU, steps of the language model, tokens computed, and its own."""

    cpu_ns: int
    step_ns: int
    steps: int
    computed: int
    own: int
    kv_length: int


class _Counting:
    """Answers requests, and counts the language model's rows and their cost."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self.rows = self.steps = self.step_ns = 0

    def __call__(self, works: Sequence[Work]) -> list[Any]:
        fed = [len(work.rows) for work in works if isinstance(work, Feed)]
        began_ns = time.thread_time_ns()
        answers = self._compute(works)
        if fed:
            self.rows += sum(fed)
            self.steps += 1
            self.step_ns += time.thread_time_ns() - began_ns
        return answers


def make_stream(phrases: Sequence[Phrase], seconds: int) -> Speech:
    """Join the phrases that fit, with pauses, to a loop of so many seconds, at least one."""
    samples = quiet(seconds * INPUT_RATE_HZ, 0)
    at = 0
    for phrase in phrases:
        after = at + len(phrase.samples)
        if after > len(samples):
            break
        samples[at:after] += phrase.samples
        at = after + PAUSE_SAMPLES
    return Speech(name="heldout", samples=samples)


def measure_flat(model: DuplexModel, phrases: Sequence[Phrase], seconds: int) -> FlatResult:
    """Run at least `PARTS` seconds in the first slot, empty before and after.

    `BenchError` if the model's context has no room for a stream.
    """
    speech = make_stream(phrases, max(1, seconds // PARTS))
    transcript = model.transcript(slot=0)
    try:
        heard = list(_listen(transcript, model.compute, speech, seconds))
    finally:
        transcript.release()
    if not heard:
        limit = model.info.context_limit
        raise BenchError(f"a context of {limit} tokens has no room for a stream")
    return _sum_up(heard, seconds)


def _listen(
    transcript: Transcript, compute: Compute, speech: Speech, seconds: int
) -> Iterator[_Heard]:
    """Run a short utterance, then the stream, as far as the context has room."""
    with suppress(ContextFull):
        for index in range(WARM_CHUNKS):
            _hear(transcript, compute, 0, index, speech)
        for index in range(seconds):
            yield _hear(transcript, compute, 1, index, speech)


def _hear(
    transcript: Transcript, compute: Compute, utterance: int, index: int, speech: Speech
) -> _Heard:
    chunk = Chunk(utterance=utterance, index=index, pcm=speech.second(index), seed=0)
    counting, began_ns = _Counting(compute), time.thread_time_ns()
    result: ChunkResult = alone(transcript.chunk(chunk), counting)
    return _Heard(
        cpu_ns=time.thread_time_ns() - began_ns,
        step_ns=counting.step_ns,
        steps=counting.steps,
        computed=counting.rows,
        own=result.prompt_tokens + result.generated_tokens - 1,
        kv_length=result.kv_length,
    )


def _sum_up(heard: Sequence[_Heard], seconds: int) -> FlatResult:
    parts = [
        Part(
            chunks=len(some),
            cpu_ms=round(float(np.mean([each.cpu_ns for each in some])) / NS_PER_MS, 3),
            step_ms=round(_step_ns(some) / NS_PER_MS, 3),
            computed=sum(each.computed for each in some),
            own=sum(each.own for each in some),
            kv_length=some[-1].kv_length,
        )
        for number in range(PARTS)
        if (some := heard[number * seconds // PARTS : (number + 1) * seconds // PARTS])
    ]
    first, last = parts[0], parts[-1]
    return FlatResult(
        seconds=len(heard),
        is_whole=len(heard) == seconds,
        parts=parts,
        last_of_first=round(last.cpu_ms / first.cpu_ms, 3),
        last_of_first_step=round(last.step_ms / first.step_ms, 3),
        computed_again=sum(each.computed - each.own for each in heard),
    )


def _step_ns(heard: Sequence[_Heard]) -> float:
    return sum(each.step_ns for each in heard) / sum(each.steps for each in heard)


# -- the command ----------------------------------------------------------------------------------

PHRASES: Final = 30
"""About a hundred words, in a minute and a half."""
PHRASES_MAX: Final = 1000
SECONDS: Final = 600
SECONDS_MIN: Final = 10
"""A second for each of the ten parts."""
SECONDS_MAX: Final = 3600
STREAM_PHRASES: Final = 100
"""More than a minute has room for."""
SCRIPTED: Final = "scripted"
SERVED_NAME: Final = "bench"
"""The model's served name, whatever its own is."""


@attrs.frozen(kw_only=True)
class StreamingResult:
    """The results of one run; the scripted model, which computes nothing, has no `flat`."""

    machine: dict[str, str | int | float]
    model: str
    live: LiveResult
    flat: FlatResult | None


@click.command("streaming")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--model",
    default="tiny",
    show_default=True,
    help="tiny, scripted, or a checkpoint's folder; one that transcribes.",
)
@click.option(
    "--phrases",
    type=click.IntRange(1, PHRASES_MAX),
    default=PHRASES,
    show_default=True,
    help="Said to a server at the pace of speech, one after the other; each takes three seconds.",
)
@click.option(
    "--seconds",
    type=click.IntRange(SECONDS_MIN, SECONDS_MAX),
    default=SECONDS,
    show_default=True,
    help="Of the one long stream, which is heard as fast as it goes.",
)
def streaming_command(*, as_json: bool, model: str, phrases: int, seconds: int) -> None:
    """Measure live transcription: how late its text is, and what a long stream costs.

    Held-out phrases are said to a server; a word's delay runs from its end to the first delta that
    holds it. Then ten minutes go only through the model. It takes about two minutes, on a machine
    that does nothing else meanwhile.
    """
    print_found(process.run(_run, model, phrases, seconds), show, as_json=as_json)


async def _run(model: str, count: int, seconds: int) -> StreamingResult:
    phrases = load_phrases(count)
    find: Find = find_words
    if model == SCRIPTED:
        flat, find = None, find_seconds
    else:
        flat = _measure_flat(model, load_phrases(STREAM_PHRASES), seconds)
    with tempfile.TemporaryDirectory(prefix="antiphon-bench-") as name:
        print_progress(f"starting a server with the {model} model")
        words = ("--slots", "1", "--served-model-name", SERVED_NAME)
        async with served(model, Path(name), *words) as url:
            live = await measure_live(url, SERVED_NAME, phrases, find, print_progress)
    return StreamingResult(machine=machine_facts(), model=model, live=live, flat=flat)


def _measure_flat(name: str, phrases: Sequence[Phrase], seconds: int) -> FlatResult:
    """Load the model and run the stream in this process, with nothing else."""
    try:
        model = load_checkpoint(name, 1, slots_max=1, device=None, dtype=None)
    except (ModelUnknownError, ModelUnusableError, BackendError) as error:
        raise BenchError(str(error)) from error
    if "transcription" not in model.info.modes:
        text = 'does not transcribe: its config.json has no "transcribes": true'
        raise BenchError(f"model {name} {text}")
    print_progress(f"a stream of {seconds} s, without a server")
    return measure_flat(model, phrases, seconds)


# -- for people ---------------------------------------------------------------------------------


def show(console: Console, found: StreamingResult) -> None:
    """Print tables."""
    console.print(f"{found.model} model; {machine_line(found.machine)}\n")
    live = found.live
    console.print(f"{live.words} words in {live.utterances} phrases, ms", _delays(live))
    if live.wait_share is not None:
        console.print(f"Waiting for a second to be full is {live.wait_share:.0%} of the delays")
    console.print(f"{live.late} words written a second late or more, {live.early} before they end")
    missed = ", ".join(f"{word} ({count})" for word, count in live.missed_words.items())
    console.print(f"{live.missed} words missed{': ' if missed else ''}{missed}\n")
    if found.flat is None:
        console.print("The scripted model computes nothing: no long stream was measured")
    else:
        _show_flat(console, found.flat)


def _delays(live: LiveResult) -> Table:
    columns = ("", "words", "p50", "p90", "p99", "max")
    spreads: tuple[tuple[str, Spread | None], ...] = (
        ("from a word's end to its delta", live.delay),
        ("  until its second was full", live.wait),
        ("  from a second's last byte", live.server),
    )
    rows = [(name, *_figures(times)) for name, times in spreads]
    return table(columns, rows, whole=len(columns))


def _figures(times: Spread | None) -> tuple[str, ...]:
    if times is None:
        return ("0", "-", "-", "-", "-")
    figures = (times.p50_ms, times.p90_ms, times.p99_ms, times.max_ms)
    return (str(times.count), *(f"{each:.0f}" for each in figures))


def _show_flat(console: Console, flat: FlatResult) -> None:
    columns = "part", "seconds", "CPU ms a second", "a step", "tokens computed", "its own", "held"
    rows = [
        (
            str(number),
            str(part.chunks),
            f"{part.cpu_ms:.2f}",
            f"{part.step_ms:.2f}",
            str(part.computed),
            str(part.own),
            str(part.kv_length),
        )
        for number, part in enumerate(flat.parts, 1)
    ]
    shown = table(columns, rows, whole=len(columns))
    console.print(f"One stream of {flat.seconds} s, by its tenths", shown)
    if not flat.is_whole:
        console.print("The model's context was full before the stream's end")
    console.print(
        f"The last part in terms of the first: CPU a second {flat.last_of_first:.2f}, "
        f"a step {flat.last_of_first_step:.2f}; {flat.computed_again} tokens computed again"
    )


if __name__ == "__main__":
    streaming_command(prog_name="python -m tests.bench.streaming")
