"""Clients of OpenAI's transcription sessions in a simulation.

Their sound is their number over and over, which the resampler leaves as it is but for the edges.
They end their utterances themselves, or leave that to the detector.
"""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np

from protocol.values import openai as oa
from protocol.values import requests as rq
from protocol.values.messages import Created, ServerMessage
from protocol.wire.rates import LIVE_RATE_HZ
from tests.simulation.simulated_client import ANSWER_S, Client
from tests.simulation.simulated_pieces import check_event

SAMPLES_MIN = 2400
"""A tenth of a second: more than the edges."""


class DictationClient(Client):
    """A client of `openai-transcription` at work."""

    _item = ""

    def _take(self, frame: str) -> None:
        check_event(self, frame)
        super()._take(frame)

    def _note(self, message: ServerMessage) -> None:
        match message:
            case oa.InputStep(kind="transcript_delta", text=text, item_id=item_id):
                if item_id != self._item:  # the one before was cleared
                    self._item, self._written, self._last = item_id, "", -1
                self._check(text, b"")
                self._follow(text)
                self._written += text
            case oa.InputStep(kind="transcript_done", text=text):
                if text != self._written.strip():
                    self._report(f"it was told {self._written!r}, and then that it was {text!r}")
                self._end()
            case oa.InputStep(kind="transcript_failed"):
                self._end()
            case _:
                super()._note(message)

    def _end(self) -> None:
        self._written, self._last = "", -1
        self.answers += 1

    async def _dictate(self) -> None:
        dice, plan = self._dice, self.plan
        if plan.character != "hasty":
            await self._until(lambda: self.has_heard(Created))
        if plan.character == "idle" or self._over:
            return
        if plan.character == "garbage":
            self._say_rubbish()
        is_found = plan.character != "good" and dice.random() < 0.5
        how: Any = {"detection": oa.TurnDetection(silence_ms=200)} if is_found else {}
        self._say(oa.Configure(is_undetected=not is_found, **how))
        for number in range(plan.rounds):
            if self._over:
                return
            if plan.character == "deaf" and number == plan.rounds // 2:
                self.is_deaf = True
            lengths = (LIVE_RATE_HZ, dice.randrange(SAMPLES_MIN, 30_000))
            for samples in lengths[: 1 + dice.randrange(2)]:
                sound = np.full(samples, plan.number + 1, "<i2").tobytes()
                self._say(rq.AppendSound(pcm16=sound))
            if plan.character == "forcing" and dice.random() < 0.3:
                self._say(oa.ClearSound())
            self._say(oa.CommitSound())
            self._appends += 1
            await anyio.sleep(0 if plan.character in {"hasty", "flooding"} else self._pause_s())
        if plan.character == "good":
            with anyio.move_on_after(ANSWER_S):
                await self._until(lambda: self.answers >= self._appends)
