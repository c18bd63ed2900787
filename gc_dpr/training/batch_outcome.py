"""What one process learned of a batch: numbers for the log, and budgets for the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gc_dpr.data.collator import Batch
from gc_dpr.distributed import world_size
from gc_dpr.grad_cache.towers import EncodedTower
from gc_dpr.losses import InBatchLoss
from gc_dpr.ragged import padded_tokens
from gc_dpr.training.chunk_budget import ChunkBudget, largest_chunk
from gc_dpr.training.two_passes import TwoPasses


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """What one process learned of a batch; the counts of all processes add up.

    Attributes:
        loss: Scalar, this process's share; the shares of all processes sum to the mean loss.
        correct: Own questions whose positive has the highest score of all candidates.
        questions: Own questions.
        candidates: Passages that every question is compared with, over all processes.
        masked_negatives: Own question-passage pairs left out because the passage is a known
            positive of the question.
        lone_questions: Own questions with no candidate left but their positive: they teach nothing.
        tokens: Own tokens without padding.
        padded_tokens: The same with padding.
        chunks: Own chunks of both towers.
        replayed_chunks: Those of them that were encoded twice.
        largest_chunk: Padded tokens of the largest own chunk.
        truncated_questions: Own questions cut to the maximum length.
        truncated_passages: Own passages cut to the maximum length.
        fewer_negatives: Own questions with fewer negatives than asked for.
        passed_over_negatives: Own negatives not taken because they are a positive of the same
            question, or a repetition.
        question_budget: What the step was done with in the end: less than asked for if that did not
            fit into memory.
        passage_budget: The same of the other tower.
        kept_tokens: The same of the tokens that might keep their graph.
    """

    loss: Tensor
    correct: int
    questions: int
    candidates: int
    masked_negatives: int
    lone_questions: int
    tokens: int
    padded_tokens: int
    chunks: int
    replayed_chunks: int
    largest_chunk: int
    truncated_questions: int
    truncated_passages: int
    fewer_negatives: int
    passed_over_negatives: int
    question_budget: ChunkBudget
    passage_budget: ChunkBudget
    kept_tokens: int


def outcome_of(
    batch: Batch,
    step: TwoPasses,
    encoded: Sequence[EncodedTower],
    loss: Tensor,
    result: InBatchLoss,
) -> BatchOutcome:
    """Count what a finished step did."""
    lengths = [side.tokens.lengths for side in step.sides]
    chunks = [tower.tower.chunks for tower in encoded]
    return BatchOutcome(
        # the loss of averaged gradients is W times the share
        loss=loss / world_size() if step.sharded else loss,
        correct=int(result.correct),
        questions=len(batch.positive_index),
        candidates=result.candidates,
        masked_negatives=int(result.excluded_pairs),
        lone_questions=int(result.lone_questions),
        tokens=sum(int(own.sum()) for own in lengths),
        padded_tokens=sum(
            padded_tokens(rows, own)
            for own, cut in zip(lengths, chunks, strict=True)
            for rows in cut
        ),
        chunks=sum(len(cut) for cut in chunks),
        replayed_chunks=sum(tower.replays for tower in encoded),
        largest_chunk=max(
            largest_chunk(cut, own) for own, cut in zip(lengths, chunks, strict=True)
        ),
        truncated_questions=batch.truncated_questions,
        truncated_passages=batch.truncated_passages,
        fewer_negatives=batch.fewer_negatives,
        passed_over_negatives=batch.passed_over_negatives,
        question_budget=step.budgets[0],
        passage_budget=step.budgets[1],
        kept_tokens=step.kept_tokens,
    )
