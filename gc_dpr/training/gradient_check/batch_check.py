"""Hold the pipeline's cached step to plain autograd, on a batch of one's own.

Two comparisons, since no single one shows everything:

* exact: float64, without dropout, against the batch in one padded piece. Only rounding of 1e-16 is
  in the way, so that even a slight mistake shows.
* as trained: the run's own precision and dropout, against the same chunks with the same random
  numbers, all in one graph. So the second forward must really replay the first.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gc_dpr.data.collator import Batch
from gc_dpr.distributed import world_size
from gc_dpr.losses import in_batch_nll
from gc_dpr.models import BiEncoder
from gc_dpr.training.batch_step import batch_gradients, known_positives
from gc_dpr.training.chunk_budget import ChunkBudget
from gc_dpr.training.gradient_check.comparison import GradientCheck, coarsest, compare_gradients
from gc_dpr.training.gradient_check.inexact_modules import Finding
from gc_dpr.training.gradient_check.module_state import in_dtype, unchanged, without_dropout
from gc_dpr.training.gradient_check.plain_step import dense_nll, dense_scores, encode_in_chunks
from gc_dpr.training.gradient_check.side_check import coarsest_dtype, find_inexact, is_random
from gc_dpr.training.sides import Side

logger = logging.getLogger(__name__)

_FEWEST_CHUNKS = 3
_ROUNDINGS = 8  # so many roundings of the largest score may add up
_LOOSEST = 1e-2
_FP16_SCALE = 1024.0  # small enough not to overflow, so that no search for a scale is needed


@dataclass(frozen=True, slots=True)
class BatchCheck:
    """What the check of a batch has found.

    Attributes:
        exact: In float64 and without dropout, against the batch in one piece.
        as_trained: In the run's own precision and with its dropout, against the same chunks in one
            graph.
        in_one_piece: False if the encoders are random even without dropout: then `exact` too goes
            through the same chunks.
        findings: Modules with which the cache cannot be exact.
        chunks: Tower → chunks it was cut into.
        divided: Towers whose budget was made smaller, since a single chunk would show nothing.
    """

    exact: GradientCheck
    as_trained: GradientCheck
    in_one_piece: bool
    findings: tuple[Finding, ...]
    chunks: Mapping[str, int]
    divided: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether both comparisons agree. A finding alone, such as a counter, need not matter."""
        return self.exact.passed and self.as_trained.passed


def check_gradients(
    model: BiEncoder,
    batch: Batch,
    *,
    question_budget: ChunkBudget,
    passage_budget: ChunkBudget,
    device: torch.device,
    temperature: float = 1.0,
    mask_known_positives: bool = True,
    autocast_dtype: torch.dtype | None = None,
) -> BatchCheck:
    """Compare the cached step with plain autograd, and look for modules that cannot be exact.

    The activations of the whole batch are in memory at once, in float64: take few questions. The
    model runs in training mode; afterwards it is as before, gradients and random generators too.
    The tolerances are those of ``comparison.TOLERANCES``, or more where
    large scores or a loss near 0 blow rounding up.

    Args:
        model: The encoders, on ``device``.
        batch: Of one process.
        question_budget: Chunk size of the question tower; made smaller when it gives one chunk.
        passage_budget: The same of the passage tower.
        device: Where the encoders are.
        temperature: Scores are divided by it.
        mask_known_positives: Leave out pairs whose passage is another positive of the question.
        autocast_dtype: As in training: bfloat16, float16 or ``None``.

    Raises:
        ValueError: Several processes, a batch without a choice, nothing to train.
        GradientError: The gradient of this batch is zero.
    """
    _check_call(batch)
    sides = (
        Side("question", model.question_encoder, batch.questions, device),
        Side("passage", model.passage_encoder, batch.passages, device),
    )
    divided, budgets = _divide(sides, (question_budget, passage_budget))
    ways = _Ways(
        model=model,
        batch=batch,
        sides=sides,
        budgets=budgets,
        device=device,
        temperature=temperature,
        mask_known_positives=mask_known_positives,
        autocast_dtype=autocast_dtype,
    )
    with unchanged(model):
        model.train()
        exact, in_one_piece, findings = ways.compare_exactly()
        as_trained = ways.compare_as_trained()
    return BatchCheck(
        exact=exact,
        as_trained=as_trained,
        in_one_piece=in_one_piece,
        findings=tuple(findings),
        chunks={
            side.name: len(side.chunks(budget))
            for side, budget in zip(sides, ways.budgets, strict=True)
        },
        divided=tuple(divided),
    )


def _check_call(batch: Batch) -> None:
    if world_size() > 1:
        raise ValueError("check_gradients compares within one process: start it without torchrun")
    questions, candidates = len(batch.question_rows), len(batch.passage_rows)
    if questions < 1 or candidates < 2:
        raise ValueError(
            "check_gradients needs a batch with at least one question and two candidates, found "
            f"{questions} and {candidates}"
        )


