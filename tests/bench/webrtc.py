"""What a call by WebRTC adds to a session: time, and the door's processor time.

    python -m tests.bench.webrtc [--calls N] [--seconds S] [--out FOLDER]

In place of a gateway stands an echo: what a session is sent comes back at once as the model's. A
peer in another process clicks once a second, and waits for each click to come back: this is the
way in and the way out, of which a WebSocket has neither. Some packets are lost on purpose
(`--loss`), between the peer's microphone and the door.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
from aiortc import MediaStreamTrack, RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError
from av import AudioFrame
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from runtime import RUN
from runtime.webrtc.offer import LINE_BYTES_MAX
from runtime.webrtc.sound import CLOCK_HZ, FRAME_S
from tests.project.evidence import add_out

SAMPLES: Final = CLOCK_HZ // 50
CLICK_EVERY: Final = 50
"""Frames of 20 ms."""
LOUD: Final = 4000


async def echo(session: ServerConnection) -> None:
    """Send a session's sound back."""
    try:
        async for message in session:
            body = orjson.loads(message)
            if body["type"] == "input_audio_buffer.append":
                names = {"item_id": "item", "response_id": "response"}
                told = {"type": "response.output_audio.delta", "delta": body["audio"], **names}
                await session.send(orjson.dumps(told).decode())
    except ConnectionClosed:
        return


class Clicks(MediaStreamTrack):  # type: ignore[misc]
    """A microphone with a click a second, and when each was."""

    kind = "audio"

    def __init__(self) -> None:
        super().__init__()
        self.at_s: list[float] = []
        self._frames, self._began_s = 0, 0.0

    async def recv(self) -> AudioFrame:
        """As the library."""
        self._began_s = self._began_s or time.monotonic()
        await asyncio.sleep(max(0.0, self._began_s + self._frames * FRAME_S - time.monotonic()))
        frame = AudioFrame(format="s16", layout="mono", samples=SAMPLES)
        samples = np.zeros(SAMPLES, "<i2")
        if self._frames % CLICK_EVERY == CLICK_EVERY - 1:
            samples[:] = 20_000 * np.sin(np.arange(SAMPLES) * 2 * np.pi * 1000 / CLOCK_HZ)
            self.at_s.append(time.monotonic())
        frame.planes[0].update(samples.tobytes())
        frame.sample_rate, frame.pts = CLOCK_HZ, self._frames * SAMPLES
        frame.time_base = Fraction(1, CLOCK_HZ)
        self._frames += 1
        return frame


async def call(port: int, seconds: float, loss: float) -> list[float]:
    """Call the door, and say after what time each click came back."""
    peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    clicks, heard, draw = Clicks(), list[float](), random.Random(port)
    peer.addTrack(clicks)
    peer.createDataChannel("oai-events")

    async def listen(track: Any) -> None:
        quiet = True
        while True:
            try:
                frame = await track.recv()
            except MediaStreamError:
                return
            is_loud = int(np.abs(frame.to_ndarray()).max()) > LOUD
            if is_loud and quiet:
                heard.append(time.monotonic())
            quiet = not is_loud

    tasks = []
    peer.on("track", lambda track: tasks.append(asyncio.create_task(listen(track))))
    await peer.setLocalDescription(await peer.createOffer())
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=LINE_BYTES_MAX)
    asked = {"sdp": peer.localDescription.sdp, "target": "/", "headers": {}, "session": None}
    asked |= {"is_live": False, "party": str(id(peer))}
    writer.write(orjson.dumps(asked) + b"\n")
    answer = orjson.loads(await reader.readline())
    assert "sdp" in answer, answer
    writer.close()
    await peer.setRemoteDescription(RTCSessionDescription(answer["sdp"], "answer"))
    if loss:  # packets of sound are sent by the transport's own method
        transport = peer.getSenders()[0].transport
        send = transport._send_rtp

        async def send_some(data: bytes) -> None:
            if draw.random() >= loss:
                await send(data)

        transport._send_rtp = send_some
    await asyncio.sleep(seconds)
    await peer.close()
    waits = [min((it - at for it in heard if it > at), default=1.0) for at in clicks.at_s[2:-1]]
    return [it for it in waits if it < 1]


async def peers(port: int, count: int, seconds: float, loss: float) -> None:
    """Have so many calls at once; writes their waits."""
    found = await asyncio.gather(*(call(port, seconds, loss) for _ in range(count)))
    print(json.dumps([it for waits in found for it in waits]))


def cpu_s(pid: int) -> float:
    """The processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(calls: int, seconds: float, loss: float) -> dict[str, Any]:
    """Measure so many calls at once."""
    async with serve(echo, "127.0.0.1", 0, max_size=None) as gateway:
        at = gateway.sockets[0].getsockname()[1]
        words = ("door", "--url", f"127.0.0.1:{at}", "--listen", "tcp:127.0.0.1:8907")
        door = await asyncio.create_subprocess_exec(
            *RUN, *words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert door.stdout is not None
        while b"ready" not in await door.stdout.readline():
            pass
        before = cpu_s(door.pid)
        asked = (*("--peers", str(calls)), *("--seconds", str(seconds)), *("--loss", str(loss)))
        peer = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.bench.webrtc", *asked), stdout=subprocess.PIPE
        )
        out, _ = await peer.communicate()
        used = cpu_s(door.pid) - before
        door.terminate()
        await door.wait()
    waits = sorted(json.loads(out))
    return {
        "calls": calls,
        "loss": loss,
        "clicks": len(waits),
        "round_trip_ms": {
            name: round(1000 * waits[int(share * (len(waits) - 1))])
            for name, share in {"p50": 0.5, "p95": 0.95}.items()
        },
        "door_cpu_per_call": round(used / calls / seconds, 3),
    }


def main() -> None:
    """Run it, as the module's docstring says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--calls", type=int, nargs="*", default=[1, 12])
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--loss", type=float, default=0.02)
    add_out(parser)
    given = parser.parse_args()
    if given.peers:
        asyncio.run(peers(8907, given.peers, given.seconds, given.loss))
        return
    cases = [(1, 0.0), *((count, given.loss) for count in given.calls)]
    result = {
        "what": "calls by WebRTC at a door, both ways, against an echo",
        "machine": {"cores": os.cpu_count()},
        "calls": [asyncio.run(measure(count, given.seconds, loss)) for count, loss in cases],
    }
    text = json.dumps(result, indent=2) + "\n"
    print(text)
    (given.out / "webrtc.json").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
