"""A remote backend: MiniCPM-o behind a llama.cpp-omni server, over its WebSocket.

    backend = LlamaOmniBackend("ws://127.0.0.1:22500")
    await backend.check()
    session = await backend.open(opening, slot=0)

Sources: the protocol's pages (OpenBMB/MiniCPM-o-Demo, docs/backend-protocol), and its C++ server
(tc-mb/llama.cpp-omni, tools/server/ws_handler.cpp; pull requests 54 and 61).

- The server holds one session, so `slots` is 1.
- Release closes the session on the server, then the WebSocket, and never raises.
- Any deviation from the protocol is a `BackendError` with the expected and the received; an ended
  session or connection is a `BackendGone`. Neither shows content. There is no reconnect.

*A unit* is one append and its answer. After `QUIET_S` of quiet it is pinged, and ends with the
pong; without an answer in `UNIT_WAIT_S` it has failed. The protocol has no undo, seed or stop. So a
failed or cancelled unit ends the session (B3), a full replay is not comparable, and an interrupted
unit runs to its end. The server finalizes a unit before it reads the next append (B1, B2). It does
not pair answers with appends. A unit's answer ends (B9):

1. with `listen`: the model has decided. Text before it in the unit ends a turn.
2. with `response.done`, sent after each unit with speech. Its `turn_end` is also set within a turn,
   so only the next `listen` ends the turn.
3. A `response.done` after a `listen`, perhaps with the last bytes of a broken character, carries
   the listen's `response_id` and is ignored, whenever it comes.
4. A unit with neither speech nor listen gets no answer, and servers before pull request 61 marked
   no end of speech. So a quiet unit is pinged: the server reads its WebSocket only between units,
   so a pong ends the unit. Without text it listened, else it spoke, within a turn.

Sound comes from another thread, also after the unit's end. It is played at a second per unit, the
rest kept for later units, so a listening unit may still speak; the turn ends with its last sound.
Within a turn a unit carries a whole second, or only text (`UnitResult.pcm`). After forced listening
(B6) the server's voice continues, so sound is dropped until the next text. An interrupted unit's
answer runs to its end; the session withholds it. Other events are errors.

*A chat turn* is a session of mode `turn_based`, for one append: our turn carries the whole
conversation, so each turn has its own session.
- The prefill ends with the first word of the answer: the server sends nothing before.
- Only the session's end stops an answer: an interrupt stops waiting, and `release` closes it.
- The server may still be freeing the last session: a refusal is retried, as an opening is.
- A piece is a delta without its tokens, so pieces are counted if the server omits `n_tokens`, or
  the answer was cut. A listen is ignored, as is sound that was not requested.
- A server that sends nothing new in time, or too much, or ends the session, fails only this turn.
  It counts as gone only if it is unreachable.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import anyio
import attrs
import llama_omni_wire as wire
import orjson
from llama_omni_link import OK, Address, Channel, Pong, gone, naming_server, request

from protocol.values import model as md
from protocol.values.errors import LocalProtocolError
from protocol.values.limits import TURN_WAIT_S
from protocol.values.records import digest
from runtime.model.backends.base import (
    OPEN_PAUSE_S,
    OPEN_TRIES,
    BackendError,
    BackendGone,
    BackendInfo,
    Emit,
    ignore,
)

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
        with naming_server(self._address):
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

    async def open(self, opening: md.Opening, *, slot: int) -> LlamaOmniSession:
        """Open a session; on failure or cancellation, release it on the server."""
        self._check(slot)
        with naming_server(self._address):
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

    async def chat(self, *, slot: int) -> LlamaOmniTurn:
        """Take the slot for a turn."""
        await anyio.lowlevel.checkpoint()
        self._check(slot)
        self._held = LlamaOmniTurn(self._address)
        return self._held

    def _check(self, slot: int) -> None:
        if slot != 0 or (self._held is not None and not self._held.is_released):
            raise LocalProtocolError(f"slot {slot} of 1, or the session before is not released")


class LlamaOmniSession:
    """One session on the server (B8), over an open, unused `channel`, which it closes."""

    def __init__(self, address: Address, channel: Channel) -> None:
        self.opened = md.Opened(prompt_length=0)
        self.is_released = False
        self._address = address
        self._channel = channel
        self._answers = Answers(0)
        self._interrupted_index: int | None = None
        self._over: str | None = None

    async def begin(self, opening: md.Opening) -> None:
        """Send `session.init` and wait for `session.created`, for at most `OPEN_WAIT_S`.

        `BackendGone`: the server refuses; without a message if it is busy. `BackendError`: any
        other answer, or none in time.
        """
        with anyio.move_on_after(OPEN_WAIT_S) as patience:
            created = await self._channel.begin(wire.init_message(opening), wire.FULL_DUPLEX)
        if patience.cancelled_caught:
            raise BackendGone(f"expected session.created in {OPEN_WAIT_S:g} s, got none")
        self.opened = md.Opened(prompt_length=created.metrics.kv_length or 0)
        self._answers = Answers(self.opened.prompt_length)

    async def run(self, unit: md.Unit, cut: md.Cut | None = None) -> md.UnitResult:
        """Send one append and collect its answer.

        `BackendGone`: the session is lost. `BackendError`: it failed, or the server deviates from
        its protocol; release the session.
        """
        if cut is not None:
            raise BackendError("a remote unit cannot be stopped at a given step")
        started_s = anyio.current_time()
        with self._ending_unless_it_ends(unit.index):
            for frame in self._channel.receive_waiting():
                self._answers.take_unasked(wire.read_event(frame))
            self._answers.begin()
            with anyio.move_on_after(UNIT_WAIT_S) as patience:
                await self._channel.send(wire.append_message(unit))
                await self._gather(unit.index)
            if patience.cancelled_caught:
                raise BackendGone(f"expected an answer in {UNIT_WAIT_S:g} s, got none that ends")
            wall_us = round((anyio.current_time() - started_s) * wire.US_PER_S)
            interrupted = self._interrupted_index == unit.index
            return self._answers.finish(unit, interrupted=interrupted, wall_us=wall_us)

    def interrupt(self, index: int) -> None:
        """Drop the rest of unit `index`'s speech; the server cannot be stopped in it."""
        self._interrupted_index = index

    async def finalize(self, index: int, *, interrupted: bool) -> md.Finalized:
        """Do nothing: the server finalizes before it takes the next unit."""
        await anyio.lowlevel.checkpoint()
        return md.Finalized(index=index, kv_length=self._answers.kv_length)

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
            frame = await self._channel.receive(QUIET_S)
            if frame is None and not pinged:
                await self._channel.ping(mark)
                pinged = True
            elif isinstance(frame, Pong):
                if frame.payload == mark:
                    self._answers.take_silence()
                    return
            elif frame is not None and self._answers.take(wire.read_event(frame)):
                return

    @contextmanager
    def _ending_unless_it_ends(self, index: int) -> Iterator[None]:
        """Allow no call after a unit that did not end well, since it may be half fed."""
        if self._over is not None:
            raise BackendError(f"the session is over, {self._over}")
        self._over = f"unit {index} did not end"
        try:
            with naming_server(self._address):
                yield
        except BackendGone as error:
            _log.warning("unit %d: %s", index, error)  # the only record of the cause
            raise
        self._over = None


