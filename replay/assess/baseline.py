"""What a model is compared with: what was recorded, other recordings, or another model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from recorder.format.format import SUFFIX

from ..eval.evaluate import Row, measure_logs
from ..eval.naming import names_of
from ..eval.paired import Baseline
from ..rerun.folder import find_logs
from ..shared.commands import UnusableError, progress, size_of

RECORDED: Final = "recorded"
"""The baseline of mode `open` without another one."""


def is_of_logs(name: str) -> bool:
    """Whether a baseline is a log or a folder of logs, and no model."""
    path = Path(name)
    is_folder = path.is_dir() and not (path / "config.json").is_file()
    return is_folder or name.endswith(SUFFIX)


def as_recorded(rows: Iterable[Row]) -> Baseline:
    """Measure the recordings of rows as they are."""
    logs = [Path(row.log) for row in rows if row.result == "measured"]
    with progress(sum(map(size_of, logs)), RECORDED) as watch:
        return of_measured(RECORDED, measure_logs(logs, watch))


def of_measured(name: str, measured: Iterable[Row]) -> Baseline:
    """Take what was measured on the same logs."""
    owns = {row.log: row.values for row in measured if row.result == "measured"}
    return Baseline(name=name, owns=owns)


def of_logs(name: str, rows: Sequence[Row], given: Sequence[Path]) -> Baseline:
    """Measure other recordings, each the partner of one of `rows`.

    A partner has the same path in its folder; else it is the only one with the same recording id,
    or of which that recording is a fork. `given` are the folders and logs of `rows`.
    """
    logs = find_logs([Path(name)])
    if not logs:
        raise UnusableError(f"{name}: no *{SUFFIX} in it")
    with progress(sum(map(size_of, logs)), "baseline") as watch:
        others = [row for row in measure_logs(logs, watch) if row.result == "measured"]
    paths = names_of([Path(name)], logs)
    by_path = {paths[row.log].path: row for row in others}
    by_id = _by_id(others)
    own_paths, own_ids = names_of(given, (Path(row.log) for row in rows)), _by_id(rows)
    owns = {}
    for row in rows:
        key = _id_of(row) or ""
        partner = by_path.get(own_paths[row.log].path)
        if partner is None and own_ids.get(key) is row:
            partner = by_id.get(key)
        if partner is not None:
            owns[row.log] = partner.values
    return Baseline(name=name, owns=owns)


def _id_of(row: Row) -> str | None:
    found = row.body.get("parent") or row.body.get("recording_id")
    return found if isinstance(found, str) else None


def _by_id(rows: Sequence[Row]) -> dict[str, Row]:
    """Find the rows whose recording no other row is of."""
    counts = Counter(map(_id_of, rows))
    return {key: row for row in rows if (key := _id_of(row)) is not None and counts[key] == 1}
