"""Which logs of a directory may go, and removing them: by age, and by the size of all together.

Rules: the oldest go first, and only what must. A log's age counts from when its file last changed,
so a copy that keeps times keeps its age. A log that is being written is never removed, nor is one
that changed within the last minute, whatever was asked for; both count to the size of all. Only
files that have the name of a log are ever touched; what cannot be removed is told, and left.

It reads no logs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, Literal

import attrs

from .lock import is_held
from .store import LogInfo, Store

FRESH_S: Final = 60.0
"""A log that was just made may not be locked yet, nor can one be where there are no locks; and
whoever has just talked wants to look at it."""

Cause = Literal["age", "size"]


@attrs.frozen(kw_only=True)
class Retention:
    """What is kept; None keeps all.

    Attributes:
        age_s_max: logs that are older go.
        bytes_max: the oldest go until all together take no more.
    """

    age_s_max: float | None = None
    bytes_max: int | None = None


@attrs.frozen(kw_only=True)
class Removal:
    """A log that was removed, or would be.

    Attributes:
        info: the log.
        cause: why.
    """

    info: LogInfo
    cause: Cause


@attrs.frozen(kw_only=True)
class Failure:
    """A log that could not be removed.

    Attributes:
        info: the log.
        reason: what the system said.
    """

    info: LogInfo
    reason: str


@attrs.frozen(kw_only=True)
class Pruned:
    """What was removed, or would be.

    Attributes:
        removed: the oldest first.
        failed: what should have gone and did not.
        held_logs: logs that would have gone, but are being written or were just now.
        kept_logs: logs that are left.
        kept_bytes: of these.
    """

    removed: tuple[Removal, ...]
    failed: tuple[Failure, ...]
    held_logs: int
    kept_logs: int
    kept_bytes: int

    @property
    def freed_bytes(self) -> int:
        """Bytes of the logs that were removed."""
        return sum(removal.info.file_bytes for removal in self.removed)


@attrs.frozen(kw_only=True)
class RetentionStatistics:
    """What is recorded, and what was removed of it since a server began.

    Attributes:
        logs: that there are, when they were counted last.
        file_bytes: of these.
        removed: logs that were removed, by why.
        removed_bytes: of these.
        failures: times that a log could not be removed.
    """

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
    store: Store,
    retention: Retention,
    *,
    now_s: float,
    dry_run: bool = False,
    on_removed: Callable[[Removal], None] = lambda _: None,
) -> Pruned:
    """Remove what need not be kept.

    Args:
        store: the logs.
        retention: what is kept.
        now_s: seconds since the epoch.
        dry_run: remove nothing, and say what would be.
        on_removed: is told of each log, once it is gone.

    Raises:
        OSError: the directory cannot be read.
    """
    logs = sorted(store.logs(), key=lambda info: (info.modified_ns, info.recording_id))
    removed: list[Removal] = []
    failed: list[Failure] = []
    left_bytes, held = sum(info.file_bytes for info in logs), 0
    for info in logs:
        cause = _cause(info, retention, now_s, left_bytes)
        if cause is None:
            break  # all that follow are younger
        try:
            if _is_in_use(info, now_s):
                held += 1
                continue
            if not dry_run:
                info.path.unlink()
        except FileNotFoundError:
            pass  # somebody else was quicker
        except OSError as error:
            failed.append(Failure(info=info, reason=error.strerror or str(error)))
            continue
        left_bytes -= info.file_bytes
        removed.append(Removal(info=info, cause=cause))
        on_removed(removed[-1])
    return Pruned(
        removed=tuple(removed),
        failed=tuple(failed),
        held_logs=held,
        kept_logs=len(logs) - len(removed),
        kept_bytes=left_bytes,
    )


def _cause(info: LogInfo, retention: Retention, now_s: float, left_bytes: int) -> Cause | None:
    """Say why the oldest log that is left should go; None where it need not."""
    if retention.age_s_max is not None and now_s - info.modified_s > retention.age_s_max:
        return "age"
    if retention.bytes_max is not None and left_bytes > retention.bytes_max:
        return "size"
    return None


def _is_in_use(info: LogInfo, now_s: float) -> bool:
    """Whether a log is being written, or may be. One of the future is as old as it is ahead."""
    return abs(now_s - info.modified_s) < FRESH_S or is_held(info.path)
