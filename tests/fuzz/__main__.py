"""Hostile clients against a server in memory, or at an address: `python -m tests.fuzz --help`.

Results are on stdout, as text or as one JSON object; progress is on stderr, if that is a terminal.
`make test` runs a seeded sample (`test_fuzz`); a run for long is `--seconds 600`.
"""

from __future__ import annotations

import json
import platform
import resource
import secrets
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NoReturn

import attrs
import click
from hypothesis.configuration import set_hypothesis_home_dir
from rich.console import Console, RenderableType
from rich.live import Live

from protocol.wire.dialects import MODES_OF
from replay.shared.commands import UnusableError, finish, print_json, table
from runtime.client.terminal import key_option
from tests.fuzz.campaign import KINDS, Budget, Campaign, Target, fuzz_bytes, play_again, save
from tests.fuzz.case import (
    Case,
    Found,
    MarkerError,
    Outcome,
    Tally,
    TranscriptError,
    fill,
    read_case,
)
from tests.fuzz.drawing import all_names
from tests.fuzz.play import SCRIPTS, FuzzerError, LocalTarget
from tests.fuzz.remote import CannotFuzzError, RemoteTarget, read_address

SECONDS: Final = 60.0
"""The default budget: enough for most answers in every state."""
ANSWER_S: Final = 8.0
"""A loaded model may take seconds for a unit; tests of a fast server can ask for less."""
REFRESH_PER_S: Final = 2
"""Updates of the progress."""


@click.command("fuzz")
@click.option("--url", help="A server, ws://host:port; without it one in memory is fuzzed.")
@click.option("--dialect", type=click.Choice(tuple(MODES_OF)), help="Only this dialect.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), help="How long.")
@click.option("--examples", type=click.IntRange(min=1), help="How many cases.")
@click.option("--seed", type=click.IntRange(min=0), help="Of the run; drawn without it.")
@key_option
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("fuzz"),
    show_default=True,
    help="The folder for transcripts of findings.",
)
@click.option(
    "--answer-s",
    type=click.FloatRange(min=0, min_open=True),
    default=ANSWER_S,
    show_default=True,
    help="With --url: an answer that takes longer is a hang.",
)
@click.option(
    "--again",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Play this transcript once and judge it.",
)
@click.option("--bytes", "target", type=click.Choice(KINDS), help="Broken bytes for a parser.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def fuzz_command(
    *,
    url: str | None,
    dialect: str | None,
    seconds: float | None,
    examples: int | None,
    seed: int | None,
    key: str | None,
    out: Path,
    answer_s: float,
    again: Path | None,
    target: str | None,
    as_json: bool,
) -> None:
    """Play hostile clients to a server, and judge what it says to them.

    Clients know the protocols, and break them on purpose: messages in the wrong state, with wrong
    fields, or garbage; connections that are slow, cut, half-closed or never read. A server must
    answer each message as documented, or close as documented, send nothing after its close, show no
    internals, and serve the next client as before.

    Findings are reduced and kept as transcripts. --bytes breaks the bytes that the parsers
    of messages (codec) and of session logs (log) read, instead.

    \b
    Exit codes:
      0  nothing was found
      1  something was found
      2  nothing could be fuzzed: no such server, no such transcript, or the fuzzer is broken
    """  # noqa: D301 - click takes a backspace to keep the lines
    seed = secrets.randbits(31) if seed is None else seed
    if seconds is None and examples is None:
        seconds = SECONDS
    with _no_files_of_hypothesis():
        if target is not None:
            _fuzz_bytes(target, seed, Budget(seconds=seconds, examples=examples), out, as_json)
        server = _target(url, key, answer_s)
        if again is not None:
            _play_again(server, again, as_json=as_json)
        names = tuple(name for name in all_names() if dialect in {None, name[0]})
        facts: dict[str, object] = {"seed_of_run": seed, "url": url, "versions": _versions()}
        with _progress(quiet=as_json) as show:
            campaign = Campaign(
                server,
                names,
                seed=seed,
                budget=Budget(seconds=seconds, examples=examples),
                on_progress=show,
            )
            broken = _run(campaign)
        tally = campaign.tally
        left = server.check() if isinstance(server, RemoteTarget) else ""
        files = [save(found, out, at, facts) for at, found in enumerate(tally.found, start=1)]
    if broken is not None:
        where = f"; {len(files)} findings before are in {out}" if files else ""
        raise UnusableError(f"the fuzzer itself is broken, {broken} (seed {seed}){where}")
    _tell(tally, files, left, facts, as_json=as_json)


def _target(url: str | None, key: str | None, answer_s: float) -> Target:
    if url is None:
        return LocalTarget()
    try:
        target = RemoteTarget(read_address(url, key), answer_s=answer_s)
        target.begin()
    except CannotFuzzError as error:
        raise UnusableError(str(error)) from error
    return target


