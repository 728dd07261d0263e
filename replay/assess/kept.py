"""The results of a run, kept in a folder as each session is done, so that a killed run goes on.

    OUT/forced-3f2a.../<hash of the log>.json         a session's measures
    OUT/open-91c0.../<hash of the log>.json           the same, and the log that was made:
    OUT/open-91c0.../open-<hash of the log>.session.zst

A folder is named by a hash of the mode, the model's fingerprint, this version and the definitions
of the measures, and says them in `run.json`: results of another model or version are never taken
for these. A file is there only when it is whole. One that cannot be read is made again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any, Final, Self

import attrs

from protocol.values.digest import digest
from recorder.write.files import PART_PREFIX, new_file
from runtime.measures.measure import KINDS, Kind, Ratio, Scores, Times, Total, Value
from runtime.model.backends.base import BackendInfo

from ..eval.evaluate import Row, row_of
from ..eval.table import MEASURES

NAME_CHARS: Final = 16
_MADE: Final[Mapping[Kind, type[Value]]] = {kind: cls for cls, kind in KINDS.items()}


class Kept:
    """One model's results in one mode; without a folder only until the block ends."""

    def __init__(self, out: Path | None, mode: str, info: BackendInfo) -> None:
        about = {
            "mode": mode,
            "antiphon": version("antiphon"),
            "fingerprint": dict(sorted(info.fingerprint.items())),
            "measures": digest([attrs.astuple(it) for it in MEASURES.values()]),
        }
        self.name: Final = f"{mode}-{digest(about)[:NAME_CHARS]}"
        self.found = 0
        self._temporary = None if out is not None else TemporaryDirectory(prefix=PART_PREFIX)
        root = Path(self._temporary.name) if self._temporary is not None else out
        assert root is not None
        self.folder: Final = root / self.name
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.folder / "run.json", {"model": info.name, **about})

    @property
    def is_lasting(self) -> bool:
        """Whether the folder stays after the command."""
        return self._temporary is None

    def __enter__(self) -> Self:
        """Keep it open."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove a folder that was not asked for."""
        if self._temporary is not None:
            self._temporary.cleanup()

    def load(self, content: str, log: str) -> tuple[Row, Scores] | None:
        """Return the result of a log, by the hash of its bytes; None if it has to be made."""
        try:
            body = json.loads(self._path(content).read_bytes())
            scores = {name: _value(name, raw) for name, raw in body["scores"].items()}
            row = row_of(log, scores, body["body"])
            row = attrs.evolve(
                row,
                duration_ns=int(body["duration_ns"]),
                lost=frozenset(body["body"].get("lost", ())),
            )
        except (OSError, ValueError, LookupError, ArithmeticError, TypeError, AttributeError):
            return None
        self.found += 1
        return row, scores

    def save(self, content: str, row: Row, scores: Scores) -> None:
        """Keep a result; `OSError` if the disk refuses."""
        raw = {name: attrs.astuple(scores[name]) for name in MEASURES if name in scores}
        body = {name: value for name, value in row.body.items() if name != "measures"}
        told = {"log": row.log, "duration_ns": row.duration_ns, "body": body, "scores": raw}
        _write(self._path(content), told)

    def remove_log(self, content: str) -> None:
        """Remove a log that an earlier run made, or began, and whose result it did not keep."""
        for log in self.folder.glob(f"open-{content}.*"):
            log.unlink()
        for part in self.folder.glob(f"{PART_PREFIX}*/open-{content}.*"):
            rmtree(part.parent)

    def _path(self, content: str) -> Path:
        return self.folder / f"{content}.json"


def _write(path: Path, body: object) -> None:
    with new_file(path, replaces=True) as part:
        part.write_text(json.dumps(body, indent=1) + "\n", "utf-8")


def _value(name: str, raw: list[Any]) -> Value:
    match _MADE[MEASURES[name].kind], raw:
        case cls, [list(values)] if cls is Times:
            return Times(tuple((int(at_ns), int(amount)) for at_ns, amount in values))
        case cls, [int(amount)] if cls is Total:
            return Total(amount)
        case cls, [int(part), int(whole)] if cls is Ratio and whole > 0:
            return Ratio(part, whole)
    raise ValueError(f"{name}: {raw!r}")
