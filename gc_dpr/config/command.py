"""What every command takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gc_dpr.config.fields import option

CHECKPOINT = (
    "Folder that train_dense_encoder wrote as output_dir/checkpoint; or a transformers or "
    "sentence-transformers model, by folder or hub name"
)


@dataclass(kw_only=True, slots=True)
class CommandConfig:
    """What every command takes."""

    REQUIRED: ClassVar[tuple[str, ...]] = ("output_dir",)
    SEVERAL_PROCESSES: ClassVar[bool] = False  # whether torchrun may start it

    output_dir: str | None = option(None, "Folder that everything is written to")
    overwrite: bool = option(
        False,
        "Replace what an earlier run of this command left in output_dir; it is removed when all "
        "inputs are checked, before the new work begins",
    )
