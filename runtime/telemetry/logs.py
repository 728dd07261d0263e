r"""The server's own log: one line for each event, as JSON for machines or as text for people.

    {"timestamp":"...Z","level":"info","logger":"antiphon.session","event":"session over",...}

- All our code uses `logging`; only the command line calls `configure`: an embedded library leaves
  logging as it is.
- `session` is bound in a task (`bound_session`), and inherited by its tasks and threads; so is
  `unit`, by the task that makes the model's calls.
- An event is one line of JSON. In text an exception's trace follows, each line after a bar, so that
  it cannot look like a log line.
- Characters that are not printable are escaped and lengths are bounded, in exceptions too: a
  client's `\n` or `\x1b[2J` can neither forge a line nor reach a terminal.
- Local variables are never written; they hold sound, words and keys.
- Of warnings with one text only `REPEATED_MAX` a second are written, and then how many were not.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, Literal, TextIO

import orjson
import structlog
from structlog import contextvars
from structlog.stdlib import ExtraAdder, ProcessorFormatter, add_log_level, add_logger_name
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, WrappedLogger

from protocol.values.records import session_id_of

# -- the log's lines -------------------------------------------------------------------------------


Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]
ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]

OURS: Final = ("antiphon", "protocol", "recorder", "runtime", "replay")
"""The loggers of our code; of libraries only warnings are logged."""
TEXT_CHARS_MAX: Final = 2048
"""Our lines are below 200; a longer text comes from outside."""
FIELDS_MAX: Final = 32
"""Fields a line: ours have ten at most."""
FRAMES_MAX: Final = 40
"""Frames of a stack: those of the event loop are some twenty."""
TRACE_LINES_MAX: Final = 200
"""Lines of a trace in text: groups of exceptions nest."""
REPEATED_MAX: Final = 20
"""Warnings of one text a second: enough to see what goes on."""
TEXTS_MAX: Final = 256
"""Texts whose lines are counted: ours are some hundred."""
NESTING_MAX: Final = 6
"""Depth of exception groups: task groups nest four deep here."""
FIRST: Final = ("timestamp", "level", "logger", "event", "session", "session_id", "unit")
"""The fields that come first, in this order."""
DOUBLES: Final = ("message", "asctime")
"""Another formatter's copies of the event and its time, which are left out."""


def configure(format: Format, level: Level, *, stream: TextIO | None = None) -> logging.Handler:  # noqa: A002
    """Write the log of this process to `stream`, or standard error; replaces an earlier one.

    `level` is of our own code; libraries log warnings and errors. The caller may remove the
    handler.
    """
    as_text = format == "text"
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(
        ProcessorFormatter(
            foreign_pre_chain=[
                contextvars.merge_contextvars,
                add_log_level,
                add_logger_name,
                ExtraAdder(),
                structlog.processors.TimeStamper(fmt="iso", utc=True),
            ],
            processors=[
                ProcessorFormatter.remove_processors_meta,
                _trace_as_text if as_text else _trace_as_fields,
                _clean,
                _as_text if as_text else _as_json,
            ],
        )
    )
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    least = getattr(logging, level.upper())
    root.setLevel(max(least, logging.WARNING))
    for name in OURS:
        logging.getLogger(name).setLevel(least)
    return handler


def announce(format: Format, *lines: str, logger: str = "antiphon.serve") -> None:  # noqa: A002
    """Write what a start script waits for to standard output, in the format of the log."""
    for line in lines:
        body = {"level": "info", "logger": logger, "event": line}
        structlog.processors.TimeStamper(fmt="iso", utc=True)(None, "", body)
        print(line if format == "text" else _as_json(None, "", body))
    sys.stdout.flush()


def bound_session(recording_id: str) -> AbstractContextManager[None]:
    """Set the session ids on log records within this context."""
    named = {"session": recording_id, "session_id": session_id_of(recording_id)}
    return contextvars.bound_contextvars(**named)


