"""Where a server's connections go: through the gate, then to a session or the API.

A WebSocket passes the gate, is routed by its address (`routing`), checked against its key's modes
and quota, and becomes a session: `Gateway.on_websocket`, then `Server.handle`. Other HTTP goes to
one application behind the same gate (`Gateway.app`). Both start before the model: until it is
loaded, sessions are refused with `service_unavailable`.

A client may resume its session on another connection (`resume_connection`), or attach to a running
session of `live`, and only listen (`SidebandServer`, `api.tail`).
`/v1/live/sessions/{id}/attach` is for the session's own key and for `admin`. It is a view of the
session's log, like its live tail over HTTP: it changes neither the session nor its timing. So only
a session that is recorded has it; others, and those that the key may not see, are a 404. A client
that reads too slowly is dropped, as a session's own client is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing, closing
from functools import partial
from http import HTTPStatus
from typing import Final, NoReturn

import anyio
import anyio.to_thread
import attrs
import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp

from protocol.values import errors
from protocol.values.frames import Frame, Received, Shortened
from protocol.values.limits import MODES, OF_MODE, Mode
from protocol.values.messages import EndReason, ErrorReport, ResumeRequest
from protocol.wire.codec import parse_frame
from protocol.wire.dialects import LIVE, OMNI, OPENAI, OPENAI_TRANSCRIPTION, first_dialect
from protocol.wire.dialects.omni import NOT_RESUMED, OmniResume
from protocol.wire.dialects.omni import RESUME as OMNI_RESUME
from protocol.wire.dialects.shared import RESUME, SESSION_RESUME, SESSION_UPDATE
from recorder.read.reader import next_seq
from recorder.storage.remote import RemoteStore
from recorder.storage.store import LogInfo
from recorder.write.writer import Recorder

from ..access.gate import AccessMiddleware, Admitted, Denied, answer_denied, open_gate, principal_of
from ..access.keys import Key
from ..api.adapters import LocalClient, TranslatedWebSocket
from ..api.half_duplex import HALF_DUPLEX_PATH, HalfDuplex
from ..api.openai import Calls, OpenAIApi
from ..api.pages import ADDRESS as CONSOLE
from ..api.pages import Console, DemoPages, Pages, is_public
from ..api.recordings import NO_RECORDING, Marks, Recordings
from ..api.requests import ConcurrencyLimit, NotOnThisGateway, in_thread
from ..api.routes import Api, WorkersApi
from ..api.tail import Sideband, Tail, follow, refused
from ..api.twilio import TWILIO_PATH, Call, Twilio
from ..api.views import LoadViewer
from ..api.voices import Voices
from ..link.link import read_token
from ..media.decoder import MediaDecoder
from ..media.voices import VoiceLibrary
from ..net.connection import Connection, OnMessages, WebSocket, WebSocketClosed
from ..net.http import CodedError, body_of, error_body, make_app
from ..net.limits import Counters, origin_of
from ..net.listener import WebSocketRequest, tasks_living
from ..session.forking import ForkRefused
from ..session.journal import ready_now
from ..session.peer import EndedSession
from ..session.server import NO_SESSION, Server
from ..session.setup import VERSION, Parent, model_names
from ..settings.settings import Settings
from ..slots.workers import workers_wanted
from ..telemetry.metrics import ServerTelemetry, make_telemetry
from ..telemetry.watching import ServerStatus, SessionStatus
from .relay import AWAY, NOT_HERE, Relay, is_relayed
from .retention import make_retainer, make_uploader
from .routing import NotServedError, Route, attached_to, route

# -- clients that resume a session ----------------------------------------------------------------


HELLO_S: Final = 10.0
"""For the client's first message: it has all that it needs to send it at once."""
HELLO_BYTES_MAX: Final = 4096
"""It is a token and a number."""


async def resume_connection(server: Server, websocket: WebSocket, to: Route, owner: str) -> None:
    """Let a client go on with its session, or close with 1008 and the reason."""
    request = await _read_resume_request(websocket)
    if isinstance(request, ResumeRequest):
        refusal = await server.resume(websocket, to.resume, to.mode, owner, request)
    else:
        refusal = request
    if refusal:
        is_open = not server.admission.is_draining
        await websocket.close(errors.CLOSE_POLICY if is_open else errors.CLOSE_RESTART, refusal)


