"""The inference settings of a duplex session: `config` (002), each honoured or refused.

Bounds are those of `model.DuplexConfig`. `chunk_ms`, `sample_rate`, `ls_mode` and the source's
settings that are not offered here have one allowed value each; an unknown key is refused, so that
an ineffective setting is noticed.
"""

from __future__ import annotations

from typing import Any, Final, get_args

import attrs

from ...values.model import INPUT_RATE_HZ, DuplexConfig, SlidingWindow
from ..codec import invalid
from ..field import Field
from ..kinds import FLAG, choice, integer, number
from ..reading import Reading
from ..table import Object, Row, Rule
from .inputs import SLICES, one_value, setting

CHUNK_MS: Final = 1000
"""A unit is one second; no other length is served."""
DECODE_MODES: Final = ("sampling", "greedy")
_REPETITION: Final = "the weight of repeated text is not offered as a setting"


def _greedy(at: Reading) -> None:
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
        doc="`greedy` takes the most likely token, as a `temperature` of 0 does.",
    ),
    one_value("text_repetition_penalty", number(1.05, 1.05), _REPETITION),
    one_value("text_repetition_window_size", integer(512, 512), _REPETITION),
    one_value("listen_top_k", integer(0, 0), "listening is sampled as any token is"),
    one_value(
        "tts_temperature",
        number(0.8, 0.8),
        "the sampling of speech is not a setting",
    ),
    Rule(_greedy),
)
"""The inference settings, each honoured or refused."""


def config(name: str, **more: Any) -> Object:
    """Make the row of the object that holds the inference settings."""
    return Object(name, CONFIG, attr="config", closed=True, omit=True, **more)


def slices_once(name: str) -> Rule:
    """Settle `max_slice_nums`, which may stand in the settings (`name`) and next to them.

    `FieldError` if both are there and differ, so that one of them would be ignored.
    """

    def check(at: Reading) -> None:
        inner = at.values.pop("inner_slices", None)
        settings = at.body.get(name)
        if inner is None or not isinstance(settings, dict):
            return
        if settings.get("max_slice_nums") is None:
            return
        if at.body.get("max_slice_nums") is None:
            at.values["max_slice_nums"] = inner
        outer = at.values["max_slice_nums"]
        if outer != inner:
            raise invalid(f"{at.path}.max_slice_nums", f"{outer}, while config says {inner}")

    return Rule(check)
