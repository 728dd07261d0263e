"""`antiphon doctor`: prints the result of `examination` for people or scripts."""

from __future__ import annotations

import sys

import attrs
import click
import orjson
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ...settings.settings import DEVICES, DTYPES
from .examination import Diagnosis, Question, examine

STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


@click.command("doctor")
@click.option(
    "--model",
    default="tiny",
    show_default=True,
    help="tiny, scripted, or the folder of a MiniCPM-o checkpoint.",
)
@click.option("--device", type=click.Choice(DEVICES), help="As of `antiphon serve`.")
@click.option("--dtype", type=click.Choice(DTYPES), help="As of `antiphon serve`.")
@click.option("--slots", type=click.IntRange(1, 1024), help="Sessions that must fit at once.")
@click.option("--deterministic", is_flag=True, help="As of `antiphon serve`.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor_command(
    *,
    model: str,
    device: str | None,
    dtype: str | None,
    slots: int | None,
    deterministic: bool,
    as_json: bool,
) -> None:
    """Say what would happen if a model were served here, without loading it.

    Looks at the folder, its config, the headers of its weights, the tokenizer, the vocoder, the
    device and its memory. Of the weights only the headers are read.

    \b
    Exit codes:
      0  it would be served
      1  it would not; each problem says what to do
    """  # noqa: D301 - click takes a backspace to keep the lines
    question = Question(
        model=model, device=device, dtype=dtype, slots=slots, deterministic=deterministic
    )
    found = examine(question)
    if as_json:
        options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        click.echo(orjson.dumps(attrs.asdict(found), option=options), nl=False)
    else:
        _show(Console(), found)
    sys.exit(0 if found.would_serve else 1)


def _show(console: Console, found: Diagnosis) -> None:
    table = Table(box=SIMPLE, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in found.findings:
        says = f"{finding.says}\n-> {finding.do}" if finding.do else finding.says
        style = STYLES[finding.state]
        table.add_row(finding.check, f"[{style}]{finding.state}[/]", says.replace("[", r"\["))
    console.print(table)
    if found.parts:
        console.print(_parts(found))
    if found.memory is not None:
        sizes = ", ".join(f"{k} {v / 1e6:.1f}" for k, v in found.memory.session_bytes.items())
        console.print(f"A session, MB: {sizes}", highlight=False)
    console.print(", ".join(f"{k} {v}" for k, v in found.versions.items()), soft_wrap=True)
    verdict = "would be served" if found.would_serve else "would NOT be served"
    console.print(f"\n{found.model} {verdict}", highlight=False, markup=False, soft_wrap=True)


def _parts(found: Diagnosis) -> Table:
    table = Table("part", box=SIMPLE)
    table.add_column("parameters", justify="right")
    table.add_column("MB", justify="right")
    for part in found.parts:
        table.add_row(part.name, f"{part.parameters:,}", f"{part.weight_bytes / 1e6:.1f}")
    return table
