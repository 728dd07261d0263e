"""A model in memory: its weights, what it is, and the sessions it opens.

`DuplexModel.load` reads a folder with `config.json`, `tokenizer.json` and `model.safetensors`. One
model serves any number of sessions; they share the weights and nothing else (B8), so a session
gives the same bytes whatever the others do.

Loading sets torch to one thread for the whole process: the sum of a row is then always added in the
same order, and the server keeps the other core.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Final

import torch

from protocol.model import Opening

from ..base import BackendInfo
from .config import ModelConfig, load_config
from .parts import Parts, load_parts
from .session import ModelSession
from .tokens import Tokens
from .vocoder import PieceVocoder

THREADS: Final = 1
SLOTS: Final = 8
"""Sessions that one core of a common machine serves at one unit a second, with room to spare."""
LIBRARIES: Final = ("torch", "transformers", "tokenizers", "numpy", "simplejpeg")


def fingerprint(folder: Path, config: ModelConfig) -> Mapping[str, str]:
    """What a full replay must find equal.

    Args:
        folder: the model's.
        config: as loaded from it.

    Returns:
        Hashes of the files, versions, and how this process computes.
    """
    files = {
        name: hashlib.sha256((folder / file).read_bytes()).hexdigest()
        for name, file in (
            ("weights", "model.safetensors"),
            ("config", "config.json"),
            ("tokenizer", "tokenizer.json"),
        )
    }
    return {
        "model": config.name,
        **files,
        **{name: version(name) for name in LIBRARIES},
        "device": "cpu",
        "dtype": "float32",
        "attention": "sdpa",
        "batch": "1",
        "threads": str(torch.get_num_threads()),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


class DuplexModel:
    """One set of weights and the sessions on it."""

    def __init__(
        self, config: ModelConfig, parts: Parts, tokens: Tokens, info: BackendInfo
    ) -> None:
        """Take what `load` has read."""
        self.config = config
        self.info = info
        self._parts = parts
        self._tokens = tokens
        self._vocoder = PieceVocoder(config.vocoder, parts.get_buffer("pieces"))

    @classmethod
    def load(cls, folder: Path) -> DuplexModel:
        """Load a model.

        Args:
            folder: holds `config.json`, `tokenizer.json` and `model.safetensors`.

        Returns:
            The model, ready to open sessions.

        Raises:
            OSError: a file is missing.
            ValueError: the config or the tokenizer does not fit.
            RuntimeError: a weight is missing, left over or of another shape.
        """
        torch.set_num_threads(THREADS)
        config = load_config(folder / "config.json")
        tokens = Tokens(folder / "tokenizer.json")
        if tokens.size > config.vocabulary:
            raise ValueError(f"tokenizer has {tokens.size} ids, the model {config.vocabulary}")
        parts = load_parts(config, folder / "model.safetensors")
        info = BackendInfo(
            name=config.name,
            modes=("audio", "video"),
            slots=SLOTS,
            context_limit=config.context_limit,
            sliding_windows=("off",),
            can_rollback=True,
            deterministic=True,
            fingerprint=fingerprint(folder, config),
        )
        return cls(config, parts, tokens, info)

    def open(self, opening: Opening) -> ModelSession:
        """Open a session and prefill its prompt.

        Args:
            opening: the same values give the same session, whatever else runs.

        Raises:
            ContextFull: the prompt does not fit.
            BackendError: the reference audio is malformed.
        """
        return ModelSession(self._parts, self._tokens, self._vocoder, opening)
