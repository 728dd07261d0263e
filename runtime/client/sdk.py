"""`antiphon.connect`: a session that is set up, of any mode and dialect; `antiphon.transcribe`.

It connects, waits in the queue, sends the init and yields the session once the server has created
it. Before that nothing can be lost, so a temporary failure (refused with 1013, connection lost, no
server) is retried, after a wait that doubles from `BACKOFF_S` to `BACKOFF_S_MAX`, less a random
part of up to a half: the clients of a restarted server must not return all at once. A created
session is never retried: its state is lost, and the caller decides. Left in order, the session is
closed with a `session.close`; left by an error, only the connection is.
"""

from __future__ import annotations

import logging
import random
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from inspect import getdoc
from itertools import count
from types import MappingProxyType
from typing import Any, Final, Literal, overload

import anyio
import attrs

from protocol.values import messages as ms
from protocol.values.errors import ADMISSION_ERRORS
from protocol.values.limits import Mode
from protocol.values.model import INPUT_RATE_HZ, Tool
from protocol.values.openai import LiveSettings
from protocol.values.requests import Init
from protocol.values.state import Gate

from .chat import ChatSession
from .duplex import DuplexSession, Function, TranscriptionSession
from .errors import ClientError, LocalProtocolError, ReportedError, SessionClosedError
from .resuming import RETRIES, RETRIES_MAX, OnConnection, backoff_s, may_pass
from .session import ClientSession
from .session import connect as connect_raw
from .websocket import background

Dialect = Literal["realtime", "duplex-v1", "legacy-duplex", "legacy-chat", "live"]
OnQueue = Callable[[ms.QueuePlace], object]
Opening = AbstractAsyncContextManager[tuple[ClientSession, ms.Created | None]]

_LOG: Final = logging.getLogger("antiphon.client")


@overload
def connect(
    url: str,
    *,
    mode: Literal["audio", "video"],
    dialect: Dialect = ...,
    instructions: str | None = ...,
    model: str = ...,
    init: Init | None = ...,
    tools: Mapping[str | Tool, Function] = ...,
    on_queue: OnQueue | None = ...,
    retries: int = ...,
    tls: ssl.SSLContext | None = ...,
    key: str | None = ...,
    resume: bool = ...,
    on_connection: OnConnection | None = ...,
) -> AbstractAsyncContextManager[DuplexSession]: ...


@overload
def connect(
    url: str,
    *,
    mode: Literal["chat"],
    dialect: Dialect = ...,
    instructions: None = ...,
    init: Init | None = ...,
    on_queue: OnQueue | None = ...,
    retries: int = ...,
    tls: ssl.SSLContext | None = ...,
    key: str | None = ...,
    resume: bool = ...,
    on_connection: OnConnection | None = ...,
) -> AbstractAsyncContextManager[ChatSession]: ...


def connect(
    url: str,
    *,
    mode: Mode,
    dialect: Dialect = "realtime",
    instructions: str | None = None,
    model: str = "",
    init: Init | None = None,
    tools: Mapping[str | Tool, Function] = MappingProxyType({}),
    on_queue: OnQueue | None = None,
    retries: int = RETRIES,
    tls: ssl.SSLContext | None = None,
    key: str | None = None,
    resume: bool = True,
    on_connection: OnConnection | None = None,
) -> AbstractAsyncContextManager[DuplexSession] | AbstractAsyncContextManager[ChatSession]:
    """Open and set up a session: a context of a `ChatSession` in mode=chat, else a `DuplexSession`.

    Errors are raised on entering it, except `LocalProtocolError`. Cancelled or left, it is closed.

    Args:
        url: such as `ws://127.0.0.1:8006`; a missing path is added.
        instructions: the system prompt of a duplex session; a chat has a system message.
        model: a name of the server's model, which only `live` asks for.
        init: all that a session can be set up with, instead of `instructions`.
        tools: functions that a duplex session's model may call, by name or by `antiphon.tool`. They
            run while the session is read, their arguments come by name, and what they return goes
            back by itself; `Created.tools` says whether the model calls them.
        on_queue: called with each place in the queue.
        retries: 0-100, after temporary failures.
        tls: for `wss://`; None trusts the system's authorities.
        key: the API key, if the server needs one; send it only over `wss://`.
        resume: come back to the session when the connection is lost, where the server can.
        on_connection: called with each attempt to come back, and when the session goes on.

    Raises:
        AddressError: the address is invalid.
        CannotConnectError: no server answers there.
        HandshakeRejectedError: the server answered with an HTTP error.
        SessionRefusedError: it has no place for the session.
        SessionClosedError: it closed the connection before there was a session.
        ReportedError: it refused the init.
        RemoteProtocolError: the server broke the protocol.
        LocalProtocolError: the arguments contradict each other.
    """
    chosen = _choose_init(dialect, mode, instructions, model, init)
    if tools and (mode == "chat" or dialect not in ("realtime", "duplex-v1")):
        raise LocalProtocolError(f"no tools in mode={mode} of {dialect}: each turn has its own")
    functions = {_tool_of(name, function): function for name, function in tools.items()}
    if functions:
        chosen = attrs.evolve(chosen, tools=tuple(functions))
    how: dict[str, Any] = {"tls": tls, "key": key, "resume": resume, "on_connection": on_connection}
    connecting = partial(connect_raw, url, mode=mode, dialect=dialect, **how)
    opening = _open(connecting, _checked(retries), chosen, on_queue)
    if mode == "chat":
        return _chat(opening, on_queue, record=chosen.record)
    return _duplex(opening, mode, functions)


