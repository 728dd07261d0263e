"""The command `antiphon recordings recover`: valid logs from damaged or unfinished ones.

The results are on stdout, as text or as one JSON object; a refused log is one line on stderr, and
does not stop the others. The logs themselves are only read.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final, Literal, NoReturn

import attrs
import click
from cattrs import unstructure

from recorder.format.errors import LogMisuse, RecorderError
from recorder.format.format import recording_id_of
from recorder.repair import Survey, recover, survey
from recorder.storage.store import Store
from recorder.write.disk import Disk, is_held
from recorder.write.files import new_file, own_as

from ..rerun.folder import logs_to_rewrite
from ..shared.commands import complaint, finish, reason
from ..shared.progress import Watch, progress, size_of
from ..shared.recordings import RecordingType, show_bytes

Result = Literal["recovered", "sound", "recovered before", "being written", "refused"]
"""`sound`: it has its end, and needs nothing; `refused`: no log can be made from it."""

ENDING: Final = "-recovered"
"""Of the new log's recording id, if no name is given."""
ROWS_MAX: Final = 20
"""Logs that are named; JSON names all."""


@attrs.frozen(kw_only=True)
class Done:
    """The result for one log.

    Attributes:
        output: the new log; None if none was written now.
        records: good ones.
        units: the last good unit's index and one.
        records_lost: missing in the new log.
        damage: the number of damaged places.
        tail_bytes: of an incomplete block at the end, left out.
        reason, file_bytes: of the new log.
        error: why there is no new log.
    """

    log: str
    result: Result
    output: str | None = None
    records: int = 0
    units: int = 0
    records_lost: int = 0
    damage: int = 0
    tail_bytes: int = 0
    reason: str | None = None
    file_bytes: int | None = None
    error: str | None = None


@click.command("recover")
@click.argument(
    "logs",
    metavar="LOG|DIR...",
    nargs=-1,
    required=True,
    type=RecordingType(many=True, is_local=True),
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help=f"The new log, only for one LOG  [default: next to LOG, with {ENDING} in its name].",
)
@click.option("--salvage", is_flag=True, help="Keep the records after lost ones too, with marks.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def recover_command(
    *, logs: tuple[Path, ...], output: Path | None, salvage: bool, as_json: bool
) -> None:
    """Make valid logs from a LOG that a crash or a bad disk has damaged; LOG does not change.

    A killed server leaves a log without an end, and perhaps half a block: that is cut off, and an
    end written. Where a disk lost records in the middle, the new log ends before the first of them,
    so that it replays to its end. With --salvage it continues after them: a mark stands for each
    lost record, all others keep their numbers, and a replay stops at the marks unless --go-on. The
    new log's `fin` names the losses.

    A folder stands for all logs in it, except those that are valid, being written, or recovered
    before.

    \b
    Exit codes:
      0  each log is valid, or recovered with no record missing
      1  recovered, but records are missing
      2  a log was not recovered: it is being written, a newer version wrote it, no session record
         is left, there is a file of that name, or there is no such log

    \b
    Examples:
      antiphon recordings recover recordings/rec-1.session.zst
      antiphon recordings recover --salvage --output whole.session.zst rec-1.session.zst
      antiphon recordings recover --json recordings | jq '.logs[] | select(.records_lost > 0)'
    """  # noqa: D301 - click takes a backspace to keep the lines
    found = logs_to_rewrite(logs, output)
    named = set(logs)
    with progress(2 * sum(map(size_of, found)), "recover") as watch:
        done = [_try(log, output, watch, salvage=salvage, is_named=log in named) for log in found]
    for it in done:
        if it.error is not None:
            click.echo(f"{it.log}: {it.error}", err=True)
    _finish(done, as_json=as_json)


def _try(log: Path, output: Path | None, watch: Watch, *, salvage: bool, is_named: bool) -> Done:
    try:
        target = _default_of(log) if output is None else output
        if not is_named and is_held(log):
            return Done(log=str(log), result="being written")
        if not is_named and target.exists():
            return Done(log=str(log), result="recovered before")
        return _recover(log, target, watch, salvage=salvage)
    except (OSError, RecorderError) as error:
        is_other = getattr(error, "filename", None) not in (None, log, str(log))
        why = complaint(error, log) if is_other else reason(error)
        return Done(log=str(log), result="refused", error=why)


def _default_of(log: Path) -> Path:
    try:
        return Store(log.parent).path(recording_id_of(log) + ENDING)
    except LogMisuse as error:
        raise LogMisuse("no name can be made of this one, so --output is needed") from error


def _recover(log: Path, target: Path, watch: Watch, *, salvage: bool) -> Done:
    found = survey(log, salvage=salvage, watch=watch)
    told = _told(log, found)
    if found.is_sound:
        return told
    with new_file(target) as part:
        made = recover(log, part, found, watch=watch)
        own_as(part, log)  # root may recover it, and a server with a user of its own serves it
    Disk().sync_directory(target.parent)
    return attrs.evolve(
        told,
        result="recovered",
        output=str(target),
        records_lost=found.records_lost,
        reason=str(made.reason),
        file_bytes=made.file_bytes,
    )


def _told(log: Path, found: Survey) -> Done:
    return Done(
        log=str(log),
        result="sound",
        records=found.records,
        units=found.units,
        damage=found.damage_count,
        tail_bytes=found.tail_bytes,
    )


def _finish(done: list[Done], *, as_json: bool) -> NoReturn:
    is_short = any(it.records_lost for it in done)
    exit_code = 2 if any(it.result == "refused" for it in done) else int(is_short)
    lines = []
    for it in done[:ROWS_MAX]:
        lines += [f"{it.log}: {it.result}", *(f"  {line}" for line in _lines(it))]
    if len(done) > ROWS_MAX:
        lines.append(f"and {len(done) - ROWS_MAX} more, see --json")
    if len(done) > 1:
        counts = Counter(it.result for it in done)
        lines.append(", ".join(f"{count} {result}" for result, count in counts.items()))
    body = {"exit_code": exit_code, "logs": unstructure(done)}
    finish(body, lines, as_json=as_json, exit_code=exit_code)


def _lines(done: Done) -> list[str]:
    if done.output is None:
        return []
    lines = [f"{done.output}: {done.records} records, {done.units} units"]
    if done.tail_bytes:
        lines.append(f"{done.tail_bytes} bytes of an incomplete block at the end were left out")
    if done.records_lost:
        lines.append(f"{done.records_lost} records are missing; damaged places: {done.damage}")
    elif done.damage:
        lines.append(f"damaged places, by which no record is lost: {done.damage}")
    size = show_bytes(done.file_bytes or 0)
    return [*lines, f"reason in its fin: {done.reason}; {size}"]
