"""What can go wrong between a client and its server, as a tree of exceptions.

    ClientError
      AddressError            the address is no ws:// or wss:// URL
      CannotConnectError      nobody answers there, or it is no WebSocket server
      HandshakeRejectedError  an HTTP error instead of a WebSocket, with the server's message
      SessionRefusedError     the server has no place: its code and message (`queue_full` ...)
      SessionClosedError      the connection is over: its close code and reason
      ReportedError           the server answered a request with an `error`; the session lives on
      LocalProtocolError      the calling code asked for what is not possible now, or never is
      RemoteProtocolError     the server broke the protocol

The text of each is one line, fit to be shown to the user of the client. The last two are those of
`protocol.errors`, as a client raises them: `as_client_errors` makes one of the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from protocol import errors
from protocol.messages import ErrorReport

ABNORMAL_CLOSURE: Final = 1006
"""The peer went without a close (RFC 6455, 7.1.5): never sent, only told."""


class ClientError(Exception):
    """The root of what goes wrong between a client and its server; the text is one line."""


class AddressError(ClientError):
    """The address cannot be one of a server."""


class CannotConnectError(ClientError):
    """Nobody answers at the address, or not as a WebSocket server does.

    Args:
        text: what happened.
        may_pass: whether another attempt could fare better.
    """

    def __init__(self, text: str, *, may_pass: bool = True) -> None:
        super().__init__(text)
        self.may_pass = may_pass


class HandshakeRejectedError(ClientError):
    """The server answered with an HTTP error.

    Args:
        status: of HTTP.
        message: what the server says is wrong, cut where it is long.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the server rejected the connection: {message} (HTTP {status})")
        self.status = status
        self.message = message


class SessionRefusedError(ClientError):
    """The server has no place for the session, or lost its worker.

    Args:
        report: its `error` event.

    Attributes:
        code: as in the event.
        message: likewise.
        session_id: likewise; by it an operator finds the session. Empty where there is none.
    """

    def __init__(self, report: ErrorReport) -> None:
        super().__init__(f"the server refused the session: {report.message} ({report.code})")
        self.code = report.code
        self.message = report.message
        self.session_id = report.session_id


class SessionClosedError(ClientError):
    """The connection is over.

    Args:
        code: the close code (RFC 6455, 7.4); 1006 where the peer went without one.
        reason: what the closing side said, or nothing.
    """

    def __init__(self, code: int, reason: str) -> None:
        said = "connection lost" if code == ABNORMAL_CLOSURE else f"closed with code {code}"
        super().__init__(f"{said}, {reason}" if reason else said)
        self.code = code
        self.reason = reason


class ReportedError(ClientError):
    """The server answered a request with an `error`; the session lives on.

    Args:
        report: its `error` event.

    Attributes:
        code: as in the event.
        message: likewise.
        session_id: likewise; by it an operator finds the session. Empty where there is none.
    """

    def __init__(self, report: ErrorReport) -> None:
        super().__init__(f"the server reported an error: {report.message} ({report.code})")
        self.code = report.code
        self.message = report.message
        self.session_id = report.session_id


class LocalProtocolError(ClientError, errors.LocalProtocolError):
    """The calling code asked for what the protocol does not allow; nothing was sent."""


class RemoteProtocolError(ClientError, errors.RemoteProtocolError):
    """The server did what the protocol does not allow."""


@contextmanager
def as_client_errors() -> Iterator[None]:
    """Raise what the protocol raises as a `ClientError`; a value that no message holds likewise."""
    try:
        yield
    except ClientError:
        raise
    except errors.RemoteProtocolError as error:
        raise RemoteProtocolError(str(error)) from error
    except errors.LocalProtocolError as error:
        raise LocalProtocolError(str(error)) from error
    except (TypeError, ValueError) as error:
        raise LocalProtocolError(f"this cannot be sent: {error}") from error
