"""Settings of retrieve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gc_dpr.config.command import CHECKPOINT, CommandConfig
from gc_dpr.config.fields import at_least, group, one_of, option
from gc_dpr.config.groups import DataConfig, HardwareConfig
from gc_dpr.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class RetrieveConfig(CommandConfig):
    """Retrieve the best passages for every question of a file."""

    REQUIRED: ClassVar[tuple[str, ...]] = (
        "output_dir", "data.questions_file", "data.passages_file",
    )  # fmt: skip

    method: str = option("dense", "dense (checkpoint and index_dir) or bm25 (words, no training)")
    checkpoint: str | None = option(None, CHECKPOINT + "; for method=dense")
    index_dir: str | None = option(None, "Folder that build_index wrote; for method=dense")
    top_k: int = option(100, "Passages per question")
    allow_mismatch: bool = option(
        False, "Search although the index was made with another model (logged)"
    )
    data: DataConfig = group(DataConfig, "the data set")
    hardware: HardwareConfig = group(HardwareConfig, "memory and speed")

    def check(self) -> None:
        """Refuse impossible values and options without effect."""
        one_of("method", self.method, ("dense", "bm25"))
        at_least("top_k", self.top_k, 1)
        for name in ("checkpoint", "index_dir"):
            given = getattr(self, name) is not None
            if self.method == "dense" and not given:
                meaning = self.__dataclass_fields__[name].metadata["help"]
                raise ConfigError(f"{name} is required with method=dense: {meaning}")
            if self.method == "bm25" and given:
                raise ConfigError(f"{name} has no effect with method=bm25: leave it out")
