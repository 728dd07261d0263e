"""The inference settings of a duplex session: `config` (002), each honoured or refused.

Bounds are those of `model.DuplexConfig`. `chunk_ms`, `sample_rate`, `ls_mode` and the settings of
the source that are not offered here have one value each, which may be said; a key that is not
listed is refused and not ignored, so that nobody believes a setting to be in force that is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, get_args

import attrs

from ..behaviour import SOURCE_FIELDS
from ..codec import Fields, Value, invalid
from ..errors import LocalProtocolError
from ..model import INPUT_RATE_HZ, DuplexConfig, SlidingWindow
from ..wire.kinds import FLAG, Kind, because, choice, integer, number
from ..wire.reading import Reading
from ..wire.table import DROPPED, Field, Object, Row, Rule
from .base import Context
from .inputs import SLICES, fixed, integer_of, number_of, read_slices

CHUNK_MS: Final = 1000
"""A unit is one second; no other length is served."""
DECODE_MODES: Final = ("sampling", "greedy")
_REPETITION: Final = "the weight of repeated text is not offered as a setting"
_FIXED: Final[Mapping[str, Callable[[Value], float]]] = {
    "text_repetition_penalty": fixed(number_of(1.05, 1.05), _REPETITION),
    "text_repetition_window_size": fixed(integer_of(512, 512), _REPETITION),
    "listen_top_k": fixed(integer_of(0, 0), "listening is sampled as any token is"),
    "tts_temperature": fixed(number_of(0.8, 0.8), "the sampling of speech is not a setting"),
}
"""Settings of the source with their defaults, which are what the model is served with."""


def read_config(fields: Fields | None, context: Context) -> tuple[DuplexConfig, int | None]:
    """Read a session's settings.

    Args:
        fields: the `config` object, or None where there is none.
        context: what the backend honours.

    Returns:
        The settings with their defaults, and `max_slice_nums` where `config` says it.

    Raises:
        FieldError: a value is out of range, not offered here, or not known.
    """
    default = DuplexConfig()
    if fields is None:
        return default, None
    read = fields.optional
    config = DuplexConfig(
        generate_audio=read("generate_audio", Value.flag, default.generate_audio),
        force_listen_count=read(
            "force_listen_count", integer_of(0, 100), default.force_listen_count
        ),
        max_new_speak_tokens_per_chunk=read(
            "max_new_speak_tokens_per_chunk",
            integer_of(2, 20),
            default.max_new_speak_tokens_per_chunk,
        ),
        temperature=read("temperature", number_of(0, 2), default.temperature),
        top_k=read("top_k", integer_of(1, 1000), default.top_k),
        top_p=read("top_p", lambda value: value.number(0, 1, "above "), default.top_p),
        listen_prob_scale=read("listen_prob_scale", number_of(0, 10), default.listen_prob_scale),
        length_penalty=read("length_penalty", number_of(0.1, 10), default.length_penalty),
        sliding_window=read("sliding_window", _window(context), default.sliding_window),
    )
    read("ls_mode", lambda value: value.choice(("explicit",)), None)
    read("chunk_ms", integer_of(CHUNK_MS, CHUNK_MS), None)
    read("sample_rate", integer_of(INPUT_RATE_HZ, INPUT_RATE_HZ), None)
    slices = read("max_slice_nums", read_slices, None)
    if context.behaves(SOURCE_FIELDS):
        config = _read_source_fields(fields, config)
    fields.refuse_unknown()
    return config, slices


def _read_source_fields(fields: Fields, config: DuplexConfig) -> DuplexConfig:
    """Read the settings that only the source's own schema has; greedy is a temperature of 0."""
    read = fields.optional
    mode = read("decode_mode", lambda value: value.choice(DECODE_MODES), "sampling")
    for name, reader in _FIXED.items():
        read(name, reader, None)
    return config if mode == "sampling" else attrs.evolve(config, temperature=0.0)


def config_fields(config: DuplexConfig) -> dict[str, object]:
    """Write what differs from the defaults.

    Raises:
        LocalProtocolError: it holds a setting that has no field (`deferred_finalize`).
    """
    default = DuplexConfig()
    if config.deferred_finalize != default.deferred_finalize:
        raise LocalProtocolError("deferred_finalize has no field in this dialect")
    names = [field.name for field in attrs.fields(DuplexConfig)]
    return {
        name: getattr(config, name)
        for name in names
        if getattr(config, name) != getattr(default, name)
    }


