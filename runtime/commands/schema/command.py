"""`antiphon schema`: the wire protocols as a document, for tools and for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import click
import orjson
import yaml

from .document import asyncapi
from .markdown import reference


def _as_json() -> str:
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(asyncapi(), option=options).decode()


def _as_yaml() -> str:
    # Through JSON: plain values, none of them twice the same object, which would become an anchor.
    document = orjson.loads(_as_json())
    text: str = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)
    return text


FORMATS: Final[Mapping[str, Callable[[], str]]] = {
    "json": _as_json,
    "yaml": _as_yaml,
    "markdown": reference,
}


@click.command("schema")
@click.option(
    "--format",
    "form",
    type=click.Choice(list(FORMATS)),
    default="json",
    show_default=True,
    help="json and yaml: an AsyncAPI 3 document, for tools. markdown: a reference, for people.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write [default: standard output].",
)
def schema_command(*, form: str, output: Path | None) -> None:
    """Describe the wire protocols of all dialects: every message, field, state and error.

    Messages and fields are those of the tables by which the server itself reads and writes, so they
    are those of the version that prints them.

    \b
    Examples:
      antiphon schema --output antiphon.json
      antiphon schema --format yaml | less
      antiphon schema --format markdown --output docs/protocol.md
    """  # noqa: D301 - click takes a backspace to keep the lines
    text = FORMATS[form]()
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, "utf-8")
    except OSError as error:
        raise click.ClickException(f"cannot write {output}: {error.strerror}") from None
