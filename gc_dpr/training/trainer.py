"""The training loop: batches in, optimizer steps, one record per step out."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler

from gc_dpr.data.collator import Batch
from gc_dpr.distributed import (
    broadcast_parameters,
    clip_gradients,
    sum_gradients,
    sum_over_processes,
    world_size,
)
from gc_dpr.errors import GcDprError
from gc_dpr.models import BiEncoder
from gc_dpr.precision import autocast_dtype
from gc_dpr.training.batch_outcome import BatchOutcome
from gc_dpr.training.batch_step import batch_gradients
from gc_dpr.training.chunk_budget import ChunkBudget
from gc_dpr.training.loggers import StepLogger
from gc_dpr.training.memory import KeptGraphs

logger = logging.getLogger(__name__)


# What the processes add up: these come into each record under the same names.
_COUNTS = (
    "masked_negatives", "truncated_questions", "truncated_passages", "fewer_negatives",
    "passed_over_negatives", "lone_questions", "tokens", "chunks", "replayed_chunks",
)  # fmt: skip


class TrainingError(GcDprError):
    """The run cannot go on; the message says at which step and why."""


class Epochs(Protocol):
    """Chooses the order and the passages of an epoch."""

    def set_epoch(self, epoch: int) -> None:
        """The next iteration over the loader gives this epoch's batches."""


@dataclass(kw_only=True)
class Trainer:
    """Trains a bi-encoder on batches that are larger than the memory.

    Attributes:
        model: The encoders; already on ``device``.
        optimizer: Over the model's trainable parameters.
        scheduler: Advanced once per optimizer step that was really taken.
        device: Where the model is.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"`` (with a gradient scaler).
        question_budget: Chunk of the question tower; shrinks when it does not fit into memory.
        passage_budget: Chunk of the passage tower; the same.
        kept_graphs: Decides from the free memory which chunks are not encoded twice; ``None`` =
            those that the budgets keep.
        temperature: Scores are divided by it.
        mask_known_positives: Known positives of a question are never its negatives.
        max_grad_norm: The true (unscaled, whole-batch) gradient is clipped to it.
    """

    model: BiEncoder
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    device: torch.device
    question_budget: ChunkBudget
    passage_budget: ChunkBudget
    kept_graphs: KeptGraphs | None = None
    precision: str = "fp32"
    temperature: float = 1.0
    mask_known_positives: bool = True
    max_grad_norm: float | None = 2.0
    scaler: torch.amp.GradScaler = field(init=False)
    skipped_steps: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]

    def run(
        self,
        loader: Iterable[Batch],
        sampler: Epochs,
        *,
        epochs: int,
        total_steps: int,
        log: StepLogger,
    ) -> list[dict[str, Any]]:
        """Train, and return one record per step.

        Args:
            loader: This process's share of each batch.
            sampler: What the loader takes its order from.
            epochs: Passes over the training set.
            total_steps: Stop after so many steps, even in the middle of an epoch.
            log: Takes each record as it is made.

        Raises:
            TrainingError: The loss or the gradient is not a finite number; no parameter has
                changed in that step.
        """
        broadcast_parameters(self.model)
        self.model.train()
        records: list[dict[str, Any]] = []
        batches = self._batches(loader, sampler, epochs)
        for epoch, batch in itertools.islice(batches, total_steps):
            records.append(self._step(batch, step=len(records) + 1, epoch=epoch + 1))
            log.log(records[-1])
        self.model.eval()
        if self.skipped_steps:
            logger.warning(
                "%d of %d optimizer steps were skipped by the fp16 gradient scaler",
                self.skipped_steps, len(records),
            )  # fmt: skip
        return records

    def _batches(
        self, loader: Iterable[Batch], sampler: Epochs, epochs: int
    ) -> Iterator[tuple[int, Batch]]:
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for batch in loader:
                yield epoch, batch

    def _step(self, batch: Batch, *, step: int, epoch: int) -> dict[str, Any]:
        started = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        outcome = self._gradients(batch)
        totals = _over_processes(outcome, self.device)
        if not math.isfinite(totals["loss"]):
            raise _not_finite("loss", totals["loss"], step, batch)
        sum_gradients(self.parameters)
        learning_rate = self.scheduler.get_last_lr()[0]
        grad_norm = self._clip()
        # the scaler expects such gradients, now and then, and skips the step
        if not (math.isfinite(grad_norm) or self.scaler.is_enabled()):
            raise _not_finite("gradient norm", grad_norm, step, batch)
        self._update()
        seconds = time.perf_counter() - started
        return {
            "step": step,
            "epoch": epoch,
            "loss": totals["loss"],
            "in_batch_accuracy": totals["correct"] / totals["questions"],
            "candidates": outcome.candidates,
            "questions": int(totals["questions"]),
            # JSON has no infinity: null marks a step that the scaler skipped
            "grad_norm": grad_norm if math.isfinite(grad_norm) else None,
            "learning_rate": learning_rate,
            **{name: int(totals[name]) for name in _COUNTS},
            "padding_share": 1 - totals["tokens"] / totals["padded_tokens"],
            "seconds": seconds,
            "questions_per_second": totals["questions"] / seconds,
        }

    def _gradients(self, batch: Batch) -> BatchOutcome:
        """Add up this process's gradients, and remember what fitted into memory."""
        allowed = 0 if self.kept_graphs is None else self.kept_graphs.before_step()
        outcome = batch_gradients(
            self.model,
            batch,
            question_budget=self.question_budget,
            passage_budget=self.passage_budget,
            device=self.device,
            temperature=self.temperature,
            mask_known_positives=self.mask_known_positives,
            autocast_dtype=autocast_dtype(self.precision),
            scaler=self.scaler if self.scaler.is_enabled() else None,
            kept_tokens=allowed,
        )
        if self.kept_graphs is not None:
            self.kept_graphs.after_step(
                largest_chunk=outcome.largest_chunk,
                allowed=allowed,
                allowed_at_last=outcome.kept_tokens,
            )
        self.question_budget, self.passage_budget = outcome.question_budget, outcome.passage_budget
        return outcome

    def _clip(self) -> float:
        """Clip the summed gradients, unscaled; returns their norm before that."""
        self.scaler.unscale_(self.optimizer)
        limit = math.inf if self.max_grad_norm is None else self.max_grad_norm
        return clip_gradients(self.parameters, limit)

    def _update(self) -> None:
        """Take the optimizer step, unless the scaler skips it."""
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # a scale that shrank means that the step was skipped: then the schedule must not advance
        if self.scaler.is_enabled() and self.scaler.get_scale() < scale:
            self.skipped_steps += 1
        else:
            self.scheduler.step()


def _not_finite(what: str, value: float, step: int, batch: Batch) -> TrainingError:
    shown = ", ".join(batch.example_ids[:8]) + (", …" if len(batch.example_ids) > 8 else "")
    return TrainingError(
        f"the {what} of step {step} is {value}; no parameter was changed by it. Questions of this "
        f"process: {shown or 'none'}. Lower train.learning_rate, or use hardware.precision=fp32"
    )


def _over_processes(outcome: BatchOutcome, device: torch.device) -> dict[str, float]:
    """Add up what the processes measured: one small reduction."""
    names = ("correct", "questions", "padded_tokens", *_COUNTS)
    values = [float(outcome.loss), *(float(getattr(outcome, name)) for name in names)]
    if world_size() > 1:
        # float64 is exact for counts; MPS, which lacks it, never runs several processes
        summed = sum_over_processes(torch.tensor(values, dtype=torch.float64, device=device))
        values = summed.tolist()
    return dict(zip(("loss", *names), values, strict=True))
