"""Clients of OpenAI's transcription sessions in a simulation.

Their sound is their number over and over, which the resampler leaves as it is but for the edges.
They end their utterances themselves, or leave that to the detector.
"""

from __future__ import annotations

from typing import Any

from protocol.values import openai as oa
from protocol.values import requests as rq
from protocol.values.messages import ServerMessage
from protocol.wire.audio import LIVE_RATE_HZ
from tests.simulation.simulated_client import Client, tagged
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

    def _choose(self) -> None:
        is_found = self.plan.character != "good" and self._dice.random() < 0.5
        how: Any = {"detection": oa.TurnDetection(silence_ms=200)} if is_found else {}
        self._say(oa.Configure(is_undetected=not is_found, **how))

    def _say_utterance(self) -> None:
        dice, plan = self._dice, self.plan
        lengths = (LIVE_RATE_HZ, dice.randrange(SAMPLES_MIN, 30_000))
        for samples in lengths[: 1 + dice.randrange(2)]:
            self._say(rq.AppendSound(pcm16=tagged(plan.number, samples)))
        if plan.character == "forcing" and dice.random() < 0.3:
            self._say(oa.ClearSound())
        self._say(oa.CommitSound())
