"""Every command of the command line, with those within others, for tests of all of them."""

from __future__ import annotations

from collections.abc import Iterator

import click

from runtime.cli import COMMANDS, main


def all_commands() -> Iterator[tuple[str, click.Command]]:
    """Give each command, with its words."""
    context = click.Context(main)
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None
        yield from _within(name, command)


def _within(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        for within, each in command.commands.items():
            yield from _within(f"{name} {within}", each)
