"""The command `antiphon recordings view`: a recorded session as one HTML file.

The page's path, or the page, is on stdout; an error is one line on stderr, never a traceback. No
incomplete page is left behind, and only `--force` replaces an existing file.
"""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

import attrs
import click

from recorder.format.format import SUFFIX
from recorder.storage.marks import marks_path, read_marks
from recorder.write.files import new_file

from ..diff.command import read_and_compare
from ..shared.commands import (
    opened_log,
    records_of,
    refuse_log_as_output,
    unwritable,
)
from ..shared.progress import progress
from ..shared.recordings import RecordingType, page_next_to, show_bytes
from .document import page_of
from .findings import Comparison, comparison_of

STDOUT: Final = "-"
_PATH: Final = click.Path(path_type=Path)


@click.command("view")
@click.argument("log", type=RecordingType())
@click.option("--output", "-o", type=_PATH, help="Where the page goes, - for stdout; else by LOG.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser.")
@click.option("--replay", "replayed", is_flag=True, help="Say what logic replay finds.")
@click.option(
    "--diff", "other", metavar="OTHER", type=RecordingType(), help="Show where OTHER differs."
)
def view_command(
    *,
    log: Path,
    output: Path | None,
    force: bool,
    opens: bool,
    replayed: bool,
    other: Path | None,
) -> None:
    """Write the recorded session LOG as one HTML file, to look at and to listen to.

    It shows both voices, video frames, words, states, units, the queue, the KV cache, drops, errors
    and marks on one time line that plays and seeks, and every record beneath. A place
    at which the session no longer replays as recorded is marked. The file needs no network and no
    other file. It holds the session's sound, pictures and words, and has the permissions of LOG.

    \b
    Examples:
      antiphon recordings view sessions/rec-000002.session.zst --open
      antiphon recordings view crash.session.zst --replay -o crash.html
      antiphon recordings view parent.session.zst --diff fork.session.zst
      antiphon recordings view s3://bucket/prefix/rec-000002

    \b
    Exit codes:
      0  written; a log with damage is shown with gaps
      2  a log cannot be read, or the page cannot be written
    """  # noqa: D301 - click takes a backspace to keep the lines
    target = output or page_next_to(log)
    is_stdout = str(target) == STDOUT
    if is_stdout and opens:
        raise click.UsageError("--open needs a file to open, not stdout")
    refuse_log_as_output(target, [each for each in (log, other) if each is not None])
    later = attrs.asdict(read_marks(marks_path(log)))
    with opened_log(log) as reader:
        comparison = None if other is None else _compared(log, other)
        with (
            progress(reader.tail_bytes, "view") as watch,
            _written(target, log, is_stdout=is_stdout, force=force) as file,
        ):
            items = records_of(log, reader, watch)
            chunks = page_of(
                *(reader.head.fields, items),
                replayed=replayed,
                comparison=comparison,
                later=later if any(later.values()) else None,
            )
            file.writelines(chunks)
    if is_stdout:
        return
    click.echo(f"{target}: {show_bytes(target.stat().st_size)}")
    if opens and not webbrowser.open(target.resolve().as_uri()):
        click.echo("there is no browser to open it in", err=True)


def _compared(log: Path, other: Path) -> Comparison:
    return comparison_of(read_and_compare(log, other), other.name.removesuffix(SUFFIX))


@contextmanager
def _written(target: Path, log: Path, *, is_stdout: bool, force: bool) -> Iterator[IO[bytes]]:
    if is_stdout:
        yield sys.stdout.buffer
        return
    try:
        with new_file(target, like=log, replaces=force) as part, part.open("wb") as file:
            yield file
    except OSError as error:
        raise unwritable(error, target) from error
