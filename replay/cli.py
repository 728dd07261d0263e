"""The commands `antiphon replay`, `verify` and `inspect`.

Rules: what was found is on stdout, as text or as one JSON object whose keys stay; what went wrong
is one line on stderr, never a traceback. The exit code says which of them it was.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, Literal, NoReturn

import anyio
import click
from cattrs import Converter
from rich.console import Console, RenderableType

from protocol.limits import NS_PER_S
from recorder.errors import RecorderError
from recorder.reader import LogReader
from recorder.verify import verify
from runtime.backends.base import Backend
from runtime.models import load_backend

from . import text
from .full import ModelUnavailableError, replay_fully
from .inspect import inspect
from .inspection import to_json
from .logic import replay
from .report import FullReport, ReplayReport

Result = Literal["identical", "diverged", "damaged", "not_comparable"]
EXIT_CODES: Final[dict[Result, int]] = {
    "identical": 0,
    "diverged": 1,
    "damaged": 2,
    "not_comparable": 3,
}

_LOG: Final = click.argument("log", type=click.Path(path_type=Path))
_JSON: Final = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_HELP: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_CONVERTER: Final = Converter()


class LogUnusableError(click.ClickException):
    """A log that cannot be read."""

    exit_code = 2


class NotComparableError(click.ClickException):
    """A log that cannot be run again here."""

    exit_code = 3


@click.command("replay", context_settings=_HELP)
@_LOG
@click.option("--full", is_flag=True, help="Run the model again too, on the logged inputs.")
@click.option("--model", help="With --full: this model, not the one the log names.")
@click.option("--anyway", is_flag=True, help="With --full: compare though the environment differs.")
@click.option("--go-on", is_flag=True, help="Read past damage, and compare what still can be.")
@_JSON
def replay_command(
    *, log: Path, full: bool, model: str | None, anyway: bool, go_on: bool, as_json: bool
) -> None:
    """Run the recorded session LOG again and compare.

    Every event of the log goes through the server's own session machine; every effect that comes
    out is compared with the recorded one, every sent frame byte for byte. That takes no model.
    With --full the model runs too, and its decisions, tokens, codes and sound are compared.

    \b
    Exit codes:
      0  identical (an unfinished log: as far as it goes)
      1  it came out otherwise: the first divergence is explained
      2  the log cannot be read, or is damaged; replay stops at damage unless --go-on
      3  --full: the environment differs, so that nothing can be compared, or there is no model
    """  # noqa: D301 - click takes a backspace to keep the lines
    if full and go_on:
        raise click.UsageError("--full takes no --go-on: a model that missed input cannot compare")
    if not full and (anyway or model is not None):
        raise click.UsageError("--anyway and --model are for --full")
    began = time.perf_counter()
    with _opened(log) as reader:
        if full:
            found = _run_fully(reader, _load, model=model, anyway=anyway)
            _tell_full(log, found, time.perf_counter() - began, as_json=as_json)
        report = replay(reader, go_on=go_on)
        _tell_logic(log, report, time.perf_counter() - began, as_json=as_json)


@click.command("verify", context_settings=_HELP)
@_LOG
@_JSON
def verify_command(log: Path, as_json: bool) -> None:
    """Check that LOG is as it was written: every checksum, the chain, and the counts at its end.

    \b
    Exit codes:
      0  intact; `state: open` means that its end is still missing: it is being written, or its
         server was killed, and nothing that a client saw is lost
      1  damaged
      2  no session record is left, or there is no such file
    """  # noqa: D301 - click takes a backspace to keep the lines
    try:
        report = verify(log)
    except (OSError, RecorderError) as error:
        raise LogUnusableError(f"{log}: {_reason(error)}") from error
    body = {"log": str(log), "exit_code": report.exit_code, **_CONVERTER.unstructure(report)}
    _finish(body, text.verify_lines(report), as_json=as_json, exit_code=report.exit_code)


@click.command("inspect", context_settings=_HELP)
@_LOG
@_JSON
def inspect_command(log: Path, as_json: bool) -> None:
    """Tell what happened in the session LOG: states, units, drops, errors, and how it ended.

    \b
    Exit codes:
      0  told; a log with damage is told with gaps
      2  the log cannot be read
    """  # noqa: D301 - click takes a backspace to keep the lines
    with _opened(log) as reader:
        told = inspect(reader.head.fields, reader)
    body = {"log": str(log), **to_json(told)}
    _finish(body, text.inspect_lines(told), as_json=as_json, exit_code=0)


@contextmanager
def _opened(log: Path) -> Iterator[LogReader]:
    """Open a log; whatever is wrong with it becomes one line."""
    try:
        with LogReader(log) as reader:
            yield reader
    except (OSError, RecorderError) as error:
        raise LogUnusableError(f"{log}: {_reason(error)}") from error


def _reason(error: OSError | RecorderError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _load(name: str) -> Backend:
    return load_backend(name, 1)


def _run_fully(
    reader: LogReader, load: Callable[[str], Backend], *, model: str | None, anyway: bool
) -> FullReport:
    run = partial(replay_fully, reader.head.fields, reader, load, model=model, anyway=anyway)
    try:
        return anyio.run(run)
    except ModelUnavailableError as error:
        raise NotComparableError(str(error)) from error


def _result(report: ReplayReport) -> Result:
    """Judge a replay; damage weighs more than a divergence, which can be its consequence."""
    if report.damage_count:
        return "damaged"
    return "identical" if report.identical else "diverged"


def _tell_logic(log: Path, report: ReplayReport, elapsed_s: float, *, as_json: bool) -> NoReturn:
    result = _result(report)
    body = {
        **_summary(log, result, report.span_ns, elapsed_s),
        **_CONVERTER.unstructure(report),
    }
    lines = text.replay_lines(report, elapsed_s)
    _finish(body, lines, as_json=as_json, exit_code=EXIT_CODES[result])


def _tell_full(log: Path, report: FullReport, elapsed_s: float, *, as_json: bool) -> NoReturn:
    result: Result = "not_comparable"
    if report.recorded is not None:
        result = _result(report.recorded)
    if result == "identical" and not report.identical:
        result = "diverged"
    span_ns = 0 if report.recorded is None else report.recorded.span_ns
    body = {**_summary(log, result, span_ns, elapsed_s), **_CONVERTER.unstructure(report)}
    body["divergence"] = _CONVERTER.unstructure(report.first_divergence)
    lines = text.full_lines(report, elapsed_s)
    _finish(body, lines, as_json=as_json, exit_code=EXIT_CODES[result])


def _summary(log: Path, result: Result, span_ns: int, elapsed_s: float) -> dict[str, object]:
    return {
        "log": str(log),
        "result": result,
        "exit_code": EXIT_CODES[result],
        "elapsed_ms": round(elapsed_s * 1000, 3),
        "times_real_time": round(span_ns / NS_PER_S / elapsed_s, 1) if elapsed_s > 0 else None,
    }


def _finish(
    body: Mapping[str, object], lines: list[RenderableType], *, as_json: bool, exit_code: int
) -> NoReturn:
    if as_json:
        click.echo(json.dumps(body, indent=2))  # in ASCII: a log can hold lone surrogates
    else:
        text.print_all(Console(), lines)
    sys.exit(exit_code)