async def _read_resume_request(websocket: WebSocket) -> ResumeRequest | str:
    """Read the first message, or say what is wrong with it; `WebSocketClosed` if none comes."""
    frame = None
    with anyio.move_on_after(HELLO_S):
        frame = await websocket.receive()
    try:
        body = parse_frame(_frame_of(frame), HELLO_BYTES_MAX)
        if body.get("type") != SESSION_RESUME:
            return f"the first message here is {SESSION_RESUME}"
        request: ResumeRequest = RESUME.parse(body)
    except errors.FrameError as error:
        return error.reason
    except errors.FieldError as error:
        return error.message
    return request


def _frame_of(received: Received) -> Frame:
    return None if isinstance(received, Shortened) else received


@attrs.frozen
class _PeekedWebSocket:
    """A WebSocket whose first message was read before its session began."""

    websocket: WebSocket
    first: Received
    _unread: list[Received] = attrs.field(init=False)

    @_unread.default
    def _all(self) -> list[Received]:
        return [self.first]

    async def receive(self) -> Received:
        return self._unread.pop() if self._unread else await self.websocket.receive()

    async def deliver(self, on_messages: OnMessages) -> NoReturn:
        if self._unread and (waits := on_messages(self._unread.pop())) is not None:
            await waits
        await self.websocket.deliver(on_messages)

    async def send(self, *frames: str) -> None:
        await self.websocket.send(*frames)

    async def close(self, code: int, reason: str) -> None:
        await self.websocket.close(code, reason)

    async def abort(self) -> None:
        await self.websocket.abort()


async def resume_or_begin(
    server: Server, websocket: WebSocket, to: Route, owner: str
) -> WebSocket | None:
    """Let a client of vLLM-Omni's protocol go on with the session that its first message names.

    Returns:
        The connection of one that wants a new session; else None, and the connection is over.
    """
    frame = None
    with anyio.move_on_after(HELLO_S) as waiting:
        frame = await websocket.receive()
    if waiting.cancelled_caught:
        return websocket
    try:
        body = parse_frame(_frame_of(frame), HELLO_BYTES_MAX)
        if body.get("type") != SESSION_RESUME:
            return _PeekedWebSocket(websocket, frame)
        resume: OmniResume = OMNI_RESUME.parse(body)
    except errors.FrameError:
        return _PeekedWebSocket(websocket, frame)
    except errors.FieldError as error:
        refusal = error.message
    else:
        is_over = isinstance(server.find(resume.recording_id), EndedSession)
        name, mode = resume.recording_id, to.mode
        refusal = NO_SESSION
        if not is_over:
            refusal = await server.resume(websocket, name, mode, owner, resume.request)
    if refusal:
        report = ErrorReport(code=errors.ErrorCode.NOT_READY, message=refusal)
        await websocket.send(NOT_RESUMED.encode(report))
        await websocket.close(errors.CLOSE_POLICY, refusal)
    return None


# -- clients that attach ---------------------------------------------------------------------------


ATTACHED_MAX: Final = 16
"""Each may hold 16 MiB of its log, and takes part of a thread, as a live tail does."""
ATTACHED_PER_KEY_MAX: Final = 4
"""One client leaves some for the others."""
NOT_ATTACHED: Final = "no recorded session of the live api runs by that name"
LOST: Final = "the recording has ended before its session"


