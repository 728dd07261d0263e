"""What a release needs, checked: `python -m tests.project.release [--tested COMMIT]`.

- Nothing is changed and not committed.
- The version stands in the changelog, with a date, and its section has entries; nothing is left
  under "Unreleased".
- pyproject.toml, the npm package and its lock file have the same version, and no tag has it yet.
- pyproject.toml and README.md name the repository.
- `.ci/run` was green on this very commit: whoever ran it says so by `--tested`.
- The packages build, twice to the same bytes; the wheel has the pages and the model; pip takes it.

Each line says `ok` or what is missing; it exits with 1 where something is, and changes nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from tests.project.packed import PROJECT, ROOT, SDIST, VERSION, WHEEL, Environment, build, needed

WEB: Final = ROOT / "runtime" / "web"
PARTS: Final = (
    "antiphon/py.typed",
    "replay/view/page/index.html",
    "runtime/web/antiphon.js",
    "runtime/web/console/index.html",
    "runtime/model/backends/minicpmo/tiny/model.safetensors",
)
"""What an installation without its sources would miss first."""


def git(*words: str) -> str:
    """What git says."""
    told = subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True, check=True)
    return told.stdout.strip()


def clean() -> Iterator[str]:
    """Every change is committed."""
    changed = git("status", "--porcelain").splitlines()
    if changed:
        yield f"{len(changed)} files are not committed: {changed[0]}"


def section(text: str, version: str) -> Iterator[str]:
    """The changelog tells users of this version, with its date."""
    parts = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", text, re.MULTILINE))
    headings = [name for name in parts if name.split(" ")[0] == version]
    if not headings:
        yield f"CHANGELOG.md has no section {version}"
    elif not re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", headings[0]):
        yield f"CHANGELOG.md: {headings[0]!r} has no date"
    elif "\n- " not in parts[headings[0]]:
        yield f"CHANGELOG.md: {headings[0]!r} is empty"
    if "\n- " in parts.get("Unreleased", ""):
        yield "CHANGELOG.md: there are entries under Unreleased"


def changelog() -> Iterator[str]:
    """As `section`, of this project."""
    yield from section((ROOT / "CHANGELOG.md").read_text(), VERSION)


def versions() -> Iterator[str]:
    """All packages have the version, and it is new."""
    for name in ("package.json", "package-lock.json"):
        found = json.loads((WEB / name).read_text())["version"]
        if found != VERSION:
            yield f"runtime/web/{name} has the version {found}, pyproject.toml {VERSION}"
    if git("tag", "--list", f"v{VERSION}"):
        yield f"there is a tag v{VERSION} already"


def sources() -> Iterator[str]:
    """The package and its page say where the sources are."""
    address = PROJECT.get("urls", {}).get("Repository")
    if address is None:
        yield "pyproject.toml has no [project.urls] with the Repository"
    elif address not in (ROOT / "README.md").read_text():
        yield f"README.md does not name {address}"


def tested(commit: str | None) -> Iterator[str]:
    """The tests were green on what is released."""
    head = git("rev-parse", "HEAD")
    if commit is None:
        yield f"say that .ci/run was green: --tested {head[:12]}"
    elif git("rev-parse", commit) != head:
        yield f".ci/run was green on {commit}, and this is {head[:12]}"


def packages() -> Iterator[str]:
    """The packages build to the same bytes, and hold what they should."""
    with tempfile.TemporaryDirectory() as made:
        first, second = Path(made) / "first", Path(made) / "second"
        build(first, "wheel", "sdist")
        build(second, "wheel", "sdist")
        for name in (WHEEL, SDIST):
            if (first / name).read_bytes() != (second / name).read_bytes():
                yield f"{name} is another one each time"
        with zipfile.ZipFile(first / WHEEL) as wheel:
            for part in sorted({*PARTS} - {*wheel.namelist()}):
                yield f"{WHEEL} lacks {part}"
        environment = Environment.make(Path(made) / "empty", needed(PROJECT["dependencies"]))
        for command in (("pip", "install", "--quiet", first / WHEEL), ("antiphon", "--version")):
            done = environment.run(*command, folder=Path(made))
            if done.returncode:
                yield f"{command[0]}: {done.stderr.strip()}"


def main() -> None:
    """Check everything, and say what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.project.release")
    parser.add_argument("--tested", metavar="COMMIT", help="the commit on which .ci/run was green")
    commit = parser.parse_args().tested
    checks: dict[str, Callable[[], Iterator[str]]] = {
        "clean": clean,
        "changelog": changelog,
        "versions": versions,
        "sources": sources,
        "tested": lambda: tested(commit),
        "packages": packages,
    }
    print(f"antiphon {VERSION}")
    missing = 0
    for name, check in checks.items():
        found = list(check())
        missing += len(found)
        print(f"{name:10} {'ok' if not found else '; '.join(found)}", flush=True)
    sys.exit(missing > 0)


if __name__ == "__main__":
    main()
