"""Antiphon as users install it: its packages, built, and an environment with some of its needs.

Nothing here uses a network: what an environment has is linked from this one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, Final

import attrs
from packaging.requirements import Requirement

ROOT: Final = Path(__file__).parents[2]
PYPROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: Final[dict[str, Any]] = PYPROJECT["project"]
VERSION: Final = str(PROJECT["version"])
WHEEL: Final = f"antiphon-{VERSION}-py3-none-any.whl"
SDIST: Final = f"antiphon-{VERSION}.tar.gz"
EPOCH: Final = "1700000000"
"""The time of every file in a package: the same sources give the same bytes."""
WAIT_S: Final = 120


def run(*command: str | Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command away from the sources, and return what it said."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def build(folder: Path, *targets: str, sources: Path = ROOT) -> None:
    """Build packages of the sources into a folder: `wheel`, `sdist`."""
    chosen = [word for target in targets for word in ("-t", target)]
    builder = (sys.executable, "-m", "hatchling", "build", *chosen, "-d", folder)
    done = run(*builder, folder=sources, SOURCE_DATE_EPOCH=EPOCH)
    assert done.returncode == 0, done.stderr


def needed(requirements: Iterable[str]) -> set[str]:
    """The names of installed distributions that these requirements come to, theirs included."""
    found: set[str] = set()
    waiting = [Requirement(each) for each in requirements]
    while waiting:
        asked = waiting.pop()
        name = re.sub(r"[-_.]+", "-", asked.name).lower()
        if name in found or not (asked.marker is None or asked.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        waiting += map(Requirement, distribution(name).requires or ())
    return found


@attrs.frozen
class Environment:
    """A virtual environment with the distributions that were named, and no others."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, distributions: Iterable[str]) -> Environment:
        """Make one; its pip is this one's, and installs nothing but files."""
        venv.create(folder, with_pip=False)
        made = cls(folder)
        for name in distributions:
            known = distribution(name)
            for top in {path.parts[0] for path in known.files or ()} - {"..", "__pycache__"}:
                link = made.site / top
                if not link.exists():
                    link.symlink_to(str(known.locate_file(top)))
        pip = made.bin / "pip"
        python = made.bin / "python"
        pip.write_text(f'#!/bin/sh\nexec {sys.executable} -m pip --python {python} "$@"\n')
        pip.chmod(0o755)
        return made

    @property
    def bin(self) -> Path:
        """The folder of its commands."""
        return self.folder / "bin"

    @property
    def site(self) -> Path:
        """The folder of its packages."""
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def run(self, *command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run a command with this environment's own first; pip without an index."""
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        return run(*command, folder=folder, PATH=path, PIP_NO_INDEX="1", PIP_NO_DEPS="1")
