"""The command line as a user meets it: its help, and its answers to mistakes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from protocol.state import Course, diagram
from runtime.cli import COMMANDS, main
from runtime.settings import MODES, Settings
from tests.live import live_server


def antiphon(*arguments: str) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_exists_and_explains_itself(command: str) -> None:
    """A command that the help lists cannot be loaded, or says nothing of its flags."""
    shown = antiphon(command, "--help")
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith(f"Usage: main {command}")
    assert command in antiphon("--help").output


def test_a_command_that_is_not_there_is_said_to_be() -> None:
    """A typing error gives a traceback."""
    wrong = antiphon("serv")
    assert wrong.exit_code == 2
    assert "No such command 'serv'" in wrong.output


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


def test_the_diagram_is_that_of_the_table() -> None:
    """The architecture page shows states that the machine does not have."""
    shown = [f"%% {course}\n{diagram(course)}" for course in Course]
    assert antiphon("states").output == "".join(shown)


def test_the_limits_of_a_mode_are_those_of_the_sources() -> None:
    """A video session gets the time of an audio session."""
    settings = Settings()
    assert [settings.limit_s(mode) for mode in MODES] == [300, 600, 0, 3600]


def test_a_server_without_a_log_keeps_none(tmp_path: Path) -> None:
    """An operator who may not record does so all the same."""
    with live_server("--no-record", "--record", str(tmp_path / "logs")):
        pass
    assert not (tmp_path / "logs").exists()
