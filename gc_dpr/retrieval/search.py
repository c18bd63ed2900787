"""From questions to a run: encode, search, collect, block by block.

Letters: Q questions, D dims, K top-k.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gc_dpr.data.records import Question
from gc_dpr.errors import ArtifactError, DataError
from gc_dpr.retrieval.progress import Progress

if TYPE_CHECKING:
    from gc_dpr.evaluation.runs import Run

logger = logging.getLogger(__name__)


class Searchable(Protocol):
    """What `retrieve` needs of an index; `gc_dpr.retrieval.DenseIndex` is one."""

    def search(
        self, question_embeddings: NDArray[np.float32], k: int, /
    ) -> tuple[NDArray[np.float32], list[list[str]]]:
        """Scores (Q, K), best first, and the passage ids of each question."""
        ...


class Fingerprinted(Protocol):
    """Something that knows which model made it."""

    @property
    def fingerprint(self) -> str:
        """The model's fingerprint."""
        ...


def check_fingerprint(
    index: Fingerprinted, model_fingerprint: str, *, allow_mismatch: bool = False
) -> None:
    """Make sure that the questions' model is the one that encoded the index's passages.

    Args:
        index: The index to be searched.
        model_fingerprint: The fingerprint of the model that encodes the questions.
        allow_mismatch: Only log a mismatch.

    Raises:
        ArtifactError: The fingerprints differ and ``allow_mismatch`` is false.
    """
    if index.fingerprint == model_fingerprint:
        return
    fault = (
        f"the index was made with another model (fingerprint {index.fingerprint[:12]}…) than the "
        f"one that encodes the questions ({model_fingerprint[:12]}…)"
    )
    if not allow_mismatch:
        raise ArtifactError(
            f"{fault}: their scores mean nothing together. Use the checkpoint that the index was "
            "made with, or run generate_embeddings and build_index with this one"
        )
    logger.warning("%s; searching all the same, as asked", fault)


def retrieve(
    encode_questions: Callable[[Sequence[str]], NDArray[Any]],
    index: Searchable,
    questions: Sequence[Question],
    k: int,
    *,
    block: int = 1024,
    progress: bool = False,
) -> Run:
    """Find the best passages for each question.

    Args:
        encode_questions: Turns texts into (Q, D) float32 embeddings, in order;
            ``BiEncoder.encode_questions`` is one.
        index: Where to search.
        questions: Their ids are the keys of the run.
        k: Passages for each question; fewer when the index holds fewer.
        block: Questions encoded and searched at a time.
        progress: Report progress.

    Returns:
        Question id to (passage id, score), best first, in the order of the questions. Scores are
        inner products.

    Raises:
        DataError: Two questions have the same id.
        ValueError: ``k`` or ``block`` below 1.

    Example:
        >>> class OnePassage:
        ...     def search(self, question_embeddings, k):
        ...         return question_embeddings @ np.ones((2, 1), np.float32), [["p"]]
        >>> retrieve(
        ...     lambda texts: np.ones((len(texts), 2), np.float32),
        ...     OnePassage(),
        ...     [Question(id="q", text="who?")],
        ...     k=1,
        ... )
        {'q': [('p', 2.0)]}
    """
    if k < 1 or block < 1:
        raise ValueError(f"k={k}, block={block}; both must be at least 1")
    _refuse_duplicates(questions)
    run: Run = {}
    with Progress(len(questions), what="searching", unit="questions", enabled=progress) as bar:
        for start in range(0, len(questions), block):
            part = questions[start : start + block]
            embeddings = encode_questions([question.text for question in part])  # (Q, D)
            scores, passage_ids = index.search(embeddings, k)  # (Q, K)
            for question, line, found in zip(part, scores.tolist(), passage_ids, strict=True):
                run[question.id] = list(zip(found, line, strict=False))  # scores go on with -inf
            bar.update(len(part))
    return run


def _refuse_duplicates(questions: Sequence[Question]) -> None:
    first_row: dict[str, int] = {}
    for row, question in enumerate(questions):
        first = first_row.setdefault(question.id, row)
        if first != row:
            raise DataError(
                f"the question id {question.id!r} occurs twice (questions {first} and {row}, "
                "counted from 0); a run has one result list for an id, so make them unique"
            )
