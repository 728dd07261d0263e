"""Names of logs in reports: where they lie in the folders that a command was given.

Names of files are untrusted: they are written printable, and two different ones stay different.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs

from recorder.format.format import SUFFIX
from recorder.write.files import PART_PREFIX

from ..shared.page import printable
from ..shared.recordings import page_next_to


@attrs.frozen(kw_only=True)
class Name:
    """A log's name in reports; its texts are printable.

    Attributes:
        folder: as it was given; empty if it is this folder, or if the log was downloaded.
        path: of the log in that folder, with `/`.
        page: the page that `antiphon recordings view` writes about this log; it may be missing.
        command: shows this log.
    """

    folder: str
    path: str
    page: Path
    command: str


Names = Mapping[str, Name]
"""By the path of the log, as it was found."""


def names_of(given: Iterable[Path], logs: Iterable[Path]) -> Names:
    """Name logs that were found in files and folders."""
    folders = [path for path in given if path.is_dir()]
    return {str(log): _name(log, folders) for log in logs}


def _name(log: Path, folders: Iterable[Path]) -> Name:
    is_copy = log.parent.name.startswith(PART_PREFIX)  # of a stored log: its folder is random
    folder = next((it for it in folders if log.is_relative_to(it)), log.parent)
    shown = log.name.removesuffix(SUFFIX) if is_copy else str(log)
    return Name(
        folder="" if is_copy or folder == Path() else printable(str(folder)),
        path=printable(log.relative_to(folder).as_posix()),
        page=page_next_to(log),
        command=f"antiphon recordings view {shlex.quote(printable(shown))}",
    )
