"""The command `antiphon eval`: how the conversations of a folder went, from their logs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final, NoReturn

import click

from recorder.format.format import SUFFIX

from ..rerun.folder import find_logs
from ..shared.commands import UnusableError, print_all, print_json
from ..shared.progress import progress, size_of
from ..shared.recordings import LogType
from . import text
from .condition import Condition, judge
from .evaluate import Evaluation, evaluate
from .options import ConditionType
from .reports import Reports
from .table import MEASURES

HOLDS: Final = "condition holds: {}"
_PATH: Final = click.Path(path_type=Path)


@click.command("eval")
@click.argument("logs", metavar="DIR|LOG...", nargs=-1, type=LogType())
@click.option("--definitions", is_flag=True, help="Print what each measure is, and read no log.")
@click.option(
    "--by",
    type=click.Choice(list(MEASURES)),
    metavar="MEASURE",
    help="List the recordings that are worst by this measure first, in --html too.",
)
@click.option(
    "--fail-if",
    "conditions",
    multiple=True,
    type=ConditionType(),
    metavar="CONDITION",
    help="Exit with 1 if this holds, such as 'take_over_rate < 0.9'; may be repeated.",
)
@click.option("--junit", type=_PATH, help="Also write JUnit XML for CI: a test a recording.")
@click.option("--html", type=_PATH, help="Also write a page with all measures and recordings.")
@click.option("--force", is_flag=True, help="Let --junit and --html replace a file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def eval_command(
    *,
    logs: tuple[Path, ...],
    definitions: bool,
    by: str | None,
    conditions: tuple[Condition, ...],
    junit: Path | None,
    html: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Measure the recorded conversations in LOG or below DIR: what was said, and when.

    Response delay, take-over rate, overlap, barge-in and more are computed from each log, without a
    model: both voices are apart in it, to the sample. A measure that means nothing in a recording
    is absent there, and not 0. --definitions says what each one is.

    The table sums up all recordings. VALUE is the median of single moments, the sum of amounts, and
    the share in all recordings together; P90 is what nine of ten do not exceed. With --json the
    object has each recording, the worst first, and the summary.

    A condition of --fail-if is a measure, one of < <= > >= == != and a number. It reads VALUE; for
    another column it ends with its name: response_delay_p90, _median, _worst, _count, _recordings.

    In --junit a recording fails by the conditions that its own values meet, those on _count and
    _recordings left out; the exit code judges the folder.

    A log that is damaged or cannot be read is named on stderr, is not in the summary, and stops no
    other.

    \b
    Examples:
      antiphon eval recordings
      antiphon eval recordings --by barge_in_stop_latency
      antiphon eval nightly --fail-if 'take_over_rate < 0.9' --fail-if 'response_delay_p90 > 1.5'
      antiphon eval nightly --fail-if 'response_delay > 1.5' --junit eval.xml
      antiphon eval nightly --by talk_over --html nightly/index.html --force
      antiphon eval recordings --json | jq '.recordings[0].measures.response_delay'
      antiphon eval --definitions

    \b
    Exit codes:
      0  measured, and no condition holds
      1  a condition of --fail-if holds
      2  a log is damaged or cannot be read, a file cannot be written, or no recording has a
         condition's measure
    """  # noqa: D301 - click takes a backspace to keep the lines
    if definitions:
        _define(as_json=as_json)
    if not logs:
        raise click.UsageError("name a folder or a log, or give --definitions")
    found = find_logs(logs)
    if not found:
        raise UnusableError(f"{logs[0]}: no *{SUFFIX} in it")
    reports = Reports(junit=junit, html=html, force=force)
    reports.check(found)
    with progress(sum(map(size_of, found)), "eval") as watch:
        done = evaluate(found, watch, by)
    met, unknown = judge(conditions, done.summary)
    reports.write(done, logs, conditions, [*map(HOLDS.format, met), *unknown])
    _print(done, met, unknown, as_json=as_json)


def _print(done: Evaluation, met: list[str], unknown: list[str], *, as_json: bool) -> NoReturn:
    for complaint in text.complaints(done):
        click.echo(complaint, err=True)
    exit_code = 1 if met else 2 if unknown or done.has_failures else 0
    if as_json:
        print_json({**done.to_json(), "failed_conditions": met, "exit_code": exit_code})
    else:
        terminal = text.console()
        print_all(terminal, text.lines_of(done, terminal))
        print_all(terminal, map(HOLDS.format, met))
    for complaint in unknown:
        click.echo(complaint, err=True)
    sys.exit(exit_code)


def _define(*, as_json: bool) -> NoReturn:
    if as_json:
        print_json(text.definitions_json())
    else:
        print_all(text.console(), text.definition_lines())
    sys.exit(0)
