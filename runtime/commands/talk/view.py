"""The views of a conversation: lines, lines under a live panel, or JSON for programs.

`LineView` writes one line for each event; `LiveView`, on a terminal, keeps a panel below them with
the state, the latencies and the KV cache. `JsonView` writes one object a line, without the audio.
All are a `session.Observer`.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Final, Protocol, Self

import attrs
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from protocol.values.messages import (
    Closed,
    Created,
    ErrorReport,
    GoingAway,
    Listen,
    Queued,
    QueueDone,
    QueueUpdate,
    ServerMessage,
    Speech,
)
from protocol.values.model import SAMPLE_BYTES

from ...client.resuming import Reconnected, Reconnecting
from ...client.terminal import (
    clean,
    connection_fields,
    echo_json,
    show_connection,
    show_place,
)
from .session import Observer
from .tally import Happening, Tally

CONTEXT_TOKENS: Final = 8192
"""The context of the models that are served (000, `context_full`); no message tells it."""
REFRESHES_A_SECOND: Final = 8
"""Enough for a clock of tenths to look alive."""
TEXT_CHARS_SHOWN: Final = 400
"""Of the current turn's end: a few lines of a panel."""


class View(Observer, Protocol):
    """Shows a conversation while it is entered."""

    def __enter__(self) -> Self:
        """Begin to show."""
        return self

    def __exit__(self, *_: object) -> None:
        """Show no more."""
        return

    def end(self, summary: dict[str, object]) -> None:
        """Show the summary, after the last event."""


def printable(text: str) -> str:
    """Keep a server's text on one line."""
    return clean(text, kept="")


class LineView(View):
    """A line for each event; `listens`: also for each unit that the model listened to."""

    def __init__(self, console: Console, *, listens: bool = True) -> None:
        self._console = console
        self._listens = listens
        self._had_sound: bool | None = None

    def sent(self, unit: int, at_s: float, *, has_sound: bool) -> None:  # noqa: ARG002
        """Write when the file begins to sound, and when it falls silent."""
        if has_sound != self._had_sound:
            self._write(at_s, "you", "(speaking)" if has_sound else "(silent)", style="cyan")
        self._had_sound = has_sound

    def heard(self, happening: Happening) -> None:
        """Write a server's message."""
        message, at_s = happening.message, happening.at_s
        match message:
            case Queued(place=place) | QueueUpdate(place=place):
                self._write(at_s, "queue", show_place(place))
            case Created():
                text = f"{message.session_id}, recording {message.recording}"
                self._write(at_s, "session", printable(text))
            case Listen() if self._listens:
                self._write(at_s, "model", "(listens)", _cost(happening), style="dim")
            case Speech() if message.text or not message.pcm:
                text = printable(message.text).strip() or "(speaks)"
                self._write(at_s, "model", text, _cost(happening), style="bold green")
            case GoingAway(seconds_left=seconds_left):
                text = f"the server shuts down in {seconds_left} s"
                self._write(at_s, "session", text, style="yellow")
            case ErrorReport():
                text = printable(f"{message.message} ({message.code})")
                self._write(at_s, "error", text, style="red")
            case Closed():
                self._write(at_s, "session", f"closed, {_end_of(message)}")

    def connects(self, change: Reconnecting | Reconnected, at_s: float) -> None:
        """Write that the connection is lost or back."""
        self._write(at_s, "session", show_connection(change), style="yellow")

    def end(self, summary: dict[str, object]) -> None:
        """Write the sums in two lines; a conversation that failed gets its error elsewhere."""
        said = f"{summary['units_speech']} speaking, {summary['units_listen']} listening"
        line = f"{summary['units_sent']} s sent: {said}, {summary['units_dropped']} dropped"
        times = summary["round_trip_ms"]
        if isinstance(times, dict) and times["median"] is not None:
            line += f"; round trip {times['median']:.0f} ms, at most {times['max']:.0f} ms"
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)
        if not summary["answered"] and summary["error"] is None:
            self._console.print("the model did not answer", style="yellow", highlight=False)
        if summary["reply"] is not None:
            line = f"reply: {summary['reply']} ({summary['reply_s']:.1f} s)"
            self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _write(self, at_s: float, who: str, text: str, note: str = "", *, style: str = "") -> None:
        line = Text(f"{at_s:6.1f}s  {who + ':':9}")
        line.append(text, style=style)
        if note:
            line.append(f"  [{note}]", style="dim")
        self._console.print(line, soft_wrap=True)


def _cost(happening: Happening) -> str:
    assert isinstance(happening.message, Listen | Speech)
    metrics = happening.message.metrics
    parts = [f"{metrics.wall_clock_ms:.0f} ms"]
    if happening.round_trip_ms is not None:
        parts.append(f"round trip {happening.round_trip_ms:.0f} ms")
    parts.append(f"kv {metrics.kv_cache_length}")
    if metrics.dropped_units:
        parts.append(f"{metrics.dropped_units} dropped")
    return ", ".join(parts)


def _end_of(closed: Closed) -> str:
    return printable(closed.client_reason or closed.reason)