def _status_of(body: bytes) -> str | None:
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    status = answer.get("status") if isinstance(answer, dict) else None
    return status if isinstance(status, str) else None


# -- the answers of units -----------------------------------------------------------------------

SECOND_BYTES: Final = md.OUTPUT_RATE_HZ * md.SAMPLE_BYTES
VOICE_BYTES_MAX: Final = 60 * SECOND_BYTES
"""Sound waiting to be played: a turn of a minute, generated as fast as the server can."""


class Answers:
    """One session's answers, unit by unit: begin, take until it is answered, finish."""

    def __init__(self, kv_length: int) -> None:
        self.kv_length = kv_length
        self._voice = bytearray()
        self._is_muted = False
        self._is_sounding = False
        self._listened_id: str | None = None
        self.begin()

    def take_unasked(self, event: wire.RemoteEvent) -> None:
        """Take an event between units: late sound, or the trailing events of a listen.

        `BackendGone`: the server has ended the session; `BackendError`: it is an unrequested
        answer.
        """
        if isinstance(event, wire.Audio):
            self._take_sound(event)
        elif isinstance(event, wire.Closed):
            raise gone(event)
        elif not self._trails(event):
            raise BackendError(f"expected nothing between units, got {_name(event)}")

    def begin(self) -> None:
        """Begin a unit, before its append is sent."""
        self._text = ""
        self._is_turn_over = False
        self._metrics = wire.Metrics()

    def take(self, event: wire.RemoteEvent) -> bool:
        """Take an event of the unit; return whether it ends the unit's answer.

        `BackendGone`: the server has ended the session; `BackendError`: it must not come now, or is
        too large.
        """
        if self._trails(event):
            return False
        match event:
            case wire.Closed():
                raise gone(event)
            case wire.Created():
                raise BackendError("expected an answer, got session.created once more")
            case wire.Audio():
                self._take_sound(event)
            case wire.Text():
                self._note(event.metrics)
                self._is_muted = False
                self._take_text(event.text)
            case wire.Done():
                self._note(event.metrics)
                self._take_text("" if self._text else event.text)
                return True
            case wire.Listen():
                self._refuse_second(event)
                self._note(event.metrics)
                self._listened_id = event.response_id
                self._is_turn_over = True
                return True
        return False

    def take_silence(self) -> None:
        """Note that the server ended the unit without saying how."""
        self._is_turn_over = not self._text and not self._voice

    def finish(self, unit: md.Unit, *, interrupted: bool, wall_us: int) -> md.UnitResult:
        """Make the result of an answered unit; if `interrupted`, its further speech is dropped."""
        text = "" if unit.force_listen else self._text
        pcm = b"" if unit.force_listen else self._play_out(text)
        is_listen = not text and not pcm
        is_last = self._is_turn_over and not self._voice
        self._is_sounding = not is_listen and not is_last and (self._is_sounding or bool(pcm))
        if interrupted or unit.force_listen:
            self._mute()
        return md.UnitResult(
            index=unit.index,
            is_listen=is_listen,
            text=text,
            pcm=pcm,
            end_of_turn=is_last and not is_listen,
            kv_length=self.kv_length,
            input_hash=digest((unit.pcm, unit.frames, unit.force_listen, unit.max_slice_nums)),
            vision_slices=self._metrics.vision_slices,
            vision_tokens=self._metrics.vision_tokens,
            costs=self._metrics.costs(wall_us=wall_us),
        )

    def _play_out(self, text: str) -> bytes:
        """Take a unit's second of the voice, float32 LE; less at a turn's start and end."""
        is_amid = self._is_sounding and not self._is_turn_over
        if is_amid and text and len(self._voice) < SECOND_BYTES:
            return b""
        share = bytes(self._voice[:SECOND_BYTES])
        del self._voice[:SECOND_BYTES]
        return share

    def _take_sound(self, event: wire.Audio) -> None:
        self._note_length(event.metrics)
        if self._is_muted:
            return
        self._voice += event.pcm
        if len(self._voice) > VOICE_BYTES_MAX:
            limit_s = VOICE_BYTES_MAX // SECOND_BYTES
            raise BackendError(f"expected at most {limit_s} s of sound to wait, got more")

    def _take_text(self, text: str) -> None:
        self._text += text
        if len(self._text) > wire.TEXT_CHARS_MAX:
            raise BackendError(
                f"expected at most {wire.TEXT_CHARS_MAX} characters a unit, got more"
            )

    def _note(self, metrics: wire.Metrics) -> None:
        self._metrics = metrics
        self._note_length(metrics)

    def _note_length(self, metrics: wire.Metrics) -> None:
        if metrics.kv_length is not None:
            self.kv_length = metrics.kv_length

    def _mute(self) -> None:
        self._voice.clear()
        self._is_muted = True
        self._is_sounding = False

    def _trails(self, event: wire.RemoteEvent) -> bool:
        """Whether an event belongs to the response that the last listen ended."""
        if not isinstance(event, wire.Done | wire.Text) or event.response_id is None:
            return False
        return event.response_id == self._listened_id

    def _refuse_second(self, event: wire.Listen) -> None:
        if event.response_id is not None and event.response_id == self._listened_id:
            raise BackendError("expected an answer, got a second listen for the unit before")


