"""The command `antiphon recordings verify`: whether a log is as it was written.

It imports neither the session machine nor a model, so that it starts quickly.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs
import click
from rich.console import RenderableType

from recorder.read.scan import Damage
from recorder.read.verify import Report, verify

from ..rerun.difference import label
from ..shared.commands import finish, reading
from ..shared.recordings import RecordingType

SHOWN_MAX: Final = 5
"""Damages printed one by one; JSON has more of them."""


@click.command("verify")
@click.argument("log", type=RecordingType())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify_command(log: Path, as_json: bool) -> None:
    """Check that LOG is as written: every checksum, the chain, its end and seek table.

    \b
    Exit codes:
      0  intact; `state: open` means that its end is still missing: it is being written, or its
         server was killed, and nothing that a client saw is lost
      1  damaged
      2  no session record is left, or there is no such file
    """  # noqa: D301 - click takes a backspace to keep the lines
    with reading(log):
        report = verify(log)
    body = {"log": str(log), "exit_code": report.exit_code, **attrs.asdict(report)}
    finish(body, verify_lines(report), as_json=as_json, exit_code=report.exit_code)


def verify_lines(report: Report) -> list[RenderableType]:
    """Describe the state of a log."""
    lines: list[RenderableType] = [f"state: {report.state}"]
    if report.state == "unreadable":
        return [*lines, report.detail or "no session record is left"]
    lines.append(
        f"{report.blocks} blocks, {report.records} records ({report.first_seq} to"
        f" {report.last_seq}), {report.units} units, last frame sent {report.last_tx_ordinal}"
    )
    if report.tail_bytes:
        lines.append(f"{report.tail_bytes} bytes of an incomplete block at the end are left out")
    if report.fin_ok is False:
        lines.append("fin names another chain or other counts")
    return lines + damage_lines(report.damage, report.damage_count)


def damage_lines(damage: Sequence[Damage], count: int) -> list[RenderableType]:
    """Describe the first damages of a log."""
    lines: list[RenderableType] = []
    for item in damage[:SHOWN_MAX]:
        lost = f", {item.records} records lost from {item.first_seq}" if item.records else ""
        lines.append(f"  damage at byte {item.offset}: {item.reason}, {label(item.detail)}{lost}")
    more = count - SHOWN_MAX
    return [*lines, f"  and {more} more damages"] if more > 0 else lines
