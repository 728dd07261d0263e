"""What is chosen for a GPU, and refused where it does not hold: what of it is seen without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from protocol.values.model import UNIT_SAMPLES, Unit
from runtime.model.backends.base import DeviceLost
from runtime.model.backends.minicpmo import runner as runner_module
from runtime.model.backends.minicpmo.attention import Row
from runtime.model.backends.minicpmo.batched import ComputeOptions, exact_sizes, options_for
from runtime.model.backends.minicpmo.checkpoint import build_parts
from runtime.model.backends.minicpmo.device import CUBLAS_WORKSPACE
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.runner import ModelRunner
from runtime.model.backends.minicpmo.state import Layout, SessionState
from runtime.model.backends.minicpmo.unit import Setting, UnitRun
from runtime.model.backends.minicpmo.vocoder import PieceVocoder
from runtime.model.backends.minicpmo.work import EncodeImage
from runtime.model.models import ModelUnusableError, load_backend, require_deterministic, tiny_path
from tests.models.flash import flash_on_cpu
from tests.models.random_model import opening


@pytest.fixture(scope="module")
def model() -> DuplexModel:
    return DuplexModel.load(tiny_path(), slots=1)


def test_a_gpu_has_steps_for_its_slots_or_one_for_all() -> None:
    """An exact server would take steps by its slots, and a replay, which has one, others."""
    gpu = torch.device("cuda")
    options = options_for(gpu, 8, exact=False)
    assert options.sizes is not None
    assert (options.is_flash, options.is_alone, options.sizes(1, 4096)) == (
        True,
        False,
        (1, 2, 4, 8),
    )
    for slots in (1, 8, 64, 100):
        exact = ComputeOptions(is_flash=True, sizes=exact_sizes, is_alone=True)
        assert options_for(gpu, slots, exact=True) == exact
    assert [exact_sizes(length, 4096) for length in (1, 11, 77)] == [(64,), (64,), (8,)]


@pytest.fixture
def flash() -> Iterator[None]:
    with flash_on_cpu():
        yield


@pytest.mark.usefixtures("flash")
def test_what_a_step_gives_stays(model: DuplexModel) -> None:
    """A replayed graph writes over what it gave: a session's logits would become another's."""
    options = ComputeOptions(is_flash=True, sizes=lambda *_: (1,))
    steps = ModelRunner(model.runner.parts, None, 1, options=options)._together[0].steps
    assert steps is not None
    out = torch.ones(1, 192), torch.ones(1, 640)
    steps._compute[1, 1] = lambda: out
    with torch.inference_mode():
        gave = steps.run(1, [torch.zeros(1, 192)], [Row(slot=0, start=3)])
    for part in out:
        part.zero_()
    assert all(part.all() for part in gave)


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_what_gains_on_a_gpu_is_chosen_there(model: DuplexModel, where: str) -> None:
    """Pictures would be computed one by one, or a CPU's bits be others.

    A device without data stands in for a GPU.
    """
    parts = build_parts(model.runner.config, torch.float32, torch.device(where))
    setting = Setting(parts=parts, tokens=model.tokens, vocoder=None, opening=opening(), slot=0)
    run = UnitRun(
        setting=setting,
        unit=Unit(index=0, pcm=bytes(4 * UNIT_SAMPLES)),
        pictures=[[torch.zeros(3, 112, 112)]],
        state=SessionState(layout=Layout(prefix=0, suffix=()), length=0),
        stop=lambda *_: False,
    )
    see = next(run.run())
    assert isinstance(see, EncodeImage)
    assert see.is_alone == (where == "cpu")


def test_an_exact_model_computes_repeatably(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's libraries would choose by what is free, or fastest just then."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setenv(CUBLAS_WORKSPACE, "")
    monkeypatch.delenv(CUBLAS_WORKSPACE)
    DuplexModel.load(Path(tiny_path()), slots=1)
    assert not torch.backends.cudnn.deterministic
    DuplexModel.load(Path(tiny_path()), slots=1, exact=True)
    assert torch.backends.cudnn.deterministic


# -- what is refused -----------------------------------------------------------------------------


def test_a_model_that_varies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator would learn it from the first replay that is not compared."""
    require_deterministic("tiny", load_backend("tiny", 1, deterministic=True).info)
    with monkeypatch.context() as patched:
        patched.setattr(runner_module, "rows_are_independent", lambda _: False)
        info = load_backend("tiny", 1, deterministic=True).info
    assert not info.deterministic
    with pytest.raises(ModelUnusableError, match="requires: what this device computes for several"):
        require_deterministic("tiny", info)
    monkeypatch.setattr(PieceVocoder, "is_exact", False)
    info = load_backend("tiny", 1, deterministic=True).info
    assert not info.deterministic
    with pytest.raises(ModelUnusableError, match="requires: the sound of its vocoder varies"):
        require_deterministic("tiny", info)


def test_a_device_that_is_lost_is_no_fault_of_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server would try for ever to load a model that is well."""

    def lost(*_: object, **__: object) -> DuplexModel:
        raise DeviceLost("the GPU is lost to this process")

    monkeypatch.setattr(DuplexModel, "load", lost)
    with pytest.raises(DeviceLost):
        load_backend("tiny", 1)
