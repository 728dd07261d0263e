"""The wheel and the source package, and an installation without the server's libraries.

`python -m tests.soak.install` installs them from an index, and keeps sizes and times.
"""

from __future__ import annotations

import ast
import email
import json
import re
import shlex
import tarfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, Final

import pytest
from packaging.requirements import Requirement

import antiphon
from runtime.commands.demo import SAMPLES
from runtime.settings.extras import MODULES
from tests.project.packed import (
    PROJECT,
    PYPROJECT,
    ROOT,
    SDIST,
    VERSION,
    WHEEL,
    Environment,
    build,
    needed,
)

LOG: Final = ROOT / "fixtures" / "logs" / "v1-realtime-video.session.zst"
PACKAGES: Final = ("antiphon", "protocol", "recorder", "runtime", "replay")
ALWAYS: Final = {"/PKG-INFO", "/pyproject.toml", "/.gitignore"}
"""Of a source package, whatever is chosen."""
SAMPLES_AT: Final = "runtime/commands/samples/"
TINY: Final = "runtime/model/backends/minicpmo/tiny/"
NAMED_OTHERWISE: Final = {
    "pyyaml": "yaml",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
}
"""Distributions whose module has another name."""
(INSTALLING,) = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
"""The README's block about installing."""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    build(folder, "wheel", "sdist")
    return folder


@pytest.fixture(scope="module")
def base(dist: Path) -> Environment:
    """What the README's first commands make: Antiphon, and only what it names."""
    made = Environment.make(dist / "base", needed(PROJECT["dependencies"]))
    (dist / "dist").mkdir()
    (dist / "dist" / WHEEL).symlink_to(dist / WHEEL)
    for line in INSTALLING.splitlines():
        command, *rest = shlex.split(line, comments=True)
        if command == "pip" and not rest[-1].endswith("]"):
            done = made.run(command, *rest, folder=dist)
            assert done.returncode == 0, done.stderr
    return made


# -- the packages ---------------------------------------------------------------------------------


def test_the_wheel_has_all_that_the_sources_have(dist: Path) -> None:
    """A page, a stylesheet or the model would be missing where there are no sources."""
    with zipfile.ZipFile(dist / WHEEL) as wheel:
        packed = {name for name in wheel.namelist() if not name.startswith("antiphon-")}
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and not {"__pycache__", "node_modules"} & set(path.parts)
    }
    taken = {f"{SAMPLES_AT}{name}" for name in SAMPLES}
    assert {name for name in packed if not name.startswith(TINY)} == sources | taken
    model = {name.removeprefix(TINY) for name in packed if name.startswith(TINY)}
    assert model >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_the_wheel_says_what_it_needs(dist: Path) -> None:
    """Pip would install gigabytes for a client, or too little for a server."""
    with zipfile.ZipFile(dist / WHEEL) as wheel:
        told = email.message_from_bytes(wheel.read(f"antiphon-{VERSION}.dist-info/METADATA"))
    assert told["Version"] == VERSION
    assert set(told.get_all("Provides-Extra", ())) == {*MODULES, "dev", "docs"}
    always = [Requirement(text) for text in told.get_all("Requires-Dist", ())]
    names = {each.name for each in always if each.marker is None}
    assert names == {Requirement(text).name for text in PROJECT["dependencies"]}
    assert not names & {"torch", "transformers", "av", "h11"}


def test_the_source_package_builds_and_is_tested(dist: Path, tmp_path: Path) -> None:
    """A distribution could not make the same wheel, or check it; or it has a developer's keys."""
    with tarfile.open(dist / SDIST) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
        sdist.extractall(tmp_path, filter="data")
    build(tmp_path / "dist", "wheel", sources=tmp_path / SDIST.removesuffix(".tar.gz"))
    assert (tmp_path / "dist" / WHEEL).read_bytes() == (dist / WHEEL).read_bytes()
    assert names >= {"Makefile", "constraints.txt", "LICENSE", "CHANGELOG.md", "tests/conftest.py"}
    assert names >= {"docs/index.md", "deploy/compose.yaml", "examples/phone.py", ".ci/run"}
    assert not [name for name in names if "node_modules" in name]
    tops = {f"/{name.partition('/')[0]}" for name in names} - ALWAYS
    chosen = PYPROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert not [name for name in tops if not any(fnmatch(name, each) for each in chosen)]


@pytest.mark.parametrize("extra", MODULES)
def test_every_package_of_an_extra_is_known_by_its_module(extra: str) -> None:
    """A command would end in a traceback, and say nothing of the extra that it lacks."""
    asked = [Requirement(text).name for text in PROJECT["optional-dependencies"][extra]]
    modules = {NAMED_OTHERWISE.get(name, name.replace("-", "_")) for name in asked}
    assert modules - {"antiphon"} == set(MODULES[extra])


# -- the public names -----------------------------------------------------------------------------


