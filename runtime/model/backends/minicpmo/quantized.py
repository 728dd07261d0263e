"""Quantised linear layers: AWQ and GPTQ checkpoints, and weights that are quantised when loaded.

A weight is (q - z) s: q a code of 4 or 8 bits, z and s the zero and the scale of its group, which
are some consecutive inputs of one output. `QuantizedLinear` holds one layout for all sources; it
multiplies by the weights that it makes of its codes, in blocks of outputs. These are computed in
float32 and rounded once to the format of the rows, so a product is that of a stock layer with the
same weights: on a CPU each row has the same bits in any batch, as there (`decoder.py`).

Only the linear layers inside the language model's blocks may be quantised. What the files of other
packages contain, (in, out) being a layer's sizes and `words` of 32 bits (AutoAWQ's `WQLinear_GEMM`,
AutoGPTQ's and GPTQModel's `QuantLinear`):

| tensor | AWQ, version `gemm` | GPTQ |
|---|---|---|
| `qweight` | (in, out / 8), 8 outputs a word, in the order 0 2 4 6 1 3 5 7 | (in bits / 32, out) |
| `qzeros` | (groups, out / 8), in the same order | (groups, out bits / 32) |
| `scales` | (groups, out), float16 | the same |
| `g_idx` | | (in,), the group of each input |

The first code of a word has its lowest bits. In the format `gptq` zeros are smaller by one: one
word was subtracted from all words, so that a zero of 0 borrows from its neighbour; `gptq_v2` has
them as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

# -- what a checkpoint says ---------------------------------------------------------------------

Method = Literal["awq", "gptq"]
KEY: Final = "quantization_config"
"""Of `config.json`."""
FILES: Final = ("quantize_config.json", "quant_config.json")
"""Where older versions of AutoGPTQ and of AutoAWQ wrote it."""
GROUP: Final = 128
"""Inputs of a group, where we quantise."""
BITS: Final[Mapping[str, int]] = {"int4": 4, "int8": 8}
"""Of a code, by the setting `quantize`."""
LAYERS: Final = "llm.model.layers."
"""Where the linear layers are that may be quantised."""
GROUP_BYTES: Final = 3
"""Of a group's scale and zero."""
WORD_BITS: Final = 32
PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where each of 8 outputs stands in a word of AWQ."""
INTEGERS: Final = ("qweight", "qzeros", "g_idx")
"""A layer's tensors of 32-bit integers."""


