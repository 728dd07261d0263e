"""The command line as a user meets it: its help, and its answers to mistakes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final
from urllib.request import urlopen

import click
import pytest
from click.testing import CliRunner, Result

from protocol.values.limits import MODES
from protocol.values.state import SessionKind, diagram
from runtime import RUN
from runtime.cli import GROUPS, main
from runtime.settings.settings import Settings, declared
from tests.golden.logs import FOLDER
from tests.live.servers import live_server
from tests.project.commands import all_commands

LOG = str(FOLDER / "v1-realtime-video.session.zst")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def antiphon(*arguments: str) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(main, arguments)


def is_group(command: click.Command) -> bool:
    """Whether it only holds others."""
    return isinstance(command, click.Group)


COMMANDS: Final = [name for name, _ in all_commands()]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_exists_and_explains_itself(command: str) -> None:
    """A command that the help lists cannot be loaded, or says nothing of its flags."""
    shown = antiphon(*command.split(), "--help")
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith(f"Usage: main {command}")
    *group, name = command.split()
    assert f"  {name} " in antiphon(*group, "--help").output


@pytest.mark.parametrize("command", [name for name, it in all_commands() if not is_group(it)])
def test_a_command_lists_its_exit_codes(command: str) -> None:
    """A script could not tell an interrupt, or a mistake, from a verdict."""
    _, found, codes = antiphon(*command.split(), "--help").output.partition("Exit codes")
    assert found
    listed = re.findall(r"^ +(\d+(?:, \d+)*)  ", codes, re.MULTILINE)
    assert {"0", "2"} <= {*listed}
    assert "130" in codes or "ended by a signal" in codes


def test_a_command_that_is_not_there_is_said_to_be() -> None:
    """A typing error gives a traceback."""
    wrong = antiphon("serv")
    assert wrong.exit_code == 2
    assert "No such command 'serv'. Did you mean 'serve'?" in wrong.output


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("keys ad", "Did you mean 'add'?"),
        ("verify x", "Did you mean: antiphon recordings verify?"),
        ("bench", "Did you mean: antiphon dev bench?"),
        ("console --port 0", "Did you mean: antiphon serve --open?"),
        ("worker", "Did you mean: antiphon workers start?"),
        ("sessions", "Did you mean: antiphon recordings list?"),
        ("fuzz", "Did you mean: python -m tests.fuzz, in a clone of the repository?"),
        ("serve --prot 1", "'--port'"),
        ("serve --default-mode vdeo", "did you mean video?"),
        ("serve --model tinny --port 0 --no-record", "did you mean tiny?"),
        ("talk a.wav --mode vidio", "did you mean video?"),
        (f"recordings redact {LOG} --kind adio", "did you mean audio?"),
        (f"fork {LOG} --at 1 --set temprature=1", "did you mean temperature?"),
    ],
)
def test_what_is_mistyped_is_answered_with_what_was_meant(line: str, meant: str) -> None:
    """A new user has to find the word in a long help, or in another page."""
    wrong = antiphon(*line.split())
    assert wrong.exit_code in {1, 2}
    assert meant in wrong.stderr


def test_the_help_has_its_commands_under_headings() -> None:
    """A long list of commands is read by nobody."""
    shown = antiphon("--help").output
    for heading, group in GROUPS.items():
        section = shown.partition(f"\n{heading}:\n")[2].partition("\n\n")[0]
        assert [line.split()[0] for line in section.splitlines()] == list(group)
    assert len(main.named) <= 16


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("antiphon re", "recordings replay"),
        ("antiphon recordings re", "recover redact"),
        ("antiphon talk --mode v", "video"),
    ],
)
def test_a_shell_completes_commands_and_values(words: str, completed: str) -> None:
    """The way that the README shows gives nothing."""
    variables = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    environment = os.environ | variables | {"_ANTIPHON_COMPLETE": "bash_complete"}
    code = "import sys; sys.argv[0] = 'antiphon'; from runtime.cli import main; main()"
    command = (sys.executable, "-c", code)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"plain,{word}" for word in completed.split()]


@pytest.mark.parametrize(
    "flags",
    [
        ("--port", "70000"),
        ("--device", "abacus"),
        ("--dtype", "fp8"),
        ("--slots", "0"),
        ("--limit-video-s", "0"),
        ("--default-mode", "speech"),
        ("--durability", "maybe"),
    ],
)
def test_a_bad_flag_is_refused_before_anything_starts(flags: tuple[str, str]) -> None:
    """A server starts with settings that nobody meant."""
    refused = antiphon("serve", *flags)
    assert refused.exit_code == 2
    assert flags[0] in refused.output


def test_a_taken_port_is_one_clear_line() -> None:
    """A second server on the same port ends in a traceback."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        refused = antiphon("serve", "--model", "scripted", "--no-record", "--port", port)
    assert refused.exit_code == 1
    assert refused.output.startswith("Error:")
    assert "in use" in refused.output


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    """Recordings go nowhere, and the server says nothing."""
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file" / "logs")
    refused = antiphon("serve", "--model", "scripted", "--port", "0", "--record", folder)
    assert refused.exit_code == 1
    assert "Error:" in refused.output


