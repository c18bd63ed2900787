"""Losses over the representations of a batch; ``in_batch`` settles the gradient scale."""

from gc_dpr.losses.blocks import ExcludedPairs
from gc_dpr.losses.blockwise import QuestionLosses, blockwise_nll
from gc_dpr.losses.contrastive import DistributedContrastiveLoss, SimpleContrastiveLoss
from gc_dpr.losses.in_batch import InBatchLoss, in_batch_nll

__all__ = [
    "DistributedContrastiveLoss",
    "ExcludedPairs",
    "InBatchLoss",
    "QuestionLosses",
    "SimpleContrastiveLoss",
    "blockwise_nll",
    "in_batch_nll",
]
