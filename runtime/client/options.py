"""The options of the commands that are clients: which server, and with which key."""

from __future__ import annotations

from typing import Final

import click

from ..settings import DEFAULT_PORT

DEFAULT_URL: Final = f"ws://127.0.0.1:{DEFAULT_PORT}"

url_option: Final = click.option(
    "--url", default=DEFAULT_URL, show_default=True, help="Address of the server."
)
key_option: Final = click.option(
    "--key",
    envvar="ANTIPHON_KEY",
    show_envvar=True,
    help="API key, where the server asks for one; others on this machine see options, so rather "
    "set the variable.",
)
