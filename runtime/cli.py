"""The command line, `antiphon`: the one composition root.

Commands are named by import string and loaded when asked for, so that `antiphon --help` is quick
and `replay` can stand above `runtime`. What breaks any of them off is told here, once, and by an
exit code that says nothing else: 1 and 2 are words of the commands'.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, cast

import click

if TYPE_CHECKING:
    from .api.recordings import Viewer

COMMANDS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "serve": ("runtime.serve_command:serve_command", "Serve a model over WebSockets."),
        "keys": ("runtime.access.command:keys_command", "Make, list and remove API keys."),
        "talk": (
            "runtime.talk.command:talk_command",
            "Stream a WAV file to a server, hear its reply.",
        ),
        "chat": ("runtime.chat.command:chat_command", "Ask a server in words, read its answer."),
        "transcribe": (
            "runtime.transcribe.command:transcribe_command",
            "Have a server write down a WAV file.",
        ),
        "demo": ("runtime.demo:demo_command", "Serve, talk, record and replay, in one go."),
        "replay": ("replay.cli:replay_command", "Run a recorded session again and compare."),
        "verify": ("replay.cli:verify_command", "Check a log's integrity."),
        "inspect": ("replay.cli:inspect_command", "Tell what happened in a session."),
        "recover": ("replay.recover:recover_command", "Make a damaged log sound again."),
        "compact": ("replay.compact:compact_command", "Make finished logs smaller, to keep them."),
        "view": ("replay.view.command:view_command", "Show a session as one HTML page."),
        "diff": ("replay.diff.command:diff_command", "Say where two sessions part."),
        "fork": ("replay.fork.command:fork_command", "Take a session up again, with a change."),
        "export": ("replay.export.command:export_command", "Write a session as WAV, MP4, MCAP..."),
        "play": ("replay.play.command:play_command", "Serve a recording to clients under test."),
        "shrink": ("replay.shrink.command:shrink_command", "Find the smallest log that fails."),
        "redact": ("replay.redact.command:redact_command", "Take out what was said and shown."),
        "sessions": ("replay.sessions:sessions_command", "List recorded sessions."),
        "prune": ("replay.prune:prune_command", "Remove old recordings."),
        "fuzz": ("replay.fuzz.command:fuzz_command", "Play hostile clients to a server."),
        "bench": ("runtime.bench.command:bench_command", "Measure units, replay and recording."),
        "doctor": ("runtime.doctor.command:doctor_command", "Say whether a model would be served."),
        "schema": ("runtime.schema.command:schema_command", "Describe the wire protocols."),
        "states": ("runtime.cli:states_command", "Draw the session's state diagram."),
    }
)
"""Each command's import string and its line in the help."""
EXIT_BY_SIGNAL: Final = 128
"""What a shell adds to the number of a signal that ended a command."""
LOST_ERRNOS: Final = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Of a stdout that takes nothing more; what befalls a file is said by who writes it."""
VIEWER: Final = "replay.view.document"
"""What shows a recording as a page: its `page_of`, and its `PAGE_CSP`."""


class UntoldError(click.ClickException):
    """What was found could not be told."""

    exit_code = 2


class LazyGroup(click.Group):
    """A group that imports a command when it is asked for, and not for the list of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Name the commands, in the order in which one meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a command; None where there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        return cast("click.Command", getattr(import_module(module), attribute))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the flags before the command, which may ask for the help."""
        with _broken_off():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run a command, and tell what broke it off."""
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a log can hold lone surrogates
        with _broken_off():
            return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_text) for name, (_, help_text) in COMMANDS.items()])


@contextmanager
def _broken_off() -> Iterator[None]:
    """End with the exit code of what broke a command off: an interrupt, or a stdout that is gone.

    Raises:
        UntoldError: stdout takes nothing more, as on a full disk.
        SystemExit: with the code.
    """
    try:
        try:
            yield
        finally:
            if sys.__stdout__ is not None:  # it may have been closed before the process began
                sys.stdout.flush()
    except BaseException as error:
        if _is_interrupt(error):
            click.echo("\ninterrupted", err=True)
            sys.exit(EXIT_BY_SIGNAL + signal.SIGINT)
        lost = _lost_stdout(error)
        if lost is None:
            raise
        _give_up_stdout()
        if lost.errno == errno.EPIPE:  # whoever reads it has seen enough
            sys.exit(EXIT_BY_SIGNAL + signal.SIGPIPE)
        raise UntoldError(f"stdout: {lost.strerror}") from error


def _is_interrupt(error: BaseException) -> bool:
    """Whether it is Ctrl-C, which comes out of tasks in a group."""
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(KeyboardInterrupt) is not None
    return isinstance(error, KeyboardInterrupt)


def _lost_stdout(error: BaseException) -> OSError | None:
    """Say why stdout takes nothing more; None where it does, and the error is another."""
    if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
        return error.__context__  # as rich ends
    while isinstance(error, BaseExceptionGroup):  # as a task that shows what came
        error = error.exceptions[0]
    is_lost = isinstance(error, OSError) and error.errno in LOST_ERRNOS and error.filename is None
    return error if isinstance(error, OSError) and is_lost else None


def _give_up_stdout() -> None:
    """See that what is still due does not fail once more, when Python ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="antiphon")
def main() -> None:
    """Antiphon: a realtime session server for omni models.

    It speaks the MiniCPM-o realtime protocols, records every session, and runs a recording again
    byte for byte. `antiphon demo` shows all of it in a minute.
    """


def load_viewer() -> Viewer:
    """Load what a server shows recordings with; it is asked for with the first page."""
    from .api.recordings import Viewer

    module = import_module(VIEWER)
    return Viewer(page_of=module.page_of, policy=module.PAGE_CSP)


@click.command("states")
def states_command() -> None:
    """Draw the state diagrams (Mermaid), one for each course, from the transition table."""
    from protocol.state import Course, diagram

    for course in Course:
        click.echo(f"%% {course}\n{diagram(course)}", nl=False)
