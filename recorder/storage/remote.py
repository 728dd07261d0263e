"""Session logs in an object store: S3, Google Cloud Storage, Azure, or a mounted folder.

The package `obstore` reaches the store; it reads credentials and regions from the environment, and
is imported when a store is opened.

Rules: an object's name is the store's prefix and a log's file name; other objects, and those in
folders below the prefix, are ignored. An object appears whole or not at all. `put` reads it back
and compares the hash of every byte. All calls block, each request for about a minute at most: call
them in a thread.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Self, TypeVar
from urllib.parse import unquote, urlsplit

import attrs

from ..format.format import MIB, SUFFIX, is_recording_id
from ..read.scan import OpenSource
from ..write.files import FILE_MODE
from .store import LocalLog, LogInfo, Logs, Store, newest_first, recording_id_in

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

T = TypeVar("T")

SCHEMES: Final = ("s3", "gs", "az", "file", "memory")
"""Of a store's URL; `memory` lasts as long as its process, and is for tests."""
PART_BYTES: Final = 5 * MIB
"""Sent and read at once, the least that S3 takes: two uploads with two parts each take 20 MiB, and
the 10,000 parts of an object are 48 GiB. `obstore` gives a request 30 s: 170 kB/s will do."""
PARTS_AT_ONCE: Final = 2
RETRIES_MAX: Final = 3
"""Of one request, with growing pauses; the caller tries again later."""
RETRY_S: Final = 60
"""No retry begins later than that."""
READ_BYTES_MIN: Final = 64 * 1024
"""Read at once: the head or the tail of most logs."""
READ_BYTES_MAX: Final = MIB
"""Read at once from a log that is read on and on: each reader holds so much."""
AWAY_S: Final = 60.0
"""A store that hangs takes a minute of a thread for each request; clients make many."""
REASON_CHARS_MAX: Final = 300
"""Of a store's error: its first line, not its answer."""


class StoreError(OSError):
    """An object store, or the package that reaches it, cannot be used; the text is one line."""


class MissingError(StoreError, FileNotFoundError):
    """An object, or a bucket, is missing."""


@attrs.frozen(kw_only=True)
class StoredLog(LogInfo):
    """A log in an object store; `modified_ns` is the time of its upload.

    `e_tag`: names the object's content, where the store has such names.
    """

    remote: RemoteStore = attrs.field(eq=False, repr=False)
    e_tag: str | None = None

    @property
    def place(self) -> str:
        """Its URL."""
        return f"{self.remote.url}/{self.recording_id}{SUFFIX}"

    def open(self) -> OpenSource:
        """Read it by ranges, as it is needed."""
        return _RemoteSource(self)

    def is_held(self) -> bool:
        """False: objects do not grow."""
        return False


