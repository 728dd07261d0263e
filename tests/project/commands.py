"""Every command of the command line, with those within others, for tests of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from runtime.cli import main


def all_commands() -> Iterator[tuple[str, click.Command]]:
    """Give each command, with its words."""
    yield from _within("", main)


def is_command(words: Sequence[str]) -> bool:
    """Whether words begin with a command, and with one of a group's where they name a group."""
    command: click.Command | None = main
    for word in words:
        if not isinstance(command, click.Group):
            break
        command = command.get_command(click.Context(command), word)
    return command is not None and not isinstance(command, click.Group)


def _within(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if name:
        yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for within in command.list_commands(context):
            each = command.get_command(context, within)
            assert each is not None
            yield from _within(f"{name} {within}".lstrip(), each)
