"""A folder of embeddings: shards of rows, and a ``meta.json`` that says they are complete.

``meta.json`` is written last, by `finish_embeddings`, after every shard was found whole. Only the
files it names are ever read, so others in the same folder (an index, temporary files, shards of
an earlier division) cannot get into a search. No pickle anywhere.

Letters: N rows of a block or shard, D dims.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gc_dpr import __version__
from gc_dpr.artifacts import file_checksum, read_json, write_json
from gc_dpr.errors import ArtifactError
from gc_dpr.retrieval.passage_ids import PassageIds
from gc_dpr.retrieval.shards import META_NAME, ShardInfo, finished_shards, shard_bounds

logger = logging.getLogger(__name__)

_FORMAT = "gc_dpr embeddings"
_FORMAT_VERSION = 1
_AGAIN = "run generate_embeddings again with overwrite=true"


def finish_embeddings(folder: str | Path, *, num_shards: int) -> EmbeddingStore:
    """Prove that every passage of the corpus is there exactly once, then write ``meta.json``.

    The main process calls it when all processes have written their shards.

    Args:
        folder: The embedding folder.
        num_shards: How many shards were written.

    Returns:
        The finished store, open.

    Raises:
        ArtifactError: A shard is missing or damaged, shards disagree (two models, two corpora,
            other dims), or a passage id occurs twice.
    """
    folder = Path(folder)
    shards = [ShardInfo.read(folder, shard=i, num_shards=num_shards) for i in range(num_shards)]
    _check_agreement(folder, shards)
    for shard in shards:
        _map_embeddings(folder, shard)
    ids = PassageIds(b"".join(_read_ids(folder, shard).lines for shard in shards))
    ids.refuse_duplicates(where=str(folder.absolute()))
    first = shards[0]
    meta = {
        "format": _FORMAT,
        "format_version": _FORMAT_VERSION,
        "rows": first.corpus_rows,
        "dim": first.dim,
        "dtype": first.dtype,
        "num_shards": num_shards,
        "zero_rows": sum(shard.zero_rows for shard in shards),
        "model_fingerprint": first.model_fingerprint,
        "corpus_hash": first.corpus_hash,
        "toolkit_version": __version__,
        "shards": [asdict(shard) for shard in shards],
    }
    write_json(folder / META_NAME, meta)
    return EmbeddingStore.open(folder)


class EmbeddingStore:
    """A finished embedding folder; rows are read from disk when they are asked for.

    Made by `EmbeddingStore.open`.

    Attributes:
        folder: Where it is (absolute).
        shards: What each shard holds, in row order.
    """

    def __init__(self, folder: Path, shards: tuple[ShardInfo, ...]) -> None:
        self.folder = folder
        self.shards = shards

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool = False) -> EmbeddingStore:
        """Open a folder that `finish_embeddings` has finished.

        Sizes, counts, shapes and types of all files are checked at once.

        Args:
            folder: The embedding folder.
            verify: Also compare all checksums, which reads every byte once.

        Raises:
            ArtifactError: The folder is not finished, or a file is missing, cut off, changed or
                from another model; the message says which one.
        """
        folder = Path(folder).absolute()
        if not (folder / META_NAME).exists():
            raise ArtifactError(_why_unfinished(folder))
        store = cls(folder, _read_meta(folder))
        for shard in store.shards:
            _check_is_described(folder, shard)
            _map_embeddings(folder, shard)
            _read_ids(folder, shard)
            if verify:
                _check_bytes(folder, shard)
        return store

    @property
    def rows(self) -> int:
        """Passages of the corpus."""
        return self.shards[0].corpus_rows

    @property
    def dim(self) -> int:
        """D."""
        return self.shards[0].dim

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model that made the embeddings."""
        return self.shards[0].model_fingerprint

    @property
    def corpus_hash(self) -> str:
        """Which passages were encoded; empty when the writer did not say."""
        return self.shards[0].corpus_hash

    def embeddings(self, shard: int) -> NDArray[Any]:
        """One shard's (N, D) embeddings, memory-mapped and read-only."""
        return _map_embeddings(self.folder, self.shards[shard])

    def ids(self) -> PassageIds:
        """The passage ids of the whole corpus, packed, in row order."""
        return PassageIds(b"".join(_read_ids(self.folder, shard).lines for shard in self.shards))

    def iter_blocks(self, rows: int) -> Iterator[tuple[NDArray[Any], list[str]]]:
        """Walk through the corpus in row order.

        Args:
            rows: Most rows of a block; a block never spans two shards, so that it can be a view
                of the mapped file instead of a copy.

        Yields:
            ``(N, D)`` embeddings in the stored dtype, read-only, and their N passage ids.
        """
        if rows < 1:
            raise ValueError(f"blocks of {rows} rows; expected at least 1")
        for number, shard in enumerate(self.shards):
            embeddings = self.embeddings(number)
            ids = _read_ids(self.folder, shard)
            for start in range(0, shard.rows, rows):
                end = min(start + rows, shard.rows)
                yield embeddings[start:end], [ids[row] for row in range(start, end)]


