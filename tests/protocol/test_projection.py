"""One session in every dialect that can show it: the same events, seen through each, tell the same.

The client's side is `ClientConnection`, the server's `Session`; the model's results are drawn once
and given to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.machine.client import ClientConnection
from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.messages import Closed, Delta, Listen, Response, ServerMessage, Speech
from protocol.values.model import Finalized, Opened, Prefill, TurnChunk, TurnResult, UnitResult
from protocol.values.requests import Append, Ask, ChatMessage, CloseRequest, Init, TextPart
from protocol.values.state import State

LIMITS = ev.SessionLimits(session_s=300, init_wait_s=30, cleanup_wait_s=10, context_tokens=8192)
SECOND = np.linspace(-0.5, 0.5, 16_000).astype("<f4").tobytes()
DUPLEX: dict[str, ev.Endpoint] = {
    "realtime": "realtime",
    "duplex-v1": "realtime",
    "legacy-duplex": "duplex",
}
CHAT: dict[str, ev.Endpoint] = {"realtime": "realtime", "legacy-chat": "chat"}


@attrs.frozen
class Outcome:
    """What a unit comes to for a client, whatever its dialect."""

    text: str = ""
    pcm: bytes = b""
    end_of_turn: bool = False
    kv_length: int = 0


class Both:
    """A client and a server in one dialect, and the world between them."""

    def __init__(self, dialect: str, endpoint: ev.Endpoint, mode: Any) -> None:
        opened = ev.ConnectionOpened(
            recording_id="rec-1",
            created_ms=1_700_000_000_000,
            mode=mode,
            seed=1,
            limits=LIMITS,
            recording="off",
            endpoint=endpoint,
            label="omni_1",
        )
        self.client = ClientConnection(dialect, mode)
        self.heard: list[ServerMessage] = []
        self.effects: list[ef.Effect] = []
        self.now_ns = 0
        self.session, effects = Session.open(opened)
        self._take(effects)

    def step(self, kind: type[Any], **fields: Any) -> None:
        """Step an event, a millisecond later."""
        self.now_ns += 1_000_000
        self._take(self.session.step(kind(at_ns=self.now_ns, **fields)))

    def say(self, frame: str) -> None:
        """Have the server take a frame of the client's."""
        self.step(ev.FrameReceived, frame=frame)

    def _take(self, effects: Sequence[ef.Effect]) -> None:
        self.effects += effects
        for effect in effects:
            if isinstance(effect, ef.Send):
                self.heard += self.client.receive(effect.frame)
            elif isinstance(effect, ef.Close):
                self.client.connection_closed(effect.code, effect.reason)

    def due(self, kind: type[Any]) -> list[Any]:
        """Take the effects of one class that were not taken before."""
        found = [effect for effect in self.effects if isinstance(effect, kind)]
        self.effects = [effect for effect in self.effects if not isinstance(effect, kind)]
        return found


def outcomes(heard: Sequence[ServerMessage]) -> list[Outcome]:
    """Join what 001 sends apart: each unit's text and sound."""
    told: list[Outcome] = []
    last = ""
    for message in heard:
        if isinstance(message, Listen):
            told.append(Outcome(kv_length=message.metrics.kv_cache_length))
        elif isinstance(message, Speech):
            kv_length = message.metrics.kv_cache_length
            new = Outcome(message.text, message.pcm, message.end_of_turn, kv_length)
            if message.input_id and message.input_id == last:
                first = told.pop()
                new = Outcome(
                    first.text + new.text, first.pcm + new.pcm, new.end_of_turn, kv_length
                )
            last = message.input_id
            told.append(new)
    return told


results = st.lists(
    st.builds(
        dict,
        is_listen=st.booleans(),
        text=st.text(max_size=8),
        samples=st.sampled_from([0, 960, 24_000]),
        end_of_turn=st.booleans(),
        fails=st.integers(0, 9).map(lambda dice: dice == 0),
    ),
    min_size=1,
    max_size=6,
)


