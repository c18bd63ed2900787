"""The batches of a training run, for the commands that train and that check training."""

from __future__ import annotations

from gc_dpr.config import TrainConfig
from gc_dpr.data.collator import Collator
from gc_dpr.data.sampler import EpochBatchSampler
from gc_dpr.distributed import rank, world_size
from gc_dpr.models import BiEncoder


def build_sampler(train: TrainConfig, examples: int) -> EpochBatchSampler:
    """The order of the examples, and this process's share of each batch."""
    return EpochBatchSampler(
        examples,
        batch_size=train.batch_size,
        seed=train.seed,
        rank=rank(),
        world_size=world_size(),
        last_batch=train.last_batch,  # type: ignore[arg-type]
    )


def build_collator(train: TrainConfig, model: BiEncoder) -> Collator:
    """Which passages the examples bring, and how they are tokenised."""
    return Collator(
        model.question_tokenizer,
        model.passage_tokenizer,
        seed=train.seed,
        hard_negatives=train.hard_negatives,
        random_negatives=train.random_negatives,
        positive_choice=train.positive_choice,  # type: ignore[arg-type]
        negative_choice=train.negative_choice,  # type: ignore[arg-type]
    )
