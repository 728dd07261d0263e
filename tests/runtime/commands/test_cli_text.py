"""Texts on the command line: arguments that are not UTF-8, and tables in a pipe."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Final

import click
import numpy as np
import pytest
import soundfile
from click.testing import CliRunner

from runtime import RUN
from runtime.cli import main
from runtime.commands import workers
from tests.live.servers import live_server
from tests.project.commands import all_commands
from tests.test_architecture import ROOT, tracked_files

BROKEN: Final = "bad\udcff"
"""As Python has an argument whose last byte is not UTF-8."""
TEXTS: Final = [
    (name, param)
    for name, command in all_commands()
    for param in command.params
    if isinstance(param.type, click.types.StringParamType)
]


def antiphon(folder: Path, *words: bytes | str, stdin: bytes = b"") -> tuple[int, str, str]:
    """Run a command; return its exit code, and what it said on stdout and stderr."""
    root = str(Path(__file__).parents[3])
    environment = os.environ | {"PYTHONPATH": root, "PYTHONUTF8": "1"}
    done = subprocess.run(
        (*RUN, *words), input=stdin, capture_output=True, cwd=folder, env=environment, check=False
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize(
    ("command", "param"), TEXTS, ids=[f"{name} {param.name}" for name, param in TEXTS]
)
def test_a_text_that_is_not_utf_8(command: str, param: click.Parameter) -> None:
    """A typing error on another keyboard would end in a traceback of a JSON encoder."""
    given = [BROKEN] if isinstance(param, click.Argument) else [param.opts[0], BROKEN]
    result = CliRunner().invoke(main, [*command.split(), *given])
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    assert result.stderr.endswith(": not UTF-8\n")


def test_it_is_so_of_bytes(tmp_path: Path) -> None:
    """The same of what a shell gives."""
    told = (2, "", "Error: '[TEXT]': not UTF-8\n")
    assert antiphon(tmp_path, "chat", b"\xff") == told
    told = (2, "", "Error: the question is not UTF-8\n")
    assert antiphon(tmp_path, "chat", stdin=b"a\xff") == told


def test_a_file_may_be_called_anything(tmp_path: Path) -> None:
    """A conversation would end in a traceback, after minutes, for the name of its file."""
    path = os.fsencode(tmp_path) + b"/\xff.wav"
    soundfile.write(os.fsdecode(tmp_path / "ask.wav"), np.zeros(16_000), 16_000)
    os.rename(tmp_path / "ask.wav", path)
    with live_server("--no-record") as server:
        words = ("talk", path, "--fast", "--wait-s", "0", "--json", "--url", server.url)
        code, stdout, stderr = antiphon(tmp_path, *words)
    assert (code, stderr) == (0, "")
    reply = json.loads(stdout.splitlines()[-1])["reply"]
    assert os.fsencode(reply) == b"\xff.reply.wav"


# -- tables in a pipe ------------------------------------------------------------------------------


def test_a_row_in_a_pipe_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address could not be copied, or found by grep."""
    where = "unix:/" + "run/" * 40 + "w1"
    names = ("number", "state", "slots", "free", "leased", "fingerprint", "age_s")
    row = dict.fromkeys(names, 1) | {"where": where}
    monkeypatch.setattr(workers, "_ask", lambda *_: {"workers": [row]})
    shown = CliRunner().invoke(main, ["workers", "list"], env={"COLUMNS": "80"})
    assert [where in line for line in shown.stdout.splitlines()] == [False, True]


def test_all_tables_go_where_a_pipe_is_known() -> None:
    """A new table would be cut to 80 columns in a pipe."""
    own = re.compile(r"\bConsole\(\)")
    paths = [it for it in tracked_files() if it.startswith(("replay/", "runtime/"))]
    found = {it for it in paths if it.endswith(".py") and own.search((ROOT / it).read_text())}
    lines_that_are_not_cut = {"runtime/commands/demo.py", "runtime/commands/talk.py"}
    assert found == {"runtime/net/process.py"} | lines_that_are_not_cut
