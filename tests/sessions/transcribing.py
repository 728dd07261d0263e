"""A transcription under way, the server's machine and the client's, without a model or a socket."""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np

from protocol.machine.client import ClientConnection
from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.limits import NS_PER_S
from protocol.values.messages import ServerMessage
from protocol.values.model import ChunkResult
from protocol.values.requests import ChooseModel
from protocol.values.state import State
from tests.sessions.in_memory import base64

SECOND: Final = np.arange(16_000).astype("<i2").tobytes()
LIMITS: Final = ev.SessionLimits(
    session_s=3600,
    init_wait_s=30,
    cleanup_wait_s=10,
    context_tokens=8192,
    models=("tiny", "whisper-1"),
    sound_bytes=4 * len(SECOND),
)


class Talk:
    """A transcription under way, the server's end and the client's."""

    def __init__(
        self, limits: ev.SessionLimits = LIMITS, *, is_leased: bool = True, behaviour: int = 0
    ) -> None:
        opened = ev.ConnectionOpened(
            recording_id="rec-1",
            created_ms=1_700_000_000_123,
            mode="transcription",
            seed=7,
            limits=limits,
            recording="off",
            behaviour=behaviour,
        )
        self.client = ClientConnection("transcription", "transcription")
        self.heard: list[ServerMessage] = []
        self.frames: list[dict[str, Any]] = []
        self.asked: list[ef.Effect] = []
        self.now_ns = 0
        self.session, effects = Session.open(opened)
        self._take(effects)
        if is_leased:
            self.step(ev.SlotLeased, lease=1, slot=0)

    def step(self, kind: type[Any], *, later_s: float = 0.001, **fields: Any) -> list[Any]:
        """Step an event; returns the bodies of the frames that came of it."""
        self.now_ns += int(later_s * NS_PER_S)
        before = len(self.frames)
        self._take(self.session.step(kind(at_ns=self.now_ns, **fields)))
        return self.frames[before:]

    def say(self, frame: str | bytes | dict[str, Any]) -> list[Any]:
        """Have the server take a frame."""
        text = json.dumps(frame) if isinstance(frame, dict) else frame
        found = self.step(ev.FrameReceived, frame=text)
        if self.session.state is State.ACTIVE and self.client.state is State.CONNECTED:
            self.client.send(ChooseModel(model="tiny"))  # by whatever frame it was chosen
        return found

    def code(self, frame: str | bytes | dict[str, Any]) -> str:
        """Have the server refuse a frame, and say by which code."""
        (body,) = self.say(frame)
        assert body["type"] == "error"
        assert set(body) - {"session_id"} == {"type", "error", "code"}
        return str(body["code"])

    def stands_in(self, state: State) -> bool:
        """Whether the session is in that state now."""
        return self.session.state is state

    def choose(self) -> None:
        """Choose a model that there is."""
        assert self.say({"type": "session.update", "model": "tiny"}) == []

    def append(self, pcm16: bytes) -> list[Any]:
        """Append sound."""
        return self.say({"type": "input_audio_buffer.append", "audio": base64(pcm16)})

    def commit(self, *, final: bool = False) -> list[Any]:
        """Commit it."""
        return self.say({"type": "input_audio_buffer.commit", "final": final})

    def _take(self, effects: tuple[ef.Effect, ...]) -> None:
        self.asked += effects
        for effect in effects:
            if isinstance(effect, ef.Send):
                self.frames.append(json.loads(effect.frame))
                self.heard += self.client.receive(effect.frame)
            elif isinstance(effect, ef.Close):
                self.client.connection_closed(effect.code, effect.reason)

    def due(self, kind: type[Any]) -> list[Any]:
        """Take the effects of one class that were not taken before."""
        found = [effect for effect in self.asked if isinstance(effect, kind)]
        self.asked = [effect for effect in self.asked if not isinstance(effect, kind)]
        return found

    def hear(self, text: str = "a ") -> list[Any]:
        """Have the model write something of the chunk that it was given."""
        (asked,) = self.due(ef.RunChunk)
        return self.step(ev.ChunkDone, result=result(asked.chunk, text))

    def hear_out(self) -> list[Any]:
        """Have the model hear all that it is given; returns what was sent."""
        before = len(self.frames)
        while asked := self.due(ef.RunChunk):
            chunk = asked[0].chunk
            text = f"{chunk.utterance}.{chunk.index}{'!' if chunk.is_last else ' '}"
            self.step(ev.ChunkDone, result=result(chunk, text))
        return self.frames[before:]


def result(chunk: Any, text: str) -> ChunkResult:
    """What a model writes of a chunk."""
    return ChunkResult(
        utterance=chunk.utterance,
        index=chunk.index,
        text=text,
        token_ids=(1, 2),
        reason="stop",
        prompt_tokens=10,
        generated_tokens=2,
        kv_length=12,
    )


def ready() -> Talk:
    """A transcription whose model is chosen."""
    talk = Talk()
    talk.choose()
    return talk


def done_of(frames: list[Any]) -> dict[str, Any]:
    """The one end of an utterance among frames."""
    (found,) = [body for body in frames if body["type"] == "transcription.done"]
    return dict(found)
