"""A checkpoint in the published layout with random weights, made on the spot; no test itself.

What must hold for any weights is tried with these, so that nothing depends on what `tiny` was
taught. The weights of the control tokens are scaled such that the model listens, speaks over
several units and ends its turns; what it says is gibberish.

Two sizes: `CONFIG` has few layers of the widths of `tiny`, so that its matrix products take the
same kernels; `SMALL` is as small as a model can be, for tests that open many sessions.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from protocol.values.model import (
    UNIT_SAMPLES,
    DuplexConfig,
    Opening,
    Prefill,
    Turn,
    TurnChunk,
    TurnResult,
    Unit,
    UnitResult,
    Voice,
)
from runtime.model.backends.minicpmo.checkpoint import WEIGHTS, Parts
from runtime.model.backends.minicpmo.config import load_config
from runtime.model.backends.minicpmo.model import VOCODER, DuplexModel
from runtime.model.backends.minicpmo.slot_layout import FILE, NEW, OLDER
from runtime.model.backends.minicpmo.tokens import NAMES, Tokens
from tests.models.blocking import BlockingSession, alone, open_session
from tests.models.full_shape import randomize

Config = dict[str, Any]

CODES = 65
"""Speech codes, the end of speech included."""
CONFIG: Config = {
    "architectures": ["MiniCPMO"],
    "model_type": "minicpmo",
    "name": "random",
    "vocab_size": 320,
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "drop_vision_last_layer": False,
    "query_num": 64,
    "transcribes": True,
    "slice_config": {"scale_resolution": 112},
    "audio_config": {
        "d_model": 128,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 512,
        "num_mel_bins": 80,
        "max_source_positions": 1500,
    },
    "vision_config": {
        "hidden_size": 48,
        "image_size": 112,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "patch_size": 14,
    },
    "tts_config": {
        "llm_dim": 192,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "num_text_tokens": 320,
        "num_audio_tokens": CODES,
        "audio_bos_token_id": 0,
        "text_eos_token_id": None,
        "condition_type": "hidden_text_merge",
        "normalize_projected_hidden": True,
    },
}
SLIDING: Config = {"use_sliding_window": True, "sliding_window": 256, "max_window_layers": 0}
"""Changes for a model that, as `tiny`, sees the last tokens only."""
FEW_UNITS: Config = {"audio_config": {"max_source_positions": 353}}
"""Changes for an encoder that starts over every 7 units instead of every 29."""
SMALL: Config = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "audio_config": {
        "d_model": 16,
        "encoder_layers": 1,
        "encoder_attention_heads": 1,
        "encoder_ffn_dim": 64,
        "max_source_positions": 153,
    },
    "tts_config": {
        "llm_dim": 32,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
    },
}
FRAME = 960
OVERLAP = SEARCH = 240
DECIDABLE = {
    "tts_bos": 1.2,
    "listen": 4.5,
    "speak": 1.6,
    "turn_eos": 1.3,
    "chunk_eos": 1.6,
    "chunk_tts_eos": 1.4,
}
"""The control tokens that may be decided, and by how much their weights are made larger."""
IN_SLOTS: Config = {"vocab_size": 352, "tts_config": {"num_text_tokens": 352}}
"""Changes for a model whose units are laid out in slots, as `write_checkpoint` makes it of them."""
CALLS: tuple[str, ...] = (
    '<function name="clock"></function>',
    '<function name="tide"><param name="harbour">Brest</param></function>',
    '<function name="door"></function>',
)
"""Calls that such a model may write: each is one ordinary token, since its text is else noise."""
CHAIN = {
    "<|listen|>": 0.4,
    "<|chunk_eos|>": 1.6,
    "<|turn_eos|>": 1.6,
    "<tool_call>": 3.0,
    "<|no_action|>": 5.5,
    "<|non_spoken_eos|>": 2.5,
    "<think>": 2.2,
    "</think>": 2.5,
}
"""What it decides where it has less to choose from, and by how much its weights are made larger."""
SPARE = ("<|spare_0|>", "<|spare_1|>")
TEXT = (
    "the quick brown fox jumps over the lazy dog while seven wizards box five quacking kings "
    "and then they all sit down by the river and sing the old song about the sun and the moon "
)


def changed(config: Config, *changes: Mapping[str, Any]) -> Config:
    """A config with some values replaced, section by section."""
    out = dict(config)
    for change in changes:
        for key, value in change.items():
            inner = isinstance(value, Mapping) and isinstance(out.get(key), dict)
            out[key] = changed(out[key], value) if inner else value
    return out


def write_tokenizer(folder: Path, *, in_slots: bool = False) -> None:
    """A byte-level tokenizer of some 300 ids, with all control tokens, if asked those of slots."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=286, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 2, trainer)
    if in_slots:
        made = json.loads(tokenizer.to_str())
        words = made["model"]["vocab"]
        words |= {call.replace(" ", "\u0120"): len(words) + i for i, call in enumerate(CALLS)}
        tokenizer = Tokenizer.from_str(json.dumps(made))
    tokenizer.add_special_tokens([*NAMES.values(), *SPARE])
    if in_slots:
        others = [name for name in OLDER if tokenizer.token_to_id(name) is None]
        tokenizer.add_special_tokens([*NEW, *others])
        words = {"before": "call these:", "after": "by name", "listening": 12, "speaking": 9}
        (folder / FILE).write_text(json.dumps(words))
    tokenizer.save(str(folder / "tokenizer.json"))
    allowed = {NAMES[field] for field in DECIDABLE}
    bad = [tokenizer.token_to_id(name) for name in (*NAMES.values(), *SPARE) if name not in allowed]
    (folder / "tokenizer_config.json").write_text(json.dumps({"bad_token_ids": bad}))


