"""The commands `antiphon recordings verify`, `recover`, `compact`, `prune` and `marks`.

The results are on stdout, as text or as one JSON object; a log that is refused is one line on
stderr, and does not stop the others. `recover` only reads its logs. `compact` replaces a log
atomically, by one that was read back, and keeps its owner, mode and times, so that retention counts
its days as before. `prune` removes logs as a server does by `record_keep_days`.

None imports a model, and `verify` not even the session machine, so that it starts quickly.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import attrs
import click
from rich.console import RenderableType

from protocol.values.limits import MS_PER_S
from recorder.format.format import LogMisuse, RecorderError, recording_id_of
from recorder.read.scan import Damage
from recorder.repair import Compacted, Report, compact, is_compact, recover, survey, verify
from recorder.storage import marks
from recorder.storage.remote import RemoteStore, logs_of
from recorder.storage.store import FRESH_S, Logs, Pruned, Retention, Store, prune
from recorder.write.files import PART_PREFIX, Disk, copy_owner, is_held, new_file

from ..rerun.difference import label
from ..shared import commands, recordings
from ..shared.commands import (
    UnusableError,
    Watch,
    counted,
    finish,
    opened_log,
    printable,
    progress,
    reason,
    size_of,
    summary_of,
)
from ..shared.recordings import RecordingType, read_size, read_span, show_bytes

# -- marks -----------------------------------------------------------------------------------------


@click.command("marks")
@click.argument("log", type=RecordingType(is_local=True))
@click.option("--add", "text", help="Add a mark with this text, at --at.")
@click.option("--at", "at_s", type=click.FloatRange(min=0), help="Its place, in seconds.")
@click.option("--to", "to_s", type=click.FloatRange(min=0), help="Its end in seconds, of a range.")
@click.option("--remove", "number", type=click.IntRange(min=1), help="Remove the mark NUMBER.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def marks_command(
    *,
    log: Path,
    text: str | None,
    at_s: float | None,
    to_s: float | None,
    number: int | None,
    as_json: bool,
) -> None:
    """List the annotations next to LOG, or add or remove one.

    They are remarks on a session that has ended, and stand in a file next to its log, which never
    changes. The console, `antiphon recordings view` and inspect show them. Marks that clients set
    while the session ran are in the log itself, and stay there.

    \b
    Examples:
      antiphon recordings marks last --add "answers too late" --at 12.5
      antiphon recordings marks rec-1 --remove 2

    \b
    Exit codes:
      0  listed; as it is after the change
      2  the log or the file cannot be read or written, or there is no such mark
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
    if (text is None) is not (at_s is None):
        raise click.UsageError("--add and --at are given together")
    path, now_ms = marks.marks_path(log), int(time.time() * MS_PER_S)
    with opened_log(log):
        pass
    if (text is not None or number is not None) and is_held(log):
        raise UnusableError(f"{log}: it is being written: use its server's API")
    try:
        if text is not None and at_s is not None:
            at_ms, end_ms = (round(it * MS_PER_S) for it in (at_s, at_s if to_s is None else to_s))
            made = marks.add_mark(path, at_ms=at_ms, end_ms=end_ms, text=text, by="", now_ms=now_ms)
            copy_owner(path, log)
            summary = summary_of(log)
            if summary is not None and at_ms > (summary.duration_ms or at_ms):
                text = f"the session was over by --at {at_s:g}: --remove {made.number} undoes it"
                click.echo(f"{log}: {text}", err=True)
        if number is not None and not marks.remove_mark(path, number, by="", now_ms=now_ms):
            raise FileNotFoundError
    except FileNotFoundError as error:
        raise UnusableError(f"{log}: there is no mark {number} next to it") from error
    except marks.TooManyMarks as error:
        raise UnusableError(f"{log}: it has had its {marks.MARKS_MAX} marks already") from error
    except (OSError, ValueError) as error:
        raise UnusableError(f"{path}: {reason(error)}") from error
    found = marks.read_marks(path)
    lines = [
        f"{it.number:>3}  {it.at_ms / MS_PER_S:.3f} s  {printable(it.text)}"
        + (f"  ({printable(it.by)})" if it.by else "")
        for it in found.marks
    ]
    if found.damaged:
        lines.append(f"{counted(found.damaged, 'line')} cannot be read")
    finish({"log": str(log), **attrs.asdict(found)}, lines or ["no marks"], as_json=as_json)


ROWS_MAX: Final = 20
"""Logs that are named; JSON names all."""
SHOWN_MAX: Final = 5
"""Damages printed one by one; JSON has more of them."""
ENDING: Final = "-recovered"
"""Of the recording id of a recovered log, if no name is given."""

