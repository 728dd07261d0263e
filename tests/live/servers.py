"""A real server in a process of its own, for tests that talk to it over a real socket."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs

from runtime import RUN
from runtime.commands.demo import words_of

STOP_WAIT_S = 90
SAME_SEED = (*RUN[:3], f"import secrets; secrets.randbits = lambda _: 5; {RUN[3]}")
"""Runs `antiphon`, with one seed for all sessions: what models but `scripted` say is sampled."""
LISTENING = "listening on "


@attrs.define
class LiveServer:
    """A server that takes sessions.

    Attributes:
        url: `ws://host:port/v1/realtime`.
        process: the server.
        errors: what it writes on its standard error.
        said: what it said until it was ready, line by line.
    """

    url: str
    process: subprocess.Popen[str]
    errors: Path
    said: list[str]

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self.url.removeprefix("ws://").removesuffix("/v1/realtime").rsplit(":", 1)
        return host, int(port)

    def kill(self) -> None:
        """End it without a word, as the kernel does when memory is short."""
        self.process.kill()
        self.process.wait(STOP_WAIT_S)

    def stop(self) -> int:
        """End it as an operator does; returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_WAIT_S)


def url_of(said: Sequence[str]) -> str:
    """The address among what a server said."""
    (url,) = (line.removeprefix(LISTENING) for line in said if line.startswith(LISTENING))
    return url


@contextmanager
def live_server(
    *arguments: str, model: str = "scripted", run: Sequence[str] = ()
) -> Iterator[LiveServer]:
    """Start `antiphon serve` on a free port, and stop it in the end; `run` runs `antiphon`.

    Speech is found by its energy, which tones have too, unless an argument says otherwise.
    """
    run = run or (RUN if model == "scripted" else SAME_SEED)
    command = (*run, "serve", "--port", "0", "--model", model, *arguments)
    environment = {"ANTIPHON_DETECTOR": "energy", **os.environ}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    with tempfile.NamedTemporaryFile("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        assert process.stdout is not None
        try:
            said = [words_of(process.stdout.readline().encode()) for _ in range(3)]
            assert said[-1] == "ready", Path(errors.name).read_text()
            yield LiveServer(url_of(said), process, Path(errors.name), said)
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(STOP_WAIT_S)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