def _read_meta(folder: Path) -> tuple[ShardInfo, ...]:
    path = folder / META_NAME
    meta = read_json(path, what="an embedding folder's description")
    if not isinstance(meta, dict) or meta.get("format") != _FORMAT:
        raise ArtifactError(
            f"{path} does not describe embeddings; give the folder that generate_embeddings wrote"
        )
    if meta.get("format_version") != _FORMAT_VERSION:
        raise ArtifactError(
            f"{path} has format version {meta.get('format_version')!r}; this version of gc_dpr "
            f"reads version {_FORMAT_VERSION}; {_AGAIN}"
        )
    listed = meta.get("shards")
    if not isinstance(listed, list) or not listed:
        raise ArtifactError(f"{path} is damaged: it lists no shards; {_AGAIN}")
    shards = tuple(ShardInfo.from_dict(value, path=path) for value in listed)
    _check_agreement(folder, shards)
    first = shards[0]
    for name, expected in (
        ("rows", first.corpus_rows),
        ("dim", first.dim),
        ("dtype", first.dtype),
        ("num_shards", len(shards)),
        ("model_fingerprint", first.model_fingerprint),
    ):
        if meta.get(name) != expected:
            raise ArtifactError(
                f"{path} is damaged: {name} is {meta.get(name)!r}, its shards say {expected!r}; "
                f"{_AGAIN}"
            )
    return shards


def _why_unfinished(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} does not exist; expected a folder that generate_embeddings wrote"
    present = finished_shards(folder)
    for num_shards in sorted({num_shards for _, num_shards in present}):
        for shard in range(num_shards):
            if (shard, num_shards) not in present:
                return (
                    f"{folder}: shard {shard} of {num_shards} is missing (shards count from 0), "
                    f"the embeddings are not finished; {_AGAIN}"
                )
    found = f"{len(present)} shards but no {META_NAME}" if present else f"no {META_NAME}"
    return f"{folder} has {found}: embeddings were never finished there; {_AGAIN}"


def _check_agreement(folder: Path, shards: list[ShardInfo] | tuple[ShardInfo, ...]) -> None:
    """Refuse shards that do not make one corpus encoded by one model."""
    first = shards[0]
    for number, shard in enumerate(shards):
        for name in ("model_fingerprint", "corpus_hash", "corpus_rows", "dim", "dtype"):
            found, expected = getattr(shard, name), getattr(first, name)
            if found != expected:
                raise ArtifactError(
                    f"{folder.absolute()}: shard {number} has {name} {found!r}, shard 0 has "
                    f"{expected!r}; all shards must come from one model and one corpus; {_AGAIN}"
                )
        bounds = shard_bounds(first.corpus_rows, num_shards=len(shards), shard=number)
        if (shard.shard, shard.num_shards) != (number, len(shards)) or bounds != (
            shard.first_row,
            shard.end_row,
        ):
            raise ArtifactError(
                f"{folder.absolute()}: shard {shard.shard} of {shard.num_shards} holds rows "
                f"{shard.first_row} to {shard.end_row}; expected shard {number} of {len(shards)} "
                f"with rows {bounds[0]} to {bounds[1]}; {_AGAIN}"
            )


def _check_is_described(folder: Path, shard: ShardInfo) -> None:
    """Refuse a shard that was exchanged after the folder was finished."""
    found = ShardInfo.read(folder, shard=shard.shard, num_shards=shard.num_shards)
    for name in ("model_fingerprint", "embeddings_sha256", "ids_sha256"):
        if getattr(found, name) != getattr(shard, name):
            raise ArtifactError(
                f"{shard.file(folder, 'shard')}: {name} is {getattr(found, name)!r}, {META_NAME} "
                f"says {getattr(shard, name)!r}: shard {shard.shard} was exchanged after the "
                f"embeddings were finished; {_AGAIN}"
            )


def _map_embeddings(folder: Path, shard: ShardInfo) -> NDArray[Any]:
    """(N, D), mapped read-only, after shape, type and file size were compared."""
    path = shard.file(folder, "embeddings")
    dtype = np.dtype(shard.dtype).newbyteorder("<")
    expected = ((shard.rows, shard.dim), False, dtype)
    try:
        with path.open("rb") as handle:
            if np.lib.format.read_magic(handle) != (1, 0):
                raise ValueError("not version 1.0 of the .npy format")
            found = np.lib.format.read_array_header_1_0(handle)
            offset = handle.tell()
    except FileNotFoundError:
        raise ArtifactError(f"{path.absolute()} is missing; {_AGAIN}") from None
    except Exception as error:  # numpy raises many types for a damaged header
        raise ArtifactError(f"{path.absolute()} is damaged ({error}); {_AGAIN}") from None
    size, whole = path.stat().st_size, offset + shard.rows * shard.dim * dtype.itemsize
    if found != expected or size != whole:
        raise ArtifactError(
            f"{path.absolute()} is damaged: it holds {found[0]} {found[2]} in {size} bytes, "
            f"expected {expected[0]} {dtype} in {whole} bytes; {_AGAIN}"
        )
    if shard.rows == 0:  # an empty file part cannot be mapped
        return np.empty((0, shard.dim), dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(shard.rows, shard.dim))


def _read_ids(folder: Path, shard: ShardInfo) -> PassageIds:
    path = shard.file(folder, "ids")
    ids = PassageIds.read(path)
    if len(ids) != shard.rows:
        raise ArtifactError(
            f"{path.absolute()} is damaged: it holds {len(ids)} ids for {shard.rows} embeddings; "
            f"{_AGAIN}"
        )
    return ids


def _check_bytes(folder: Path, shard: ShardInfo) -> None:
    for kind, expected in (
        ("embeddings", shard.embeddings_sha256),
        ("ids", shard.ids_sha256),
    ):
        path = shard.file(folder, kind)
        if (found := file_checksum(path)) != expected:
            raise ArtifactError(
                f"{path.absolute()} is damaged: its SHA-256 is {found}, expected {expected}; "
                f"{_AGAIN}"
            )
