"""The command `antiphon fork`: a recorded session continues from a unit with a change.

Result and comparison are on stdout, as text or as one JSON object; progress is on stderr.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click
from cattrs import unstructure
from rich.console import RenderableType

from recorder.format.errors import RecorderError
from runtime.commands.interrupts import run
from runtime.media.sound import AudioFileError, read_wav
from runtime.session.identity import SystemIdentities

from ..diff.command import read_and_compare
from ..diff.report import DiffReport
from ..diff.text import diff_lines
from ..rerun.difference import label
from ..rerun.environment import Loading
from ..shared.commands import NotComparableError, UnusableError, complaint, finish
from ..shared.progress import count
from ..shared.recordings import RecordingType, next_to
from .client import SETTING_NAMES, read_setting
from .make import make_fork
from .values import Change, Forked, ForkError, ForkRefusedError


@click.command("fork")
@click.argument("log", type=RecordingType())
@click.option("--at", required=True, type=click.IntRange(min=0), help="The unit, from 0.")
@click.option("--force-listen", is_flag=True, help="That unit has to listen, as if interrupted.")
@click.option(
    "--replace-audio",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="This sound file is heard from that unit on, and silence after it.",
)
@click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), help="Other random choices.")
@click.option(
    "--set",
    "settings",
    metavar="NAME=VALUE",
    multiple=True,
    help=f"Another setting; may be given again. One of: {', '.join(SETTING_NAMES)}.",
)
@click.option("--model", help="Another model than the one that LOG names.")
@click.option(
    "--out",
    metavar="FOLDER",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the fork's log goes, made if need be [default: next to LOG].",
)
@click.option("--anyway", is_flag=True, help="Fork though the environment or the model differs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def fork_command(
    *,
    log: Path,
    at: int,
    force_listen: bool,
    replace_audio: Path | None,
    seed: int | None,
    settings: tuple[str, ...],
    model: str | None,
    out: Path | None,
    anyway: bool,
    as_json: bool,
) -> None:
    """Continue the session in LOG from a unit with a change: what would the model have said?

    The recorded inputs bring the model to its state at the beginning of that unit. From there on
    the model decides, while the client sends the recorded frames at the recorded times. The fork
    has its own log, which names its parent, and is compared with it, unit by unit. It ends where
    LOG ends.

    --seed, --set and --model take effect when a session opens. Forced decoding keeps the recorded
    decisions before the unit, so that they change only the unit and its successors; the model must
    support it. With --at 0 the whole session is played again.

    \b
    Examples:
      antiphon fork call.session.zst --at 12 --force-listen
      antiphon fork call.session.zst --at 12 --replace-audio question.wav
      antiphon fork call.session.zst --at 12 --seed 7 --set temperature=0.2
      antiphon fork call.session.zst --at 0 --model /models/other --json | jq .diff.first

    \b
    Exit codes:
      0  the fork was made
      2  a file cannot be read or written, LOG is damaged or does not have the unit, or the change
         is not possible
      3  LOG cannot be continued here: the environment differs, or the model is missing or does not
         reach the recorded state
    """  # noqa: D301 - click takes a backspace to keep the lines
    try:
        change = Change(
            at=at,
            force_listen=force_listen,
            pcm=None if replace_audio is None else read_wav(replace_audio),
            seed=seed,
            settings=dict(map(read_setting, settings)),
            model=model,
        )
        with count("fork", quiet=as_json) as watch:
            make = partial(
                make_fork,
                log,
                change,
                out or next_to(log, log.name).parent,
                load=Loading.load,
                anyway=anyway,
            )
            identity = SystemIdentities().draw()
            path, forked = run(partial(make, identity=identity, watch=watch))
    except (ForkRefusedError, AudioFileError) as error:
        raise UnusableError(str(error)) from error
    except ForkError as error:
        raise NotComparableError(str(error)) from error
    except (OSError, RecorderError) as error:
        raise UnusableError(complaint(error, log)) from error
    report = read_and_compare(log, path)
    body = {"log": str(path), "exit_code": 0, **unstructure(forked), "diff": unstructure(report)}
    finish(body, _lines(path, forked, report), as_json=as_json)


def _lines(path: Path, forked: Forked, report: DiffReport) -> list[RenderableType]:
    prefix = forked.prefix
    lines: list[RenderableType] = [
        str(path),
        f"a fork of {label(forked.parent)} at unit {forked.unit}, by model {label(forked.model)}:"
        f" {forked.units} units",
    ]
    if prefix.held:
        lines.append(f"before it, {prefix.held} of {prefix.units} units were held to the recording")
    if prefix.first is not None:
        lines.append(f"before it, not as recorded: {prefix.first}")
    if forked.ended_early:
        lines.append("it went on where the recording ends, so that its client left it there")
    return [*lines, "A is the parent, B the fork", *diff_lines(report)]
