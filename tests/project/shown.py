r"""What pages show, run: each block of `console`, `sh` and `python`, in the order of the page.

| in a page | is |
|---|---|
| a block of `console` | commands after `$ `; after each what it prints at least, without `...` |
| a block of `sh` | commands, one a line (`\` goes on), and comments; `A=...` begins a script |
| a block of `python` | a program |
| `<!-- exit: 1 -->` before a block | its last command ends with 1, and not with 0 |
| `<!-- not run: why -->` before a block | it is only parsed |

All pages are run in one folder with one server, that of `SERVED`. The address that they show, with
port 8006, is that server's; clients and examples talk to it, `talk` with `--fast`. Any other
`antiphon serve` is read with `--print-config` and not started; of a `pip install` the extras are
looked up. A command of ours without a shell's signs runs in this process, by the same parser.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Final

import attrs
import pytest
from click.testing import CliRunner

from runtime import RUN
from runtime.cli import main

ROOT: Final = Path(__file__).parents[2]
SERVED: Final = "antiphon serve --model tiny --record recordings"
CLIENTS: Final = ("talk", "chat", "transcribe", "workers")
"""Commands that need a server."""
RUN_S: Final = 60
BLOCK: Final = re.compile(
    r"(?:^<!-- (exit|not run): (.+?) -->\n+)?^( *)```(\w+)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE
)
CONDITION: Final = re.compile(r"--(?:fail-if|where) '[^']*'")
SHELL: Final = re.compile(r"[|<>&;$*`(]")


@attrs.frozen(kw_only=True)
class Block:
    """A block: where it begins, its text, the exit code of its last command, why it is not run."""

    page: str
    line: int
    language: str
    text: str
    exit_code: int
    why_not: str

    @property
    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """Its commands, and what each prints at least."""
        joined = re.sub(r"\\\n\s*", "", self.text)
        if re.match(r"[A-Z]+=", self.text):  # a script
            yield self.text, []
            return
        if self.language == "sh":
            yield from ((line, []) for line in _lines(re.sub(r"\s+#.*$", "", joined, flags=re.M)))
            return
        for found in re.finditer(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", joined, re.MULTILINE):
            yield found[1], [line for line in _lines(found[2]) if line != "..."]


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def blocks(page: str) -> list[Block]:
    """The blocks of a page, by its path in the repository, that are commands or programs."""
    text = (ROOT / page).read_text("utf-8")
    return [
        Block(
            page=page,
            line=text.count("\n", 0, found.end() - len(found[0].lstrip())) + 1,
            language=found[4],
            text=textwrap.dedent(found[5]),
            exit_code=int(found[2]) if found[1] == "exit" else 0,
            why_not=found[2] if found[1] == "not run" else "",
        )
        for found in BLOCK.finditer(text)
        if found[4] in {"console", "sh", "python"}
    ]


@attrs.define
class Runner:
    """Runs blocks in `folder`, with the server at `url`."""

    folder: Path
    url: str

    def run(self, block: Block) -> None:
        """Run a block; `AssertionError` where it does not do what the page says."""
        where = f"{block.page}:{block.line}"
        if block.language == "python":
            self._program(block, where)
            return
        *_, last = commands = list(block.commands)
        for each in commands:
            line, expected = each
            if block.why_not:
                shlex.split(line)
                continue
            code, stdout, stderr = self._command(self._here(line))
            wanted = block.exit_code if each is last else 0
            assert code == wanted, f"{where}: {line}: exit {code}\n{stdout}{stderr}"
            for text in [] if line.startswith("antiphon serve ") else expected:
                told = [said.rstrip() for said in (stdout + stderr).splitlines()]
                assert text.rstrip() in told, f"{where}: {line}: no {text!r} in\n{stdout}{stderr}"

    def _here(self, text: str) -> str:
        return text.replace("127.0.0.1:8006", self.url.rpartition("/")[2])

    def _program(self, block: Block, where: str) -> None:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
        compile(block.text, where, "exec", flags)
        if not block.why_not:
            program = self.folder / "program.py"
            program.write_text(self._here(block.text))
            code, stdout, stderr = self._shell("python program.py")
            assert code == block.exit_code, f"{where}: exit {code}\n{stdout}{stderr}"

    def _command(self, line: str) -> tuple[int, str, str]:
        if line.startswith("pip install"):
            _check_extras(line)
            return 0, "", ""
        if line.startswith("antiphon serve "):
            line = f"{line} --print-config"
        if line.startswith("python examples/"):
            line = f"{line} --url {self.url}"
        if not line.startswith("antiphon ") or SHELL.search(CONDITION.sub("", line)):
            return self._shell(line)
        words = self._addressed(shlex.split(line)[1:])
        with chdir(self.folder):
            done = CliRunner().invoke(main, words, env={"COLUMNS": "120"})
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, done.stdout, done.stderr

    def _addressed(self, words: list[str]) -> list[str]:
        """Lead a client to the server, and have it wait for nothing."""
        if words[0] not in CLIENTS:
            return words
        words = words if "--url" in words else [*words, "--url", self.url]
        return [*words, "--fast"] if words[0] == "talk" else words

    def _shell(self, line: str) -> tuple[int, str, str]:
        """Run a command with a shell, where `antiphon` is ours; skip the test without `jq`."""
        if "| jq " in line and shutil.which("jq") is None:
            pytest.skip("there is no jq here")
        tools = self.folder / "bin"
        tools.mkdir(exist_ok=True)
        tool = tools / "antiphon"
        if not tool.exists():
            tool.write_text(f'#!/bin/sh\nexec {shlex.join(RUN)} "$@"\n')
            tool.chmod(0o755)
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COLUMNS": "120",
        }
        done = subprocess.run(
            ("sh", "-ec", line),
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr


def _check_extras(line: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for extras in re.findall(r"(?:antiphon|[.]whl)\[(.*?)\]", line):
        for extra in extras.split(","):
            assert extra in project["optional-dependencies"], f"{line}: there is no extra {extra}"
