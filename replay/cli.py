"""The commands `antiphon replay` and `inspect`; see `shared.commands` for the rules."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

import click

from recorder.format.format import SUFFIX
from recorder.storage.marks import marks_path, read_marks
from runtime.net.process import run

from .eval.evaluate import measure_log
from .library import text
from .library.text import summary_lines
from .rerun import folder
from .rerun.report import FullReport, Outcome, exit_code_of
from .rerun.report import to_json as outcome_json
from .shared import commands
from .shared.recordings import RecordingType
from .story.inspect import inspect, to_json, with_marks

_LOG: Final = click.argument("log", type=RecordingType())
_LOGS: Final = click.argument(
    "logs", metavar="LOG|DIR...", nargs=-1, required=True, type=RecordingType(many=True)
)
_JSON: Final = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.command("replay")
@_LOGS
@click.option("--full", is_flag=True, help="Also run the model again, on the recorded inputs.")
@click.option("--model", help="With --full: use this model, not the recorded one.")
@click.option("--anyway", is_flag=True, help="With --full: compare even in another environment.")
@click.option("--go-on", is_flag=True, help="Skip damaged parts, and compare the rest.")
@click.option(
    "--jobs",
    type=click.IntRange(1, folder.JOBS_MAX),
    default=1,
    show_default=True,
    help="Number of processes for several logs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, or a list of them.")
def replay_command(
    *,
    logs: tuple[Path, ...],
    full: bool,
    model: str | None,
    anyway: bool,
    go_on: bool,
    jobs: int,
    as_json: bool,
) -> None:
    """Run the recorded session LOG again and compare; a folder stands for all logs in it.

    Every event of the log goes through the server's own session machine; every effect that comes
    out is compared with the recorded one, every sent frame byte for byte. That takes no model.
    With --full the model runs too, and its decisions, tokens, codes and sound are compared, in the
    environment that it was recorded in. `antiphon eval --mode forced` judges each unit by itself.

    Several logs, or a folder, give a table, or with --json a list; a log that cannot be read stops
    no other, and the exit code is that of the worst: 2 before 1 before 3.

    \b
    Exit codes:
      0  identical (an unfinished log: as far as it goes)
      1  it differs: the first divergence is explained
      2  the log cannot be read, or is damaged; replay stops at damage unless --go-on
      3  a newer version recorded it; --full: the environment differs, or there is no model

    \b
    Examples:
      antiphon replay recordings/rec-1.session.zst
      antiphon replay --full last
      antiphon replay --jobs 4 --json recordings/ | jq '.[] | select(.exit_code > 0) | .log'
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
    if full and go_on:
        raise click.UsageError("--full cannot be combined with --go-on: the model would miss input")
    if full and jobs > 1:
        raise click.UsageError("--full cannot be combined with --jobs: one model runs at a time")
    if not full and (anyway or model is not None):
        raise click.UsageError("--anyway and --model need --full")
    found = folder.find_logs(logs)
    if not found:
        raise commands.UnusableError(f"{logs[0]}: no *{SUFFIX} in it")
    began = time.perf_counter()
    if full:
        with commands.progress(sum(map(commands.calls_of, found)), of_calls=True) as watch:
            replaying = partial(folder.replay_logs_fully, model=model, anyway=anyway)
            outcomes = run(replaying, found, watch)
    else:
        with commands.progress(sum(map(commands.size_of, found))) as watch:
            outcomes = list(folder.replay_logs(found, watch, go_on=go_on, jobs=jobs))
    if len(logs) == 1 and not logs[0].is_dir():
        _finish_one(outcomes[0], as_json=as_json)
    lines = summary_lines(outcomes, time.perf_counter() - began)
    body = [outcome_json(outcome) for outcome in outcomes]
    commands.finish(body, lines, as_json=as_json, exit_code=exit_code_of(outcomes))


@click.command("inspect")
@_LOG
@_JSON
def inspect_command(log: Path, as_json: bool) -> None:
    """Describe the session LOG: its states, units, drops, errors and end.

    Marks that were written next to LOG after the session are shown too. With --json also its
    measures, as antiphon eval has them.

    \b
    Exit codes:
      0  described; a log with damage has gaps
      2  the log cannot be read
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
    with commands.opened_log(log) as reader:
        found = inspect(reader.head.fields, commands.records_of(log, reader))
    later = read_marks(marks_path(log))
    found = with_marks(found, later)
    measures = measure_log(log, str(log)).measures if as_json else {}
    body = {"log": str(log), **to_json(found), "measures": measures}
    lines = text.inspect_lines(found)
    if later.damaged:
        lines.append(f"marks     lines next to the log that cannot be read: {later.damaged}")
    commands.finish(body, lines, as_json=as_json)


def _finish_one(outcome: Outcome, *, as_json: bool) -> NoReturn:
    if outcome.result == "unreadable":
        raise commands.UnusableError(f"{outcome.log}: {outcome.error}")
    if outcome.error is not None:
        raise commands.NotComparableError(outcome.error)
    assert outcome.report is not None
    if isinstance(outcome.report, FullReport):
        lines = text.full_lines(outcome.report, outcome.elapsed_s)
    else:
        lines = text.replay_lines(outcome.report, outcome.elapsed_s)
    commands.finish(outcome_json(outcome), lines, as_json=as_json, exit_code=outcome.exit_code)
