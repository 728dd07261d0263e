"""A remote backend: MiniCPM-o behind a llama.cpp-omni server, over its WebSocket.

    backend = LlamaOmniBackend("ws://127.0.0.1:22500")
    await backend.check()
    session = await backend.open(opening, slot=0)

`wire.md` ("Remote backend") has the protocol, `llama_omni_wire` its messages, `llama_omni_link` the
connection, `llama_omni_channel` how a session on the server begins and ends, `llama_omni_answer`
where a unit's answer ends and why, and `llama_omni_chat` a turn of chat.

Rules:

- The server holds one session at a time, and we no second: `slots` is 1. A turn of chat is one too,
  of the mode `turn_based`.
- A unit is one append and its answer. One that is quiet for `QUIET_S` is pinged, and ends with the
  pong; one that is not answered in `UNIT_WAIT_S` has failed.
- The protocol knows no undo, no seed and no stop. So after a failure or a cancelled unit the
  session is over (B3), a full replay cannot be compared, and an interrupted unit runs to its end.
- The server finalizes a unit itself, before it reads the next append: B1 and B2 are its own.
- Releasing closes the session on the server, then the WebSocket, and never raises: what the server
  does not free by the first, the second makes it free. Where it does not even then, the next
  `open` says that it is busy.
- Every way in which the server can stray from wire.md is one `BackendError`, with what was expected
  and what came; an end of the session or connection is a `BackendGone`. None shows what was said.

It does not reconnect to a session, nor start servers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import anyio
import orjson

from protocol.errors import LocalProtocolError
from protocol.model import Cut, Finalized, Opened, Opening, Unit, UnitResult
from protocol.turn import Turn

from .base import BackendError, BackendGone, BackendInfo
from .llama_omni_answer import Answers
from .llama_omni_channel import OK, Channel, told
from .llama_omni_chat import LlamaOmniTurn
from .llama_omni_http import Address, request
from .llama_omni_link import Link, Pong
from .llama_omni_question import refuse_what_it_lacks
from .llama_omni_wire import FULL_DUPLEX, append_message, init_message, read_event

OPEN_WAIT_S: Final = 6.0
"""With connecting and closing below `CLEANUP_WAIT_S`: an opening that hangs fails before it
condemns its slot (B4). A server that loads its model with its first session may need more; it
goes on loading when we left, and is quick to open the next."""
UNIT_WAIT_S: Final = 8.0
"""Below `CLEANUP_WAIT_S` as well; a unit of one second that takes as long has lost its caller."""
QUIET_S: Final = 0.5
"""Answers come while they are made, word by word; and a unit that says nothing costs no more."""
HEALTH_WAIT_S: Final = 5.0
"""`/health` waits for no model."""
CONTEXT_TOKENS_MAX: Final = 40_960
"""What the language model was made for. The server's own is smaller, and it slides its window by
itself, so that this is never reached; the protocol has no way to ask for it."""
US_PER_S: Final = 1_000_000

_log = logging.getLogger("antiphon.model")


class LlamaOmniBackend:
    """One llama.cpp-omni server.

    Args:
        url: `ws://host:port` or `wss://host:port`.

    Raises:
        ValueError: it is no such URL.

    Attributes:
        info: what it is; constant while it runs.
    """

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
        """Ask the server whether it serves, before anybody waits for it.

        Raises:
            BackendGone: it does not answer.
            BackendError: it answers that it does not, or not yet.
        """
        with told(self._address):
            status, body = await request(self._address, "GET", "/health", wait_s=HEALTH_WAIT_S)
            if status != OK:
                raise BackendError(f"expected HTTP {OK}, got HTTP {status}")
            state = _status_of(body)
            if state == "loading":
                raise BackendError("expected a server that is ready, got one that is loading")

    async def aclose(self) -> None:
        """Close what a session that was given up left open (`Closes`)."""
        held, self._held = self._held, None
        if held is not None:
            await held.release()

    async def open(self, opening: Opening, *, slot: int) -> LlamaOmniSession:
        """Open a session, as `Backend.open` says.

        Cancelled, or where it fails, the server is told to forget the session as far as it got.
        """
        self._check(slot)
        with told(self._address):
            link = await Link.connect(self._address)
            session = LlamaOmniSession(self._address, link)
            try:
                await session.begin(opening)
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await session.release()
                raise
        self._held = session
        return session

    async def chat(self, turn: Turn, *, slot: int) -> LlamaOmniTurn:
        """Take a turn, as `Chats.chat` says; the server hears of it with `prefill`."""
        await anyio.lowlevel.checkpoint()
        self._check(slot)
        refuse_what_it_lacks(turn)
        self._held = LlamaOmniTurn(self._address, turn)
        return self._held

    def _check(self, slot: int) -> None:
        if slot != 0 or (self._held is not None and not self._held.is_released):
            raise LocalProtocolError(f"slot {slot} of 1, or the session before is not released")


class LlamaOmniSession:
    """One session on the server (B8); `LlamaOmniBackend.open` makes and begins it.

    Args:
        address: of the server.
        link: open, with nothing said yet; this object closes it.

    Attributes:
        opened: what opening gave.
        is_released: nothing is held any more.
    """

    def __init__(self, address: Address, link: Link) -> None:
        self.opened = Opened(prompt_length=0)
        self.is_released = False
        self._address = address
        self._link = link
        self._channel = Channel(address, link)
        self._answers = Answers(0)
        self._interrupted_index: int | None = None
        self._over: str | None = None

    async def begin(self, opening: Opening) -> None:
        """Say `session.init` and wait for `session.created`, for at most `OPEN_WAIT_S`.

        Raises:
            BackendGone: the server refuses; it does so without a word where it is busy.
            BackendError: it answers something else, or not in time.
        """
        with anyio.move_on_after(OPEN_WAIT_S) as patience:
            created = await self._channel.begin(init_message(opening), FULL_DUPLEX)
        if patience.cancelled_caught:
            raise BackendGone(f"expected session.created in {OPEN_WAIT_S:g} s, got none")
        self.opened = Opened(prompt_length=created.metrics.kv_length or 0)
        self._answers = Answers(self.opened.prompt_length)

    async def run_unit(self, unit: Unit, cut: Cut | None = None) -> UnitResult:
        """Send one append and gather its answer, as `BackendSession.run_unit` says.

        Raises:
            BackendGone: the session is lost.
            BackendError: it failed, or the server strays from its protocol; release the session.
        """
        if cut is not None:
            raise BackendError("a remote unit cannot be stopped at a given step")
        started_s = anyio.current_time()
        with self._ending_unless_it_ends(unit.index):
            for frame in self._link.receive_waiting():
                self._answers.take_unasked(read_event(frame))
            self._answers.begin()
            with anyio.move_on_after(UNIT_WAIT_S) as patience:
                await self._link.send(append_message(unit))
                await self._gather(unit.index)
            if patience.cancelled_caught:
                raise BackendGone(f"expected an answer in {UNIT_WAIT_S:g} s, got none that ends")
            wall_us = round((anyio.current_time() - started_s) * US_PER_S)
            interrupted = self._interrupted_index == unit.index
            return self._answers.finish(unit, interrupted=interrupted, wall_us=wall_us)

    def interrupt(self, index: int) -> None:
        """Let nothing of unit `index` follow it; the server cannot be stopped in it."""
        self._interrupted_index = index

    async def finalize(self, index: int, *, interrupted: bool) -> Finalized:  # noqa: ARG002
        """Do nothing: the server finalizes by itself, and takes no next unit before it has."""
        await anyio.lowlevel.checkpoint()
        return Finalized(index=index, kv_length=self._answers.kv_length)

    async def rollback(self, index: int) -> None:
        """Refuse: the protocol has no undo.

        Raises:
            BackendError: always.
        """
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
        """Take what comes until the unit is answered."""
        mark = b"%d" % index
        pinged = False
        while True:
            frame = await self._link.receive(QUIET_S)
            if frame is None and not pinged:
                await self._link.ping(mark)
                pinged = True
            elif isinstance(frame, Pong):
                if frame.payload == mark:
                    self._answers.take_silence()
                    return
            elif frame is not None and self._answers.take(read_event(frame)):
                return

    @contextmanager
    def _ending_unless_it_ends(self, index: int) -> Iterator[None]:
        """Let nothing follow a unit that did not end well: half of it may be under way."""
        if self._over is not None:
            raise BackendError(f"the session is over, {self._over}")
        self._over = f"unit {index} did not end"
        try:
            with told(self._address):
                yield
        except BackendGone as error:
            _log.warning("unit %d: %s", index, error)  # nobody else tells why it is gone
            raise
        self._over = None


def _status_of(body: bytes) -> str | None:
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    status = said.get("status") if isinstance(said, dict) else None
    return status if isinstance(status, str) else None
