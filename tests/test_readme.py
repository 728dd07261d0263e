"""The README's examples do what it says they do."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import anyio
import pytest

from runtime.server_process import RUN
from tests.live import live_server

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
"""Console blocks: `$ antiphon ...` and what it prints at least."""
EXAMPLES = [
    (match[1], match[2].splitlines())
    for block in BLOCKS
    for match in re.finditer(r"\$ antiphon (.*)\n((?:(?!\$ ).*\n)*)", block)
]
LASTING = ("serve", "talk", "chat", "transcribe")
"""Commands that need a server, or are one; the live tests run those."""


def antiphon(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user would."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    command = (*RUN, *arguments)
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )


def test_there_are_examples() -> None:
    """The README shows nothing, and the tests below test nothing."""
    assert len(EXAMPLES) >= 5


@pytest.mark.parametrize(
    ("line", "printed"), [e for e in EXAMPLES if e[0].split()[0] not in LASTING]
)
def test_an_example_prints_what_it_shows(line: str, printed: list[str]) -> None:
    """A new user's first command does something else."""
    done = antiphon(*shlex.split(line))
    assert done.returncode == 0, done.stderr
    for expected in printed:
        assert expected in done.stdout.splitlines()


@pytest.mark.parametrize("line", [line for line, _ in EXAMPLES])
def test_its_flags_exist(line: str) -> None:
    """The README names a flag that was renamed."""
    command, *rest = shlex.split(line)
    described = antiphon(command, "--help").stdout
    for flag in (word for word in rest if word.startswith("--")):
        assert flag in described
    for path in (word for word in rest if word.startswith("fixtures/")):
        assert (ROOT / path).is_file()


def test_its_client_works() -> None:
    """A client copied out of the README does not run."""
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    printed: list[str] = []
    with live_server("--no-record") as server:
        here = snippet.replace("ws://127.0.0.1:8006", server.url.removesuffix("/v1/realtime"))
        assert here != snippet
        body = textwrap.indent(here, "    ")
        names: dict[str, Any] = {"print": lambda *said, **_: printed.append(*said)}
        exec(f"async def main():\n{body}", names)
        anyio.run(names["main"])
    assert "".join(printed) == "turn 0: good morning (0 pictures, 0 sounds)Listen"


def test_its_links_lead_somewhere() -> None:
    """A reader follows a link into nothing."""
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
