"""Search of embeddings by inner product with FAISS: the only module that imports faiss.

An index folder holds ``index.faiss``, ``ids.txt`` (one passage id per line, in row order) and
``meta.json``, which is written last: its presence says that the other two are whole. The folder
is all that searching needs, the embeddings are not read again.

FAISS and PyTorch in one process: each brings its own OpenMP runtime. On Linux they get along. On
macOS the wheels of both carry a ``libomp``: parallel regions of the two crash, so FAISS is kept
to one thread there. If the process is stopped with "OMP: Error #15", set KMP_DUPLICATE_LIB_OK=TRUE
in the environment. Import torch before this module, and never fork after a search: start worker
processes by "spawn".

Letters: Q questions, P passages, D dims, K top-k.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from gc_dpr.artifacts import atomic_file, file_checksum, write_json
from gc_dpr.errors import ArtifactError, ConfigError
from gc_dpr.retrieval.embedding_store import EmbeddingStore
from gc_dpr.retrieval.hashed_file import HashedFile
from gc_dpr.retrieval.index_info import (
    AGAIN,
    IDS_NAME,
    INDEX_NAME,
    META_NAME,
    IndexInfo,
    read_index_info,
)
from gc_dpr.retrieval.passage_ids import PassageIds
from gc_dpr.retrieval.progress import Progress

logger = logging.getLogger(__name__)

if sys.platform == "darwin":
    faiss.omp_set_num_threads(1)


def set_search_threads(threads: int) -> None:
    """Set how many threads FAISS builds and searches with; it begins with one per core.

    Raises:
        ConfigError: Fewer than one thread.
    """
    if threads < 1:
        raise ConfigError(f"{threads} search threads; expected at least 1")
    faiss.omp_set_num_threads(threads)


class DenseIndex:
    """Passages searchable by the inner product of their embeddings with a question's.

    Made by `DenseIndex.build` or `DenseIndex.load`.

    Attributes:
        info: What is in it.
        ids: Passage ids in row order.
    """

    def __init__(self, searcher: Any, ids: PassageIds, info: IndexInfo) -> None:
        self.info = info
        self.ids = ids
        self._searcher = searcher
        self._said_too_many = False

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model that made the embeddings."""
        return self.info.model_fingerprint

    def __len__(self) -> int:
        return self.info.count

    @classmethod
    def build(
        cls,
        store: EmbeddingStore,
        *,
        factory: str = "Flat",
        block_rows: int = 32768,
        progress: bool = False,
    ) -> DenseIndex:
        """Index all embeddings of a store, block by block.

        Args:
            store: The embeddings.
            factory: FAISS factory string; the metric is the inner product whatever it is.
                ``"Flat"`` is exact.
            block_rows: Rows in memory besides the index itself.
            progress: Report progress.

        Raises:
            ConfigError: FAISS does not know the factory string, or such an index needs training.
            ArtifactError: A passage id occurs twice.
        """
        ids = store.ids()
        ids.refuse_duplicates(where=str(store.folder))
        searcher = _empty_searcher(factory, store.dim)
        _reserve(searcher, store.rows)
        with Progress(store.rows, what="indexing", unit="passages", enabled=progress) as bar:
            for embeddings, _ in store.iter_blocks(block_rows):
                searcher.add(np.ascontiguousarray(embeddings, dtype=np.float32))
                bar.update(len(embeddings))
        info = IndexInfo(
            factory=factory,
            metric="inner_product",
            count=store.rows,
            dim=store.dim,
            model_fingerprint=store.fingerprint,
            corpus_hash=store.corpus_hash,
        )
        _check_fit(searcher, ids, info, where=str(store.folder))
        return cls(searcher, ids, info)

    def save(self, folder: str | Path) -> None:
        """Write the index into a folder, which is created when missing; ``meta.json`` comes last.

        Raises:
            ArtifactError: The folder holds a finished index.
        """
        folder = Path(folder)
        if (folder / META_NAME).exists():
            raise ArtifactError(
                f"{folder.absolute()} holds a finished index; write to another folder, or {AGAIN}"
            )
        with atomic_file(folder / INDEX_NAME, "wb") as handle:
            index_file = HashedFile(handle)
            to_file = faiss.PyCallbackIOWriter(index_file.write)  # type: ignore[attr-defined]
            faiss.write_index(self._searcher, to_file)
        with atomic_file(folder / IDS_NAME, "wb") as handle:
            handle.write(self.ids.lines)
        self.info = replace(
            self.info,
            index_bytes=index_file.size,
            index_sha256=index_file.hexdigest(),
            ids_sha256=hashlib.sha256(self.ids.lines).hexdigest(),
        )
        write_json(folder / META_NAME, asdict(self.info))

    @classmethod
    def load(cls, folder: str | Path, *, verify: bool = False) -> DenseIndex:
        """Read an index into memory.

        Args:
            folder: What `save` wrote.
            verify: Also compare the checksum of the index, which reads it once more. That of the
                ids is always compared.

        Raises:
            ArtifactError: The index is not finished, damaged, of another format version, or does
                not search by inner product.
        """
        folder = Path(folder).absolute()
        info = read_index_info(folder)
        ids_path, index_path = folder / IDS_NAME, folder / INDEX_NAME
        ids = PassageIds.read(ids_path)
        if hashlib.sha256(ids.lines).hexdigest() != info.ids_sha256:
            raise ArtifactError(f"{ids_path} is not the file that {META_NAME} describes; {AGAIN}")
        size = index_path.stat().st_size if index_path.is_file() else None
        if size != info.index_bytes:
            found = "missing" if size is None else f"damaged: it has {size} bytes"
            raise ArtifactError(
                f"{index_path} is {found}, expected {info.index_bytes} bytes; {AGAIN}"
            )
        if verify and file_checksum(index_path) != info.index_sha256:
            raise ArtifactError(
                f"{index_path} is damaged: its SHA-256 is not what {META_NAME} says; {AGAIN}"
            )
        try:
            searcher = faiss.read_index(str(index_path))
        except (RuntimeError, MemoryError) as error:
            raise ArtifactError(
                f"{index_path} is damaged: FAISS cannot read it ({error}); {AGAIN}"
            ) from None
        _check_fit(searcher, ids, info, where=str(index_path))
        return cls(searcher, ids, info)

    def search(
        self, question_embeddings: NDArray[np.float32], k: int, *, block_questions: int = 1024
    ) -> tuple[NDArray[np.float32], list[list[str]]]:
        """Find the passages with the highest inner products.

        Equal scores are ordered by row (the order of the corpus), so a result is the same every
        time. Which of several passages with the K-th score are found at all is FAISS's choice.

        Args:
            question_embeddings: (Q, D) float32.
            k: Passages to find for each question.
            block_questions: Questions searched at a time; bounds FAISS's working memory.

        Returns:
            Scores (Q, K) float32, best first, with K = the smaller of ``k`` and P; and the passage
            ids, one list per question. A list is shorter than K when the index found fewer
            passages (approximate ones may); the scores behind its end are -inf.

        Raises:
            ValueError: ``k`` < 1, or the embeddings are not a 2-D float32 array.
            ArtifactError: D is not the index's, or an embedding is not finite.
        """
        _check_questions(question_embeddings, dim=self.info.dim)
        if k < 1 or block_questions < 1:
            raise ValueError(f"k={k}, block_questions={block_questions}; both must be at least 1")
        if k > len(self) and not self._said_too_many:
            self._said_too_many = True
            logger.warning(
                "asked for %d passages, the index holds %d: results are shorter", k, len(self)
            )
        top_k = min(k, len(self))
        scores = np.empty((len(question_embeddings), top_k), dtype=np.float32)
        passage_ids: list[list[str]] = []
        for start in range(0, len(question_embeddings), block_questions):
            block = question_embeddings[start : start + block_questions]
            scores[start : start + len(block)], rows = self._search_block(block, top_k)
            passage_ids += [[self.ids[row] for row in line if row >= 0] for line in rows.tolist()]
        return scores, passage_ids

    def _search_block(
        self, block: NDArray[np.float32], top_k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Scores and rows, each (Q, K), in order; row -1 and score -inf where there is no hit."""
        if top_k == 0:  # an empty index: FAISS refuses to look for 0 passages
            return np.empty((len(block), 0), np.float32), np.empty((len(block), 0), np.int64)
        scores, rows = self._searcher.search(np.ascontiguousarray(block), top_k)  # (Q, K) each
        scores = np.where(rows < 0, -np.inf, scores)
        order = np.lexsort((rows, -scores), axis=-1)  # (Q, K); best first, then by row
        return np.take_along_axis(scores, order, -1), np.take_along_axis(rows, order, -1)


def _empty_searcher(factory: str, dim: int) -> Any:
    if "IDMap" in factory:
        raise ConfigError(f"factory string {factory!r}: ids are kept beside the index; drop IDMap")
    try:
        searcher = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        reason = str(error).splitlines()[0].rpartition(": ")[2]
        raise ConfigError(
            f"FAISS makes no index of {dim} dims from the factory string {factory!r} ({reason}); "
            "use 'Flat'"
        ) from None
    if not searcher.is_trained:
        raise ConfigError(
            f"an index {factory!r} needs training, which is not supported yet; use 'Flat', or "
            "another factory string that needs none, such as 'HNSW32'"
        )
    return searcher


def _reserve(searcher: Any, rows: int) -> None:
    """Take the memory of a flat index at once: growing block by block copies, and peaks higher.

    A C++ vector keeps its capacity when it shrinks, and FAISS has no other call for it.
    """
    if isinstance(searcher, faiss.IndexFlatCodes):
        searcher.codes.resize(rows * searcher.code_size)
        searcher.codes.resize(0)


def _check_fit(searcher: Any, ids: PassageIds, info: IndexInfo, *, where: str) -> None:
    if searcher.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise ArtifactError(
            f"{where}: FAISS's metric is number {searcher.metric_type} (1 is L2), expected the "
            f"inner product: distances would rank passages wrongly; {AGAIN}"
        )
    found = (searcher.ntotal, len(ids), searcher.d)
    if found != (info.count, info.count, info.dim):
        raise ArtifactError(
            f"{where} holds {found[0]} embeddings of {found[2]} dims for {found[1]} passage ids; "
            f"expected {info.count} embeddings of {info.dim} dims; {AGAIN}"
        )


def _check_questions(embeddings: NDArray[np.float32], *, dim: int) -> None:
    if embeddings.ndim != 2 or embeddings.dtype != np.float32:
        raise ValueError(
            f"question embeddings of shape {embeddings.shape} and type {embeddings.dtype}; "
            f"expected (questions, {dim}) float32"
        )
    if embeddings.shape[1] != dim:
        raise ArtifactError(
            f"question embeddings of {embeddings.shape[1]} dims do not fit an index of {dim} dims; "
            "use the model that the index was made with"
        )
    finite = np.isfinite(embeddings).all(axis=1)
    if not finite.all():
        raise ArtifactError(
            f"{int((~finite).sum())} question embeddings are not finite, the first in row "
            f"{int(np.argmin(finite))}; check the checkpoint (a diverged training gives this)"
        )
