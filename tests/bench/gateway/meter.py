"""What a server of the gateway bench has used so far: told on request, from a thread that sleeps.

CPU is that of the process, and of it what the event loop's thread and the recorder's took; what is
left was spent by workers. Memory is what the kernel holds for the process, and the most that it
held since the figures were told before.

`Stages` splits the event loop's part: it wraps our server's own functions and adds up the CPU
between entering and leaving, that of a stage within a stage counted once. What no function of the
table takes is the transport's and the event loop's. Wrapping costs a microsecond or two a call.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any, Final

KIB: Final = 1024
RECORDER_THREAD: Final = "antiphon-recorder"
STATUS: Final = Path("/proc/self/status")
CLEAR_REFS: Final = Path("/proc/self/clear_refs")
"""A 5 in it has the kernel forget the most that it held."""

STAGES: Final[tuple[tuple[str, str, str], ...]] = (
    ("parse", "protocol.machine.reception", "parse_frame"),
    ("fields", "protocol.wire.dialects.realtime", "Realtime.parse"),
    ("fields", "protocol.machine.reception", "AppendTemplates.read"),
    ("encode", "protocol.wire.dialects.realtime", "Realtime.encode"),
    ("step", "protocol.machine.session", "Session.step"),
    ("step", "protocol.machine.session", "Session.keep"),
    ("log", "runtime.session.journal", "Journal.append_event"),
    ("log", "runtime.session.journal", "Journal.append_effects"),
)
"""A stage, and the function that is its work; several may share one."""


class Stages:
    """CPU nanoseconds by stage, of the thread that calls; see the top of this file.

    Args:
        clock_ns: of that thread.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.thread_time_ns) -> None:
        self.spent_ns: dict[str, int] = {stage: 0 for stage, _, _ in STAGES}
        self._clock_ns = clock_ns
        self._inner_ns: list[int] = []

    def install(self) -> None:
        """Wrap the functions; once in a process."""
        for stage, module, name in STAGES:
            owner: Any = import_module(module)
            *classes, attribute = name.split(".")
            for part in classes:
                owner = getattr(owner, part)
            setattr(owner, attribute, self.wrap(stage, getattr(owner, attribute)))

    def wrap(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Make a function that is measured as part of a stage.

        Args:
            stage: a key of `spent_ns`.
            function: one that does not wait.
        """

        @wraps(function)
        def measured(*arguments: Any, **options: Any) -> Any:
            self._inner_ns.append(0)
            began_ns = self._clock_ns()
            try:
                return function(*arguments, **options)
            finally:
                took_ns = self._clock_ns() - began_ns
                self.spent_ns[stage] += took_ns - self._inner_ns.pop()
                if self._inner_ns:
                    self._inner_ns[-1] += took_ns

        return measured


class Meter:
    """Answers on the standard streams.

    Args:
        has_stages: measure by stage too.
    """

    def __init__(self, *, has_stages: bool) -> None:
        self._stages: Stages | None = None
        if has_stages:
            self._stages = Stages()
            self._stages.install()

    def start(self, port: int) -> None:
        """Say where the server listens, and answer from now on."""
        self._tell({"port": port})
        threading.Thread(target=self._answer, name="bench-meter", daemon=True).start()

    def _answer(self) -> None:
        for _ in sys.stdin:
            self._tell(self.read())
        os.kill(os.getpid(), signal.SIGKILL)  # nobody reads the figures any more

    def _tell(self, body: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(body) + "\n")
        sys.stdout.flush()

    def read(self) -> dict[str, Any]:
        """Say what was used so far, in nanoseconds and bytes."""
        main = threading.main_thread()
        recorders = [it for it in threading.enumerate() if it.name == RECORDER_THREAD]
        now_bytes, most_bytes = _memory_bytes()
        return {
            "cpu_ns": time.process_time_ns(),
            "loop_ns": _cpu_ns(main),
            "recorder_ns": sum(map(_cpu_ns, recorders)),
            "memory_bytes": now_bytes,
            "most_bytes": most_bytes,
            "stages_ns": {} if self._stages is None else dict(self._stages.spent_ns),
        }


def _cpu_ns(thread: threading.Thread) -> int:
    assert thread.ident is not None
    return partial(time.clock_gettime_ns, time.pthread_getcpuclockid(thread.ident))()


def _memory_bytes() -> tuple[int, int]:
    """What the kernel holds for this process, and the most since the last call; 0 if unknown."""
    if not STATUS.is_file():
        return 0, 0
    told = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    now, most = (int(told[name].split()[0]) * KIB for name in ("VmRSS", "VmHWM"))
    with suppress(OSError):
        CLEAR_REFS.write_text("5")
    return now, most
