"""The law between clients, measured: honest sessions alone, and next to one adversary of each kind.

    python -m tests.law [--seconds S] [--out docs/evidence] [KIND...]

For each leg a real `antiphon serve` with the scripted model and recording on, a few honest duplex
sessions on real sockets, and in a process of its own one of `tests.fairness.adversaries`. A unit's
latency is the time from its last sample's sending to its answer; what counts is its ratio to that
alone, in the same run on the same machine. No honest session may be told an error, miss an answer,
or lose its recording: each log must be finished and verify, and can be forked at once.

What was found goes to `law.json`, without a date; it exits with 1 where a recording was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import tempfile
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import urlopen

import anyio
import anyio.to_thread
import attrs
import zstandard
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.text import TextReceiveStream

import antiphon
from recorder.format.format import HEADER_BYTES, SUFFIX, BlockHeader, Record, frame_record
from recorder.read.reader import LogReader
from recorder.repair import verify
from recorder.write.logfile import Chain, Frame
from runtime.commands.demo import LINE_BYTES_MAX, RUN, ServerProcessError, served, words_of
from tests.fairness.adversaries import ADDRESSES, IDLE, KINDS
from tests.project.evidence import add_out
from tests.soak.server import JPEG, SECOND, errors_in

ALONE: Final = "alone"
HONEST: Final = 3
"""Sessions, whose units are spread over the second."""
SETTLE_S: Final = 2.0
"""For an adversary to get under way before anything is measured."""
START_WAIT_S: Final = 120.0
ANSWER_WAIT_S: Final = 60.0
"""For the last answers, which an adversary may delay."""
SLOTS: Final = ("--slots", "40")
OPTIONS: Final = (
    *("--chats-max", str(2 * IDLE), "--init-wait-s", "600"),
    *("--connections-per-address-max", str(IDLE // ADDRESSES + 50), "--log-format", "json"),
    *("--connections-max", str(IDLE + 100), "--connections-per-address-per-s-max", "10000"),
)
FORGED: Final = 40
FAILURES_MAX: Final = 10
LOG_LINES_MAX: Final = 2_000
"""Of a leg: who may connect may not fill the disk with what is said of it."""
FORGED_BYTES: Final = 100 << 20
"""What a forged block of some kilobytes decompresses to."""


@attrs.define
class Leg:
    """What was found next to one adversary.

    Attributes:
        waits_s: of each unit, until its answer.
        connections: of the adversary, that the server counted as the honest sessions began.
        unanswered: units that were sent and not answered.
        lost: recordings of honest sessions that are not whole.
        failures: what else was not so.
    """

    waits_s: list[float] = attrs.Factory(list)
    connections: int = 0
    unanswered: int = 0
    lost: int = 0
    failures: list[str] = attrs.Factory(list)

    def summary(self) -> dict[str, Any]:
        """Say it in numbers, in milliseconds."""
        waits = sorted(self.waits_s)
        quantiles = {"p50": 0.5, "p99": 0.99, "worst": 1.0}
        return {
            "adversary_connections": self.connections,
            "units": len(waits),
            **{
                f"{name}_ms": round(1000 * waits[min(len(waits) - 1, int(share * len(waits)))], 1)
                for name, share in quantiles.items()
                if waits
            },
            "unanswered": self.unanswered,
            "recordings_lost": self.lost,
            "failures": self.failures,
        }


async def speak(url: str, seconds: float, delay_s: float, leg: Leg) -> str:
    """Hold an honest session, and another that goes on from its recording; gives its id."""
    sent: list[float] = []
    heard = anyio.Event()
    async with antiphon.connect(url, mode="video", dialect="duplex-v1", retries=20) as session:

        async def listen() -> None:
            answered = 0
            async for event in session:
                if isinstance(event, antiphon.ErrorReport):
                    leg.failures.append(f"{event.code}: {event.message}")
                elif isinstance(event, antiphon.Listen | antiphon.Speech):
                    leg.waits_s.append(anyio.current_time() - sent[answered])
                    answered += 1
                    if event.metrics is not None and event.metrics.recording == "failed":
                        leg.failures.append("an honest session was told that its recording failed")
                    if answered == len(sent):
                        heard.set()
            leg.unanswered += len(sent) - answered

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            await anyio.sleep(delay_s)
            for _ in range(int(seconds)):
                heard = anyio.Event()
                sent.append(anyio.current_time())
                await session.append(SECOND, [JPEG])
                await anyio.sleep(1)
            with anyio.move_on_after(ANSWER_WAIT_S):
                await heard.wait()
            await session.close()
        created = session.created
    past = f"{url}?fork={created.recording_id}&at={int(seconds)}"
    async with antiphon.connect(past, mode="video", dialect="duplex-v1", retries=20) as session:
        await session.append(SECOND, [JPEG])
        with anyio.fail_after(ANSWER_WAIT_S):
            async for event in session:
                if isinstance(event, antiphon.Listen | antiphon.Speech):
                    break
        await session.close()
    return created.session_id


def forge(folder: Path) -> None:
    """Put logs into a folder whose blocks are small and decompress to a lot; their CRCs hold."""
    head = b'{"at_ns":0,"blobs":[],"fields":{},"kind":"session","seq":0,"version":1}'
    payload = frame_record(head, 0) + bytes(FORGED_BYTES)
    data = zstandard.ZstdCompressor().compress(payload)
    header = BlockHeader(
        first_seq=0,
        mono_ns=0,
        n_records=1,
        compressed_len=len(data),
        uncompressed_len=len(payload),
        payload_crc=zlib.crc32(data),
        has_head_copy=False,
        is_stuffed=False,
    )
    room = bytearray(HEADER_BYTES)
    block = Chain().link(header, Frame(room + data, len(payload), is_stuffed=False))
    for number in range(FORGED):
        (folder / f"forged-{number}{SUFFIX}").write_bytes(block)


def is_whole(folder: Path, session_id: str) -> bool:
    """Whether a session's recording is there to its end."""
    for path in folder.glob(f"[!f]*{SUFFIX}"):  # those that are forged come from elsewhere
        with LogReader(path) as reader:
            head = next(iter(reader))
        if isinstance(head, Record) and f"rt_{head.fields['wall_ms']}" == session_id:
            return verify(path).state == "finished"
    return False


