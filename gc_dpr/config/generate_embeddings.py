"""Settings of generate_embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gc_dpr.config.command import CHECKPOINT, CommandConfig
from gc_dpr.config.fields import group, one_of, option
from gc_dpr.config.groups import DataConfig, HardwareConfig


@dataclass(kw_only=True, slots=True)
class GenerateEmbeddingsConfig(CommandConfig):
    """Embed every passage of a corpus."""

    REQUIRED: ClassVar[tuple[str, ...]] = ("output_dir", "checkpoint", "data.passages_file")
    SEVERAL_PROCESSES: ClassVar[bool] = True

    checkpoint: str | None = option(None, CHECKPOINT)
    dtype: str = option("float32", "Number format on disk: float32 or float16 (half the size)")
    data: DataConfig = group(DataConfig, "the data set")
    hardware: HardwareConfig = group(HardwareConfig, "memory and speed")

    def check(self) -> None:
        """Refuse impossible values."""
        one_of("dtype", self.dtype, ("float32", "float16"))
