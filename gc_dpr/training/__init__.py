"""Training: the loop, one batch through the cache, optimizer and schedule, checkpoints, logs."""

from gc_dpr.training.batch_step import BatchOutcome, ChunkBudget, batch_gradients
from gc_dpr.training.checkpoint import save_checkpoint
from gc_dpr.training.loggers import StepLogger
from gc_dpr.training.optim import build_optimizer, build_schedule
from gc_dpr.training.trainer import Trainer, TrainingError

__all__ = [
    "BatchOutcome",
    "ChunkBudget",
    "StepLogger",
    "Trainer",
    "TrainingError",
    "batch_gradients",
    "build_optimizer",
    "build_schedule",
    "save_checkpoint",
]