def converse(dialect: str, drawn: Sequence[dict[str, Any]], *, forced: int) -> Both:
    """Hold one conversation; unit `forced` is asked to listen."""
    both = Both(dialect, DUPLEX[dialect], "audio")
    both.step(ev.SlotLeased, lease=1, slot=0)
    both.say(both.client.send(Init(instructions="be brief")))
    both.step(ev.BackendOpened, lease=1, opened=Opened(prompt_length=9))
    for number, draw in enumerate(drawn):
        both.say(both.client.send(Append(pcm=SECOND, force_listen=number == forced)))
        (start,) = both.due(ef.StartUnit)
        index = start.unit.index
        assert start.unit.force_listen == (number == forced)
        if draw["fails"]:
            both.step(ev.UnitFailed, index=index)
            if both.session.state is State.ACTIVE:
                both.step(ev.RollbackDone, index=index)
            continue
        listens = draw["is_listen"] or start.unit.force_listen
        result = UnitResult(
            index=index,
            is_listen=listens,
            text="" if listens else draw["text"],
            pcm=b"" if listens else SECOND[:4] * draw["samples"],
            end_of_turn=not listens and draw["end_of_turn"],
            kv_length=20 + index,
        )
        both.step(ev.UnitDone, result=result)
        both.step(ev.FinalizeDone, finalized=Finalized(index=index, kv_length=22 + index))
    if both.session.state is State.ACTIVE:
        both.say(both.client.send(CloseRequest()))
    return both


@settings(deadline=None, max_examples=60)
@given(drawn=results, forced=st.integers(-1, 5))
def test_a_duplex_session_is_the_same_in_every_dialect(
    drawn: list[dict[str, Any]], forced: int
) -> None:
    """A client of one protocol hears something else than that of another."""
    seen = {name: converse(name, drawn, forced=forced) for name in DUPLEX}
    told = {name: outcomes(both.heard) for name, both in seen.items()}
    assert told["realtime"] == told["duplex-v1"] == told["legacy-duplex"]
    ends = [[it.reason for it in both.heard if isinstance(it, Closed)] for both in seen.values()]
    assert ends[0] == ends[1] == ends[2] != []
    assert {both.client.closed_with[0] for both in seen.values() if both.client.closed_with}


@settings(deadline=None, max_examples=60)
@given(
    pieces=st.lists(st.tuples(st.text(max_size=6), st.sampled_from([0, 480])), max_size=6),
    streaming=st.booleans(),
    tail=st.sampled_from([0, 240]),
)
def test_a_turn_is_the_same_in_every_dialect(
    pieces: list[tuple[str, int]], streaming: bool, tail: int
) -> None:
    """A question gets another answer by its address."""
    told = {}
    for name, endpoint in CHAT.items():
        both = Both(name, endpoint, "chat")
        both.step(ev.Admitted)
        if endpoint == "realtime":
            both.say(both.client.send(Init(instructions="")))
        asked = ChatMessage(role="user", content=(TextPart(text="hello"),))
        both.say(both.client.send(Ask(messages=(asked,), streaming=streaming)))
        both.step(ev.SlotLeased, lease=1, slot=0)
        (start,) = both.due(ef.StartTurn)
        both.step(ev.TurnPrefilled, prefill=Prefill(index=0, input_tokens=11))
        for step, (text, samples) in enumerate(pieces):
            pcm = SECOND[: 4 * samples]
            chunk = TurnChunk(index=0, step=step, text=text, pcm=pcm, token_ids=(step,))
            both.step(ev.TurnProgress, chunk=chunk)
        result = TurnResult(
            index=0,
            text="".join(text for text, _ in pieces),
            pcm=SECOND[: 4 * tail],
            generated_tokens=len(pieces) + 1,
        )
        both.step(ev.TurnDone, result=result)
        deltas = [it for it in both.heard if isinstance(it, Delta)]
        (done,) = [it for it in both.heard if isinstance(it, Response)]
        told[name] = (
            start.turn,
            "".join(it.text for it in deltas),
            b"".join(it.pcm for it in deltas) + done.pcm,
            (done.text, done.input_tokens, done.generated_tokens),
        )
        assert streaming or not [it for it in deltas if it.text]
    assert told["realtime"] == told["legacy-chat"]
    assert told["realtime"][2] == SECOND[:0].join(
        [*(SECOND[: 4 * samples] for _, samples in pieces), SECOND[: 4 * tail]]
    )
