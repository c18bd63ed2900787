"""Settings of search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gc_dpr.config.command import CHECKPOINT, CommandConfig
from gc_dpr.config.fields import at_least, group, option
from gc_dpr.config.groups import DataConfig, HardwareConfig


@dataclass(kw_only=True, slots=True)
class SearchConfig(CommandConfig):
    """Answer one typed question with passages: gc-dpr search "who wrote …" checkpoint=…."""

    REQUIRED: ClassVar[tuple[str, ...]] = (
        "question", "checkpoint", "index_dir", "data.passages_file",
    )  # fmt: skip

    question: str | None = option(None, "The question; may be given without question= in front")
    checkpoint: str | None = option(None, CHECKPOINT)
    index_dir: str | None = option(None, "Folder that build_index wrote")
    top_k: int = option(3, "Passages to show")
    allow_mismatch: bool = option(
        False, "Search although the index was made with another model (logged)"
    )
    data: DataConfig = group(DataConfig, "the data set")
    hardware: HardwareConfig = group(HardwareConfig, "memory and speed")

    def check(self) -> None:
        """Refuse impossible values."""
        at_least("top_k", self.top_k, 1)
