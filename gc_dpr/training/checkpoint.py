"""A checkpoint is a folder that appears whole or not at all.

checkpoint/
    biencoder_config.json   how the towers belong together
    question_encoder/       a sentence-transformers (and transformers) model
    passage_encoder/        the same; absent when both sides share one encoder
    config.yaml             the settings of the run that made it
    trainer_state.json      how far that run had come
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gc_dpr.artifacts import atomic_folder, write_json
from gc_dpr.models import BiEncoder


def save_checkpoint(
    folder: str | Path, model: BiEncoder, *, settings_yaml: str, trainer_state: dict[str, Any]
) -> Path:
    """Write a checkpoint folder.

    Args:
        folder: Its final place; must not exist yet.
        model: The encoders.
        settings_yaml: The resolved settings of the run.
        trainer_state: Plain values only: steps, epochs, seed, fingerprint of the model.

    Returns:
        The absolute path.
    """
    with atomic_folder(folder) as temporary:
        model.save_pretrained(temporary)
        (temporary / "config.yaml").write_text(settings_yaml, encoding="utf-8")
        write_json(temporary / "trainer_state.json", trainer_state)
    return Path(folder).absolute()
