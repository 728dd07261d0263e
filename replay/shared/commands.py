"""Common parts of the commands on logs: opening them, errors, text and JSON.

Results are on stdout, as text or as one JSON object with stable keys; an error is one line on
stderr, never a traceback. The exit code tells them apart.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import click
from rich.console import Console, RenderableType

from recorder.format.errors import RecorderError
from recorder.format.format import SUFFIX
from recorder.format.records import Record
from recorder.read.reader import LogReader
from recorder.read.scan import Damage

from .progress import Watch, unwatched, watched


class UnusableError(click.ClickException):
    """A log, a folder or a store that cannot be read, or a file that cannot be written."""

    exit_code = 2


class NotComparableError(click.ClickException):
    """A log that cannot be replayed here."""

    exit_code = 3


def refuse_log_as_output(output: Path, logs: Iterable[Path], option: str = "--output") -> None:
    """Refuse a log as output, of which there is no copy, by name or in `logs`: `UsageError`."""
    target = os.path.realpath(output)
    if target.endswith(SUFFIX) or target in map(os.path.realpath, logs):
        raise click.UsageError(f"{option} {output} is a log: it would be overwritten")


@contextmanager
def reading(log: Path, *also: type[Exception]) -> Iterator[None]:
    """Raise the errors of a log that cannot be read, and those of `also`, as `UnusableError`."""
    errors: tuple[type[Exception], ...] = (OSError, RecorderError, *also)
    try:
        yield
    except errors as error:
        raise UnusableError(complaint(error, log)) from error


@contextmanager
def opened_log(log: Path) -> Iterator[LogReader]:
    """Open a log, and close it; raises `UnusableError`."""
    with reading(log):
        reader = LogReader(log)
    with reader:
        yield reader


def records_of(log: Path, reader: LogReader, watch: Watch = unwatched) -> Iterator[Record | Damage]:
    """The items of an opened log; raises `UnusableError`."""
    with reading(log):
        yield from watched(reader, watch)


def complaint(error: Exception, file: Path) -> str:
    """One line with the error and its file, which is `file` unless the system names another."""
    named = getattr(error, "filename", None)
    return f"{file if named is None else named}: {reason(error)}"


def reason(error: Exception) -> str:
    """Why a file cannot be read or written, without its name."""
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return "it is a symbolic link, which is not followed: name the file itself"
    return (isinstance(error, OSError) and error.strerror) or str(error)


def unwritable(error: Exception, output: Path) -> UnusableError:
    """The error of a command that has `--force`, for an unwritable file."""
    is_there = isinstance(error, FileExistsError) and output.is_file()
    hint = ": --force replaces it" if is_there else ""
    return UnusableError(f"{output}: {reason(error)}{hint}")


def make_folder(folder: Path) -> None:
    """Make a new folder; `UnusableError`: it is there, or cannot be made."""
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UnusableError(f"{folder}: {reason(error)}") from error


def print_json(body: object) -> None:
    """Print a value for scripts; in ASCII, because a log can hold lone surrogates."""
    for piece in _pieces(body):
        click.echo(piece, nl=False)
    click.echo()


def _pieces(body: object) -> Iterator[str]:
    """Write a value; of an object, an iterator is written as an array, one item at a time."""
    if not isinstance(body, dict) or not body:
        yield json.dumps(body, indent=2)
        return
    before = "{"
    for name, value in body.items():
        yield f"{before}\n  {json.dumps(name)}: "
        if isinstance(value, Iterator):
            yield from _items(value)
        else:
            yield json.dumps(value, indent=2).replace("\n", "\n  ")
        before = ","
    yield "\n}"


def _items(items: Iterator[object]) -> Iterator[str]:
    before = "["
    for item in items:
        yield f"{before}\n    " + json.dumps(item, indent=2).replace("\n", "\n    ")
        before = ","
    yield "[]" if before == "[" else "\n  ]"


def print_all(console: Console, lines: Iterable[RenderableType]) -> None:
    """Print lines and tables; text from a log is not read as markup, colours or `:emoji:`."""
    for line in lines:
        if isinstance(line, str):
            console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)
        else:
            console.print(line)


def finish(
    body: object, lines: Iterable[RenderableType], *, as_json: bool, exit_code: int = 0
) -> NoReturn:
    """Print the result, as a value for scripts or as text, and exit."""
    if as_json:
        print_json(body)
    else:
        print_all(Console(), lines)
    sys.exit(exit_code)
