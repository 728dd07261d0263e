"""What the commands on logs share: opening them, saying what went wrong, and printing JSON.

Rules: what was found is on stdout, as text or as one JSON object whose keys stay; what went wrong
is one line on stderr, never a traceback. The exit code says which of them it was.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click

from recorder.errors import RecorderError
from recorder.format import SUFFIX
from recorder.reader import LogReader
from recorder.records import Record
from recorder.scan import Damage

from .progress import Watch, unwatched, watched

HELP: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""The settings of every command."""


class LogUnusableError(click.ClickException):
    """A log that cannot be read."""

    exit_code = 2


class OutputUnwritableError(click.ClickException):
    """A file that cannot be written where it should."""

    exit_code = 2


class NotComparableError(click.ClickException):
    """A log that cannot be run again here."""

    exit_code = 3


def refuse_log_as_output(output: Path, logs: Iterable[Path]) -> None:
    """Refuse to write something else over a log: there is no other copy of it.

    Args:
        output: what would be replaced.
        logs: that are read; all that have a log's name are meant too.

    Raises:
        click.UsageError: it is a log.
    """
    target = os.path.realpath(output)
    if target.endswith(SUFFIX) or target in map(os.path.realpath, logs):
        raise click.UsageError(f"--output {output} is a log: it would be overwritten")


@contextmanager
def opened_log(log: Path) -> Iterator[LogReader]:
    """Open a log, and close it.

    Raises:
        LogUnusableError: it cannot be opened.
    """
    try:
        reader = LogReader(log)
    except (OSError, RecorderError) as error:
        raise LogUnusableError(complaint(error, log)) from error
    with reader:
        yield reader


def records_of(log: Path, reader: LogReader, watch: Watch = unwatched) -> Iterator[Record | Damage]:
    """Read an opened log.

    Args:
        log: where it is.
        reader: of it.
        watch: told how far it is read.

    Raises:
        LogUnusableError: it cannot be read on.
    """
    try:
        yield from watched(reader, watch)
    except (OSError, RecorderError) as error:
        raise LogUnusableError(complaint(error, log)) from error


def complaint(error: Exception, file: Path) -> str:
    """Say in a line what went wrong, and with which file.

    Args:
        error: of the system, or of ours.
        file: which one, unless the system names another.
    """
    named = getattr(error, "filename", None)
    return f"{file if named is None else named}: {reason(error)}"


def reason(error: Exception) -> str:
    """Say why a file cannot be read or written, without its name."""
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return "it is a symbolic link, which is not followed: name the file itself"
    return (isinstance(error, OSError) and error.strerror) or str(error)


def unwritable(error: Exception, output: Path) -> OutputUnwritableError:
    """Say why a file cannot be written by a command that has `--force`."""
    is_there = isinstance(error, FileExistsError) and output.is_file()
    hint = ": --force replaces it" if is_there else ""
    return OutputUnwritableError(f"{output}: {reason(error)}{hint}")


def print_json(body: object) -> None:
    """Print a value for scripts; in ASCII, as a log can hold lone surrogates."""
    click.echo(json.dumps(body, indent=2))
