"""Common parts of the commands on logs: opening them, errors, text, tables, JSON and progress.

Results are on stdout, as text or as one JSON object with stable keys; an error is one line on
stderr, never a traceback. The exit code tells them apart. Progress is a bar on stderr, on a
terminal. Text from a log is never read as rich's markup.

A page that a command writes is one file that makes no requests. Its policy allows only its own
style, and its own script if it has one, by their hashes.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import html
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib.resources import files
from itertools import compress
from pathlib import Path
from typing import Any, Final, NoReturn

import click
from rich.box import SIMPLE
from rich.console import Console, Group, JustifyMethod, OverflowMethod, RenderableType
from rich.table import Table
from rich.text import Text

from recorder.format.format import SUFFIX, Record, RecorderError
from recorder.read.reader import LogReader
from recorder.read.scan import Damage
from recorder.storage.listing import Summary, summarize
from recorder.storage.store import local_log
from runtime.net.process import LINE_CHARS, stdout_console

# -- pages -----------------------------------------------------------------------------------------


def style_with(own: str) -> str:
    """Return a page's style: the colours, light and dark, and the head of all pages; then its own.

    Args:
        own: the rules of this page.
    """
    return _asset("base.css") + own


def head_of(title: str, policy: str, style: str) -> str:
    """Write a page up to its body; `policy` and `style` are the page's, the title is escaped."""
    return (
        _asset("head.html")
        .replace("{{policy}}", html.escape(policy))
        .replace("{{style}}", style)
        .replace("{{name}}", escaped(title))
    )


