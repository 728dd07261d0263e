"""Models by name and by folder: what is loaded, and how a folder that is none is told of."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
import torch
from click.testing import CliRunner

from runtime.cli import main
from runtime.model.backends.minicpmo import device
from runtime.model.backends.minicpmo.checkpoint import WEIGHTS
from runtime.model.backends.minicpmo.device import DeviceError, pick_device, pick_dtype
from runtime.model.backends.minicpmo.model import VOCODER, DuplexModel
from runtime.model.engine.backend import EngineBackend
from runtime.model.models import (
    ModelUnknownError,
    ModelUnusableError,
    check_model,
    load_backend,
    load_backend_async,
    model_folder,
)
from runtime.settings.settings import DTYPES
from tests.models.blocking import open_session
from tests.models.random_model import opening, unit


def loaded(folder: Path, slots: int | None = None, **options: str) -> EngineBackend:
    backend = load_backend(str(folder), slots, **options)
    assert isinstance(backend, EngineBackend)
    return backend


def test_a_folder_is_a_model(checkpoint: Path) -> None:
    """The published checkpoint, or one of an operator's own, could not be served."""
    info = loaded(checkpoint, 3).info
    assert (info.name, info.slots, info.modes) == (
        "random",
        3,
        ("audio", "video", "chat", "transcription"),
    )
    assert info.deterministic
    assert (info.fingerprint["device"], info.fingerprint["dtype"]) == ("cpu", "float32")


@pytest.mark.anyio
async def test_a_model_is_loaded_while_the_event_loop_goes_on(checkpoint: Path) -> None:
    """A program that serves others would stand still for as long as a model takes to load."""
    loaded_by: list[EngineBackend] = []

    async def load() -> None:
        backend = await load_backend_async(str(checkpoint), 1)
        assert isinstance(backend, EngineBackend)
        loaded_by.append(backend)

    turns = 0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(load)
        while not loaded_by:
            turns += 1
            await anyio.lowlevel.checkpoint()
    assert turns > 10
    assert loaded_by[0].info.slots == 1
    with pytest.raises(ModelUnknownError):
        await load_backend_async("nobody")


def test_a_folder_has_as_many_slots_as_fit(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine would hold one session where it has room for ten, or run out of memory."""
    assert loaded(checkpoint).info.slots == 64
    monkeypatch.setattr(device, "free_bytes", lambda _: 40_000_000)
    assert 1 <= loaded(checkpoint).info.slots < 10
    monkeypatch.setattr(device, "free_bytes", lambda _: 100_000)
    with pytest.raises(ModelUnusableError, match="not one session fits"):
        loaded(checkpoint)


def test_the_format_is_asked_for(checkpoint: Path) -> None:
    """A model in half precision would be twice as large as its operator planned."""
    info = loaded(checkpoint, 1, dtype="bf16").info
    assert info.fingerprint["dtype"] == "bfloat16"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_runs_a_unit(checkpoint: Path, dtype: torch.dtype) -> None:
    """The format of a GPU is never tried where there is none, and breaks on the first one."""
    model = DuplexModel.load(checkpoint, slots=1, dtype=dtype)
    session = open_session(model, opening(listen_prob_scale=0.0))
    for index in range(2):
        result = session.run_unit(unit(index))
        assert not result.is_listen
        session.finalize(index, interrupted=False)


def test_a_model_without_a_vocoder_gives_text(copied: Path) -> None:
    """A checkpoint without its vocoder could not be served at all."""
    shutil.rmtree(copied / VOCODER)
    model = DuplexModel.load(copied, slots=1)
    result = open_session(model, opening(listen_prob_scale=0.0)).run_unit(unit(0))
    assert not result.is_listen
    assert result.pcm == b""
    assert model.info.fingerprint["voice"] == "none"


def test_a_name_that_is_none_names_those_there_are() -> None:
    """A typing error sends its author into the source."""
    for call in (load_backend, check_model, model_folder):
        with pytest.raises(
            ModelUnknownError, match=r"'tinny': choose from tiny, scripted, or name the folder"
        ):
            call("tinny")


def _spoil_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _other_shape(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "intermediate_size": 48}))


def _wrong_type(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "hidden_size": "wide"}))


def _bad_ids(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("[]")


def _cut_weights(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:100])


BREAKS: list[tuple[Callable[[Path], None], str]] = [
    (lambda folder: (folder / "config.json").unlink(), "config.json: No such file"),
    (_spoil_config, "config.json is not JSON"),
    (_wrong_type, "hidden_size"),
    (_other_shape, "keys of another shape: llm.model.layers.0.mlp"),
    (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json: No such file"),
    (_bad_ids, "bad_token_ids is not a list of ids"),
    (lambda folder: (folder / WEIGHTS).unlink(), "neither model.safetensors nor"),
    (_cut_weights, "model.safetensors cannot be read"),
]


@pytest.mark.parametrize(("spoil", "says"), BREAKS, ids=[says for _, says in BREAKS])
def test_a_folder_that_does_not_fit_is_one_line(
    copied: Path, spoil: Callable[[Path], None], says: str
) -> None:
    """An operator meets a traceback out of some library, and nothing about the file."""
    spoil(copied)
    with pytest.raises(ModelUnusableError, match=says) as caught:
        load_backend(str(copied), 1)
    assert str(caught.value).startswith(f"{copied}: ")


def test_serving_a_wrong_folder_ends_with_one_line(copied: Path) -> None:
    """`antiphon serve` would print a traceback, or start without a model."""
    (copied / "config.json").unlink()
    wrong = ((copied / "nowhere", "unknown model", 2), (copied, "config.json", 1))
    for folder, says, exit_code in wrong:
        words = ["serve", "--port", "0", "--no-record", "--model", str(folder)]
        done = CliRunner().invoke(main, words)
        assert done.exit_code == exit_code, done.output
        assert says in done.output
        assert "Traceback" not in done.output
        assert done.output.count("Error") == 1


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is meant for a GPU would silently crawl on a CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device(None, prefer_cuda=True).type == "cpu"
    with pytest.raises(DeviceError, match="no GPU"):
        pick_device("cuda", prefer_cuda=True)
    with pytest.raises(DeviceError, match="unknown device"):
        pick_device("tpu", prefer_cuda=True)
    with pytest.raises(DeviceError, match="unknown dtype"):
        pick_dtype("fp8", torch.device("cpu"))


def test_a_gpu_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would stand idle, or `tiny` and its full replay would move to it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device(None, prefer_cuda=True).type == "cuda"
    assert pick_device(None, prefer_cuda=False).type == "cpu"
    assert pick_dtype(None, torch.device("cuda")) == torch.bfloat16
    assert pick_dtype(None, torch.device("cpu")) == torch.float32


def test_names_of_formats_and_devices_agree() -> None:
    """The command line would offer a format that the model does not know."""
    assert set(DTYPES) == set(device.DTYPES)
