"""Errors between a client and its server, as a tree of exceptions.

    ClientError
      AddressError            the address is not a server's
      CannotConnectError      no answer at the address, or it is not a WebSocket server
      HandshakeRejectedError  an HTTP error instead of a WebSocket, with the server's message
      SessionRefusedError     the server has no place: its code and message (`queue_full` ...)
      SessionClosedError      the connection is over: its close code and reason
      ReportedError           the server answered a request with an `error`; the session goes on
      LocalProtocolError      the calling code's request is not possible now, or never is
      RemoteProtocolError     the server broke the protocol

Each text is one line for the client's user.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from protocol.values import errors
from protocol.values.messages import ErrorReport

ABNORMAL_CLOSURE: Final = 1006
"""The peer left without a close (RFC 6455, 7.1.5): never sent, only reported."""


class ClientError(Exception):
    """The root of the errors between a client and its server; the text is one line."""


class AddressError(ClientError):
    """The address is not a server's."""


class CannotConnectError(ClientError):
    """The address does not answer as a WebSocket server.

    `may_pass`: a retry could succeed. `is_tls`: it was tried with TLS, which is what failed.
    """

    def __init__(self, text: str, *, may_pass: bool = True, is_tls: bool = False) -> None:
        super().__init__(text)
        self.may_pass = may_pass
        self.is_tls = is_tls


class HandshakeRejectedError(ClientError):
    """The server answered with an HTTP error; `message` is its text, shortened."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the server rejected the connection: {message} (HTTP {status})")
        self.status = status
        self.message = message


class SessionRefusedError(ClientError):
    """The server has no place for the session, or lost its worker.

    The fields are those of the `error` event; operators find a session by its id, if there is one.
    """

    def __init__(self, report: ErrorReport) -> None:
        super().__init__(f"the server refused the session: {report.message} ({report.code})")
        self.code = report.code
        self.message = report.message
        self.session_id = report.session_id


class SessionClosedError(ClientError):
    """The connection is over: its close code (RFC 6455, 7.4; 1006 without a close) and reason."""

    def __init__(self, code: int, reason: str) -> None:
        what = "connection lost" if code == ABNORMAL_CLOSURE else f"closed with code {code}"
        super().__init__(f"{what}, {reason}" if reason else what)
        self.code = code
        self.reason = reason


class ReportedError(ClientError):
    """The server answered a request with an `error`, with these fields; the session goes on."""

    def __init__(self, report: ErrorReport) -> None:
        super().__init__(f"the server reported an error: {report.message} ({report.code})")
        self.code = report.code
        self.message = report.message
        self.session_id = report.session_id


class LocalProtocolError(ClientError, errors.LocalProtocolError):
    """The protocol does not allow the calling code's request; nothing was sent."""


class RemoteProtocolError(ClientError, errors.RemoteProtocolError):
    """The server broke the protocol."""


@contextmanager
def as_client_errors() -> Iterator[None]:
    """Convert errors of the protocol, and of values that no message can hold, to `ClientError`."""
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