def policy_of(style: str, script: str = "") -> str:
    """Return the `Content-Security-Policy` of a page; pictures may be data within it."""
    scripts = f"script-src {_hash(script)}; " if script else ""
    return (
        f"default-src 'none'; {scripts}style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def escaped(text: str) -> str:
    """Escape text for HTML, attributes included, in ASCII."""
    return html.escape(text).encode("ascii", "xmlcharrefreplace").decode()


def printable(text: str) -> str:
    r"""Write what cannot be printed, and backslashes, as escapes such as `\x1b`.

    Two texts stay different. XML cannot hold all characters that names of files can.
    """
    return "".join(
        char
        if char.isprintable() and char != "\\"
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def counted(number: int, noun: str) -> str:
    """Write a count with its noun: `1 unit`, `2 units`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@cache
def _asset(name: str) -> str:
    return (files(__package__) / name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# -- progress --------------------------------------------------------------------------------------


Watch = Callable[[int], None]
"""Called with the progress since its last call: bytes of a log read, or model calls made."""


Count = Callable[[int, int], None]
"""Called with the number done, and the total."""

LOADING: Final = "loading model"
_PLAIN: Final[Mapping[str, Any]] = {"box": None, "pad_edge": False, "padding": (0, 2, 0, 0)}


def unwatched(_: int) -> None:
    """Show nothing."""


@contextmanager
def progress(total: int, what: str = "replay", *, of_calls: bool = False) -> Iterator[Watch]:
    """Show a bar over all logs, until the block ends; nothing unless stderr is a terminal.

    `total` are bytes to read, or calls of a model: the bar says that it loads until the first call.
    """
    columns = ("MofNComplete" if of_calls else "Download", "TimeRemaining")
    with _bar(LOADING if of_calls else what, total, *columns) as update:
        yield lambda done: update(advance=done, description=what)


@contextmanager
def count(what: str, *, quiet: bool = False) -> Iterator[Count]:
    """Show a bar over a count, until the block ends; nothing unless stderr is a terminal."""
    with _bar(what, None, "MofNComplete", quiet=quiet) as update:
        yield lambda done, total: update(completed=done, total=total)


@contextmanager
def _bar(
    what: str, total: int | None, *columns: str, quiet: bool = False
) -> Iterator[Callable[..., None]]:
    """Show a bar with these columns of rich, until the block ends; yield what updates it."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda **_: None
        return
    from rich import progress as rich

    amounts = (getattr(rich, f"{name}Column")() for name in columns)
    shown = (rich.TextColumn("{task.description}"), rich.BarColumn(), *amounts)
    with rich.Progress(*shown, console=console, transient=True) as bar:
        yield partial(bar.update, bar.add_task(what, total=total))


def summary_of(log: Path) -> Summary | None:
    """Summarize a log; None if it cannot be read."""
    try:
        info = local_log(log.name, log, log.stat())
        return None if info is None else summarize(info)
    except OSError:
        return None


def calls_of(log: Path) -> int:
    """The calls of its model in a log, by its summary; 0 without one."""
    it = summary_of(log)
    return 0 if it is None else (it.units or 0) + (it.turns or 0) + (it.chunks or 0)


def size_of(log: Path) -> int:
    """The size of a file; 0 if it is missing."""
    try:
        return log.stat().st_size
    except OSError:
        return 0


# -- logs and errors ------------------------------------------------------------------------------


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
        yield from reader.watched(watch)


def complaint(error: Exception, file: Path) -> str:
    """One line with the error and its file, which is `file` unless the system names another."""
    named = getattr(error, "filename", None)
    return f"{file if named is None else named}: {reason(error)}"


def reason(error: Exception) -> str:
    """Why a file cannot be read or written, without its name."""
    if not isinstance(error, OSError):
        return str(error)
    named = error.filename2 or error.filename
    path = None if named is None or isinstance(named, int) else Path(os.fsdecode(named))
    if error.errno == errno.ELOOP:
        return "it is a symbolic link, which is not followed: name the file itself"
    if path is not None and isinstance(error, FileNotFoundError) and not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if path is not None and isinstance(error, FileExistsError):
        return "it is a folder" if path.is_dir() else "it exists: give another name"
    return error.strerror or str(error)


def unwritable(error: Exception, output: Path) -> UnusableError:
    """The error of a command that has `--force`, for an unwritable file."""
    if isinstance(error, FileExistsError) and output.is_file():
        return UnusableError(f"{output} exists: --force replaces it")
    return UnusableError(f"{output}: {reason(error)}")


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
        print_all(stdout_console(), lines)
    sys.exit(exit_code)


# -- tables ---------------------------------------------------------------------------------------


def fitted(
    console: Console,
    columns: Mapping[str, Mapping[str, Any]],
    rows: Iterable[Sequence[str]],
    dispensable: Iterable[Sequence[str]],
) -> tuple[Table, list[str]]:
    """Make a table of plain text, without columns for which there is no room; return those too.

    `columns` has rich's settings of each, `dispensable` the columns in the order in which they go.
    """
    rows, left_out = [*rows], list[str]()
    unbounded = console.options.update(max_width=LINE_CHARS)
    for more in ((), *dispensable):
        left_out += more
        shown = [name not in left_out for name in columns]
        made = Table(**_PLAIN)
        for name in compress(columns, shown):
            made.add_column(name, no_wrap=True, **columns[name])
        for row in rows:
            made.add_row(*map(Text, compress(row, shown)))
        if console.measure(made, options=unbounded).maximum <= console.width:
            break
    return made, left_out


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    overflow: OverflowMethod = "ellipsis",
    more: str = "",
    first_chars_min: int | None = None,
    is_ruled: bool = False,
) -> RenderableType:
    """Write a table of plain text; columns whose name begins with `<` stand on the left.

    `overflow` is for text that is too long; `more` is a line below the table. `first_chars_min`:
    the first column is not made narrower. `is_ruled`: lines stand around the head and the end.
    """
    made = Table(box=SIMPLE) if is_ruled else Table(**_PLAIN)
    for at, name in enumerate(columns):
        justify: JustifyMethod = "left" if name.startswith("<") else "right"
        chars_min = None if at else first_chars_min
        made.add_column(
            name.removeprefix("<"), justify=justify, overflow=overflow, min_width=chars_min
        )
    for row in rows:
        made.add_row(*map(Text, row))
    return Group(made, Text(more)) if more else made