def _name(event: wire.RemoteEvent) -> str:
    match event:
        case wire.Created():
            return "session.created"
        case wire.Done():
            return "response.done"
        case wire.Closed():
            return "session.closed"
        case _:
            return f"a delta of kind {type(event).__name__.lower()}"


# -- a chat turn --------------------------------------------------------------------------------

PREFILL_WAIT_S: Final = TURN_WAIT_S - 20.0
"""A server in the other mode reloads its model. Below the session machine's own limit."""
PIECE_WAIT_S: Final = 60.0
"""The server waits up to 3 s for its own sound; a slow one takes longer per word."""
ANSWER_S_MAX: Final = 1800.0
"""8192 tokens, the maximum of a request, at 5 a second."""
SPEECH_BYTES_MAX: Final = 1800 * SECOND_BYTES
"""Speech as long as an answer may take."""
_AnswerEvent = wire.Listen | wire.Text | wire.Audio | wire.Done


class LlamaOmniTurn:
    """One turn on the server, which must not exceed the server's abilities."""

    def __init__(self, address: Address) -> None:
        self.is_released = False
        self._address = address
        self._turn: md.Turn
        self._channel: Channel | None = None
        self._is_reached = False
        self._awaited = "session.created"
        self._scope: anyio.CancelScope | None = None
        self._is_cut = False
        self._texts: list[str] = []
        self._chars = self._pieces = self._speech_bytes = 0
        self._kv_length = 0

    async def run(
        self, turn: md.Turn, cut: md.Cut | None = None, *, emit: Emit = ignore
    ) -> md.TurnResult:
        """Ask, and emit the answer; `BackendError` for any `cut`."""
        if cut is not None:
            raise BackendError("a remote answer cannot be stopped at a given token")
        wire.refuse_what_it_lacks(turn)
        self._turn = turn
        return await self._generate(await self._prefill(emit), emit)

    async def _prefill(self, emit: Emit) -> _AnswerEvent:
        """Open a session, ask, and wait for the first word, for `PREFILL_WAIT_S`."""
        began_s = anyio.current_time()
        with self._turn_errors():
            with self._bounded(PREFILL_WAIT_S) as scope:
                channel = await self._begin()
                await channel.send(wire.question_message(self._turn))
                first = await self._receive()
            if self._is_cut:
                raise BackendError("the turn was cut")
            if scope.cancelled_caught:
                text = f"expected {self._awaited} in {PREFILL_WAIT_S:g} s, got none"
                raise BackendError(text)
        prefill = md.Prefill(
            index=self._turn.index,
            input_tokens=first.metrics.kv_length or 0,
            input_hash=digest(self._turn.messages),
            cost_us=first.metrics.prefill_us or _us_since(began_s),
        )
        emit(prefill)
        return first

    async def _generate(self, event: _AnswerEvent, emit: Emit) -> md.TurnResult:
        """Emit the answer, from its first event, for at most `ANSWER_S_MAX`."""
        began_s, done = anyio.current_time(), None
        with self._turn_errors():
            with self._bounded(ANSWER_S_MAX) as scope:
                while not isinstance(event, wire.Done):
                    self._take(event, emit)
                    event = await self._receive_piece()
                self._finish(event, emit)
                done = event
            if done is None and not self._is_cut:
                assert scope.cancelled_caught
                raise BackendError(f"expected an answer that ends in {ANSWER_S_MAX:g} s, got none")
        return self._result(done, _us_since(began_s))

    def interrupt(self, index: int = -1) -> None:
        """Stop waiting for the turn."""
        self._is_cut = True
        if self._scope is not None:
            self._scope.cancel()

    async def release(self) -> None:
        """Close the session on the server and its WebSocket; a failure is logged."""
        if self.is_released:
            return
        self.interrupt()
        try:
            await self._let_go()
        finally:
            self.is_released = True

    # -- inside ---------------------------------------------------------------------------------

    @contextmanager
    def _turn_errors(self) -> Iterator[None]:
        """Name the server in errors; once reached, its end fails only this turn."""
        try:
            with naming_server(self._address):
                yield
        except BackendGone as error:
            if not self._is_reached:
                raise
            raise BackendError(str(error)) from error

    @contextmanager
    def _bounded(self, wait_s: float) -> Iterator[anyio.CancelScope]:
        """Bound a wait, by time and by `interrupt`."""
        with anyio.move_on_after(wait_s) as self._scope:
            if self._is_cut:
                self._scope.cancel()
            yield self._scope

    async def _begin(self) -> Channel:
        """Open a session; a refusal is retried, since the last one may still be being freed."""
        await anyio.lowlevel.checkpoint()  # begin nothing for a cut turn
        tries = 0
        while True:
            self._is_reached = False
            try:
                self._channel = await Channel.connect(self._address)
                self._is_reached = True
                await self._channel.begin(wire.chat_init_message(self._turn), wire.TURN_BASED)
            except BackendGone:
                await self._let_go()
                tries += 1
                if tries == OPEN_TRIES:
                    raise
            else:
                self._awaited = "an answer"
                return self._channel
            await anyio.sleep(OPEN_PAUSE_S * 2 ** (tries - 1))

    async def _let_go(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def _receive(self) -> _AnswerEvent:
        """Wait for the server's next event.

        `BackendGone`: the session or its connection has ended; `BackendError`: the event must not
        come now.
        """
        assert self._channel is not None
        event = await self._channel.receive_event()
        if isinstance(event, wire.Closed):
            raise gone(event)
        if isinstance(event, wire.Created):
            raise BackendError("expected an answer, got session.created once more")
        return event

    async def _receive_piece(self) -> _AnswerEvent:
        """Wait for a continuation of the answer, for at most `PIECE_WAIT_S`."""
        with anyio.move_on_after(PIECE_WAIT_S) as patience:
            while True:
                event = await self._receive()
                if isinstance(event, wire.Done) or self._is_piece(event):
                    return event
        assert patience.cancelled_caught
        raise BackendError(f"expected more of an answer in {PIECE_WAIT_S:g} s, got none")

    def _is_piece(self, event: _AnswerEvent) -> bool:
        match event:
            case wire.Text(text=text):
                return bool(text)
            case wire.Audio(pcm=pcm):
                return bool(pcm) and self._turn.speech is not None
        return False

    def _take(self, event: _AnswerEvent, emit: Emit) -> None:
        """Emit a piece of the answer."""
        self._kv_length = event.metrics.kv_length or self._kv_length
        if not self._is_piece(event):
            return
        text = event.text if isinstance(event, wire.Text) else ""
        pcm = event.pcm if isinstance(event, wire.Audio) else b""
        self._chars += len(text)
        self._speech_bytes += len(pcm)
        if self._chars > wire.ANSWER_CHARS_MAX:
            text = f"expected at most {wire.ANSWER_CHARS_MAX} characters of answer, got more"
            raise BackendError(text)
        if self._speech_bytes > SPEECH_BYTES_MAX:
            limit_s = SPEECH_BYTES_MAX // SECOND_BYTES
            raise BackendError(f"expected at most {limit_s} s of speech, got more")
        self._texts.append(text)
        emit(md.TurnChunk(index=self._turn.index, step=self._pieces, text=text, pcm=pcm))
        self._pieces += 1

    def _finish(self, done: wire.Done, emit: Emit) -> None:
        """Take the end, whose text is the whole answer, new if nothing came before."""
        self._take(wire.Text(text="" if self._chars else done.text, metrics=done.metrics), emit)

    def _result(self, done: wire.Done | None, wall_us: int) -> md.TurnResult:
        """Make the result of the answer; None: it was cut."""
        metrics = wire.Metrics() if done is None else done.metrics
        tokens = self._pieces if metrics.tokens is None else metrics.tokens
        reason: md.StopReason = "turn_end"
        if done is None:
            reason = "interrupted"
        elif done.reason == "length":
            reason = "length"
        return md.TurnResult(
            index=self._turn.index,
            text="".join(self._texts),
            reason=reason,
            generated_tokens=tokens,
            kv_length=self._kv_length,
            cut=self._pieces if done is None else None,
            costs=attrs.evolve(metrics.costs(wall_us=wall_us), prefill_us=0),
        )


def _us_since(began_s: float) -> int:
    return round((anyio.current_time() - began_s) * wire.US_PER_S)
