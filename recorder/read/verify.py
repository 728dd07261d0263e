"""Checks a whole session log, for `antiphon recordings verify`.

Rules: an intact log without `fin` is open, which is no fault. Any damage makes it damaged; without
a session record it is unreadable. `fin` must name the previous block's chain and the right counts,
and a seek table must match the log.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final, Literal

import attrs

from ..format.errors import Unreadable
from ..format.records import Record
from .reader import HeadSource, LogReader
from .scan import Damage

State = Literal["finished", "open", "damaged", "unreadable"]

DAMAGE_KEPT: Final = 100
"""Damages listed one by one; further ones are only counted."""
_EXIT_CODES: Final[dict[State, int]] = {"finished": 0, "open": 0, "damaged": 1, "unreadable": 2}


@attrs.frozen(kw_only=True)
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


@attrs.define
class _Tally:
    counts: Counter[str] = attrs.field(factory=Counter)
    damage: list[Damage] = attrs.field(factory=list)
    damage_count: int = 0
    first_seq: int | None = None
    last_seq: int | None = None
    last_tx_ordinal: int | None = None
    fin: Record | None = None
    chain_before_fin: bytes | None = None
    blocks_before_fin: int = 0

    def note(self, item: Record | Damage) -> None:
        if isinstance(item, Damage):
            self.damage_count += 1
            if len(self.damage) < DAMAGE_KEPT:
                self.damage.append(item)
            return
        self.counts[item.kind] += 1
        self.last_seq = item.seq
        if self.first_seq is None:
            self.first_seq = item.seq
        ordinal = item.fields.get("ordinal")
        if item.kind == "tx" and isinstance(ordinal, int):
            self.last_tx_ordinal = ordinal
        if item.kind == "fin":
            self.fin = item

    def fin_ok(self) -> bool | None:
        if self.fin is None:
            return None
        counts = {kind: count for kind, count in self.counts.items() if kind != "fin"}
        chain = self.chain_before_fin.hex() if self.chain_before_fin is not None else None
        said = self.fin.fields
        return (
            said.get("counts") == counts
            and said.get("chain") == chain
            and said.get("blocks") == self.blocks_before_fin
        )


def verify(log: Path | bytes) -> Report:
    """Read and judge a whole log, a path or its bytes; only `OSError` is raised."""
    try:
        reader = LogReader(log)
    except Unreadable as error:
        return Report(state="unreadable", detail=str(error))
    with reader:
        tally = _Tally()
        chain, blocks = reader.last_chain, reader.blocks
        for item in reader:
            if tally.fin is None:
                tally.chain_before_fin, tally.blocks_before_fin = chain, blocks
            tally.note(item)
            chain, blocks = reader.last_chain, reader.blocks
        return _report(reader, tally)


def _report(reader: LogReader, tally: _Tally) -> Report:
    fin_ok = tally.fin_ok()
    state: State = "open" if fin_ok is None else "finished"
    if tally.damage_count or fin_ok is False:
        state = "damaged"
    return Report(
        state=state,
        blocks=reader.blocks,
        records=tally.counts.total(),
        first_seq=tally.first_seq,
        last_seq=tally.last_seq,
        damage=tuple(tally.damage),
        damage_count=tally.damage_count,
        fin_ok=fin_ok,
        head_source=reader.head_source,
        units=tally.counts["unit"],
        last_tx_ordinal=tally.last_tx_ordinal,
        tail_bytes=reader.tail_bytes,
        has_seek_table=reader.has_seek_table,
    )
