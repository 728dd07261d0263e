"""The command `antiphon dev shrink`: a small log for a fixture, from a long one that fails.

The result is on stdout, as text or as one JSON object; progress is on stderr, if that is a
terminal. The best log is written at the end, after an interrupt too, and kept elsewhere if it
cannot be written.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import attrs
import click
from rich.console import Console
from rich.status import Status

from recorder.format.errors import RecorderError
from recorder.format.mapping import EVENT_KINDS
from recorder.read.reader import read
from recorder.write.files import check_new_file, new_file

from ..rerun.remake import RemakeError
from ..rerun.words import describe
from ..shared.commands import UnusableError, complaint, print_json
from ..shared.recordings import RecordingType
from .candidate import Shape, shape_of
from .shrinker import NoFailureError, Progress, Shrinker
from .trial import CannotRunError, Trial

RUNS_MAX: Final = 500
"""Minutes of a command that takes half a second; a 10 minute log needs about 100."""
TIMEOUT_S: Final = 60.0
FOLDER_PREFIX: Final = "antiphon-shrink-"
"""Of the temporary folder of candidates."""
EVENTS_SHOWN: Final = 20
"""More are in the log."""
INTERRUPTED: Final = 128 + signal.SIGINT


class NothingYetError(click.ClickException):
    """Interrupted before there was a log to write."""

    exit_code = INTERRUPTED


@attrs.frozen(kw_only=True)
class Shrunk:
    """The result of a search, with the sizes before and after, and the runs of the command.

    `is_minimal`: no single event can be left out any more.
    """

    log: Path
    output: Path
    before: Shape
    after: Shape
    file_bytes: tuple[int, int]
    runs: int
    is_minimal: bool
    was_interrupted: bool
    elapsed_s: float


@click.command("shrink")
@click.argument("log", type=RecordingType())
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="The small log.")
@click.option("--exit-code", type=click.IntRange(0, 255), help="It fails only with this one.")
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    default=TIMEOUT_S,
    show_default=True,
    help="A run that takes longer has not failed.",
)
@click.option(
    "--budget",
    "runs_max",
    type=click.IntRange(min=2),
    default=RUNS_MAX,
    show_default=True,
    help="Most runs of the command.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def shrink_command(
    *,
    log: Path,
    command: tuple[str, ...],
    output: Path,
    exit_code: int | None,
    timeout_s: float,
    runs_max: int,
    as_json: bool,
) -> None:
    """Find the smallest log on which COMMAND still fails.

    Events are left out of LOG, sound is silenced and words are dropped, as long as COMMAND fails.
    This version's session machine makes the rest again: it verifies, and it replays. Each {} in
    COMMAND is the path of the log to try; without one, it comes last. COMMAND should fail for one
    reason only: a log that fails for another reason is accepted too.

    Ctrl-C ends the search and writes the best log so far.

    \b
    Examples:
      antiphon dev shrink long.session.zst --output small.session.zst -- ./check.sh
      antiphon dev shrink long.session.zst --output small.session.zst -- old/bin/antiphon replay {}
      antiphon dev shrink a.session.zst --output b.session.zst --exit-code 3 -- python check.py {}

    \b
    Exit codes:
      0    a small log was written
      1    COMMAND does not fail on LOG, or the failure is not in its events
      2    LOG cannot be read, COMMAND cannot be run, or OUTPUT cannot be written
      130  it was interrupted; the best log so far was written
    """  # noqa: D301 - click takes a backspace to keep the lines
    trial = Trial(command=command, exit_code=exit_code, timeout_s=timeout_s)
    try:
        check_new_file(output)
        shrunk = _shrink(log, output, trial, runs_max)
    except NoFailureError as error:
        raise click.ClickException(str(error)) from error
    except CannotRunError as error:
        raise UnusableError(str(error)) from error
    except (OSError, RecorderError, RemakeError) as error:
        raise UnusableError(complaint(error, log)) from error
    _tell(shrunk, as_json=as_json)
    sys.exit(INTERRUPTED if shrunk.was_interrupted else 0)


def _shrink(log: Path, output: Path, trial: Trial, runs_max: int) -> Shrunk:
    began = time.monotonic()
    before = shape_of(log)
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder, _watched(before) as show:
        search = Shrinker(log, Path(folder), trial.fails, runs_max=runs_max, watch=show)
        is_minimal = was_interrupted = False
        try:
            search.begin()
            is_minimal = search.run()
        except KeyboardInterrupt:
            was_interrupted = True
            if not search.best.exists():
                raise NothingYetError("interrupted before anything was found") from None
        _write(search.best, output, log)
    return Shrunk(
        log=log,
        output=output,
        before=before,
        after=shape_of(output),
        file_bytes=(log.stat().st_size, output.stat().st_size),
        runs=search.progress.runs,
        is_minimal=is_minimal,
        was_interrupted=was_interrupted,
        elapsed_s=time.monotonic() - began,
    )


def _write(best: Path, output: Path, log: Path) -> None:
    """Write the best log, or keep it elsewhere: minutes of work must not be lost."""
    try:
        with new_file(output, like=log) as part:
            shutil.copy(best, part)
    except OSError as error:
        kept = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX)) / best.name
        best.rename(kept)  # a full disk has room for it where it is
        raise UnusableError(f"{complaint(error, output)}; it was kept as {kept}") from error


@contextmanager
def _watched(before: Shape) -> Iterator[Callable[[Progress], None]]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with Status("shrinking", console=console) as status:

        def show(progress: Progress) -> None:
            left = progress.events or before.events
            status.update(
                f"run {progress.runs}: {left} of {before.events} events left, {progress.stage}"
            )

        yield show


def _tell(shrunk: Shrunk, *, as_json: bool) -> None:
    if as_json:
        body = {
            "log": str(shrunk.log),
            "output": str(shrunk.output),
            "events_before": shrunk.before.events,
            "events": shrunk.after.events,
            "bytes_before": shrunk.file_bytes[0],
            "bytes": shrunk.file_bytes[1],
            "runs": shrunk.runs,
            "minimal": shrunk.is_minimal,
            "interrupted": shrunk.was_interrupted,
            "elapsed_s": round(shrunk.elapsed_s, 3),
        }
        print_json(body)
        return
    why = "nothing more can be left out" if shrunk.is_minimal else "the budget is spent"
    click.echo(
        f"{shrunk.before.events} events became {shrunk.after.events},"
        f" {shrunk.file_bytes[0]} bytes {shrunk.file_bytes[1]}, in {shrunk.runs} runs"
        f" and {shrunk.elapsed_s:.1f} s: {'interrupted' if shrunk.was_interrupted else why}"
    )
    console = Console()
    events = (record for record in read(shrunk.output) if record.kind in EVENT_KINDS)
    for count, record in enumerate(events):
        if count == EVENTS_SHOWN:
            click.echo(f"  and {shrunk.after.events - count} more")
            break
        line = f"  {record.seq:>5}  {describe(record)}"
        console.print(line, markup=False, highlight=False, no_wrap=True, overflow="ellipsis")
    click.echo(f"written to {shrunk.output}")
