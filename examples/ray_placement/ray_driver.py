"""The process that talks to Ray for a server, and the actor that runs a worker.

    server -> {"ray": ADDRESS, "command": [...], "token": TOKEN}      once
    driver -> {"connected": true}                                     or {"failed": TEXT}, and ends
    server -> {"call": 1, "do": "find" | "end" | "want", "worker": 3, "again": true, "count": 8}
    driver -> {"call": 1, "found": ADDRESS | null}                    or {"call": 1, "failed": TEXT}
    driver -> {"note": TEXT}                                          what a call waits for

- It is a process of its own because a process that uses Ray is of no more use, or is ended by Ray,
  when its node's raylet or the head is gone; the server and its sessions must go on.
- It ends when its standard input does. Then Ray ends the actors, and these their workers.
- A call of `find` takes as long as the worker needs to come, so each call has a thread.
- Ray is imported only when it is used: a node needs it, a test does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TextIO

from runtime import ERROR, RUN
from runtime.link.link import TcpAddress

NOTE_S: Final = 30.0
"""Between two notes about one wait: a node that is started for a GPU takes minutes."""
PAUSE_S: Final = 1.0
"""While Ray restarts an actor, calls to it fail at once."""
NODE_S: Final = 3.0
"""Between two looks at this node; Ray takes it for dead some seconds after its raylet."""
TLS_ENABLED: Final = "RAY_USE_TLS"
TLS_CERT: Final = "RAY_TLS_SERVER_CERT"
TLS_KEY: Final = "RAY_TLS_SERVER_KEY"
TLS_AUTHORITY: Final = "RAY_TLS_CA_CERT"
"""Ray's own variables: the link is encrypted where the cluster is."""

Write = Callable[[Mapping[str, object]], None]


class WorkerEndedError(Exception):
    """The worker did not start; the text is its last line."""


