"""The steps of a recorded server, in the order of the log: frames heard and sent, and its end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import attrs

from protocol.values import events as ev
from recorder.format.records import Record
from recorder.read.reader import LogReader
from recorder.read.scan import Damage
from runtime.serve.routing import CHAT_PATH, DUPLEX_PATH, LIVE_PATH, REALTIME_PATH

from ..story.reading import event_in
from ..story.wire import Wire


class ScriptError(Exception):
    """A log cannot be played; the message says why, in one line."""


@attrs.frozen(kw_only=True)
class Heard:
    """A frame of the client's, of a kind of `wire.Wire.kind`."""

    at_ns: int
    kind: str


@attrs.frozen(kw_only=True)
class Said:
    """A frame of the server's, verbatim."""

    at_ns: int
    frame: str


@attrs.frozen(kw_only=True)
class Ended:
    """The connection's end: `closed` by the server, `left` by the client, or `broken`.

    A broken one was dropped by the server, or killed with it.
    """

    at_ns: int
    how: Literal["closed", "left", "broken"]
    code: int = 1000
    reason: str = ""


Step = Heard | Said | Ended


def read_opening(log: Path) -> ev.ConnectionOpened:
    """The first event of a recording; `ScriptError` if it is lost.

    `RecorderError`: the log cannot be read; `OSError`: there is no such file.
    """
    with LogReader(log) as reader:
        for item in reader:
            if isinstance(item, Record) and item.kind == "event":
                event = event_in(item)
                if isinstance(event, ev.ConnectionOpened):
                    return event
                break
    raise ScriptError("the session's first event is lost")


def address_of(opened: ev.ConnectionOpened) -> str:
    """The address of such a client: path and query."""
    match opened.endpoint:
        case "realtime":
            return f"{REALTIME_PATH}?mode={opened.mode}"
        case "duplex":
            return DUPLEX_PATH + quote(opened.label, safe="")
        case "chat":
            return CHAT_PATH
        case "live":
            return LIVE_PATH
        case "openai":
            return f"{REALTIME_PATH}?model={quote(opened.label, safe='')}"


def steps(items: Iterable[Record | Damage], wire: Wire) -> Iterator[Step]:
    """The steps of a log's items, the end last; raises `ScriptError` for a damaged log."""
    at_ns = 0
    for item in items:
        if isinstance(item, Damage):
            raise ScriptError(f"the log is damaged: {item.reason}, {item.detail}")
        at_ns = max(at_ns, item.at_ns)
        step = _step(item, wire)
        if step is not None:
            yield step
        if isinstance(step, Ended):
            return
    yield Ended(at_ns=at_ns, how="broken")


def _step(record: Record, wire: Wire) -> Step | None:
    fields, at_ns = record.fields, record.at_ns
    frame = fields.get("frame")
    match record.kind, fields.get("type"):
        case "rx", _:
            kind = wire.kind(frame if isinstance(frame, str | bytes) else None)
            return Heard(at_ns=at_ns, kind=kind)
        case "tx", _ if isinstance(frame, str):
            return Said(at_ns=at_ns, frame=frame)
        case "effect", "Close":
            code, reason = fields.get("code"), fields.get("reason")
            if isinstance(code, int) and isinstance(reason, str):
                return Ended(at_ns=at_ns, how="closed", code=code, reason=reason)
        case "event", "PeerGone":
            return Ended(at_ns=at_ns, how="left")
        case "event", "SendFailed":
            return Ended(at_ns=at_ns, how="broken")
    return None
