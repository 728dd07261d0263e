"""A model call that never ends: who waits for it is told in time, and a slow one is let live."""

from __future__ import annotations

import json

import anyio
import pytest

from protocol.values.limits import CALL_WAIT_S, TURN_WAIT_S
from protocol.values.model import Turn
from runtime.model.backends.scripted import Call, ScriptedBackend
from runtime.model.backends.scripted_chat import Answer
from tests.sessions.in_memory import init_frame, on_virtual_time, world

MESSAGES = [{"role": "user", "content": "?"}]
ASK = json.dumps({"type": "input.append", "input": {"messages": MESSAGES}})


def test_an_opening_that_hangs_is_given_up() -> None:
    """A client would look at a session that never begins, until its five minutes are over."""

    async def body() -> None:
        backend = ScriptedBackend(opening=lambda _: Call(fault="hang"))
        async with world(backend) as server:
            peer = server.connect()
            await peer.heard("session.queue_done")
            peer.send(init_frame())
            await peer.over()
            assert peer.events[-1]["error"]["code"] == "worker_connect_failed"
            assert peer.closed == (1013, "worker_connect_failed")
            assert CALL_WAIT_S <= anyio.current_time() <= CALL_WAIT_S + 1

    on_virtual_time(body)


@pytest.mark.parametrize("endpoint", ["realtime", "chat"])
def test_a_turn_that_hangs_is_given_up(endpoint: str) -> None:
    """A question would be waited for without end."""

    async def body() -> None:
        async with world(ScriptedBackend(chat=lambda _: Answer(fault="hang"))) as server:
            if endpoint == "chat":
                peer = server.connect("chat", endpoint="chat")
                peer.send(json.dumps({"messages": MESSAGES}))
            else:
                peer = await server.activate_chat()
                peer.send(ASK)
            await peer.over()
            if endpoint == "chat":
                assert peer.events[-1]["code"] == "inference_error"
                assert peer.closed is not None
                assert peer.closed[0] == 1011
            else:
                assert peer.events[-1]["reason"] == "backend_error"
                assert peer.closed == (1011, "backend_error")
            assert TURN_WAIT_S <= anyio.current_time() <= TURN_WAIT_S + 1

    on_virtual_time(body)


def test_a_slow_answer_is_let_live() -> None:
    """Long answers of a busy model would be cut, though each word comes in time."""

    def slowly(turn: Turn) -> Answer:
        return Answer(tokens=("so", " it", " is"), token_s=TURN_WAIT_S - 1)

    async def body() -> None:
        async with world(ScriptedBackend(chat=slowly)) as server:
            peer = await server.activate_chat()
            peer.send(ASK)
            done = await peer.heard("response.done")
            assert (done["text"], done["reason"]) == ("so it is", "turn_end")
            assert anyio.current_time() > 2 * TURN_WAIT_S

    on_virtual_time(body)
