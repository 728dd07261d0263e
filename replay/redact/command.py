"""The command `antiphon recordings redact`: a log that can be shown to others.

The removed content is on stdout, as a table or as one JSON object; an error is one line on stderr.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import click
from rich.console import Console

from protocol.values.limits import NS_PER_S
from recorder.format.records import Record
from recorder.read.reader import LogReader
from recorder.read.scan import Damage
from recorder.write.files import new_file

from ..rerun.remake import head_record, write
from ..shared.commands import print_all, print_json, reading
from ..shared.progress import progress, watched
from ..shared.recordings import RecordingType
from ..shared.tables import table
from .media import PictureStyle
from .policy import KINDS, Kind, Policy, Side, Tally
from .redaction import Redacted, RedactError, Redaction, rehearse, to_json


@click.command("redact")
@click.argument("log", type=RecordingType())
@click.option("--output", type=click.Path(path_type=Path), help="The new log.")
@click.option(
    "--side",
    type=click.Choice(("user", "model", "both")),
    default="both",
    show_default=True,
    help="The side whose content is taken out.",
)
@click.option(
    "--kind",
    "kinds",
    type=click.Choice(tuple(KINDS)),
    multiple=True,
    help="What; may be given several times. Without it: everything.",
)
@click.option("--from", "from_s", type=click.FloatRange(min=0), default=0.0, help="From second S.")
@click.option(
    "--to",
    "to_s",
    type=click.FloatRange(min=0),
    help="Up to second S; not of a chat or a transcription.",
)
@click.option(
    "--image",
    type=click.Choice(("blur", "remove")),
    default="remove",
    show_default=True,
    help="Pictures become a few blocks of colour, or grey.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be taken out, and write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def redact_command(
    *,
    log: Path,
    output: Path | None,
    side: str,
    kinds: tuple[str, ...],
    from_s: float,
    to_s: float | None,
    image: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Take the content out of LOG, and write the rest, which still replays.

    Sound becomes silence, words become others of the same length, pictures become grey or a few
    blocks of colour; token ids, speech codes and hashes from which content could be guessed are
    taken out too. Lengths, times, counts and settings stay, and so the session takes the same
    course: logic replay holds. A full replay does not: the model would hear something else.

    Kinds: audio, video (camera frames, and files of videos), image (pictures in a chat), text,
    prompt, voice (reference audio), name (names that clients and operators gave).

    \b
    Examples:
      antiphon recordings redact a.session.zst --output shown.session.zst
      antiphon recordings redact a.session.zst --output b.session.zst --kind video --image blur
      antiphon recordings redact a.session.zst --output b.session.zst --side user --from 12 --to 20
      antiphon recordings redact a.session.zst --dry-run

    \b
    Exit codes:
      0  redacted
      2  nothing was written: LOG cannot be read, is damaged or does not replay, or there is a file
         of that name
    """  # noqa: D301 - click takes a backspace to keep the lines
    if (output is None) is not dry_run:
        raise click.UsageError("either --output or --dry-run is needed")
    policy = Policy(
        side=cast("Side", side),
        kinds=frozenset(cast("tuple[Kind, ...]", kinds or tuple(KINDS))),
        from_ns=round(from_s * NS_PER_S),
        to_ns=None if to_s is None else round(to_s * NS_PER_S),
        pictures=cast("PictureStyle", image),
    )
    with reading(log, RedactError):
        found = _rehearse(log, policy)
        tally = found.tally if output is None else _write(log, output, policy, found)
    _tell(log, output, policy, found, tally, as_json=as_json)


def _rehearse(log: Path, policy: Policy) -> Redacted:
    with LogReader(log) as reader, progress(reader.tail_bytes, "reading") as watch:
        return rehearse(reader.head.fields, watched(reader, watch), policy)


def _write(log: Path, output: Path, policy: Policy, found: Redacted) -> Tally:
    run = Redaction(policy)

    def records(items: Iterator[Record | Damage]) -> Iterator[Record]:
        yield head_record(found.head)
        yield from run.records(items)

    with (
        LogReader(log) as reader,
        progress(reader.tail_bytes, "writing") as watch,
        new_file(output, like=log) as part,
    ):
        write(part, records(watched(reader, watch)))
    return run.tally


def _tell(
    log: Path,
    output: Path | None,
    policy: Policy,
    found: Redacted,
    tally: Tally,
    *,
    as_json: bool,
) -> None:
    removed = found.tally.to_json()
    if as_json:
        body = {
            "log": str(log),
            "output": None if output is None else str(output),
            **to_json(policy),
            "removed": removed,
            "records": found.records,
            "records_left_out": found.left_out,
            "pictures_without_content": tally.headers_only,
        }
        print_json(body)
        return
    rows = [
        [f"{value:,}" if isinstance(value, int) else value for value in row.values()]
        for row in removed
    ]
    shown = table(("<kind", "<side", "pieces", "bytes"), rows, is_ruled=True)
    print_all(Console(), [shown if removed else "nothing to take out"])
    if tally.headers_only:
        click.echo(
            f"{tally.headers_only} pictures were too short to be drawn: only headers are left"
        )
    if found.left_out:
        click.echo(f"{found.left_out} records that are not the session's own were left out")
    click.echo(f"{found.records} records" + ("" if output is None else f" in {output}"))
