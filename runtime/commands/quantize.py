"""`antiphon dev quantize`: save what `antiphon serve --quantize` computes when it loads a model."""

from __future__ import annotations

from pathlib import Path

import click

from ..model.models import ModelUnknownError, ModelUnusableError, explained, model_folder
from ..net.process import importing
from ..settings.settings import QUANTIZATIONS


@click.command("quantize")
@click.argument("folder")
@click.option(
    "--to", "form", type=click.Choice(QUANTIZATIONS), required=True, help="As of --quantize."
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="The new folder; by default next to the old one, with the form behind its name.",
)
def quantize_command(folder: str, form: str, output: Path | None) -> None:
    """Save a checkpoint with the linear layers of its language model quantised.

    The new folder is in GPTQ's form and serves as `--quantize` does, with the same bytes, but loads
    sooner. A shard of the weights must fit into memory.

    \b
    Exit codes:
      0  saved
      1  the checkpoint cannot be used, or the new folder exists or cannot be written
      2  an option that cannot be used
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
    with importing():
        from ..model.backends.minicpmo.checkpoint import save_quantized

    try:
        source = model_folder(folder)
        into = output or source.resolve().with_name(f"{source.resolve().name}-{form}")
        with explained(source):
            save_quantized(source, into, form)
    except (ModelUnknownError, ModelUnusableError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"saved in {into}")
