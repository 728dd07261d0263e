"""One run of somebody's command on a log: whether it fails.

The command has a process group of its own, which is killed when it takes too long, or when the run
is broken off: nothing of it is left behind. What it prints is thrown away.
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
"""Where a log's path goes in a command."""


class CannotRunError(Exception):
    """There is no such command, or it may not be run."""


@attrs.frozen(kw_only=True)
class Trial:
    """A command that is run on logs.

    Attributes:
        command: its words; each `{}` in them is the log's path, which comes last where there is
            none.
        exit_code: what it exits with where it fails; None: anything but 0.
        timeout_s: a run that takes longer has not failed.
    """

    command: Sequence[str]
    exit_code: int | None = None
    timeout_s: float

    def fails(self, log: Path) -> bool:
        """Run the command.

        Raises:
            CannotRunError: it cannot be started.
        """
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
    """Kill a process that was not waited for to its end, and what it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
