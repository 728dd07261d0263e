"""Common parts of the client commands: options, unusable files, and showing a server.

A server's text is shown without control characters, so that it cannot move the cursor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import click
import orjson

from protocol.values.errors import FieldError
from protocol.values.messages import Created, QueuePlace

from ..media.sound import AudioFileError
from ..settings.settings import DEFAULT_PORT
from .errors import AddressError, CannotConnectError, HandshakeRejectedError
from .resuming import Reconnected, Reconnecting
from .session import normal_url

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_URL: Final = f"ws://127.0.0.1:{DEFAULT_PORT}"
NOT_RECORDED: Final = "not recorded"
NO_SERVER_ADVICE: Final = "is a server running there? Start one with: antiphon serve"
TLS_ADVICE: Final = (
    "a server without TLS is at ws://HOST:PORT; SSL_CERT_FILE names the authority of a certificate "
    "of your own"
)
KEY_ADVICE: Final[Mapping[int, str]] = {
    401: "give a key of this server with --key, or in ANTIPHON_KEY",
    403: "give another key with --key, or in ANTIPHON_KEY",
}
"""By the status of a refusal."""


def _read_url(_ctx: click.Context, _option: click.Parameter, url: str) -> str:
    """Normalize an address; refuse one that cannot be a server's before anything else."""
    try:
        return normal_url(url)
    except AddressError as error:
        raise UnusableError(f"--url: {error}") from error


url_option: Final = click.option(
    "--url",
    default=DEFAULT_URL,
    show_default=True,
    callback=_read_url,
    help="Address of the server: HOST:PORT, or ws, wss, http or https://HOST:PORT.",
)
key_option: Final = click.option(
    "--key",
    envvar="ANTIPHON_KEY",
    show_envvar=True,
    help="API key, if the server needs one. Other users of this machine can see options: "
    "prefer the variable.",
)
no_record_option: Final = click.option(
    "--no-record", is_flag=True, help="Ask the server not to record the session."
)
json_option: Final = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON objects, one a line."
)


def dialect_option(*dialects: str) -> Callable[[Command], Command]:
    """Make the option of a command that speaks several protocols, the first by default."""
    return click.option(
        "--dialect",
        type=click.Choice(dialects),
        default=dialects[0],
        show_default=True,
        help="The wire protocol to use.",
    )


class UnusableError(click.ClickException):
    """A file or an option that cannot be used; nothing was sent to a server."""

    exit_code = 2


@contextmanager
def usable() -> Iterator[None]:
    """Convert errors with a file to `UnusableError`, in one line."""
    try:
        yield
    except OSError as error:
        raise UnusableError(f"{error.filename}: {error.strerror or 'cannot be read'}") from error
    except (AudioFileError, FieldError) as error:
        raise UnusableError(str(error)) from error


def explain(error: Exception) -> str:
    """Say what went wrong with a server, and what to do about it, in one line."""
    if isinstance(error, CannotConnectError):
        return f"{error}; {TLS_ADVICE if error.is_tls else NO_SERVER_ADVICE}"
    return advise(str(error), error.status if isinstance(error, HandshakeRejectedError) else 0)


def advise(text: str, status: int) -> str:
    """Add what a refusal with this status of HTTP asks for."""
    return clean(f"{text}; {KEY_ADVICE[status]}" if status in KEY_ADVICE else text)


def echo_json(fields: dict[str, object]) -> None:
    """Write one JSON object as a line; a path that is not UTF-8 makes it one of ASCII."""
    try:
        line = orjson.dumps(fields).decode()
    except orjson.JSONEncodeError:
        line = json.dumps(fields, separators=(",", ":"))
    click.echo(line)


def echo_error(error: Exception) -> None:
    """Write the error that ended a session as a JSON object."""
    echo_json({"type": "error", "code": getattr(error, "code", None), "message": explain(error)})


def connection_fields(change: Reconnecting | Reconnected) -> dict[str, object]:
    """Return the fields of a lost connection, or of one that is back, for `echo_json`."""
    if isinstance(change, Reconnecting):
        wait_s = round(change.wait_s, 3)
        return {"type": "reconnecting", "attempt": change.attempt, "wait_s": wait_s}
    away_s = round(change.away_s, 3)
    return {"type": "reconnected", "away_s": away_s, "skipped": change.skipped}


def show_connection(change: Reconnecting | Reconnected) -> str:
    """Describe a lost connection, or one that is back, in one line."""
    if isinstance(change, Reconnecting):
        again = f" (attempt {change.attempt})" if change.attempt > 1 else ""
        return f"connection lost, reconnecting in {change.wait_s:.1f} s{again}"
    skipped = f"; messages to the server that were lost: {change.skipped}" if change.skipped else ""
    return f"reconnected after {change.away_s:.1f} s{skipped}"


class TextOutput:
    """Words on standard output, between which lines go to standard error."""

    def __init__(self) -> None:
        self._is_within_line = False

    def connects(self, change: Reconnecting | Reconnected) -> None:
        """Write that the connection is lost or back, on a line of its own; the words go on."""
        if self._is_within_line:
            click.echo(err=True)
        click.echo(show_connection(change), err=True)
        self._is_within_line = False


def clean(text: str, kept: str = "\n\t") -> str:
    """Replace characters that are not text for a terminal: escapes and other control characters."""
    return "".join(char if char.isprintable() or char in kept else " " for char in text)


def echo_recording(created: Created, *, record: bool) -> None:
    """Say on standard error that a session is recorded, or not though it might have been."""
    shown = show_recording(created, record=record)
    if shown != NOT_RECORDED or not record:
        click.echo(f"({shown})", err=True)


def show_recording(created: Created, *, record: bool = True) -> str:
    """Say whether a session is recorded, with the operator's notice; `record`: it may be."""
    if not record or not (created.recording_id or created.recording == "on"):
        return NOT_RECORDED
    if created.recording == "failed":
        return "the recording has failed"
    notice = f": {created.recording_notice}" if created.recording_notice else ""
    return clean(f"recorded{notice}", kept="")


def show_place(place: QueuePlace) -> str:
    """Describe a session's place in the queue."""
    where = f"place {place.position} of {place.queue_length}"
    return f"{where}, about {place.estimated_wait_s} s"
