"""`antiphon keys`: make, list, renew and remove the API keys of a server's file.

A new key is printed once, as the only line on standard output; the file holds its hash. A running
server takes a change within seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs
import click
from rich.table import Table

from protocol.values.limits import MODES

from ..net.process import stdout_console
from . import keys as keyfile

FILE: Final = click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="ANTIPHON_KEYS",
    show_envvar=True,
    required=True,
    help="The file of keys that the server reads (--keys).",
)
_COUNT: Final = click.IntRange(0, keyfile.SESSIONS_MAX)

Keys = tuple[keyfile.Key, ...]


@click.group("keys")
def keys_command() -> None:
    """Make, list, renew and remove API keys.

    A key is 256 random bits; its file holds its hash. Recordings, tickets and sessions belong to
    the name of a key: a new key of a name that was used before sees those of the old one.
    """


@keys_command.command("add")
@click.argument("name")
@FILE
@click.option(
    "--scope",
    type=click.Choice(keyfile.SCOPES),
    default="use",
    show_default=True,
    help="admin sees the recordings, tickets and sessions of all keys.",
)
@click.option("--sessions-max", type=_COUNT, help="Concurrent sessions [default: no limit].")
@click.option(
    "--sessions-per-hour",
    type=_COUNT,
    help="Sessions that may begin within an hour [default: no limit].",
)
@click.option(
    "--mode",
    "modes",
    type=click.Choice(MODES),
    multiple=True,
    help="A mode that it may use; repeatable [default: all].",
)
@click.option(
    "--record-always", is_flag=True, help="Refuse its sessions that ask not to be recorded."
)
def add_command(
    *, name: str, path: Path, modes: tuple[str, ...], record_always: bool, **limits: Any
) -> None:
    """Make a key of the name NAME and print it, once; the file is made where it is missing.

    \b
    Exit codes:
      0  the key is printed
      1  the name is taken, or the file cannot be read or changed
      2  an argument that cannot be used
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
    if not keyfile.is_name(name):
        raise click.UsageError(
            "a name is 1 to 64 letters, digits and _.@-, a letter or digit first"
        )
    drawn = keyfile.new_key()
    key = keyfile.Key(
        name=name,
        hash=keyfile.hash_key(drawn),
        modes=tuple(mode for mode in MODES if mode in modes) or None,
        record_always=record_always or None,
        **limits,
    )

    def add(keys: Keys) -> Keys:
        if any(known.name == name for known in keys):
            raise click.ClickException(f"{path}: there already is a key {name}: renew or remove it")
        if len(keys) >= keyfile.KEYS_MAX:
            raise click.ClickException(
                f"{path}: already has the maximum of {keyfile.KEYS_MAX} keys"
            )
        return (*keys, key)

    _change(path, add, create=True)
    _hand_over(drawn, name)


@keys_command.command("renew")
@click.argument("name")
@FILE
def renew_command(*, name: str, path: Path) -> None:
    """Make another key for NAME, with its limits and its recordings; print it, once.

    \b
    Exit codes:
      0  the key is printed
      1  there is no such key, or the file cannot be read or changed
      2  an argument that cannot be used
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
    drawn = keyfile.new_key()

    def renew(keys: Keys) -> Keys:
        _find(keys, name, path)
        return tuple(
            attrs.evolve(key, hash=keyfile.hash_key(drawn)) if key.name == name else key
            for key in keys
        )

    _change(path, renew)
    _hand_over(drawn, name)


@keys_command.command("remove")
@click.argument("name")
@FILE
def remove_command(*, name: str, path: Path) -> None:
    """Remove the key of NAME: it is refused from now on; its running sessions go on.

    \b
    Exit codes:
      0  removed
      1  there is no such key, or the file cannot be read or changed
      2  an argument that cannot be used
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines

    def remove(keys: Keys) -> Keys:
        _find(keys, name, path)
        return tuple(key for key in keys if key.name != name)

    _change(path, remove)
    click.echo(f"removed {name}", err=True)


@keys_command.command("list")
@FILE
def list_command(*, path: Path) -> None:
    """List the keys with their scopes and limits; no key, and no hash, is shown.

    \b
    Exit codes:
      0  listed
      1  the file cannot be read
      2  an argument that cannot be used
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
    try:
        file = keyfile.read_key_file(path)
    except keyfile.KeyFileError as error:
        raise click.ClickException(str(error)) from error
    table = Table("name", "scope", "at once", "an hour", "modes", box=None)
    for key in file.keys:
        limits = (key.sessions_max, key.sessions_per_hour)
        shown = ["any" if limit is None else str(limit) for limit in limits]
        table.add_row(
            key.name, key.scope, *shown, "all" if key.modes is None else ", ".join(key.modes)
        )
    stdout_console().print(table)
    if file.warning is not None:
        click.echo(f"Warning: {path}: {file.warning}", err=True)


def _find(keys: Keys, name: str, path: Path) -> None:
    if all(key.name != name for key in keys):
        raise click.ClickException(f"{path}: there is no key {name}")


def _change(path: Path, change: Callable[[Keys], Keys], *, create: bool = False) -> None:
    try:
        keyfile.change_key_file(path, change, create=create)
    except keyfile.KeyFileError as error:
        raise click.ClickException(str(error)) from error


def _hand_over(drawn: str, name: str) -> None:
    """Print a key as the only line on standard output."""
    click.echo(f"the key of {name}, which is shown this once:", err=True)
    click.echo(drawn)