def test_a_server_listens_when_its_model_is_loaded(tmp_path: Path) -> None:
    """Whoever waits for the word sends sessions to a server that refuses them for minutes."""
    command = ("serve", "--no-record", "--port", "0", "--model")
    (tmp_path / "config.json").write_text("{}")
    failed = antiphon(*command, str(tmp_path))
    assert failed.exit_code == 1
    assert failed.stdout == f"loading {tmp_path}\n"
    with live_server("--worker", "scripted") as server:
        host, port = server.address
        with urlopen(f"http://{host}:{port}/ready", timeout=30) as answer:
            assert answer.status == 200
        assert server.said == [
            "loading scripted, scripted",
            f"listening on ws://{host}:{port}/v1/realtime",
            "ready",
        ]


def test_the_diagram_is_that_of_the_table() -> None:
    """The architecture page shows states that the machine does not have."""
    shown = [f"%% {session_kind}\n{diagram(session_kind)}" for session_kind in SessionKind]
    assert antiphon("dev", "states").output == "".join(shown)


def test_the_limits_of_a_mode_are_those_of_the_sources() -> None:
    """A video session gets the time of an audio session."""
    settings = Settings()
    assert [settings.limit_s(mode) for mode in MODES] == [300, 600, 0, 3600]


def test_a_server_without_a_log_keeps_none(tmp_path: Path) -> None:
    """An operator who may not record does so all the same."""
    with live_server("--no-record", "--record", str(tmp_path / "logs")):
        pass
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("flags", "pages", "recordings", "open_to"),
    [
        (
            ("--no-record", "--keys", "keys.toml"),
            ("talk to it at http://127.0.0.1:PORT/", "status at http://127.0.0.1:PORT/status"),
            "nothing is recorded",
            "open to this machine only, with a key of keys.toml",
        ),
        (
            ("--record", "kept", "--host", "0.0.0.0", "--insecure", "--static", "web"),
            (
                "talk to it at http://localhost:PORT/console",
                "pages at http://localhost:PORT/ (web)",
                "status at http://localhost:PORT/status",
            ),
            "recordings in FOLDER/kept",
            "open to every machine that reaches 0.0.0.0, no key is asked for",
        ),
        (
            ("--no-record", "--no-pages"),
            ("status at http://127.0.0.1:PORT/status",),
            "nothing is recorded",
            "open to this machine only, no key is asked for",
        ),
    ],
)
def test_a_server_says_where_it_is_and_who_can_reach_it(
    flags: tuple[str, ...], pages: tuple[str, ...], recordings: str, open_to: str, folder: Path
) -> None:
    """A new user looks for the pages, and does not know what is kept, or open to whom."""
    (folder / "web").mkdir()
    assert antiphon("keys", "add", "anna", "--file", "keys.toml").exit_code == 0
    with live_server(*flags) as server:
        port = server.url.removesuffix("/v1/realtime").rpartition(":")[2]
        assert server.stop() == 0
        assert server.process.stdout is not None
        said = server.process.stdout.read().splitlines()
    *shown, kept, who, last = said
    assert shown == [line.replace("PORT", port) for line in pages]
    assert [kept, who, last] == [recordings.replace("FOLDER", str(folder)), open_to, "stopped"]


def test_a_server_opens_the_console(tmp_path: Path) -> None:
    """A newcomer would look for the address."""
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}.part && mv {opened}.part {opened}\n')
    browser.chmod(0o700)
    run = ("env", f"BROWSER={browser}", *RUN)
    with live_server("--no-record", "--open", run=run) as server:
        assert server.process.stdout is not None
        assert server.process.stdout.readline().startswith("talk to it at ")
        deadline_s = time.monotonic() + 20
        while not opened.exists() and time.monotonic() < deadline_s:
            time.sleep(0.02)
    host, port = server.address
    assert opened.read_text() == f"http://{host}:{port}/\n"
    assert "which --no-pages turns off" in antiphon("serve", "--open", "--no-pages").stderr


def test_the_help_of_a_server_is_short() -> None:
    """Eighty options hide the few that a user needs."""
    options = re.findall(r"^  (-.*?)(?:  |$)", antiphon("serve", "--help").output, re.MULTILINE)
    assert len([it for it in options if "--help" not in it]) == 15
    shown = antiphon("serve", "--help-all").output
    assert all(setting.flag in shown for setting in declared(Settings))