_PATH: Final = click.Path(path_type=Path)
_LOGS: Final = click.argument(
    "logs",
    metavar="LOG|DIR...",
    nargs=-1,
    required=True,
    type=RecordingType(many=True, is_local=True),
)
_JSON: Final = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def _logs_to_rewrite(logs: tuple[Path, ...], output: Path | None) -> list[Path]:
    from ..rerun.folder import logs_to_rewrite  # with the session machine

    return logs_to_rewrite(logs, output)


def _more(count: int) -> list[str]:
    return [f"and {count - ROWS_MAX} more, see --json"] if count > ROWS_MAX else []


def _counted(results: Counter[str]) -> str:
    return ", ".join(f"{count} {result}" for result, count in results.items())


# -- verify ----------------------------------------------------------------------------------------


@click.command("verify")
@click.argument("log", type=RecordingType())
@_JSON
def verify_command(log: Path, as_json: bool) -> None:
    """Check that LOG is as written: every checksum, the chain, its end and seek table.

    \b
    Exit codes:
      0  intact; `state: open` means that its end is still missing: it is being written, or its
         server was killed, and nothing that a client saw is lost
      1  damaged
      2  no session record is left, or there is no such file
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
    with commands.reading(log):
        report = verify(log)
    body = {"log": str(log), "exit_code": report.exit_code, **attrs.asdict(report)}
    commands.finish(body, verify_lines(report), as_json=as_json, exit_code=report.exit_code)


def verify_lines(report: Report) -> list[RenderableType]:
    """Describe the state of a log."""
    lines: list[RenderableType] = [f"state: {report.state}"]
    if report.state == "unreadable":
        return [*lines, report.detail or "no session record is left"]
    lines.append(
        f"{counted(report.blocks, 'block')}, {counted(report.records, 'record')}"
        f" ({report.first_seq} to {report.last_seq}), {counted(report.units, 'unit')},"
        f" last frame sent {report.last_tx_ordinal}"
    )
    if report.tail_bytes:
        lines.append(f"{report.tail_bytes} bytes of an incomplete block at the end are left out")
    if report.fin_ok is False:
        lines.append("its end (fin) does not match the records before it")
    return lines + damage_lines(report.damage, report.damage_count)


def damage_lines(damage: Sequence[Damage], count: int) -> list[RenderableType]:
    """Describe the first damages of a log."""
    lines: list[RenderableType] = []
    for item in damage[:SHOWN_MAX]:
        lost = f", records lost from {item.first_seq}: {item.records}" if item.records else ""
        lines.append(f"  damage at byte {item.offset}: {item.reason}, {label(item.detail)}{lost}")
    if count > SHOWN_MAX:
        lines.append(f"  and {counted(count - SHOWN_MAX, 'more damage')}")
    return [*lines, *dict.fromkeys(item.advice for item in damage if item.advice)]


# -- recover ---------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Recovered:
    """The result for one log.

    Attributes:
        result: `recovered`; `sound`: it has its end, and needs nothing; `recovered before`; `being
            written`; `refused`: no log can be made from it.
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
    result: str
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
@_LOGS
@click.option(
    "--output",
    type=_PATH,
    help=f"The new log, for a single LOG [default: next to LOG, with {ENDING} in its name].",
)
@click.option("--salvage", is_flag=True, help="Also keep the records after lost ones, with marks.")
@_JSON
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
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
    found, named = _logs_to_rewrite(logs, output), set(logs)
    with progress(2 * sum(map(size_of, found)), "recover") as watch:
        done = [
            _recovered(log, output, watch, salvage=salvage, is_named=log in named) for log in found
        ]
    for it in done:
        if it.error is not None:
            click.echo(f"{it.log}: {it.error}", err=True)
    is_short = any(it.records_lost for it in done)
    exit_code = 2 if any(it.result == "refused" for it in done) else int(is_short)
    lines = [line for it in done[:ROWS_MAX] for line in _recovered_lines(it)] + _more(len(done))
    lines += [_counted(Counter(it.result for it in done))] if len(done) > 1 else []
    body = {"exit_code": exit_code, "logs": [attrs.asdict(it) for it in done]}
    commands.finish(body, lines, as_json=as_json, exit_code=exit_code)