class RemoteStore:
    """The logs under one URL of an object store; any thread may use it."""

    def __init__(self, objects: ObjectStore, url: str) -> None:
        self._objects = objects
        self._putting: set[str] = set()
        self._withdrawn: set[str] = set()
        self._lock = threading.Lock()
        self.url = url.rstrip("/")

    @classmethod
    def open(cls, url: str) -> Self:
        """Open a store without a request; `StoreError`: its URL, or the configuration, is wrong."""
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES:
            schemes = ", ".join(f"{scheme}://" for scheme in SCHEMES)
            raise StoreError(f"{url}: not the URL of a store, which begins with one of {schemes}")
        if parts.username or parts.password or parts.query or parts.fragment:
            text = "no credentials or options: they come from the environment"
            raise StoreError(f"{parts.scheme}://: the URL of a store takes {text}")
        from obstore.store import from_url  # of an extra: the command line names it

        # No options for its client: they would replace those of the environment.
        retries = {"max_retries": RETRIES_MAX, "retry_timeout": timedelta(seconds=RETRY_S)}
        with _as_store_error(url):
            return cls(from_url(url, retry_config=retries), url)  # type: ignore[call-overload]

    def check(self) -> None:
        """Ask for the first objects; `StoreError` if the store refuses or does not answer."""
        with self._errors(), suppress(StopIteration):
            next(iter(self._objects.list(chunk_size=1)))

    def logs(self) -> tuple[StoredLog, ...]:
        """List the logs, the last stored first."""
        with self._errors():
            found = self._objects.list_with_delimiter()["objects"]
        logs = (self._log_of(each) for each in found)
        return tuple(sorted((it for it in logs if it is not None), key=newest_first))

    def find(self, recording_id: str) -> StoredLog | None:
        """Return one log, or None; `recording_id` may be untrusted text."""
        if not is_recording_id(recording_id):
            return None
        with suppress(MissingError), self._errors():
            return self._log_of(self._objects.head(recording_id + SUFFIX))
        return None

    def remove(self, log: LogInfo) -> None:
        """Remove a log, also one that is being put; some stores raise `MissingError` for none."""
        with self._lock:
            self._withdrawn |= self._putting & {log.recording_id}
        with self._errors():
            self._objects.delete(log.recording_id + SUFFIX)

    def put(self, log: LocalLog) -> bool:
        """Store a log in place of one of that name, and read it back.

        Returns False if it was removed from the store meanwhile: then it is not stored.
        `StoreError`: it was not stored, or did not come back as it is: to be put again.
        `FileNotFoundError`: there is no such local log now.
        """
        name, hashed = log.recording_id, _hash_of(log)
        with self._lock:
            self._putting.add(name)
        try:
            self._put(log, hashed)
        except StoreError:
            if name not in self._withdrawn:
                raise
        finally:
            with self._lock:
                is_withdrawn = name in self._withdrawn
                self._putting.discard(name)
                self._withdrawn.discard(name)
            if is_withdrawn:
                with suppress(FileNotFoundError):
                    self.remove(log)
        return not is_withdrawn

    def _put(self, log: LocalLog, hashed: bytes) -> None:
        name = log.path.name
        try:
            with self._errors():
                self._objects.put(
                    name, log.path, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE
                )
        except MissingError as error:
            if log.path.exists():  # it is the bucket that is missing
                raise StoreError(str(error)) from error
            raise
        if self.url.startswith("file://"):  # else its mode is that of the bucket
            Path(unquote(urlsplit(self.url).path), name).chmod(FILE_MODE)
        if not self._holds(log, hashed):
            raise StoreError(f"{self.url}: {name} was read back with other bytes")

    def holds(self, log: LocalLog) -> bool:
        """Whether the store has the bytes of a local log; reads both completely."""
        return self._holds(log, _hash_of(log))

    def _holds(self, log: LocalLog, hashed: bytes) -> bool:
        found = self.find(log.recording_id)
        if found is None or found.file_bytes != log.file_bytes:
            return False
        return _hash_of(found) == hashed

    def read(self, log: StoredLog, offset: int, count: int) -> bytes:
        """Read a part of a log, at least a byte; `StoreError` if the object is another now."""
        options = {"range": (offset, offset + count)} | (
            {} if log.e_tag is None else {"if_match": log.e_tag}
        )
        with self._errors():
            data = bytes(self._objects.get(log.recording_id + SUFFIX, options=options).bytes())  # type: ignore[arg-type]
        if len(data) != min(count, log.file_bytes - offset):
            raise StoreError(f"{log.place}: the store gave {len(data)} bytes of {count}")
        return data

    def fetch(self, log: StoredLog, file: BinaryIO, watch: Callable[[int], None]) -> None:
        """Write a log to a file, in parts; `watch` is called with the bytes of each."""
        for start in range(0, log.file_bytes, PART_BYTES):
            part = self.read(log, start, min(PART_BYTES, log.file_bytes - start))
            file.write(part)
            watch(len(part))

    def _log_of(self, meta: ObjectMeta) -> StoredLog | None:
        recording_id = recording_id_in(meta["path"])
        if recording_id is None:
            return None
        e_tag = meta["e_tag"]
        name = hashlib.sha256((e_tag or "").encode()).digest()
        return StoredLog(
            recording_id=recording_id,
            inode=int.from_bytes(name[:7], "big"),
            file_bytes=meta["size"],
            modified_ns=int(meta["last_modified"].timestamp() * 1e6) * 1000,
            remote=self,
            e_tag=e_tag,
        )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        with _as_store_error(self.url):
            yield


