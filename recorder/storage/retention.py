"""Removal of logs by age and by total size.

Rules: the oldest go first, and no more than necessary. Age counts from the file's last change, so a
copy that preserves times keeps its age. A log that is being written or changed within the last
minute is never removed, nor is one that `may_go` holds back; all count towards the total. Only
files with a log's name, and the marks next to them, are touched; a failed removal is reported. No
log is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, Literal

import attrs

from .store import LogInfo, Logs

FRESH_S: Final = 60.0
"""A new log may not be locked yet, or cannot be without locks; and a client may want to see it."""

Cause = Literal["age", "size"]


@attrs.frozen(kw_only=True)
class Retention:
    """What to keep: maximum age, and total size after removing the oldest; None: no limit."""

    age_s_max: float | None = None
    bytes_max: int | None = None


@attrs.frozen(kw_only=True)
class Removal:
    """A log that was removed, or would be."""

    info: LogInfo
    cause: Cause


@attrs.frozen(kw_only=True)
class Failure:
    """A log that could not be removed, and the system's reason."""

    info: LogInfo
    reason: str


@attrs.frozen(kw_only=True)
class Pruned:
    """The result of a removal, or of a dry run.

    Attributes:
        removed: the oldest first.
        held_logs: number of logs due but being written, just written, or held back.
    """

    removed: tuple[Removal, ...]
    failed: tuple[Failure, ...]
    held_logs: int
    kept_logs: int
    kept_bytes: int

    @property
    def freed_bytes(self) -> int:
        """Total size of the removed logs."""
        return sum(removal.info.file_bytes for removal in self.removed)


@attrs.frozen(kw_only=True)
class RetentionStatistics:
    """Logs at the last count, `file_bytes` in total; since the start, removed logs by cause."""

    logs: int = 0
    file_bytes: int = 0
    removed: Mapping[Cause, int] = attrs.field(factory=dict)
    removed_bytes: int = 0
    failures: int = 0

    def after(self, done: Pruned) -> RetentionStatistics:
        """Count once more."""
        removed = Counter[Cause](self.removed)
        removed.update(removal.cause for removal in done.removed)
        return RetentionStatistics(
            logs=done.kept_logs,
            file_bytes=done.kept_bytes,
            removed=removed,
            removed_bytes=self.removed_bytes + done.freed_bytes,
            failures=self.failures + len(done.failed),
        )


def prune(
    store: Logs,
    retention: Retention,
    *,
    now_s: float,
    dry_run: bool = False,
    may_go: Callable[[LogInfo], bool] = lambda _: True,
) -> Pruned:
    """Remove logs beyond `retention`, or with `dry_run` only report them.

    `now_s` is Unix time; `may_go` is asked about each log that is due, and may block. May
    raise `OSError`.
    """
    logs = sorted(store.logs(), key=lambda info: (info.modified_ns, info.recording_id))
    removed: list[Removal] = []
    failed: list[Failure] = []
    left_bytes, held = sum(info.file_bytes for info in logs), 0
    for info in logs:
        cause = _cause(info, retention, now_s, left_bytes)
        if cause is None:
            break  # all later ones are younger
        try:
            # A log that is or may be being written; a future time counts as equally old.
            is_used = abs(now_s - info.modified_s) < FRESH_S or info.is_held()
            if is_used or not may_go(info):
                held += 1
                continue
            if not dry_run:
                store.remove(info)
        except FileNotFoundError:
            pass  # another process removed it
        except OSError as error:
            failed.append(Failure(info=info, reason=error.strerror or str(error)))
            continue
        left_bytes -= info.file_bytes
        removed.append(Removal(info=info, cause=cause))
    return Pruned(
        removed=tuple(removed),
        failed=tuple(failed),
        held_logs=held,
        kept_logs=len(logs) - len(removed),
        kept_bytes=left_bytes,
    )


def _cause(info: LogInfo, retention: Retention, now_s: float, left_bytes: int) -> Cause | None:
    """Return why the oldest remaining log should go; None if it may stay."""
    if retention.age_s_max is not None and now_s - info.modified_s > retention.age_s_max:
        return "age"
    if retention.bytes_max is not None and left_bytes > retention.bytes_max:
        return "size"
    return None
