"""One worker process: start, requests, end; every wait is bounded.

Frames are written by a queue's own thread, so no caller blocks on the pipe of a hanging worker;
another thread reads, and notices at once when the worker ends. The worker ends when its input
closes, so also with this process.
"""

from __future__ import annotations

import itertools
import json
import logging
import queue
import subprocess
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ..base import BackendError
from .token2wav_worker import MalformedFrame, read_frame, write_frame

WORKER: Final = Path(__file__).with_name("token2wav_worker.py")
END_WAIT_S: Final = 5.0
"""A busy worker ends within a second; one that hangs is killed."""
CHECK_WAIT_S: Final = 30.0
"""For starting an interpreter from a cold disk without large imports."""

Frame = tuple[dict[str, Any], bytes]

_log = logging.getLogger("antiphon.model")


class VoiceLost(BackendError):  # noqa: N818 - names say what happened
    """The vocoder's process died, hangs or answers garbage; the unit can be rolled back."""


class VoiceUnavailable(ValueError):  # noqa: N818
    """There can be no voice; the text names the missing part in one line."""


class Link:
    """A running worker; `on_end` is called once with the reason of its end, in its own thread.

    `was_closed` says whether the end was requested here.
    """

    def __init__(self, command: list[str], on_end: Callable[[Link, str], None]) -> None:
        self._on_end = on_end
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Frame]] = {}
        self._greeting: Future[dict[str, Any]] = Future()
        self._reason = ""
        self.was_closed = False
        self._outbox: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is the server's: sessions end with their voice.
            )
        except OSError as error:
            raise VoiceUnavailable(f"cannot run {command[0]}: {error.strerror}") from error
        self._reader = threading.Thread(target=self._read, name="token2wav-in", daemon=True)
        threading.Thread(target=self._write, name="token2wav-out", daemon=True).start()
        self._reader.start()

    @property
    def is_alive(self) -> bool:
        """Whether it is running."""
        return not self._reason

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    def greeting(self, wait_s: float) -> dict[str, Any]:
        """Wait until its weights are loaded; return the worker's description.

        `VoiceUnavailable`: it failed, with its reason, or took longer than `wait_s`.
        """
        try:
            greeting = self._greeting.result(wait_s)
        except TimeoutError:
            self.kill(f"it did not load within {wait_s:g} s")
            greeting = {"failed": self._reason}
        except VoiceLost as error:
            greeting = {"failed": str(error)}
        if "hello" not in greeting:
            self.close()
            raise VoiceUnavailable(str(greeting.get("failed", "it does not say hello")))
        hello: dict[str, Any] = greeting["hello"]
        return hello

    def tell(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        """Send a frame without answer; it never blocks, and is safe during garbage collection.

        The queue is bounded by the callers: a frame per opened voice and per dropped state.
        """
        self._outbox.put((dict(header), body))

    def ask(self, header: Mapping[str, Any], body: bytes, wait_s: float) -> Frame:
        """Send a frame and wait for the answer.

        `VoiceLost`: there is none, or it took longer than `wait_s` and the worker was killed.
        """
        number, future = next(self._numbers), Future[Frame]()
        with self._lock:
            if self._reason:
                raise VoiceLost(self._reason)
            self._waiting[number] = future
        self.tell({**header, "number": number}, body)
        try:
            return future.result(wait_s)
        except TimeoutError:
            self.kill(f"it did not answer within {wait_s:g} s")
            raise VoiceLost(self._reason) from None

    def kill(self, reason: str) -> None:
        """Kill it; all waiting callers get the reason."""
        self._fail(reason)
        self._process.kill()

    def close(self) -> None:
        """End it gracefully, and wait until it has ended."""
        self.was_closed = True
        self._fail("it was closed")
        self._outbox.put(None)
        try:
            self._process.wait(END_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        if threading.current_thread() is not self._reader:
            self._reader.join(END_WAIT_S)

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self._reason:
                return
            self._reason = f"the vocoder's process is lost: {reason}"
            waiting, self._waiting = self._waiting, {}
        error = VoiceLost(self._reason)
        with suppress(InvalidStateError):  # It said hello.
            self._greeting.set_exception(error)
        for future in waiting.values():
            future.set_exception(error)

    def _write(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with suppress(OSError), pipe:  # The reader reports its end.
            while (frame := self._outbox.get()) is not None:
                write_frame(pipe, *frame)

    def _read(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None
        reason = "it ended"
        with pipe:
            try:
                while (frame := read_frame(pipe)) is not None:
                    self._take(frame)
            except MalformedFrame as error:
                reason = f"malformed answer: {error}"
            self._fail(reason)
        self._outbox.put(None)
        if reason != "it ended":
            self._process.kill()
        try:
            status = self._process.wait(END_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        _log.info("the vocoder's process %d ended with status %d", self._process.pid, status)
        self._on_end(self, self._reason)

    def _take(self, frame: Frame) -> None:
        if not self._greeting.done():
            with suppress(InvalidStateError):  # It was killed meanwhile.
                self._greeting.set_result(frame[0])
            return
        number = frame[0].get("number")
        with self._lock:
            future = self._waiting.pop(number, None) if isinstance(number, int) else None
            if future is None and not self._reason:
                raise MalformedFrame(f"an answer to {number!r}, which nobody asked")
        if future is not None:
            future.set_result(frame)


def check(python: str) -> dict[str, Any]:
    """Report an interpreter's modules without imports; `VoiceUnavailable` if it cannot be run."""
    command = [python, str(WORKER), "--check"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=CHECK_WAIT_S, check=True)
        found = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise VoiceUnavailable(f"{python} cannot run the vocoder: {''.join(last)}") from error
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise VoiceUnavailable(f"cannot run {python}: {error}") from error
    return dict(found)