def failures_in(folder: Path) -> list[str]:
    """What the processes say of their own failures, and whether they say too much."""
    logs = list(folder.glob("*.log"))
    lines = sum(log.read_bytes().count(b"\n") for log in logs)
    errors = [error for log in logs for error in errors_in(log)][:FAILURES_MAX]
    return errors if lines <= LOG_LINES_MAX else [*errors, f"{lines} lines were logged"]


async def next_to(kind: str, seconds: float) -> Leg:
    """Measure one leg."""
    leg = Leg()
    sessions = list[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if kind == "forged_logs":
            forge(folder)
        try:
            async with AsyncExitStack() as stack:
                options: tuple[str, ...] = (*SLOTS, *OPTIONS)
                if kind == "worker_links":  # the gateway comes when its worker is under attack
                    address = await stack.enter_async_context(worker(folder))
                    url = f"http://{address.removeprefix('tcp:')}"
                    await stack.enter_async_context(adversary(kind, url, leg))
                    token = ("--worker-token-file", str(folder / "token"))
                    options = (*OPTIONS, "--worker-address", address, *token)
                url = await stack.enter_async_context(served("scripted", folder, *options))
                if kind not in (ALONE, "worker_links"):
                    await stack.enter_async_context(adversary(kind, url, leg))
                    leg.connections = await anyio.to_thread.run_sync(connections_of, url)
                if kind == "idle" and leg.connections < IDLE:
                    leg.failures.append(f"{leg.connections} connections are open, not {IDLE}")
                await _measure(url, seconds, leg, sessions)
        except ServerProcessError as error:
            leg.failures.append(str(error))
        leg.lost = HONEST - sum(is_whole(folder, session_id) for session_id in sessions)
        leg.failures += failures_in(folder)
    return leg


def connections_of(url: str) -> int:
    """Ask the server how many connections it has, but this one."""
    with urlopen(f"http://{urlsplit(url).netloc}/status", timeout=ANSWER_WAIT_S) as answer:
        return int(json.load(answer)["connections"]) - 1


async def _measure(url: str, seconds: float, leg: Leg, sessions: list[str]) -> None:
    """Run the honest sessions; adds their ids."""

    async def one(number: int) -> None:
        sessions.append(await speak(url, seconds, number / HONEST, leg))

    try:
        async with anyio.create_task_group() as tasks:
            for number in range(HONEST):
                tasks.start_soon(one, number)
    except* (antiphon.ClientError, TimeoutError) as errors:
        leg.failures += [repr(error) for error in errors.exceptions]


@asynccontextmanager
async def adversary(kind: str, url: str, leg: Leg) -> AsyncIterator[None]:
    """Let one work."""
    process = await anyio.open_process(
        [sys.executable, "-m", "tests.fairness.adversaries", kind, url], stderr=None
    )
    try:
        assert process.stdout is not None
        with anyio.fail_after(START_WAIT_S):
            ready = ""
            async for text in TextReceiveStream(process.stdout):
                ready += text
                if ready.endswith("\n"):
                    break
        leg.connections = int(ready.split()[1])
        await anyio.sleep(SETTLE_S)
        yield
    finally:
        if process.returncode is not None:
            leg.failures.append("the adversary ended by itself")
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@asynccontextmanager
async def worker(folder: Path) -> AsyncIterator[str]:
    """Start a worker that listens to the network; gives its address."""
    (folder / "token").write_text(os.urandom(16).hex(), "ascii")
    words = ("workers", "start", "--model", "scripted", *SLOTS, "--log-format", "json")
    listen = ("--listen", "tcp:127.0.0.1:0", "--token-file", str(folder / "token"))
    with (folder / "worker.log").open("wb") as log:
        process = await anyio.open_process([*RUN, *words, *listen], stderr=log)
    try:
        assert process.stdout is not None
        lines = BufferedByteReceiveStream(process.stdout)
        said = list[str]()
        with anyio.fail_after(START_WAIT_S):
            while "ready" not in said:
                said.append(words_of(await lines.receive_until(b"\n", LINE_BYTES_MAX)))
        yield next(it for it in said if it.startswith("listening on ")).removeprefix(
            "listening on "
        )
    finally:
        process.terminate()
        with anyio.CancelScope(shield=True):
            await process.wait()


def main() -> None:
    """Run it, as the module's docstring says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], metavar="KIND")
    parser.add_argument("--seconds", type=float, default=20)
    add_out(parser)
    given = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    legs = dict[str, dict[str, Any]]()
    for kind in (ALONE, *(given.kinds or KINDS)):
        legs[kind] = anyio.run(next_to, kind, given.seconds).summary()
        print(kind, json.dumps(legs[kind]), file=sys.stderr, flush=True)
    for leg in legs.values():
        for name in ("p50", "p99", "worst"):
            if f"{name}_ms" in leg:
                leg[f"{name}_ratio"] = round(leg[f"{name}_ms"] / legs[ALONE][f"{name}_ms"], 1)
    result = {
        "what": "units of honest sessions, alone and next to one adversary of each kind",
        "good": all(not leg["recordings_lost"] and not leg["failures"] for leg in legs.values()),
        "honest_sessions": HONEST,
        "seconds": given.seconds,
        "legs": legs,
        "machine": {"cores": os.cpu_count(), "machine": platform.machine()},
    }
    text = json.dumps(result, indent=2) + "\n"
    print(text)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "law.json").write_text(text, "utf-8")
    if not result["good"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