class SidebandServer:
    """Serves the attached clients of one server; `server` returns None while the model loads."""

    def __init__(
        self, server: Callable[[], Server | None], recordings: Recordings, *, stall_s: float
    ) -> None:
        self._server = server
        self._recordings = recordings
        self._stall_s = stall_s
        self._places = ConcurrencyLimit(ATTACHED_MAX, ATTACHED_PER_KEY_MAX)
        self._attached = 0
        self._all_left = anyio.Event()

    def find(self, name: str, principal: Key) -> SessionStatus | None:
        """The running session of a name, its own or its recording's, if the client may see it."""
        server = self._server()
        for it in () if server is None else server.roster(lambda _: 0):
            if name in {it.session_id, it.recording_id} and principal.may_see(it.owner):
                return it
        return None

    async def serve(
        self, request: WebSocketRequest, admitted: Admitted, session: SessionStatus
    ) -> None:
        """Attach a client to a session that it may see, until either leaves."""
        try:
            with self._places.take_for(admitted.principal, request.peer.host):
                info = await self._log_of(session)
                from_seq = await in_thread(partial(_next_seq, info))
                websocket: WebSocket = await request.accept(subprotocol=admitted.subprotocol)
                self._attached += 1
                try:
                    await self._carry(websocket, info, from_seq)
                finally:
                    self._attached -= 1
                    self._all_left.set()
        except HTTPException as error:
            headers = tuple((error.headers or {}).items())
            await request.reject(error.status_code, body_of(error), headers)

    async def wait_until_left(self) -> None:
        """Wait until no client is attached: a session that ends ends its attached clients."""
        while self._attached:
            self._all_left = anyio.Event()
            await self._all_left.wait()

    async def _log_of(self, session: SessionStatus) -> LogInfo:
        info = None
        if session.dialect == LIVE.name:
            info = await self._recordings.written(session.recording_id)
        if info is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, NOT_ATTACHED)
        return info

    async def _carry(self, websocket: WebSocket, info: LogInfo, from_seq: int) -> None:
        """Send what the log holds, and refuse what the client sends."""

        async def answer(*frames: Received) -> None:
            for frame in frames:
                try:
                    connection.send(refused(_frame_of(frame)), ready_now)
                except errors.FrameError as error:
                    connection.close(error.close_code, error.reason, ready_now)

        connection = Connection(
            websocket,
            on_frames=answer,
            on_gone=lambda _: None,
            on_send_failed=lambda: None,
            stall_s=self._stall_s,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_send_sideband, connection, info, from_seq)
            await connection.run()
            tasks.cancel_scope.cancel()


async def _send_sideband(connection: Connection, info: LogInfo, from_seq: int) -> None:
    sideband = Sideband(from_seq)
    try:
        async with aclosing(follow(Tail(info, sideband.frames))) as batches:
            async for frames in batches:
                for frame in frames:
                    connection.send(frame, ready_now)
                if sideband.is_over:
                    break
    except OSError:
        pass  # The log cannot be read any more.
    if sideband.is_over:
        connection.close(errors.CLOSE_NORMAL, "", ready_now)
    else:
        connection.close(errors.CLOSE_INTERNAL_ERROR, LOST, ready_now)


def _next_seq(info: LogInfo) -> int:
    with closing(info.open()) as source:
        return next_seq(source)


# -- the gateway -----------------------------------------------------------------------------------


LOADING: Final = "the model is being loaded"
_UNAVAILABLE: Final = errors.ErrorCode.SERVICE_UNAVAILABLE
_LOG: Final = logging.getLogger("antiphon.server")


