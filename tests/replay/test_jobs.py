"""Processes that replay logs, and one that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from runtime.commands.server_process import RUN

WAIT_S = 60


def test_jobs_end_with_the_command(tmp_path: Path) -> None:
    """CI that stops a replay waits for ever: its processes hold the output open."""
    logs = [tmp_path / "begun.session.zst", tmp_path / "waits.session.zst"]
    for log in logs:
        os.mkfifo(log)
    replay = subprocess.Popen(
        [*RUN, "replay", "--jobs", "2", *map(str, logs)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    with logs[0].open("wb"):  # a process has opened it too; nobody ever writes to the other
        replay.send_signal(signal.SIGTERM)
    replay.communicate(timeout=WAIT_S)
    assert replay.returncode == -signal.SIGTERM
