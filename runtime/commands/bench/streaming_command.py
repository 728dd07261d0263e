"""`antiphon bench streaming`: options and tables; see `streaming` and `streaming_flat`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import click
from rich.console import Console
from rich.table import Table

from ...model.backends.base import BackendError
from ...model.models import ModelUnknownError, ModelUnusableError, load_checkpoint
from .. import interrupts
from ..server_process import served
from .material import machine_facts
from .output import BenchError, machine_line, print_found, table, tell
from .streaming import LiveResult, Spread, measure_live
from .streaming_material import (
    Find,
    Phrase,
    find_seconds,
    find_words,
    load_phrases,
)

if TYPE_CHECKING:
    from .streaming_flat import FlatResult

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
    print_found(interrupts.run(_run, model, phrases, seconds), show, as_json=as_json)


async def _run(model: str, count: int, seconds: int) -> StreamingResult:
    phrases = load_phrases(count)
    find: Find = find_words
    if model == SCRIPTED:
        flat, find = None, find_seconds
    else:
        flat = _measure_flat(model, load_phrases(STREAM_PHRASES), seconds)
    with tempfile.TemporaryDirectory(prefix="antiphon-bench-") as name:
        tell(f"starting a server with the {model} model")
        words = ("--slots", "1", "--served-model-name", SERVED_NAME)
        async with served(model, Path(name), *words) as url:
            live = await measure_live(url, SERVED_NAME, phrases, find, tell)
    return StreamingResult(machine=machine_facts(), model=model, live=live, flat=flat)


def _measure_flat(name: str, phrases: Sequence[Phrase], seconds: int) -> FlatResult:
    """Load the model and run the stream in this process, with nothing else."""
    from .streaming_flat import measure_flat

    try:
        model = load_checkpoint(name, 1, slots_max=1, device=None, dtype=None)
    except (ModelUnknownError, ModelUnusableError, BackendError) as error:
        raise BenchError(str(error)) from error
    if "transcription" not in model.info.modes:
        text = 'does not transcribe: its config.json has no "transcribes": true'
        raise BenchError(f"model {name} {text}")
    tell(f"a stream of {seconds} s, without a server")
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