@contextmanager
def _as_store_error(url: str) -> Iterator[None]:
    """Raise the package's errors as `StoreError`."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, NotImplementedError, OSError, ValueError) as error:
        first_line = str(error).partition("\n")[0][:REASON_CHARS_MAX]
        kind = MissingError if isinstance(error, FileNotFoundError) else StoreError
        raise kind(f"{url}: {first_line}") from error


class _RemoteSource:
    """A stored log as a source; reads ahead, the more the longer it is read in order."""

    def __init__(self, log: StoredLog) -> None:
        self._log = log
        self._start = 0
        self._data = b""
        self._ahead = READ_BYTES_MIN

    def size(self) -> int:
        return self._log.file_bytes

    def read(self, offset: int, count: int) -> bytes:
        end = min(offset + count, self._log.file_bytes)
        if offset >= end:
            return b""
        if offset < self._start or end > self._start + len(self._data):
            self._load(offset, end)
        return self._data[offset - self._start : end - self._start]

    def _load(self, offset: int, end: int) -> None:
        is_next = self._start <= offset <= self._start + len(self._data)
        self._ahead = min(self._ahead * 2, READ_BYTES_MAX) if is_next else READ_BYTES_MIN
        self._start = min(offset, max(0, self._log.file_bytes - READ_BYTES_MIN))
        end = min(max(end, self._start + self._ahead), self._log.file_bytes)
        self._data = b""  # not two of them at once
        self._data = self._log.remote.read(self._log, self._start, end - self._start)

    def close(self) -> None:
        self._data = b""


def _hash_of(log: LogInfo) -> bytes:
    source, hashed = log.open(), hashlib.sha256()
    try:
        for start in range(0, log.file_bytes, PART_BYTES):
            hashed.update(source.read(start, min(PART_BYTES, log.file_bytes - start)))
    finally:
        source.close()
    return hashed.digest()


class CombinedLogs:
    """The logs of a directory and of a store, each recording once, the local log first.

    A store that does not answer keeps its last list, and is asked again after `AWAY_S`; removing
    takes away both. `clock` gives monotonic seconds.
    """

    def __init__(
        self, local: Store, remote: RemoteStore, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._local = local
        self._remote = remote
        self._clock = clock
        self._listed: tuple[StoredLog, ...] = ()
        self._away_until_s = float("-inf")

    def logs(self) -> tuple[LogInfo, ...]:
        """List the logs, the last grown or stored first."""
        with suppress(StoreError):
            self._listed = self._ask(self._remote.logs)
        each: dict[str, LogInfo] = {log.recording_id: log for log in self._listed}
        each.update((log.recording_id, log) for log in self._local.logs())
        return tuple(sorted(each.values(), key=newest_first))

    def find(self, recording_id: str) -> LogInfo | None:
        """Return one log, or None; `recording_id` may be untrusted text."""
        here = self._local.find(recording_id)
        return here or self._ask(lambda: self._remote.find(recording_id))

    def remove(self, log: LogInfo) -> None:
        """Remove the local log, then the stored one."""
        # In this order: an upload that begins in between finds no local log.
        for each in (self._local, self._remote):
            with suppress(FileNotFoundError):
                each.remove(log)

    def _ask(self, request: Callable[[], T]) -> T:
        if self._clock() < self._away_until_s:
            raise StoreError(f"{self._remote.url}: it failed less than {AWAY_S:g} s ago")
        try:
            return request()
        except StoreError:
            self._away_until_s = self._clock() + AWAY_S
            raise


def logs_of(local: Store, remote: RemoteStore | None) -> Logs:
    """Return the logs of a directory, and of a store if there is one."""
    return local if remote is None else CombinedLogs(local, remote)


def is_url(text: str) -> bool:
    """Whether a text is a URL, and not a path."""
    return "://" in text
