"""One batch of real texts, and the ways to do a training step with it.

All give the same loss and gradients, with the same model, texts and mask of known positives. Ours
encodes each distinct passage once; the others, as is usual, encode every candidate, the same
passage again and again where questions share it.

Letters: N rows, L tokens, D dims, Q questions, P passages.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn import functional as F

from gc_dpr import config as schema
from gc_dpr.cli.launch import config_folder, package_path
from gc_dpr.cli.settings import to_settings
from gc_dpr.cli.train_dense_encoder import start_model
from gc_dpr.data import load_training_set
from gc_dpr.data.collator import Batch, Collator
from gc_dpr.errors import ConfigError
from gc_dpr.grad_cache import GradCache, RaggedTokens
from gc_dpr.losses import in_batch_nll
from gc_dpr.models import BiEncoder, TextEncoder
from gc_dpr.training.batch_step import ChunkBudget, batch_gradients, known_positives

Step = Callable[[], Tensor]  # forward and backward of the batch; returns the loss


@dataclass(frozen=True)
class Workload:
    """One batch and the model it goes through.

    Attributes:
        model: In training mode, on ``device``.
        batch: As the collator makes it, its passages being distinct.
        device: Where the encoder computes.
        temperature: Of the loss.
        excluded: (Q, P) known positives, masked in every variant.
        distinct_for_all: Let the other variants, too, encode each distinct passage only once.
    """

    model: BiEncoder
    batch: Batch
    device: torch.device
    temperature: float
    excluded: Tensor
    distinct_for_all: bool

    def loss(self, question_reps: Tensor, passage_reps: Tensor) -> Tensor:
        """The training loss from all representations, (Q, D) and (P, D)."""
        if self.distinct_for_all:
            passage_reps = passage_reps[self.batch.passage_rows.to(self.device)]
        return in_batch_nll(
            question_reps,
            passage_reps,
            self.batch.positive_index.to(self.device),
            temperature=self.temperature,
            excluded=self.excluded,
        ).loss

    def sides(self) -> list[tuple[TextEncoder, RaggedTokens]]:
        """Encoder and texts of the questions, then of the passages, for the other variants."""
        passages = self.batch.passages
        if not self.distinct_for_all:
            passages = passages.select(self.batch.passage_rows)
        return [
            (self.model.question_encoder, self.batch.questions),
            (self.model.passage_encoder, passages),
        ]


@dataclass
class Counts:
    """What went through the encoders in one step.

    Texts and tokens are counted in the pass with a graph, which every encoded text goes through
    once; ``forwards`` counts texts in all passes.
    """

    texts: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    forwards: int = 0

    @property
    def padding(self) -> float:
        """Share of the padded tokens that is padding."""
        return 1 - self.tokens / self.padded_tokens


@contextlib.contextmanager
def counting(model: BiEncoder) -> Iterator[Counts]:
    """Count what the encoders are called with."""
    counts = Counts()

    def count(_: nn.Module, args: tuple[Any, ...], chunk: dict[str, Tensor]) -> None:
        counts.forwards += len(chunk["input_ids"])
        if torch.is_grad_enabled():
            counts.texts += len(chunk["input_ids"])
            counts.tokens += int(chunk["attention_mask"].sum())
            counts.padded_tokens += chunk["input_ids"].numel()

    encoders = {model.question_encoder, model.passage_encoder}
    hooks = [x.register_forward_pre_hook(count, with_kwargs=True) for x in encoders]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def build_workload(
    train_file: str | Path,
    *,
    questions: int,
    layers: int | None = None,
    dropout: float = 0.0,
    device: str = "cpu",
    distinct_for_all: bool = False,
) -> Workload:
    """Load the encoder of experiment=squad_sample_cpu and make one batch, as the trainer would.

    Args:
        train_file: DPR training JSON.
        questions: Q, a random sample that is the same in every run; each brings its positive and
            one hard negative.
        layers: Keep only the first so many of the encoder's; None keeps all.
        dropout: Everywhere in the encoder.
        device: Where the encoder computes.
        distinct_for_all: See Workload.

    Raises:
        GcDprError: The data has fewer questions, or something is missing.
    """
    settings = _recipe(layers=layers, dropout=dropout)
    model = start_model(settings).to(device).train()
    examples = load_training_set(train_file).examples
    if questions > len(examples):
        raise ConfigError(f"a batch of {questions}: {train_file} has {len(examples)} questions")
    collator = Collator(
        model.question_tokenizer,
        model.passage_tokenizer,
        seed=settings.train.seed,
        hard_negatives=1,
    )
    batch = collator([(0, example) for example in random.Random(0).sample(examples, questions)])
    for parameter in model.parameters():
        # Written to: weights and gradients are then in memory before anything is measured.
        parameter.data = parameter.data.clone()
        parameter.grad = torch.empty_like(parameter).fill_(0)
    return Workload(
        model=model,
        batch=batch,
        device=torch.device(device),
        temperature=settings.train.temperature,
        excluded=known_positives(batch, torch.device(device)),
        distinct_for_all=distinct_for_all,
    )


def _recipe(*, layers: int | None, dropout: float) -> Any:
    schema.register()
    OmegaConf.register_new_resolver("package_path", package_path, replace=True)
    command, overrides = "train_dense_encoder", ["experiment=squad_sample_cpu", "output_dir=none"]
    with hydra.initialize_config_dir(str(config_folder()), version_base="1.3"):
        settings = to_settings(command, hydra.compose(command, overrides))
    settings.model.num_layers = layers
    settings.model.dropout = dropout
    settings.model.check()
    return settings


def by_token_budget(
    work: Workload, *, question_tokens: int, passage_tokens: int, kept: int
) -> Step:
    """The toolkit's step: chunks of texts of similar length, up to a number of padded tokens.

    Sorting, padding and finding the known positives are part of it; the other variants have their
    padding and mask prepared. ``kept`` chunks of each side are not encoded twice.
    """

    def step() -> Tensor:
        return batch_gradients(
            work.model,
            work.batch,
            question_budget=ChunkBudget(question_tokens, kept=kept),
            passage_budget=ChunkBudget(passage_tokens, kept=kept),
            device=work.device,
            temperature=work.temperature,
        ).loss

    return step


def by_rows(work: Workload, *, rows: int, length: int | None) -> Step:
    """Gradient cache in chunks of ``rows`` texts, all padded to ``length`` tokens.

    None pads to the longest of the side.
    """
    encoders = [encoder for encoder, _ in work.sides()]
    cache = GradCache(encoders, rows, work.loss)
    inputs = [_padded(*side, length=length, device=work.device) for side in work.sides()]
    return lambda: cache(*inputs)


def undivided(work: Workload) -> Step:
    """Each side in one piece, padded to its longest, plain autograd."""
    encoders = [encoder for encoder, _ in work.sides()]
    inputs = [_padded(*side, length=None, device=work.device) for side in work.sides()]

    def step() -> Tensor:
        loss = work.loss(*(encoder(**x) for encoder, x in zip(encoders, inputs, strict=True)))
        torch.autograd.backward(loss)
        return loss.detach()

    return step


def _padded(
    encoder: TextEncoder, texts: RaggedTokens, *, length: int | None, device: torch.device
) -> dict[str, Tensor]:
    """All texts of a side, (N, L) on the device."""
    side = texts.pad(torch.arange(len(texts)), pad_token_id=encoder.pad_token_id)
    missing = 0 if length is None else length - side["input_ids"].shape[1]
    fillers = {"input_ids": encoder.pad_token_id, "attention_mask": 0}
    return {
        name: F.pad(ids, (0, missing), value=fillers[name]).to(device) for name, ids in side.items()
    }
