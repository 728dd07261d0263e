"""What `inspect` says of moves, of clients that were away, and of their playback."""

from __future__ import annotations

from collections.abc import Sequence

from ..shared.recordings import show_seconds
from ..story.reading import Absence, Move, Playback


def move_text(move: Move) -> str:
    """Say when a session moved to another slot, and why."""
    to = "and nowhere else" if move.to_ns is None else f"to {show_seconds(move.to_ns)}"
    fed = f", {move.steps} s fed again" + ("" if move.exact else " fast") if move.steps else ""
    what = "server" if move.why == "restarted" else "worker"
    return f"{show_seconds(move.at_ns)} {to}: the {what} was {move.why}{fed}"


def absence_text(absence: Absence) -> str:
    """Say when a client had no connection, and what that cost."""
    to = "for good" if absence.to_ns is None else f"to {show_seconds(absence.to_ns)}"
    slept = f", without a slot, {absence.steps} s fed again" if absence.slept else ""
    return f"{show_seconds(absence.at_ns)} {to}: the client had no connection{slept}"


def playback_text(told: Sequence[Playback]) -> str:
    """Say how far behind a client's playback was, at last and at most; `told` is not empty."""
    last, most = told[-1], max(told, key=lambda it: it.behind_ms)
    return (
        f"{show_seconds(last.at_ns)} {last.played_ms} ms played, {last.behind_ms} ms behind; "
        f"at most {most.behind_ms} ms behind, at {show_seconds(most.at_ns)}"
    )