def _versions() -> dict[str, str]:
    return {
        "antiphon": version("antiphon"),
        "hypothesis": version("hypothesis"),
        "python": platform.python_version(),
    }


@contextmanager
def _no_files_of_hypothesis() -> Iterator[None]:
    """Keep Hypothesis' notes about our sources out of the user's folder."""
    with tempfile.TemporaryDirectory(prefix="antiphon-fuzz-") as folder:
        set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            set_hypothesis_home_dir(None)


# -- one transcript -------------------------------------------------------------------------------


def _play_again(target: Target, path: Path, *, as_json: bool) -> NoReturn:
    try:
        case = read_case(path)
        if case.script not in SCRIPTS:
            raise TranscriptError(f"no script {case.script!r}")
        for step in case.steps:
            if step.kind == "send":
                fill(step.value)
        outcome = play_again(target, case)
    except (OSError, TranscriptError, MarkerError, CannotFuzzError, FuzzerError) as error:
        raise UnusableError(f"{path}: {error}") from error
    found = [f"found: {it.kind}: {it.label} {it.detail}".rstrip() for it in outcome.findings]
    told = [json.dumps({step.kind: step.value}) for step in outcome.told]
    lines = [*told, *(found or ["nothing was found"])]
    exit_code = 1 if found else 0
    finish(_outcome_json(case, outcome), lines, as_json=as_json, exit_code=exit_code)


def _outcome_json(case: Case, outcome: Outcome) -> dict[str, Any]:
    return {
        "dialect": case.dialect,
        "mode": case.mode,
        "messages": case.messages,
        "told": [{step.kind: step.value} for step in outcome.told],
        "findings": [attrs.asdict(one) for one in outcome.findings],
    }


# -- a run ----------------------------------------------------------------------------------------


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Any]:
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    with Live(console=console, refresh_per_second=REFRESH_PER_S, transient=True) as live:
        yield lambda tally: live.update(_line(tally), refresh=False)


def _run(campaign: Campaign) -> FuzzerError | None:
    """Run; return an error of the fuzzer itself."""
    try:
        campaign.run()
    except FuzzerError as error:
        return error
    return None


def _line(tally: Tally) -> str:
    rate = tally.examples / max(tally.elapsed_s, 1e-9)
    return (
        f"{tally.examples} cases in {tally.elapsed_s:.0f} s ({rate:.0f}/s), "
        f"{len(tally.pairs)} kinds of answer, {len(tally.found)} findings"
    )


def _tell(
    tally: Tally, files: list[Path], left: str, facts: dict[str, Any], *, as_json: bool
) -> NoReturn:
    exit_code = 1 if tally.found or left else 0
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if as_json:
        body = {**facts, **tally.to_json(), "transcripts": list(map(str, files))}
        body |= {"left": left, "memory_mb_max": round(memory_mb), "exit_code": exit_code}
        print_json(body)
        sys.exit(exit_code)
    console = Console()
    console.print(_line(tally) + f", {memory_mb:.0f} MB, seed {facts['seed_of_run']}")
    console.print(_coverage(tally))
    for found, path in zip(tally.found, files, strict=True):
        _tell_found(console, found, path)
    if left:
        console.print(f"after the run {left}", markup=False)
    sys.exit(exit_code)


def _tell_found(console: Console, found: Found, path: Path) -> None:
    finding = found.finding
    steady = "" if found.is_steady else ", not each time"
    console.print(f"{finding.kind}: {finding.label}", markup=False)
    console.print(f"  {finding.detail}" if finding.detail else "", markup=False, end="\n")
    console.print(f"  {found.case.messages} messages{steady}: {path}", markup=False)


def _coverage(tally: Tally) -> RenderableType:
    rows = []
    for state in sorted({pair[0] for pair in tally.pairs}):
        own = {pair: times for pair, times in tally.pairs.items() if pair[0] == state}
        kinds, answers = {pair[1] for pair in own}, {pair[2] for pair in own}
        counts = (len(kinds), len(own), len(answers), sum(own.values()))
        rows.append((state, *map(str, counts)))
    columns = ("<dialect and state", "messages", "kinds", "answers", "times")
    return table(columns, rows, is_ruled=True)


# -- bytes ----------------------------------------------------------------------------------------


def _fuzz_bytes(kind: str, seed: int, budget: Budget, out: Path, as_json: bool) -> NoReturn:
    found = fuzz_bytes(kind, seed=seed, budget=budget, out=out)
    body = {"bytes": kind, "seed": seed, **found.to_json(), "versions": _versions()}
    body["exit_code"] = exit_code = 1 if found.findings else 0
    lines = [f"{found.inputs} inputs in {found.elapsed_s:.0f} s, seed {seed}"]
    lines += [f"{label}: {path}" for label, path in found.findings.items()]
    finish(body, lines, as_json=as_json, exit_code=exit_code)


if __name__ == "__main__":
    fuzz_command(prog_name="python -m tests.fuzz")
