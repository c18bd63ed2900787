"""Loss and gradients of one batch, through the gradient cache.

batch (ragged tokens) → chunks by token budget, one budget per tower → representations → loss
over the whole batch of all processes → cached gradients → parameter gradients.

Letters: Q questions, P passages, D dims, W world size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gc_dpr.data.collator import Batch
from gc_dpr.data.known_positives import KnownPositives
from gc_dpr.distributed import gather_counts, gather_rows, rank, world_size
from gc_dpr.grad_cache.step import cache_gradients
from gc_dpr.grad_cache.towers import EncodedTower
from gc_dpr.losses import InBatchLoss, in_batch_nll
from gc_dpr.models import BiEncoder
from gc_dpr.training.batch_outcome import BatchOutcome, outcome_of
from gc_dpr.training.chunk_budget import (
    ChunkBudget,
    StepStart,
    free_cached_memory,
    is_out_of_memory,
)
from gc_dpr.training.embedding_gradients import embeddings_added_in_place
from gc_dpr.training.sides import Side
from gc_dpr.training.two_passes import TwoPasses

__all__ = ["BatchOutcome", "ChunkBudget", "batch_gradients", "known_positives"]


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
    kept_tokens: int = 0,
) -> BatchOutcome:
    """Add one batch's gradients to the parameters' ``.grad``.

    With several processes the gradients still have to be summed over them
    (:func:`gc_dpr.distributed.sum_gradients`); the loss is scaled for exactly that. Encoders given
    to ``fully_shard`` have then averaged theirs already, with the loss scaled for that.

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
        kept_tokens: Chunks of so many padded tokens together keep their graph from the first pass,
            besides those that the budgets keep.

    Raises:
        TextDoesNotFitError: The memory does not hold the activations of one text.
    """
    sides = [
        Side("question", model.question_encoder, batch.questions, device),
        Side("passage", model.passage_encoder, batch.passages, device),
    ]
    step = TwoPasses(sides, [question_budget, passage_budget], kept_tokens, autocast_dtype)
    loss_fn = _LossFunction(batch, device, temperature, mask_known_positives, averaged=step.sharded)
    start = StepStart(model.parameters())
    while True:
        with embeddings_added_in_place(model):
            encoded = step.encode()
            cached = _cached_gradients(step, encoded, loss_fn, scaler)
            done = cached is not None and step.backward(encoded, cached[0])
        if done and cached is not None:
            break
        del encoded, cached  # before anything is encoded again
        start.restore()
        free_cached_memory(device)
    return outcome_of(batch, step, encoded, cached[1], loss_fn.result)


def _cached_gradients(
    step: TwoPasses,
    encoded: Sequence[EncodedTower],
    loss_fn: _LossFunction,
    scaler: torch.amp.GradScaler | None,
) -> tuple[list[Tensor], Tensor] | None:
    """Gradients of the representations, and the loss; None if that did not fit beside kept graphs.

    On several processes the others wait in the collectives of the loss, so there is no way back.
    """
    try:
        return cache_gradients(
            loss_fn,
            [tower.reps for tower in encoded],
            trainable=[tower.tower.trainable for tower in encoded],
            scaler=scaler,
        )
    except RuntimeError as error:
        if not is_out_of_memory(error) or world_size() > 1 or not step.keeps_graphs:
            raise
    step.keep_less()
    return None


class _LossFunction:
    """The loss of the batch from the representations of its distinct texts."""

    result: InBatchLoss

    def __init__(
        self,
        batch: Batch,
        device: torch.device,
        temperature: float,
        mask_known_positives: bool,
        *,
        averaged: bool,
    ) -> None:
        self._question_rows = batch.question_rows.to(device)
        self._passage_rows = batch.passage_rows.to(device)
        self._positive_index = batch.positive_index.to(device)
        self._temperature = temperature
        self._excluded = known_positives(batch, device) if mask_known_positives else None
        self._averaged = averaged

    def __call__(self, question_reps: Tensor, passage_reps: Tensor) -> Tensor:
        # each distinct text was encoded once; here it stands wherever it belongs
        self.result = in_batch_nll(
            _at_rows(question_reps, self._question_rows),  # (Q, D)
            _at_rows(passage_reps, self._passage_rows),  # (P, D)
            self._positive_index,
            temperature=self._temperature,
            excluded=self._excluded,
            gradient_reduction="mean" if self._averaged else "sum",
        )
        return self.result.loss


def _at_rows(reps: Tensor, rows: Tensor) -> Tensor:
    """Each text where it belongs; without repetitions they stand there already: no copy."""
    return reps if len(reps) == len(rows) else reps.index_select(0, rows)


def known_positives(batch: Batch, device: torch.device) -> KnownPositives:
    """Which of all processes' passages are no negatives of this process's questions."""
    passage_keys = gather_rows(batch.passage_keys.to(device))  # (P,)
    offset = sum(gather_counts(len(batch.passage_keys), device)[: rank()])
    return KnownPositives(
        batch.known_positive_keys.to(device),
        batch.known_positive_counts.to(device),
        passage_keys,
        batch.positive_index.to(device) + offset,
    )
