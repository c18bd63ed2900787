"""What an index folder says about itself: its file names and its ``meta.json``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from gc_dpr import __version__
from gc_dpr.artifacts import read_json
from gc_dpr.errors import ArtifactError

INDEX_NAME, IDS_NAME, META_NAME = "index.faiss", "ids.txt", "meta.json"
INDEX_FILES = (INDEX_NAME, IDS_NAME, META_NAME)
"""What build_index writes: pass it to `prepare_output_dir` as ``owned``."""

_FORMAT, _FORMAT_VERSION = "gc_dpr dense index", 1
AGAIN = "run build_index again with overwrite=true"


@dataclass(frozen=True, slots=True)
class IndexInfo:
    """What an index's ``meta.json`` says.

    Attributes:
        factory: FAISS factory string it was made from.
        metric: Always ``"inner_product"``.
        count: P.
        dim: D.
        model_fingerprint: Which model made the embeddings.
        corpus_hash: Which passages are in it; empty when the embeddings did not say.
        index_bytes: Size of ``index.faiss``; 0 before it is saved.
        index_sha256: Its checksum; empty before it is saved.
        ids_sha256: Checksum of ``ids.txt``; empty before it is saved.
        toolkit_version: The gc_dpr that wrote it.
        format: What kind of folder this is.
        format_version: Raised when the layout changes.
    """

    factory: str
    metric: str
    count: int
    dim: int
    model_fingerprint: str
    corpus_hash: str
    index_bytes: int = 0
    index_sha256: str = ""
    ids_sha256: str = ""
    toolkit_version: str = __version__
    format: str = _FORMAT
    format_version: int = _FORMAT_VERSION


def read_index_info(folder: Path) -> IndexInfo:
    """Read and check an index folder's ``meta.json``.

    Raises:
        ArtifactError: It is missing or damaged, or describes something that is no index, of
            another format version, or with another metric than the inner product.
    """
    path = folder / META_NAME
    if folder.is_dir() and not path.exists():
        raise ArtifactError(f"{folder} has no {META_NAME}: no index was finished there; {AGAIN}")
    meta = read_json(path, what="the description of an index that build_index wrote")
    if not isinstance(meta, dict) or meta.get("format") != _FORMAT:
        raise ArtifactError(f"{path} does not describe an index; give build_index's output folder")
    if meta.get("format_version") != _FORMAT_VERSION:
        raise ArtifactError(
            f"{path} has format version {meta.get('format_version')!r}; this version of gc_dpr "
            f"reads version {_FORMAT_VERSION}; {AGAIN}"
        )
    for field in fields(IndexInfo):
        expected = int if field.type == "int" else str
        if type(meta.get(field.name)) is not expected:
            raise ArtifactError(
                f"{path} is damaged: {field.name} is {meta.get(field.name)!r}, expected a value "
                f"of type {expected.__name__}; {AGAIN}"
            )
    info = IndexInfo(**{field.name: meta[field.name] for field in fields(IndexInfo)})
    if info.metric != "inner_product":
        raise ArtifactError(
            f"{path}: the metric is {info.metric!r}, expected 'inner_product': distances would "
            f"rank passages wrongly; {AGAIN}"
        )
    return info