class LiveView(LineView):
    """Lines, and a panel with the state below them, on a terminal.

    The panel reads `tally` a few times a second; `title` names the file and the server, `file_s` is
    the file's length.
    """

    def __init__(self, console: Console, tally: Tally, title: str, file_s: int) -> None:
        super().__init__(console, listens=False)
        self._tally = tally
        self._title = title
        self._file_s = file_s
        self._started_s = time.monotonic()
        self._live = Live(
            get_renderable=self._panel,
            console=console,
            refresh_per_second=REFRESHES_A_SECOND,
            transient=True,
        )

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def _panel(self) -> RenderableType:
        tally = self._tally
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column()
        table.add_row("model", self._state())
        table.add_row("unit", self._units())
        table.add_row("latency", _latency(tally))
        table.add_row("KV", _gauge(tally.metrics.kv_cache_length))
        words = printable(tally.turns[-1] if tally.turns else "")[-TEXT_CHARS_SHOWN:]
        session = tally.created.session_id if tally.created else "no session yet"
        elapsed_s = time.monotonic() - self._started_s
        return Panel(
            Group(table, Text(words, style="green")),
            title=Text(self._title),
            subtitle=Text(f"{printable(session)}, {elapsed_s:.1f} s"),
        )

    def _state(self) -> Text:
        tally = self._tally
        if tally.away:
            return Text("reconnecting", "yellow")
        if tally.place is not None:
            return Text(f"in the queue: {show_place(tally.place)}")
        if tally.closed is not None:
            return Text("closed")
        if tally.created is None:
            return Text("opening")
        return Text("● speaking", "bold green") if tally.speaking else Text("○ listening", "cyan")

    def _units(self) -> Text:
        tally = self._tally
        text = Text(f"{tally.units_sent} s sent of {self._file_s}, {tally.outcomes} answered")
        if dropped := tally.metrics.dropped_units:
            text.append(f", {dropped} dropped", "red")
        return text


def _latency(tally: Tally) -> Text:
    if not tally.wall_ms:
        return Text("-")
    text = f"{tally.wall_ms[-1]:.0f} ms in the server"
    if tally.round_trips_ms:
        text += f", {tally.round_trips_ms[-1]:.0f} ms round trip"
    return Text(text)


def _gauge(kv_length: int) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    row.add_row(
        ProgressBar(total=CONTEXT_TOKENS, completed=kv_length, width=24),
        Text(f"{kv_length} / {CONTEXT_TOKENS}"),
    )
    return row


class JsonView(View):
    """One JSON object a line, on standard output: each event, and a `summary` at the end."""

    def sent(self, unit: int, at_s: float, *, has_sound: bool) -> None:
        """Write that a second of input is being sent."""
        echo_json({"type": "sent", "at_s": round(at_s, 3), "unit": unit, "has_sound": has_sound})

    def heard(self, happening: Happening) -> None:
        """Write a server's message."""
        echo_json(
            {
                "type": _TYPES[type(happening.message)],
                "at_s": round(happening.at_s, 3),
                **_fields(happening),
            }
        )

    def connects(self, change: Reconnecting | Reconnected, at_s: float) -> None:
        """Write that the connection is lost or back."""
        echo_json({**connection_fields(change), "at_s": round(at_s, 3)})

    def end(self, summary: dict[str, object]) -> None:
        """Write the sums."""
        echo_json({"type": "summary", **summary})


_TYPES: Final[dict[type[ServerMessage], str]] = {
    Queued: "queued",
    QueueUpdate: "queue_update",
    QueueDone: "queue_done",
    Created: "created",
    Listen: "listen",
    Speech: "speech",
    GoingAway: "going_away",
    ErrorReport: "error",
    Closed: "closed",
}


def _fields(happening: Happening) -> dict[str, object]:
    match message := happening.message:
        case Queued(place=place) | QueueUpdate(place=place):
            return attrs.asdict(place)
        case QueueDone():
            return {}
        case Listen() | Speech():
            return {
                **_speech_fields(message),
                "unit": happening.unit,
                "round_trip_ms": happening.round_trip_ms,
                "metrics": attrs.asdict(message.metrics),
            }
    return attrs.asdict(message)


def _speech_fields(message: Listen | Speech) -> dict[str, object]:
    if isinstance(message, Listen):
        return {}
    samples = len(message.pcm) // SAMPLE_BYTES
    return {
        "text": message.text,
        "samples": samples,
        "end_of_turn": message.end_of_turn,
        "response_id": message.response_id,
    }


def summarize(
    tally: Tally, *, answered: bool, elapsed_s: float, reply: Path | None
) -> dict[str, object]:
    """Return the fields of the `summary` of a finished conversation.

    `answered`: the model spoke after the last second with sound; `reply` is the file of its speech,
    if written.
    """
    return {
        "ok": tally.failure is None,
        "error": tally.failure,
        "session_id": tally.created.session_id if tally.created else None,
        "recording": tally.metrics.recording,
        "ended": tally.closed.reason if tally.closed else None,
        "answered": answered,
        "text": tally.text,
        "turns": [turn.strip() for turn in tally.turns],
        "reply": None if reply is None else str(reply),
        "reply_s": round(tally.reply_s, 3),
        "units_sent": tally.units_sent,
        "units_listen": tally.listens,
        "units_speech": tally.speeches,
        "units_dropped": tally.metrics.dropped_units,
        "errors": [attrs.asdict(report) for report in tally.errors],
        "kv_cache_length": tally.metrics.kv_cache_length,
        "wall_clock_ms": _spread(tally.wall_ms),
        "round_trip_ms": _spread(tally.round_trips_ms),
        "reconnects": tally.reconnects,
        "away_s": round(tally.away_s, 3),
        "elapsed_s": round(elapsed_s, 3),
    }


def _spread(values_ms: list[float]) -> dict[str, float | None]:
    if not values_ms:
        return {"median": None, "max": None}
    return {"median": round(median(values_ms), 3), "max": round(max(values_ms), 3)}
