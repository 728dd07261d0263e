"""What a server's event loop does for a message, in steps of its tasks; no time is judged."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import anyio
import pytest
import trio
from trio.lowlevel import Task
from trio.testing import wait_all_tasks_blocked

from protocol.wire.codec import encode_base64
from runtime.net.listener import Address
from runtime.serve.serving import run
from runtime.settings.settings import Settings
from tests.network.transport import TEXT, UPGRADE, RawClient, raw_frame, request_head

PIECE_BYTES = 640
PIECES = 49
"""Of a second; the fiftieth would have the model run."""
OTHERS_MAX = 20
"""The monitor's looks and the like, by the clock."""
SETTLE_S = 0.002


class Steps(trio.abc.Instrument):
    """Counts the steps of all tasks but a test's own, by name."""

    def __init__(self) -> None:
        self.counts = Counter[str]()

    def before_task_step(self, task: Task) -> None:
        if not task.name.startswith(("anyio.", "tests.", __name__)):
            self.counts[task.name] += 1


@pytest.fixture
def anyio_backend() -> str:
    return "trio"


@pytest.mark.anyio
@pytest.mark.parametrize("recorded", [False, True])
async def test_a_piece_of_sound_is_stepped_by_the_task_that_reads_it(
    monkeypatch: pytest.MonkeyPatch, recorded: bool, tmp_path: Path
) -> None:
    """A telephone's fifty pieces a second take as long as fifty seconds of a browser."""
    for name in ("freeze_gc", "unfreeze_gc"):  # a second in the tests' process
        monkeypatch.setattr(f"runtime.serve.serving.{name}", lambda: None)
    bound: list[Address] = []
    ready = anyio.Event()
    settings = Settings(port=0, model="scripted", record_to=tmp_path if recorded else None)
    steps = Steps()

    async def serve() -> None:
        await run(settings, on_bound=bound.extend, on_ready=ready.set)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            await ready.wait()
            async with await trio.open_tcp_stream("127.0.0.1", bound[0].port) as stream:
                head = request_head("/v1/realtime?mode=transcription", **UPGRADE)
                await stream.send_all(head.replace(b"Host: x", b"Host: localhost"))
                await begin(RawClient(stream))
                trio.lowlevel.add_instrument(steps)
                for number in range(PIECES):
                    sound = encode_base64(bytes([number]) * PIECE_BYTES)
                    text = f'{{"type":"input_audio_buffer.append","audio":"{sound}"}}'
                    await stream.send_all(raw_frame(TEXT, text.encode()))
                    await wait_all_tasks_blocked(SETTLE_S)
                trio.lowlevel.remove_instrument(steps)
            tasks.cancel_scope.cancel()
    (reader,) = (count for name, count in steps.counts.items() if "_reader_task" in name)
    assert reader <= PIECES + 1
    assert steps.counts.total() - reader <= OTHERS_MAX, steps.counts


async def begin(raw: RawClient) -> None:
    """Choose a model, and begin to be transcribed."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += await raw.read(1)
    _, created = await raw.frame()
    assert b"session.created" in created
    await raw.send(TEXT, b'{"type":"session.update","model":"scripted"}')
    await raw.send(TEXT, b'{"type":"input_audio_buffer.commit"}')
    await wait_all_tasks_blocked(SETTLE_S * 5)
