"""A whole server, simulated: nothing that can happen to it breaks what it promises.

Each seed is a server with its clients, faults and operator (`simulated_plan`); what must be true of
it is in `simulated_rules` and `simulated_server`. What fails is run again by
`python -m tests.simulation.simulate --seed N`.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from protocol.values.model import UNIT_BYTES, Chunk
from protocol.wire.dialects import DIALECTS
from runtime.model.backends.base import BackendError
from tests.sessions.in_memory import on_virtual_time
from tests.simulation.simulate import main
from tests.simulation.simulated_backend import Fleet, ModelPlan
from tests.simulation.simulated_plan import draw
from tests.simulation.simulated_server import Outcome, compare, simulate

SEEDS = (1, 15, 16, 17, 77, 91, 95, 110, 135, 157)
"""The cheapest seeds in which all of `WANTED` happens; `make soak` runs 2000."""
WANTED = {
    *("SendFailed", "PeerGone", "TicketCancelled", "TicketLeft", "AdmissionRefused"),
    *("UnitFailed", "RollbackDone", "FinalizeFailed", "BackendLost", "BackendOpenFailed"),
    *("TurnFailed", "MediaRejected", "RecordingFailed", "Draining", "DropUnit", "crashes"),
    *("over timeout", "over pause_timeout", "over cancelled", "over server_shutdown"),
    *("over broken off", "over invalid_frame", "over backend_error", "unit hangs"),
    *("release hangs", "prefill hangs", "chunk hangs"),
    *("ChunkDone", "ChunkFailed", "over idle"),
    *("LeaseRevoked", "Rebuilt", "RebuildFailed", "deaths", "drains", "gone in rebuild"),
    "rebuilt fast",
    *("gone in open", "gone in unit", "gone in finalize", "gone in interrupt"),
    *("gone in answer", "gone in chunk"),
}
"""What goes wrong somewhere in the seeds; those that pass for want of it would show nothing."""

PAIRS = (31, 34)
"""Seeds in which sessions move that are answered for long enough to be compared."""


@cache
def outcome(seed: int) -> Outcome:
    """Run a simulation once, however many tests look at it."""
    return simulate(seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_server_keeps_its_promises(seed: int) -> None:
    """Some mix of clients and faults loses a slot, mixes up sessions, or holds the server up."""
    assert not outcome(seed).violations


def test_everything_that_should_be_tried_is() -> None:
    """Every kind of fault happens in one of the seeds."""
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        seen.update(outcome(seed).seen)
    assert not WANTED - seen.keys()


def test_what_clients_are_told_does_not_depend_on_the_loss_of_workers() -> None:
    """A session that moved goes on otherwise than one that did not."""
    pairs = [compare(seed) for seed in PAIRS]
    assert not [pair.differences for pair in pairs if pair.differences]
    assert sum(pair.units for pair in pairs) > 10


def test_every_dialect_is_spoken() -> None:
    """A dialect could lose slots or mix up sessions, and no seed would ever speak it."""
    spoken = {client.dialect for seed in range(20) for client in draw(seed).clients}
    assert spoken == set(DIALECTS)


@pytest.mark.soak  # `test_a_server_keeps_its_promises` needs no other interpreter.
def test_a_seed_does_the_same_in_every_process() -> None:
    """What failed once could not be made again."""
    seed, other = SEEDS[2:4]
    again = simulate(seed)
    assert again == outcome(seed)
    assert again.name != outcome(other).name
    command = [sys.executable, "-m", "tests.simulation.simulate", "--seed", str(seed)]
    root = Path(__file__).parents[2]
    environment = {"PYTHONHASHSEED": "1", "PATH": ""}
    run = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    assert again.name in run.stdout


def test_a_rebuild_may_fail_while_the_model_is_down() -> None:
    """The referee would blame the server for the rebuild of a transcription (seed 141)."""
    fleet = Fleet(plan=ModelPlan(slots=1, down_s=5.0), seed="down", report=pytest.fail)

    async def body() -> None:
        worker = fleet.make()
        worker.crash()
        transcript = await worker.transcribe(slot=0)
        with pytest.raises(BackendError, match="the model is down"):
            await transcript.run(Chunk(utterance=0, index=0, pcm=bytes(UNIT_BYTES), seed=7))

    on_virtual_time(body)
    assert fleet.excused == {7}


def test_the_command_says_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody who runs a seed again would not see what is wrong with it."""
    assert main(["--seed", "0"]) == 0
    assert "seed 0: sound" in capsys.readouterr().out
    assert main(["--seeds", "0-1", "--bug", "config-left-over", "--json"]) == 1
    assert "did not ask for" in capsys.readouterr().out
