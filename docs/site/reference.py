"""The pages of the reference that are made from code, by their names on the site."""

from __future__ import annotations

import ast
import inspect
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Final

import click

from replay.eval.evaluate import MEASURES
from replay.eval.evaluate import SETTINGS as EVERY_MEASURE
from runtime.cli import GROUPS, main
from runtime.serve.routing import SPOKEN
from runtime.settings.settings import Setting, Settings, declared
from runtime.telemetry import catalogue
from runtime.telemetry.metrics import SERVER_METRICS

from .openapi import HEALTH, MODULES, openapi
from .staging import ROOT

TYPES: Final[Mapping[str, str]] = {
    "antiphon": "`@antiphon/client`: `antiphon.js`, in browsers and Node",
    "conversation": "`@antiphon/client/media`: a conversation",
    "microphone": "`@antiphon/client/media`: the microphone",
    "speaker": "`@antiphon/client/media`: the loudspeaker",
    "camera": "`@antiphon/client/media`: the camera",
    "listeners": "Listeners, which a conversation has",
}
PYTHON: Final[Mapping[str, tuple[str, str]]] = {
    "To talk to a server": (
        "[In Python](../guides/python.md) has whole programs.",
        "connect DuplexSession ChatSession Answer message transcribe TranscriptionSession",
    ),
    "What the server says": (
        "What a session yields, in the order of a session: `Event` in full duplex, "
        "`TranscriptEvent` in a transcription.",
        "Event TranscriptEvent QueuePlace Created Listen Speech Interrupted Prefilled Delta "
        "Response ToolCalled TranscriptDelta TranscriptDone Metrics Paused Resumed Reconnecting "
        "Reconnected "
        "GoingAway ErrorReport ErrorCode Closed",
    ),
    "What a client says": (
        "Settings of a session, and the parts of a question.",
        "DuplexConfig ChatConfig ReferenceAudio VoiceName SpeechRequest ChatMessage TextPart "
        "ImagePart AudioPart VideoPart tool Tool called ToolCall returned ToolResult "
        "tools_from_mcp",
    ),
    "Errors of the client": (
        "Every one is a `ClientError`.",
        "ClientError AddressError CannotConnectError HandshakeRejectedError SessionRefusedError "
        "SessionClosedError ReportedError ProtocolError LocalProtocolError RemoteProtocolError",
    ),
    "Message by message": (
        "A session without the client's own rules: for tests of a server.",
        "connect_raw ClientSession Init Append",
    ),
    "Streaming input": (
        "A model in the same process; [Streaming input](../streaming.md) explains it. It needs the "
        "extra `server`.",
        "load_backend load_backend_async Streaming StreamingInput SamplingParams StreamingOutput "
        "runtime.streaming.StreamingRequest runtime.streaming.Text runtime.streaming.TokenIds "
        "runtime.streaming.Sound runtime.streaming.Picture runtime.streaming.BackendError "
        "runtime.streaming.BackendRefused runtime.streaming.BackendGone "
        "runtime.streaming.Refused runtime.streaming.ParameterError",
    ),
    "To read a recording": (
        "Record by record; [the log's format](../log-format.md) says what is in it.",
        "LogReader read_log Record Damage verify_log VerifyReport RecorderError LogDamaged "
        "Unreadable recorder.format.format.RECORD_VERSIONS recorder.format.format.Fields "
        "recorder.format.format.Value",
    ),
    "To run it again": (
        "Logic replay, and what differs between two recordings.",
        "replay_log ReplayReport compare_logs DiffReport",
    ),
    "What happened, and how it went": (
        "As `antiphon recordings inspect`, `antiphon eval` and `antiphon export` have it.",
        "inspect_log Inspection measure_log export_log",
    ),
    "A model of your own": (
        "What a model gives the server. [An example](../examples.md#a-model-of-your-own) is one "
        "in 100 lines.",
        "runtime.model.backends.base protocol.values.model",
    ),
}
"""By heading: an introduction, and names, those of `antiphon` without it, in the order to read."""


def generated() -> dict[str, str]:
    """All pages: their names and texts."""
    return {
        "reference/commands.md": commands(),
        "reference/settings.md": settings(),
        "reference/http.md": http(),
        "reference/metrics.md": metrics(),
        "reference/measures.md": measures(),
        "reference/openapi.json": json.dumps(openapi(_version()), indent=1),
        "reference/python.md": python(),
        "reference/javascript.md": javascript(),
    }


# -- the command line -----------------------------------------------------------------------------


def commands() -> str:
    """The command line, from its parsers."""
    lines = [
        "# Command line",
        "",
        "As `antiphon COMMAND --help` shows it, with version "
        f"{_version()}. Each lists its exit codes: 0 for success, 2 for a command that is wrong,"
        " 130 for one that Ctrl-C cut off.",
        "",
    ]
    context = click.Context(main, info_name="antiphon")
    for heading, group in GROUPS.items():
        lines += [f"## {heading}", ""]
        for name in group:
            with warnings.catch_warnings(action="ignore"):  # trio's and Hypothesis's of each other
                command = main.get_command(context, name)
            assert command is not None
            lines += _command(command, click.Context(command, context, info_name=name))
    return "\n".join(lines)


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    usage = " ".join(command.collect_usage_pieces(context))
    yield from (f"### {context.command_path}", "", f"`{context.command_path} {usage}`", "")
    yield from (_prose(command.help or ""), "")
    rows = [row for param in command.get_params(context) if (row := param.get_help_record(context))]
    if rows:
        yield from ("| option | |", "|---|---|")
        for flags, text in rows:
            yield f"| `{_cell(flags)}` | {_cell(_escaped(text))} |"
        yield ""
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            within = command.get_command(context, name)
            assert within is not None
            yield from _command(within, click.Context(within, context, info_name=name))


