"""The command `antiphon export`: a recorded session in the formats of other tools.

Results are on stdout, an error is one line on stderr. A failed export leaves no new file, and does
not touch an existing one, which is replaced with `--force` only.
"""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import click

from protocol.values.limits import NS_PER_MS
from recorder.format.format import SUFFIX

from ..shared.commands import (
    UnusableError,
    opened_log,
    print_json,
    records_of,
    refuse_log_as_output,
    unwritable,
)
from ..shared.progress import progress
from ..shared.recordings import RecordingType, next_to, show_bytes, show_seconds
from .moments import NoDatasetError, TooLongError
from .timeline import Timeline
from .writing import FORMATS, STREAMS, SUFFIXES, Format, export


@click.command("export")
@click.argument("log", type=RecordingType())
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
    refuse_log_as_output(target, [log])
    try:
        with opened_log(log) as reader:
            to_file = sys.stdout.buffer if to_stdout else target
            with progress(reader.tail_bytes, f"writing {chosen}") as watch:
                items = records_of(log, reader, watch)
                made = export(reader.head.fields, items, chosen, to_file, like=log, replaces=force)
    except NoDatasetError as error:
        raise UnusableError(f"{log}: {error}") from error
    except (OSError, TooLongError) as error:
        if to_stdout and isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.ENOSPC):
            raise  # stdout is the command's, not a file
        raise unwritable(error, target) from error
    if not to_stdout:
        _tell(log, target, chosen, made, as_json=as_json)
    if made.story.damage_count:
        text = f"the log is damaged {made.story.damage_count} times: there are gaps"
        click.echo(text, err=True)


def _tell(log: Path, target: Path, to: Format, made: Timeline, *, as_json: bool) -> None:
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
        print_json(body)
        return
    open_end = "" if finished else ", no fin: still open, or its server was killed"
    seconds, size = show_seconds(made.duration_ns), show_bytes(target.stat().st_size)
    click.echo(f"{target}  {seconds}, {size}{open_end}")
