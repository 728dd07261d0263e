"""One run of a user's command on a log: whether it fails; its output is discarded.

The command's process group is killed after a timeout or a cancellation.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import attrs

PLACE: Final = "{}"
"""The place of a log's path in a command."""


class CannotRunError(Exception):
    """The command is missing, or may not be run."""


@attrs.frozen(kw_only=True)
class Trial:
    """A command that is run on logs; each `{}` is the log's path, which comes last without one.

    It fails with `exit_code` (None: any but 0), and not by a timeout.
    """

    command: Sequence[str]
    exit_code: int | None = None
    timeout_s: float

    def fails(self, log: Path) -> bool:
        """Run the command; raises `CannotRunError` if it cannot be started."""
        words = [word.replace(PLACE, str(log)) for word in self.command]
        if words == list(self.command):
            words.append(str(log))
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise CannotRunError(f"{words[0]}: {error.strerror or error}") from error
        try:
            code = process.wait(self.timeout_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            return False
        except BaseException:
            _kill(process)
            raise
        return code == self.exit_code if self.exit_code is not None else code != 0


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
