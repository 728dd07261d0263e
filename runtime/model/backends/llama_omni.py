"""A remote backend: MiniCPM-o behind a llama.cpp-omni server, over its WebSocket.

    backend = LlamaOmniBackend("ws://127.0.0.1:22500")
    await backend.check()
    session = await backend.open(opening, slot=0)

Rules (the protocol is in `wire.md`, "Remote backend"):
- The server holds one session, so `slots` is 1. A chat turn is a session of mode `turn_based`.
- A unit is one append and its answer. After `QUIET_S` of quiet it is pinged, and ends with the
  pong; without an answer in `UNIT_WAIT_S` it has failed.
- The protocol has no undo, seed or stop. So a failed or cancelled unit ends the session (B3), a
  full replay is not comparable, and an interrupted unit runs to its end. The server finalizes a
  unit before it reads the next append (B1, B2).
- Release closes the session on the server, then the WebSocket, and never raises.
- Any deviation from wire.md is a `BackendError` with the expected and the received; an ended
  session or connection is a `BackendGone`. Neither shows content. There is no reconnect.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import anyio
import orjson

from protocol.values.errors import LocalProtocolError
from protocol.values.model import Cut, Finalized, Opened, Opening, Turn, Unit, UnitResult

from .base import BackendError, BackendGone, BackendInfo
from .llama_omni_answer import Answers
from .llama_omni_channel import OK, Channel, told
from .llama_omni_chat import LlamaOmniTurn
from .llama_omni_http import Address, request
from .llama_omni_link import Pong
from .llama_omni_question import refuse_what_it_lacks
from .llama_omni_wire import FULL_DUPLEX, US_PER_S, append_message, init_message, read_event

OPEN_WAIT_S: Final = 6.0
"""With connecting and closing below `CLEANUP_WAIT_S`: an opening that hangs fails before its
slot is condemned (B4). A server that loads its model first may need another try."""
UNIT_WAIT_S: Final = 8.0
"""Below `CLEANUP_WAIT_S` too; the client of a one-second unit that takes so long is gone."""
QUIET_S: Final = 0.5
"""Answers come word by word while they are generated; a silent unit costs no more than this."""
HEALTH_WAIT_S: Final = 5.0
"""`/health` waits for no model."""
CONTEXT_TOKENS_MAX: Final = 40_960
"""The language model's maximum; the server's own limit is smaller, and unknown here."""

_log = logging.getLogger("antiphon.model")


def load(url: str, slots: int | None = None, **_settings_of_a_device: object) -> LlamaOmniBackend:
    """Make the backend of a URL: an entry point of `antiphon.backends`; `ValueError`."""
    if slots not in {None, 1}:
        raise ValueError("llama_omni serves one session at a time: --slots is 1")
    return LlamaOmniBackend(url)


class LlamaOmniBackend:
    """One llama.cpp-omni server at `ws://host:port` or `wss://host:port`, else `ValueError`."""

    def __init__(self, url: str) -> None:
        self.info: Final = BackendInfo(
            name="llama_omni",
            modes=("video", "audio", "chat"),
            slots=1,
            context_limit=CONTEXT_TOKENS_MAX,
            sliding_windows=("off",),
            can_rollback=False,
            deterministic=False,
            fingerprint={"backend": "llama_omni"},
            varies="what is computed elsewhere",
        )
        self._address = Address.parse(url)
        self._held: LlamaOmniSession | LlamaOmniTurn | None = None

    async def check(self) -> None:
        """Check that the server is ready; `BackendGone` if it is silent, else `BackendError`."""
        with told(self._address):
            status, body = await request(self._address, "GET", "/health", wait_s=HEALTH_WAIT_S)
            if status != OK:
                raise BackendError(f"expected HTTP {OK}, got HTTP {status}")
            state = _status_of(body)
            if state == "loading":
                raise BackendError("expected a server that is ready, got one that is loading")

    async def aclose(self) -> None:
        """Close an abandoned session."""
        held, self._held = self._held, None
        if held is not None:
            await held.release()

    async def open(self, opening: Opening, *, slot: int) -> LlamaOmniSession:
        """Open a session; on failure or cancellation, release it on the server."""
        self._check(slot)
        with told(self._address):
            channel = await Channel.connect(self._address)
            session = LlamaOmniSession(self._address, channel)
            try:
                await session.begin(opening)
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await session.release()
                raise
        self._held = session
        return session

    async def chat(self, turn: Turn, *, slot: int) -> LlamaOmniTurn:
        """Take a turn; the server receives it with `prefill`."""
        await anyio.lowlevel.checkpoint()
        self._check(slot)
        refuse_what_it_lacks(turn)
        self._held = LlamaOmniTurn(self._address, turn)
        return self._held

    def _check(self, slot: int) -> None:
        if slot != 0 or (self._held is not None and not self._held.is_released):
            raise LocalProtocolError(f"slot {slot} of 1, or the session before is not released")


class LlamaOmniSession:
    """One session on the server (B8), over an open, unused `channel`, which it closes."""

    def __init__(self, address: Address, channel: Channel) -> None:
        self.opened = Opened(prompt_length=0)
        self.is_released = False
        self._address = address
        self._channel = channel
        self._answers = Answers(0)
        self._interrupted_index: int | None = None
        self._over: str | None = None

    async def begin(self, opening: Opening) -> None:
        """Send `session.init` and wait for `session.created`, for at most `OPEN_WAIT_S`.

        `BackendGone`: the server refuses; without a message if it is busy. `BackendError`: any
        other answer, or none in time.
        """
        with anyio.move_on_after(OPEN_WAIT_S) as patience:
            created = await self._channel.begin(init_message(opening), FULL_DUPLEX)
        if patience.cancelled_caught:
            raise BackendGone(f"expected session.created in {OPEN_WAIT_S:g} s, got none")
        self.opened = Opened(prompt_length=created.metrics.kv_length or 0)
        self._answers = Answers(self.opened.prompt_length)

    async def run_unit(self, unit: Unit, cut: Cut | None = None) -> UnitResult:
        """Send one append and collect its answer.

        `BackendGone`: the session is lost. `BackendError`: it failed, or the server deviates from
        its protocol; release the session.
        """
        if cut is not None:
            raise BackendError("a remote unit cannot be stopped at a given step")
        started_s = anyio.current_time()
        with self._ending_unless_it_ends(unit.index):
            for frame in self._channel.link.receive_waiting():
                self._answers.take_unasked(read_event(frame))
            self._answers.begin()
            with anyio.move_on_after(UNIT_WAIT_S) as patience:
                await self._channel.link.send(append_message(unit))
                await self._gather(unit.index)
            if patience.cancelled_caught:
                raise BackendGone(f"expected an answer in {UNIT_WAIT_S:g} s, got none that ends")
            wall_us = round((anyio.current_time() - started_s) * US_PER_S)
            interrupted = self._interrupted_index == unit.index
            return self._answers.finish(unit, interrupted=interrupted, wall_us=wall_us)

    def interrupt(self, index: int) -> None:
        """Drop the rest of unit `index`'s speech; the server cannot be stopped in it."""
        self._interrupted_index = index

    async def finalize(self, index: int, *, interrupted: bool) -> Finalized:  # noqa: ARG002
        """Do nothing: the server finalizes before it takes the next unit."""
        await anyio.lowlevel.checkpoint()
        return Finalized(index=index, kv_length=self._answers.kv_length)

    async def rollback(self, index: int) -> None:
        """Raise `BackendError`: the protocol has no undo."""
        await anyio.lowlevel.checkpoint()
        raise BackendError(f"unit {index} cannot be undone on a remote server")

    async def release(self) -> None:
        """Close the session on the server and then the WebSocket; a failure is logged."""
        if self.is_released:
            return
        self._over = "it was released"
        try:
            await self._channel.close()
        finally:
            self.is_released = True

    async def _gather(self, index: int) -> None:
        """Take events until the unit is answered."""
        mark = b"%d" % index
        pinged = False
        while True:
            frame = await self._channel.link.receive(QUIET_S)
            if frame is None and not pinged:
                await self._channel.link.ping(mark)
                pinged = True
            elif isinstance(frame, Pong):
                if frame.payload == mark:
                    self._answers.take_silence()
                    return
            elif frame is not None and self._answers.take(read_event(frame)):
                return

    @contextmanager
    def _ending_unless_it_ends(self, index: int) -> Iterator[None]:
        """Allow no call after a unit that did not end well, since it may be half fed."""
        if self._over is not None:
            raise BackendError(f"the session is over, {self._over}")
        self._over = f"unit {index} did not end"
        try:
            with told(self._address):
                yield
        except BackendGone as error:
            _log.warning("unit %d: %s", index, error)  # the only record of the cause
            raise
        self._over = None


def _status_of(body: bytes) -> str | None:
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    status = said.get("status") if isinstance(said, dict) else None
    return status if isinstance(status, str) else None
