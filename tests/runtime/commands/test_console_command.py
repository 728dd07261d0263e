"""`antiphon console`: it serves, says where, and leaves nothing behind."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

from click.testing import CliRunner

from runtime.cli import main
from runtime.commands.server_process import RUN
from tests.network.requesting import request


def test_it_serves_the_page_until_it_is_stopped(tmp_path: Path) -> None:
    """A newcomer would look for the address, or keep a server that nobody stops."""
    command = [*RUN, "console", "--model", "scripted", "--port", "0", "--no-browser"]
    folder = tmp_path / "kept"
    with subprocess.Popen(
        [*command, "--record", str(folder)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "loading the scripted model\n"
            found = re.search(r"http://([\d.]+):(\d+)/ ", process.stdout.readline())
            assert found is not None
            address = (found[1], int(found[2]))
            assert b"<title>Antiphon</title>" in request(address, "/", headers={}).body
        finally:
            process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "stopped\n"
        assert process.wait(20) == 0
    assert (folder / "server.log").exists()


def test_a_folder_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    """The server would fail for a reason that stands in a file."""
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(main, ["console", "--record", str(tmp_path / "file" / "below")])
    assert result.exit_code == 2
    assert "--record" in result.stderr
