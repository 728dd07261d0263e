"""The command line, `antiphon`: the one composition root.

Commands are named by their modules and loaded when called: `antiphon --help` stays quick, and
`replay` can import `runtime`. Interrupts and a lost stdout are reported here, with exit codes of
their own: 1 and 2 belong to the commands.
"""

from __future__ import annotations

import atexit
import errno
import gc
import io
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast

import click
from click.shell_completion import CompletionItem

from .net.process import is_interrupt
from .settings.extras import what_is_missing

if TYPE_CHECKING:
    from .api.views import Viewer, ViewName

Commands = Mapping[str, tuple[str, str]]
"""Each command's module, whose function is its name and `_command`; and its help line."""

GROUPS: Final[Mapping[str, Commands]] = MappingProxyType(
    {
        "Serve": {
            "serve": ("runtime.serve.serve_command", "Serve a model over WebSockets."),
            "workers": ("runtime.cli", "Start, list, add and drain workers."),
            "door": ("runtime.webrtc.door", "Let browsers talk by WebRTC."),
            "keys": ("runtime.access.command", "Make, list and remove API keys."),
            "doctor": ("runtime.commands.doctor", "Check whether a model can be served here."),
            "demo": ("runtime.commands.demo", "Serve, talk, record and replay, in one command."),
        },
        "Talk to a server": {
            "talk": ("runtime.commands.talk", "Stream a WAV file, or speak, to a server."),
            "chat": ("runtime.commands.chat", "Ask a server a question in text."),
            "transcribe": ("runtime.commands.transcribe", "Transcribe a WAV file on a server."),
        },
        "Work with recordings": {
            "recordings": (
                "runtime.cli",
                "List, inspect, view, check, repair and remove recordings.",
            ),
            "replay": ("replay.cli", "Run a recorded session again and compare."),
            "fork": ("replay.fork.command", "Continue a recorded session with a change."),
            "diff": ("replay.diff", "Show where two sessions diverge."),
            "export": ("replay.export.formats", "Export a session as WAV, MP4, MCAP..."),
            "eval": ("replay.assess.command", "Measure recorded conversations."),
        },
        "Develop": {
            "dev": (
                "runtime.cli",
                "Protocols, states, measurements, and tests of clients and servers.",
            )
        },
    }
)
"""The commands at the top, by heading of the help."""
WORKERS: Final[Commands] = MappingProxyType(
    {
        "start": ("runtime.worker.command", "Start a worker that serves a model."),
        "list": ("runtime.commands.workers", "List the workers of a server."),
        "add": ("runtime.commands.workers", "Connect a server to a worker."),
        "drain": ("runtime.commands.workers", "Move a worker's sessions to others."),
    }
)
RECORDINGS: Final[Commands] = MappingProxyType(
    {
        "list": ("replay.library.sessions", "List recordings, with measures."),
        "inspect": ("replay.cli", "Describe what happened in a session."),
        "view": ("replay.view.document", "Show a session as one HTML page."),
        "marks": ("replay.library.keep", "List, add and remove annotations."),
        "verify": ("replay.library.keep", "Check a log's integrity."),
        "recover": ("replay.library.keep", "Recover a damaged log."),
        "compact": ("replay.library.keep", "Make finished logs smaller."),
        "redact": ("replay.redact.redaction", "Remove what was said and shown."),
        "prune": ("replay.library.keep", "Remove old recordings."),
    }
)
DEV: Final[Commands] = MappingProxyType(
    {
        "bench": ("runtime.commands.bench", "Measure the sessions of an engine."),
        "quantize": (
            "runtime.commands.quantize",
            "Save a checkpoint with a quantised language model.",
        ),
        "schema": ("runtime.commands.schema", "Describe the wire protocols."),
        "states": ("runtime.cli", "Draw the session's state diagrams."),
        "play": ("replay.play", "Serve a recording to clients under test."),
        "shrink": ("replay.shrink", "Find the smallest log that fails."),
    }
)
MOVED: Final = MappingProxyType(
    {
        "console": "antiphon serve --open",
        "worker": "antiphon workers start",
        "sessions": "antiphon recordings list",
        "fuzz": "python -m tests.fuzz, in a clone of the repository",
        "help": "antiphon --help",
    }
)
"""What replaces words that were commands, or are taken for commands."""
WITHIN: Final = MappingProxyType({"recordings": RECORDINGS, "workers": WORKERS, "dev": DEV})
"""The groups whose commands may be named without the group's name, by mistake."""
EXIT_BY_SIGNAL: Final = 128
"""Shells add it to the number of the signal that ended a command."""
LOST_ERRNOS: Final = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a stdout that cannot be written; errors of a file are reported by its writer."""
VIEWS: Final = "replay.view.document"
"""The module that makes the views of a recording: its page, redacted copies, digest and replay."""
REDACTION: Final = "replay.redact.redaction"
"""The module that takes content out of a recording: its `KINDS`, and `RedactError`."""
SOUND: Final = "replay.export.sound"
"""The module that makes the WAV of a recording: `wav_of`, `wav_head` and `TooLongError`."""


class UnusableError(click.ClickException):
    """A command cannot be used so: an argument, an extra or the output is not there."""

    exit_code = 2


class Text(click.types.StringParamType):
    """Text in UTF-8; other bytes of the shell could not be sent in a message."""

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Parse an argument; raises `UnusableError` if it is not UTF-8."""
        text = super().convert(value, param, ctx)
        if any("\ud800" <= char <= "\udfff" for char in text):
            name = "the text" if param is None else param.get_error_hint(ctx)
            raise UnusableError(f"{name}: not UTF-8")
        return text


