"""Settings of build_index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gc_dpr.config.command import CommandConfig
from gc_dpr.config.fields import group, option
from gc_dpr.config.groups import IndexConfig


@dataclass(kw_only=True, slots=True)
class BuildIndexConfig(CommandConfig):
    """Build a FAISS index over an embedding folder."""

    REQUIRED: ClassVar[tuple[str, ...]] = ("output_dir", "embeddings_dir")

    embeddings_dir: str | None = option(None, "Folder that generate_embeddings wrote")
    verify_checksums: bool = option(
        True, "Read every embedding file once more against its checksum"
    )
    index: IndexConfig = group(IndexConfig, "the kind of index")
