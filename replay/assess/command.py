"""The command `antiphon eval`: how the conversations of a folder went, from their logs.

With `--model` it is what another model makes of the same recordings, compared with a baseline: what
was recorded, other recordings, or another model.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, get_args

import attrs
import click

from recorder.format.format import SUFFIX
from runtime.net.process import run, stdout_console
from runtime.settings.settings import DEVICES, DTYPES

from ..eval import reports
from ..eval.condition import Condition, ConditionType, judge
from ..eval.evaluate import (
    MEASURES,
    OWN_VOICE,
    Baseline,
    Evaluation,
    Json,
    Row,
    measure_logs,
    sum_up,
)
from ..rerun.folder import JOBS_MAX, find_logs, logs_to_rewrite
from ..rerun.full import Loading, model_of
from ..shared import commands
from ..shared.recordings import RecordingType
from . import suite as suites

if TYPE_CHECKING:
    from .run import Run

# -- what a model is compared with -----------------------------------------------------------------


RECORDED: Final = "recorded"
"""The baseline of mode `open` without another one."""


def is_of_logs(name: str) -> bool:
    """Whether a baseline is a log or a folder of logs, and no model."""
    path = Path(name)
    is_folder = path.is_dir() and not (path / "config.json").is_file()
    return is_folder or name.endswith(SUFFIX)


def as_recorded(rows: Iterable[Row]) -> Baseline:
    """Measure the recordings of rows as they are."""
    logs = [Path(row.log) for row in rows if row.result == "measured"]
    with commands.progress(sum(map(commands.size_of, logs)), RECORDED) as watch:
        return of_measured(RECORDED, measure_logs(logs, watch))


def of_measured(name: str, measured: Iterable[Row]) -> Baseline:
    """Take what was measured on the same logs."""
    owns = {row.log: row.values for row in measured if row.result == "measured"}
    return Baseline(name=name, owns=owns)


def of_logs(name: str, rows: Sequence[Row], given: Sequence[Path]) -> Baseline:
    """Measure other recordings, each the partner of one of `rows`.

    A partner has the same path in its folder; else it is the only one with the same recording id,
    or of which that recording is a fork. `given` are the folders and logs of `rows`.
    """
    logs = find_logs([Path(name)])
    if not logs:
        raise commands.UnusableError(f"{name}: no *{SUFFIX} in it")
    with commands.progress(sum(map(commands.size_of, logs)), "baseline") as watch:
        others = [row for row in measure_logs(logs, watch) if row.result == "measured"]
    paths = reports.names_of([Path(name)], logs)
    by_path = {paths[row.log].path: row for row in others}
    by_id = _by_id(others)
    own_paths, own_ids = reports.names_of(given, (Path(row.log) for row in rows)), _by_id(rows)
    owns = {}
    for row in rows:
        key = _id_of(row) or ""
        partner = by_path.get(own_paths[row.log].path)
        if partner is None and own_ids.get(key) is row:
            partner = by_id.get(key)
        if partner is not None:
            owns[row.log] = partner.values
    return Baseline(name=name, owns=owns)


def _id_of(row: Row) -> str | None:
    found = row.body.get("parent") or row.body.get("recording_id")
    return found if isinstance(found, str) else None


def _by_id(rows: Sequence[Row]) -> dict[str, Row]:
    """Find the rows whose recording no other row is of."""
    counts = Counter(map(_id_of, rows))
    return {key: row for row in rows if (key := _id_of(row)) is not None and counts[key] == 1}


# -- the command -----------------------------------------------------------------------------------


Mode = Literal["closed", "open", "forced"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
HOLDS: Final = "condition holds: {}"
JOBS: Final = 4
RUNS_ONLY: Final = "--model, --out, --jobs, --device and --dtype"
_PATH: Final = click.Path(path_type=Path)


@attrs.frozen(kw_only=True)
class Request:
    """What is to be measured: the logs, by which mode and model, compared with what."""

    logs: tuple[Path, ...]
    mode: Mode
    model: str | None
    baseline: str | None
    out: Path | None
    jobs: int | None
    device: str | None
    dtype: str | None
    transcriber: str | None
    by: str | None
    conditions: tuple[Condition, ...]

    def check(self) -> list[Path]:
        """Find the logs; `click.UsageError`: options do not go together."""
        if not self.logs:
            raise click.UsageError("name a folder or a log, or give --definitions")
        computes = {self.device, self.dtype} != {None} and self.transcriber is None
        runs = {self.model, self.out, self.jobs} != {None} or computes
        if self.transcriber is not None and self.mode != "closed":
            raise click.UsageError("--transcriber needs --mode closed")
        if self.transcriber is None and OWN_VOICE in {it.measure for it in self.conditions}:
            raise click.UsageError(f"{OWN_VOICE} needs a --transcriber")
        if self.mode == "closed" and runs:
            raise click.UsageError(f"{RUNS_ONLY} need --mode open or forced")
        if self.mode == "open" and self.model is None:
            raise click.UsageError("--mode open needs --model")
        if self.mode == "forced" and self.baseline is not None and is_of_logs(self.baseline):
            raise click.UsageError("with --mode forced the --baseline must be a model")
        compared = [it for it in self.conditions if it.is_of_a_comparison]
        if compared and self.baseline is None and self.mode != "open":
            raise click.UsageError(f"{compared[0].text!r} needs a --baseline")
        found = find_logs(self.logs)
        if not found:
            raise commands.UnusableError(f"{self.logs[0]}: no *{SUFFIX} in it")
        return found

    def run(self, model: str, found: list[Path]) -> Run:
        """Run a model on logs."""
        from .run import run_model  # what forks sessions needs the server

        loading = Loading(model, device=self.device, dtype=self.dtype, slots=self.jobs or JOBS)
        with commands.progress(sum(map(commands.calls_of, found)), model, of_calls=True) as watch:
            running = partial(run_model, self.mode, loading, found, Loading.load)
            done = run(partial(running, out=self.out, watch=watch))
        if done.folder is not None:
            kept = f"results that were there, {done.found} of {len(found)}"
            click.echo(f"{model}: {kept}: {done.folder}", err=True)
        return done

    def evaluate(self, found: list[Path]) -> Evaluation:
        """Measure logs, with the model if there is one, and compare."""
        about: Json = {}
        if self.mode == "closed":
            measured = self._as_recorded(found)
            about = {"transcriber": self.transcriber} if self.transcriber else {}
        else:
            model = self.model or _recorded_model(found)
            done = self.run(model, found)
            measured, is_exact = done.measured, done.info.deterministic
            about = {"mode": self.mode, "model": model, "deterministic": is_exact}
            about |= {} if done.folder is None else {"kept": str(done.folder)}
        baseline = self._baseline(measured, found)
        if baseline is not None:
            about = {"mode": self.mode, **about, "baseline": baseline.name}
        return sum_up(measured, self.by, baseline, about)

    def _as_recorded(self, found: list[Path]) -> list[Row]:
        with commands.progress(sum(map(commands.size_of, found)), "eval") as watch:
            if self.transcriber is None:
                return [*measure_logs(found, watch)]
            from .run import measure_with  # a model

            loading = Loading(self.transcriber, device=self.device, dtype=self.dtype)
            return run(measure_with, loading, found, Loading.load, watch)

    def _baseline(self, rows: list[Row], found: list[Path]) -> Baseline | None:
        if self.baseline is None:
            return as_recorded(rows) if self.mode == "open" else None
        if is_of_logs(self.baseline):
            return of_logs(self.baseline, rows, self.logs)
        if self.mode == "closed":
            raise commands.UnusableError(f"{self.baseline}: no folder of recordings")
        return of_measured(self.baseline, self.run(self.baseline, found).measured)


def _recorded_model(found: list[Path]) -> str:
    """The model that recordings name; `click.UsageError`: they name none, or several."""
    names = set[str | None]()
    for log in found:
        with suppress(commands.UnusableError), commands.opened_log(log) as reader:
            names.add(model_of(reader.head.fields))
    (name, *others) = names or {None}
    if name is None or others:
        raise click.UsageError("the recordings name no model, or several: give --model")
    return name


@click.command("eval")
@click.argument("logs", metavar="DIR|LOG...", nargs=-1, type=RecordingType(many=True))
@click.option("--definitions", is_flag=True, help="Print the definition of each measure, and exit.")
@click.option(
    "--mode",
    type=click.Choice(MODES),
    default="closed",
    show_default=True,
    help="closed: measure the log; open: a model decides freely; forced: on the recorded past.",
)
@click.option("--model", help="The model to run: a name or a folder [forced: the recorded one].")
@click.option("--baseline", metavar="DIR|MODEL", help="The logs, or the model, to compare with.")
@click.option(
    "--out", type=_PATH, metavar="FOLDER", help="Keep results here, and reuse earlier ones."
)
@click.option(
    "--jobs",
    type=click.IntRange(1, JOBS_MAX),
    help=f"Concurrent sessions of the model [default: {JOBS}].",
)
@click.option(
    "--transcriber",
    metavar="MODEL",
    help="A model that transcribes the voice, to compare it with the text.",
)
@click.option("--device", type=click.Choice(DEVICES), help="The device of the models.")
@click.option("--dtype", type=click.Choice(DTYPES), help="The format of their weights and caches.")
@click.option(
    "--by",
    type=click.Choice(list(MEASURES)),
    metavar="MEASURE",
    help="List the worst recordings by this measure first, also in --html.",
)
@click.option(
    "--fail-if",
    "conditions",
    multiple=True,
    type=ConditionType(compares=True),
    metavar="CONDITION",
    help="Exit with 1 if this condition holds, such as 'take_over_rate < 0.9'; repeatable.",
)
@click.option("--junit", type=_PATH, help="Also write JUnit XML for CI, one test per recording.")
@click.option("--html", type=_PATH, help="Also write a page with all measures and recordings.")
@click.option("--force", is_flag=True, help="Replace existing files of --junit and --html.")
@click.option("--suite", is_flag=True, help="DIR is a suite: judge its cases.")
@click.option(
    "--record-suite", type=_PATH, metavar="FOLDER", help="Make a suite of the recordings in DIR."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def eval_command(
    *,
    definitions: bool,
    junit: Path | None,
    html: Path | None,
    force: bool,
    as_json: bool,
    suite: bool,
    record_suite: Path | None,
    **how: Any,
) -> None:
    """Measure the recorded conversations in LOG or below DIR: what was said, and when.

    Response delay, take-over rate, overlap, barge-in and more are computed from each log, without a
    model: both voices are apart in it, to the sample. A measure that means nothing in a recording
    is absent there, and not 0. --definitions says what each one is.

    The table sums up all recordings. VALUE is the median of single moments, the sum of amounts, and
    the share in all recordings together; P90 is what nine of ten do not exceed. With --json the
    object has each recording, the worst first, and the summary.

    --mode open plays each recording's client to another --model, which decides freely, and measures
    the session that comes out. --mode forced keeps the recorded past, and asks in each second what
    the model would decide there, and by which margin; units that come out otherwise are listed, and
    near-ties are told from regressions. Both are for duplex sessions.

    A comparison has the mean difference from the --baseline over the sessions that both have, its
    95 % interval, and p. Without a baseline, --mode open compares with what was recorded.

    A condition of --fail-if is a measure, one of < <= > >= == != and a number. It reads VALUE; for
    another column it ends with its name: response_delay_p90, _median, _worst, _count, _recordings.
    After a dot it reads the comparison: take_over_rate.difference, .low, .high, .p, .baseline.

    In --junit a recording fails by the conditions that its own values meet, those on _count,
    _recordings and comparisons left out; the exit code judges the folder.

    A log that is damaged or cannot be read is named on stderr, is not in the summary, and stops no
    other. The same is true of one on which no model can be run: a chat, or one without the user's
    sound. With --out a run that was killed goes on where it was.

    A --suite has cases in suite.toml: a recording or WAV files each, and what is expected.

    \b
    Examples:
      antiphon eval recordings
      antiphon eval nightly --fail-if 'take_over_rate < 0.9' --fail-if 'response_delay_p90 > 1.5'
      antiphon eval recordings --json | jq '.recordings[0].measures.response_delay'
      antiphon eval tuesday --baseline monday --fail-if 'take_over_rate.high < 0'
      antiphon eval nightly --mode open --model NEW --baseline OLD --out runs
      antiphon eval nightly --mode forced --model NEW --fail-if 'decision_agreement < 0.98'
      antiphon eval nightly --record-suite suite
      antiphon eval --suite suite --mode open --model NEW --junit cases.xml
      antiphon eval --definitions

    \b
    Exit codes:
      0  measured, and no condition holds; every case of a suite that was judged is as expected
      1  a condition of --fail-if holds, or a case is not as expected
      2  a log is damaged or cannot be read, a model cannot be loaded or failed, a file cannot be
         written, or no recording has a condition's measure
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
    if definitions:
        _define(as_json=as_json)
    request, files = Request(**how), reports.Reports(junit=junit, html=html, force=force)
    if suite:
        judge_suite(request, files, as_json=as_json)
    if record_suite is not None:
        make_suite(logs_to_rewrite(request.check(), None), record_suite)
    measure(request, files, as_json=as_json)