def random_parts(folder: Path) -> Parts:
    """Random weights for the config and the tokenizer of a folder."""
    tokens = Tokens(folder)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        parts = Parts(load_config(folder / "config.json")).requires_grad_(False).eval()
        randomize(parts)
        head, table = parts.llm.lm_head.weight, parts.llm.model.embed_tokens.weight
        head.mul_(4)
        for field, factor in DECIDABLE.items():
            head[getattr(tokens.ids, field)] *= factor
        torch.nn.init.normal_(table)
        if tokens.slots is not None:
            _chain(head, table, tokens)
        # After `turn_eos` it mostly listens, else hardly a turn would stay ended.
        table[tokens.ids.turn_eos] += head[tokens.ids.listen] / 2
        scales = parts.get_parameter("tts.head_code.0.parametrizations.weight.original0")
        scales.mul_(4)
        scales[parts.config.tts.eos] *= 1.5
    return parts


def _chain(head: torch.Tensor, table: torch.Tensor, tokens: Tokens) -> None:
    """Have it write a call, once it has begun one, and end it."""
    assert tokens.slots is not None
    ids = tokens.slots.ids
    for name, factor in CHAIN.items():
        head[ids[name]] *= factor
    calls = [tokens.find(call.replace(" ", "\u0120")) for call in CALLS]
    for call in calls:
        assert call is not None
        table[ids["<tool_call>"]] += 4 * head[call]
        table[call] += 5 * head[ids["</tool_call>"]]


def write_vocoder(folder: Path, codes: int = CODES) -> None:
    """Pieces of noise for every code but the end of speech; code 0 is silent."""
    folder.mkdir(parents=True)
    sizes = {"frame": FRAME, "overlap": OVERLAP, "search": SEARCH, "silent_code": 0}
    (folder / "config.json").write_text(json.dumps(sizes))
    noise = np.random.default_rng(7).normal(0, 3000, (codes - 1, SEARCH + FRAME + OVERLAP))
    noise[0] = 0
    pieces = torch.from_numpy(noise.astype(np.int16))
    save_file({"pieces": pieces}, folder / "pieces.safetensors")


def write_checkpoint(folder: Path, *changes: Mapping[str, Any]) -> Path:
    """Write a checkpoint into an empty folder.

    Args:
        folder: where to.
        changes: to `CONFIG`, section by section; with `IN_SLOTS` its units have slots.

    Returns:
        The folder.
    """
    (folder / "config.json").write_text(json.dumps(changed(CONFIG, *changes)))
    write_tokenizer(folder, in_slots=IN_SLOTS in changes)
    state = {key: value.contiguous() for key, value in random_parts(folder).state_dict().items()}
    save_file(state, folder / WEIGHTS)
    write_vocoder(folder / VOCODER)
    return folder


def load(folder: Path, *changes: Mapping[str, Any], slots: int = 8) -> DuplexModel:
    """Write a checkpoint into an empty folder and load it."""
    return DuplexModel.load(write_checkpoint(folder, *changes), slots=slots)


@functools.cache
def sound(number: int, samples: int = UNIT_SAMPLES) -> bytes:
    """Some sound, another one for each number: a tone in noise, as loud as the number wants."""
    random = np.random.default_rng(number)
    tone = np.sin(np.arange(samples) * random.uniform(0.02, 1.0))
    mixed = random.uniform(0, 0.5) * tone + random.uniform(0, 0.2) * random.standard_normal(samples)
    return bytes(mixed.clip(-1, 1).astype("<f4").tobytes())


@functools.cache
def picture(number: int, width: int = 112, height: int = 112) -> bytes:
    """A JPEG file, another one for each number."""
    pixels = np.random.default_rng(number).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return bytes(simplejpeg.encode_jpeg(pixels, colorspace="RGB"))


def opening(seed: int = 0, voice: Voice | None = None, **config: Any) -> Opening:
    """Settings of a session that may speak from its first unit on."""
    settings = DuplexConfig(**{"force_listen_count": 0, **config})
    return Opening(instructions="the lazy dog", voice=voice or Voice(), config=settings, seed=seed)


def unit(index: int, place: int = 0, **what: Any) -> Unit:
    """One second of sound; `place` chooses which."""
    return Unit(index=index, pcm=sound(1000 * place + index), **what)


Open = Callable[..., BlockingSession]
"""Opens a session: as an `Opening` says, or as `opening` makes it of keywords."""


@contextmanager
def opener(model: DuplexModel, seed: int) -> Iterator[Open]:
    """Open sessions, by default of one seed, that are released in the end."""
    sessions: list[BlockingSession] = []

    def open_one(what: Opening | None = None, **config: Any) -> BlockingSession:
        sessions.append(open_session(model, what or opening(seed, **config)))
        return sessions[-1]

    yield open_one
    for session in sessions:
        session.release()


def facts(result: UnitResult) -> tuple[object, ...]:
    """All of a result but its costs, which no two runs share; equal only where all bits are."""
    names = (field for field in UnitResult.__attrs_attrs__ if field.name != "costs")
    return tuple(getattr(result, field.name) for field in names)


def answer(
    model: DuplexModel, turn: Turn, cut: int | None = None
) -> tuple[Prefill, list[TurnChunk], TurnResult]:
    """Answer a chat turn in the first slot, unbatched, stopping before token `cut` if given."""
    chunks: list[TurnChunk] = []
    session = model.chat(slot=0)
    try:
        for place in range(session.measure(turn)):
            alone(session.see(place), model.compute)
        prefill = alone(session.prefill(), model.compute)
        return prefill, chunks, alone(session.generate(chunks.append, cut), model.compute)
    finally:
        session.release()
