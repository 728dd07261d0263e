"""A model in memory: its weights, its metadata, and the sessions on it.

A folder has the published layout: `config.json`, `tokenizer.json`, safetensors, and the vocoder's
assets. Sessions, one per slot, share only the weights (B8), so each gives the same bytes whatever
the others do. Loading sets torch to one thread for the process: sums always have the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch

from protocol.values.limits import VOICE_STEPS
from protocol.values.model import Opening

from ..base import BackendInfo
from ..streams import Anchoring
from .anchor import Anchor, Transcript
from .batched import options_for
from .chat import ChatTurn
from .checkpoint import load_parts, weight_files
from .config import ModelConfig, load_config
from .device import WHOLE, compute_repeatably, device_name
from .logits import shortlists_on
from .runner import ModelRunner
from .session import SteppedSession
from .tokens import TEMPLATE_FILE, Tokens
from .voices import load_vocoder
from .work import Work

THREADS: Final = 1
SLOTS: Final = 8
"""Sessions that one core of a common machine serves at one unit a second, with a margin."""
VOCODER: Final = Path("assets/token2wav")
"""The folder of a checkpoint's vocoder."""
NUMERICS: Final = "2"
"""Version of our arithmetic, raised by each change that gives other bits for the same weights and
input. Version 2 scales pictures as Pillow does; logs without a version are of 1."""
QUANTIZE: Final = "quantize"
"""In a fingerprint: how the weights were quantised when they were loaded."""
LIBRARIES: Final = ("torch", "transformers", "tokenizers", "numpy", "simplejpeg")