def _divide(
    sides: tuple[Side, Side], budgets: tuple[ChunkBudget, ChunkBudget]
) -> tuple[list[str], tuple[ChunkBudget, ChunkBudget]]:
    """Budgets that give several chunks, at most half of them kept; and whose were changed."""
    divided, changed = [], []
    for side, budget in zip(sides, budgets, strict=True):
        texts, chunks = len(side.tokens), len(side.chunks(budget))
        if chunks == 1 < texts:
            budget = replace(budget, rows=math.ceil(texts / _FEWEST_CHUNKS))
            divided.append(side.name)
            chunks = len(side.chunks(budget))
        changed.append(replace(budget, kept=min(budget.kept, chunks // 2)))
    return divided, (changed[0], changed[1])


@dataclass(kw_only=True)
class _Ways:
    """The ways to the gradient of one batch, and the two comparisons between them."""

    model: BiEncoder
    batch: Batch
    sides: tuple[Side, Side]
    budgets: tuple[ChunkBudget, ChunkBudget]
    device: torch.device
    temperature: float
    mask_known_positives: bool
    autocast_dtype: torch.dtype | None
    largest_score: float = 1.0

    def compare_exactly(self) -> tuple[GradientCheck, bool, list[Finding]]:
        """As strictly as the encoders allow; and whether in one piece, and what they are like."""
        different = self.sides[:1] if self.model.shared else self.sides
        with self._strictest() as (dtype, autocast_dtype):
            findings = [finding for side in different for finding in find_inexact(side)]
            with without_dropout(self.model):
                in_one_piece = not any(is_random(side) for side in different)
                check = self._compare(
                    cached=lambda: self._cached(autocast_dtype),
                    undivided=lambda: self._dense(autocast_dtype, in_one_piece=in_one_piece),
                    dtype=dtype,
                )
        return check, in_one_piece, findings

    def compare_as_trained(self) -> GradientCheck:
        """In the run's own precision, with its dropout."""
        scaler = None
        if self.autocast_dtype == torch.float16:
            scaler = torch.amp.GradScaler(self.device.type, init_scale=_FP16_SCALE)
        return self._compare(
            cached=lambda: self._cached(self.autocast_dtype, scaler),
            undivided=lambda: self._in_one_graph(scaler),
            dtype=self.autocast_dtype,
        )

    @contextmanager
    def _strictest(self) -> Iterator[tuple[torch.dtype | None, torch.dtype | None]]:
        """Turn the model to float64; yields what it really computes in, and what to autocast to."""
        dtype = self._dtype_within_float64()
        if dtype is None:
            yield self.autocast_dtype, self.autocast_dtype
        else:
            with in_dtype(self.model, torch.float64):
                yield dtype, None

    def _dtype_within_float64(self) -> torch.dtype | None:
        """The coarsest dtype inside the encoders when they are in float64; None if they cannot."""
        try:
            with in_dtype(self.model, torch.float64):
                return coarsest(*map(coarsest_dtype, self.sides))
        # whatever kernels without float64 raise, which the check must not depend on
        except (RuntimeError, TypeError, ValueError) as error:
            logger.warning(
                "the encoders do not run in float64 (%s): the exact comparison is made in the "
                "run's own precision, and sees less",
                str(error).splitlines()[0],
            )
            return None

    def _compare(
        self,
        *,
        cached: Callable[[], Tensor],
        undivided: Callable[[], Tensor],
        dtype: torch.dtype | None,
    ) -> GradientCheck:
        towers = {side.name: side.encoder for side in self.sides}
        check = compare_gradients(towers, cached=cached, undivided=undivided, dtype=dtype)
        # A score of size s carries a rounding of s * eps, and where the loss is nearly 0 the
        # softmax hands it on as a share of almost nothing.
        scores_dtype = torch.float64 if check.dtype == torch.float64 else torch.float32
        condition = max(1.0, self.largest_score) / min(1.0, abs(check.undivided_loss) or 1.0)
        rounding = min(_LOOSEST, _ROUNDINGS * torch.finfo(scores_dtype).eps * condition)
        return replace(check, tolerance=max(check.tolerance, rounding))

    def _cached(
        self, autocast_dtype: torch.dtype | None, scaler: torch.amp.GradScaler | None = None
    ) -> Tensor:
        """The step that training takes."""
        outcome = batch_gradients(
            self.model,
            self.batch,
            question_budget=self.budgets[0],
            passage_budget=self.budgets[1],
            device=self.device,
            temperature=self.temperature,
            mask_known_positives=self.mask_known_positives,
            autocast_dtype=autocast_dtype,
            scaler=scaler,
        )
        self.budgets = outcome.question_budget, outcome.passage_budget
        return outcome.loss

    def _dense(self, autocast_dtype: torch.dtype | None, *, in_one_piece: bool) -> Tensor:
        """Plain autograd from the texts to a loss that holds all scores."""
        questions, passages = self._encoded(autocast_dtype, in_one_piece=in_one_piece)
        scores = dense_scores(questions, passages, self.batch, temperature=self.temperature)
        self.largest_score = float(scores.detach().abs().max())
        return dense_nll(scores, self.batch, mask_known_positives=self.mask_known_positives)

    def _in_one_graph(self, scaler: torch.amp.GradScaler | None) -> Tensor:
        """Plain autograd through the same chunks to the loss of training."""
        questions, passages = self._encoded(self.autocast_dtype, in_one_piece=False)
        excluded = known_positives(self.batch, self.device) if self.mask_known_positives else None
        loss = in_batch_nll(
            questions[self.batch.question_rows.to(self.device)],
            passages[self.batch.passage_rows.to(self.device)],
            self.batch.positive_index,
            temperature=self.temperature,
            excluded=excluded,
        ).loss
        torch.autograd.backward(loss if scaler is None else scaler.scale(loss))
        return loss

    def _encoded(self, autocast_dtype: torch.dtype | None, *, in_one_piece: bool) -> list[Tensor]:
        """Representations (N, D) of the distinct texts of both sides."""

        def autocast() -> AbstractContextManager[Any]:
            if autocast_dtype is None:
                return nullcontext()
            return torch.autocast(self.device.type, dtype=autocast_dtype)

        chunks = [
            [torch.arange(len(side.tokens))] if in_one_piece else side.chunks(budget)
            for side, budget in zip(self.sides, self.budgets, strict=True)
        ]
        pairs = zip(self.sides, chunks, strict=True)
        return [encode_in_chunks(side, own, autocast) for side, own in pairs]
