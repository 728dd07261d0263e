"""The command `antiphon export`: a recorded session in the formats of other tools.

Results are on stdout, an error is one line on stderr. The file is written next to its name, with
its log's permissions, and renamed when it is complete: a failed export leaves no new file, and does
not touch an existing one, which is replaced with `--force` only.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Final, Literal, get_args

import click

from protocol.values.limits import NS_PER_MS
from recorder.format.format import SUFFIX
from recorder.format.records import Fields, Record
from recorder.read.scan import Damage
from recorder.write.files import new_file

from ..shared import commands
from ..shared.progress import progress
from ..shared.recordings import LogType, next_to, show_bytes, show_seconds
from . import formats, sound
from .timeline import Timeline

Format = Literal["wav", "srt", "vtt", "mp4", "jsonl", "mcap", "txt", "dataset"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)
SUFFIXES: Final[Mapping[str, Format]] = MappingProxyType(
    {**{f".{name}": name for name in FORMATS}, ".cast": "txt", ".tar": "dataset"}
)
"""Formats by a file's ending."""
STREAMS: Final[frozenset[Format]] = frozenset({"srt", "vtt", "jsonl", "txt"})
"""Formats written from start to end, which may go to stdout."""

_WRITERS: Final[Mapping[Format, Callable[[Timeline, BinaryIO], None]]] = MappingProxyType(
    {
        **{"wav": sound.write_wav, "mp4": sound.write_mp4},
        **{"srt": formats.write_srt, "vtt": formats.write_vtt, "txt": formats.write_cast},
        **{"jsonl": formats.write_jsonl, "mcap": formats.write_mcap},
        "dataset": formats.write_dataset,
    }
)


def export(
    head: Fields,
    items: Iterable[Record | Damage],
    to: Format,
    output: Path | BinaryIO,
    *,
    like: Path | None = None,
    replaces: bool = False,
) -> Timeline:
    """Write a log's session, given its head, records in order and damage; return its time line.

    Args:
        output: the file, or a stream for one of `STREAMS`.
        like: the log: the same people may read and write the file.
        replaces: replace an existing file.

    Raises:
        FileExistsError: there is a file of that name.
        OSError: it cannot be written.
        RecorderError: the log cannot be read.
        TooLongError: the session is longer than the format's sound can be.
    """
    timeline = Timeline(head, items)
    with _opened(output, like, replaces=replaces) as file:
        _WRITERS[to](timeline, file)
    return timeline


@contextmanager
def _opened(output: Path | BinaryIO, like: Path | None, *, replaces: bool) -> Iterator[BinaryIO]:
    if not isinstance(output, Path):
        yield output
        return
    with new_file(output, like=like, replaces=replaces) as part, part.open("w+b") as file:
        yield file


@click.command("export")
@click.argument("log", type=LogType())
@click.option("--to", type=click.Choice(FORMATS), help="The format; else the suffix of --output.")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file; next to LOG by default. - is stdout.",
)
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def export_command(
    *, log: Path, to: Format | None, output: Path | None, force: bool, as_json: bool
) -> None:
    """Write the recorded session LOG in a format of other tools.

    \b
      wav    both voices in stereo, the user left, the model right, to the sample
      mp4    the same with the user's pictures
      srt    captions, as SubRip; vtt: as WebVTT
      mcap   sound, pictures and text for Foxglove and other readers of MCAP
      jsonl  the time line: a line for each sound, picture, text, loss and refusal
      txt    the conversation as an asciicast: asciinema play FILE (also .cast)
      dataset  the seconds of a duplex session for a trainer, as a shard of WebDataset (.tar)

    All keep the session's clock: 0 is when the client connected. The user's sound ends when it
    arrived, the model's begins when it was sent, each after earlier sound of the same voice. A log
    whose server was killed is exported as far as it goes. WAV and MP4 hold six hours at most. The
    file has the permissions of LOG.

    \b
    Examples:
      antiphon export sessions/rec-000002.session.zst --to wav
      antiphon export sessions/rec-000002.session.zst -o call.mp4
      antiphon export crash.session.zst --to jsonl -o - | jq -r 'select(.text).text'

    \b
    Exit codes:
      0  written; damage of the log is reported, and the file has gaps there
      2  the log cannot be read, or the file cannot be written; no file is left
    """  # noqa: D301 - click takes a backspace to keep the lines
    suffix = None if output is None else SUFFIXES.get(output.suffix.lower())
    chosen = to or suffix
    if chosen is None:
        raise click.UsageError(f"give --to, or an --output that ends with {', '.join(SUFFIXES)}")
    to_stdout = str(output) == "-"
    if to_stdout and chosen not in STREAMS:
        raise click.UsageError(f"{chosen} needs a file, not stdout")
    ending = "tar" if chosen == "dataset" else chosen
    target = output or next_to(log, f"{log.name.removesuffix(SUFFIX)}.{ending}")
    commands.refuse_log_as_output(target, [log])
    try:
        with commands.opened_log(log) as reader:
            to_file = sys.stdout.buffer if to_stdout else target
            with progress(reader.tail_bytes, f"writing {chosen}") as watch:
                items = commands.records_of(log, reader, watch)
                made = export(reader.head.fields, items, chosen, to_file, like=log, replaces=force)
    except formats.NoDatasetError as error:
        raise commands.UnusableError(f"{log}: {error}") from error
    except (OSError, sound.TooLongError) as error:
        if to_stdout and isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.ENOSPC):
            raise  # stdout is the command's, not a file
        raise commands.unwritable(error, target) from error
    if not to_stdout:
        _print(log, target, chosen, made, as_json=as_json)
    if made.story.damage_count:
        text = f"the log is damaged {made.story.damage_count} times: there are gaps"
        click.echo(text, err=True)


def _print(log: Path, target: Path, to: Format, made: Timeline, *, as_json: bool) -> None:
    finished = made.story.end.finished
    if as_json:
        body = {
            "log": str(log),
            "output": str(target),
            "format": to,
            "duration_ms": round(made.duration_ns / NS_PER_MS, 3),
            "bytes": target.stat().st_size,
            "finished": finished,
            "damage_count": made.story.damage_count,
        }
        commands.print_json(body)
        return
    open_end = "" if finished else ", no fin: still open, or its server was killed"
    seconds, size = show_seconds(made.duration_ns), show_bytes(target.stat().st_size)
    click.echo(f"{target}  {seconds}, {size}{open_end}")
