"""Decodes a video, or a large picture, in a process of its own, within bounds.

A decoder for every video format is the most likely place for a file to break in, hang or take all
memory. In a process that costs the client its file, and the server nothing. The process is killed
when its client leaves, when it takes too long, and when it answers too much; its own bounds
(`worker`) end it even after the server was killed.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from contextlib import suppress
from typing import Final

import anyio
import orjson
from anyio.abc import ByteSendStream, Process
from anyio.streams.buffered import BufferedByteReceiveStream

from protocol.values.limits import VIDEO_S_MAX
from protocol.values.model import INPUT_RATE_HZ, SAMPLE_BYTES

from .pictures import PICTURES_BYTES_MAX
from .values import IMAGE, Decoded, MediaError

VIDEO_WAIT_S: Final = 90.0
"""Its processor time, and half as much again for the processes that run at the same time."""
HEAD_BYTES_MAX: Final = 16 * 1024
"""The line of the answer that counts its pieces, 129 at most."""
ANSWER_BYTES_MAX: Final = PICTURES_BYTES_MAX + VIDEO_S_MAX * INPUT_RATE_HZ * SAMPLE_BYTES
"""All pictures and all sound."""
PIECE_BYTES: Final = 1 << 20
"""Bytes of one write: a transport copies the rest of a full pipe."""

_COMMAND: Final = (sys.executable, "-P", "-m", "runtime.media.worker")
_ENVIRONMENT: Final = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""All that Python needs to start; other variables may hold a server's keys."""
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Threads for matrix products would reserve half of the address space."""

_UNREADABLE: Final = (
    *(anyio.IncompleteRead, anyio.DelimiterNotFound, anyio.EndOfStream, anyio.BrokenResourceError),
    *(ValueError, TypeError, KeyError),
)
"""Exceptions raised when an answer is invalid."""

_log = logging.getLogger("antiphon.media")


async def decode_apart(
    data: bytes,
    argument: str,
    command: tuple[str, ...] = _COMMAND,
    wait_s: float = VIDEO_WAIT_S,
) -> Decoded:
    """Decode a video, or a picture as `image.decode_image`; cancelled, it kills the process.

    `argument`: the worker's, `IMAGE` or a video's pictures a second; `command`: its command line
    without that; `wait_s`: the most that it may take.
    `MediaError`: it is no video, damaged, too long, too large, or too slow to decode; or the system
    has no room for a process.
    """
    what = IMAGE if argument == IMAGE else "video"
    process = await _start(what, [*command, argument])
    with anyio.move_on_after(wait_s):
        async with process:  # Left by a cancellation, it kills the process and waits for its end.
            return await _ask(what, process, data)
    raise MediaError(f"the {what} takes more than {wait_s:g} s to decode")


async def _start(what: str, command: list[str]) -> Process:
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    try:
        return await anyio.open_process(
            command,
            stderr=subprocess.DEVNULL,
            env=environment | _ONE_THREAD,
            start_new_session=True,  # Ctrl-C is for the server: sessions end with their media.
        )
    except OSError as error:
        _log.error("no process for a file: %s", error.strerror)
        raise MediaError(f"the {what} cannot be decoded now") from None


async def _ask(what: str, process: Process, data: bytes) -> Decoded:
    """Send a file and read the answer; a process that a limit ended gives none, or a part."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_write, process.stdin, data)
            answer = await _read(BufferedByteReceiveStream(process.stdout))
            tasks.cancel_scope.cancel()
    except* _UNREADABLE:
        with suppress(ProcessLookupError):  # It has ended by itself.
            process.kill()
        code = await process.wait()
        _log.warning("a file was not decoded: its process ended with code %d", code)
        answer = MediaError(f"the {what} is damaged, or takes too much to decode")
    if isinstance(answer, MediaError):
        raise answer
    return answer


async def _write(stdin: ByteSendStream, data: bytes) -> None:
    try:
        for at in range(0, len(data), PIECE_BYTES):
            await stdin.send(data[at : at + PIECE_BYTES])
        await stdin.aclose()
    except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        return  # It has ended: the answer shows why.


async def _read(stdout: BufferedByteReceiveStream) -> Decoded | MediaError:
    """Read the answer piece by piece, each once, within the bounds."""
    head = orjson.loads(await stdout.receive_until(b"\n", HEAD_BYTES_MAX))
    if "reason" in head:
        return MediaError(str(head["reason"]))
    sizes = [head["pcm"], *head["pictures"], *head["stacked"]]
    if min(sizes) < 0 or sum(sizes) > ANSWER_BYTES_MAX:
        raise ValueError(sum(sizes))
    pcm, *pieces = [await stdout.receive_exactly(size) for size in sizes]
    count = len(head["pictures"])
    return Decoded(pcm=pcm, pictures=tuple(pieces[:count]), stacked=tuple(pieces[count:]))
