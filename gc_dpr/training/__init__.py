"""Training: the loop, one batch through the cache, optimizer and schedule, checkpoints, logs."""

from gc_dpr.training.batch_step import BatchOutcome, ChunkBudget, batch_gradients
from gc_dpr.training.checkpoint import save_checkpoint
from gc_dpr.training.gradient_check.batch_check import BatchCheck, check_gradients
from gc_dpr.training.gradient_check.comparison import (
    GradientCheck,
    GradientError,
    compare_gradients,
)
from gc_dpr.training.gradient_check.inexact_modules import Finding, find_inexact_modules
from gc_dpr.training.loggers import StepLogger
from gc_dpr.training.optim import build_optimizer, build_schedule
from gc_dpr.training.trainer import Trainer, TrainingError

__all__ = [
    "BatchCheck",
    "BatchOutcome",
    "ChunkBudget",
    "Finding",
    "GradientCheck",
    "GradientError",
    "StepLogger",
    "Trainer",
    "TrainingError",
    "batch_gradients",
    "build_optimizer",
    "build_schedule",
    "check_gradients",
    "compare_gradients",
    "find_inexact_modules",
    "save_checkpoint",
]
