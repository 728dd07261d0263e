"""Build the site of the documentation: `make docs`, or `python -m docs.site`.

The pages are gathered in a folder of their own (`stage`), and Zensical makes the site of them. A
link to a file that is not a page leads into `--repository`; without it only the link's text stays.
Nothing is asked of the network, by the build or by a page of the site.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from .reference import generated
from .staging import ROOT, stage

HERE: Final = Path(__file__).parent


def build(folder: Path, *, repository: str = "") -> Path:
    """Build the site in `folder`, which is emptied; return the folder of its pages.

    Raises:
        SystemExit: a link leads nowhere, or Zensical found a fault; it is on stderr.
    """
    shutil.rmtree(folder, ignore_errors=True)
    pages = folder / "docs"
    pages.mkdir(parents=True)
    faults = stage(pages, generated(), repository=repository)
    if faults:
        sys.exit("\n".join(faults))
    shutil.copy(HERE / "style.css", pages)
    config = (HERE / "zensical.toml").read_text("utf-8")
    (folder / "zensical.toml").write_text(config.replace("SOURCES", ROOT.as_posix()), "utf-8")
    command = (sys.executable, "-m", "zensical", "build", "--strict", "--clean")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return folder / "site"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Build the site of the documentation.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "docs")
    parser.add_argument(
        "--repository", default="", help="address of the files, such as https://HOST/NAME/blob/main"
    )
    given = parser.parse_args()
    site = build(given.out.resolve(), repository=given.repository)
    print(site / "index.html")


if __name__ == "__main__":
    main()
