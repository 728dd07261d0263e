"""Clients of OpenAI's dialects in a simulation: sound in pieces, and no questions.

What they hear comes as words and as sound. Between two seconds of sound that says whose it is they
speak: loud, and below zero, where the model does not look.
"""

from __future__ import annotations

from typing import Any, Final

import anyio
import numpy as np
from openai.types.live.server_event import ServerEvent
from openai.types.realtime.realtime_server_event import RealtimeServerEvent
from pydantic import TypeAdapter, ValidationError

from protocol.values import openai as oa
from protocol.values import requests as rq
from protocol.values.effects import DecodeMedia
from protocol.values.limits import ANSWER_UNITS
from protocol.values.messages import Created, Listen, QueueDone, ServerMessage, Speech
from protocol.values.model import SAMPLE16_BYTES, ToolResult
from protocol.wire.audio import DOWN, HISTORY_BYTES, LIVE_RATE_HZ, to_float32, to_pcm16
from runtime.media.decoder import Client as MediaClient
from runtime.media.values import Decoded
from tests.sessions.in_memory import decode_here
from tests.simulation.simulated_backend import mark, voiced
from tests.simulation.simulated_client import ANSWER_S, Client

LOUD: Final = -12_000
"""A sample of speech."""


async def decode(effect: DecodeMedia, client: MediaClient) -> Decoded:
    """Decode; a second is resampled without a filter, so that each sample says whose it is."""
    if effect.kind != "second":
        return await decode_here(effect, client)
    samples = np.frombuffer(effect.data[HISTORY_BYTES:], "<i2").reshape(-1, DOWN)[:, :2]
    return Decoded(pcm=to_float32(samples.tobytes()))


TYPES: Final[dict[str, TypeAdapter[Any]]] = {
    "live": TypeAdapter(ServerEvent),
    "openai": TypeAdapter(RealtimeServerEvent),
    "openai-transcription": TypeAdapter(RealtimeServerEvent),
}
"""What the server may say, by the types of OpenAI's own package."""


def check_event(client: Client, frame: str) -> None:
    """Report a frame that OpenAI's package cannot read."""
    try:
        TYPES[client.plan.dialect].validate_json(frame, strict=True)
    except ValidationError as error:
        client._report(f"OpenAI's package cannot read {frame[:200]}: {error}")


class PiecesClient(Client):
    """A client of `live` or `openai` at work."""

    _asked = 0

    def _take(self, frame: str) -> None:
        check_event(self, frame)
        super()._take(frame)

    @property
    def _goes_by_itself(self) -> bool:
        """Whether it hangs up once it has what it came for: `openai` knows no goodbye."""
        return self.plan.dialect == "openai" and self.plan.character in {"good", "slow"}

    def _note(self, message: ServerMessage) -> None:
        match message:
            case Speech(text=text, pcm=pcm):
                self._check(text, voiced(pcm))
                self._follow(text)
                self.answers += bool(pcm) and self.plan.dialect == "live"
            case Listen():
                self.answers += 1
            case oa.ReplyState(response=response):
                self.answers += response.status != "in_progress"
            case _:
                super()._note(message)

    async def _act(self) -> None:
        plan = self.plan
        if plan.character == "silent":
            return
        first = QueueDone if plan.dialect == "live" else Created
        if plan.character != "hasty":
            await self._until(lambda: self.has_heard(first))
        await self._set_up()
        if plan.character == "idle" or self._over:
            return
        for number in range(plan.rounds):
            if self._over:
                return
            if plan.character == "deaf" and number == plan.rounds // 2:
                self.is_deaf = True
            if plan.character == "garbage" and self._dice.random() < 0.4:
                self._say_rubbish()
            await self._speak(number)
        if plan.dialect == "openai":
            self._say(oa.Respond())
            self._asked += 1
        if plan.character == "good":
            with anyio.move_on_after(ANSWER_S + self._asked * ANSWER_UNITS):
                await self._until(lambda: self.answers >= (self._asked or self._appends))
        if plan.dialect == "live" and plan.character != "deaf":
            self._say(rq.CloseRequest())
            for result in self._calls:
                self._say(result)

    async def _set_up(self) -> None:
        words = f"<{self.plan.number}> be brief"
        self._on_init(rq.Init(instructions=words))
        if self.plan.dialect == "live":
            tools = {"delegation": "responses", "tools": self._tools}
            settings = oa.LiveSettings(model="scripted", **tools)
            self._say(rq.Init(instructions=words, live=settings))
        else:
            how: Any = {"creates": self._dice.random() < 0.8, "silence_ms": 200}
            found = oa.TurnDetection(**how)
            self._say(oa.Configure(instructions=words, detection=found, tools=self._tools))
        if self.plan.character != "hasty":
            await self._until(lambda: self.has_heard(Created))

    async def _speak(self, number: int) -> None:
        """Send a second in pieces, and some speech."""
        dice, plan = self._dice, self.plan
        if self._calls and plan.character != "forcing":
            self._say_if_open(self._calls.pop(0))
        sound = to_pcm16(mark(plan.number, number, LIVE_RATE_HZ))
        if dice.random() < 0.4:
            samples = np.frombuffer(sound, "<i2").copy()
            samples[dice.randrange(LIVE_RATE_HZ) :][:LIVE_RATE_HZ] = LOUD
            sound = samples.tobytes()
        if plan.character == "flooding":
            sound *= 6
        pieces = dice.choice((1, 2, 10))
        size = len(sound) // pieces // SAMPLE16_BYTES * SAMPLE16_BYTES
        pause_s = 0 if plan.character == "hasty" else self._pause_s() / pieces
        for at in range(0, len(sound), size):
            self._say(rq.AppendSound(pcm16=sound[at : at + size]))
            await anyio.sleep(pause_s)
        self._appends += 1
        if plan.character == "forcing":
            self._say(self._interruption())
            if self._calls:
                self._say_if_open(self._calls.pop(0))

    def _result(self, call_id: str, output: str) -> rq.ClientMessage:
        result = ToolResult(call_id=call_id, output=output)
        if self.plan.dialect == "live":
            return result
        return oa.CreateItem(item=oa.Item(role="user", call=result))

    def _interruption(self) -> rq.ClientMessage:
        if self.plan.dialect == "live":
            return self._dice.choice((oa.Mute(), oa.Unmute()))
        messages = (oa.Respond(), oa.CancelResponse(), oa.CommitSound(), oa.ClearSound())
        return self._dice.choice(messages)