def measure(request: Request, files: reports.Reports, *, as_json: bool) -> NoReturn:
    """Measure recordings, and say so."""
    found = request.check()
    files.check(found)
    done = request.evaluate(found)
    paired = None if done.comparison is None else done.comparison.paired
    met, unknown = judge(request.conditions, done.summary, paired)
    files.write(done, request.logs, request.conditions, [*map(HOLDS.format, met), *unknown])
    _print(done, met, unknown, as_json=as_json)


def make_suite(found: list[Path], folder: Path) -> NoReturn:
    """Make a suite of recordings, and say which are not in it."""
    made, left_out = suites.write_suite(found, folder)
    for complaint in left_out:
        click.echo(complaint, err=True)
    if not made:
        raise commands.UnusableError(f"{folder} was not written: no recording can be a case")
    click.echo(f"{folder}: cases: {made}, recordings left out: {len(left_out)}")
    sys.exit(0)


def judge_suite(request: Request, files: reports.Reports, *, as_json: bool) -> NoReturn:
    """Judge a suite; exits with 1 if a case is not as expected, with 2 if none was judged."""
    others = request.baseline or request.conditions or files.html
    if len(request.logs) != 1 or request.mode == "forced" or others:
        why = "--suite takes one folder, --mode closed or open; no --baseline, --fail-if, --html"
        raise click.UsageError(why)
    (folder,) = request.logs
    files.check([])
    suite, cases = suites.read_suite(folder), list[suites.Verdict]()
    if request.mode == "closed":
        cases = suites.judged(suite)
    elif request.model is None:
        raise click.UsageError("--mode open needs --model")
    else:
        with TemporaryDirectory() as place:
            kept = attrs.evolve(request, out=request.out or Path(place))
            cases = suites.judged(suite, lambda logs: kept.run(str(request.model), logs).measured)
    exit_code = 1 if any(it.failures for it in cases) else 0
    if all(it.skipped for it in cases):
        exit_code = 2
    files.write_junit(suites.junit_of_cases(suite, cases))
    if as_json:
        bodies = [attrs.asdict(it) for it in cases]
        commands.print_json(
            {"mode": request.mode, "model": request.model, "cases": bodies, "exit_code": exit_code}
        )
        if exit_code == 1:
            click.echo("\n".join(suites.lines_of_cases(cases)), err=True)
    else:
        commands.print_all(stdout_console(), suites.lines_of_cases(cases))
    sys.exit(exit_code)


def _print(done: Evaluation, met: list[str], unknown: list[str], *, as_json: bool) -> NoReturn:
    for complaint in reports.complaints(done):
        click.echo(complaint, err=True)
    has_failures = done.count("measured") + done.count("skipped") < len(done.rows)
    exit_code = 1 if met else 2 if unknown or has_failures else 0
    holding = [*map(HOLDS.format, met)]
    if as_json:
        commands.print_json({**done.to_json(), "failed_conditions": met, "exit_code": exit_code})
        unknown = holding + unknown
    else:
        terminal = stdout_console()
        commands.print_all(terminal, [*reports.lines_of(done, terminal), *holding])
    for complaint in unknown:
        click.echo(complaint, err=True)
    sys.exit(exit_code)


def _define(*, as_json: bool) -> NoReturn:
    if as_json:
        commands.print_json(reports.definitions_json())
    else:
        commands.print_all(stdout_console(), reports.definition_lines())
    sys.exit(0)