@attrs.frozen(kw_only=True)
class Quantization:
    """How the files of a checkpoint are quantised.

    Attributes:
        bits: of a code.
        group: inputs of a group; -1: all.
        is_lowered: zeros are smaller by one.
    """

    method: Method
    bits: int
    group: int
    is_lowered: bool = False

    def groups(self, inputs: int) -> int:
        """Groups of a layer's inputs; the last one may be smaller."""
        return 1 if self.group < 0 else -(-inputs // self.group)

    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        """The shapes of a layer's tensors, by the last part of their keys."""
        held, groups = WORD_BITS // self.bits, self.groups(inputs)
        found: dict[str, tuple[int, ...]] = {
            "qzeros": (groups, outputs // held),
            "scales": (groups, outputs),
        }
        if self.method == "awq":
            return {"qweight": (inputs, outputs // held), **found}
        return {"qweight": (inputs // held, outputs), **found, "g_idx": (inputs,)}

    def layer_bytes(self, outputs: int, inputs: int) -> int:
        """The memory of a `QuantizedLinear`, in bytes."""
        return outputs * (inputs * self.bits // 8 + self.groups(inputs) * GROUP_BYTES)


def read_quantization(raw: Mapping[str, Any] | None) -> Quantization | None:
    """Read a `quantization_config`; `ValueError` names the value that is not supported."""
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise ValueError(f"config.{KEY} is {raw!r}, not an object")
    method = str(raw.get("quant_method", "awq" if "w_bit" in raw else "gptq")).lower()
    if method not in ("awq", "gptq"):
        raise ValueError(
            f"config.{KEY}.quant_method is {method!r}; only awq and gptq are supported"
        )
    given = {
        "bits": raw.get("bits", raw.get("w_bit", 4)),
        "group_size": raw.get("group_size", raw.get("q_group_size", GROUP)),
    }
    allowed: dict[str, tuple[object, ...]] = {"bits": (4,) if method == "awq" else (4, 8)}
    if method == "awq":
        given |= {
            "version": str(raw.get("version", "gemm")).lower(),
            "zero_point": raw.get("zero_point", True),
        }
        allowed |= {"version": ("gemm",), "zero_point": (True,)}
    else:
        written = raw.get("checkpoint_format", raw.get("format", "gptq"))
        given |= {
            "checkpoint_format": str(written).lower(),
            "is_marlin_format": raw.get("is_marlin_format", False),
            "dynamic": raw.get("dynamic") or None,
            "lm_head": raw.get("lm_head", False),
        }
        allowed |= {
            "checkpoint_format": ("gptq", "gptq_v2"),
            "is_marlin_format": (False,),
            "dynamic": (None,),
            "lm_head": (False,),
        }
    for name, values in allowed.items():
        if given[name] not in values:
            only = " and ".join(repr(value) for value in values)
            raise ValueError(f"config.{KEY}.{name} is {given[name]!r}; only {only} supported here")
    group = given["group_size"]
    if type(group) is not int or not (group == -1 or group > 0):
        raise ValueError(f"config.{KEY}.group_size is {group!r}; it is a number of inputs, or -1")
    return Quantization(
        method="awq" if method == "awq" else "gptq",
        bits=int(given["bits"]),
        group=group,
        is_lowered=given.get("checkpoint_format") == "gptq",
    )


def written_quantization(bits: int) -> dict[str, object]:
    """The `quantization_config` of weights that we quantised."""
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": bits,
        "group_size": GROUP,
        "desc_act": False,
        "sym": False,
    }


def with_quantization(raw: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Add what a folder's own file says about quantisation to a `config.json` without it."""
    if raw.get(KEY) is not None:
        return raw
    for path in (folder / name for name in FILES):
        if path.exists():
            try:
                return {**raw, KEY: json.loads(path.read_text(encoding="utf-8"))}
            except ValueError as error:
                raise ValueError(f"{path.name} is not JSON: {error}") from error
    return raw


def chosen(found: Quantization | None, quantize: str | None) -> Quantization | None:
    """How a checkpoint's layers are held, by its files or by the setting; `ValueError`: both."""
    if quantize is None:
        return found
    if found is not None:
        raise ValueError(f"its files are quantised ({found.method}): serve it without --quantize")
    if quantize not in BITS:
        raise ValueError(f"unknown quantisation {quantize!r}: choose from {', '.join(BITS)}")
    return Quantization(method="gptq", bits=BITS[quantize], group=GROUP)


def is_quantizable(key: str, shape: Sequence[int]) -> bool:
    """Whether the weight of a key is that of a layer that may be quantised."""
    return key.startswith(LAYERS) and len(shape) == 2


# -- a layer ------------------------------------------------------------------------------------

BLOCK_NUMBERS: Final = 1 << 24
"""Weights that are made at once: 32 MB in bf16, and twice as much in between."""
ANY: Final = 0x5A
"""Codes before a layer is loaded: products are tried with them."""


class QuantizedLinear(nn.Module):
    """A linear layer of codes, without bias.

    Attributes:
        codes: (out, in bits / 8), uint8; of two in a byte the first has the lower bits.
        scales: (out, groups), float16.
        zeros: (out, groups), uint8.
        group_of: (in,), the group of each input; empty: `in / groups` consecutive inputs each.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_of: Tensor

    def __init__(self, inputs: int, outputs: int, bits: int, groups: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bits = inputs, outputs, bits
        if inputs * bits % 8:
            raise ValueError(f"a layer of {inputs} inputs cannot be quantised to {bits} bits")
        codes = torch.full((outputs, inputs * bits // 8), ANY, dtype=torch.uint8)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", torch.ones(outputs, groups, dtype=torch.float16))
        self.register_buffer("zeros", torch.zeros(outputs, groups, dtype=torch.uint8))
        self.register_buffer("group_of", torch.zeros(0, dtype=torch.int64))

    def weight(self, dtype: torch.dtype, start: int = 0, stop: int | None = None) -> Tensor:
        """The weights of some outputs, (stop - start, in)."""
        codes = self.codes[start:stop]
        if self.bits == 4:
            split = codes.new_empty(len(codes), self.in_features)
            torch.bitwise_and(codes, 15, out=split[:, ::2])
            torch.bitwise_right_shift(codes, 4, out=split[:, 1::2])
            codes = split  # (N, in)
        scales = self.scales[start:stop].float()
        offsets = -scales * self.zeros[start:stop]
        if len(self.group_of):
            offsets, scales = (each.index_select(1, self.group_of) for each in (offsets, scales))
        else:
            codes = codes.view(*scales.shape, -1)  # (N, groups, in / groups)
            offsets, scales = offsets[..., None], scales[..., None]
        # In one pass over the codes: all products and the sum are exact, so it rounds once.
        made = torch.empty(codes.shape, dtype=dtype, device=codes.device)
        return torch.addcmul(offsets, codes, scales, out=made).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        step = max(1, BLOCK_NUMBERS // self.in_features)
        blocks = [
            F.linear(x, self.weight(x.dtype, start, start + step))
            for start in range(0, self.out_features, step)
        ]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, -1)

    def put(self, codes: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor) -> None:
        """Take codes, (out, in) from 0 on, and what belongs to them; `group_of` is (in,)."""
        packed = codes.to(torch.uint8)
        if self.bits == 4:
            packed = packed[:, ::2] | packed[:, 1::2] << 4
        self.codes.copy_(packed)
        self.scales.copy_(scales)
        self.zeros.copy_(zeros)
        groups = scales.shape[1]
        even = torch.arange(self.in_features) // max(1, self.in_features // groups)
        if self.in_features % groups or not torch.equal(even, group_of.cpu()):
            self.group_of = group_of.to(self.codes.device, torch.int64)

    def read(self, found: Mapping[str, Tensor], how: Quantization) -> None:
        """Take a layer's tensors of a file, of the right shapes; `ValueError`: a wrong group."""
        bits, groups = self.bits, how.groups(self.in_features)
        zeros, order = found["qzeros"], None
        if how.is_lowered:
            zeros = zeros + ones(bits)
        group = self.in_features if how.group < 0 else how.group
        group_of = torch.arange(self.in_features) // group
        if how.method == "awq":
            order = PLACES
            codes = unpacked(found["qweight"], bits, order).T  # (out, in)
        else:
            codes = unpacked(found["qweight"].T, bits)
            if found["g_idx"].any():  # All zeros: some files do not use it.
                group_of = found["g_idx"].long()
        if not 0 <= int(group_of.min()) <= int(group_of.max()) < groups:
            raise ValueError(f"g_idx has groups that are not from 0 to {groups - 1}")
        self.put(codes, found["scales"].T, unpacked(zeros, bits, order).T, group_of)

    def quantize(self, weight: Tensor) -> None:
        """Take weights, (out, in), each rounded to the nearest code of its group of `GROUP`."""
        codes, scales, zeros = quantized(weight, self.bits)
        self.put(codes, scales, zeros, torch.arange(self.in_features) // GROUP)


def unpacked(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Split the words of the last dimension into codes, (..., words) -> (..., codes), uint8."""
    places = torch.tensor(order or range(WORD_BITS // bits), device=words.device) * bits
    return (words[..., None] >> places & (1 << bits) - 1).to(torch.uint8).flatten(-2)


def joined_words(codes: Tensor, bits: int) -> Tensor:
    """Join codes of the last dimension, (..., codes) -> (..., words), int32; as GPTQ has them."""
    places = torch.arange(WORD_BITS // bits) * bits
    parts = codes.reshape(*codes.shape[:-1], -1, len(places)).long()
    words: Tensor = (parts << places).sum(-1)
    return words.to(torch.int32)


def gptq_tensors(weight: Tensor, bits: int) -> dict[str, Tensor]:
    """Quantise weights, (out, in), to the tensors of a layer in the format `gptq`."""
    codes, scales, zeros = quantized(weight, bits)
    return {
        "qweight": joined_words(codes, bits).T.contiguous(),
        "qzeros": joined_words(zeros.T, bits) - ones(bits),
        "scales": scales.T.contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


def ones(bits: int) -> int:
    """The word whose codes are all 1."""
    return sum(1 << place for place in range(0, WORD_BITS, bits))


def quantized(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round weights, (out, in), to codes, (out, in), with the scales and zeros of their groups.

    A group's codes span its values and 0; scales are those of float16, as files have them.
    """
    outputs, inputs = weight.shape
    lacking, most = -inputs % GROUP, (1 << bits) - 1
    grouped = F.pad(weight.float(), (0, lacking)).view(outputs, -1, GROUP)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((high - low) / most).half()
    scales[scales == 0] = 1
    wide = scales.float()
    zeros = (-low / wide).round().clamp(0, most)
    codes = (grouped / wide[..., None]).round() + zeros[..., None]
    codes = codes.clamp(0, most).flatten(1)[:, :inputs]
    return codes.to(torch.uint8), scales, zeros.to(torch.uint8)