def _prose(text: str) -> str:
    """Write the help of a command as Markdown: one after a backspace keeps its lines."""
    parts = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        if paragraph.lstrip().startswith("\b"):
            parts.append("```text\n" + paragraph.lstrip("\b \n").rstrip() + "\n```")
        else:
            parts.append(_escaped(" ".join(paragraph.split())))
    return "\n\n".join(parts)


def _escaped(text: str) -> str:
    text = text.replace("<", "&lt;")
    return text if "`" in text else re.sub(r"([*_\[\]])", r"\\\1", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _version() -> str:
    found = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
    assert found is not None
    return found[1]


# -- settings and addresses -----------------------------------------------------------------------


def settings() -> str:
    """All settings of a server."""
    lines = [
        "# Settings",
        "",
        "Every setting of `antiphon serve` is a key of a TOML file, a variable and a flag. "
        "[Running a server](../operations.md#configuration) says which one counts, and explains "
        "what belongs together.",
        "",
    ]
    heading = ""
    for each in declared(Settings):
        if each.heading and each.heading != heading:
            heading = each.heading
            head = "| key, variable, flag | default | allowed | meaning |"
            lines += ["", f"## {heading}", "", head, "|---|---|---|---|"]
        lines.append(_setting(each))
    return "\n".join([*lines, ""])


def _setting(each: Setting) -> str:
    default = each.unset if each.default is None or each.default == () else str(each.default)
    default = default.lower() if each.kind == "truth" else default
    names = f"`{each.name}`<br>`{each.variable}`<br>`{each.flag}`"
    allowed = each.allowed or ("true, false" if each.kind == "truth" else "")
    cells = (names, default, allowed, each.help if "`" in each.help else _escaped(each.help))
    return f"| {' | '.join(map(_cell, cells))} |"


def http() -> str:
    """The addresses of a server."""
    lines = [
        "# HTTP",
        "",
        "All on the server's one port. A key is sent as a bearer token, or by a browser as a "
        "password; without keys every request may do all. [Running a "
        "server](../operations.md#over-http) has their fields and codes. For programs, "
        "[openapi.json](openapi.json) has all as OpenAPI 3.1.",
        "",
        "## WebSockets",
        "",
        "| dialect | address | first message |",
        "|---|---|---|",
    ]
    for name, (address, first) in SPOKEN.items():
        link = f"[`{name}`](../protocol.md#{name})"
        lines.append(f"| {link} | `{address}` | `{first}` |")
    lines = [line.replace("| `` |", "| |") for line in lines]
    lines += ["", "## Health", "", "| address | is | for |", "|---|---|---|"]
    lines += [f"| `{request}` | {text} | {whom} |" for request, (text, whom) in HEALTH.items()]
    for name in MODULES:
        module = ast.parse((ROOT / "runtime" / "api" / f"{name}.py").read_text("utf-8"))
        title, _, rest = (ast.get_docstring(module) or "").partition("\n")
        rows = [line for line in rest.splitlines() if line.startswith("|")]
        lines += ["", f"## {title.partition(':')[0].rstrip('.')}", "", title, ""]
        lines += rows or [" ".join(rest.split())]
    return "\n".join([*lines, ""])


# -- metrics and measures -------------------------------------------------------------------------


def metrics() -> str:
    """The metrics of a server."""
    lines = ["# All metrics", "", "[Metrics, logs and traces](../metrics.md) says how to use them."]
    for heading, found in (
        ("Of sessions and their units, from their logs", catalogue.ALL),
        ("Of the server, at the time of the request", SERVER_METRICS),
    ):
        lines += [
            "",
            f"## {heading}",
            "",
            "| metric | kind | labels | meaning |",
            "|---|---|---|---|",
        ]
        for it in found:
            labels = ", ".join(f"`{label}`" for label in it.labels)
            lines.append(f"| `{it.name}` | {it.kind} | {labels} | {it.meaning} |")
    return "\n".join([*lines, ""])


def measures() -> str:
    """The measures of conversations, and what holds for all of them."""
    lines = [
        "# Measures",
        "",
        'What `antiphon eval` measures ([how](../evaluate.md)). "Better" is the direction of good '
        "values; a measure without one describes. Those of the sessions `forced` are measured by "
        "`--mode forced`: missed, added and otherwise mean compared with the recording.",
        "",
        "| measure | unit | better | sessions | definition | source |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{it.name}` | {it.unit} | {it.better or '-'} | {it.modes} | {it.definition} | "
        f"{it.source} |"
        for it in MEASURES.values()
    ]
    lines += ["", "## For all of them", "", *(f"- {text}" for text in EVERY_MEASURE)]
    return "\n".join([*lines, ""])


# -- libraries ------------------------------------------------------------------------------------


def python() -> str:
    """The names that users import, as a reader wants them."""
    lines = ["# Python", "", "::: antiphon", "    options:", "      members: false", ""]
    for heading, (introduction, names) in PYTHON.items():
        lines += [f"## {heading}", "", introduction, ""]
        for name in names.split():
            lines += [f"::: {name if '.' in name else f'antiphon.{name}'}", ""]
    return "\n".join(lines)


def javascript() -> str:
    """The types of the client for browsers and Node."""
    folder = ROOT / "runtime" / "web" / "types"
    lines = ["# JavaScript", ""]
    lines += [
        "The types of the package; [The console](../console.md#a-page-of-your-own) explains it."
    ]
    for name, title in TYPES.items():
        text = (folder / f"{name}.d.ts").read_text("utf-8")
        lines += ["", f"## {title}", "", "```typescript", text.rstrip(), "```"]
    return "\n".join([*lines, ""])
