"""Loading what earlier commands wrote, for the commands that encode."""

from __future__ import annotations

import logging

import torch

from gc_dpr.config import HardwareConfig
from gc_dpr.models import BiEncoder

logger = logging.getLogger(__name__)


def apply_threads(hardware: HardwareConfig) -> None:
    """Set torch's CPU threads when asked to."""
    if hardware.threads is not None:
        torch.set_num_threads(hardware.threads)


def load_bi_encoder(checkpoint: str, device: torch.device) -> BiEncoder:
    """A trained (or any other) bi-encoder on its device, ready to encode."""
    return BiEncoder.from_pretrained(checkpoint).to(device)


def describe(model: BiEncoder) -> str:
    """One line about the encoders."""
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    towers = "one shared encoder" if model.shared else "two towers"
    scaled = ", length 1" if model.question_encoder.normalize else ""
    return (
        f"{size:.1f} M parameters, {towers}, {model.embedding_dim} dimensions, "
        f"pooling {model.question_encoder.pooling}{scaled}, title_format {model.title_format}"
    )
