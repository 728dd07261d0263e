"""`antiphon workers start`: it serves `tiny`, and is killed, stopped and left by gateways."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import attrs
import pytest

from protocol.values.effects import OpenBackend
from protocol.values.model import DuplexConfig, Opening, PastUnit, Unit, Voice
from runtime import RUN
from runtime.link.backend import connect
from runtime.link.link import WorkerAddress, read_address
from runtime.model.backends.base import Backend, BackendGone, BackendSession, HeldModel, Rebuilds
from runtime.model.models import load_backend
from runtime.session.model_calls import try_to_open
from tests.sessions.in_memory import pcm

pytestmark = pytest.mark.anyio

OPENING = Opening(
    instructions="be brief", voice=Voice(llm_pcm=pcm(1.0)), config=DuplexConfig(), seed=7
)
WAIT_S = 60


@attrs.define
class LiveWorker:
    """A worker that takes gateways."""

    process: subprocess.Popen[str]
    address: WorkerAddress


@contextmanager
def live_worker(*arguments: str, model: str, listen: str) -> Iterator[LiveWorker]:
    """Start `antiphon workers start`, and kill it in the end."""
    command = (*RUN, "workers", "start", "--model", model, "--listen", listen, *arguments)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        said = [process.stdout.readline().strip() for _ in range(3)]
        assert said[-1] == "ready", process.stderr.read()
        yield LiveWorker(process, read_address(said[1].removeprefix("listening on ")))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


@pytest.fixture
def anyio_backend() -> str:
    """The server's own event loop."""
    return "trio"


@pytest.fixture(scope="module")
def tiny() -> Iterator[LiveWorker]:
    """One for all tests that leave it alive."""
    with (
        tempfile.TemporaryDirectory() as folder,
        live_worker(model="tiny", listen=f"unix:{folder}/worker") as worker,
    ):
        yield worker


async def speak(backend: Backend, units: int = 6) -> list[object]:
    """A session of some seconds, and all that it gave."""
    session = await backend.open(OPENING, slot=0)
    said: list[object] = [session.opened]
    for index in range(units):
        result = await session.run(Unit(index=index, pcm=pcm(1.0, 0.1 * index)))
        said.append(attrs.evolve(result, costs=type(result.costs)()))
        done = await session.finalize(index, interrupted=False)
        said.append(attrs.evolve(done, cost_us=0))
    await session.release()
    return said


async def test_a_worker_gives_what_the_model_gives_here(tiny: LiveWorker) -> None:
    """A session would depend on the process that holds its model."""
    here = load_backend("tiny")
    async with anyio.create_task_group() as tasks:
        backend = await connect(tiny.address, tasks=tasks)
        assert backend.info == here.info
        assert await speak(backend) == await speak(here)
        tasks.cancel_scope.cancel()


async def test_a_session_is_rebuilt_on_a_worker(tiny: LiveWorker) -> None:
    """A session that lost its worker would end, or go on as another."""
    async with anyio.create_task_group() as tasks:
        backend = await connect(tiny.address, tasks=tasks)
        first, other = [await backend.open(OPENING, slot=slot) for slot in range(2)]
        assert isinstance(other, Rebuilds)
        past, finalized = [], None
        for index in range(5):
            unit = Unit(index=index, pcm=pcm(1.0, 0.1 * index))
            result = attrs.evolve(await first.run(unit), pcm=b"")
            finalized = await first.finalize(index, interrupted=False)
            past.append(PastUnit(unit=unit, result=result, interrupted=False, is_voiced=True))
        rebuilt = await other.rebuild(past, exact=True)
        assert finalized is not None
        assert rebuilt.kv_length == finalized.kv_length
        unit = Unit(index=5, pcm=pcm(1.0, 0.3))
        results = [await session.run(unit) for session in (first, other)]
        costs = type(results[0].costs)()
        assert len({attrs.evolve(result, costs=costs) for result in results}) == 1
        tasks.cancel_scope.cancel()


async def test_a_gateway_that_vanishes_leaves_no_session(tiny: LiveWorker) -> None:
    """A worker would run out of slots, one gateway after the other."""
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            backend = await connect(tiny.address, tasks=tasks)
            slots = range(backend.info.slots)
            sessions = [await _open(backend, slot) for slot in slots]
            tasks.start_soon(_run_into_the_end, sessions[0])
            await anyio.wait_all_tasks_blocked()
            await backend.aclose()
        tasks.cancel_scope.cancel()


