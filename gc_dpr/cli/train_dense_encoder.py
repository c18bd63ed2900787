"""gc-dpr train_dense_encoder: files and a start model → checkpoint, log, curve."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch

from gc_dpr.artifacts import atomic_file, write_json
from gc_dpr.cli.batches import build_collator, build_sampler
from gc_dpr.cli.console import say, say_read, say_read_all, say_wrote
from gc_dpr.cli.models import apply_threads, describe
from gc_dpr.cli.output import claim_output
from gc_dpr.cli.settings import as_yaml
from gc_dpr.config import HardwareConfig, TrainConfig, TrainDenseEncoderConfig
from gc_dpr.data import TrainingSet, load_training_set
from gc_dpr.data.collator import build_loader
from gc_dpr.data.sampler import number_of_batches
from gc_dpr.distributed import barrier, is_main, process_group, rank, world_size
from gc_dpr.errors import DataError
from gc_dpr.evaluation.plots import plot_training_curve
from gc_dpr.models import BiEncoder
from gc_dpr.precision import autocast
from gc_dpr.seeding import derive_seed, seed_everything
from gc_dpr.training.checkpoint import save_checkpoint
from gc_dpr.training.chunk_budget import ChunkBudget
from gc_dpr.training.loggers import StepLogger
from gc_dpr.training.memory import AUTO_KEPT, AUTO_TOKENS, KeptGraphs, find_chunk_tokens, memory_of
from gc_dpr.training.optim import build_optimizer, build_schedule
from gc_dpr.training.trainer import Trainer

logger = logging.getLogger(__name__)

FILES = ("checkpoint", "config.yaml", "metrics.json", "training_log.jsonl", "training_loss.png")


def run(settings: TrainDenseEncoderConfig) -> None:
    """Train and save; the parts are made in the order of the flow."""
    with process_group(settings.hardware.device) as device:
        apply_threads(settings.hardware)
        start = settings.model
        inputs = [start.name_or_path, start.passage_name_or_path, settings.data.train_file]
        folder = claim_output(settings, owned=FILES, inputs=inputs, device=device)
        training_set = load_training_set(
            settings.data.train_file,
            on_missing_positives=settings.data.on_missing_positives,  # type: ignore[arg-type]
        )
        say_read_all(training_set.paths, f"{training_set.read} questions")

        seed_everything(derive_seed(settings.train.seed, "parameters"))
        model = start_model(settings).to(device)
        say_read(str(start.name_or_path), describe(model))
        total_steps = count_steps(settings.train, len(training_set))
        tell_plan(settings, training_set, model, total_steps, device)
        trainer = build_trainer(settings, model, total_steps, device) if total_steps else None

        output = folder.clear()
        started = time.monotonic()
        records = train(settings, trainer, training_set, total_steps, output) if trainer else []
        seconds = time.monotonic() - started
        if is_main():
            write_results(settings, model, records, seconds, output)
        barrier()


def start_model(settings: TrainDenseEncoderConfig) -> BiEncoder:
    """The encoders before training."""
    model = settings.model
    return BiEncoder.initialise(
        str(model.name_or_path),
        passage_name_or_path=model.passage_name_or_path,
        shared=model.shared,
        title_format=model.title_format,
        max_question_length=model.max_question_length,
        max_passage_length=model.max_passage_length,
        expected_sha256=model.expected_sha256,
        pooling=model.pooling,
        normalize=model.normalize,
        dropout=model.dropout,
        num_layers=model.num_layers,
    )


def count_steps(train: TrainConfig, examples: int) -> int:
    """Optimizer steps of the whole run."""
    if train.epochs == 0:
        return 0
    per_epoch = number_of_batches(
        examples,
        batch_size=train.batch_size,
        last_batch=train.last_batch,  # type: ignore[arg-type]
    )
    steps = per_epoch * train.epochs
    return steps if train.max_steps is None else min(steps, train.max_steps)


def tell_plan(
    settings: TrainDenseEncoderConfig,
    data: TrainingSet,
    model: BiEncoder,
    total_steps: int,
    device: torch.device,
) -> None:
    """Say what will happen, so that a slip shows before hours of work.

    Raises:
        DataError: No question has anything to choose from (TRAPS: B25).
    """
    train, available = settings.train, data.hard_negatives_available
    candidates = min(train.batch_size, len(data)) * (
        1 + min(train.hard_negatives, available.max)
        + min(train.random_negatives, data.random_negatives_available.max)
    )  # fmt: skip
    say(
        f"plan   {total_steps} steps of {train.batch_size} questions, {train.epochs} epochs of "
        f"{len(data)} questions, up to {candidates} candidates per question; hard negatives per "
        f"question: {available.min}/{available.median:g}/{available.max} available "
        f"(min/median/max), {train.hard_negatives} asked for; "
        f"{world_size()} process(es) on {device.type}, {settings.hardware.precision}"
    )
    if candidates < 2 and total_steps:
        raise DataError(
            f"a batch of {min(train.batch_size, len(data))} question without negatives has one "
            "candidate: the loss is 0 and nothing is learned; use a larger train.batch_size, more "
            "questions, or training data with hard_negative_ctxs"
        )
    if model.question_encoder.normalize and train.temperature > 0.5:
        logger.warning(
            "representations have length 1 and train.temperature=%g: scores lie between -%g and "
            "%g, which hardly tells candidates apart; 0.05 is usual",
            train.temperature, 1 / train.temperature, 1 / train.temperature,
        )  # fmt: skip
    dropped = len(data) % train.batch_size
    if train.last_batch == "drop" and dropped and total_steps:
        logger.info("train.last_batch=drop: %d questions of each epoch are left out", dropped)


def train(
    settings: TrainDenseEncoderConfig,
    trainer: Trainer,
    data: TrainingSet,
    total_steps: int,
    output: Path,
) -> list[dict[str, Any]]:
    """Load this process's batches and run the loop; one record per step."""
    options, model = settings.train, trainer.model
    sampler = build_sampler(options, len(data))
    collator = build_collator(options, model)
    workers = settings.hardware.loader_workers
    loader = build_loader(data.examples, collator, sampler, workers=workers)
    # dropout must differ between processes, and must not depend on how the model was made
    seed_everything(derive_seed(options.seed, "dropout", rank()))
    log_path = output / "training_log.jsonl" if is_main() else None
    with StepLogger(log_path, total_steps=total_steps) as log:
        return trainer.run(loader, sampler, epochs=options.epochs, total_steps=total_steps, log=log)


