"""The processes of the gateway bench: each is asked by a line, and answers with a line of JSON.

A process is a module of this package. It ends with its standard input, or is killed when left: it
holds nothing that anybody wants to keep.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import click
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

ROOT: Final = Path(__file__).resolve().parents[3]
ANSWER_WAIT_S: Final = 180.0
"""For a child's next line: loading on a busy machine, or the longest pattern with its waits."""
STOP_WAIT_S: Final = 10.0
"""For a process that was killed to be gone."""
LINE_BYTES_MAX: Final = 16 << 20
"""A run's latencies, one by one."""


class GatewayBenchError(click.ClickException):
    """The bench cannot go on; the text says why, in one line."""


class Child:
    """A process that is asked by lines, and answers each with a line of JSON.

    Args:
        process: it.
        errors: the file that takes its standard error.
    """

    def __init__(self, process: Process, errors: Path) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin = process.stdin
        self._lines = BufferedByteReceiveStream(process.stdout)
        self._errors = errors
        self.hello: dict[str, Any] = {}

    async def ask(self, body: object) -> dict[str, Any]:
        """Send a line and wait for its answer.

        Raises:
            GatewayBenchError: it says that it failed, ended, or says nothing.
        """
        await self._stdin.send(json.dumps(body).encode() + b"\n")
        return await self.listen()

    async def listen(self) -> dict[str, Any]:
        """Wait for a line; raises as `ask` does."""
        try:
            with anyio.fail_after(ANSWER_WAIT_S):
                line = await self._lines.receive_until(b"\n", LINE_BYTES_MAX)
        except (TimeoutError, anyio.IncompleteRead, anyio.EndOfStream) as error:
            said = self._errors.read_text(errors="replace").strip().splitlines()
            last = said[-1] if said else type(error).__name__
            raise GatewayBenchError(f"{self._errors.stem} gave no answer: {last}") from None
        body: dict[str, Any] = json.loads(line)
        if "error" in body:
            raise GatewayBenchError(f"the load stopped: {body['error']}")
        return body


@asynccontextmanager
async def child(name: str, folder: Path, cores: Iterable[int], *words: str) -> AsyncIterator[Child]:
    """Run a module of this package in a process of its own, until left.

    Args:
        name: for its errors.
        folder: takes them.
        cores: where it may run; empty: anywhere.
        words: the module's name and its arguments.

    Yields:
        The process, once it has said its first line, `hello`.
    """
    errors = folder / f"{name}.log"
    with errors.open("wb") as written:
        process = await anyio.open_process(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stderr=written,
            start_new_session=True,  # Ctrl-C is ours: its input ends, and so does it
        )
    try:
        if cores:
            os.sched_setaffinity(process.pid, cores)
        found = Child(process, errors)
        found.hello = await found.listen()
        yield found
    finally:
        with anyio.CancelScope(shield=True):
            process.kill()
            with anyio.move_on_after(STOP_WAIT_S):
                await process.wait()
            await process.aclose()
