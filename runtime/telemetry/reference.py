"""The table of all metrics in `docs/metrics.md`, made from their declarations.

`python -m runtime.telemetry.reference FILE` writes it between its two marks; a test compares.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from . import catalogue, gauges
from .catalogue import Metric

BEGIN: Final = "<!-- metrics: begin, written by runtime.telemetry.reference -->"
END: Final = "<!-- metrics: end -->"


def table() -> str:
    """The tables of the sessions' metrics and of the server's."""
    return "\n".join(
        [
            *("Of sessions and their units, from their own logs:", ""),
            *_rows(catalogue.ALL),
            *("", "Of the server, at the time of the request:", ""),
            *_rows(gauges.ALL),
        ]
    )


def insert(text: str) -> str:
    """A page with the table between its marks; raises `ValueError` if it has none."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _rows(metrics: tuple[Metric, ...]) -> list[str]:
    rows = ["| metric | kind | labels | what it says |", "|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.meaning} |")
    return rows


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(insert(page.read_text("utf-8")), "utf-8")
