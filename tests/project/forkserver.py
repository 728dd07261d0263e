"""Processes started by a fork: one that has imported everything forks for each worker and command.

Tests start some three hundred commands, and each would spend 0.6 to 5 s of CPU on imports (torch,
transformers, the server). `installed` has `subprocess.Popen` ask a fork server for each command
that begins as `runtime.RUN` does. `NEW_INTERPRETER`, commands with variables that an interpreter
reads when it starts, and everything outside Linux are started as usual. The workers of pytest-xdist
are forked in the same way, and each has a fork server of its own, forked before pytest is there.

The child is a process with its own arguments, environment, folder and pipes. The fork server forks
twice, and the process that asked adopts the orphan (`PR_SET_CHILD_SUBREAPER` of prctl(2)): it waits
for it, signals and kills it as any child. The child ends once the functions that are registered for
its end (`atexit`) have run: to take torch apart takes 0.3 s. What imports cost and need is tested
with interpreters that are started (`sys.executable -c`) and with built packages (`packed.py`).
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import io
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from runtime import RUN

PR_SET_NAME: Final = 15
NAME_BYTES_MAX: Final = 15
"""Of a process: `serve`, `workers`."""
PR_SET_CHILD_SUBREAPER: Final = 36
REQUEST_BYTES_MAX: Final = 1 << 20
"""Code, arguments and environment of a command."""
DESCRIPTORS_MAX: Final = 32
MOVED_FROM: Final = 1000
"""Descriptors are moved above this number first, for the wanted numbers may be in use."""
PRELOADED: Final = (
    "runtime.serve.serve_command",
    "runtime.worker.command",
    "runtime.model.backends.minicpmo.model",
    "runtime.model.engine.backend",
    "replay.cli",
    "replay.assess.command",
    "replay.export.formats",
    "replay.redact.redaction",
    "replay.view.document",
    "aiortc",
    "mcp",
    "openai.types.live",
    "openai.types.realtime",
)
"""What commands import, and what tests do that takes long."""
WORKER: Final = (sys.executable, "-u", "-c", "import sys;exec(eval(sys.stdin.readline()))")
"""How pytest-xdist starts a worker."""
READ_AT_START: Final = ("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "MALLOC_", "LC_", "LANG")
"""Variables of an interpreter and its libraries, but for `PYTHONPATH`."""
ISOLATES: Final = "--isolate"
"""Has a server start workers, which are forked too."""
NEW_INTERPRETER: Final = (*RUN[:3], f"{RUN[3]} # not forked")
"""Runs `antiphon` as `RUN` does, in an interpreter that has imported nothing."""
LIBC: Final = ctypes.CDLL(None, use_errno=True)


class ForkServer:
    """The fork server of this process."""

    def __init__(self, ours: socket.socket, wait: Callable[[], object]) -> None:
        """Have one that runs; `wait` waits for its end."""
        self._socket, self._wait = ours, wait
        self._lock = threading.Lock()

    @classmethod
    def start_new(cls) -> ForkServer:
        """Start one; it imports while the first command waits."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"from {__name__} import serve; serve({theirs.fileno()})"
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        with theirs:
            process = STARTED(
                (sys.executable, "-P", "-c", code), pass_fds=[theirs.fileno()], env=environment
            )
        return cls(ours, process.wait)

    @classmethod
    def forked(cls) -> ForkServer | None:
        """Fork one, which has imported all that this process has; None in a command of it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid:
            theirs.close()
            return cls(ours, partial(os.waitpid, pid, 0))
        ours.close()
        with open(os.devnull, "rb") as nothing:  # what it was given would be held open by it
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        serve(theirs.detach())
        return None

    def close(self) -> None:
        """End it; the commands that it started go on."""
        self._socket.close()
        self._wait()

    def start(self, request: Mapping[str, object], descriptors: Sequence[int]) -> int:
        """Start a command; return the id of its process, a child of this one."""
        with self._lock:
            LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
                return int(self._socket.recv(64))
            finally:  # the orphans of tests are to be adopted by process 1, as elsewhere
                LIBC.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class Popen(subprocess.Popen[Any]):
    """A child process, forked by the fork server where it can be."""

    server: ForkServer | None = None

    def _execute_child(self, *given: Any) -> None:
        """Start the program; `given` is what `subprocess` gives, by position, until 3.14."""
        args, executable, preexec_fn, close_fds, pass_fds, cwd, env, _, _, shell = given[:10]
        p2cread, _, _, c2pwrite, _, errwrite, _, *owner, is_leader, group = given[10:]
        environment = dict(os.environ if env is None else env)
        folder = os.fsdecode(os.getcwd() if cwd is None else cwd)
        words = [] if isinstance(args, str | bytes | os.PathLike) else list(args)
        is_plain = (executable, preexec_fn, shell, close_fds) == (None, None, False, True)
        is_plain &= (owner, group) == ([None, None, None, -1], -1) and os.path.isdir(folder)
        is_worker = tuple(words) == WORKER
        is_ours = is_worker or _is_command(words)
        if not (is_plain and is_ours and _is_as_here(environment)):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        if Popen.server is None:
            Popen.server = ForkServer.start_new()
        streams = [own if fd == -1 else fd for own, fd in enumerate((p2cread, c2pwrite, errwrite))]
        request = {
            "is_worker": is_worker,
            "code": words[3],
            "arguments": [os.fsdecode(word) for word in words[4:]],
            "environment": environment,
            "folder": folder,
            "is_leader": bool(is_leader),
            "wanted": [0, 1, 2, *pass_fds],
        }
        self.pid = Popen.server.start(request, [*streams, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*given[10:16])  # type: ignore[attr-defined]


STARTED: Final = subprocess.Popen
"""What starts a program."""


@contextmanager
def installed() -> Iterator[None]:
    """Have all commands of this process that are `antiphon` be forked."""
    subprocess.Popen = Popen if sys.platform == "linux" else STARTED  # type: ignore[misc]
    yield
    subprocess.Popen = STARTED  # type: ignore[misc]
    if Popen.server is not None:
        Popen.server.close()
        Popen.server = None


def _is_command(words: Sequence[Any]) -> bool:
    """Whether a program is `antiphon`, maybe with a change that a test makes first."""
    return tuple(words[:3]) == RUN[:3] and len(words) > 3 and str(words[3]).endswith(RUN[3])


def _is_as_here(environment: Mapping[str, str]) -> bool:
    """Whether an interpreter that starts with this environment would be as this one."""
    names = {*environment, *os.environ} - {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}
    return all(
        environment.get(name) == os.environ.get(name)
        for name in names
        if name.startswith(READ_AT_START)
    )


def serve(descriptor: int) -> None:
    """Fork for each request, until the process that asks has ended; the child runs its command."""
    atexit.register(_end)  # the first of them: it is called last
    for name in PRELOADED:
        import_module(name)
    gc.collect()
    gc.freeze()
    asked = socket.socket(fileno=descriptor)
    while True:
        data, descriptors, _, _ = socket.recv_fds(asked, REQUEST_BYTES_MAX, DESCRIPTORS_MAX)
        if not data:
            os._exit(0)
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                _become(json.loads(data), descriptors)
                return
            os.write(writer, b"%d" % child)
            os._exit(0)
        os.waitpid(between, 0)  # from here on the child is an orphan
        asked.send(os.read(reader, 64))
        for each in (reader, writer, *descriptors):
            os.close(each)


def _become(request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Be the process of a command or a worker, and run it."""
    if request["is_leader"]:
        os.setsid()
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, MOVED_FROM) for each in descriptors]
    os.closerange(3, MOVED_FROM)
    for descriptor, wanted in zip(moved, request["wanted"], strict=True):
        os.dup2(descriptor, wanted)
        os.close(descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = filter(None, request["environment"].get("PYTHONPATH", "").split(os.pathsep))
    sys.argv[1:] = request["arguments"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        raw = open(number, "wb" if number else "rb", closefd=False)  # noqa: SIM115 - for its life
        stream = io.TextIOWrapper(
            raw,
            encoding="utf-8",
            errors="backslashreplace" if number == 2 else "strict",
            newline="\n" if number else None,
            line_buffering=number == 2 or raw.isatty(),
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    LIBC.prctl(PR_SET_NAME, (request["arguments"] or [""])[0].encode()[:NAME_BYTES_MAX], 0, 0, 0)
    if request["is_worker"] or ISOLATES in request["arguments"]:
        Popen.server = ForkServer.forked()
        if Popen.server is None:
            return  # a command has ended
        subprocess.Popen = Popen  # type: ignore[misc]
    if request["is_worker"]:
        gc.unfreeze()  # with what is collected and imported, `conftest.py` freezes it again
    try:
        exec(compile(request["code"], "<string>", "exec"), sys.modules["__main__"].__dict__)
    except SystemExit as end:
        _exit_codes.append(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
    _exit_codes.append(0)


_exit_codes: Final[list[int]] = []
"""How the command has ended; nothing if an exception ends it."""


def _end() -> None:
    """End without taking apart what was imported, if nothing else is left to be done."""
    with suppress(OSError, ValueError):  # as when nobody reads: the interpreter says so
        sys.stdout.flush()
        sys.stderr.flush()
        for code in _exit_codes:
            os._exit(code & 0xFF)
