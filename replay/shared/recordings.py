"""Recordings, amounts and times, as people write and read them.

A recording is named by a path, or by `NAME`, `FOLDER/NAME` or `URL/NAME`, where a name is its own
id, its session's, or `last`. One in an object store is downloaded while the command runs.

A time span (`30d`) and a size (`50GB`, `512MiB`) need a unit: a bare number would be a guess, and
some commands delete. Moments are in UTC, as in recording ids. The fields of a log's records are
read with their types checked, because a log may hold anything.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Final, TypeVar

import click

from protocol.values.limits import NS_PER_MS, NS_PER_S
from protocol.values.records import is_session_id, session_id_of
from recorder.format.format import SUFFIX, Fields
from recorder.storage.remote import RemoteStore, StoredLog, StoreError, is_url
from recorder.storage.store import LocalLog, LogInfo, Logs, Store
from recorder.write.files import FILE_MODE, PART_PREFIX
from runtime.settings.settings import PREFIX, RECORDINGS

from .commands import UnusableError, complaint, progress, reason

# -- the fields of a log's records -----------------------------------------------------------------


T = TypeVar("T")


def below(fields: Fields, name: str) -> Fields:
    """The fields of an object in a field; empty if it holds none."""
    value = fields.get(name)
    return value if isinstance(value, Mapping) else {}


def typed(fields: Fields, name: str, kind: type[T]) -> T | None:
    """A field's value; None if it is missing, or of another type."""
    value = fields.get(name)
    return value if isinstance(value, kind) else None


REDACTED: Final = "redacted"
"""The field of a log's head that names its redactions."""


def removed_in(head: Fields) -> frozenset[tuple[str, str]]:
    """List the kinds of media that are missing, each with the side that it was of."""
    entries = typed(head, REDACTED, list) or typed(head, REDACTED, tuple) or ()
    removed = [
        (typed(one, "kind", str) or "", typed(one, "side", str) or "")
        for entry in entries
        if isinstance(entry, Mapping) and isinstance(listed := entry.get("removed"), list | tuple)
        for one in listed
        if isinstance(one, Mapping)
    ]
    return frozenset(removed)


# -- recordings, amounts and times -----------------------------------------------------------------


