"""A small published voice with drawn weights, and the folder of one; no test itself.

Each weight is drawn by its name from numpy's Philox, so everyone draws the same. All modules are
the published ones; their sizes are not.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.model.backends.minicpmo.model import VOCODER
from runtime.model.backends.minicpmo.voices import DEFAULT_VOICES
from runtime.model.voice.checkpoint import FLOW, FLOW_YAML, HIFT, UNNORMED, fill_flow, fill_hift
from runtime.model.voice.config import (
    PUBLISHED,
    TAGS,
    DitConfig,
    EncoderConfig,
    FlowConfig,
    HiftConfig,
)
from runtime.model.voice.flow import Flow
from runtime.model.voice.hift import Hift
from runtime.model.voice.reference import CODES_FILE, RATE_HZ, SPEAKER_FILE, Reference
from runtime.model.voice.vocoder import Vocoder
from tests.models import random_model

CONFIG: Final = FlowConfig(
    codes=4224,
    encoder=EncoderConfig(inputs=16, width=32, blocks=2, up_blocks=1, heads=2, inner=64),
    dit=DitConfig(width=32, depth=2, heads=2, head_width=16),
)
HIFT_CONFIG: Final = HiftConfig(width=16, pitch_width=8)
STEPS: Final = 2
NETWORKS: Final = Path(__file__).parents[2] / "fixtures" / "voice"
"""The networks that read reference audio, as small as they can be."""


def generator(name: str) -> np.random.Generator:
    """The generator of a name."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(key=key))


def draw(name: str, shape: tuple[int, ...]) -> Tensor:
    """Draw a weight such that numbers keep their size, and about half of the frames are voiced."""
    x = generator(name).standard_normal(shape, dtype=np.float32)
    if name.endswith("f0_predictor.classifier.bias"):
        x = 40 + 0 * x
    elif name.endswith("f0_predictor.classifier.weight"):
        x *= 60
    elif name.endswith((".bias", "pos_bias_u", "pos_bias_v")):
        x *= 0.1
    elif name.startswith("hift.conv_post") and len(shape) == 3 and shape[1:] == (1, 1):
        x = 0.3 + 0.03 * x
    elif len(shape) == 1 or name.endswith(("original0", "weight_g")):
        x = 1 + 0.1 * x
    elif "input_embedding" not in name:
        x /= np.sqrt(np.prod(shape[1:]))
    return torch.from_numpy(np.asarray(x, np.float32))


def flow_weights(config: FlowConfig = CONFIG) -> dict[str, Tensor]:
    """The tensors of `flow.pt`."""
    with torch.device("meta"):
        state = Flow(config).state_dict()
    return {name: draw(name, tuple(weight.shape)) for name, weight in state.items()}


def hift_weights(config: HiftConfig = HIFT_CONFIG, *, old: bool = False) -> dict[str, Tensor]:
    """The tensors of `hift.pt`; `old`: in the older spelling of weight norm."""
    with torch.device("meta"):
        state = Hift(config).state_dict()
    endings = ("weight_g", "weight_v")
    if not old:
        endings = ("parametrizations.weight.original0", "parametrizations.weight.original1")
    found = dict[str, Tensor]()
    for name, weight in state.items():
        base, _, last = name.rpartition(".")
        plain = name.startswith(UNNORMED)
        shape = tuple(weight.shape)
        if last != "weight" or plain:
            found[f"generator.{name}"] = draw(f"hift.{name}", shape)
            continue
        for ending, sizes in zip(endings, ((shape[0], 1, 1), shape), strict=True):
            found[f"generator.{base}.{ending}"] = draw(f"hift.{base}.{ending[-1]}", sizes)
    return found


def vocoder(dtype: torch.dtype = torch.float32, **options: Any) -> Vocoder:
    """A small vocoder, whose flow computes in `dtype`."""
    options = {"seed": "a small voice", "steps": STEPS, **options}
    return Vocoder(fill_flow(CONFIG, flow_weights(), dtype), fill_hift(hift_weights()), **options)


def reference(name: str, codes: int = 30) -> Reference:
    """A voice with a prompt of so many codes."""
    chance = generator(name)
    return Reference(
        codes=tuple(chance.integers(0, CONFIG.codes, codes).tolist()),
        mel=chance.standard_normal((2 * codes, 80), dtype=np.float32) - 4,
        speaker=chance.standard_normal(192, dtype=np.float32),
    )


def codes(name: str, count: int) -> tuple[int, ...]:
    """Codes to be spoken."""
    return tuple(generator(name).integers(0, CONFIG.codes, count).tolist())


def flow_yaml(config: FlowConfig = CONFIG, changes: Mapping[str, object] | None = None) -> str:
    """The text of `flow.yaml`, with some values changed, or left out where None."""
    encoder, dit = config.encoder, config.dit
    values: dict[str, object] = {
        **PUBLISHED,
        "flow.input_size": encoder.inputs,
        "flow.vocab_size": config.codes,
        "flow.encoder.input_size": encoder.inputs,
        "flow.encoder.output_size": encoder.width,
        "flow.encoder.num_blocks": encoder.blocks,
        "flow.encoder.num_up_blocks": encoder.up_blocks,
        "flow.encoder.attention_heads": encoder.heads,
        "flow.encoder.linear_units": encoder.inner,
        "flow.decoder.estimator.depth": dit.depth,
        "flow.decoder.estimator.num_heads": dit.heads,
        "flow.decoder.estimator.head_dim": dit.head_width,
        "flow.decoder.estimator.hidden_size": dit.width,
        **(changes or {}),
    }
    lines = list[str]()
    seen = set[str]()
    for path, value in values.items():
        for depth, part in enumerate(path.split(".")[:-1]):
            group = ".".join(path.split(".")[: depth + 1])
            if group not in seen:
                seen.add(group)
                lines.append(f"{'  ' * depth}{part}: !new:{TAGS[group]}")
        if value is not None:
            depth = path.count(".")
            text = str(value).lower() if isinstance(value, bool) else value
            lines.append(f"{'  ' * depth}{path.rpartition('.')[2]}: {text}")
    return "\n".join(lines) + "\n"


def write_folder(folder: Path) -> Path:
    """Write a folder of the published layout, and a default voice beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FLOW_YAML).write_text(flow_yaml())
    torch.save(flow_weights(), folder / FLOW)
    torch.save(hift_weights(), folder / HIFT)
    for name in (CODES_FILE, SPEAKER_FILE):
        shutil.copy(NETWORKS / name, folder)
    path = folder.parent / DEFAULT_VOICES[0]
    soundfile.write(path, reference_pcm(0), RATE_HZ, subtype="PCM_16", format="WAV")
    return folder


def reference_pcm(number: int, seconds: float = 1.0) -> NDArray[np.float32]:
    """Reference audio, 16 kHz, another one for each number."""
    chance = generator(f"reference {number}")
    at = np.arange(int(seconds * RATE_HZ)) / RATE_HZ
    tone = np.sin(2 * np.pi * (100 + 50 * (number % 40)) * at)
    sound = 0.2 * tone + 0.05 * chance.standard_normal(len(at))
    return sound.astype(np.float32)


def write_checkpoint(folder: Path, *changes: Mapping[str, Any]) -> Path:
    """Write a checkpoint as `random_model.write_checkpoint`, with this voice."""
    random_model.write_checkpoint(folder, *changes)
    shutil.rmtree(folder / VOCODER)
    write_folder(folder / VOCODER)
    return folder


def pcm_hash(pcm: NDArray[np.float32]) -> str:
    """The hash of sound's bytes."""
    return hashlib.sha256(pcm.tobytes()).hexdigest()