class _Handler(logging.StreamHandler[TextIO]):
    """Our handlers, recognised by their type.

    Of warnings and errors with one text some are written a second, so that a client who causes them
    cannot fill the disk; the next line has the number of those left out, as `repeated`.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._lines = dict[tuple[str, str], tuple[int, int]]()

    def filter(self, record: logging.LogRecord) -> bool:
        """Let a record pass unless its text was written too often in this second."""
        if record.levelno < logging.WARNING:
            return super().filter(record)
        text, second = (record.name, str(record.msg)), int(record.created)
        since, lines = self._lines.pop(text, (second, 0))
        if since != second:
            if lines > REPEATED_MAX:
                record.repeated = lines - REPEATED_MAX
            lines = 0
        self._lines[text] = (second, lines + 1)
        if len(self._lines) > TEXTS_MAX:
            del self._lines[next(iter(self._lines))]
        return lines < REPEATED_MAX and super().filter(record)


# -- the written fields ---------------------------------------------------------------------------


def printable(text: str) -> str:
    """Escape characters that are not printable (direction marks, lone surrogates), and shorten."""
    kept = text[:TEXT_CHARS_MAX]
    if not kept.isprintable():
        kept = "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode() for char in kept
        )
    return kept if len(text) <= TEXT_CHARS_MAX else f"{kept}... ({len(text)} characters)"


def _clean(_logger: WrappedLogger, _method: str, fields: EventDict) -> EventDict:
    """Order the fields, and make each safe to write."""
    names = [name for name in FIRST if name in fields]
    names += [name for name in fields if name not in FIRST and name not in DOUBLES]
    kept = names[:FIELDS_MAX]
    return {printable(str(name)): _safe(fields[name]) for name in kept}


def _safe(value: object, depth: int = 0) -> Any:
    if isinstance(value, bool | float) or value is None:
        return value
    if isinstance(value, int) and abs(value) < 1 << 53:  # every JSON reader can hold it
        return value
    if depth <= 3 * NESTING_MAX:  # a group of exceptions is a list in a mapping in a list
        if isinstance(value, Mapping):
            return {str(name): _safe(item, depth + 1) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [_safe(item, depth + 1) for item in value[:TRACE_LINES_MAX]]
    return printable(str(value))


def _as_json(_logger: WrappedLogger, _method: str, fields: EventDict) -> str:
    return orjson.dumps(fields).decode()


def _as_text(_logger: WrappedLogger, _method: str, fields: EventDict) -> str:
    trace = fields.pop("exception", [])
    head = [str(fields.pop(name, "-")) for name in FIRST[:4]]
    head[1] = f"{head[1]:7}"
    pairs = [f"{name}={_word(value)}" for name, value in fields.items()]
    return "\n".join([" ".join([*head, *pairs]), *(f"  | {line}" for line in trace)])


def _word(value: object) -> str:
    text = str(value)
    return repr(text) if not text or " " in text or "=" in text else text


# -- exceptions -----------------------------------------------------------------------------------

_TRANSFORM: Final = ExceptionDictTransformer(
    show_locals=False, max_frames=FRAMES_MAX, use_rich=False
)


def _exception_of(fields: EventDict) -> ExcInfo | None:
    """The logged exception; None if there is none."""
    raised = fields.pop("exc_info", None)
    if isinstance(raised, tuple) and isinstance(raised[1], BaseException):
        return (type(raised[1]), raised[1], raised[1].__traceback__)
    return None


def _trace_as_fields(_logger: WrappedLogger, _method: str, fields: EventDict) -> EventDict:
    raised = _exception_of(fields)
    if raised is not None:
        fields["exception"] = _summarize(_TRANSFORM(raised))
    return fields


def _summarize(stacks: list[dict[str, Any]], depth: int = 0) -> list[dict[str, Any]]:
    """Keep the parts of an exception, and of its causes, that help to find its bug."""
    kept = []
    for stack in stacks:
        frames = [f"{at['filename']}:{at['lineno']} {at['name']}" for at in stack["frames"]]
        fields = {"type": stack["exc_type"], "text": stack["exc_value"], "frames": frames}
        if stack["is_group"] and depth < NESTING_MAX:
            fields["group"] = [_summarize(inner, depth + 1) for inner in stack["exceptions"]]
        kept.append(fields)
    return kept


def _trace_as_text(_logger: WrappedLogger, _method: str, fields: EventDict) -> EventDict:
    raised = _exception_of(fields)
    if raised is not None:
        found = traceback.TracebackException(
            *raised, limit=-FRAMES_MAX, max_group_depth=NESTING_MAX
        )
        lines = [line for part in found.format() for line in part.rstrip("\n").split("\n")]
        fields["exception"] = lines[:TRACE_LINES_MAX]
    return fields
