"""An engine that is given up: its worker hung, and another is to take its place."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Generator, Sequence
from typing import Any

import attrs
import pytest

from runtime.model.backends.base import BackendGone
from runtime.model.engine import engine as engine_module
from runtime.model.engine.engine import Engine

WAIT_S = 30
DUE_NS = 1_000_000_000


@attrs.frozen
class Ask:
    """A request; all go together."""

    stage = 0
    bucket = "all"


def steps() -> Generator[Ask, int, int]:
    """Ask twice."""
    return (yield Ask()) + (yield Ask())


def test_what_waits_for_an_engine_that_is_stopped_fails(caplog: pytest.LogCaptureFixture) -> None:
    """Sessions of a hung worker would wait for ever, its old model compute on beside the new."""
    begun, gate = threading.Event(), threading.Event()

    def compute(asked: Sequence[Any]) -> list[int]:
        begun.set()
        gate.wait(WAIT_S)
        return [1] * len(asked)

    engine = Engine(compute, batch_max=1)
    with caplog.at_level(logging.DEBUG):
        under_way, waiting = (engine.submit(steps(), due_ns=DUE_NS) for _ in range(2))
        assert begun.wait(WAIT_S)
        engine.stop()
        late = engine.submit(steps(), due_ns=DUE_NS)
        gate.set()
        for future in (under_way, waiting, late):
            with pytest.raises(BackendGone):
                future.result(WAIT_S)
    assert engine.statistics.answers == 1
    assert not caplog.records


def test_an_idle_engine_lets_go_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends a second after its last answer would be aborted in the model's thread."""

    class Model:
        """What an engine computes with."""

        def compute(self, asked: Sequence[Any]) -> list[int]:
            return [1] * len(asked)

    monkeypatch.setattr(engine_module, "IDLE_S", 2 * WAIT_S)
    others = set(threading.enumerate())
    model = Model()
    engine = Engine(model.compute, batch_max=1)
    gone = weakref.ref(model)
    assert engine.submit(steps(), due_ns=DUE_NS).result(WAIT_S) == 2
    (thread,) = set(threading.enumerate()) - others
    del engine, model
    for _ in range(WAIT_S * 100):  # It may be on its way from the answer to its wait.
        if gone() is None:
            break
        thread.join(0.01)
    assert gone() is None
    assert thread.is_alive()


ENDING = """
import atexit, threading
atexit.register(lambda: print(threading.active_count(), flush=True))  # the last one to be called
from runtime.model.engine.engine import Engine

def steps():
    return 1
    yield

engine = Engine(list, batch_max=1)
print(engine.submit(steps(), due_ns=0).result(), flush=True)
"""


def test_a_process_waits_for_its_engine_before_it_ends() -> None:
    """A program that ends right behind its last answer would be aborted now and then."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDING],
        check=False,
        capture_output=True,
        text=True,
        timeout=6 * WAIT_S,
    )
    assert (ended.returncode, ended.stdout.split()) == (0, ["1", "1"]), ended.stderr


@pytest.mark.parametrize("is_busy", [True, False])
def test_an_engine_ends_with_its_process(
    is_busy: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process would end amid a batch, or whoever waits would wait for ever."""
    monkeypatch.setattr(engine_module, "_threads", weakref.WeakKeyDictionary())  # not of others
    threads = list[threading.Thread]()
    ending = threading.Thread(target=engine_module.end_all)

    def compute(asked: Sequence[Any]) -> list[int]:
        threads.append(threading.current_thread())
        if is_busy:
            ending.start()
            while engine._inbox.empty():
                ending.join(0.01)
        return [1] * len(asked)

    engine = Engine(compute, batch_max=1)
    future = engine.submit(steps(), due_ns=DUE_NS)
    if is_busy:
        with pytest.raises(BackendGone):
            future.result(WAIT_S)
    else:
        assert future.result(WAIT_S) == 2
        ending.start()
    ending.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(BackendGone):
        engine.submit(steps(), due_ns=DUE_NS).result(WAIT_S)
    assert not caplog.records
