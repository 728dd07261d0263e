"""Settings as flags of a command, with the checks and help of their declarations.

A flag that is given counts, even with its default value; otherwise the other sources decide. So no
flag has a default here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click
from click.core import ParameterSource

from .declaration import Setting, declared
from .settings import Settings
from .values import ValueWrongError, from_text, plain

METAVARS: Final = {"number": "NUMBER", "text": "TEXT", "path": "PATH", "texts": "TEXT"}
OTHER_OPTIONS: Final = "Configuration and help"
"""The heading of options that are no settings."""

Command = Callable[..., Any]


class SettingType(click.ParamType[object]):
    """A value of a setting, checked as in a variable."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.name = setting.name

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        """Parse a flag's text; for a list it is one item, commas included."""
        if not isinstance(value, str):
            return value
        try:
            if self._setting.kind == "texts":
                return plain(value)
            parsed = from_text(self._setting, value)
        except ValueWrongError as error:
            self.fail(str(error), param, ctx)
        return parsed


class SettingsCommand(click.Command):
    """A command whose help groups the settings by heading."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by group."""
        headings = {setting.name: setting.heading for setting in declared(Settings)}
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                heading = headings.get(param.name or "", OTHER_OPTIONS)
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def settings_options(command: Command) -> Command:
    """Add a flag for each setting to a command, passed by the setting's name."""
    for setting in reversed(declared(Settings)):
        command = _option(setting)(command)
    return command


def given(ctx: click.Context) -> dict[str, object]:
    """The values of the flags that were given, by setting; for a command of `settings_options`."""
    return {
        setting.name: ctx.params[setting.name]
        for setting in declared(Settings)
        if ctx.get_parameter_source(setting.name) is ParameterSource.COMMANDLINE
    }


def _option(setting: Setting) -> Callable[[Command], Command]:
    told = f"{setting.help} [{_told(setting)}]"
    if setting.kind == "truth":
        negated = f"--no-{setting.flag.removeprefix('--')}"
        return click.option(f"{setting.flag}/{negated}", setting.name, default=None, help=told)
    return click.option(
        setting.flag,
        setting.name,
        type=SettingType(setting),
        multiple=setting.kind == "texts",
        metavar="|".join(setting.choices) or METAVARS[setting.kind],
        help=told,
    )


def _told(setting: Setting) -> str:
    """The bracketed default and range after the help."""
    if setting.kind == "texts":
        return "default: none; give it as often as wanted"
    text = setting.unset if setting.default is None else _plain(setting.default)
    ranged = f"; {setting.allowed}" if setting.kind == "number" else ""
    return f"default: {text}{ranged}"


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
