"""The command line, `antiphon`: the one composition root.

Commands are named by import string and loaded when asked for, so that `antiphon --help` is quick
and `replay` can stand above `runtime`.
"""

from __future__ import annotations

from collections.abc import Mapping
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
VIEWER: Final = "replay.view.document"
"""What shows a recording as a page: its `page_of`, and its `PAGE_CSP`."""


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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_text) for name, (_, help_text) in COMMANDS.items()])


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
