"""The loss with the whole matrix of scores, by plain autograd; shares no code with gc_dpr."""

import torch
from torch.nn import functional as F


def dense_nll(questions, passages, labels, excluded=None, temperature=1.0):
    """(Q,) losses."""
    scores = questions @ passages.T / temperature
    if excluded is not None:
        scores = scores.masked_fill(excluded, -torch.inf)
    return F.cross_entropy(scores, labels, reduction="none")


def random_case(seed, questions, passages, dim=5, *, masked=0.0, scale=1.0):
    """Representations in float64, labels that may share a passage, and a mask of random pairs."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows):
        reps = torch.randn(rows, dim, generator=generator, dtype=torch.float64)
        return (scale * reps).requires_grad_()

    question_reps, passage_reps = normal(questions), normal(passages)
    labels = torch.randint(passages, (questions,), generator=generator)
    excluded = torch.rand(questions, passages, generator=generator) < masked
    excluded[torch.arange(questions), labels] = False
    return question_reps, passage_reps, labels, excluded


def relative_error(found, expected):
    return float((found - expected).norm() / expected.norm())
