"""The command `antiphon recordings compact`: make finished logs smaller.

The savings are on stdout, as text or as one JSON object; a refused log is one line on stderr, and
does not stop the others. A log is replaced atomically, by one that was read back; it keeps its
owner, mode and times, so that retention counts its days as before.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Literal, NoReturn

import attrs
import click
from cattrs import unstructure

from recorder.format.errors import RecorderError
from recorder.repair import Compacted, compact, is_compact
from recorder.write.disk import Disk, is_held
from recorder.write.files import PART_PREFIX, new_file, own_as

from ..rerun.folder import logs_to_rewrite
from ..shared.commands import UnusableError, complaint, finish, reason
from ..shared.progress import Watch, progress, size_of
from ..shared.recordings import RecordingType, show_bytes

Result = Literal["compacted", "kept", "refused", "being written"]
"""`kept`: it is compact, or would not become smaller; `refused`: it was not changed."""

ROWS_MAX: Final = 20
"""Logs that are named; JSON names all."""


@attrs.frozen(kw_only=True)
class Done:
    """The result for one log: its size now, or the new log's, FLAC pieces, or the error."""

    log: str
    result: Result
    before_bytes: int
    after_bytes: int
    flac_blobs: int = 0
    error: str | None = None


@click.command("compact")
@click.argument(
    "logs",
    metavar="LOG|DIR...",
    nargs=-1,
    required=True,
    type=RecordingType(many=True, is_local=True),
)
@click.option("--output", type=click.Path(path_type=Path), help="The new log; only for one LOG.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def compact_command(*, logs: tuple[Path, ...], output: Path | None, as_json: bool) -> None:
    """Make finished logs smaller, with nothing lost: the same records, byte for byte.

    Sound that is exactly of 16 bits becomes FLAC, and all else is compressed as well as zstd can.
    A sixth or so is saved where duplex clients send 16-bit sound as floating point, less than a
    tenth of transcriptions, and a few hundredths where all sound is floating point. Each new log is
    read back and compared with the old one before it takes its place; with --output the old one
    stays. Versions of Antiphon that know no compacted logs refuse them.

    Logs that are being written, or compact, do not change. A log without an end, or with damage, is
    refused: `antiphon recordings recover` comes first.

    \b
    Exit codes:
      0  done; in a folder, logs that are being written do not count
      1  some logs were refused, and are as they were
      2  there is no such log, no log in the folder, or --output cannot be written

    \b
    Examples:
      antiphon recordings compact recordings
      antiphon recordings compact recordings/rec-1.session.zst --output archive/rec-1.session.zst
      antiphon recordings compact --json recordings | jq .saved_bytes
    """  # noqa: D301 - click takes a backspace to keep the lines
    found = logs_to_rewrite(logs, output)
    with progress(sum(map(size_of, found)), "compact") as watch:
        done = [_try(log, output, watch) for log in found]
    for it in done:
        if it.error is not None:
            click.echo(f"{it.log}: {it.error}", err=True)
    named = {str(log) for log in logs}
    is_short = any(it.result == "refused" or (it.error and it.log in named) for it in done)
    _finish(done, as_json=as_json, exit_code=1 if is_short else 0)


def _try(log: Path, output: Path | None, watch: Watch) -> Done:
    before_bytes = size_of(log)
    left = Done(log=str(log), result="kept", before_bytes=before_bytes, after_bytes=before_bytes)
    try:
        if is_held(log):
            return attrs.evolve(left, result="being written", error="it is being written")
        if is_compact(log):
            return left
        made = _replace(log, watch) if output is None else _write(log, output, watch)
    except (OSError, RecorderError) as error:
        if output is not None and getattr(error, "filename", None) == str(output):
            raise UnusableError(complaint(error, output)) from error
        return attrs.evolve(left, result="refused", error=reason(error))
    if made is None:
        return left
    return attrs.evolve(
        left, result="compacted", after_bytes=made.after_bytes, flac_blobs=made.flac_blobs
    )


def _write(log: Path, output: Path, watch: Watch) -> Compacted:
    with new_file(output, like=log) as part:
        made = compact(log, part, watch=watch)
    Disk().sync_directory(output.parent)
    return made


def _replace(log: Path, watch: Watch) -> Compacted | None:
    """Replace a log by its compacted one; None if it would not be smaller."""
    with TemporaryDirectory(prefix=PART_PREFIX, dir=log.parent) as folder:
        part = Path(folder) / log.name
        made = compact(log, part, watch=watch)
        if made.after_bytes >= made.before_bytes:
            return None
        own_as(part, log)
        shutil.copystat(log, part)
        part.replace(log)
    Disk().sync_directory(log.parent)
    return made


def _finish(done: list[Done], *, as_json: bool, exit_code: int) -> NoReturn:
    results = Counter(it.result for it in done)
    before_bytes = sum(it.before_bytes for it in done)
    saved_bytes = before_bytes - sum(it.after_bytes for it in done)
    body = {
        "exit_code": exit_code,
        "before_bytes": before_bytes,
        "saved_bytes": saved_bytes,
        "logs": unstructure(done),
    }
    lines = []
    for it in done[:ROWS_MAX]:
        sizes = f"{show_bytes(it.before_bytes)} -> {show_bytes(it.after_bytes)}"
        lines.append(f"{it.log}: {it.result}  {sizes if it.result == 'compacted' else ''}".rstrip())
    if len(done) > ROWS_MAX:
        lines.append(f"and {len(done) - ROWS_MAX} more, see --json")
    share = saved_bytes / before_bytes if before_bytes else 0.0
    told = ", ".join(f"{count} {result}" for result, count in results.items())
    saved = f"{show_bytes(saved_bytes)} of {show_bytes(before_bytes)} saved ({share:.1%})"
    finish(body, [*lines, f"{told}; {saved}"], as_json=as_json, exit_code=exit_code)
