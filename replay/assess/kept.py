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
from importlib.metadata import version
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Final, Self

import attrs

from protocol.values.digest import digest
from recorder.write.files import PART_PREFIX, new_file
from runtime.model.backends.base import BackendInfo

from ..eval.evaluate import Row, row_of
from ..eval.packing import raw_of, scores_of
from ..eval.table import MEASURES

NAME_CHARS: Final = 16


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

    def load(self, content: str, log: str) -> Row | None:
        """Return the result of a log, by the hash of its bytes; None if it has to be made."""
        try:
            body = json.loads(self._path(content).read_bytes())
            row = row_of(log, scores_of(body["scores"]), body["body"])
            row = attrs.evolve(
                row,
                duration_ns=int(body["duration_ns"]),
                lost=frozenset(body["body"].get("lost", ())),
            )
        except (OSError, ValueError, LookupError, ArithmeticError, TypeError, AttributeError):
            return None
        self.found += 1
        return row

    def save(self, content: str, row: Row) -> None:
        """Keep a result; `OSError` if the disk refuses."""
        raw = raw_of(row.scores)
        told = {"log": row.log, "duration_ns": row.duration_ns, "body": row.about, "scores": raw}
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