class Gateway:
    """Routes the requests of a port.

    Args:
        settings: the keys that they name are read here.
        recorder: writes the logs; None where nothing is recorded.
        load_viewer: loads what makes the views of a recording; None for no views.
        remote: the object store of the recordings; None for no store.

    Attributes:
        server: None while the model loads.
        decoder: of clients' media.
        has_key: whether a client of this name may still connect.
        telemetry: the server's telemetry.
        attached_left: waits until all attached clients have left.
        drain: begins the end of the server, and logs who asked for it; set by who can end it.

    Raises:
        KeyFileError: the keys cannot be read.
        TracesMissingError: traces are set, and their package is not installed.
        ValueError: an origin is invalid, `gateway_ca` holds no certificates, or
            `twilio_token_file` no token.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        counters: Counters | None = None,
        recorder: Recorder | None = None,
        load_viewer: LoadViewer | None = None,
        voices: VoiceLibrary | None = None,
        remote: RemoteStore | None = None,
    ) -> None:
        self._settings = settings
        self._gate = open_gate(settings)
        file = settings.twilio_token_file
        self._twilio = Twilio(self._gate, "" if file is None else read_token(file))
        self._calls = Calls(settings.webrtc_door, self._check)
        self._relay = Relay(settings)
        self.has_key = self._gate.has_key
        self._counters = counters or Counters()
        self._recorder = None if settings.record_to is None else recorder
        self._voices = voices
        self.decoder = MediaDecoder(voices)
        console = CONSOLE if settings.pages else ""
        self._recordings = Recordings(settings.record_to, load_viewer, remote, console)
        has_views = settings.record_to is not None and load_viewer is not None
        self._console = Console(settings, lambda: self.server, has_views=has_views)
        self._sideband = SidebandServer(
            lambda: self.server, self._recordings, stall_s=settings.stall_s
        )
        self.attached_left = self._sideband.wait_until_left
        self.drain: Callable[[Server, str], None]
        self._uploader = make_uploader(settings, remote)
        self._retainer = make_retainer(settings, self._uploader)
        self._began_s = time.monotonic()
        self.model = settings.model
        self.server: Server | None = None
        self.telemetry: ServerTelemetry = make_telemetry(
            self.status, version=VERSION, traces=settings.traces
        )

    def _models(self) -> tuple[str, ...]:
        server = self.server
        return () if server is None else model_names(self._settings, server.workers.info)

    def app(self) -> ASGIApp:
        """Make the application for requests other than WebSockets."""
        api = Api(
            lambda: self.server,
            self.status,
            self.telemetry.metrics,
            self._models,
            self._begin_drain,
        )
        openai = OpenAIApi(self._settings, self._models, self._begin, self._check, self.decoder)
        workers = WorkersApi(lambda: self.server)
        marks = Marks(lambda: self.server, self._recordings)
        voices = Voices(self._voices, self._settings.default_voice)
        folder = self._settings.static
        demo = DemoPages(lambda: self.server, self._voices).answers()
        pages = [] if folder is None else [Pages(folder, demo).route()]
        app = make_app(
            self.readiness,
            [
                *api.routes(),
                *openai.routes(),
                *self._calls.routes(),
                *self._twilio.routes(),
                *workers.routes(),
                *marks.routes(),
                *self._recordings.routes(),
                *voices.routes(),
                *self._console.routes(),
                *pages,
            ],
            speech=self.speech,
            handlers={Denied: answer_denied, NotOnThisGateway: self._relay.relay_http},
        )
        return AccessMiddleware(
            app,
            self._gate,
            secure=self._settings.tls_cert is not None,
            is_public=lambda path: (
                self._console.is_public(path)
                or self._twilio.is_public(path)
                or (bool(pages) and is_public(path))
            ),
        )

    def _begin(self, request: Request, client: LocalClient, mode: Mode, seed: int | None) -> None:
        """Begin the session of a request over HTTP."""
        principal, server = principal_of(request), self._check(request, mode)
        host = request.client.host if request.client else ""
        to = Route(
            mode=mode, dialect=first_dialect(mode, "realtime"), address=origin_of(host), seed=seed
        )

        async def serve() -> None:
            try:
                await self._serve(server, client, to, principal, lambda: None)
            finally:
                client.end()  # also where the session never took it

        server.tasks.start_soon(_guarded, serve)

    def _check(self, request: Request, mode: Mode) -> Server:
        """Return the server, for a client that may have a session of a mode now."""
        server = self.server
        self._gate.check_mode(principal_of(request), mode)
        if server is None or server.admission.is_draining:
            text = LOADING if server is None else errors.REFUSALS[_UNAVAILABLE]
            raise CodedError(HTTPStatus.SERVICE_UNAVAILABLE, _UNAVAILABLE, text)
        if mode not in server.modes:
            raise CodedError(HTTPStatus.NOT_FOUND, "not_served", f"the model does not serve {mode}")
        return server

    def _begin_drain(self, server: Server, asked_by: str) -> None:
        self.drain(server, asked_by)

    async def watch_keys(self) -> None:
        """Follow the key file, and end what its removed keys left; runs until cancelled."""

        def end_revoked() -> None:
            if self.server is not None:
                self.server.end_revoked()

        await self._gate.watch(end_revoked)

    async def keep_recordings(self) -> None:
        """Remove recordings past their bounds; runs until cancelled."""
        if self._retainer is not None:
            await self._retainer.run()

    async def store_recordings(self) -> None:
        """Copy recordings to the object store; runs until cancelled."""
        if self._uploader is not None:
            await self._uploader.run()

    async def finish(self) -> None:
        """Send the last spans, and store the last recordings; the caller bounds the time."""
        async with anyio.create_task_group() as tasks:
            close = partial(anyio.to_thread.run_sync, abandon_on_cancel=True)
            tasks.start_soon(close, self.telemetry.close)
            if self._uploader is not None:
                tasks.start_soon(self._uploader.finish)

    # -- how the server stands ------------------------------------------------------------------

    def readiness(self) -> str:
        """The answer of `/ready`."""
        return "loading" if self.server is None else self.server.readiness

    def speech(self) -> str | None:
        """The model's speech, as `/health` reports it."""
        return None if self.server is None else self.server.speech

    def workers_wanted(self) -> int:
        """The number of workers that the load asks for; the server is ready."""
        assert self.server is not None
        return workers_wanted(self.server.workers.roster(), self.server.admission.first_wait_s)

    def status(self) -> ServerStatus:
        """The server's status."""
        server, recorder = self.server, self._recorder
        return ServerStatus(
            readiness=self.readiness(),
            version=VERSION,
            model=self.model,
            speech=self.speech(),
            uptime_s=time.monotonic() - self._began_s,
            sessions=() if server is None else server.roster(self.telemetry.metrics.kv_tokens),
            queue_length=0 if server is None else server.admission.queue_length,
            slots=None if server is None else server.slots,
            connections=self._counters.connections,
            tasks=tasks_living(),
            recorder={} if recorder is None else attrs.asdict(recorder.statistics),
            listener=self._counters.copy(),
            workers=None if server is None else server.workers.statistics,
            workers_wanted=None if server is None else self.workers_wanted(),
            retention=None if self._retainer is None else self._retainer.statistics,
            store={} if self._uploader is None else attrs.asdict(self._uploader.statistics),
            denied=self._gate.denials.counts,
            max_queue_size=self._settings.queue_max,
            running_tasks=() if server is None else server.admission.running(),
        )

    # -- WebSockets -----------------------------------------------------------------------------

    async def on_websocket(self, request: WebSocketRequest) -> None:
        """Serve one WebSocket request to its end."""
        modes = MODES if self.server is None else self.server.modes
        try:
            admitted = self._admit(request)
            attached = attached_to(request.path)
            if attached is not None:
                admitted.require_key()
                await self._attach(request, admitted, attached)
                return
            to = route(
                request.path,
                request.query,
                modes,
                default=self._settings.default_mode,
                headers=request.headers,
                subprotocols=request.subprotocols,
            )
            self._gate.check_mode(admitted.principal, to.mode)
            to = _bound(to, admitted)
        except NotServedError as error:
            body = error_body(error.code, error.message, **error.details)
            await request.reject(error.status, body)
            return
        except Denied as denied:
            peer = request.peer.host
            self._gate.denials.note(
                denied.reason, peer=peer, asked="WebSocket", name=denied.name, flag=denied.flag
            )
            await request.reject(denied.status, denied.body, denied.headers)
            return
        if to.resume and await self._is_elsewhere(request, to.resume):
            return
        if to.fork and not to.resume:
            found = await self._recordings.find(to.fork, admitted.principal)
            if found is None:
                if not await self._is_away(request, to.fork):
                    await request.reject(404, error_body("not_found", NO_RECORDING))
                return
            to = attrs.evolve(to, parent=Parent(info=found[1], at=to.at))
        websocket = await request.accept(
            subprotocol=admitted.subprotocol,
            frame_bytes_max=OF_MODE[to.mode].frame_bytes_max,
            party=admitted.principal.name,
        )
        websocket = _translated(request.path, websocket, to)
        server = self.server
        if server is None:
            await _reject(websocket, to, _UNAVAILABLE, LOADING)
        elif to.resume:
            await resume_connection(server, websocket, to, admitted.principal.name)
        elif server.admission.is_draining:
            await _reject(websocket, to, _UNAVAILABLE, errors.REFUSALS[_UNAVAILABLE])
        else:
            if to.dialect is OMNI and not to.label:
                owner = admitted.principal.name
                peeked = await resume_or_begin(server, websocket, to, owner)
                if peeked is None:
                    return
                websocket = peeked
            left = anyio.Event()
            spec = attrs.evolve(to, address=origin_of(request.peer.host))
            serve = partial(self._serve, server, websocket, spec, admitted.principal, left.set)
            if to.resumable:
                server.tasks.start_soon(_guarded, serve)  # the session may outlive its connection
                await left.wait()
            else:
                await serve()

    def _admit(self, request: WebSocketRequest) -> Admitted:
        headers, offered = request.headers, request.subprotocols
        if request.path == TWILIO_PATH:
            return self._twilio.admit(headers, request.target, offered, secure=request.is_tls)
        return self._gate.admit_websocket(headers, offered, secure=request.is_tls)

    async def _attach(self, request: WebSocketRequest, admitted: Admitted, name: str) -> None:
        session = self._sideband.find(name, admitted.principal)
        if session is not None:
            await self._sideband.serve(request, admitted, session)
        elif not await self._is_away(request, name):
            await request.reject(404, error_body("not_found", NOT_ATTACHED))

    async def _is_elsewhere(self, request: WebSocketRequest, name: str) -> bool:
        """Whether a client comes back to a session that is not here, and was answered."""
        if self.server is not None and self.server.find(name) is not None:
            return False
        return await self._is_away(request, name)

    async def _is_away(self, request: WebSocketRequest, name: str) -> bool:
        """Whether a client asks for what is not here, and was answered by another gateway."""
        if not is_relayed(request.headers):
            return await self._relay.relay_websocket(request, name)
        is_loading = self.server is None
        body = error_body("not_here", LOADING if is_loading else NO_SESSION)
        await request.reject(AWAY if is_loading else NOT_HERE, body)
        return True

    async def _serve(
        self,
        server: Server,
        websocket: WebSocket,
        to: Route,
        principal: Key,
        on_left: Callable[[], None],
    ) -> None:
        place = await self._gate.quotas.enter_soon(principal)
        reason: EndReason | None = None
        try:
            spec = attrs.evolve(
                to,
                owner=principal.name,
                must_record=principal.record_always is True,
                refusal=errors.ErrorCode.WORKER_BUSY if place is None else None,
            )
            reason = await server.handle(websocket, spec, on_left)
        except ForkRefused as refused:
            reason = "refused" if errors.close_code(refused.code) else None  # else it is paid for
            await _reject(websocket, to, refused.code, refused.message)
        finally:
            on_left()
            if place is not None:
                place.leave(is_refund=reason == "refused")