def build_trainer(
    settings: TrainDenseEncoderConfig, model: BiEncoder, total_steps: int, device: torch.device
) -> Trainer:
    """Optimizer, schedule and chunk budgets around the model."""
    options, hardware = settings.train, settings.hardware
    memory = memory_of(device)
    optimizer = build_optimizer(
        model,
        learning_rate=options.learning_rate,
        weight_decay=options.weight_decay,
        epsilon=options.adam_epsilon,
    )
    return Trainer(
        model=model,
        optimizer=optimizer,
        scheduler=build_schedule(
            optimizer, warmup_steps=options.warmup_steps, total_steps=total_steps
        ),
        device=device,
        question_budget=chunk_budget("question", settings.hardware, model, device),
        passage_budget=chunk_budget("passage", settings.hardware, model, device),
        kept_graphs=KeptGraphs(memory) if memory and hardware.kept_chunks == "auto" else None,
        precision=hardware.precision,
        temperature=options.temperature,
        mask_known_positives=options.mask_known_positives,
        max_grad_norm=options.max_grad_norm,
    )


def chunk_budget(
    side: str, hardware: HardwareConfig, model: BiEncoder, device: torch.device
) -> ChunkBudget:
    """The chunk budget of one tower; on CUDA ``auto`` is measured here."""
    tokens = getattr(hardware, f"{side}_chunk_tokens")
    memory = memory_of(device)
    if tokens == "auto" and memory:
        trainable = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        tokens = find_chunk_tokens(
            getattr(model, f"{side}_encoder"),
            length=getattr(model, f"max_{side}_length"),
            device=device,
            memory=memory,
            reserve=3 * trainable,  # gradients and AdamW's two moments
            autocast=lambda: autocast(device, hardware.precision),
        )
        logger.info("hardware.%s_chunk_tokens=auto: %d tokens fit", side, tokens)
    elif tokens == "auto":
        tokens = AUTO_TOKENS
    kept = hardware.kept_chunks
    if kept == "auto":
        kept = 0 if memory else AUTO_KEPT
    return ChunkBudget(int(tokens), getattr(hardware, f"{side}_chunk_rows"), int(kept))


def tell_counts(records: list[dict[str, Any]], model: BiEncoder) -> dict[str, int]:
    """Say what was cut or left out in all epochs together; the same numbers for metrics.json."""
    names = (
        "truncated_questions", "truncated_passages", "fewer_negatives", "passed_over_negatives",
        "masked_negatives", "lone_questions",
    )  # fmt: skip
    counts = {name: sum(record[name] for record in records) for name in names}
    for name, text in (
        ("truncated_questions", f"questions were cut to {model.max_question_length} tokens"),
        ("truncated_passages", f"passages were cut to {model.max_passage_length} tokens"),
        ("fewer_negatives", "questions had fewer negatives than asked for"),
        ("lone_questions", "questions had no candidate but their positive and taught nothing"),
    ):
        if counts[name]:
            say(f"note   {counts[name]} {text} (all epochs together)")
    return counts


def write_results(
    settings: TrainDenseEncoderConfig,
    model: BiEncoder,
    records: list[dict[str, Any]],
    seconds: float,
    output: Path,
) -> None:
    """Checkpoint and curve first, metrics.json last: it says that all is there."""
    fingerprint = model.fingerprint()
    state = {
        "steps": len(records),
        "epochs": records[-1]["epoch"] if records else 0,
        "seed": settings.train.seed,
        "model_fingerprint": fingerprint,
    }
    yaml = as_yaml(settings)
    say_wrote(
        save_checkpoint(output / "checkpoint", model, settings_yaml=yaml, trainer_state=state)
    )
    with atomic_file(output / "config.yaml") as handle:
        handle.write(yaml)
    if records:
        say_wrote(
            plot_training_curve(
                [record["step"] for record in records],
                [record["loss"] for record in records],
                output / "training_loss.png",
                accuracy=[record["in_batch_accuracy"] for record in records],
                learning_rate=[record["learning_rate"] for record in records],
                subtitle=f"{settings.train.batch_size} questions per step, "
                f"{records[-1]['candidates']} candidates per question",
            )
        )
        say_wrote(output / "training_log.jsonl", f"{len(records)} steps")
    metrics: dict[str, Any] = {**state, "training_seconds": seconds}
    if records:
        metrics |= tell_counts(records, model)
        last = records[-1]
        metrics |= {
            "final_loss": last["loss"],
            "final_in_batch_accuracy": last["in_batch_accuracy"],
            "final_in_batch_candidates": last["candidates"],
            "questions_per_second": sum(r["questions"] for r in records) / max(seconds, 1e-9),
        }
    say_wrote(write_json(output / "metrics.json", metrics))
