"""gc-dpr retrieve: questions, checkpoint and index (or BM25) → a run."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from typing import Any

from gc_dpr.artifacts import write_json
from gc_dpr.cli.console import say, say_read, say_read_all, say_wrote
from gc_dpr.cli.models import apply_threads, describe, load_bi_encoder
from gc_dpr.cli.output import claim_output
from gc_dpr.config import HardwareConfig, RetrieveConfig
from gc_dpr.data import (
    Passage,
    Question,
    passages_by_id,
    read_passages,
    read_questions,
    scan_corpus,
)
from gc_dpr.data.readers.paths import expand_paths
from gc_dpr.distributed import process_group
from gc_dpr.errors import ArtifactError, DataError
from gc_dpr.evaluation import Run, top_k_accuracy, write_dpr_json, write_trec
from gc_dpr.retrieval import DenseIndex, check_fingerprint, retrieve
from gc_dpr.retrieval.bm25 import BM25Index

logger = logging.getLogger(__name__)

FILES = ("run.json", "run.trec", "metrics.json")


def run(settings: RetrieveConfig) -> None:
    """Search, look up the texts of what was found, write the run in both formats."""
    data = settings.data
    inputs = [settings.checkpoint, settings.index_dir, data.questions_file, data.passages_file]
    folder = claim_output(settings, owned=FILES, inputs=inputs)
    questions = list(read_questions(data.questions_file))
    if not questions:
        raise DataError(f"{data.questions_file} holds no question")
    say_read_all(expand_paths(data.questions_file), f"{len(questions)} questions")
    started = time.perf_counter()
    search = search_bm25 if settings.method == "bm25" else search_dense
    found, pool_size = search(settings, questions)
    seconds = time.perf_counter() - started

    passages = passages_of(found, settings)
    flags = answer_flags(found, questions, passages, settings)
    output = folder.clear()
    say_wrote(write_trec(output / "run.trec", found, tag=settings.method))
    say_wrote(
        write_dpr_json(output / "run.json", found, questions, passages, has_answer=flags),
        f"{len(questions)} questions, up to {min(settings.top_k, pool_size)} passages each",
    )
    say_wrote(
        write_json(
            output / "metrics.json",
            {
                "method": settings.method,
                "questions": len(questions),
                "top_k": settings.top_k,
                "pool_size": pool_size,
                "match": data.answer_match,
                "seconds": seconds,
            },
        )
    )


def search_dense(settings: RetrieveConfig, questions: Sequence[Question]) -> tuple[Run, int]:
    """Encode the questions and search the index; returns the run and the corpus size."""
    with process_group(settings.hardware.device) as device:
        apply_threads(settings.hardware)
        model = load_bi_encoder(str(settings.checkpoint), device)
        say_read(str(settings.checkpoint), describe(model))
        index = DenseIndex.load(str(settings.index_dir))
        say_read(str(settings.index_dir), f"{len(index)} passages")
        check_fingerprint(index, model.fingerprint(), allow_mismatch=settings.allow_mismatch)
        check_corpus(index.info.corpus_hash, settings)
        encode = functools.partial(model.encode_questions, **encode_options(settings.hardware))
        return retrieve(encode, index, questions, settings.top_k, progress=True), len(index)


def check_corpus(indexed: str, settings: RetrieveConfig) -> None:
    """Make sure that the texts of the run are those that were embedded.

    Raises:
        ArtifactError: The passages have changed since, and ``allow_mismatch`` is false.
    """
    data = settings.data
    corpus = scan_corpus(data.passages_file, quoting=data.passages_quoting)  # type: ignore[arg-type]
    if indexed in ("", corpus.content_hash):
        return
    fault = (
        f"{', '.join(map(str, corpus.paths[:3]))}: ids or texts differ from the corpus that the "
        "index was made from"
    )
    if not settings.allow_mismatch:
        raise ArtifactError(
            f"{fault}; use that corpus, or embed and index this one again "
            "(allow_mismatch=true searches all the same)"
        )
    logger.warning("%s; searching all the same, as asked", fault)


def encode_options(hardware: HardwareConfig) -> dict[str, Any]:
    """What a hardware preset says about encoding."""
    return {
        "batch_tokens": hardware.encode_batch_tokens,
        "precision": hardware.precision,
    }


def search_bm25(settings: RetrieveConfig, questions: Sequence[Question]) -> tuple[Run, int]:
    """Index the passages by their words and search; returns the run and the corpus size."""
    files = settings.data.passages_file
    quoting = settings.data.passages_quoting
    index = BM25Index.build(read_passages(files, quoting=quoting))  # type: ignore[arg-type]
    say_read_all(expand_paths(files), f"{len(index)} passages")
    if settings.top_k > len(index):
        logger.warning(
            "asked for %d passages, the corpus holds %d: results are shorter",
            settings.top_k, len(index),
        )  # fmt: skip
    scores, passage_ids = index.search([question.text for question in questions], settings.top_k)
    found = {
        question.id: list(zip(ids, row.tolist(), strict=False))
        for question, ids, row in zip(questions, passage_ids, scores, strict=True)
    }
    return found, len(index)


def passages_of(found: Run, settings: RetrieveConfig) -> dict[str, Passage]:
    """Title and text of every passage that was found."""
    wanted = {passage_id for ranking in found.values() for passage_id, _ in ranking}
    passages = passages_by_id(
        settings.data.passages_file,
        wanted,
        quoting=settings.data.passages_quoting,  # type: ignore[arg-type]
    )
    if settings.method == "dense":
        files = expand_paths(settings.data.passages_file)
        say_read_all(files, f"{len(passages)} passages looked up")
    return passages


def answer_flags(
    found: Run,
    questions: Sequence[Question],
    passages: dict[str, Passage],
    settings: RetrieveConfig,
) -> dict[str, list[bool]] | None:
    """Which passages hold an answer, and a first look at the accuracy; none without answers."""
    if not any(question.answers for question in questions):
        say("note   the questions have no answers: has_answer is left out of run.json")
        return None
    result = top_k_accuracy(
        [question.answers for question in questions],
        [[passages[i].text for i, _ in found[question.id]] for question in questions],
        match=settings.data.answer_match,
        progress=True,
    )
    shown = ", ".join(
        f"{name.removesuffix('_accuracy')} {value:.1%}" for name, value in result.metrics().items()
    )
    say(f"       answers found: {shown} (match {result.match}, {result.questions} questions)")
    return {
        question.id: flags for question, flags in zip(questions, result.per_question, strict=True)
    }
