"""Small training runs for the tests, and the records that they leave."""

import torch
from tiny_data import BUILDINGS, passage

from gc_dpr.data.collator import Collator, build_loader
from gc_dpr.data.records import Passage, TrainingExample
from gc_dpr.data.sampler import EpochBatchSampler, number_of_batches
from gc_dpr.distributed import rank, world_size
from gc_dpr.models import BiEncoder
from gc_dpr.seeding import derive_seed, seed_everything
from gc_dpr.training.batch_step import ChunkBudget
from gc_dpr.training.optim import build_optimizer, build_schedule
from gc_dpr.training.trainer import Trainer

CPU = torch.device("cpu")


class Records(list):
    """Stands for a StepLogger; may look at the model after every step."""

    def __init__(self, after_step=None):
        super().__init__()
        self.after_step = after_step

    def log(self, record):
        self.append(record)
        if self.after_step is not None:
            self.after_step(record)


def building(number):
    """A passage; numbers beyond the world begin again."""
    passage_id, text, title = passage(number % len(BUILDINGS))
    return Passage(passage_id, title, text)


def example(number, *, positives=None, hard_negatives=None):
    """A question about a building with 0, 1 or 2 hard negatives, unless they are given."""
    hard = [number + 1, number + 2][: number % 3] if hard_negatives is None else hard_negatives
    return TrainingExample(
        id=f"e{number}",
        question=f"when was the {building(number).title} built in the city" + "?" * (number % 4),
        answers=(str(1801 + number),),
        positives=tuple(building(p) for p in (positives or [number])),
        hard_negatives=tuple(building(h) for h in hard),
    )


def examples(count):
    return [example(number) for number in range(count)]


def make_model(folder, *, double=True, dropout=0.0, shared=False):
    """float64 shows that two ways are the same; in float32 AdamW blows rounding up."""
    model = BiEncoder.initialise(
        folder, dropout=dropout, shared=shared, max_question_length=24, max_passage_length=48
    )
    return model.double() if double else model


def make_trainer(
    model, *, total_steps, chunk_rows=2, warmup_steps=0, learning_rate=1e-3, optimizer=None,
    **options,
):  # fmt: skip
    """A trainer whose chunks hold so many texts (``None`` = all in one)."""
    if optimizer is None:
        optimizer = build_optimizer(model, learning_rate=learning_rate, weight_decay=0.1)
    budget = ChunkBudget(10**6, chunk_rows)
    return Trainer(
        model=model,
        optimizer=optimizer,
        scheduler=build_schedule(optimizer, warmup_steps=warmup_steps, total_steps=total_steps),
        device=CPU,
        question_budget=budget,
        passage_budget=budget,
        **options,
    )


def make_batches(model, data, *, batch_size, last_batch="keep", seed=3, hard_negatives=2):
    """This process's loader and its sampler."""
    sampler = EpochBatchSampler(
        len(data), batch_size=batch_size, seed=seed, rank=rank(), world_size=world_size(),
        last_batch=last_batch,
    )  # fmt: skip
    collator = Collator(
        model.question_tokenizer, model.passage_tokenizer, seed=seed, hard_negatives=hard_negatives
    )
    return build_loader(data, collator, sampler), sampler


def train(
    model, data, *, batch_size, epochs=1, last_batch="keep", max_steps=None, after_step=None,
    hard_negatives=2, **options,
):  # fmt: skip
    """Run a trainer over the data; returns it and the records."""
    loader, sampler = make_batches(
        model, data, batch_size=batch_size, last_batch=last_batch, hard_negatives=hard_negatives
    )
    steps = epochs * number_of_batches(len(data), batch_size=batch_size, last_batch=last_batch)
    steps = steps if max_steps is None else min(steps, max_steps)
    trainer = make_trainer(model, total_steps=steps, **options)
    seed_everything(derive_seed(5, "dropout", rank()))
    log = Records(after_step)
    records = trainer.run(loader, sampler, epochs=epochs, total_steps=steps, log=log)
    assert list(log) == records
    return trainer, records


def parameters_of(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def largest_difference(one, other):
    """Between two models' parameters, by name."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)
