"""Each choice that the help of a command offers can be taken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import numpy as np
import pytest
import soundfile
from click.testing import CliRunner

from runtime.cli import main
from runtime.settings.settings import DEVICES, DTYPES, Settings, declared
from runtime.settings.sources import SettingType
from tests.golden.logs import FOLDER
from tests.live.servers import live_server
from tests.project.commands import all_commands

LOG: Final = str(FOLDER / "v1-realtime-video.session.zst")
ARGUMENTS: Final[dict[str, tuple[str, ...]]] = {
    "keys add": ("anna", "--file", "keys.toml"),
    "talk": ("ask.wav", "--fast", "--wait-s", "0", "--url", "URL"),
    "chat": ("hello", "--url", "URL"),
    "eval": (LOG,),
    "export": (LOG, "--output", "out"),
    "recordings redact": (LOG, "--output", "out.session.zst"),
    "recordings list": (".",),
    "doctor": (),
    "dev quantize": ("tiny", "--output", "out"),
}
"""What each command is given beside the choice; URL is the address of a server."""
LONG: Final = frozenset({"dev bench engine", "dev quantize", "demo", "serve", "workers start"})
"""Their choices measure or talk for long, or serve for ever; they have tests of their own."""
DENIED: Final = {
    ("doctor", "--device", "cuda"): 1,
    ("eval", "--mode", "open"): 2,
    ("eval", "--mode", "forced"): 2,
    **{("eval", "--device", it): 2 for it in DEVICES},
    **{("eval", "--dtype", it): 2 for it in DTYPES},
}
"""Choices that need what this machine may not have, or a model; and the exit code that says so."""


def choices() -> Iterator[tuple[str, str, str]]:
    """Give each choice as command, option and value."""
    for name, command in all_commands():
        for param in command.params:
            known = param.type.choices if isinstance(param.type, click.Choice) else ()
            if isinstance(param.type, SettingType):
                known = param.type._setting.choices
            yield from ((name, param.opts[0], str(it)) for it in known)


CHOICES: Final = list(choices())
RUN: Final = [choice for choice in CHOICES if choice[0] not in LONG]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live_server("--no-record") as server:
        yield server.url.removesuffix("/v1/realtime")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_all_commands_with_choices_are_known() -> None:
    """The choices of a new command would be tried by nobody."""
    assert {command for command, _, _ in CHOICES} == LONG | set(ARGUMENTS)


@pytest.mark.parametrize(("command", "option", "value"), RUN)
def test_a_choice_can_be_taken(command: str, option: str, value: str, url: str, here: None) -> None:
    """The help offers what always ends in an error."""
    soundfile.write("ask.wav", np.zeros(16_000), 16_000)
    given = [url if word == "URL" else word for word in ARGUMENTS[command]]
    result = CliRunner().invoke(main, [*command.split(), *given, option, value])
    allowed = {0, DENIED.get((command, option, value), 0)}
    assert result.exit_code in allowed, result.output


@pytest.mark.parametrize("name", [each.name for each in declared(Settings) if each.choices])
def test_a_choice_of_a_setting_can_be_taken(name: str) -> None:
    """The help of `serve` offers what it refuses."""
    (setting,) = (each for each in declared(Settings) if each.name == name)
    for value in setting.choices:
        words = ("serve", "--print-config", "--model", "scripted", setting.flag, value)
        result = CliRunner().invoke(main, words)
        is_extra = "needs the extra" in result.output
        assert result.exit_code == (2 if is_extra else 0), result.output
        assert f'{name} = "{value}"' in result.output