def _recovered(
    log: Path, output: Path | None, watch: Watch, *, salvage: bool, is_named: bool
) -> Recovered:
    try:
        target = _default_of(log) if output is None else output
        if not is_named and is_held(log):
            return Recovered(log=str(log), result="being written")
        if not is_named and target.exists():
            return Recovered(log=str(log), result="recovered before")
        return _recover(log, target, watch, salvage=salvage)
    except (OSError, RecorderError) as error:
        is_other = getattr(error, "filename", None) not in (None, log, str(log))
        why = commands.complaint(error, log) if is_other else reason(error)
        return Recovered(log=str(log), result="refused", error=why)


def _default_of(log: Path) -> Path:
    try:
        return Store(log.parent).path(recording_id_of(log) + ENDING)
    except LogMisuse as error:
        raise LogMisuse("no name can be derived from this one: give --output") from error


def _recover(log: Path, target: Path, watch: Watch, *, salvage: bool) -> Recovered:
    found = survey(log, salvage=salvage, watch=watch)
    result = Recovered(
        log=str(log),
        result="sound",
        records=found.records,
        units=found.units,
        damage=found.damage_count,
        tail_bytes=found.tail_bytes,
    )
    if found.is_sound:
        return result
    with new_file(target) as part:
        why = recover(log, part, found, watch=watch)
        copy_owner(part, log)  # root may recover it, and a server with a user of its own serves it
    Disk().sync_directory(target.parent)
    return attrs.evolve(
        result,
        result="recovered",
        output=str(target),
        records_lost=found.records_lost,
        reason=str(why),
        file_bytes=target.stat().st_size,
    )


def _recovered_lines(it: Recovered) -> list[str]:
    lines = [f"{it.log}: {it.result}"]
    if it.output is None:
        return lines
    kept = f"{counted(it.records, 'record')} kept, and an end"
    lines.append(f"  {it.output}: {kept}; {counted(it.units, 'unit')}")
    if it.tail_bytes:
        lines.append(f"  {it.tail_bytes} bytes of an incomplete block at the end were left out")
    if it.records_lost:
        lines.append(f"  missing records: {it.records_lost}; damaged places: {it.damage}")
    elif it.damage:
        lines.append(f"  damaged places, by which no record is lost: {it.damage}")
    return [*lines, f"  reason in its fin: {it.reason}; {show_bytes(it.file_bytes or 0)}"]


# -- compact ---------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Compaction:
    """The result for one log: its size now, or the new log's, FLAC pieces, or the error.

    `result` is `compacted`; `kept`: it is compact, or would not become smaller; `being written`; or
    `refused`: it was not changed.
    """

    log: str
    result: str
    before_bytes: int
    after_bytes: int
    flac_blobs: int = 0
    error: str | None = None


@click.command("compact")
@_LOGS
@click.option("--output", type=_PATH, help="The new log, for a single LOG.")
@_JSON
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
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
    found = _logs_to_rewrite(logs, output)
    with progress(sum(map(size_of, found)), "compact") as watch:
        done = [_compacted(log, output, watch) for log in found]
    for it in done:
        if it.error is not None:
            click.echo(f"{it.log}: {it.error}", err=True)
    named = {str(log) for log in logs}
    exit_code = int(any(it.result == "refused" or (it.error and it.log in named) for it in done))
    before_bytes = sum(it.before_bytes for it in done)
    saved_bytes = before_bytes - sum(it.after_bytes for it in done)
    body = {
        "exit_code": exit_code,
        "before_bytes": before_bytes,
        "saved_bytes": saved_bytes,
        "logs": [attrs.asdict(it) for it in done],
    }
    lines = []
    for it in done[:ROWS_MAX]:
        sizes = f"  {show_bytes(it.before_bytes)} -> {show_bytes(it.after_bytes)}"
        lines.append(f"{it.log}: {it.result}{sizes if it.result == 'compacted' else ''}")
    lines += _more(len(done))
    share = saved_bytes / before_bytes if before_bytes else 0.0
    saved = f"{show_bytes(saved_bytes)} of {show_bytes(before_bytes)} saved ({share:.1%})"
    lines.append(f"{_counted(Counter(it.result for it in done))}; {saved}")
    commands.finish(body, lines, as_json=as_json, exit_code=exit_code)


def _compacted(log: Path, output: Path | None, watch: Watch) -> Compaction:
    size = size_of(log)
    left = Compaction(log=str(log), result="kept", before_bytes=size, after_bytes=size)
    try:
        if is_held(log):
            return attrs.evolve(left, result="being written", error="it is being written")
        if is_compact(log):
            return left
        made = _replace(log, watch) if output is None else _write(log, output, watch)
    except (OSError, RecorderError) as error:
        if output is not None and getattr(error, "filename", None) == str(output):
            raise commands.UnusableError(commands.complaint(error, output)) from error
        return attrs.evolve(left, result="refused", error=reason(error))
    if made is None:
        return left
    after = attrs.evolve(left, after_bytes=made.after_bytes, flac_blobs=made.flac_blobs)
    return attrs.evolve(after, result="compacted")


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
        copy_owner(part, log)
        shutil.copystat(log, part)
        part.replace(log)
    Disk().sync_directory(log.parent)
    return made