TEXT: Final = Text()


class Choice(click.Choice[str]):
    """One of several words; the error for a wrong word names the nearest."""

    def get_invalid_choice_message(self, value: object, ctx: click.Context | None) -> str:
        """The error message."""
        from .settings.settings import nearest

        text = super().get_invalid_choice_message(value, ctx)
        return text.removesuffix(".") + nearest(str(value), self.choices)


class LazyGroup(click.Group):
    """A group that imports a command only when it is called."""

    def __init__(self, *args: Any, groups: Mapping[str, Commands], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.groups: Final = groups
        self.named: Final = {
            name: command for group in groups.values() for name, command in group.items()
        }

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Command names, in the order of the help."""
        return list(self.named)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None for an unknown name; `UnusableError`."""
        if cmd_name not in self.named:
            return None
        from .net.process import importing

        with importing(), _extras(ctx, cmd_name):
            module = import_module(self.named[cmd_name][0])
            command = cast("click.Command", getattr(module, f"{cmd_name}_command"))
        _refine(command)
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Run a command, and say which extra it lacks, or where a word too many belongs."""
        with _extras(ctx):
            try:
                return super().invoke(ctx)
            except click.UsageError as error:
                if more := _place_of_more(error):
                    raise click.UsageError(error.message + more, error.ctx) from error
                raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the commands without importing them."""
        for heading, group in self.groups.items():
            with formatter.section(heading):
                formatter.write_dl([(name, help_text) for name, (_, help_text) in group.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; for an unknown name suggest the nearest."""
        try:
            return super().resolve_command(ctx, args)
        except click.exceptions.NoSuchCommand as error:
            name = error.command_name
            groups = [group for group, table in WITHIN.items() if name in table]
            meant = [f"antiphon {group} {name}" for group in groups] or [MOVED.get(name, "")]
            if self.groups is GROUPS and any(meant):
                text = f"No such command {name!r}. Did you mean: {', '.join(meant)}?"
                raise click.UsageError(text, ctx) from None
            raise click.exceptions.NoSuchCommand(name, possibilities=self.named, ctx=ctx) from None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete a command's name without importing all of them."""
        if incomplete.startswith("-"):
            return click.Command.shell_complete(self, ctx, incomplete)
        return [
            CompletionItem(name, help=help_text)
            for name, (_, help_text) in self.named.items()
            if name.startswith(incomplete)
        ]


class Main(LazyGroup):
    """The command line: a process of its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line as a process of its own."""
        atexit.register(gc.freeze)  # Else Python searches all that is loaded for garbage, and ends.
        return super().__call__(*args, **kwargs)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the flags before the command, such as `--help`."""
        with _broken_off():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run a command, and report an interrupt or a lost stdout."""
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a log can hold lone surrogates
        with _broken_off():
            return super().invoke(ctx)


def _refine(command: click.Command) -> None:
    """Set `Text` and `Choice` as the types of the parameters of a command and its subcommands."""
    for param in command.params:
        if param.type is click.STRING:  # a path may be any bytes
            param.type = TEXT
        elif type(param.type) is click.Choice:
            param.type = Choice(param.type.choices, case_sensitive=param.type.case_sensitive)
        elif isinstance(param.type, click.IntRange | click.FloatRange):
            param.type.name = "whole number" if isinstance(param.type, click.IntRange) else "number"
    if isinstance(command, click.Group):
        for within in command.commands.values():
            _refine(within)


def _place_of_more(error: click.UsageError) -> str:
    """Where an argument that is one too many belongs, for the end of its error."""
    found = re.fullmatch(r"Got unexpected extra arguments? \((.*)\)", error.message)
    command = None if error.ctx is None else error.ctx.command
    if found is None or command is None:
        return ""
    takes = [param for param in command.params if isinstance(param, click.Argument)]
    if not takes and any("--model" in param.opts for param in command.params):
        return f"; a model is named with --model {found[1]}"
    return "; words that belong together need quotes" if command.name == "chat" else ""


@contextmanager
def _extras(ctx: click.Context, command: str | None = None) -> Iterator[None]:
    """Say which extra a command, or the one that runs, lacks: `UnusableError`."""
    try:
        yield
    except (ModuleNotFoundError, BaseExceptionGroup) as error:
        missing = what_is_missing(error)
        if missing is None:
            raise
        words = [*ctx.command_path.split()[1:], command or ctx.invoked_subcommand]
        raise UnusableError(f"antiphon {' '.join(map(str, words))} {missing}") from error


@contextmanager
def _broken_off() -> Iterator[None]:
    """Exit with the code for an interrupt or a lost stdout; `UnusableError`: it is not written."""
    try:
        try:
            yield
        finally:
            if sys.__stdout__ is not None:  # it may have been closed before the process began
                sys.stdout.flush()
    except BaseException as error:
        if is_interrupt(error):
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            click.echo("\ninterrupted", err=True)
            sys.exit(EXIT_BY_SIGNAL + signal.SIGINT)
        lost = _lost_stdout(error)
        if lost is None:
            raise
        _give_up_stdout()
        if lost.errno == errno.EPIPE:  # the reader of the pipe has closed it
            sys.exit(EXIT_BY_SIGNAL + signal.SIGPIPE)
        raise UnusableError(f"stdout: {lost.strerror}") from error


def _lost_stdout(error: BaseException) -> OSError | None:
    """The error of a lost stdout; None if `error` is another."""
    if isinstance(error, BaseExceptionGroup):  # raised by tasks that print as data comes
        return next(filter(None, map(_lost_stdout, error.exceptions)), None)
    if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
        return error.__context__  # raised by rich
    is_lost = isinstance(error, OSError) and error.errno in LOST_ERRNOS and error.filename is None
    return error if isinstance(error, OSError) and is_lost else None


def _give_up_stdout() -> None:
    """Point stdout at /dev/null, so that Python's flush at exit does not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


@click.group(
    cls=Main,
    groups=GROUPS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="antiphon")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Antiphon: a realtime session server for omni models.

    It speaks the MiniCPM-o realtime protocols, records every session, and runs a recording again
    byte for byte. `antiphon demo` shows all of it in a minute.
    """
    ctx.obj = load_viewer  # for `serve`: no room of `runtime` may know `replay`


@click.group("workers", cls=LazyGroup, groups={"Commands": WORKERS})
def workers_command() -> None:
    """Start a worker, or list, add and drain those of a running server.

    A worker is one loaded model with its slots. A server with keys asks for one of the scope
    admin. A rolling upgrade, for a server that was started with --worker-address:

    \b
      antiphon workers start --model MODEL --listen unix:/run/antiphon/3   the new worker
      antiphon workers add unix:/run/antiphon/3
      antiphon workers list                                         the old one's number
      antiphon workers drain 0 --wait                               its sessions move
    Now the process of the old worker can be stopped.

    \b
    Exit codes:
      0  done
      1  the server could not be reached, or refused
      2  an option that cannot be used
    """  # noqa: D301 - click takes a backspace to keep the lines


@click.group("recordings", cls=LazyGroup, groups={"Commands": RECORDINGS})
def recordings_command() -> None:
    """List recordings, look at one, and keep them.

    Commands take a recording by any name, also `antiphon replay`, fork, diff, export and eval:

    \b
      calls/rec-1.session.zst   the path of its log
      calls                     a folder: all logs in it, or its only one
      rec-1, sess_5f1d0c6a9b27  its id, or its session's, in the folder of recordings
      last                      the newest in the folder of recordings
      calls/last                the same names in another folder
      s3://bucket/prefix/rec-1  and in an object store, of which a copy is made

    The folder of recordings is `recordings`, or the one that ANTIPHON_RECORD_TO names, as of
    `antiphon serve`.
    """  # noqa: D301 - click takes a backspace to keep the lines


@click.group("dev", cls=LazyGroup, groups={"Commands": DEV})
def dev_command() -> None:
    """Describe the protocols, measure, and test clients and servers."""


def load_viewer(name: ViewName) -> Viewer:
    """Load what makes a view of a recording; called for the first one."""
    from .api.views import Viewer

    if name == "sound":
        module = import_module(SOUND)
        return Viewer(
            pieces_of=module.wav_of,
            head_of=module.wav_head,
            media_type="audio/wav",
            refuses=(module.TooLongError,),
        )
    module = import_module(VIEWS)
    if name == "digest":
        return Viewer(pieces_of=module.digest_of, media_type="application/json")
    if name == "replay":
        return Viewer(pieces_of=module.replay_of, media_type="application/json")
    if name in ("redacted-log", "redacted-page"):
        redaction, is_log = import_module(REDACTION), name == "redacted-log"
        return Viewer(
            pieces_of=module.redacted_log if is_log else module.redacted_page,
            kinds=redaction.KINDS,
            media_type="application/zstd" if is_log else "text/html",
            refuses=(redaction.RedactError,),
        )
    return Viewer(
        pieces_of=module.page_of,
        media_type="text/html",
        policy=module.PAGE_CSP,
        acting_policy=module.ACTING_CSP,
    )


@click.command("states")
def states_command() -> None:
    """Draw the state diagrams (Mermaid), one for each session kind, from the transition table.

    \b
    Exit codes:
      0  drawn
      2  an argument that cannot be used
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
    from protocol.values.state import SessionKind, diagram

    for session_kind in SessionKind:
        click.echo(f"%% {session_kind}\n{diagram(session_kind)}", nl=False)