class WorkerActor:
    """An `antiphon workers start` on the node where Ray put this actor; each ends with the other.

    Args:
        command: the options of the worker's model.
        token: shared with the server; the worker reads it from a pipe, so that no file holds it.
    """

    def __init__(self, command: Sequence[str], token: str) -> None:
        import ray

        address = TcpAddress(ray.util.get_node_ip_address(), 0)
        read, write = os.pipe()
        os.write(write, token.encode())
        os.close(write)
        self._process = subprocess.Popen(
            [
                *(*RUN, "workers", "start", "--until-stdin-ends", "--listen", str(address)),
                *("--token-file", f"/dev/fd/{read}", *tls_options(os.environ), *command),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(read,),
            text=True,
            errors="replace",
        )
        os.close(read)
        self._known = threading.Event()
        self._address = ""
        self._last_words = "it does not say why"
        self._stderr = threading.Thread(target=self._pass_on, daemon=True)
        self._stderr.start()
        threading.Thread(target=self._follow, daemon=True).start()

    def address(self) -> str:
        """Wait until the worker takes gateways, and return where; `WorkerEndedError`."""
        self._known.wait()
        if not self._address:
            raise WorkerEndedError(self._last_words)
        return self._address

    def _follow(self) -> None:
        """Read what the worker says; end the actor with a worker that was ready."""
        address = ""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            address = line.strip().removeprefix("listening on ") if "listening" in line else address
            if line == "ready\n":
                self._address = address
                self._known.set()
        code = self._process.wait()
        self._stderr.join(PAUSE_S)
        if self._address:
            print(f"the worker ended with {code}: {self._last_words}", file=sys.stderr, flush=True)
            os._exit(1)  # not a method's error: Ray starts the actor again only after a crash
        self._known.set()

    def _pass_on(self) -> None:
        """Copy the worker's log to the actor's, which Ray keeps, and keep its last line."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._last_words = line.strip().removeprefix(ERROR) or self._last_words
            print(line, end="", file=sys.stderr, flush=True)


def tls_options(environ: Mapping[str, str]) -> list[str]:
    """The options of a worker's TLS, in the environment of a Ray node."""
    if not uses_tls(environ):
        return ["--no-tls"]
    return ["--tls-cert", environ.get(TLS_CERT, ""), "--tls-key", environ.get(TLS_KEY, "")]


def uses_tls(environ: Mapping[str, str]) -> bool:
    """Whether Ray encrypts what its nodes say to each other."""
    return environ.get(TLS_ENABLED, "0").lower() in {"1", "true"}


class _Wait:
    """Notes what a worker waits for, every `NOTE_S`."""

    def __init__(self, worker: int, write: Write) -> None:
        self._worker = worker
        self._write = write
        self._last_s = time.monotonic()

    def note(self, what: Callable[[], str]) -> None:
        if time.monotonic() - self._last_s >= NOTE_S:
            self._last_s = time.monotonic()
            self._write({"note": f"worker {self._worker} of Ray waits for {what()}"})


class Driver:
    """The workers of one server, by their numbers; `write` sends a line to it."""

    def __init__(self, command: Sequence[str], token: str, write: Write) -> None:
        import ray

        self._ray = ray
        kind = ray.remote(WorkerActor)
        self._kind = kind.options(num_gpus=1, max_restarts=-1, max_task_retries=0)
        self._arguments = (list(command), token)
        self.write = write
        self._lock = threading.Lock()
        self._actors: dict[int, Any] = {}

    def find(self, worker: int) -> str:
        """Wait for the address of a worker, which is started where there is none.

        `WorkerEndedError`: it does not start; its actor is ended.
        """
        errors, wait = self._ray.exceptions, _Wait(worker, self.write)
        while True:
            with self._lock:
                actor = self._actors.get(worker) or self._kind.remote(*self._arguments)
                self._actors[worker] = actor
            try:
                self._wait(actor.__ray_ready__.remote(), wait, self._why_not_placed)
                address = self._wait(actor.address.remote(), wait, lambda: "its model to load")
                return str(address)
            except errors.ActorUnavailableError:  # it is lost, and Ray looks for another node
                wait.note(self._why_not_placed)
                time.sleep(PAUSE_S)
            except (errors.RayActorError, errors.RayTaskError) as error:
                self._drop(worker, actor)
                raise WorkerEndedError(_words(getattr(error, "cause", error))) from error

    def end(self, worker: int, *, again: bool) -> None:
        """Kill a worker's actor; `again`: Ray starts it again."""
        with self._lock:
            actor = self._actors.get(worker) if again else self._actors.pop(worker, None)
        if actor is not None:
            self._ray.kill(actor, no_restart=not again)

    def _drop(self, worker: int, actor: object) -> None:
        with self._lock:
            if self._actors.get(worker) is actor:
                del self._actors[worker]
        self._ray.kill(actor)

    def want(self, count: int) -> None:
        """Ask the cluster's autoscaler for as many GPUs; 0 withdraws the request."""
        from ray.autoscaler.sdk import request_resources

        request_resources(bundles=[{"GPU": 1}] * count)

    def _wait(self, result: object, wait: _Wait, what: Callable[[], str]) -> object:
        while not self._ray.wait([result], timeout=PAUSE_S)[0]:
            wait.note(what)
        return self._ray.get(result)

    def _why_not_placed(self) -> str:
        free = self._ray.available_resources().get("GPU", 0)
        there = self._ray.cluster_resources().get("GPU", 0)
        return f"a GPU: the cluster has {there:g}, of which {free:g} are free"


def _words(error: object) -> str:
    """The first line of an error, and the last: Ray puts traces between."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:1] + lines[1:][-1:]) or type(error).__name__


def main() -> None:
    """Serve one server until its end of the pipe is closed."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not an answer
    write = _writer(answers)
    asked = json.loads(sys.stdin.readline())
    try:
        import ray

        ray.init(address=asked["ray"], log_to_driver=False, logging_level="WARNING")
        driver = Driver(asked["command"], asked["token"], write)
    except Exception as error:
        write({"failed": _words(error)})
        return
    write({"connected": True})
    threading.Thread(target=_end_with_node, args=(ray,), daemon=True).start()
    for line in sys.stdin:
        threading.Thread(target=_perform, args=(driver, json.loads(line)), daemon=True).start()
    with suppress(Exception):
        driver.want(0)
        ray.shutdown()
    os._exit(0)  # no thread that still waits keeps the process


def _end_with_node(ray: Any) -> None:
    """End when the cluster takes this node for dead: then it starts no actor of this process."""
    node = ray.get_runtime_context().get_node_id()
    while True:
        time.sleep(NODE_S)
        if not any(each["Alive"] for each in ray.nodes() if each["NodeID"] == node):
            print("the cluster takes this node for dead", file=sys.stderr, flush=True)
            os._exit(1)


def _writer(answers: TextIO) -> Write:
    lock = threading.Lock()

    def write(message: Mapping[str, object]) -> None:
        with lock, suppress(OSError):
            answers.write(json.dumps(message) + "\n")
            answers.flush()

    return write


def _perform(driver: Driver, asked: Mapping[str, Any]) -> None:
    answer: dict[str, object] = {"call": asked["call"], "found": None}
    try:
        match asked["do"]:
            case "find":
                answer["found"] = driver.find(asked["worker"])
            case "end":
                driver.end(asked["worker"], again=asked["again"])
            case "want":
                driver.want(asked["count"])
    except Exception as error:
        answer = {"call": asked["call"], "failed": _words(error)}
    driver.write(answer)
