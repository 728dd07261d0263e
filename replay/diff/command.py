"""The command `antiphon diff`: two session logs side by side.

The result is on stdout, as text or as one JSON object; an unreadable log is one line on stderr.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click
from cattrs import unstructure

from ..shared.commands import finish, opened_log, records_of
from ..shared.recordings import RecordingType
from .compare import compare
from .report import DiffReport
from .text import diff_lines

EXIT_SAME: Final = 0
EXIT_DIFFER: Final = 1
EXIT_UNREADABLE: Final = 2


@click.command("diff")
@click.argument("log_a", metavar="A", type=RecordingType())
@click.argument("log_b", metavar="B", type=RecordingType())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def diff_command(log_a: Path, log_b: Path, as_json: bool) -> None:
    """Compare the sessions in the logs A and B, unit by unit, the first difference first.

    The command compares the model's input and output: decisions, tokens, codes, words and sound
    (A's level relative to the difference, in dB: 60 and more is rounding). The time that the model
    took is shown and does not count; nor do names, times, logits, and the settings of the
    sessions, such as their seeds. Frames and errors are not compared: the frames of clients and
    servers may differ while the model's part is equal.

    \b
    Examples:
      antiphon diff monday.session.zst tuesday.session.zst
      antiphon diff parent.session.zst fork.session.zst --json | jq .first

    \b
    Exit codes:
      0  the same
      1  they differ
      2  a log cannot be read, or is damaged: the readable part is compared and reported
    """  # noqa: D301 - click takes a backspace to keep the lines
    report = read_and_compare(log_a, log_b)
    exit_code = EXIT_SAME if report.first is None else EXIT_DIFFER
    if report.is_damaged:
        exit_code = EXIT_UNREADABLE
    body = {"log_a": str(log_a), "log_b": str(log_b), "exit_code": exit_code}
    body |= unstructure(report)
    finish(body, diff_lines(report), as_json=as_json, exit_code=exit_code)


def read_and_compare(log_a: Path, log_b: Path) -> DiffReport:
    """Compare two logs; `UnusableError` names the one that cannot be read."""
    with opened_log(log_a) as a, opened_log(log_b) as b:
        items_a, items_b = records_of(log_a, a), records_of(log_b, b)
        return compare(a.head.fields, items_a, b.head.fields, items_b)
