"""A server's status for people: one self-contained page, reloaded every `REFRESH_S`.

No script, font or picture. All values pass `_text`, and `PAGE_CSP` allows only its style sheet, by
its hash.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Mapping
from html import escape
from typing import Final

from protocol.values.state import State

from ..slots.pool import PoolCounts
from .watching import ServerStatus, SessionStatus

REFRESH_S: Final = 5
"""Seconds; a page of 100 sessions costs the server about a millisecond."""
SESSIONS_SHOWN_MAX: Final = 100
"""People do not read more; scripts get all of them as JSON."""
BAR_WIDTH: Final = 1000
"""Of the drawing, which is scaled to the page."""

STYLE: Final = """
:root{color-scheme:light dark;--ink:#1b2026;--soft:#5d6875;--line:#dfe3e8;--paper:#f6f7f9;
--card:#fff;--good:#1a7f4b;--busy:#2563c9;--warn:#a86400;--bad:#b3261e}
@media(prefers-color-scheme:dark){:root{--ink:#e8ebef;--soft:#98a3b0;--line:#2b323a;--paper:#12161a;
--card:#1a1f25;--good:#4cc38a;--busy:#6ea8fe;--warn:#e0a640;--bad:#f2746b}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:70rem;margin:0 auto;padding:2rem 1.25rem 4rem}
header{display:flex;flex-wrap:wrap;align-items:baseline;gap:.35rem 1rem;margin-bottom:1.5rem}
h1{font-size:1.5rem;margin:0;letter-spacing:-.01em}
h2{font-size:1rem;margin:2rem 0 .6rem}
p{margin:0}.soft{color:var(--soft)}
.pill{padding:.1rem .7rem;border-radius:1rem;border:1px solid currentColor;font-weight:600}
.good{color:var(--good)}.busy{color:var(--busy)}.warn{color:var(--warn)}.bad{color:var(--bad)}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:.75rem;margin:0}
dl div{background:var(--card);border:1px solid var(--line);border-radius:.6rem;padding:.7rem .9rem}
dt{color:var(--soft);font-size:.85rem}
dd{margin:0;font-size:1.5rem;font-weight:600;font-variant-numeric:tabular-nums}
dd small{display:block;line-height:1.4;font-size:.85rem;font-weight:400;color:var(--soft)}
svg{display:block;width:100%;height:.6rem;border-radius:.3rem;margin:1rem 0 .35rem}
svg .rest{fill:var(--line)}svg .leased{fill:var(--busy)}svg .condemned{fill:var(--bad)}
.table{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:.6rem}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.4rem .9rem;border-top:1px solid var(--line);white-space:nowrap}
tr:first-child>*{border-top:0}th{color:var(--soft);font-weight:500;font-size:.85rem}
.number{text-align:right}code{font:.9em ui-monospace,monospace}
"""
PAGE_CSP: Final = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    f"style-src 'sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'"
)
"""The `Content-Security-Policy` to send with the page."""

TONES: Final = {"ready": "good", "full": "warn", "loading": "busy", "draining": "warn"}
"""By the answer of `/ready`; any other is bad."""
STATE_TONES: Final = {State.QUEUED: "warn", State.CONNECTED: "busy", State.ACTIVE: "good"}
COLUMNS: Final = (
    *("recording", "session", "state", "mode", "dialect", "key"),
    *("age", "units", "dropped", "tokens"),
)
NUMBERS_FROM: Final = COLUMNS.index("age")


def status_html(status: ServerStatus) -> str:
    """A server's status as a page; send it with `PAGE_CSP`."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="refresh" content="{REFRESH_S}">'
        f"<title>{_text(status.readiness)} - Antiphon</title><style>{STYLE}</style></head>"
        f"<body><main>\n{_header(status)}\n{_tiles(status)}\n{_slots(status.slots)}\n"
        f"{_sessions(status.sessions)}\n{_recorder(status)}\n{_port(status)}\n"
        "</main></body></html>\n"
    )


def _header(status: ServerStatus) -> str:
    tone = TONES.get(status.readiness, "bad")
    speech = {"on": ", speaks", "off": ", text only"}.get(status.speech or "", "")
    return (
        f'<header><h1>Antiphon</h1><p class="pill {tone}">{_text(status.readiness)}</p>'
        f"<p>{_text(status.model)}{speech}</p>"
        f'<p class="soft">version {_text(status.version)}, up {duration(status.uptime_s)}</p>'
        "</header>"
    )


