"""The greeting of a link: versions, a mutual proof of a shared token, then the worker's model.

    gateway -> { link: [major, minor], software, nonce }
    worker  -> { link: [major, minor], software, nonce }
    gateway -> { proof }
    worker  -> { proof }
    worker  -> { info }                    any of them instead: { refused: text }

- The token is never sent. A proof is the HMAC-SHA256 of the sender's role and both nonces, with the
  token as key (empty without one). A proof that was recorded, or came from this end, is refused.
- The worker's minor version is the gateway's, or the one before: workers are updated last.
- Each message is one JSON frame of the urgent stream, of at most `HELLO_BYTES_MAX` bytes. Unknown
  fields are ignored here, and only here: a newer gateway must be able to read an older greeting.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Final, Literal, TypeVar

import anyio
import attrs
import orjson
from anyio.abc import ByteStream

from recorder.format.mapping import MappingError, plain_of, value_of

from ..model.backends.base import BackendInfo
from ..settings.settings import shown
from .frames import (
    FRAME_BYTES_MAX,
    HELLO_BYTES_MAX,
    READ_BYTES,
    URGENT,
    Frame,
    Inbox,
    LinkError,
    LinkLeft,
    LinkRefused,
    Outbox,
)

LINK_VERSION: Final = (1, 0)
"""The protocol of a link. A change that the other end must know of is a new minor version, one that
an end of the version before cannot work with is a new major one."""
VERSION: Final = version("antiphon")
"""Said in the greeting, for people."""
NONCE_BYTES: Final = 32
"""Never drawn twice."""
TOKEN_CHARS_MIN: Final = 16
"""A shorter token could be guessed from one greeting that was overheard."""
TOKEN_BYTES_MAX: Final = 4096
"""A longer file is not a token."""

Role = Literal["gateway", "worker"]
Body = TypeVar("Body", bound=attrs.AttrsInstance)


@attrs.frozen(kw_only=True)
class _Greeting:
    link: tuple[int, int]
    software: str
    nonce: str


@attrs.frozen(kw_only=True)
class _Proof:
    proof: str


@attrs.frozen(kw_only=True)
class _Info:
    info: BackendInfo


@attrs.frozen(kw_only=True)
class _Refused:
    refused: str


def read_token(path: Path) -> str:
    """Read a token from its file; `ValueError` if it is unreadable, or too short."""
    try:
        with path.open("rb") as file:
            token = file.read(TOKEN_BYTES_MAX + 1).decode("utf-8").strip()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8") from error
    if not TOKEN_CHARS_MIN <= len(token.encode()) <= TOKEN_BYTES_MAX:
        raise ValueError(f"{path}: a token of {len(token)} characters, at least {TOKEN_CHARS_MIN}")
    return token


async def greet_worker(wire: Wire, token: str) -> BackendInfo:
    """Greet as a gateway, and return the worker's model; errors as of `greet_gateway`."""
    ours = _greeting()
    await wire.send(ours)
    theirs = await wire.receive(_Greeting)
    await _check_version(wire, gateway=ours.link, worker=theirs.link)
    await wire.send(_prove("gateway", token, ours.nonce, theirs.nonce))
    await _check_proof(wire, "worker", token, ours.nonce, theirs.nonce)
    return (await wire.receive(_Info)).info


async def greet_gateway(wire: Wire, token: str, info: BackendInfo) -> None:
    """Greet as a worker, and describe the model.

    Raises:
        LinkRefused: one end refuses the other: its token is wrong, or its version.
        LinkError: the other end does not greet, or leaves.
    """
    theirs = await wire.receive(_Greeting)
    ours = _greeting()
    await wire.send(ours)
    await _check_version(wire, gateway=theirs.link, worker=ours.link)
    await _check_proof(wire, "gateway", token, theirs.nonce, ours.nonce)
    await wire.send(_prove("worker", token, theirs.nonce, ours.nonce))
    await wire.send(_Info(info=info))


class Wire:
    """One end of a connection that greets; then `stream` and `inbox` belong to the link.

    `early`: frames of the link that came with the greeting.
    """

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.inbox = Inbox(HELLO_BYTES_MAX)
        self.early: list[tuple[int, Frame]] = []

    def over(self) -> None:
        """The greeting is over: larger frames may come."""
        self.inbox.frame_bytes_max = FRAME_BYTES_MAX

    async def send(self, message: attrs.AttrsInstance) -> None:
        """Send a message of the greeting; `LinkError` if the other end is gone."""
        outbox = Outbox()
        outbox.put(URGENT, [orjson.dumps(plain_of(message))])
        try:
            while piece := outbox.take():
                await self.stream.send(b"".join(piece))
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise LinkLeft("it disconnected during the greeting") from error

    async def receive(self, kind: type[Body]) -> Body:
        """Wait for a message of the greeting; `LinkError` if it is another, or none comes."""
        while not self.early:
            try:
                self.early += self.inbox.feed(await self.stream.receive(READ_BYTES))
            except (OSError, anyio.EndOfStream, anyio.BrokenResourceError) as error:
                raise LinkLeft("it disconnected during the greeting") from error
        stream, frame = self.early.pop(0)
        if stream != URGENT:
            raise LinkError("it did not greet")
        try:
            body = orjson.loads(frame)
            if "refused" in body:
                raise LinkRefused(f"it refuses: {shown(value_of(_Refused, body).refused)}")
            known = {field.name for field in attrs.fields(kind)}
            return value_of(kind, {name: body[name] for name in known & body.keys()})
        except (ValueError, TypeError, AttributeError, MappingError) as error:
            raise LinkError(f"it did not greet: {error}") from error


def _greeting() -> _Greeting:
    nonce = secrets.token_hex(NONCE_BYTES)
    return _Greeting(link=LINK_VERSION, software=VERSION, nonce=nonce)


def _prove(role: Role, token: str, gateway: str, worker: str) -> _Proof:
    text = f"antiphon link {role} {gateway} {worker}"
    return _Proof(proof=hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest())


async def _check_proof(wire: Wire, role: Role, token: str, gateway: str, worker: str) -> None:
    found = (await wire.receive(_Proof)).proof
    if not hmac.compare_digest(found.encode(), _prove(role, token, gateway, worker).proof.encode()):
        await _refuse(wire, "the token is wrong")


async def _check_version(wire: Wire, *, gateway: tuple[int, int], worker: tuple[int, int]) -> None:
    if gateway[0] != worker[0] or not gateway[1] - 1 <= worker[1] <= gateway[1]:
        ours, theirs = (".".join(map(str, version)) for version in (gateway, worker))
        await _refuse(wire, f"a gateway of link version {ours} cannot use a worker of {theirs}")


async def _refuse(wire: Wire, text: str) -> None:
    with suppress(LinkError):  # It may refuse too, and have left.
        await wire.send(_Refused(refused=text))
    raise LinkRefused(text)
