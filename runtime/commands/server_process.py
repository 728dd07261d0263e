"""A server in a process of its own, for the commands `demo` and `dev bench`.

It runs the command line, as users do, and is stopped on leaving, after an error or a signal too.
"""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import anyio
import click
import orjson
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from .. import ERROR
from .. import RUN as RUN  # noqa: PLC0414 - a part of this module
from ..model.models import MODELS

READY_WAIT_S: Final = 120.0
"""Torch and a model from a cold disk on a busy machine take a part."""
STOP_WAIT_S: Final = 60.0
"""Longer than the server waits for its sessions; then it is killed."""
LOADING_WAIT_S: Final = 0.5
"""The same after an interrupt while the model loads: there is no recording to be finished."""
HURRY_WAIT_S: Final = 5.0
"""The same during a conversation: its last second is computed, and its recording gets its end."""
SERVE: Final = ("serve", "--port", "0", "--drain-s", "0")
"""What ends the server is over itself: sessions end at once, and in order."""
LINE_BYTES_MAX: Final = 4096
"""The server's lines are short."""


model_option: Final = click.option(
    "--model",
    type=click.Choice(MODELS),
    default="tiny",
    show_default=True,
    help="The model: the embedded trained one, or a script.",
)
"""Of the commands that serve an embedded model."""


class ServerProcessError(click.ClickException):
    """The server did not start, or did not stop cleanly; the text says why, in one line."""


@asynccontextmanager
async def served(model: str, folder: Path, *arguments: str) -> AsyncIterator[str]:
    """Serve a model on a free port, and yield its address once it is ready.

    `folder` takes the logs, and the server's standard error in `server.log`. Raises
    `ServerProcessError` if the server did not start, or did not stop cleanly.
    """
    errors = folder / "server.log"
    words = (*SERVE, "--record", str(folder), "--model", model, *arguments)
    with errors.open("wb") as written:
        process = await anyio.open_process(
            [*RUN, *words],
            stdin=subprocess.DEVNULL,
            stderr=written,
            start_new_session=True,  # Ctrl-C is ours: we stop it
        )
    wait_s = LOADING_WAIT_S
    try:
        url = await _wait_until_ready(process, errors)
        wait_s = HURRY_WAIT_S
        yield url
        wait_s = STOP_WAIT_S
    except Exception:
        wait_s = STOP_WAIT_S
        raise
    finally:
        with anyio.CancelScope(shield=True):
            await _stop(process, wait_s)
    if process.returncode != 0:
        text = f"the server ended with exit code {process.returncode}, see {errors}"
        raise ServerProcessError(text)


async def _wait_until_ready(process: Process, errors: Path) -> str:
    assert process.stdout is not None
    lines = BufferedByteReceiveStream(process.stdout)
    url = ""
    try:
        with anyio.fail_after(READY_WAIT_S):
            while (line := words_of(await lines.receive_until(b"\n", LINE_BYTES_MAX))) != "ready":
                if line.startswith("listening on "):
                    url = line.removeprefix("listening on ")
    except TimeoutError:
        text = f"the server was not ready within {READY_WAIT_S:g} s"
        raise ServerProcessError(text) from None
    except (anyio.IncompleteRead, anyio.DelimiterNotFound, anyio.EndOfStream):
        text = f"the server did not start: {_last_words(errors)} (see {errors})"
        raise ServerProcessError(text) from None
    return url


def words_of(line: bytes) -> str:
    """What a server's line says; with `--log-format json` each is an object."""
    return str(orjson.loads(line)["event"]) if line.startswith(b"{") else line.decode().strip()


def _last_words(errors: Path) -> str:
    """The last line with words of a possible traceback, framed as a group's is."""
    lines = errors.read_text(errors="replace").splitlines()
    stripped = (line.strip(" |+-") for line in reversed(lines))
    return next(filter(None, stripped), "it does not say why").removeprefix(ERROR)


async def _stop(process: Process, wait_s: float) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    with anyio.move_on_after(wait_s):
        await process.wait()
    if process.returncode is None:
        process.kill()
    await process.aclose()
