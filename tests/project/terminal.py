"""Commands on a terminal of their own, as wide as a test says."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Sequence
from pathlib import Path


def on_terminal(command: Sequence[str], *, columns: int = 120, has_bars: bool = True) -> str:
    """Run a command to its end; return what it showed, without colours and cursor movements.

    Args:
        command: its words.
        columns: of the terminal.
        has_bars: it shows what is on stderr, too.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "TERM": "xterm"}
    environment.pop("COLUMNS", None)
    shown = b""
    errors = slave if has_bars else subprocess.DEVNULL
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=errors, env=environment):
        os.close(slave)
        while piece := _read(master):
            shown += piece
    os.close(master)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", shown.decode())


def _read(master: int) -> bytes:
    """Read from a terminal; nothing at its end."""
    try:
        return os.read(master, 65_536)
    except OSError:
        return b""
