"""What `antiphon eval` asks of a model over recordings, and what a run leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import attrs

from runtime.model.backends.base import BackendInfo

from ..eval.evaluate import Row

Mode = Literal["closed", "open", "forced"]
MODES: Final[tuple[Mode, ...]] = ("closed", "open", "forced")


@attrs.frozen(kw_only=True)
class Task:
    """A model to run: its name, how, on how many recordings at once, and where results are kept.

    `device` and `dtype` are those of `load_backend`.
    """

    mode: Mode
    model: str
    jobs: int
    out: Path | None
    device: str | None = None
    dtype: str | None = None


@attrs.frozen(kw_only=True)
class Run:
    """A run that is done.

    Attributes:
        measured: in the order of the logs.
        found: how many results an earlier run had kept.
        folder: where they are kept; None if they are not.
    """

    measured: list[Row]
    info: BackendInfo
    found: int
    folder: Path | None
