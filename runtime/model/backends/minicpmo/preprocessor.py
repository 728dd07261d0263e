"""Checks a checkpoint's `preprocessor_config.json` against the preprocessing here.

Slicing follows `config.json`, mel frames follow `mel`; but the published code follows this file, so
a different one belongs to another model. Keys without effect are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from protocol.values.model import INPUT_RATE_HZ

from .mel import FFT, HOP

PREPROCESSOR: Final = "preprocessor_config.json"
PICTURE_DEFAULTS: Final[Mapping[str, Any]] = {
    "image_feature_size": 64,
    "patch_size": 14,
    "scale_resolution": 448,
}
"""Defaults of the published `MiniCPMVImageProcessor`; its other defaults equal this code's."""


def check_values(
    raw: Mapping[str, Any],
    path: str,
    wanted: Mapping[str, Any],
    defaults: Mapping[str, Any],
    reason: str,
) -> None:
    """Check values of a file; an absent one without a default is as wanted.

    `ValueError` names the first that differs, by `path`, and the wanted one in `reason`.
    """
    for key, value in wanted.items():
        found = raw.get(key, defaults.get(key, value))
        if found != value:
            where = "" if key in raw else " by default"
            raise ValueError(f"{path}.{key} is {found!r}{where}; {reason.format(value)}")


def check_preprocessor(
    raw: Mapping[str, Any], *, scale_resolution: int, patch_size: int, queries: int, mel_bins: int
) -> None:
    """Check a parsed `preprocessor_config.json`; `ValueError` names a value that differs."""
    computed = {
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
    check_values(raw, "preprocessor_config", computed, PICTURE_DEFAULTS, "{!r} is computed")
