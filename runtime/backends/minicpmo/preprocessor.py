"""A checkpoint's `preprocessor_config.json`, held to how pictures and sound are prepared here.

Nothing is read from it: how pictures are cut stands in `config.json`, how sound becomes mel frames
in `mel`. But the published code prepares both as this file says, so one that says otherwise belongs
to another model. Keys that say nothing about the computation are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from protocol.model import INPUT_RATE_HZ

from .mel import FFT, HOP

PREPROCESSOR: Final = "preprocessor_config.json"
PICTURE_DEFAULTS: Final[Mapping[str, Any]] = {
    "image_feature_size": 64,
    "patch_size": 14,
    "scale_resolution": 448,
}
"""Of the published `MiniCPMVImageProcessor`. Its other defaults are what is computed."""


def check_preprocessor(
    raw: Mapping[str, Any], *, scale_resolution: int, patch_size: int, queries: int, mel_bins: int
) -> None:
    """Hold a `preprocessor_config.json` to a model.

    Args:
        raw: as parsed.
        scale_resolution: side of a square whose area one slice has.
        patch_size: pixels of a patch's side.
        queries: embeddings a slice.
        mel_bins: mel bands.

    Raises:
        ValueError: a value is not what is computed; the message names it.
    """
    computed: Mapping[str, Any] = {
        "image_processor_type": "MiniCPMVImageProcessor",
        "scale_resolution": scale_resolution,
        "patch_size": patch_size,
        "image_feature_size": queries,
        "slice_mode": True,
        "norm_mean": [0.5, 0.5, 0.5],
        "norm_std": [0.5, 0.5, 0.5],
        "feature_size": mel_bins,
        "sampling_rate": INPUT_RATE_HZ,
        "n_fft": FFT,
        "hop_length": HOP,
        "dither": 0.0,
    }
    for key, wanted in computed.items():
        found = raw.get(key, PICTURE_DEFAULTS.get(key, wanted))
        if found != wanted:
            where = "" if key in raw else " by default"
            raise ValueError(
                f"preprocessor_config.{key} is {found!r}{where}; {wanted!r} is computed"
            )
