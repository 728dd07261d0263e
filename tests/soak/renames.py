"""Each class and attribute of an event, an effect or a value, renamed by itself: `make soak`.

    python -m tests.soak.renames [--jobs 2] [NAME ...]

For each name (`SetTimer`, `UnitResult.margin`; by default all) the golden logs are replayed by the
product with that one renamed. It prints the names with which a log does not replay as before, and
exits with 1 if there are any. `tests/test_golden.py` renames all of them at once.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from tests.golden.logs import FOLDER
from tests.golden.renaming import ROOT, all_names

JOBS: Final = 2
RUN_S_MAX: Final = 300
LOGS: Final = sorted(map(str, FOLDER.glob("*.zst")))


def results(*options: str) -> str:
    """Replay all golden logs; gives a line for each, or the error that there was."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.golden.renaming", *options, *LOGS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_S_MAX,
    )
    return ran.stdout if ran.returncode == 0 else ran.stderr


def main() -> int:
    """Rename one after another; gives the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=JOBS)
    args = parser.parse_args()
    names = args.names or all_names()
    wanted = results()
    assert "diverged" not in wanted, wanted
    with ThreadPoolExecutor(args.jobs) as pool:
        found = pool.map(lambda name: results("--only", name), names)
        wrong = [name for name, found_one in zip(names, found, strict=True) if found_one != wanted]
    print(f"{len(names)} names, {len(wrong)} of them in logs: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
