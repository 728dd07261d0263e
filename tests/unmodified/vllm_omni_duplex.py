"""vLLM-Omni's `DuplexClient`, as its example `barge_in_client.py` uses it; and after a cut.

The package would load the code of its models. Its client needs none of them, so it is imported
without the package's own `__init__`.
"""

from __future__ import annotations

import asyncio
import sys
import time
import types
from pathlib import Path

from common import Report, arguments

for place in map(Path, sys.path):
    if (place / "vllm_omni" / "clients").exists():
        package = types.ModuleType("vllm_omni")
        package.__path__ = [str(place / "vllm_omni")]
        sys.modules["vllm_omni"] = package

from vllm_omni.clients.duplex import (  # noqa: E402
    ConnectionResumed,
    DuplexClient,
    EventCollector,
    acknowledge_collected_playback,
)
from vllm_omni.clients.minicpmo_4_5 import create_duplex_session_config  # noqa: E402

WAIT_S = 20.0
RATE_HZ = 16_000


def at_16_khz(pcm16: bytes) -> bytes:
    """Take two of three samples of 24 kHz: enough for a word to be understood."""
    triples = [pcm16[at : at + 6] for at in range(0, len(pcm16), 6)]
    return b"".join(it[:2] + it[2:4] for it in triples)


async def hear(client: DuplexClient, scene: str, report: Report) -> None:
    """Hear the first response, and say how much of it was played; maybe interrupt it."""
    async for response in client.responses():
        if response.decision == "listen":
            continue
        async for chunk in response.audio():
            report.heard(chunk)
            await client.ack_playback(response.played_ms, response_id=response.response_id)
            if scene == "interrupt":
                stopped_s = time.monotonic()
                await client.cancel_response()
                break
        await response.wait(WAIT_S)
        report.words = response.transcript
        status = response.done_event.raw["response"]["status"]
        if (status == "cancelled") != (scene == "interrupt"):
            report.failures.append(f"the response is {status}")
        elif scene == "interrupt":
            report.interrupted_s = time.monotonic() - stopped_s
        return


async def main() -> None:
    """Talk to the server."""
    scene, base, model, question = arguments()
    report, collector = Report(), EventCollector()
    said = at_16_khz(question)
    url = f"{base.replace('http', 'ws', 1)}/realtime"
    config = create_duplex_session_config()
    async with DuplexClient(url, model=model, config=config) as client:
        collecting = asyncio.create_task(collector.consume(client))
        hearing = asyncio.create_task(hear(client, scene, report))
        await client.stream_pcm(said[: 2 * RATE_HZ], chunk_ms=100)
        if scene == "answer":  # its connection is lost in the middle of the question
            waiting = asyncio.create_task(client.wait_for("connection.resumed", timeout_s=WAIT_S))
            await asyncio.sleep(0)
            client._ws.transport.abort()
            assert isinstance(await waiting, ConnectionResumed)
        await client.stream_pcm(said[2 * RATE_HZ :], chunk_ms=100)
        await client.commit(create_response=False)
        await hearing
        await acknowledge_collected_playback(client, collector)
    await asyncio.wait_for(collecting, WAIT_S)
    numbers = [it["server_event_seq"] for it in collector.events if "server_event_seq" in it]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        report.failures.append("an event is lost, or came twice")
    report.failures += map(str, collector.errors())
    report.events.update(str(it["type"]) for it in collector.events)
    report.show()


asyncio.run(main())
