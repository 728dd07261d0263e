"""Run simulations of a whole server: one by its seed, or many.

    python -m tests.simulation.simulate --seed 7 [-v] [--json] [--bug NAME]
    python -m tests.simulation.simulate --seeds 0-499 [--out docs/evidence]
    python -m tests.simulation.simulate --seeds 0-99 --pairs

The same seed does the same, to the microsecond, on any machine with the same code; the name that is
printed with it is a hash of all that happened. `--bug` plants one of `simulated_bugs` first.
`--pairs` runs each seed with and without losses of workers, and compares what clients were told.
What was found goes to `simulation.json` of the folder `--out`, without a date. It exits with 1
where anything was found.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import attrs

from tests.simulation.simulated_bugs import BUGS, planted
from tests.simulation.simulated_server import Outcome, compare, simulate


def _seeds(text: str) -> range:
    first, _, last = text.partition("-")
    try:
        return range(int(first), int(last or first) + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no range such as 0-499") from None


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.simulate", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", dest="seeds", type=_seeds, help="one simulation")
    which.add_argument("--seeds", type=_seeds, metavar="A-B", help="all of them, B included")
    parser.add_argument("--bug", choices=sorted(BUGS), help="plant a bug first")
    parser.add_argument("--json", action="store_true", help="a line of JSON a seed")
    parser.add_argument("--pairs", action="store_true", help="compare with runs without losses")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep what was found")
    parser.add_argument("-v", "--verbose", action="store_true", help="what happened, counted")
    return parser.parse_args(arguments)


def _show(outcome: Outcome, *, as_json: bool, verbose: bool) -> None:
    if as_json:
        print(json.dumps(attrs.asdict(outcome)), flush=True)
        return
    found = f"{len(outcome.violations)} violations" if outcome.violations else "sound"
    sessions = outcome.seen.get("ConnectionOpened", 0)
    took = f"{sessions} sessions in {outcome.virtual_s:.1f} s of its own time"
    print(f"seed {outcome.seed}: {found}, {took}, {outcome.name}", flush=True)
    for violation in outcome.violations:
        print(f"    {violation}")
    if verbose:
        for name, count in outcome.seen.items():
            print(f"    {count:6} {name}")


def _compare(seeds: Sequence[int], bug: str | None) -> int:
    """Compare each seed with itself without losses, and return the exit code."""
    units, failed = 0, 0
    for seed in seeds:
        with planted(bug):
            compared = compare(seed)
        units += compared.units
        failed += bool(compared.differences)
        for difference in compared.differences:
            print(f"seed {seed}: {difference}", flush=True)
    print(f"{len(seeds)} pairs, {units} units of sessions that moved, {failed} failed")
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for.

    Args:
        arguments: of the command line; None takes the process's own.

    Returns:
        The exit code: 1 where something was found.
    """
    options = _parse(arguments)
    if options.pairs:
        return _compare(options.seeds, options.bug)
    began_s, failed, seen = time.monotonic(), list[int](), Counter[str]()
    for seed in options.seeds:
        with planted(options.bug):
            outcome = simulate(seed)
        if outcome.violations:
            failed.append(seed)
        seen.update(outcome.seen)
        _show(outcome, as_json=options.json, verbose=options.verbose)
    if len(options.seeds) > 1 and not options.json:
        took_s = time.monotonic() - began_s
        sessions = seen["ConnectionOpened"]
        print(
            f"{len(options.seeds)} seeds, {sessions} sessions, {len(failed)} failed, {took_s:.0f} s"
        )
    if options.out is not None:
        _keep(options.out, options.seeds, failed, seen)
    return 1 if failed else 0


def _keep(folder: Path, seeds: range, failed: Sequence[int], seen: Counter[str]) -> None:
    """Write what was found, and how often what was tried."""
    found = {
        "what": "simulated servers under clients, faults and losses of workers, each from a seed",
        "good": not failed,
        "seeds": f"{seeds.start}-{seeds.stop - 1}",
        "failed": failed,
        "seen": dict(sorted(seen.items())),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "simulation.json").write_text(json.dumps(found, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