def test_the_public_names_are_those_that_type_checkers_see() -> None:
    """A name would be there at run time and not in an editor, or be another thing there."""
    tree = ast.parse((ROOT / "antiphon" / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == dict(antiphon._PLACES)
    assert set(antiphon.__all__) == {*seen, "__version__"} == set(dir(antiphon))
    for name in antiphon.__all__:
        assert getattr(antiphon, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'conect'"):
        getattr(antiphon, "conect")  # noqa: B009 - mypy knows that there is none


# -- installed, without an extra ------------------------------------------------------------------


def said(done: CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


LACKING: Final = {
    "serve": "server",
    "workers start": "server",
    "doctor": "server",
    "dev bench engine": "server",
    "dev schema": "server",
    f"dev play {LOG}": "server",
    f"export {LOG} --output call.mp4": "media",
    f"export {LOG} --output call.mcap": "media",
}
TOOLS: Final = {
    f"recordings verify {LOG}": "state: finished",
    f"recordings inspect {LOG}": "realtime",
    f"replay {LOG}": "identical",
    f"recordings view {LOG} --output view.html": "view.html",
    f"export {LOG} --output call.wav": "call.wav",
    f"export {LOG} --output call.srt": "call.srt",
    f"export {LOG} --output call.jsonl": "call.jsonl",
    f"recordings redact {LOG} --output less.session.zst": "less.session.zst",
    "replay less.session.zst": "identical",
    "fork less.session.zst --at 1 --anyway": "a fork of",
    f"diff {LOG} {LOG}": "A rec-",
    f"eval {LOG}": "1 recording measured",
    "recordings list .": "2 sessions",
}
RUN_EACH: Final = """
import json, sys
from click.testing import CliRunner
from runtime.cli import main
for line in sys.argv[1:]:
    done = CliRunner().invoke(main, line.split())
    print(json.dumps([done.exit_code, done.stdout, done.stderr or repr(done.exception)]))
"""
"""Each line as the command would run it, in one process: to start one costs half a second."""


@pytest.fixture(scope="module")
def ran(base: Environment, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each line of `LACKING` and then of `TOOLS` came to: exit code, stdout, stderr."""
    folder, lines = tmp_path_factory.mktemp("ran"), (*LACKING, *TOOLS)
    told = said(base.run("python", "-c", RUN_EACH, *LACKING, folder=folder)).splitlines()
    assert not list(folder.iterdir())
    told += said(base.run("python", "-c", RUN_EACH, *TOOLS, folder=folder)).splitlines()
    return dict(zip(lines, map(json.loads, told), strict=True))


@pytest.mark.parametrize("line", TOOLS, ids=lambda line: line.partition(" /")[0] + line[-5:])
def test_recordings_need_no_extra(line: str, ran: dict[str, Any]) -> None:
    """The tools for a recording would want a model's libraries."""
    exit_code, stdout, stderr = ran[line]
    assert exit_code == 0, stderr
    assert TOOLS[line] in stdout


def installs(extra: str) -> str:
    """What installs an extra: the wheel itself, since anyone may register its name in an index."""
    return rf"pip install '/\S*/{re.escape(WHEEL)}\[{extra}\]'"


def test_the_client_needs_no_extra(base: Environment, tmp_path: Path) -> None:
    """A program that talks to a server would install the server."""
    refused = base.run("antiphon", "chat", "hi", "--url", "ws://127.0.0.1:1", folder=tmp_path)
    assert refused.returncode == 1
    assert "cannot connect" in refused.stderr
    program = (
        "import sys, antiphon\n"
        "assert not {'numpy', 'anyio', 'runtime'} & sys.modules.keys()\n"
        "antiphon.connect('ws://127.0.0.1:1', mode='audio'), antiphon.replay_log\n"
        "try: antiphon.load_backend('tiny')\n"
        "except ValueError as error: print(error)\n"
    )
    told = said(base.run("python", "-c", program, folder=tmp_path))
    assert re.match(rf"tiny needs the extra 'server': {installs('server')} \(", told)


@pytest.mark.parametrize("line", LACKING, ids=lambda line: line.partition(" /")[0] + line[-5:])
def test_a_command_says_which_extra_it_lacks(line: str, ran: dict[str, Any]) -> None:
    """A user would get a traceback, and look for the name of a package."""
    exit_code, stdout, stderr = ran[line]
    extra, command = LACKING[line], line.partition(" /")[0].removesuffix(" engine")
    assert exit_code == 2
    assert stdout == ""
    assert re.fullmatch(
        rf"Error: \w+ {command} needs the extra '{extra}': "
        rf"{installs(extra)} \(\w+ is missing\)\n",
        stderr,
    )


def test_the_command_is_installed(base: Environment, tmp_path: Path) -> None:
    """It would run only where the sources are."""
    assert said(base.run("antiphon", "--version", folder=tmp_path)).split()[-1] == VERSION
    done = base.run("antiphon", "serve", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: antiphon serve needs the extra 'server': pip install '/")
