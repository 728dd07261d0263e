"""Checkpoints rewritten as AutoAWQ and as AutoGPTQ lay them out; no test itself.

Written code by code from how those packages pack, with numpy's unsigned words, to hold
`runtime/model/backends/minicpmo/quantized.py` to.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from runtime.model.backends.minicpmo.checkpoint import WEIGHTS

LAYERS = "llm.model.layers."
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The outputs of a word of AWQ, from the lowest bits on."""
Words = NDArray[np.uint32]


@attrs.frozen(kw_only=True)
class Form:
    """One way to write a checkpoint; `group` -1: all inputs. `acts`: GPTQ's `desc_act`."""

    method: str
    bits: int = 4
    group: int = 64
    version: int = 1
    acts: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """The `quantization_config`."""
        sizes = {"bits": self.bits, "group_size": self.group, "quant_method": self.method}
        if self.method == "awq":
            return {**sizes, "version": "gemm", "zero_point": True, "modules_to_not_convert": None}
        written = "gptq" if self.version == 1 else "gptq_v2"
        return {
            **sizes,
            "checkpoint_format": written,
            "desc_act": self.acts,
            "static_groups": False,
            "sym": False,
            "lm_head": False,
            "true_sequential": True,
        }


FORMS: Mapping[str, Form] = {
    "awq": Form(method="awq"),
    "gptq": Form(method="gptq", group=128),
    "gptq v2": Form(method="gptq", version=2),
    "gptq by activation": Form(method="gptq", acts=True),
    "gptq 8 bits": Form(method="gptq", bits=8),
    "gptq whole rows": Form(method="gptq", group=-1),
}


def drawn(shape: tuple[int, int], form: Form, seed: int) -> tuple[NDArray[Any], ...]:
    """Draw a layer, (out, in): codes, groups of inputs, and scales and zeros of groups."""
    outputs, inputs = shape
    random = np.random.default_rng(seed)
    size = inputs if form.group < 0 else form.group
    groups = -(-inputs // size)
    of = np.arange(inputs) // size
    if form.acts:
        random.shuffle(of)
    most = (1 << form.bits) - 1
    codes = random.integers(0, most + 1, (outputs, inputs), dtype=np.uint32)
    zeros = random.integers(0, most + 1, (outputs, groups), dtype=np.uint32)
    scales = random.uniform(0.5, 1.5, (outputs, groups)) * inputs**-0.5 / (most / 4)
    return codes, of, scales.astype(np.float16), zeros


def packed(codes: NDArray[np.uint32], bits: int, order: tuple[int, ...] | None = None) -> Words:
    """Pack (rows, codes), along the second dimension."""
    held = 32 // bits
    words = np.zeros((codes.shape[0], codes.shape[1] // held), np.uint32)
    for column in range(words.shape[1]):
        for place in range(held):
            which = place if order is None else order[place]
            words[:, column] |= codes[:, column * held + which] << np.uint32(bits * place)
    return words


def written(shape: tuple[int, int], form: Form, seed: int) -> tuple[dict[str, Any], torch.Tensor]:
    """A layer's tensors, and the weights that they stand for, float32."""
    codes, of, scales, zeros = drawn(shape, form, seed)
    if form.method == "awq":
        tensors = {
            "qweight": packed(np.ascontiguousarray(codes.T), 4, AWQ_ORDER),
            "qzeros": packed(np.ascontiguousarray(zeros.T), 4, AWQ_ORDER),
        }
    else:
        lowered = packed(np.ascontiguousarray(zeros.T), form.bits)
        if form.version == 1:
            lowered -= np.uint32(0x11111111 if form.bits == 4 else 0x01010101)
        tensors = {
            "qweight": np.ascontiguousarray(packed(codes, form.bits).T),
            "qzeros": lowered,
            "g_idx": of.astype(np.int32),
        }
    made = {name: torch.from_numpy(each.view(np.int32)) for name, each in tensors.items()}
    made["scales"] = torch.from_numpy(np.ascontiguousarray(scales.T))
    apart = codes.astype(np.float32) - zeros.astype(np.float32)[:, of]
    return made, torch.from_numpy(apart * scales.astype(np.float32)[:, of])


def rewrite(source: Path, into: Path, form: Form) -> tuple[Path, Path]:
    """Copy a checkpoint twice: with layers of drawn codes, and with the weights of these."""
    folders = (into / "quantised", into / "plain")
    state = load_file(source / WEIGHTS)
    states = (dict[str, torch.Tensor](), dict[str, torch.Tensor]())
    for number, (key, weight) in enumerate(sorted(state.items())):
        if key.startswith(LAYERS) and weight.dim() == 2:
            outputs, inputs = weight.shape
            made, plain = written((outputs, inputs), form, number)
            name = key.removesuffix(".weight")
            states[0].update({f"{name}.{part}": each for part, each in made.items()})
            states[1][key] = plain
        else:
            states[0][key] = states[1][key] = weight
    for folder, each in zip(folders, states, strict=True):
        shutil.copytree(source, folder)
        save_file(each, folder / WEIGHTS)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = form.config
    (folders[0] / "config.json").write_text(json.dumps(config))
    return folders