def _tiles(status: ServerStatus) -> str:
    states = Counter(session.state for session in status.sessions)
    told = ", ".join(f"{states[state]} {state.value.lower()}" for state in State if states[state])
    slots = status.slots
    free = "-" if slots is None else f"{slots.free} <small>of {slots.slots}</small>"
    held = sum(session.kv_tokens for session in status.sessions)
    dropped = sum(session.dropped_units for session in status.sessions)
    tiles = (
        ("sessions", f"{len(status.sessions)} <small>{told}</small>"),
        ("free slots", free),
        ("waiting", str(status.queue_length)),
        ("connections", str(status.connections)),
        ("tokens held", f"{held:,}"),
        ("dropped units", f"{dropped:,}"),
    )
    return "<dl>" + "".join(f"<div><dt>{n}</dt><dd>{v}</dd></div>" for n, v in tiles) + "</dl>"


def _slots(slots: PoolCounts | None) -> str:
    """Draw the slots as a bar; sizes are attributes, because a style would need its own hash."""
    if slots is None or not slots.slots:
        return '<p class="soft">The model is being loaded.</p>'
    leased = BAR_WIDTH * slots.leased // slots.slots
    condemned = BAR_WIDTH * slots.condemned // slots.slots
    told = f"{slots.leased} in use, {slots.free} free, {slots.condemned} condemned"
    return (
        f'<svg viewBox="0 0 {BAR_WIDTH} 10" preserveAspectRatio="none" role="img" '
        f'aria-label="slots: {told}"><rect class="rest" width="{BAR_WIDTH}" height="10"/>'
        f'<rect class="leased" width="{leased}" height="10"/>'
        f'<rect class="condemned" x="{BAR_WIDTH - condemned}" width="{condemned}" height="10"/>'
        f'</svg><p class="soft">{told}</p>'
    )


def _sessions(sessions: tuple[SessionStatus, ...]) -> str:
    if not sessions:
        return '<h2>Sessions</h2><p class="soft">None now.</p>'
    shown = sessions[:SESSIONS_SHOWN_MAX]
    rest = len(sessions) - len(shown)
    more = f'<p class="soft">and {rest} newer ones</p>' if rest else ""
    rows = "".join(_row(session) for session in shown)
    return f"<h2>Sessions</h2>{_table(COLUMNS, rows)}{more}"


def _row(session: SessionStatus) -> str:
    tone = STATE_TONES.get(session.state, "soft")
    away = "" if session.connection == "connected" else f", {session.connection}"
    cells = (
        f"<code>{_text(session.recording_id)}</code>",
        f"<code>{_text(session.session_id)}</code>",
        f'<span class="{tone}">{session.state.value.lower()}</span>{away}',
        _text(session.mode),
        _text(session.dialect or "-"),
        _text(session.owner or "-"),
        duration(session.age_s),
        f"{session.chunks if session.mode == 'transcription' else session.units:,}",
        f"{session.dropped_units:,}",
        f"{session.kv_tokens:,}",
    )
    return "<tr>" + "".join(_cell("td", at, cell) for at, cell in enumerate(cells)) + "</tr>"


def _recorder(status: ServerStatus) -> str:
    if not status.recorder:
        return '<h2>Recorder</h2><p class="soft">Nothing is recorded.</p>'
    return f"<h2>Recorder</h2>{_figures(status.recorder)}"


def _port(status: ServerStatus) -> str:
    seen = status.listener
    if seen is None:
        return ""
    figures = {"websockets": seen.websockets, "pauses": seen.pauses}
    figures |= {f"refused: {cause}": count for cause, count in sorted(seen.refused.items())}
    figures |= {f"dropped: {cause}": count for cause, count in sorted(seen.dropped.items())}
    figures |= {f"denied: {reason}": count for reason, count in sorted(status.denied.items())}
    return f"<h2>Connections</h2>{_figures(figures)}"


def _figures(figures: Mapping[str, int | float]) -> str:
    """Figures by name, as a table of one row."""
    names = tuple(_text(name.replace("_", " ")) for name in figures)
    values = "".join(f"<td>{value:,}</td>" for value in figures.values())
    return _table(names, f"<tr>{values}</tr>", numbers_from=len(names))


def _table(names: tuple[str, ...], rows: str, *, numbers_from: int = NUMBERS_FROM) -> str:
    head = "".join(_cell("th", at, name, numbers_from) for at, name in enumerate(names))
    return f'<div class="table"><table><tr>{head}</tr>{rows}</table></div>'


def _cell(tag: str, at: int, content: str, numbers_from: int = NUMBERS_FROM) -> str:
    kind = ' class="number"' if at >= numbers_from else ""
    return f"<{tag}{kind}>{content}</{tag}>"


def duration(seconds: float) -> str:
    """A duration in its two largest parts: `3 d 4 h`, `2 h 5 min`, `5 min 3 s`, `9 s`."""
    whole = max(0, int(seconds))
    parts = (("d", whole // 86_400), ("h", whole // 3600 % 24), ("min", whole // 60 % 60))
    named = [*parts, ("s", whole % 60)]
    while len(named) > 1 and not named[0][1]:
        named.pop(0)
    return " ".join(f"{value} {unit}" for unit, value in named[:2])


def _text(value: object) -> str:
    return escape(str(value))
