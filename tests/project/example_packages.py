"""The packages of `examples`, installed for a test."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Final

from runtime import RUN

EXAMPLES: Final = Path(__file__).parents[2] / "examples"


def install(folder: Path, loads: str = "parrot:load", example: Path = EXAMPLES / "backend") -> None:
    """Put an example's backend where Python finds it, as pip would."""
    project = tomllib.loads((example / "pyproject.toml").read_text())["project"]
    ((group, ((name, entry),)),) = [(it, of.items()) for it, of in project["entry-points"].items()]
    assert entry in {f"{name}:load", f"{name}_placement"}
    for path in example.glob("*.py"):
        (folder / path.name).write_text(path.read_text())
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {loads}\n")


def run_with(folder: Path) -> tuple[str, ...]:
    """How `antiphon` runs where the packages in a folder are installed."""
    return (*RUN[:-2], "-c", f"import sys; sys.path.insert(0, {str(folder)!r}); {RUN[-1]}")
