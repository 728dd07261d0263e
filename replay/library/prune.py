"""`antiphon recordings prune`: remove old logs, as a server does by `record_keep_days`."""

from __future__ import annotations

import sys
import time
from typing import Final

import click
from rich.console import Console

from recorder.storage.remote import RemoteStore, logs_of
from recorder.storage.retention import FRESH_S, Pruned, Removal, Retention, prune
from recorder.storage.store import Logs, Store

from ..shared.commands import print_json
from ..shared.recordings import (
    logs_at,
    read_size,
    read_span,
    reading_place,
    show_bytes,
    show_moment,
)

ROWS_MAX: Final = 20
"""Logs that are named; JSON names all."""


@click.command("prune")
@click.argument("place", metavar="DIR|URL")
@click.option("--store", metavar="URL", help="Of a DIR: the object store, where they go too.")
@click.option(
    "--older-than", type=read_span, metavar="SPAN", help="Logs that last changed so long ago: 30d."
)
@click.option(
    "--larger-than", type=read_size, metavar="SIZE", help="The oldest, while all take more: 50GB."
)
@click.option("--dry-run", is_flag=True, help="Remove nothing, and list the logs that would go.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def prune_command(
    *,
    place: str,
    store: str | None,
    older_than: float | None,
    larger_than: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove recorded sessions, the oldest first: by age, by total size, or both.

    They are removed from a folder, or under a URL of an object store; with --store from both, each
    recording counted once. In a store, age counts from the upload.

    A log that is being written is never removed, nor is one that changed within the last minute.
    Only session logs of the folder or prefix itself are touched, and the annotations next to them.
    A removed log is gone.

    \b
    Examples:
      antiphon recordings prune recordings --older-than 30d --dry-run
      antiphon recordings prune recordings --older-than 30d --larger-than 50GB
      antiphon recordings prune recordings --store s3://bucket/prefix --older-than 90d

    \b
    Exit codes:
      0  done, even if no log was removed
      1  some logs could not be removed
      2  the folder or the store cannot be read, or neither an age nor a size is given
    """  # noqa: D301 - click takes a backspace to keep the lines
    if older_than is None and larger_than is None:
        raise click.UsageError("say what may go: --older-than SPAN, --larger-than SIZE, or both")
    retention = Retention(age_s_max=older_than, bytes_max=larger_than)
    logs = logs_at(place)
    if store is not None:
        logs = _both(logs, store)
    with reading_place(place):
        done = prune(logs, retention, now_s=time.time(), dry_run=dry_run)
    if as_json:
        print_json(_body(place, done, dry_run))
    else:
        _print(done, dry_run=dry_run)
    for failure in done.failed:
        click.echo(f"{failure.info.place}: {failure.reason}", err=True)
    sys.exit(1 if done.failed else 0)


def _both(local: Logs, url: str) -> Logs:
    if not isinstance(local, Store):
        raise click.UsageError("--store is for a folder; or prune the URL itself")
    remote = logs_at(url)
    if not isinstance(remote, RemoteStore):
        raise click.UsageError(f"--store {url}: no URL of a store")
    with reading_place(url):
        remote.check()
    return logs_of(local, remote)


def _body(place: str, done: Pruned, dry_run: bool) -> dict[str, object]:
    return {
        "directory": place,
        "dry_run": dry_run,
        "removed": [_removal_json(removal) for removal in done.removed],
        "freed_bytes": done.freed_bytes,
        "failed": [
            {"recording_id": it.info.recording_id, "reason": it.reason} for it in done.failed
        ],
        "held_logs": done.held_logs,
        "kept_logs": done.kept_logs,
        "kept_bytes": done.kept_bytes,
    }


def _removal_json(removal: Removal) -> dict[str, object]:
    info = removal.info
    return {
        "recording_id": info.recording_id,
        "cause": removal.cause,
        "file_bytes": info.file_bytes,
        "modified_ms": info.modified_ns // 1_000_000,
    }


def _print(done: Pruned, *, dry_run: bool) -> None:
    console = Console(highlight=False)
    for removal in done.removed[:ROWS_MAX]:
        info = removal.info
        moment, size = show_moment(info.modified_ns // 1_000_000), show_bytes(info.file_bytes)
        console.print(f"{info.recording_id}  {moment}  {size}  {removal.cause}", soft_wrap=True)
    more = len(done.removed) - ROWS_MAX
    if more > 0:
        console.print(f"and {more} more, see --json")
    verb = "would remove" if dry_run else "removed"
    freed, kept = show_bytes(done.freed_bytes), show_bytes(done.kept_bytes)
    console.print(f"{verb} {len(done.removed)} logs, {freed}; {done.kept_logs} left, {kept}")
    if done.held_logs:
        reason = f"being written, or changed within the last {FRESH_S:g} s"
        console.print(f"kept though due: {done.held_logs} ({reason})", soft_wrap=True)
