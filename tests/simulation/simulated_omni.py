"""Clients of `vllm-omni` in a simulation: seconds of 16-bit sound, and interruptions.

They are told of no turn in the queue and interrupt by an event of its own. What they hear of a
second that speaks comes as sound, and then as words.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import anyio

from protocol.values import omni as om
from protocol.values import requests as rq
from protocol.values.messages import Created, Listen, ServerMessage, Speech
from tests.simulation.simulated_backend import mark, voiced
from tests.simulation.simulated_client import ANSWER_S, Client

INTERRUPTIONS: Final = (om.BargeIn(), om.ClearOutput())


class OmniClient(Client):
    """A client of `vllm-omni` at work."""

    def _note(self, message: ServerMessage) -> None:
        match message:
            case Speech(text=text, pcm=pcm):
                self._check(text, voiced(pcm))
                self._follow(text)
                self.answers += bool(text)
            case Listen():
                self.answers += 1
            case _:
                super()._note(message)

    async def _act(self) -> None:
        plan = self.plan
        if plan.character == "silent":
            return
        await self._set_up()
        if plan.character == "idle" or self._over:
            return
        await self._stream()
        if plan.character == "good":
            with anyio.move_on_after(ANSWER_S):
                await self._until(lambda: self.answers >= self._appends)
        if plan.character != "deaf":
            self._say(rq.CloseRequest())

    async def _set_up(self) -> None:
        words = f"<{self.plan.number}> be brief"
        self._on_init(rq.Init(instructions=words))
        self._say(rq.Init(instructions=words, omni=om.OmniSettings(model="scripted")))
        if self.plan.character != "hasty":
            await self._until(lambda: self.has_heard(Created))

    def _appended(self) -> Iterator[rq.ClientMessage]:
        for append in super()._appended():
            if isinstance(append, rq.Append):
                if append.force_listen:
                    yield self._dice.choice(INTERRUPTIONS)
                yield rq.Append(
                    pcm=mark(self.plan.number, self._appends % 1000, len(append.pcm) // 4)
                )
