"""gc-dpr check_gradients: a training run's settings → are its cached gradients the true ones?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from gc_dpr.artifacts import write_json
from gc_dpr.cli.batches import build_collator, build_sampler
from gc_dpr.cli.console import say, say_read, say_read_all, say_wrote
from gc_dpr.cli.models import apply_threads, describe
from gc_dpr.cli.output import claim_output
from gc_dpr.cli.train_dense_encoder import start_model
from gc_dpr.config import CheckGradientsConfig
from gc_dpr.data import TrainingSet, load_training_set
from gc_dpr.data.collator import Batch
from gc_dpr.distributed import process_group
from gc_dpr.errors import ConfigError, DataError
from gc_dpr.evaluation.tables import format_table
from gc_dpr.models import BiEncoder
from gc_dpr.precision import autocast_dtype
from gc_dpr.seeding import derive_seed, seed_everything
from gc_dpr.training.chunk_budget import ChunkBudget, is_out_of_memory
from gc_dpr.training.gradient_check.batch_check import BatchCheck, check_gradients
from gc_dpr.training.gradient_check.comparison import GradientCheck, GradientError
from gc_dpr.training.memory import AUTO_KEPT, AUTO_TOKENS

FILES = ("metrics.json",)


def run(settings: CheckGradientsConfig) -> None:
    """Load what training would start from, compare, and fail if the gradients differ."""
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
        batch = first_batch(settings, training_set, model)
        output = folder.clear()
        seed_everything(derive_seed(settings.train.seed, "dropout", 0))
        check = compare(settings, model, batch, device)
        tell(settings, batch, check)
        say_wrote(write_json(output / "metrics.json", metrics_of(batch, check)))
    if not check.passed:
        raise GradientError(failure(check, output))


def first_batch(settings: CheckGradientsConfig, data: TrainingSet, model: BiEncoder) -> Batch:
    """The first questions of the first batch that training would see.

    Raises:
        DataError: They have nothing to choose from.
    """
    sampler = build_sampler(settings.train, len(data))
    collator = build_collator(settings.train, model)
    keys = next(iter(sampler))[: settings.questions]
    batch = collator([(epoch, data.examples[position]) for epoch, position in keys])
    if len(batch.passage_rows) < 2:
        raise DataError(
            "the batch has one question without negatives: the loss is 0 and there is no gradient "
            "to compare; use more questions, or training data with hard_negative_ctxs"
        )
    return batch


def compare(
    settings: CheckGradientsConfig, model: BiEncoder, batch: Batch, device: torch.device
) -> BatchCheck:
    """Run the check with the settings of the training run."""
    hardware = settings.hardware
    try:
        return check_gradients(
            model,
            batch,
            question_budget=budget(hardware.question_chunk_tokens, settings, "question"),
            passage_budget=budget(hardware.passage_chunk_tokens, settings, "passage"),
            device=device,
            temperature=settings.train.temperature,
            mask_known_positives=settings.train.mask_known_positives,
            autocast_dtype=autocast_dtype(hardware.precision),
        )
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"out of memory: the check holds the activations of {settings.questions} questions and "
            "their passages at once, in float64; lower questions="
        ) from error


def budget(tokens: int | str, settings: CheckGradientsConfig, side: str) -> ChunkBudget:
    """The chunk budget of a side; ``auto`` is not measured, the batch is small."""
    kept = settings.hardware.kept_chunks
    return ChunkBudget(
        AUTO_TOKENS if tokens == "auto" else int(tokens),
        getattr(settings.hardware, f"{side}_chunk_rows"),
        AUTO_KEPT if kept == "auto" else int(kept),
    )


def tell(settings: CheckGradientsConfig, batch: Batch, check: BatchCheck) -> None:
    """Print what was compared, the table, and what kind of modules there are."""
    chunks = ", ".join(f"{tower} {count}" for tower, count in check.chunks.items())
    smaller = ""
    if check.divided:
        towers = " and ".join(check.divided)
        smaller = f"; smaller {towers} chunks than configured, since one chunk would show nothing"
    say(
        f"check  the first {len(batch.question_rows)} questions and {len(batch.passage_rows)} "
        f"candidates of the first batch; chunks: {chunks}{smaller}"
    )
    against = "the batch in one piece" if check.in_one_piece else "the same chunks in one graph"
    for name, conditions, own in (
        ("exact", f"{dtype_name(check.exact)}, without dropout, against {against}", check.exact),
        (
            "as trained",
            f"{settings.hardware.precision}, dropout as configured, against the same chunks and "
            "random numbers in one graph",
            check.as_trained,
        ),
    ):
        say(
            f"{name}: {conditions}; loss {own.cached_loss:.10g} and {own.undivided_loss:.10g}, "
            f"relative difference {own.loss_difference:.1e}"
        )
    say("")
    say(table(check))
    say("")
    for finding in check.findings:
        say(f"note   {finding}")
    if not check.in_one_piece:
        say("note   the encoders are random even without dropout, so no two passes are alike")


def table(check: BatchCheck) -> str:
    """One line per comparison and tower."""
    rows = [
        [
            name,
            tower.tower,
            f"{tower.difference:.1e}" if tower.parameters else "frozen",
            tower.parameter,
            f"{own.tolerance:.1e}",
            "ok" if tower.difference <= own.tolerance else "NOT EQUAL",
        ]
        for name, own in (("exact", check.exact), ("as trained", check.as_trained))
        for tower in own.towers
    ]
    headers = ["comparison", "tower", "largest relative difference", "at", "tolerance", "result"]
    return format_table(rows, headers)


def dtype_name(check: GradientCheck) -> str:
    """``float64`` instead of ``torch.float64``."""
    return str(check.dtype).removeprefix("torch.")


def metrics_of(batch: Batch, check: BatchCheck) -> dict[str, Any]:
    """The content of metrics.json; null stands for what is not finite."""
    return {
        "passed": check.passed,
        "questions": len(batch.question_rows),
        "candidates": len(batch.passage_rows),
        "chunks": dict(check.chunks),
        "chunks_made_smaller": list(check.divided),
        "exact": {**comparison(check.exact), "in_one_piece": check.in_one_piece},
        "as_trained": comparison(check.as_trained),
        "findings": [
            {"module": f.module, "type": f.type, "cause": f.cause, "reason": f.reason}
            for f in check.findings
        ],
    }


def comparison(check: GradientCheck) -> dict[str, Any]:
    """One comparison for metrics.json."""

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "passed": check.passed,
        "dtype": dtype_name(check),
        "tolerance": check.tolerance,
        "cached_loss": finite(check.cached_loss),
        "undivided_loss": finite(check.undivided_loss),
        "loss_relative_difference": finite(check.loss_difference),
        "towers": {
            tower.tower: {
                "largest_relative_difference": finite(tower.difference),
                "parameter": tower.parameter or None,
                "trainable_parameters": tower.parameters,
            }
            for tower in check.towers
        },
    }


def failure(check: BatchCheck, output: Path) -> str:
    """What differs, where, and why as far as it was found."""
    name, own = ("exact", check.exact)
    if own.passed:
        name, own = "as trained", check.as_trained
    worst = own.worst
    if not math.isfinite(worst.difference):
        return (
            f"a gradient of the {worst.tower} tower is not finite (at {worst.parameter}), so "
            "nothing can be compared; use hardware.precision=fp32 and check the start model"
        )
    what = f"the gradient of the {worst.tower} tower by {worst.difference:.1e} at {worst.parameter}"
    if worst.difference <= own.tolerance:
        what = f"the loss by {own.loss_difference:.1e}"
    text = (
        f"cached and undivided step differ in {what} ({name}; tolerance {own.tolerance:.1e}), so "
        "training would not follow the gradient of the whole batch. "
    )
    if check.findings:
        named = ", ".join(dict.fromkeys(f"{f.module} ({f.type})" for f in check.findings))
        return text + f"The cause is most likely {named}: see the notes above"
    return text + f"No module explains it: please report it with {output / 'metrics.json'}"
