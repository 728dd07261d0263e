"""The published shape with random weights as an installed backend, for `--model backend:full`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Final

import torch

from runtime.model.backends.minicpmo.config import load_config
from runtime.model.backends.minicpmo.device import device_name, pick_device
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.vocoder import PieceVocoder
from runtime.model.engine.backend import EngineBackend
from runtime.model.models import tiny_path
from tests.gpu.voice import drawn
from tests.models.full_shape import full_config, random_model
from tests.models.random_model import write_vocoder

ENTRY: Final = "[antiphon.backends]\nfull = tests.gpu.backend:make\n"
METADATA: Final = "Metadata-Version: 2.1\nName: antiphon-full\nVersion: 0\n"


def install(folder: Path) -> Path:
    """Make a folder that, in `sys.path`, offers the backend."""
    there = folder / "antiphon_full-0.dist-info"
    there.mkdir()
    (there / "METADATA").write_text(METADATA, "utf-8")
    (there / "entry_points.txt").write_text(ENTRY, "utf-8")
    return folder


def give_voice(model: DuplexModel, *, exact: bool) -> None:
    """Give a model the published voice with drawn weights."""
    runner, like = model.runner, model.runner.llm.keys
    runner.vocoder = voice = drawn(like.device, like.dtype, slots=runner.slots, exact=exact)
    steps = voice._vocoder.steps
    if steps is not None and like.is_cuda:
        steps.capture()


def make(
    argument: str, slots: int | None, *, device: str | None, dtype: str | None, deterministic: bool
) -> EngineBackend:
    """Make the model: of `tiny`'s shape, the published one, or with the `-voice` of either."""
    where = pick_device(device, prefer_cuda=True)
    config = load_config(tiny_path() / "config.json") if "tiny" in argument else full_config()
    what = torch.bfloat16 if where.type == "cuda" else torch.float32
    model = random_model(
        config, tiny_path(), slots=slots or 1, device=where, dtype=what, exact=deterministic
    )
    runner = model.runner
    if "voice" in argument:
        give_voice(model, exact=deterministic)
    else:
        with tempfile.TemporaryDirectory() as name:
            write_vocoder(Path(name) / "vocoder", config.tts.num_audio_tokens)
            runner.vocoder = PieceVocoder.load(Path(name) / "vocoder")
    assert runner.vocoder is not None
    facts = {
        "model": f"random {argument or 'full'}",
        "torch": torch.__version__,
        "device": device_name(where),
        "dtype": str(dtype or what),
        "attention": runner.attention,
        "batch": runner.batch,
        **runner.vocoder.fingerprint,
        "config": json.dumps(config.llm.to_diff_dict(), sort_keys=True, default=str),
    }
    return EngineBackend(DuplexModel.of(runner, model.tokens, facts))
