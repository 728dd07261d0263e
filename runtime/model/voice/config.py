"""The sizes of a voice's modules: `flow.yaml`, read as data, and `Hift`'s from its weights.

The published file names four Python classes in its tags, for a library that would import and call
them. Here a tag is a text to compare: the file is read as YAML events, and a value is the published
one or, for `SIZES`, a whole number. Anchors, lists and other tags are refused, each by its path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import attrs
import yaml

BYTES_MAX: Final = 65_536
"""The published file has about a thousand."""
SIZE_MAX: Final = 8192
"""Of a width or a count; the published maximum is 6561."""
BLOCKS_MAX: Final = 64
"""Of blocks in a row, which are modules before they are compared with the weights."""
SILENT_CODE: Final = 4218
"""A turn's buffer starts with it, so the vocabulary holds it."""
MEL: Final = 80
SPEAKER: Final = 192

PUBLISHED: Final[Mapping[str, bool | int | float | str]] = MappingProxyType(
    {
        "flow.input_size": 512,
        "flow.output_size": MEL,
        "flow.spk_embed_dim": SPEAKER,
        "flow.output_type": "mel",
        "flow.vocab_size": 6561,
        "flow.encoder.input_size": 512,
        "flow.encoder.output_size": 512,
        "flow.encoder.input_layer": "linear",
        "flow.encoder.pre_lookahead_len": 3,
        "flow.encoder.num_blocks": 6,
        "flow.encoder.num_up_blocks": 4,
        "flow.encoder.up_stride": 2,
        "flow.encoder.up_scale_factor": 2,
        "flow.encoder.attention_heads": 8,
        "flow.encoder.pos_enc_layer_type": "rel_pos_espnet",
        "flow.encoder.selfattention_layer_type": "rel_selfattn",
        "flow.encoder.key_bias": True,
        "flow.encoder.linear_units": 2048,
        "flow.encoder.dropout_rate": 0.1,
        "flow.encoder.positional_dropout_rate": 0.1,
        "flow.encoder.attention_dropout_rate": 0.1,
        "flow.encoder.normalize_before": True,
        "flow.decoder.inference_cfg_rate": 0.7,
        "flow.decoder.estimator.in_channels": 4 * MEL,
        "flow.decoder.estimator.out_channels": MEL,
        "flow.decoder.estimator.mlp_ratio": 4.0,
        "flow.decoder.estimator.depth": 16,
        "flow.decoder.estimator.num_heads": 8,
        "flow.decoder.estimator.head_dim": 64,
        "flow.decoder.estimator.hidden_size": 512,
    }
)
"""Every value of the published file, by its path."""
TAGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "flow": "cosyvoice2.flow.flow.CausalMaskedDiffWithXvec",
        "flow.encoder": "cosyvoice2.transformer.upsample_encoder_v2.UpsampleConformerEncoderV2",
        "flow.decoder": "cosyvoice2.flow.flow_matching.CausalConditionalCFM",
        "flow.decoder.estimator": "cosyvoice2.flow.decoder_dit.DiT",
    }
)
"""The class that each mapping must name."""
SIZES: Final = frozenset(
    {
        "flow.input_size",
        "flow.vocab_size",
        "flow.encoder.input_size",
        "flow.encoder.output_size",
        "flow.encoder.num_blocks",
        "flow.encoder.num_up_blocks",
        "flow.encoder.attention_heads",
        "flow.encoder.linear_units",
        "flow.decoder.estimator.depth",
        "flow.decoder.estimator.num_heads",
        "flow.decoder.estimator.head_dim",
        "flow.decoder.estimator.hidden_size",
    }
)
"""The values that may differ; all others belong to this architecture."""


@attrs.frozen(kw_only=True)
class EncoderConfig:
    """The encoder: codes to a condition of the flow, two rows a code.

    Attributes:
        inputs: width of a code's embedding.
        width: of the residual stream.
        blocks: before the rows are doubled, at one row a code.
        up_blocks: after it.
        inner: width inside the feed-forward layers.
    """

    inputs: int = 512
    width: int = 512
    blocks: int = 6
    up_blocks: int = 4
    heads: int = 8
    inner: int = 2048


@attrs.frozen(kw_only=True)
class DitConfig:
    """The flow's network: the velocity of a mel spectrogram at a time."""

    width: int = 512
    depth: int = 16
    heads: int = 8
    head_width: int = 64


@attrs.frozen(kw_only=True)
class FlowConfig:
    """The flow's modules; the defaults are the published sizes."""

    codes: int = 6561
    encoder: EncoderConfig = EncoderConfig()
    dit: DitConfig = DitConfig()


@attrs.frozen(kw_only=True)
class HiftConfig:
    """The widths of `Hift`: before its first upsampling, and of its pitch predictor."""

    width: int = 512
    pitch_width: int = 512


