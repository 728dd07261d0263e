"""What the indexes of a directory hold of a log that is removed: it goes with the log.

An index has a summary of each log, and its words (`index`).
"""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

INDEX_NAME: Final = ".index.sqlite"
"""Hidden, and not a valid log name."""
WITH_STORE_NAME: Final = ".index-with-store.sqlite"
"""The index of the directory's logs and of those in an object store: other logs are not dropped."""
BUSY_WAIT_S: Final = 0.1
"""Longer than another process writes its changes; after it, the next listing drops the entry."""


def prepare(database: sqlite3.Connection) -> None:
    """Have what is deleted overwritten, as it has the words of users; write without syncs."""
    database.execute("PRAGMA secure_delete = ON")
    database.execute("PRAGMA synchronous = OFF")  # the index may be lost in a power cut


def forget(directory: Path, recording_id: str) -> None:
    """Drop a removed log from the indexes; a failure is ignored, as each listing does it again."""
    for path in (directory / INDEX_NAME, directory / WITH_STORE_NAME):
        if path.is_file():
            with (
                suppress(sqlite3.Error),
                closing(sqlite3.connect(path, timeout=BUSY_WAIT_S)) as database,
                database,
            ):
                prepare(database)
                database.execute("DELETE FROM logs WHERE recording_id = ?", (recording_id,))
