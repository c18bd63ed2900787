"""Representations and loss of one batch by plain autograd: what the gradient cache is held to.

Written for being obviously right, not for speed: everything is in one graph and in memory at once.

Letters: Q questions, P passages, N rows, L tokens, D dims, C chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gc_dpr.data.collator import Batch
from gc_dpr.training.sides import Side


def encode_in_chunks(
    side: Side,
    chunks: Sequence[Tensor],
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Tensor:
    """Encode the texts of a side chunk by chunk, with all graphs: (N, D) in the order of the rows.

    Args:
        side: Texts and their encoder.
        chunks: Row numbers (C,) of each chunk.
        autocast: Makes the context of each chunk's forward.
    """
    pieces = []
    for rows in chunks:
        padded = side.tokens.pad(
            rows, pad_token_id=side.encoder.pad_token_id, device=side.device
        )  # (C, L)
        with autocast():
            pieces.append(side.encoder(**padded))  # (C, D)
    order = torch.cat(list(chunks)).argsort().to(side.device)
    return torch.cat(pieces)[order]


def dense_scores(
    question_reps: Tensor, passage_reps: Tensor, batch: Batch, *, temperature: float
) -> Tensor:
    """Scores (Q, P) of questions and candidates from the representations of the distinct texts."""
    questions = question_reps[batch.question_rows.to(question_reps.device)]  # (Q, D)
    passages = passage_reps[batch.passage_rows.to(passage_reps.device)]  # (P, D)
    return questions @ passages.T / temperature


def dense_nll(scores: Tensor, batch: Batch, *, mask_known_positives: bool) -> Tensor:
    """Mean negative log-likelihood of the positives; a scalar.

    Args:
        scores: (Q, P).
        batch: Of one process.
        mask_known_positives: Other known positives of a question are no candidates.
    """
    labels = batch.positive_index
    if mask_known_positives:
        keys = torch.split(batch.known_positive_keys, batch.known_positive_counts.tolist())
        known = torch.stack([torch.isin(batch.passage_keys, own) for own in keys])  # (Q, P)
        known[torch.arange(len(labels)), labels] = False
        scores = scores.masked_fill(known.to(scores.device), float("-inf"))
    return F.cross_entropy(scores, labels.to(scores.device))
