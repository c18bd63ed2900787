"""The negative log-likelihood of every question, without the matrix of all scores.

The scores of a block of questions and a block of passages are computed, used and overwritten. The
forward pass streams over the blocks of passages with a running maximum (Milakov and Gimelshein
2018, arXiv 1805.02867) and keeps two numbers a question: the highest score, and the sum of the
exponentials relative to it. From these the backward pass recomputes each block and adds what it
says to both gradients. So the memory is that of a block, whatever Q and P, for one matrix product
more than with the whole matrix; where everything fits one block, it is kept and there is none.

Letters: Q questions, P passages, D dims; q and p those of a block.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gc_dpr.losses.blocks import Blocks, ExcludedPairs


class QuestionLosses(NamedTuple):
    """What became of each question.

    Args:
        nll: (Q,) negative log-likelihood of the label column.
        correct: (Q,) bool; the label's score is the highest, and the first of the highest. False
            where a score is not a number.
        excluded: (Q,) int64, how many passages were taken out of the question's candidates.
    """

    nll: Tensor
    correct: Tensor
    excluded: Tensor


def blockwise_nll(
    questions: Tensor,
    passages: Tensor,
    labels: Tensor,
    *,
    excluded: ExcludedPairs | None = None,
    question_block: int | None = None,
    passage_block: int | None = None,
) -> QuestionLosses:
    """Return ``-log softmax_j(q_i . p_j)[label_i]`` of every question, in blocks on both axes.

    Scores of any finite size do not overflow. Autocast is off in both passes. The gradient goes to
    whichever of ``questions`` and ``passages`` needs one; ``create_graph`` is an error. For a
    temperature divide the questions by it first.

    Args:
        questions: (Q, D), float32 or float64.
        passages: (P, D), of the same dtype and device.
        labels: (Q,) int64 within 0..P-1, the column of each question's positive.
        excluded: Pairs that do not count: a (Q, P) bool tensor, or a function of (rows, columns),
            two slices with start and stop, that returns the (q, p) bool block. It is called for
            every block in the forward and in the backward pass and must return the same in both.
        question_block: Questions of a block; ``None``: 1024 on a CPU, 2048 elsewhere.
        passage_block: Passages of a block; ``None``: 2048 on a CPU, 8192 elsewhere.

    Returns:
        The losses, not reduced. One that is not finite is returned as it is.

    Raises:
        ValueError: A block size below 1, dtypes that differ or are of half precision, labels that
            are no columns, or ``excluded`` is not bool, has another shape or takes out a label.

    Example:
        >>> passages = torch.eye(3) * 1e4
        >>> result = blockwise_nll(passages[:2], passages, torch.tensor([0, 2]), passage_block=1)
        >>> result.nll.tolist(), result.correct.tolist()
        ([0.0, 100000000.0], [True, False])
    """
    if questions.dtype != passages.dtype:
        raise ValueError(
            "questions and passages must have the same dtype, found "
            f"{questions.dtype} and {passages.dtype}"
        )
    if questions.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"expected float32 or float64, found {questions.dtype}: sums over many passages need it"
        )
    _check_labels(labels, questions=len(questions), passages=len(passages))
    blocks = Blocks.cut(
        questions,
        passages,
        question_block=question_block,
        passage_block=passage_block,
        excluded=excluded,
    )
    nll, correct, counts = _BlockwiseNLL.apply(  # type: ignore[no-untyped-call]
        questions, passages, labels, blocks
    )
    return QuestionLosses(nll, correct, counts)


def _check_labels(labels: Tensor, *, questions: int, passages: int) -> None:
    if labels.dtype != torch.int64 or labels.shape != (questions,):
        raise ValueError(
            f"labels must be int64 of shape ({questions},), found {labels.dtype} of shape "
            f"{tuple(labels.shape)}"
        )
    if questions:
        lowest, highest = (int(end) for end in torch.aminmax(labels))
        if lowest < 0 or highest >= passages:
            raise ValueError(
                f"labels must be columns, 0..{passages - 1}; found {lowest} to {highest}"
            )


class _BlockwiseNLL(torch.autograd.Function):
    """Streamed log-sum-exp forward, recomputed blocks backward."""

    @staticmethod
    def forward(
        ctx: Any, questions: Tensor, passages: Tensor, labels: Tensor, blocks: Blocks
    ) -> tuple[Tensor, Tensor, Tensor]:
        state, kept = _Running.start(labels, like=questions), None
        buffer = blocks.new_buffer(questions)
        with torch.autocast(questions.device.type, enabled=False):
            for rows in blocks.rows():
                part = state.of(rows)
                for columns in blocks.columns():
                    scores = _scores(questions[rows], passages[columns], buffer)  # (q, p)
                    excluded = blocks.excluded_block(rows, columns, scores.device)
                    part.add(scores, columns, excluded)
                    if blocks.single and any(ctx.needs_input_grad):
                        kept = _subtract_label(scores, labels, state.total, columns)
        _check_label_excluded(state.label_excluded)
        ctx.save_for_backward(questions, passages, labels, state.top, state.total, kept)
        ctx.blocks = blocks
        correct = state.correct()
        ctx.mark_non_differentiable(correct, state.excluded)
        return state.nll(), correct, state.excluded

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        if torch.is_grad_enabled():
            # once_differentiable would let a gradient penalty pass without this loss's part in it.
            raise RuntimeError(
                "the loss in blocks cannot be differentiated twice: call backward without "
                "create_graph"
            )
        questions, passages, labels, top, total, kept = ctx.saved_tensors
        blocks: Blocks = ctx.blocks
        # The first block writes (beta 0), the others add; where there is no block, zeros stay.
        new = torch.empty_like if blocks.questions and blocks.passages else torch.zeros_like
        of_questions = new(questions) if ctx.needs_input_grad[0] else None  # (Q, D)
        of_passages = new(passages) if ctx.needs_input_grad[1] else None  # (P, D)
        # d nll / d score = (exp(score - top) - total * [label]) / total: what is one number a row
        # is multiplied to the (q, D) factors, which are smaller than the block.
        factor = (gradient / total).unsqueeze(1)  # (Q, 1)
        buffer = None if kept is not None else blocks.new_buffer(questions)
        with torch.autocast(questions.device.type, enabled=False):
            for rows in blocks.rows():
                scaled = questions[rows] * factor[rows]  # (q, D)
                for columns in blocks.columns():
                    weights = kept
                    if buffer is not None:
                        weights = _scores(questions[rows], passages[columns], buffer)  # (q, p)
                        _hide(weights, blocks.excluded_block(rows, columns, weights.device))
                        _exp_relative_to(top[rows], weights)
                        _subtract_label(weights, labels[rows], total[rows], columns)
                    if of_questions is not None:
                        of_questions[rows].addmm_(
                            weights, passages[columns], beta=columns.start > 0
                        )
                    if of_passages is not None:
                        of_passages[columns].addmm_(weights.T, scaled, beta=rows.start > 0)
        if of_questions is not None:
            of_questions.mul_(factor)
        return of_questions, of_passages, None, None


class _Running(NamedTuple):
    """What is known of the questions after some of the columns; (Q,) each, changed in place."""

    labels: Tensor
    top: Tensor  # the highest score
    total: Tensor  # the sum of exp(score - top)
    label_score: Tensor
    before: Tensor  # the highest score of the blocks left of the label's
    first: Tensor  # bool, the label is the first of the highest in its own block
    excluded: Tensor  # int64
    label_excluded: Tensor  # bool

    @classmethod
    def start(cls, labels: Tensor, *, like: Tensor) -> _Running:
        count = len(labels)
        return cls(
            labels=labels,
            top=like.new_full((count,), -math.inf),
            total=like.new_zeros(count),
            label_score=like.new_zeros(count),
            before=like.new_full((count,), -math.inf),
            first=torch.zeros_like(labels, dtype=torch.bool),
            excluded=torch.zeros_like(labels),
            label_excluded=torch.zeros_like(labels, dtype=torch.bool),
        )

    def of(self, rows: slice) -> _Running:
        """Return views of some of the questions."""
        return _Running(*(numbers[rows] for numbers in self))

    def add(self, scores: Tensor, columns: slice, excluded: Tensor | None) -> None:
        """Take in more columns. ``scores`` (q, p) becomes exp(score - top)."""
        if excluded is not None:
            _hide(scores, excluded)
            # torch copies the block to the dtype of the sum: int32 is half of int64
            self.excluded.add_(excluded.sum(dim=1, dtype=torch.int32))
        highest = scores.amax(dim=1)  # (q,)
        self._add_labels(scores, columns, highest, excluded)
        top = torch.maximum(self.top, highest)
        # Where all columns so far are excluded top is -inf, and -inf minus -inf is no number.
        shift = top.masked_fill(top == -math.inf, 0.0)
        self.total.mul_((self.top - shift).exp_())  # what came before, relative to the new top
        self.total.add_(_exp_relative_to(shift, scores).sum(dim=1))
        self.top.copy_(top)

    def _add_labels(
        self, scores: Tensor, columns: slice, highest: Tensor, excluded: Tensor | None
    ) -> None:
        """Note the labels' scores, and what tells whether they are the first of the highest."""
        left = self.labels >= columns.stop  # (q,) this block is left of the label's
        self.before.copy_(torch.where(left, torch.maximum(self.before, highest), self.before))
        own = (~left & (self.labels >= columns.start)).nonzero().squeeze(1)  # rows with label here
        places = self.labels[own] - columns.start
        self.label_score[own] = scores[own, places]
        # An argmax takes ten times as long as a maximum, so only the label's own block has one.
        candidates = scores if len(own) == len(scores) else scores[own]
        self.first[own] = candidates.argmax(dim=1) == places
        if excluded is not None:
            self.label_excluded[own] = excluded[own, places]

    def nll(self) -> Tensor:
        # The label's score comes from the same block as the maximum: equal, they cancel exactly.
        return (self.top - self.label_score) + self.total.log()

    def correct(self) -> Tensor:
        return (self.label_score == self.top) & (self.before < self.top) & self.first


