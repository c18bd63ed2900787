"""The in-batch negative log-likelihood, and the one place where the gradient scale is settled.

**Gradient scale.** Process r has Q_r of the Q questions and a share of the P passages. It scores
its own questions against the passages of all processes and returns the *share*

    L_r = (sum of the losses of its own questions) / Q          with the global Q,

so that the shares add up to the mean loss over all questions: L = L_1 + ... + L_W. The gather adds
up, for each passage, what all processes' losses say about it. Hence the parameter gradients of the
processes must be **added** (:func:`gc_dpr.distributed.sum_gradients`) to give the gradient of L,
the same for any number of processes and any unequal shares. DistributedDataParallel *averages*
instead: ``gradient_reduction="mean"`` multiplies the share by W to make up for it. There is no
other factor.

Letters: Q questions, P passages, D dims, W world size.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from gc_dpr.distributed import gather_integers, gather_rows_with_gradient, rank, world_size
from gc_dpr.losses.blocks import ExcludedPairs
from gc_dpr.losses.blockwise import blockwise_nll


class InBatchLoss(NamedTuple):
    """The loss of a batch as one process sees it.

    Args:
        loss: Scalar; this process's share (see the module's text), in float32 or float64.
        correct: Scalar int64; own questions whose positive has the highest score.
        questions: Q, over all processes.
        candidates: P, over all processes: what each question chooses from.
        excluded_pairs: Scalar int64; own question-passage pairs that were taken out.
        lone_questions: Scalar int64; own questions left with their positive as the only candidate.
            Their loss is 0, and nothing is learned from them.
    """

    loss: Tensor
    correct: Tensor
    questions: int
    candidates: int
    excluded_pairs: Tensor
    lone_questions: Tensor


def in_batch_nll(
    question_reps: Tensor,
    passage_reps: Tensor,
    positive_index: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    excluded: ExcludedPairs | None = None,
    gradient_reduction: Literal["sum", "mean"] = "sum",
    question_block: int | None = None,
    passage_block: int | None = None,
) -> InBatchLoss:
    """Negative log-likelihood of each question's positive among the passages of all processes.

    For question i with positive p(i): ``-log softmax_j(q_i . p_j / temperature)[p(i)]``, averaged
    over the questions of all processes. Every process must call it, also one without questions or
    passages (then with representations of 0 rows), and run its backward pass. Computed in float32,
    or in float64 where a representation is float64, whatever autocast says, and in blocks: never
    more than one block of scores is held (:mod:`gc_dpr.losses.blockwise`).

    Source: Karpukhin et al. 2020, arXiv 2004.04906, section 3.2.

    Args:
        question_reps: (Q, D) of this process.
        passage_reps: (P, D) of this process: positives and hard negatives in any order.
        positive_index: (Q,) int64; the row of each question's positive in this ``passage_reps``.
        temperature: Divides the scores; 1 leaves dot products as they are. A tensor of one element
            may need a gradient, and gets the gradient of this process's share.
        excluded: (Q, P of all processes) bool, columns in rank order; True takes a passage out of
            a question's candidates, say because it is another positive of that question. Or a
            function of (rows, columns), two slices, that returns that block of it.
        gradient_reduction: How the processes' parameter gradients are combined after the backward
            pass: ``"sum"`` by ``sum_gradients``, ``"mean"`` by DistributedDataParallel.
        question_block: Questions of a block; ``None``: 1024 on a CPU, 2048 elsewhere.
        passage_block: Passages of a block; ``None``: 2048 on a CPU, 8192 elsewhere.

    Returns:
        The share of the loss and its counts. A loss that is not finite is returned as it is.

    Raises:
        ValueError: Shapes, the range of ``positive_index``, the temperature or a block size do not
            fit, a positive is excluded, or there is no question on any process.

    Example:
        >>> reps = 10 * torch.eye(3)
        >>> result = in_batch_nll(reps[:2], reps, torch.tensor([0, 1]))
        >>> int(result.correct), result.questions, result.candidates
        (2, 2, 3)
    """
    fault = _fault_of(question_reps, passage_reps, positive_index, temperature, gradient_reduction)
    own = [0, 0, 1] if fault is not None else [len(question_reps), len(passage_reps), 0]
    shares = gather_integers(own, question_reps.device)
    questions, candidates, faulty = (sum(numbers) for numbers in zip(*shares, strict=True))
    if fault is not None:
        raise fault
    if faulty:  # those processes raise: this one would wait for them forever
        raise ValueError(f"in_batch_nll was given wrong arguments on {faulty} other process(es)")
    if questions == 0:
        raise ValueError("in_batch_nll needs a question on at least one process, found none")
    first_column = sum(share[1] for share in shares[: rank()])
    labels = positive_index.to(question_reps.device) + first_column  # (Q,) global columns

    dtype = torch.promote_types(question_reps.dtype, passage_reps.dtype)
    dtype = dtype if dtype == torch.float64 else torch.float32
    with torch.autocast(question_reps.device.type, enabled=False):
        losses = blockwise_nll(
            _divided(question_reps.to(dtype), temperature),  # (Q, D), a P-th of the scores' size
            gather_rows_with_gradient(passage_reps.to(dtype)),  # (P of all, D)
            labels,
            excluded=excluded,
            question_block=question_block,
            passage_block=passage_block,
        )
        loss = losses.nll.sum() / questions
    if gradient_reduction == "mean":
        loss = loss * world_size()
    return InBatchLoss(
        loss=loss,
        correct=losses.correct.sum(),
        questions=questions,
        candidates=candidates,
        excluded_pairs=losses.excluded.sum(),
        lone_questions=(losses.excluded == candidates - 1).sum(),
    )


def _divided(reps: Tensor, temperature: float | Tensor) -> Tensor:
    if isinstance(temperature, Tensor):
        return reps / temperature.to(reps).reshape(())
    return reps if temperature == 1 else reps / temperature


def _fault_of(*arguments: Any) -> ValueError | None:
    try:
        _check_inputs(*arguments)
    except ValueError as error:
        return error
    return None


def _check_inputs(
    question_reps: Tensor,
    passage_reps: Tensor,
    positive_index: Tensor,
    temperature: float | Tensor,
    gradient_reduction: str,
) -> None:
    for name, reps in (("question_reps", question_reps), ("passage_reps", passage_reps)):
        if reps.dim() != 2:
            raise ValueError(f"{name} must be (N, D), found shape {tuple(reps.shape)}")
    if question_reps.shape[1] != passage_reps.shape[1]:
        raise ValueError(
            "questions and passages must have the same number of dimensions, found "
            f"{question_reps.shape[1]} and {passage_reps.shape[1]}"
        )
    if positive_index.dtype != torch.int64 or positive_index.shape != question_reps.shape[:1]:
        raise ValueError(
            f"positive_index must be int64 of shape ({len(question_reps)},), found "
            f"{positive_index.dtype} of shape {tuple(positive_index.shape)}"
        )
    if len(positive_index):
        lowest, highest = (int(end) for end in torch.aminmax(positive_index))
        if lowest < 0 or highest >= len(passage_reps):
            raise ValueError(
                f"positive_index must lie in 0..{len(passage_reps) - 1}, the rows of this "
                f"process's passage_reps; found values from {lowest} to {highest}"
            )
    _check_temperature(temperature)
    if gradient_reduction not in ("sum", "mean"):
        raise ValueError(
            f"gradient_reduction must be 'sum' or 'mean', found {gradient_reduction!r}"
        )


def _check_temperature(temperature: float | Tensor) -> None:
    if isinstance(temperature, Tensor):
        if temperature.numel() != 1:
            raise ValueError(
                f"temperature must be one number, found shape {tuple(temperature.shape)}"
            )
        temperature = float(temperature.detach())
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be a finite number above 0, found {temperature}")
