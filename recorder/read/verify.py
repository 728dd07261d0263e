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


def verify(log: Path | bytes) -> Report:
    """Read and judge a whole log, a path or its bytes; only `OSError` is raised."""
    try:
        reader = LogReader(log)
    except Unreadable as error:
        return Report(state="unreadable", detail=str(error))
    counts, damage, damage_count = Counter[str](), list[Damage](), 0
    first_seq = last_seq = last_tx_ordinal = fin = fin_ok = None
    with reader:
        before_item = before_fin = reader.last_chain, reader.blocks
        for item in reader:
            before_fin = before_item if fin is None else before_fin
            if isinstance(item, Damage):
                damage_count += 1
                damage += [item] if len(damage) < DAMAGE_KEPT else []
            else:
                counts[item.kind] += 1
                fin = item.fields if item.kind == "fin" else fin
                last_seq = item.seq
                first_seq = item.seq if first_seq is None else first_seq
                ordinal = item.fields.get("ordinal")
                if item.kind == "tx" and isinstance(ordinal, int):
                    last_tx_ordinal = ordinal
            before_item = reader.last_chain, reader.blocks
        if fin is not None:
            counted = {kind: count for kind, count in counts.items() if kind != "fin"}
            chain, blocks = before_fin
            expected = (counted, None if chain is None else chain.hex(), blocks)
            fin_ok = (fin.get("counts"), fin.get("chain"), fin.get("blocks")) == expected
        is_sound = not damage_count and fin_ok is not False
        whole: State = "open" if fin_ok is None else "finished"
        return Report(
            state=whole if is_sound else "damaged",
            blocks=reader.blocks,
            records=counts.total(),
            first_seq=first_seq,
            last_seq=last_seq,
            damage=tuple(damage),
            damage_count=damage_count,
            fin_ok=fin_ok,
            head_source=reader.head_source,
            units=counts["unit"],
            last_tx_ordinal=last_tx_ordinal,
            tail_bytes=reader.tail_bytes,
            has_seek_table=reader.has_seek_table,
        )