# -- prune -----------------------------------------------------------------------------------------


@click.command("prune")
@click.argument("place", metavar="DIR|URL")
@click.option(
    "--store", metavar="URL", help="With a DIR: the object store, from which they are removed too."
)
@click.option(
    "--older-than", type=read_span, metavar="SPAN", help="Logs that last changed longer ago: 30d."
)
@click.option(
    "--larger-than", type=read_size, metavar="SIZE", help="The oldest, while all take more: 50GB."
)
@click.option("--dry-run", is_flag=True, help="Only list the logs that would be removed.")
@_JSON
def prune_command(
    *,
    place: str,
    store: str | None,
    older_than: float | None,
    larger_than: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove recorded sessions, the oldest first: by age, by total size, or both.

    They are removed from a folder, or under a URL of an object store; with --store from both, each
    recording counted once. In a store, age counts from the upload.

    A log that is being written is never removed, nor is one that changed within the last minute.
    Only session logs of the folder or prefix itself are touched, and the annotations next to them.
    A removed log is gone.

    \b
    Examples:
      antiphon recordings prune recordings --older-than 30d --dry-run
      antiphon recordings prune recordings --older-than 30d --larger-than 50GB
      antiphon recordings prune recordings --store s3://bucket/prefix --older-than 90d

    \b
    Exit codes:
      0  done, even if no log was removed
      1  some logs could not be removed
      2  the folder or the store cannot be read, or neither an age nor a size is given
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
    if older_than is None and larger_than is None:
        raise click.UsageError("give --older-than SPAN, --larger-than SIZE, or both")
    logs = recordings.logs_at(place)
    if store is not None:
        logs = _both(logs, store)
    with recordings.reading_place(place):
        retention = Retention(age_s_max=older_than, bytes_max=larger_than)
        done = prune(logs, retention, now_s=time.time(), dry_run=dry_run)
    for failure in done.failed:
        click.echo(f"{failure.info.place}: {failure.reason}", err=True)
    body, lines = _pruned_json(place, done, dry_run), _pruned_lines(done, dry_run)
    commands.finish(body, lines, as_json=as_json, exit_code=int(bool(done.failed)))


def _both(local: Logs, url: str) -> Logs:
    if not isinstance(local, Store):
        raise click.UsageError("--store is for a folder; or prune the URL itself")
    remote = recordings.logs_at(url)
    if not isinstance(remote, RemoteStore):
        raise click.UsageError(f"--store {url}: not the URL of a store")
    with recordings.reading_place(url):
        remote.check()
    return logs_of(local, remote)


def _pruned_json(place: str, done: Pruned, dry_run: bool) -> dict[str, object]:
    removed = [
        {"recording_id": it.info.recording_id, "cause": it.cause}
        | {"file_bytes": it.info.file_bytes, "modified_ms": it.info.modified_ns // 1_000_000}
        for it in done.removed
    ]
    failed = [{"recording_id": it.info.recording_id, "reason": it.reason} for it in done.failed]
    return {
        "directory": place,
        "dry_run": dry_run,
        "removed": removed,
        "freed_bytes": done.freed_bytes,
        "failed": failed,
        "held_logs": done.held_logs,
        "kept_logs": done.kept_logs,
        "kept_bytes": done.kept_bytes,
    }


def _pruned_lines(done: Pruned, dry_run: bool) -> Iterator[str]:
    for it in done.removed[:ROWS_MAX]:
        moment = recordings.show_moment(it.info.modified_ns // 1_000_000)
        size = show_bytes(it.info.file_bytes)
        yield f"{it.info.recording_id}  {moment}  {size}  {it.cause}"
    yield from _more(len(done.removed))
    verb = "would remove" if dry_run else "removed"
    freed, kept = show_bytes(done.freed_bytes), show_bytes(done.kept_bytes)
    yield f"{verb} {counted(len(done.removed), 'log')}, {freed}; {done.kept_logs} left, {kept}"
    if done.held_logs:
        why = f"being written, or changed within the last {FRESH_S:g} s"
        yield f"kept though due: {done.held_logs} ({why})"
