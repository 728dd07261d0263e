"""A video's own process: it answers as the decoder does, and takes nothing with it when it goes."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import anyio
import pytest
from anyio.abc import Process

from runtime.media.decoder import ANSWER_BYTES_MAX, decode_in_process
from runtime.media.values import MediaError
from runtime.media.video import read_video
from runtime.media.worker import MEMORY_BYTES_MAX
from tests.media.videos import claiming, make_video, steady
from tests.project.sampling import ONE_LOOP

SMALL = make_video(steady(12), sound=[(0, 1)])
UNDECODED = "the video is damaged, or takes too much to decode"
pytestmark = pytest.mark.anyio


async def reason(data: bytes, **options: Any) -> str:
    with pytest.raises(MediaError) as refused:
        await decode_in_process(data, "1", **options)
    return refused.value.reason


def running(code: str) -> tuple[str, ...]:
    """The command line of a worker that does something else."""
    return (sys.executable, "-c", code)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """The processes that were started."""
    processes: list[Process] = []
    start = anyio.open_process

    async def note(*arguments: Any, **options: Any) -> Process:
        processes.append(await start(*arguments, **options))
        return processes[-1]

    monkeypatch.setattr(anyio, "open_process", note)
    return processes


@pytest.mark.parametrize("stack_frames", [1, 3])
@pytest.mark.parametrize("anyio_backend", ONE_LOOP)
async def test_it_answers_as_the_decoder_does(stack_frames: int) -> None:
    """A video would lose a picture, or its sound, on the way back."""
    assert await decode_in_process(SMALL, str(stack_frames)) == read_video(SMALL, stack_frames)


@pytest.mark.parametrize("anyio_backend", ONE_LOOP)
async def test_a_refusal_comes_back_in_words() -> None:
    """A client would not learn what is wrong with its video."""
    assert await reason(b"no video") == "the video is not of MP4, QuickTime, Matroska or WebM"
    long = make_video(steady(66, 1))
    assert await reason(long) == "the video lasts more than 64 s"


@pytest.mark.parametrize("anyio_backend", ONE_LOOP)
async def test_a_file_that_unfolds_to_gigabytes_ends_its_process_alone() -> None:
    """Two kilobytes from one client would take the server down, and everybody with it."""
    bomb = claiming(SMALL, 170_000_000)
    assert len(bomb) < 50_000
    assert (await reason(bomb)).startswith("the video ")
    assert (await decode_in_process(SMALL, "1")).pictures


async def test_it_is_killed_when_it_takes_too_long(started: list[Process]) -> None:
    """A file that makes a decoder hang would keep a core, and the videos behind it, for ever."""
    hangs = running("import signal; signal.pause()")
    text = "the video takes more than 0 s to decode"
    assert await reason(SMALL, command=hangs, wait_s=0) == text
    assert [process.returncode for process in started] == [-9]


async def test_it_is_killed_when_its_client_leaves(started: list[Process]) -> None:
    """A client that comes and goes would leave a process behind each time."""
    async with anyio.create_task_group() as tasks:
        hangs = running("import signal; signal.pause()")
        tasks.start_soon(partial(decode_in_process, SMALL, "1", command=hangs))
        while not started:
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert [process.returncode for process in started] == [-9]


@pytest.mark.parametrize(
    "code",
    [
        "",
        "print()",
        "print('{}')",
        "print('[1, 2]')",
        'print(\'{"pcm": "x", "pictures": [], "stacked": []}\')',
        'print(\'{"pcm": 4, "pictures": [9], "stacked": []}\', end=\'\\nabcd\')',
        'print(\'{"pcm": -4, "pictures": [8], "stacked": []}\', end=\'\\nabcd\')',
        f'print(\'{{"pcm": {ANSWER_BYTES_MAX + 1}, "pictures": [], "stacked": []}}\')',
        "print('x' * 100_000)",
        "import os; os.abort()",
    ],
)
async def test_an_answer_that_is_none_is_a_refusal(code: str) -> None:
    """A decoder that crashes, or was taken over, would crash the session or the server."""
    assert await reason(SMALL * 40, command=running(code)) == UNDECODED


async def test_a_process_that_cannot_start_is_a_refusal() -> None:
    """A server that is short of memory would crash the session instead."""
    assert await reason(SMALL, command=("/no/such/python",)) == "the video cannot be decoded now"


@pytest.mark.costly
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("open('pyproject.toml')", "OSError: [Errno 24]"),
        ("import socket; socket.socket()", "OSError: [Errno 24]"),
        (f"bytearray({MEMORY_BYTES_MAX})", "MemoryError"),
    ],
)
@pytest.mark.parametrize("anyio_backend", ONE_LOOP)
async def test_it_can_open_nothing_and_take_little(code: str, error: str) -> None:
    """A file that takes the decoder over could read the server's keys or call home."""
    script = f"import socket\nfrom runtime.media import worker as w\nw.limit_itself()\n{code}"
    ended = await anyio.run_process([*running(script)], check=False)
    assert ended.returncode == 1
    assert error in ended.stderr.decode()


async def test_it_is_not_given_the_server_s_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that takes the decoder over could show its client another's key."""
    monkeypatch.setenv("ANTIPHON_KEY", "secret")
    says = "import os, json; print(json.dumps({'reason': ' '.join(os.environ)}))"
    assert "ANTIPHON_KEY" not in await reason(SMALL, command=running(says))
