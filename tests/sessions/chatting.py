"""A chat under way, fed by hand: what it is asked, what it sends, and what it wants done."""

from __future__ import annotations

import json
from typing import Any

import attrs
from pybase64 import b64encode_as_string as base64

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.model import Prefill, TurnChunk, TurnResult

LIMITS = ev.SessionLimits(session_s=0, init_wait_s=30, cleanup_wait_s=10, context_tokens=8192)
PCM, SOUND = bytes(4 * 2_400), base64(bytes(4 * 16_000))
OTHER_RATE = {"type": "audio", "data": SOUND, "sample_rate": 8000}
"""A content that has to be decoded outside."""


def opened(endpoint: ev.Endpoint = "realtime", **limits: Any) -> ev.ConnectionOpened:
    """A chat's first event."""
    return ev.ConnectionOpened(
        recording_id="rec-1",
        created_ms=1_700_000_000_000,
        mode="chat",
        seed=7,
        limits=attrs.evolve(LIMITS, **limits),
        recording="on",
        endpoint=endpoint,
    )


def question(*contents: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """What a client asks, in either dialect."""
    content = list(contents) or [{"type": "text", "text": "hello"}]
    return {"messages": [{"role": "user", "content": content}], **fields}


class Run:
    """A session fed by hand; what it sends is kept, parsed."""

    def __init__(self, endpoint: ev.Endpoint = "realtime", **limits: Any) -> None:
        self.now_ns = 0
        self.sent: list[dict[str, Any]] = []
        self.effects: list[ef.Effect] = []
        self.session, effects = Session.open(opened(endpoint, **limits))
        self._keep(effects)

    def step(self, kind: type[Any], **fields: Any) -> list[ef.Effect]:
        """Step an event a millisecond later; returns its effects."""
        self.now_ns += 1_000_000
        effects = self.session.step(kind(at_ns=self.now_ns, **fields))
        return self._keep(effects)

    def say(self, body: dict[str, Any]) -> list[ef.Effect]:
        """Step a client's message."""
        return self.step(ev.FrameReceived, frame=json.dumps(body))

    def ask(self, body: dict[str, Any]) -> list[ef.Effect]:
        """Ask, as `realtime` does."""
        return self.say({"type": "input.append", "input": body})

    def of(self, kind: type[Any]) -> list[Any]:
        """The effects of one class so far."""
        return [effect for effect in self.effects if isinstance(effect, kind)]

    @property
    def kinds(self) -> list[str]:
        """The types of what was sent."""
        return [body.get("kind", body["type"]) for body in self.sent]

    def _keep(self, effects: tuple[ef.Effect, ...]) -> list[ef.Effect]:
        self.effects += effects
        self.sent += [json.loads(effect.frame) for effect in effects if isinstance(effect, ef.Send)]
        return list(effects)


def active(**limits: Any) -> Run:
    """A chat that waits for its first question."""
    run = Run(**limits)
    run.step(ev.Admitted)
    run.say({"type": "session.init", "payload": {}})
    return run


def answer(run: Run, index: int, *texts: str, pcm: bytes = b"", lease: int = 1) -> None:
    """Lease a slot and have the model answer."""
    run.step(ev.SlotLeased, lease=lease, slot=0)
    run.step(ev.TurnPrefilled, prefill=Prefill(index=index, input_tokens=12))
    for step, text in enumerate(texts):
        chunk = TurnChunk(index=index, step=step, text=text, pcm=pcm, token_ids=(step,))
        run.step(ev.TurnProgress, chunk=chunk)
    result = TurnResult(
        index=index, text="".join(texts), pcm=pcm, generated_tokens=len(texts) + 1, kv_length=20
    )
    run.step(ev.TurnDone, result=result)
    run.step(ev.BackendReleased, lease=lease)