def fingerprint(
    folder: Path, runner: ModelRunner, tokens: Tokens, quantize: str | None = None
) -> Mapping[str, str]:
    """The facts that a full replay compares: file hashes, versions, this process's arithmetic."""
    files = {
        "weights": weight_files(folder),
        "config": [folder / "config.json"],
        "tokenizer": [
            folder / name for name in ("tokenizer.json", "tokenizer_config.json", TEMPLATE_FILE)
        ],
        "vocoder": sorted((folder / VOCODER).rglob("*")),
    }
    hashes = {}
    for name, paths in files.items():
        digest = hashlib.sha256()
        for path in paths:
            if path.is_file():
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
        hashes[name] = digest.hexdigest()
    keys, vocoder = runner.llm.keys, runner.vocoder
    return {
        "model": runner.config.name,
        **hashes,
        "numerics": NUMERICS,
        **({} if quantize is None else {QUANTIZE: quantize}),
        **({} if tokens.slots is None else {"slots": tokens.slots.policy.digest}),
        **({"voice": "none"} if vocoder is None else vocoder.fingerprint),
        **{name: _version(name) for name in LIBRARIES},
        "device": device_name(keys.device),
        "dtype": str(keys.dtype).removeprefix("torch."),
        "attention": runner.attention,
        "batch": runner.batch,
        "threads": str(torch.get_num_threads()),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:  # A machine that only computes may not have it.
        return "none"


def load_tokens(folder: Path, config: ModelConfig) -> Tokens:
    """Load a checkpoint's tokenizer; `ValueError` if it is invalid or has too many ids."""
    tokens, vocabulary = Tokens(folder), int(config.llm.vocab_size)
    if tokens.size > vocabulary:
        raise ValueError(f"tokenizer has {tokens.size} ids, the model {vocabulary}")
    return tokens


class DuplexModel:
    """One set of weights and the sessions on it."""

    def __init__(self, runner: ModelRunner, tokens: Tokens, info: BackendInfo) -> None:
        self.runner, self.tokens, self._info = runner, tokens, info

    @property
    def info(self) -> BackendInfo:
        """The model's metadata."""
        return self._info

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        slots: int = SLOTS,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        exact: bool = False,
        voice_steps: int = VOICE_STEPS,
        quantize: str | None = None,
        context_percent: int = WHOLE,
    ) -> DuplexModel:
        """Load a model.

        Args:
            folder: holds the checkpoint.
            slots: maximum concurrent sessions; their memory is allocated now.
            device: where it computes.
            dtype: of weights, keys and values.
            exact: make results bitwise independent of the batch, if possible; see `info`.
            voice_steps: of the published voice's flow.
            quantize: how the language model's weights are quantised, one of `quantized.BITS`.
            context_percent: see `ModelRunner`.

        `OSError`: a file is missing; `ValueError`: the config, the tokenizer or the weights do not
        fit each other.
        """
        torch.set_num_threads(THREADS)
        if exact:
            compute_repeatably()
        config = load_config(folder / "config.json")
        tokens = load_tokens(folder, config)
        parts = load_parts(config, folder, dtype, device, quantize)
        vocoder = load_vocoder(
            folder / VOCODER,
            slots=slots,
            dtype=dtype,
            device=device,
            exact=exact,
            steps=voice_steps,
        )
        if vocoder is not None and vocoder.codes < config.tts.eos:
            raise ValueError(f"the vocoder has {vocoder.codes} codes, the model {config.tts.eos}")
        where = parts.llm.lm_head.weight.device
        options = options_for(where, slots, exact=exact)
        runner = ModelRunner(
            parts,
            vocoder,
            slots,
            shortlists_on(where, tokens),
            options=options,
            context_percent=context_percent,
        )
        return cls.of(runner, tokens, fingerprint(folder, runner, tokens, quantize))

    @classmethod
    def of(cls, runner: ModelRunner, tokens: Tokens, facts: Mapping[str, str]) -> DuplexModel:
        """Make a model of loaded parts; `facts` is its fingerprint."""
        config, vocoder, varies = runner.config, runner.vocoder, ""
        if not runner.is_exact:
            varies = "what this device computes for several sessions"
        elif vocoder is not None and not vocoder.is_exact:
            varies = "the sound of its vocoder"
        info = BackendInfo(
            name=config.name,
            modes=("audio", "video", "chat", *(("transcription",) * config.transcribes)),
            slots=runner.slots,
            context_limit=config.context_limit,
            sliding_windows=("off", "basic", "context"),
            can_rollback=True,
            can_rebuild=True,
            can_speak=True,
            speaks=vocoder is not None,
            deterministic=not varies,
            fingerprint=facts,
            varies=varies,
            tools=tokens.tools is not None,
            duplex_tools=tokens.slots is not None,
        )
        return cls(runner, tokens, info)

    def compute(self, works: Sequence[Work]) -> list[Any]:
        """Answer requests of one bucket, in their order; see `ModelRunner.compute`."""
        return self.runner.compute(works)

    def session(self, opening: Opening, *, slot: int) -> SteppedSession:
        """Make a session whose generators the caller drives, in an exclusive slot."""
        assert 0 <= slot < self.info.slots, (slot, self.info.slots)
        return SteppedSession(self.runner, self.tokens, opening, slot)

    def chat(self, *, slot: int) -> ChatTurn:
        """Make a chat turn whose generators the caller drives, in an exclusive slot."""
        assert 0 <= slot < self.info.slots, (slot, self.info.slots)
        return ChatTurn(self.runner, self.tokens, slot)

    def anchor(self, anchoring: Anchoring, *, slot: int) -> Anchor:
        """Make a streaming request whose generators the caller drives, in an exclusive slot."""
        assert 0 <= slot < self.info.slots, (slot, self.info.slots)
        return Anchor(self.runner, self.tokens, anchoring, slot)

    def token_id(self, name: str) -> int | None:
        """The id of a token by its name; see `Streams.token_id`."""
        return self.tokens.find(name)

    def transcript(self, *, slot: int) -> Transcript:
        """Make a transcription whose generators the caller drives, in an exclusive slot."""
        assert 0 <= slot < self.info.slots, (slot, self.info.slots)
        return Transcript(self.runner, self.tokens, slot)
