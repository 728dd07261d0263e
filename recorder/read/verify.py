"""Checks a whole session log, for `antiphon recordings verify`.

Rules: an intact log without `fin` is open, which is not a fault. Any damage makes it damaged;
without a session record it is unreadable. `fin` must name the previous block's chain and the right
counts, and a seek table must match the log.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final, Literal

import attrs

from ..format.errors import Unreadable
from .reader import HeadSource, LogReader
from .scan import Damage

State = Literal["finished", "open", "damaged", "unreadable"]

DAMAGE_KEPT: Final = 100
"""Damages listed one by one; further ones are only counted."""
_EXIT_CODES: Final[dict[State, int]] = {"finished": 0, "open": 0, "damaged": 1, "unreadable": 2}


@attrs.define(kw_only=True)
class Report:
    """The result of verifying a log.

    Attributes:
        records: read, the session record counted once.
        first_seq: of the first record read, None if there is none.
        damage: the first `DAMAGE_KEPT`.
        damage_count: all damages.
        fin_ok: whether `fin` has the right chain and counts, None without `fin`.
        head_source: the block that the session record came from, None if lost.
        units: `unit` records read.
        last_tx_ordinal: `ordinal` of the last `tx` read, None if there is none.
        tail_bytes: of an incomplete block at the end, ignored.
        has_seek_table: the log ends with a valid one.
        detail: why it is unreadable, else None.
    """

    state: State
    blocks: int = 0
    records: int = 0
    first_seq: int | None = None
    last_seq: int | None = None
    damage: tuple[Damage, ...] = ()
    damage_count: int = 0
    fin_ok: bool | None = None
    head_source: HeadSource | None = None
    units: int = 0
    last_tx_ordinal: int | None = None
    tail_bytes: int = 0
    has_seek_table: bool = False
    detail: str | None = None

    @property
    def exit_code(self) -> int:
        """Exit code of `antiphon recordings verify`: 0 intact, 1 damaged, 2 unreadable."""
        return _EXIT_CODES[self.state]


def verify(log: Path | bytes) -> Report:
    """Read and judge a whole log, a path or its bytes; only `OSError` is raised."""
    try:
        reader = LogReader(log)
    except Unreadable as error:
        return Report(state="unreadable", detail=str(error))
    report, counts, fin = Report(state="open"), Counter[str](), None
    with reader:
        before_item = before_fin = reader.last_chain, reader.blocks
        for item in reader:
            before_fin = before_item if fin is None else before_fin
            if isinstance(item, Damage):
                report.damage_count += 1
                report.damage += (item,) if len(report.damage) < DAMAGE_KEPT else ()
            else:
                counts[item.kind] += 1
                fin = item.fields if item.kind == "fin" else fin
                report.last_seq = item.seq
                report.first_seq = item.seq if report.first_seq is None else report.first_seq
                ordinal = item.fields.get("ordinal")
                if item.kind == "tx" and isinstance(ordinal, int):
                    report.last_tx_ordinal = ordinal
            before_item = reader.last_chain, reader.blocks
        if fin is not None:
            counted = {kind: count for kind, count in counts.items() if kind != "fin"}
            chain, blocks = before_fin
            expected = (counted, None if chain is None else chain.hex(), blocks)
            report.fin_ok = (fin.get("counts"), fin.get("chain"), fin.get("blocks")) == expected
            report.state = "finished"
        if report.damage_count or report.fin_ok is False:
            report.state = "damaged"
        report.blocks, report.records, report.units = reader.blocks, counts.total(), counts["unit"]
        report.head_source, report.tail_bytes = reader.head_source, reader.tail_bytes
        report.has_seek_table = reader.has_seek_table
    return report
