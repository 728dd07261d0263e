"""Generated sessions of the embedded model, each computed again by another process: `make soak`.

    python -m tests.soak.sessions [--minutes M] [--out docs/evidence]

One process plays generated clients (`tests.generated.clients`) to the model and records them. For
each batch another process, with other hashes and a model that it loaded itself, judges the logs and
runs full replay on them. What it found goes to `replay.json`: counts, failures, seconds, and the
facts of the machine and the model; no date, so that a run that finds the same changes little.

It exits with 1 where anything failed. The numbers start at 0, so what failed can be made again.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final

import anyio
import attrs

from recorder.read.reader import LogReader
from replay.rerun.full import replay_fully
from replay.rerun.report import FullReport
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.engine.backend import EngineBackend
from runtime.model.models import tiny_path
from tests.generated.clients import ClientScript, draw_and_record, record_model
from tests.project.evidence import add_out
from tests.replay.test_generated import judge

SESSIONS: Final = 200
"""Sessions in which the model ran; some clients never get so far."""
BATCH: Final = 20
"""Numbers a process: its start, 3 s of torch, is then a small part; its logs are some 10 MB."""
AUDIO_S_MAX: Final = 14
"""Longer than in the tests: time to ask and to hear the answer out."""
MODEL: Final = "tiny"
COUNTED: Final = (
    *("sessions", "seconds", "events", "units", "spoken", "failed", "drops", "interrupts"),
    *("cut", "cut_llm", "cut_tts", "cut_token2wav"),
)


@attrs.define
class Result:
    """What was found so far."""

    numbers: int = 0
    compared: int = 0
    computed: int = 0
    replayed_units: int = 0
    counts: Counter[str] = attrs.Factory(Counter)
    failures: list[dict[str, str]] = attrs.Factory(list)
    record_s: float = 0.0
    replay_s: float = 0.0

    @property
    def is_short(self) -> bool:
        """Whether it needs more sessions; failing ones count, so that it ends."""
        return self.computed + len(self.failures) < SESSIONS

    @property
    def is_good(self) -> bool:
        """Whether everything came out again."""
        return not self.failures and self.compared == self.counts["sessions"] > 0

    def to_json(self, info: dict[str, str]) -> dict[str, object]:
        """Say it all, without a date."""
        return {
            "what": "generated sessions of the embedded model, each computed again by another "
            "process from its log: decisions, tokens, codes, KV lengths, sound and sent frames",
            "identical": self.is_good,
            "generated": self.numbers,
            **{name: self.counts[name] for name in COUNTED},
            "fully_replayed": self.compared,
            "fully_replayed_with_units": self.computed,
            "units_computed_again": self.replayed_units,
            "failures": self.failures,
            "record_s": round(self.record_s, 1),
            "replay_s": round(self.replay_s, 1),
            "machine": {
                "cores": os.cpu_count(),
                "machine": platform.machine(),
                "system": platform.system(),
                "python": platform.python_version(),
                "torch": version("torch"),
            },
            "fingerprint": info,
        }


def main() -> None:
    """Run it, as the module's docstring says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=0, help="go on with further numbers")
    add_out(parser)
    parser.add_argument("--replay", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # units fail as was drawn
    if given.replay is not None:
        _replay_all(given.replay)
        return
    result, info = _soak(given.minutes)
    given.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result.to_json(info), indent=2) + "\n"
    path = given.out / "replay.json"
    path.write_text(text, "utf-8")
    print(f"{text}\nwritten to {path}")
    if not result.is_good:
        sys.exit(1)


def _soak(minutes: float) -> tuple[Result, dict[str, str]]:
    model = DuplexModel.load(tiny_path())
    record = partial(_record_with, model)
    result = Result()
    until_s = time.monotonic() + 60 * minutes
    while result.is_short or time.monotonic() < until_s:
        with tempfile.TemporaryDirectory() as folder:
            began_s = time.monotonic()
            for number in range(result.numbers, result.numbers + BATCH):
                draw_and_record(number, Path(folder), record, audio_s_max=AUDIO_S_MAX)
            recorded_s = time.monotonic()
            for line in _replay_elsewhere(Path(folder)):
                _take(result, line)
            result.record_s += recorded_s - began_s
            result.replay_s += time.monotonic() - recorded_s
        result.numbers += BATCH
        print(
            f"{result.computed} of {SESSIONS} sessions and {result.replayed_units} units "
            f"computed again, {len(result.failures)} failures",
            file=sys.stderr,
            flush=True,
        )
    return result, dict(model.info.fingerprint)


def _record_with(model: DuplexModel, script: ClientScript, folder: Path, number: int) -> list[Path]:
    return record_model(script, model, folder, number)


def _replay_elsewhere(folder: Path) -> Iterator[dict[str, object]]:
    """Judge a folder's logs in a new process, whose hashes differ from ours."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak.sessions", "--replay", str(folder)],
        check=False,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": seed},
    )
    for line in done.stdout.splitlines():
        yield json.loads(line)
    if done.returncode != 0:
        yield {"log": folder.name, "problems": [f"the process ended with {done.returncode}"]}


def _take(result: Result, line: dict[str, object]) -> None:
    problems = line["problems"]
    assert isinstance(problems, list)
    result.failures += [{"log": str(line["log"]), "problem": problem} for problem in problems]
    counts = line.get("counts", {})
    assert isinstance(counts, dict)
    result.counts.update(counts)
    units, is_identical = int(str(line.get("units", 0))), bool(line.get("identical"))
    result.compared += is_identical
    result.computed += is_identical and units > 0
    result.replayed_units += units


# -- the other process ----------------------------------------------------------------------------


def _replay_all(folder: Path) -> None:
    """Judge each log and run full replay on it; one line of JSON for each."""
    model = DuplexModel.load(tiny_path())
    for log in sorted(folder.iterdir()):
        verdict = judge(log)
        report = anyio.run(_replay_fully, log, model, backend="trio")
        problems = list(verdict.problems)
        if not report.identical:
            problems.append(f"full replay: {report.first_divergence or report.environment}")
        line = {
            "log": log.name,
            "problems": problems,
            "counts": verdict.counts,
            "identical": report.compared and report.identical,
            "units": report.units,
        }
        print(json.dumps(line), flush=True)


async def _replay_fully(log: Path, model: DuplexModel) -> FullReport:
    with LogReader(log) as reader:
        return await replay_fully(
            reader.head.fields, reader, lambda _: EngineBackend(model), model=MODEL
        )


if __name__ == "__main__":
    main()
