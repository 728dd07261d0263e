"""Conversations in the `/metrics` of a real server: its recordings give the same, exactly."""

from __future__ import annotations

import re
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import anyio
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

import antiphon
from runtime.telemetry import catalogue as c
from tests.live.servers import LiveServer, live_server
from tests.runtime.telemetry.test_talk_meter import Counts, recorded_in

CALLS: Final = (
    ("realtime", "..xxx.....", 1.0),
    ("duplex-v1", "xxxx..xx..", 0.0),
    ("live", "x.x.x.....", 0.0),
)
"""Dialect, whether the user speaks in each half second, and the time before each second; the model
speaks in the fourth and the fifth."""


def sound(is_loud: bool) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Half a second at 16 kHz."""
    wave = np.sin(2 * np.pi * 220 / 16_000 * np.arange(8_000))
    return (0.1 * is_loud * wave).astype(np.float32)


async def talk(url: str, dialect: Any, spoken: str, wait_s: float) -> None:
    """Hold a call: a second is sent when the one before it was answered."""
    model = "scripted" if dialect == "live" else ""
    async with antiphon.connect(url, mode="audio", dialect=dialect, model=model) as call:
        for first, second in zip(spoken[::2], spoken[1::2], strict=True):
            await anyio.sleep(wait_s)
            await call.append(np.concatenate([sound(first == "x"), sound(second == "x")]))
            await call.__anext__()
        await call.close()


def ended(families: dict[str, Any]) -> float:
    """Count the sessions that are over: a client may leave before its slot is clean."""
    return sum(it.value for it in families["antiphon_sessions_ended"].samples)


def scraped(server: LiveServer) -> Counts:
    """Read the metrics of conversations: buckets, not heaped up, and counters."""
    host, port = server.address
    families: dict[str, Any] = {}
    while not families or ended(families) < len(CALLS):
        with urllib.request.urlopen(f"http://{host}:{port}/metrics") as answer:
            text = answer.read().decode()
        families = {it.name: it for it in text_string_to_metric_families(text)}
    found: Counts = {}
    for name, metric in c.CONVERSATION.items():
        for (mode,) in metric.series:
            values = [
                it.value
                for it in families[metric.name.removesuffix("_total")].samples
                if it.labels["mode"] == mode and re.search("_(bucket|total)$", it.name)
            ]
            is_counter = metric.kind == "counter"
            found[name, mode] = values if is_counter else [b - a for a, b in pairwise([0, *values])]
    return found


def test_a_server_s_metrics_are_those_of_its_recordings(tmp_path: Path) -> None:
    """A dashboard would say one thing of yesterday, and an evaluation another."""

    async def clients(url: str) -> None:
        async with anyio.create_task_group() as group:
            for call in CALLS:
                group.start_soon(talk, url, *call)

    with live_server("--record", str(tmp_path), "--slots", "2") as server:
        address = server.url.removesuffix("/v1/realtime")
        anyio.run(clients, address)
        live = scraped(server)
    logs = sorted(tmp_path.rglob("*.session.zst"))
    assert len(logs) == len(CALLS)
    assert live == recorded_in(logs)
    for name in ("response_delay", "overlap", "self_talk", "take_over_rate"):
        assert sum(live[name, "audio"]) > 0, name