@asynccontextmanager
async def transcribe(
    url: str,
    *,
    model: str | None = None,
    record: bool = True,
    retries: int = RETRIES,
    tls: ssl.SSLContext | None = None,
    key: str | None = None,
    resume: bool = True,
    on_connection: OnConnection | None = None,
) -> AsyncIterator[TranscriptionSession]:
    """Open a transcription and choose its model; cancelled or left, it is closed.

    `model` is a name that the server knows its model by; None takes that model, whatever its name,
    which other servers may refuse. With `record` false, which needs a `model`, the server is asked
    not to record it. Other arguments and `ClientError`s as of `connect`; an unknown model is raised
    on reading.
    """
    how: dict[str, Any] = {"tls": tls, "key": key, "resume": resume, "on_connection": on_connection}
    connecting = partial(connect_raw, url, mode="transcription", dialect="transcription", **how)
    async with _open(connecting, _checked(retries), Init(instructions="")) as (raw, created):
        assert created is not None
        if model is not None:
            await raw.choose(model, record=record)
        yield TranscriptionSession(raw, created=created)


def _tool_of(name: str | Tool, function: Function) -> Tool:
    """Make the tool of a function, whose docstring describes it, if only its name is given."""
    return Tool(name=name, description=getdoc(function) or "") if isinstance(name, str) else name


@asynccontextmanager
async def _duplex(
    opening: Opening, mode: Mode, tools: Mapping[Tool, Function]
) -> AsyncIterator[DuplexSession]:
    functions = {tool.name: function for tool, function in tools.items()}
    async with opening as (raw, created), AsyncExitStack() as stack:
        assert created is not None
        tasks = await stack.enter_async_context(background()) if tools else None
        session = DuplexSession(raw, mode=mode, created=created, tools=functions, tasks=tasks)
        yield session
        await session.leave()


@asynccontextmanager
async def _chat(
    opening: Opening, on_queue: OnQueue | None, *, record: bool
) -> AsyncIterator[ChatSession]:
    async with opening as (raw, created):
        session = ChatSession(raw, created=created, on_queue=on_queue, record=record)
        yield session
        await session.leave()


def _choose_init(
    dialect: Dialect, mode: Mode, instructions: str | None, model: str, init: Init | None
) -> Init:
    is_live = dialect == "live"
    if init is not None and (instructions is not None or model):
        raise LocalProtocolError(
            "instructions or model are given twice: as an argument and in init"
        )
    if model and not is_live:
        raise LocalProtocolError(f"no model is asked for in {dialect}")
    live = LiveSettings(model=model, rate_hz=INPUT_RATE_HZ)
    if is_live and init is not None:
        live = attrs.evolve(init.live, coding=live.coding, rate_hz=live.rate_hz)
    chosen = init or Init(instructions=instructions or "", notices=not is_live)
    chosen = attrs.evolve(chosen, live=live) if is_live else chosen
    if mode == "chat" and chosen.instructions:
        raise LocalProtocolError("a chat has no instructions: begin it with a system message")
    return chosen


def _checked(retries: int) -> int:
    if not isinstance(retries, int) or not 0 <= retries <= RETRIES_MAX:
        raise LocalProtocolError(f"retries is {retries!r}, allowed is 0 to {RETRIES_MAX}")
    return retries


@asynccontextmanager
async def _open(
    connecting: Callable[[], AbstractAsyncContextManager[ClientSession]],
    retries: int,
    init: Init,
    on_queue: OnQueue | None = None,
) -> AsyncIterator[tuple[ClientSession, ms.Created | None]]:
    """Open until it succeeds, fails for good, or was tried often enough."""
    created = None
    async with AsyncExitStack() as stack:
        for number in count():
            try:
                async with AsyncExitStack() as attempt:
                    raw = await attempt.enter_async_context(connecting())
                    if raw.dialect != "legacy-chat":  # whose only request sets it up
                        created = await _set_up(raw, init, on_queue)
                    await stack.enter_async_context(attempt.pop_all())
                    break
            except ClientError as error:
                if number == retries or not may_pass(error):
                    raise
                wait_s = backoff_s(number, random.random())
                _LOG.info("connecting again in %.1f s: %s", wait_s, error)
            await anyio.sleep(wait_s)
        yield raw, created


async def _set_up(raw: ClientSession, init: Init, on_queue: OnQueue | None) -> ms.Created:
    async for message in raw:
        match message:
            case ms.Queued(place=place) | ms.QueueUpdate(place=place) if on_queue:
                on_queue(place)
            case ms.QueueDone() if raw.connection.gate is Gate.CONNECTED:
                with suppress(SessionClosedError):  # the messages still to be read say why
                    await raw.init(init)
            case ms.ErrorReport() if message.code not in ADMISSION_ERRORS:
                raise ReportedError(message)
            case ms.Created():
                return message
    raise SessionClosedError(*raw.closed_with)
