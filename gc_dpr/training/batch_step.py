"""Loss and gradients of one batch, through the gradient cache.

batch (ragged tokens) → chunks by token budget, one budget per tower → representations → loss
over the whole batch of all processes → cached gradients → parameter gradients.

Letters: Q questions, P passages, D dims, W world size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gc_dpr.data.collator import Batch, known_positive_mask
from gc_dpr.distributed import gather_counts, gather_rows, rank
from gc_dpr.grad_cache.chunking import RaggedTokens, length_sorted_chunks
from gc_dpr.grad_cache.step import Tower, cached_step
from gc_dpr.losses import InBatchLoss, in_batch_nll
from gc_dpr.models import BiEncoder, TextEncoder


@dataclass(frozen=True, slots=True)
class ChunkBudget:
    """How much of one side of a batch has its activations in memory at once.

    Attributes:
        tokens: Padded tokens of a chunk.
        rows: Texts of a chunk; ``None`` = as many as the tokens allow.
        kept: So many chunks keep their activations from the first pass and are not encoded twice;
            each costs the memory of one more chunk.
    """

    tokens: int
    rows: int | None = None
    kept: int = 0


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
        tokens: Own tokens without padding.
        padded_tokens: The same with padding.
        chunks: Own chunks of both towers.
        truncated_questions: Own questions cut to the maximum length.
        truncated_passages: Own passages cut to the maximum length.
        fewer_negatives: Own questions with fewer negatives than asked for.
        passed_over_negatives: Own negatives not taken because they are a positive of the same
            question, or a repetition.
    """

    loss: Tensor
    correct: int
    questions: int
    candidates: int
    masked_negatives: int
    tokens: int
    padded_tokens: int
    chunks: int
    truncated_questions: int
    truncated_passages: int
    fewer_negatives: int
    passed_over_negatives: int


def known_positives(batch: Batch, device: torch.device) -> Tensor:
    """(Q, P of all processes) bool: passages that are no negatives of a question."""
    passage_keys = gather_rows(batch.passage_keys.to(device))  # (P,)
    offset = sum(gather_counts(len(batch.passage_keys), device)[: rank()])
    return known_positive_mask(
        batch.known_positive_keys.to(device),
        batch.known_positive_counts.to(device),
        passage_keys,
        batch.positive_index.to(device) + offset,
    )


def batch_gradients(
    model: BiEncoder,
    batch: Batch,
    *,
    question_budget: ChunkBudget,
    passage_budget: ChunkBudget,
    device: torch.device,
    temperature: float = 1.0,
    mask_known_positives: bool = True,
    autocast_dtype: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> BatchOutcome:
    """Add one batch's gradients to the parameters' ``.grad``.

    With several processes the gradients still have to be summed over them
    (:func:`gc_dpr.distributed.sum_gradients`); the loss is scaled for exactly that.

    Args:
        model: The encoders, on ``device``.
        batch: This process's share of the batch.
        question_budget: Chunk size of the question tower.
        passage_budget: Chunk size of the passage tower.
        device: Where the encoders are.
        temperature: Scores are divided by it.
        mask_known_positives: Leave out pairs whose passage is another positive of the question.
        autocast_dtype: bfloat16 or float16 for mixed precision; ``None`` = float32 throughout.
        scaler: For float16.
    """
    excluded = known_positives(batch, device) if mask_known_positives else None  # (Q, P of all)
    positive_index = batch.positive_index.to(device)
    passage_rows = batch.passage_rows.to(device)
    results: list[InBatchLoss] = []

    def loss_of(question_reps: Tensor, distinct_reps: Tensor) -> Tensor:
        # each distinct passage was encoded once; here it stands wherever it is a candidate
        passage_reps = distinct_reps.index_select(0, passage_rows)  # (P, D)
        results.append(
            in_batch_nll(
                question_reps,
                passage_reps,
                positive_index,
                temperature=temperature,
                excluded=excluded,
            )
        )
        return results[-1].loss

    towers = [
        _tower(model.question_encoder, batch.questions, question_budget, device),
        _tower(model.passage_encoder, batch.passages, passage_budget, device),
    ]
    loss = cached_step(
        towers, loss_of, scaler=scaler, autocast=_autocast_factory(device, autocast_dtype)
    )
    sides = ((batch.questions, towers[0]), (batch.passages, towers[1]))
    return BatchOutcome(
        loss=loss,
        correct=int(results[0].correct),
        questions=len(batch.positive_index),
        candidates=results[0].candidates,
        masked_negatives=0 if excluded is None else int(excluded.sum()),
        tokens=sum(int(tokens.lengths.sum()) for tokens, _ in sides),
        padded_tokens=sum(
            len(rows) * int(tokens.lengths[rows].max())
            for tokens, tower in sides
            for rows in tower.chunks
        ),
        chunks=sum(len(tower.chunks) for _, tower in sides),
        truncated_questions=batch.truncated_questions,
        truncated_passages=batch.truncated_passages,
        fewer_negatives=batch.fewer_negatives,
        passed_over_negatives=batch.passed_over_negatives,
    )


def _tower(
    encoder: TextEncoder, tokens: RaggedTokens, budget: ChunkBudget, device: torch.device
) -> Tower:
    def pad(rows: Tensor) -> dict[str, Tensor]:
        return tokens.pad(rows, pad_token_id=encoder.pad_token_id, device=device)

    weights = next(encoder.parameters()).dtype
    return Tower(
        encode=lambda inputs: encoder(**inputs),
        chunks=length_sorted_chunks(tokens.lengths, max_tokens=budget.tokens, max_rows=budget.rows),
        pad=pad,
        num_rows=len(tokens),
        embedding_dim=encoder.embedding_dim,
        devices=[device],
        trainable=any(parameter.requires_grad for parameter in encoder.parameters()),
        kept_graphs=budget.kept,
        dtype=torch.float64 if weights == torch.float64 else torch.float32,
    )


def _autocast_factory(
    device: torch.device, dtype: torch.dtype | None
) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    if dtype is None:
        return contextlib.nullcontext
    return lambda: torch.autocast(device.type, dtype=dtype)
