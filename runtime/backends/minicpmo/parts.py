"""All modules of a model under one roof, so that one state dict holds its weights.

The vocoder's pieces are a buffer beside the modules: they are learned, but not by gradients.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from .audio import AudioEncoder
from .config import ModelConfig
from .llm import LanguageModel
from .tts import SpeechDecoder
from .vision import VisionTower


class Parts(nn.Module):
    """Language model, audio encoder, vision tower, speech decoder and the vocoder's pieces."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.llm = LanguageModel(config.llm, config.vocabulary)
        self.apm = AudioEncoder(config.audio, config.llm.hidden)
        self.vpm = VisionTower(config.vision, config.llm.hidden)
        self.tts = SpeechDecoder(config.tts, config.vocabulary, config.llm.hidden)
        vocoder = config.vocoder
        samples = vocoder.search + vocoder.frame + vocoder.overlap
        self.register_buffer("pieces", torch.zeros(config.tts.codes, samples, dtype=torch.int16))


def load_parts(config: ModelConfig, path: Path) -> Parts:
    """Build the modules and load every weight.

    Args:
        config: the shapes.
        path: a safetensors file.

    Returns:
        The modules, for inference only.

    Raises:
        RuntimeError: a weight is missing, left over or of another shape.
    """
    parts = Parts(config)
    parts.load_state_dict(load_file(path), strict=True)
    parts.requires_grad_(False)
    return parts.eval()
