"""The files that `antiphon eval` writes: JUnit XML for CI systems, and a page to look at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs

from recorder.write.files import check_new_file, new_file

from ..shared.commands import refuse_log_as_output, unwritable
from .condition import Condition
from .document import page_of
from .evaluate import Evaluation
from .junit import junit_of
from .naming import names_of


@attrs.frozen(kw_only=True)
class Reports:
    """Files to write; `force` replaces those that are there."""

    junit: Path | None
    html: Path | None
    force: bool

    def check(self, logs: Iterable[Path]) -> None:
        """See that they can be written, before logs are read that take minutes.

        `click.UsageError`: a file is a log; `UnusableError`: it cannot be written.
        """
        for option, target in (("--junit", self.junit), ("--html", self.html)):
            if target is None:
                continue
            refuse_log_as_output(target, logs, option)
            if not (self.force and target.is_file()):
                try:
                    check_new_file(target)
                except OSError as error:
                    raise unwritable(error, target) from error

    def write(
        self,
        done: Evaluation,
        given: Iterable[Path],
        conditions: Iterable[Condition],
        told: Sequence[str],
    ) -> None:
        """Write them, each whole or not at all; raises `UnusableError`.

        Args:
            done: the evaluation.
            given: the folders and logs that it is of.
            conditions: on each recording.
            told: lines on conditions of all recordings together.
        """
        names = names_of(given, (Path(row.log) for row in done.rows))
        if self.junit is not None:
            self._write(self.junit, [junit_of(done, names, conditions, told)])
        if self.html is not None:
            pieces = page_of(done, names, self.html, told)
            self._write(self.html, (piece.encode() for piece in pieces))

    def write_junit(self, xml: bytes) -> None:
        """Write other tests than recordings; raises `UnusableError`."""
        if self.junit is not None:
            self._write(self.junit, [xml])

    def _write(self, target: Path, pieces: Iterable[bytes]) -> None:
        try:
            with new_file(target, replaces=self.force) as part, part.open("wb") as file:
                file.writelines(pieces)
        except OSError as error:
            raise unwritable(error, target) from error
