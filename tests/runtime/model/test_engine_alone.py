"""Model and engine on a machine that has what they compute with, and no library of the server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
THERE = ("torch", "transformers", "safetensors", "numpy", "attrs")
WITHOUT = """
import importlib.machinery as machinery, sys
class Without:
    find_distributions = machinery.PathFinder.find_distributions
    invalidate_caches = machinery.PathFinder.invalidate_caches
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in {missing!r}:
            return machinery.PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [Without if one is machinery.PathFinder else one for one in sys.meta_path]
"""
PLAYED = """
import runtime.model.backends.minicpmo.model
import runtime.model.engine.backend
import tests.gpu.steps
print("imported")
from pathlib import Path
from protocol.values.model import DuplexConfig, Opening, Unit, Voice
from runtime.model.backends.minicpmo.model import DuplexModel
from tests.models.blocking import open_session
model = DuplexModel.load(Path("fixtures/tiny"), slots=1)
opening = Opening(instructions="", voice=Voice(), config=DuplexConfig(), seed=1)
session = open_session(model, opening)
for index in range(4):
    print(session.run_unit(Unit(index=index, pcm=bytes(64_000))).is_listen)
    session.finalize(index, interrupted=False)
"""


def name_of(requirement: str) -> str:
    """The distribution that a requirement is for, normalised; empty for an extra's."""
    if "extra ==" in requirement:
        return ""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return "" if found is None else re.sub(r"[-_.]+", "-", found[0]).lower()


def with_needs(names: set[str]) -> set[str]:
    """Distributions and all that they need."""
    found, ahead = set[str](), set(names)
    while ahead:
        name = ahead.pop()
        found.add(name)
        try:
            needs = {name_of(line) for line in requires(name) or ()}
        except PackageNotFoundError:  # For another system.
            continue
        ahead |= needs - found - {""}
    return found


@pytest.fixture(scope="module")
def without() -> str:
    """Code that hides what the project needs beside the five, and their own needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    ours = with_needs({name_of(line) for line in project["dependencies"]})
    hidden = ours - with_needs(set(THERE))
    missing = {
        module
        for module, distributions in packages_distributions().items()
        if {name_of(name) for name in distributions} <= hidden
    }
    assert {"simplejpeg", "orjson", "cattrs", "trio", "zstandard", "soundfile"} <= missing
    return WITHOUT.format(missing=missing)


def run(code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def played(without: str) -> subprocess.CompletedProcess[str]:
    """Import all of it and compute four seconds: one start for the tests below."""
    return run(without + PLAYED)


def test_it_is_imported(played: subprocess.CompletedProcess[str]) -> None:
    """A GPU machine may have no more: nothing could be tried on it."""
    assert played.stdout.split()[:1] == ["imported"], played.stderr


def test_what_is_hidden_is_missing(without: str) -> None:
    """The other tests would hold of any code."""
    assert "No module named 'zstandard'" in run(f"{without}\nimport recorder.write.writer").stderr


def test_it_computes(played: subprocess.CompletedProcess[str]) -> None:
    """It would load, and fail in the first second."""
    assert played.returncode == 0, played.stderr
    assert played.stdout.split()[1:] == ["True"] * 4
