"""Where the scripts of `make soak`, and benches run by hand, keep what they found."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Final

EVIDENCE: Final = Path("docs/evidence")


def add_out(parser: argparse.ArgumentParser) -> None:
    """Add the option `--out`; its folder is there before an hour's work is to be kept in it."""
    says = "the folder in which the result is kept; made if it is not there"
    parser.add_argument("--out", type=made, default=EVIDENCE, metavar="FOLDER", help=says)


def keep(found: object, out: Path, name: str) -> None:
    """Write what was found into `out`, and print it."""
    text = json.dumps(found, indent=2) + "\n"
    (out / f"{name}.json").write_text(text, "utf-8")
    print(text, end="")


def made(text: str) -> Path:
    """Make a folder, if it is not there."""
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from error
    return folder
