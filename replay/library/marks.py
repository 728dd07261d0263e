"""`antiphon recordings marks`: annotations of a recording, in a file next to its log."""

from __future__ import annotations

import time
from pathlib import Path

import attrs
import click

from protocol.values.limits import MS_PER_S
from recorder.storage import marks
from recorder.write.files import is_held, own_as

from ..shared.commands import UnusableError, finish, opened_log, reason
from ..shared.page import printable
from ..shared.recordings import RecordingType


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
            marks.add_mark(path, at_ms=at_ms, end_ms=end_ms, text=text, by="", now_ms=now_ms)
            own_as(path, log)
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
        lines.append(f"{found.damaged} lines cannot be read")
    finish({"log": str(log), **attrs.asdict(found)}, lines or ["no marks"], as_json=as_json)