SECONDS_OF: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
BYTES_OF: Final = {
    **{"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40},
}
LAST: Final = "last"
"""The name of the recording that was written to last."""
FOLDER_VARIABLE: Final = PREFIX + "RECORD_TO"
PAGE_SUFFIX: Final = ".html"
SHOWN_UNITS: Final = ("TB", "GB", "MB", "kB")

_AMOUNT: Final = re.compile(r"(\d{1,12}(?:\.\d{1,6})?) ?([A-Za-z]+)", re.ASCII)
_MS_PER_S: Final = 1000


class RecordingType(click.ParamType[Path]):
    """A recording by any of its names, as the path of its log or of a copy of that.

    `many`: a folder stands for all logs in it, and not for the only one; `is_local`: none of an
    object store is taken.
    """

    name = "path"

    def __init__(self, *, many: bool = False, is_local: bool = False) -> None:
        self._many, self._is_local = many, is_local

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path:
        """Find a log, and download one of a store until the command ends; `UnusableError`."""
        text = os.fspath(value) if isinstance(value, Path) else str(value)
        path = Path(text)
        if ctx is None or ctx.resilient_parsing:
            return path
        if not is_url(text) and path.is_dir():
            return path if self._many else _only_one(path)
        if os.path.lexists(text) or (text.endswith(SUFFIX) and not is_url(text)):
            return path
        if self._is_local and is_url(text):
            self.fail(f"{text} is in an object store, which this command cannot read", param)
        found = find_recording(text)
        if isinstance(found, LocalLog):
            return found.path
        assert isinstance(found, StoredLog)
        with reading_place(text):
            return _download(found, ctx)


def default_folder() -> str:
    """The folder of recordings, as `antiphon serve` has it."""
    return os.environ.get(FOLDER_VARIABLE) or str(RECORDINGS)


def find_recording(text: str) -> LogInfo:
    """Find a recording by `NAME`, `FOLDER/NAME` or `URL/NAME`; raises `UnusableError`."""
    place, _, name = text.removesuffix(SUFFIX).rpartition("/")
    if is_url(text) and place.endswith("/"):
        example = f"s3://bucket/prefix/NAME{SUFFIX}"
        raise UnusableError(f"{text}: not the URL of a recording, such as {example}")
    place = place or default_folder()
    if not is_url(place) and not Path(place).is_dir():
        raise UnusableError(
            f"{text}: there is no such file, and no folder {place} with a recording {name}: "
            f"name its file, or set {FOLDER_VARIABLE}"
        )
    logs = logs_at(place)
    with reading_place(place):
        if name == LAST:
            found = next(iter(logs.logs()), None)
        elif is_session_id(name):
            named = (it for it in logs.logs() if session_id_of(it.recording_id) == name)
            found = next(named, None)
        else:
            found = logs.find(name)
    if found is None:
        raise UnusableError(
            f"{text}: there is no recording {name} in {place}: `antiphon recordings list {place}`"
        )
    return found


def _only_one(folder: Path) -> Path:
    with reading_place(str(folder)):
        found = Store(folder).logs()
    if len(found) != 1:
        count = len(found) or "no"
        raise UnusableError(
            f"{folder}: it has {count} recordings, and one is needed: {folder}/{LAST}, or as "
            f"`antiphon recordings list {folder}` names them"
        )
    return found[0].path


def _download(log: StoredLog, ctx: click.Context) -> Path:
    free_bytes = shutil.disk_usage(gettempdir()).free
    if log.file_bytes > free_bytes:
        free, needed = show_bytes(free_bytes), show_bytes(log.file_bytes)
        raise StoreError(f"{log.place}: it takes {needed}, and {gettempdir()} has {free} left")
    # The root's end comes even if another argument is wrong.
    folder = Path(ctx.find_root().with_resource(TemporaryDirectory(prefix=PART_PREFIX)))
    path = folder / (log.recording_id + SUFFIX)
    with path.open("xb") as file, progress(log.file_bytes, "download") as watch:
        path.chmod(FILE_MODE)
        log.remote.fetch(log, file, watch)
    return path


def next_to(log: Path, name: str) -> Path:
    """Where a command writes a file about a log; in this directory if the log was downloaded."""
    return Path(name) if log.parent.name.startswith(PART_PREFIX) else log.with_name(name)


def page_next_to(log: Path) -> Path:
    """Where `antiphon recordings view` writes its page about a log."""
    return next_to(log, log.name.removesuffix(SUFFIX) + PAGE_SUFFIX)


def logs_at(place: str) -> Logs:
    """The logs of a folder, or under the URL of an object store; raises `UnusableError`."""
    if not is_url(place):
        if not Path(place).is_dir():
            is_file = Path(place).exists()
            raise UnusableError(
                f"{place}: {'it is a file, not a folder' if is_file else 'there is no such folder'}"
            )
        return Store(Path(place))
    try:
        return RemoteStore.open(place)
    except OSError as error:
        raise UnusableError(reason(error)) from error


@contextmanager
def reading_place(place: str) -> Iterator[None]:
    """Raise the errors of a folder or a store that cannot be read as `UnusableError`."""
    try:
        yield
    except StoreError as error:
        raise UnusableError(reason(error)) from error
    except OSError as error:
        raise UnusableError(complaint(error, Path(place))) from error


def read_span(text: str) -> float:
    """Parse a time span such as `36h`, in seconds; the type of an option."""
    amount = _amount(text, SECONDS_OF)
    if amount is None:
        raise click.BadParameter(f"{text!r} is not a time span, such as 30d, 36h, 90m or 20s")
    return amount


def read_size(text: str) -> int:
    """Parse a size such as `50GB`, in bytes; the type of an option."""
    amount = _amount(text, BYTES_OF)
    if amount is None:
        raise click.BadParameter(f"{text!r} is not a size, such as 50GB, 512MiB or 0B")
    return int(amount)


def read_since(text: str) -> float | datetime:
    """Parse a span before now, or a date with or without a time; without a zone it is in UTC."""
    ago_s = _amount(text, SECONDS_OF)
    if ago_s is not None:
        return ago_s
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        why = f"{text!r} is neither a time span, such as 7d, nor a date, such as 2026-01-31"
        raise click.BadParameter(why) from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _amount(text: str, units: dict[str, int]) -> float | None:
    found = _AMOUNT.fullmatch(text.strip())
    if found is None or found[2] not in units:
        return None
    return float(found[1]) * units[found[2]]


def since_ms(since: float | datetime, now_s: float) -> int:
    """A moment, or seconds before `now_s` (since the epoch), in Unix milliseconds."""
    at_s = since.timestamp() if isinstance(since, datetime) else now_s - since
    return int(at_s * _MS_PER_S)


def show_moment(unix_ms: int) -> str:
    """A moment to the second, in UTC."""
    return f"{datetime.fromtimestamp(unix_ms // _MS_PER_S, UTC):%Y-%m-%d %H:%M:%S}"


def show_span(span_ms: int) -> str:
    """A duration as minutes and seconds."""
    seconds = span_ms // _MS_PER_S
    return f"{seconds // 60}:{seconds % 60:02}"


def show_seconds(span_ns: int) -> str:
    """A duration of nanoseconds in seconds, to the millisecond."""
    return f"{span_ns / NS_PER_S:.3f} s"


def show_ms(span_ns: int) -> str:
    """A duration of nanoseconds in whole milliseconds."""
    return f"{span_ns / NS_PER_MS:.0f} ms"


def show_bytes(count: int) -> str:
    """A size with about three digits."""
    for unit in SHOWN_UNITS:
        if count >= BYTES_OF[unit]:
            amount = count / BYTES_OF[unit]
            return f"{amount:.1f} {unit}" if amount < 100 else f"{amount:.0f} {unit}"
    return f"{count} B"
