"""Writes one shard of an embedding folder, block by block, in memory that does not grow.

The rows go straight to temporary files; a killed process leaves nothing under a final name.
Letters: N rows of a block, D dims.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gc_dpr.artifacts import atomic_file, write_json
from gc_dpr.errors import ArtifactError, ConfigError
from gc_dpr.retrieval.hashed_file import HashedFile
from gc_dpr.retrieval.passage_ids import id_lines
from gc_dpr.retrieval.shards import DTYPES, META_NAME, ShardInfo, shard_bounds, shard_file

logger = logging.getLogger(__name__)


class ShardWriter:
    """Takes the rows of one shard, block by block and in order; made by `ShardWriter.open`.

    Attributes:
        first_row: The corpus row it begins with.
        end_row: One past the corpus row it ends with.
        corpus_rows: Passages of the whole corpus.
        dim: D.
        written: Rows taken so far.
        zero_rows: Those of them that are all zeros.
    """

    def __init__(
        self,
        embeddings: HashedFile,
        ids: HashedFile,
        *,
        bounds: tuple[int, int],
        corpus_rows: int,
        dim: int,
        dtype: str,
    ) -> None:
        self.first_row, self.end_row = bounds
        self.corpus_rows = corpus_rows
        self.dim = dim
        self.written = 0
        self.zero_rows = 0
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._embeddings = embeddings
        self._ids = ids
        np.lib.format.write_array_header_1_0(
            embeddings,
            {
                "descr": np.lib.format.dtype_to_descr(self._dtype),
                "fortran_order": False,
                "shape": (self.end_row - self.first_row, dim),
            },
        )

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        folder: str | Path,
        *,
        shard: int,
        num_shards: int,
        corpus_rows: int,
        dim: int,
        dtype: str = "float32",
        model_fingerprint: str,
        corpus_hash: str = "",
    ) -> Iterator[ShardWriter]:
        """Write one shard; its files appear when the block ends without an exception.

        Args:
            folder: The embedding folder.
            shard: Which shard, from 0.
            num_shards: How many there are together.
            corpus_rows: Passages of the whole corpus; `shard_bounds` says which are this shard's.
            dim: D.
            dtype: ``"float32"``, or ``"float16"`` for half the disk space.
            model_fingerprint: Which encoder makes the embeddings.
            corpus_hash: Which passages are encoded, as `gc_dpr.data.scan_corpus` finds it.

        Raises:
            ArtifactError: The folder is finished already, or the block ended too early.
            ConfigError: An unknown ``dtype``.
        """
        folder = Path(folder)
        if dtype not in DTYPES:
            raise ConfigError(f"embeddings are stored as {' or '.join(DTYPES)}, not {dtype!r}")
        if (folder / META_NAME).exists():
            raise ArtifactError(
                f"{folder.absolute()} holds finished embeddings; write to another folder, or run "
                "generate_embeddings with overwrite=true"
            )
        bounds = shard_bounds(corpus_rows, num_shards=num_shards, shard=shard)
        paths = {
            kind: shard_file(folder, kind, shard=shard, num_shards=num_shards)
            for kind in ("ids", "embeddings", "shard")
        }
        paths["shard"].unlink(missing_ok=True)  # an old description must not fit new files
        with (
            atomic_file(paths["embeddings"], "wb") as embeddings_handle,
            atomic_file(paths["ids"], "wb") as ids_handle,
        ):
            embeddings, ids = HashedFile(embeddings_handle), HashedFile(ids_handle)
            writer = cls(
                embeddings, ids, bounds=bounds, corpus_rows=corpus_rows, dim=dim, dtype=dtype
            )
            yield writer
            writer.check_full()
        info = ShardInfo(
            shard=shard,
            num_shards=num_shards,
            corpus_rows=corpus_rows,
            first_row=bounds[0],
            end_row=bounds[1],
            dim=dim,
            dtype=dtype,
            zero_rows=writer.zero_rows,
            embeddings_sha256=embeddings.hexdigest(),
            ids_sha256=ids.hexdigest(),
            model_fingerprint=model_fingerprint,
            corpus_hash=corpus_hash,
        )
        write_json(paths["shard"], asdict(info))
        if writer.zero_rows:
            logger.warning(
                "%s: %d of %d embeddings are all zeros; no question can tell them apart",
                paths["embeddings"].absolute(),
                writer.zero_rows,
                writer.written,
            )

    def write(self, embeddings: NDArray[Any], ids: Sequence[str]) -> None:
        """Add the next rows.

        Args:
            embeddings: (N, D) of any float type; stored in the shard's.
            ids: Their N passage ids.

        Raises:
            ValueError: The shape does not fit the ids or the shard.
            ArtifactError: An embedding is not finite, or more rows come than the shard has.
        """
        if embeddings.shape != (len(ids), self.dim):
            raise ValueError(
                f"embeddings of shape {embeddings.shape} for {len(ids)} passage ids; "
                f"expected ({len(ids)}, {self.dim})"
            )
        if self.written + len(ids) > self.end_row - self.first_row:
            raise ArtifactError(
                f"more than the {self.end_row - self.first_row} passages that this shard has room "
                f"for (rows {self.first_row} to {self.end_row} of {self.corpus_rows}): the corpus "
                "has grown since it was counted; start again"
            )
        with np.errstate(over="ignore"):  # what does not fit is reported just below
            block = np.ascontiguousarray(embeddings, dtype=self._dtype)
        finite = np.isfinite(block).all(axis=1)
        if not finite.all():
            row = int(np.argmin(finite))
            raise ArtifactError(
                f"the embedding of passage {ids[row]!r} (corpus row "
                f"{self.first_row + self.written + row}) is not finite in {self._dtype.name}; "
                "check the checkpoint (a diverged training gives this), or store float32"
            )
        self._ids.write(id_lines(ids))
        self._embeddings.write(block.reshape(-1).view(np.uint8).data)
        self.zero_rows += int((~block.any(axis=1)).sum())
        self.written += len(ids)

    def check_full(self) -> None:
        """Raise an ArtifactError when rows are missing."""
        expected = self.end_row - self.first_row
        if self.written != expected:
            raise ArtifactError(
                f"{self.written} passages came for a shard of {expected} (rows {self.first_row} "
                f"to {self.end_row} of {self.corpus_rows}): the corpus has shrunk since it was "
                "counted; start again"
            )
