"""The loss objects of the GradCache package, by its names: call them with representations.

``DistributedContrastiveLoss`` gives the gradient of the joined batch. The package's own gives 1/W
of it: each of its processes back-propagates the whole loss into its own representations only, and
DistributedDataParallel then takes the mean.

Letters: Q questions, P passages, D dims, W world size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gc_dpr.distributed import gather_integers, rank, sum_over_processes, world_size
from gc_dpr.losses.blockwise import blockwise_nll
from gc_dpr.losses.in_batch import in_batch_nll


class SimpleContrastiveLoss:
    """Negative log-likelihood of each question's positive among the passages given to it.

    Knows nothing of other processes: gather the representations first, or use
    :class:`DistributedContrastiveLoss`. Computed in blocks and in float32 (float64 where a
    representation is), whatever autocast says.

    Args:
        n_hard_negatives: How many passages follow each positive before the next positive.

    Raises:
        ValueError: Below 0.

    Example:
        >>> loss_fn = SimpleContrastiveLoss(n_hard_negatives=1)
        >>> questions, passages = 9.0 * torch.eye(4)[[0, 2]], 9.0 * torch.eye(4)
        >>> loss_fn(questions, passages, reduction="none").tolist()
        [0.0, 0.0]
    """

    def __init__(self, n_hard_negatives: int = 0) -> None:
        if n_hard_negatives < 0:
            raise ValueError(f"n_hard_negatives must be at least 0, found {n_hard_negatives}")
        self.n_hard_negatives = n_hard_negatives

    def __call__(
        self, x: Tensor, y: Tensor, target: Tensor | None = None, reduction: str = "mean"
    ) -> Tensor:
        """Return the loss of questions against passages.

        Args:
            x: (Q, D) questions.
            y: (P, D) passages.
            target: (Q,) int64, the row of each question's positive in ``y``. By default every
                question has a group of ``1 + n_hard_negatives`` rows, its positive first.
            reduction: ``"mean"`` or ``"sum"`` over the questions, or ``"none"``: (Q,).

        Raises:
            ValueError: Shapes, ``target`` or ``reduction`` do not fit, or a mean of no question.
        """
        _check(x, y, reduction)
        labels = self._default_target(x, y) if target is None else target.to(x.device)
        if labels.dtype != torch.int64 or labels.shape != x.shape[:1]:
            raise ValueError(
                f"target must be int64 of shape ({len(x)},), one per question; "
                f"found {labels.dtype} of shape {tuple(labels.shape)}"
            )
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(y):
            raise ValueError(
                f"target must lie in 0..{len(y) - 1}, the rows of y; "
                f"found values from {int(labels.min())} to {int(labels.max())}"
            )
        dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
        losses: Tensor = blockwise_nll(x.to(dtype), y.to(dtype), labels).nll  # (Q,)
        if reduction == "none":
            return losses
        if reduction == "sum":
            return losses.sum()
        if len(losses) == 0:
            raise ValueError("the mean loss needs at least one question, found none")
        return losses.mean()

    def _default_target(self, x: Tensor, y: Tensor) -> Tensor:
        group = self.n_hard_negatives + 1
        if len(x) * group != len(y):
            raise ValueError(
                f"{len(x)} questions with n_hard_negatives={self.n_hard_negatives} need "
                f"{len(x) * group} passages, found {len(y)}: pass target for other layouts"
            )
        return torch.arange(0, len(y), group, device=x.device)


class DistributedContrastiveLoss(SimpleContrastiveLoss):
    """The same over the passages of all processes, for models in DistributedDataParallel.

    Each process scores its own questions against the passages of all, and the mean over processes
    that DistributedDataParallel takes of the parameter gradients is the gradient of the joined
    batch, for any shares (that of the GradCache package is 1/W of it). Without
    DistributedDataParallel take :func:`gc_dpr.losses.in_batch_nll`, whose gradients are added up.
    Every process must call it and run the backward pass. On one process, with or without a process
    group, it is :class:`SimpleContrastiveLoss`.
    """

    def __call__(
        self, x: Tensor, y: Tensor, target: Tensor | None = None, reduction: str = "mean"
    ) -> Tensor:
        """Return the loss of the joined batch, the same value on every process.

        Args:
            x: (Q, D) questions of this process; Q may differ between processes and may be 0.
            y: (P, D) passages of this process.
            target: int64, one for the questions of all processes in rank order: rows of all
                processes' passages in rank order. A positive must belong to its question's process.
                By default as in :class:`SimpleContrastiveLoss`.
            reduction: ``"mean"`` or ``"sum"`` over the questions of all processes; ``"none"`` on
                one process only.

        Raises:
            ValueError: Shapes, ``target`` or ``reduction`` do not fit.
        """
        if world_size() == 1:
            return super().__call__(x, y, target, reduction)
        _check(x, y, reduction)
        if reduction == "none":
            raise ValueError(
                "reduction='none' has no meaning over several processes, each of which sees the "
                "losses of its own questions only: use 'mean' or 'sum'"
            )
        own_target = self._default_target(x, y) if target is None else _own_part(target, x, y)
        result = in_batch_nll(x, y, own_target, gradient_reduction="mean")
        factor = 1 if reduction == "mean" else result.questions
        loss = result.loss * factor
        # The value is that of all processes, the gradient that of this process's share.
        value = sum_over_processes(loss) / world_size()
        return loss - loss.detach() + value


def _own_part(target: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the local passage row of each own question's positive."""
    counts = gather_integers([len(x), len(y)], x.device)
    questions = sum(count[0] for count in counts)
    if target.dtype != torch.int64 or target.shape != (questions,):
        raise ValueError(
            f"target must be int64 of shape ({questions},), one per question of all processes; "
            f"found {target.dtype} of shape {tuple(target.shape)}"
        )
    first_question, first_passage = (sum(c[i] for c in counts[: rank()]) for i in (0, 1))
    return target[first_question : first_question + len(x)] - first_passage


def _check(x: Tensor, y: Tensor, reduction: str) -> None:
    if x.dim() != 2 or y.dim() != 2 or x.shape[1] != y.shape[1]:
        raise ValueError(
            "questions and passages must be (Q, D) and (P, D), "
            f"found {tuple(x.shape)} and {tuple(y.shape)}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', found {reduction!r}")