def read_flow_config(path: Path) -> FlowConfig:
    """Read `flow.yaml`; `OSError`: it cannot be read; `ValueError`: it is another architecture."""
    with path.open("rb") as file:
        data = file.read(BYTES_MAX + 1)
    if len(data) > BYTES_MAX:
        raise ValueError(f"the file has more than {BYTES_MAX} bytes")
    try:
        values = _values(yaml.parse(data, Loader=yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ValueError(f"the file is not YAML: {' '.join(str(error).split())}") from error
    missing = [key for key in PUBLISHED if key not in values]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    return _config(values)


def _values(events: Iterator[Any]) -> dict[str, Any]:
    """The values of the file's only document, by their paths."""
    for kind in (yaml.StreamStartEvent, yaml.DocumentStartEvent):
        if not isinstance(next(events), kind):
            raise ValueError("the file is empty")
    values = dict[str, Any]()
    _read_mapping("", next(events), events, values)
    for kind in (yaml.DocumentEndEvent, yaml.StreamEndEvent):
        if not isinstance(next(events), kind):
            raise ValueError("the file has more than one document")
    return values


def _read_mapping(path: str, start: Any, events: Iterator[Any], values: dict[str, Any]) -> None:
    name = path or "the document"
    if not isinstance(start, yaml.MappingStartEvent) or start.anchor is not None:
        raise ValueError(f"{name} is not a plain mapping: lists, anchors and aliases are refused")
    wanted = f"!new:{TAGS[path]}" if path else None
    if start.tag != wanted:
        raise ValueError(f"{name} has the tag {start.tag!r}; only {wanted!r} is supported")
    seen = set[str]()
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        key = _scalar(f"a key of {name}", event)
        inner = f"{path}.{key}" if path else key
        if key in seen:
            raise ValueError(f"{inner} is given twice")
        seen.add(key)
        if inner in TAGS:
            _read_mapping(inner, next(events), events, values)
        elif inner in PUBLISHED:
            values[inner] = _value(inner, _scalar(inner, next(events)))
        else:
            raise ValueError(f"{inner[:200]} is not known")


def _scalar(path: str, event: Any) -> str:
    if not isinstance(event, yaml.ScalarEvent) or event.anchor is not None or event.tag is not None:
        raise ValueError(
            f"{path} is not a plain value: lists, tags, anchors and aliases are refused"
        )
    return str(event.value)


def _value(path: str, text: str) -> bool | int | float | str:
    published = PUBLISHED[path]
    if path in SIZES:
        most = BLOCKS_MAX if path.endswith(("blocks", "depth")) else SIZE_MAX
        if not re.fullmatch(r"[0-9]{1,4}", text) or not 1 <= int(text) <= most:
            raise ValueError(f"{path} is {text[:40]!r}, not a whole number from 1 to {most}")
        return int(text)
    try:
        found = _as_kind(text, published)
    except ValueError:
        found = text
    if found != published:
        raise ValueError(f"{path} is {text[:40]!r}; only {published!r} is supported")
    return published


def _as_kind(text: str, like: bool | int | float | str) -> bool | int | float | str:
    if isinstance(like, bool):
        return {"true": True, "false": False}.get(text.lower(), text)
    return type(like)(text)


def _config(values: Mapping[str, Any]) -> FlowConfig:
    """Build the config, and check the sizes against each other."""

    def size(name: str) -> int:
        return int(values[f"flow.{name}"])

    heads, width = size("encoder.attention_heads"), size("encoder.output_size")
    reasons = {
        f"flow.encoder.input_size is not flow.input_size, {size('input_size')}": (
            size("encoder.input_size") != size("input_size")
        ),
        f"flow.encoder.output_size is {width}, no multiple of 2 and {heads} heads": (
            width % 2 + width % heads > 0
        ),
        f"flow.vocab_size is {size('vocab_size')}, without the silent code {SILENT_CODE}": (
            size("vocab_size") <= SILENT_CODE
        ),
    }
    for reason, is_wrong in reasons.items():
        if is_wrong:
            raise ValueError(reason)
    return FlowConfig(
        codes=size("vocab_size"),
        encoder=EncoderConfig(
            inputs=size("input_size"),
            width=width,
            blocks=size("encoder.num_blocks"),
            up_blocks=size("encoder.num_up_blocks"),
            heads=heads,
            inner=size("encoder.linear_units"),
        ),
        dit=DitConfig(
            width=size("decoder.estimator.hidden_size"),
            depth=size("decoder.estimator.depth"),
            heads=size("decoder.estimator.num_heads"),
            head_width=size("decoder.estimator.head_dim"),
        ),
    )