async def _open(backend: Backend, slot: int) -> BackendSession:
    """Open as a server does: again, while the last gateway's slots are still being released."""
    model = HeldModel(backend=backend, slot=slot, now_ns=lambda: 0)
    await try_to_open(model, OpenBackend(lease=1, opening=OPENING), anyio.Event())
    assert model.opened is not None
    return model.opened


async def _run_into_the_end(session: BackendSession) -> None:
    with pytest.raises(BackendGone):
        await session.run(Unit(index=0, pcm=pcm()))


async def _run_units(session: BackendSession) -> None:
    for index in range(99):
        await session.run(Unit(index=index, pcm=pcm()))
        await session.finalize(index, interrupted=False)


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
async def test_a_worker_that_is_killed_is_gone(kill: signal.Signals, tmp_path: Path) -> None:
    """Its sessions would wait for an answer that cannot come."""
    with live_worker(model="scripted", listen=f"unix:{tmp_path}/worker") as worker:
        async with anyio.create_task_group() as tasks:
            backend = await connect(worker.address, tasks=tasks)
            session = await backend.open(OPENING, slot=0)
            os.kill(worker.process.pid, kill)
            with anyio.fail_after(60), pytest.raises(BackendGone):
                await _run_units(session)
            await backend.wait_gone()
            tasks.cancel_scope.cancel()


def test_a_worker_needs_no_torch_for_its_gateways(tiny: LiveWorker) -> None:
    """Each gateway would take seconds and hundreds of megabytes."""
    script = (
        "import anyio, sys\n"
        "from runtime.link.link import read_address\n"
        "from runtime.link.backend import connect\n"
        "async def main():\n"
        "    async with anyio.create_task_group() as tasks:\n"
        f"        backend = await connect(read_address({str(tiny.address)!r}), tasks=tasks)\n"
        "        print(backend.info.name, 'torch' in sys.modules)\n"
        "        tasks.cancel_scope.cancel()\n"
        "anyio.run(main, backend='trio')\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert ran.stdout.split()[-1] == "False"


def refused(*arguments: str) -> tuple[int, str]:
    """The exit code and last line of a worker that does not start."""
    ran = subprocess.run(
        [*RUN, "workers", "start", *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    return ran.returncode, ran.stderr.strip().splitlines()[-1]


def test_an_open_address_needs_a_token_and_tls(tmp_path: Path) -> None:
    """Any machine of the network could use the model, and hear its clients."""
    token = tmp_path / "token"
    token.write_text("a token of thirty-two characters\n")
    for arguments in ((), ("--token-file", str(token)), ("--no-tls",)):
        code, text = refused("--listen", "tcp:0.0.0.0:0", *arguments)
        assert (code, "can be reached from other machines" in text) == (2, True)


def test_a_wrong_option_is_told(tmp_path: Path) -> None:
    """It would end later, or serve something else."""
    short = tmp_path / "token"
    short.write_text("short")
    listen = ("--listen", f"unix:{tmp_path}/worker")
    assert refused("--listen", "here")[0] == 2
    assert "a token of 5 characters" in refused(*listen, "--token-file", str(short))[1]
    assert "given together" in refused(*listen, "--tls-cert", str(short))[1]
    assert "unknown model" in refused(*listen, "--model", "nothing")[1]


def test_an_address_in_use_is_told(tiny: LiveWorker) -> None:
    """It would take the address from a worker that serves."""
    code, text = refused("--model", "scripted", "--listen", str(tiny.address))
    assert (code, "the address is in use: give another --listen" in text) == (1, True)


def test_only_its_user_can_open_its_socket(tiny: LiveWorker) -> None:
    """Any user of the machine could use the model."""
    path = Path(str(tiny.address).removeprefix("unix:"))
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_socket_that_was_left_is_taken_over(tmp_path: Path) -> None:
    """A worker that was killed could not be started again."""
    listen = f"unix:{tmp_path}/worker"
    for _ in range(2):
        with live_worker(model="scripted", listen=listen) as worker:
            worker.process.kill()
    with live_worker(model="scripted", listen=listen) as worker:
        worker.process.terminate()
        assert worker.process.wait(WAIT_S) == 0
    assert not (tmp_path / "worker").exists()


def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """A server that was killed would leave its workers, and they its GPUs."""
    listen = f"unix:{tmp_path}/worker"
    command = (
        *RUN,
        "workers",
        "start",
        "--until-stdin-ends",
        "--model",
        "scripted",
        "--listen",
        listen,
    )
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(3)][-1] == b"ready\n"
        process.stdin.close()
        assert process.wait(WAIT_S) == 0
