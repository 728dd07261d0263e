"""The adversary "pictures" against a whole server on virtual time: how late an honest unit is.

Decoding is sleep, in a real queue for decoding: a heavy picture takes half a second.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import anyio
import numpy as np
import pytest
import simplejpeg

from protocol.values.effects import DecodeMedia
from protocol.values.limits import FRAMES_MAX
from runtime.media.decoder import WORKERS_MAX, Client, FairQueue
from runtime.media.values import Decoded
from runtime.model.backends.scripted import Call, ScriptedBackend, Step
from tests.sessions.in_memory import World, append_frame, base64, on_virtual_time, world

HEAVY_S, LIGHT_S = 0.5, 0.02
CHATS = 24
IMAGES = 5
UNITS = 20


def picture(height: int) -> str:
    """A picture that is too large to be proven at once."""
    return base64(bytes(simplejpeg.encode_jpeg(np.zeros((height, 648, 3), np.uint8))))


HEAVY, LIGHT = picture(488), picture(496)


class Decoder:
    """A decoder whose work takes virtual time.

    Attributes:
        begun: how long each picture took that was begun.
    """

    def __init__(self) -> None:
        self.queue = FairQueue(WORKERS_MAX)
        self.begun: list[float] = []

    async def decode(self, effect: DecodeMedia, client: Client) -> Decoded:
        """Wait for a place, then for as long as it takes, as for a thread."""
        cost_s = HEAVY_S if base64(effect.data) == HEAVY else LIGHT_S
        async with self.queue.place(client, expected_s=cost_s) as place:
            self.begun.append(cost_s)
            with anyio.CancelScope(shield=True):
                await anyio.sleep(cost_s)
            place.used_s = cost_s
        return Decoded(pictures=(effect.data,) if effect.kind == "image" else ())


async def show_units(server: World) -> None:
    """Show four heavy pictures a second."""
    peer = await server.activate()
    while True:
        peer.send(append_frame(video_frames=[HEAVY] * FRAMES_MAX))
        await anyio.sleep(1)


async def ask(server: World) -> None:
    """Ask about five heavy pictures, again and again, from many chats."""
    content = [{"type": "image", "data": HEAVY}] * IMAGES
    body = {"messages": [{"role": "user", "content": content}]}

    async def chat() -> None:
        peer, asked = await server.activate_chat(), 0
        while True:
            peer.send(json.dumps({"type": "input.append", "input": body}))
            asked += 1
            await peer.heard("response.done", asked)

    async with anyio.create_task_group() as tasks:
        for _ in range(CHATS):
            tasks.start_soon(chat)


ADVERSARIES: dict[str, tuple[Callable[[World], Awaitable[None]], ...]] = {
    "nobody": (),
    "units": (show_units,),
    "chats": (ask,),
    "two sessions": (show_units, show_units),
    "units and chats": (show_units, ask),
}


@pytest.mark.costly
@pytest.mark.parametrize(
    ("adversary", "late_s_max"),
    [("nobody", 0), ("units", 0), ("chats", 0), ("two sessions", 1), ("units and chats", 1)],
)
def test_an_honest_unit_is_late_by_no_more_than_a_constant(
    adversary: str, late_s_max: float
) -> None:
    """One client's pictures would delay the units of all others by minutes."""

    async def body() -> None:
        backend = ScriptedBackend(lambda *_: Step(prefill_s=0, generate_s=0.1, finalize=Call()))
        async with world(backend) as server, anyio.create_task_group() as tasks:
            decoder = Decoder()
            server.server._decode_media = decoder.decode
            for attack in ADVERSARIES[adversary]:
                tasks.start_soon(attack, server)
            await anyio.sleep(10)
            honest = await server.activate()
            for unit in range(UNITS):
                began_s = anyio.current_time()
                honest.send(append_frame(video_frames=[LIGHT]))
                await honest.heard("listen", unit + 1)
                late_s = anyio.current_time() - began_s - LIGHT_S - 0.1
                assert late_s <= late_s_max * 2 * HEAVY_S + 1e-6
                await anyio.sleep(0.7 + 0.6 * (0.618 * unit % 1) - late_s)
            assert (HEAVY_S in decoder.begun) == (adversary != "nobody")
            tasks.cancel_scope.cancel()

    on_virtual_time(body)


def test_what_a_dropped_unit_showed_is_not_decoded() -> None:
    """A session that shows more than is decoded would see its own pictures ever later."""

    async def body() -> None:
        async with world() as server, anyio.create_task_group() as tasks:
            decoder = Decoder()
            server.server._decode_media = decoder.decode
            tasks.start_soon(show_units, server)
            await anyio.sleep(60)
            tasks.cancel_scope.cancel()
            assert sum(decoder.begun) <= 60
            waiting = sum(len(share.waiting) for share in decoder.queue._waiting)
            assert waiting <= 6 * FRAMES_MAX

    on_virtual_time(body)


def test_a_session_that_is_over_has_nothing_decoded() -> None:
    """Who leaves and comes again would leave work behind each time, that others wait for."""

    async def body() -> None:
        async with world(ScriptedBackend(release=Call(duration_s=9))) as server:
            decoder = Decoder()
            server.server._decode_media = decoder.decode
            peer = await server.activate()
            peer.send(append_frame(video_frames=[HEAVY] * FRAMES_MAX))
            await anyio.sleep(0.1)
            peer.vanish()
            await anyio.sleep(10)
            assert decoder.begun == [HEAVY_S]

    on_virtual_time(body)