def merge_slices(path: str, outer: int | None, inner: int | None) -> int:
    """Settle `max_slice_nums`, which may stand beside `config` and in it; 1 where in neither.

    Raises:
        FieldError: both are there and differ, so that one of them would not be honoured.
    """
    if outer is not None and inner is not None and outer != inner:
        raise invalid(path, f"{outer}, while config says {inner}")
    return outer or inner or 1


def _window(context: Context) -> Callable[[Value], SlidingWindow]:
    return lambda value: value.choice(context.sliding_windows)


# -- tables -------------------------------------------------------------------------------------


def setting(name: str, kind: Kind, default: object, **more: Any) -> Field:
    """Make the row of a setting, which is written where it is not the default."""
    return Field(name, kind, default, omit=True, **more)


def one_value(name: str, kind: Kind, why: str = "", **more: Any) -> Field:
    """Make the row of a setting that has one value, which may be said."""
    return Field(name, because(kind, why) if why else kind, None, attr=DROPPED, **more)


def _greedy(at: Reading) -> None:
    """Greedy is a temperature of 0."""
    if at.values.pop("decode_mode", None) == "greedy":
        at.values["config.temperature"] = 0.0


_DEFAULT: Final = DuplexConfig()
_WINDOWS: Final = get_args(SlidingWindow)
WINDOW: Final = attrs.evolve(
    choice(_WINDOWS), read=lambda value, at: value.choice(at.context.sliding_windows)
)
CONFIG: Final[tuple[Row, ...]] = (
    setting("generate_audio", FLAG, _DEFAULT.generate_audio),
    setting("force_listen_count", integer(0, 100), _DEFAULT.force_listen_count),
    setting(
        "max_new_speak_tokens_per_chunk",
        integer(2, 20),
        _DEFAULT.max_new_speak_tokens_per_chunk,
    ),
    setting("temperature", number(0, 2), _DEFAULT.temperature),
    setting("top_k", integer(1, 1000), _DEFAULT.top_k),
    setting("top_p", number(0, 1, "above "), _DEFAULT.top_p),
    setting("listen_prob_scale", number(0, 10), _DEFAULT.listen_prob_scale),
    setting("length_penalty", number(0.1, 10), _DEFAULT.length_penalty),
    setting("sliding_window", WINDOW, _DEFAULT.sliding_window),
    one_value("ls_mode", choice(("explicit",))),
    one_value("chunk_ms", integer(CHUNK_MS, CHUNK_MS)),
    one_value("sample_rate", integer(INPUT_RATE_HZ, INPUT_RATE_HZ)),
    Field(
        "max_slice_nums",
        SLICES,
        1,
        attr="^inner_slices",
        is_written=False,
        doc="Slices a frame may be cut into, 1-9, for appends that do not say.",
    ),
    Field(
        "decode_mode",
        choice(DECODE_MODES),
        "sampling",
        attr="^decode_mode",
        is_written=False,
        since=SOURCE_FIELDS,
        doc="`greedy` takes the most likely token, as a `temperature` of 0 does.",
    ),
    one_value("text_repetition_penalty", number(1.05, 1.05), _REPETITION, since=SOURCE_FIELDS),
    one_value("text_repetition_window_size", integer(512, 512), _REPETITION, since=SOURCE_FIELDS),
    one_value(
        "listen_top_k", integer(0, 0), "listening is sampled as any token is", since=SOURCE_FIELDS
    ),
    one_value(
        "tts_temperature",
        number(0.8, 0.8),
        "the sampling of speech is not a setting",
        since=SOURCE_FIELDS,
    ),
    Rule(_greedy),
)
"""The inference settings, each honoured or refused."""


def config(name: str, **more: Any) -> Object:
    """Make the row of the object that holds the inference settings."""
    return Object(name, CONFIG, attr="config", closed=True, omit=True, **more)


def slices_once(name: str) -> Rule:
    """Settle `max_slice_nums`, which may stand beside the settings and in them.

    Args:
        name: of the settings.

    Raises:
        FieldError: both are there and differ, so that one of them would not be honoured.
    """

    def check(at: Reading) -> None:
        inner = at.values.pop("inner_slices", None)
        if inner is None or (at.body.get(name) or {}).get("max_slice_nums") is None:
            return
        if at.body.get("max_slice_nums") is None:
            at.values["max_slice_nums"] = inner
        outer = at.values["max_slice_nums"]
        if outer != inner:
            raise invalid(f"{at.path}.max_slice_nums", f"{outer}, while config says {inner}")

    return Rule(check)