def _translated(path: str, websocket: WebSocket, to: Route) -> WebSocket:
    """Put another protocol in front of a session, where the address has one."""
    if path == TWILIO_PATH:
        return TranslatedWebSocket(websocket, Call())
    if path.startswith(HALF_DUPLEX_PATH):
        return TranslatedWebSocket(websocket, HalfDuplex(to.label))
    return websocket


def _bound(to: Route, admitted: Admitted) -> Route:
    """Bind a client's session to its client secret; `Denied`: that is for another one."""
    session = None if admitted.secret is None else admitted.secret.session
    if session is None:
        if to.fork:
            admitted.require_key()
        return to
    model = session.get("model", to.label)
    dialect = OPENAI if session["type"] == "realtime" else OPENAI_TRANSCRIPTION
    if to.dialect is not dialect or to.label not in ("", model) or to.resumable:
        admitted.require_key()
    first = orjson.dumps({"type": SESSION_UPDATE, "session": session}).decode()
    return attrs.evolve(to, label=model, first=first)


async def _guarded(serve: Callable[[], Awaitable[None]]) -> None:
    """Serve a session in the server's own tasks, which an error of one must not end."""
    try:
        await serve()
    except WebSocketClosed:
        pass  # its client left before it could be refused
    except Exception:
        _LOG.exception("a session broke")


async def _reject(websocket: WebSocket, to: Route, code: errors.ErrorCode, text: str) -> None:
    """Refuse without a session: very many clients may ask."""
    for frame in to.dialect.encode(ErrorReport(code=code, message=text)):
        await websocket.send(frame)
    await websocket.close(errors.close_code(code) or errors.CLOSE_NORMAL, code)