def _scores(questions: Tensor, passages: Tensor, buffer: Tensor) -> Tensor:
    """(q, p) dot products, written into the buffer."""
    shape = (len(questions), len(passages))
    return torch.mm(questions, passages.T, out=buffer[: math.prod(shape)].view(shape))


def _hide(scores: Tensor, excluded: Tensor | None) -> None:
    if excluded is not None:  # where() takes half as long as masked_fill_()
        torch.where(excluded, scores.new_tensor(-math.inf), scores, out=scores)


def _exp_relative_to(shift: Tensor, scores: Tensor) -> Tensor:
    """exp(scores - shift) in place of the scores (q, p); ``shift`` is (q,)."""
    # torch's exp on a CPU takes 20 to 50 times as long for each result that underflows, which
    # with unnormalised dot products most do; exp2 does not, and is faster for the others too.
    return scores.sub_(shift.unsqueeze(1)).mul_(math.log2(math.e)).exp2_()


def _subtract_label(weights: Tensor, labels: Tensor, total: Tensor, columns: slice) -> Tensor:
    """Take ``total`` (q,) off ``weights`` (q, p) where the label is among the columns."""
    own = ((labels >= columns.start) & (labels < columns.stop)).nonzero().squeeze(1)
    weights[own, labels[own] - columns.start] -= total[own]
    return weights


def _check_label_excluded(label_excluded: Tensor) -> None:
    if bool(label_excluded.any()):
        rows = label_excluded.nonzero().squeeze(1).tolist()
        raise ValueError(
            f"excluded takes out the positive itself of questions {rows[:10]}: "
            "a label column can never be excluded"
        )
