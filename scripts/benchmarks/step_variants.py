"""One batch of real texts, and the ways to do a training step with it.

All give the same loss and gradients, with the same model, texts and mask of known positives. Ours
encodes each distinct passage once; the others, as is usual, encode every candidate, the same
passage again and again where questions share it.

Letters: N rows, L tokens, D dims, Q questions, P passages.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import hydra
import torch
from machine_rate import flop_counter
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn import functional as F

from gc_dpr import config as schema
from gc_dpr.cli.launch import config_folder, package_path
from gc_dpr.cli.settings import to_settings
from gc_dpr.cli.train_dense_encoder import start_model
from gc_dpr.data.collator import Batch, Collator
from gc_dpr.data.records import TrainingExample
from gc_dpr.grad_cache import GradCache
from gc_dpr.losses import in_batch_nll
from gc_dpr.models import BiEncoder, TextEncoder
from gc_dpr.ragged import RaggedTokens
from gc_dpr.training.batch_step import ChunkBudget, batch_gradients

Step = Callable[[], Tensor]  # forward and backward of the batch; returns the loss


@dataclass(frozen=True)
class Workload:
    """One batch and the model it goes through.

    Attributes:
        model: In training mode, on ``device``.
        batch: As the collator makes it, its passages being distinct.
        device: Where the encoder computes.
        temperature: Of the loss.
        distinct_for_all: Let the other variants, too, encode each distinct passage only once.
    """

    model: BiEncoder
    batch: Batch
    device: torch.device
    temperature: float
    distinct_for_all: bool = False

    @cached_property
    def excluded(self) -> Tensor:
        """(Q, P) known positives of the questions, which are no negatives; for the other ways."""
        batch = self.batch
        questions = torch.arange(len(batch.positive_index))
        owners = questions.repeat_interleave(batch.known_positive_counts)  # (known positives,)
        equal = batch.known_positive_keys[:, None] == batch.passage_keys  # (known positives, P)
        mask = torch.zeros(len(questions), len(batch.passage_keys), dtype=torch.int64)
        mask = mask.index_add(0, owners, equal.long()) > 0  # (Q, P)
        mask[questions, batch.positive_index] = False
        return mask.to(self.device)

    def loss(self, question_reps: Tensor, passage_reps: Tensor) -> Tensor:
        """The training loss from all representations, (Q, D) and (P, D)."""
        if self.distinct_for_all:
            question_reps = question_reps[self.batch.question_rows.to(self.device)]
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
        work = self if self.distinct_for_all else self.every_candidate_apart()
        return [
            (self.model.question_encoder, work.batch.questions),
            (self.model.passage_encoder, work.batch.passages),
        ]

    def every_candidate_apart(self) -> Workload:
        """The same batch with a row for each question and each candidate, the same or not."""
        questions = self.batch.questions.select(self.batch.question_rows)
        passages = self.batch.passages.select(self.batch.passage_rows)
        batch = replace(
            self.batch,
            questions=questions,
            question_rows=torch.arange(len(questions)),
            passages=passages,
            passage_rows=torch.arange(len(passages)),
        )
        return replace(self, batch=batch)

    def flat_gradient(self) -> Tensor:
        """The gradients of all parameters in one piece, copied."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return torch.cat([gradient.flatten() for gradient in gradients])

    def timed(self, step: Step) -> float:
        """Seconds of one step from zeroed gradients."""
        self.model.zero_grad(set_to_none=False)
        self._wait()
        started = time.perf_counter()
        step()
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass
class Counts:
    """What went through the encoders in one step.

    Texts and tokens are counted in the pass with a graph, which every encoded text goes through
    once; ``forwards`` counts texts in all passes, ``flops`` the operations of all matrix products.
    """

    texts: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    forwards: int = 0
    flops: int = 0

    @property
    def padding(self) -> float:
        """Share of the padded tokens that is padding."""
        return 1 - self.tokens / self.padded_tokens


@contextlib.contextmanager
def counting(model: BiEncoder) -> Iterator[Counts]:
    """Count what the encoders are called with, at their token embeddings.

    Not at the transformer itself: sentence-transformers calls its forward past all hooks.
    """
    counts = Counts()
    encoders = {model.question_encoder, model.passage_encoder}

    def count_for(encoder: TextEncoder) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def count(_: nn.Module, args: tuple[Any, ...]) -> None:
            ids = args[0]  # (N, L)
            counts.forwards += len(ids)
            if torch.is_grad_enabled():
                counts.texts += len(ids)
                counts.tokens += int((ids != encoder.pad_token_id).sum())
                counts.padded_tokens += ids.numel()

        return count

    hooks = [
        encoder.transformer.get_input_embeddings().register_forward_pre_hook(count_for(encoder))
        for encoder in encoders
    ]
    try:
        with flop_counter() as flops:
            yield counts
        counts.flops = flops.get_total_flops()
    finally:
        for hook in hooks:
            hook.remove()


def build_workload(
    examples: Sequence[TrainingExample],
    *,
    layers: int | None = None,
    dropout: float = 0.0,
    device: str = "cpu",
    distinct_for_all: bool = False,
) -> Workload:
    """Load the encoder of experiment=squad_sample_cpu and make one batch, as the trainer would.

    Args:
        examples: The questions; each brings its positive and one hard negative.
        layers: Keep only the first so many of the encoder's; None keeps all.
        dropout: Everywhere in the encoder.
        device: Where the encoder computes.
        distinct_for_all: See Workload.

    Raises:
        GcDprError: The encoder is missing.
    """
    settings = _recipe(layers=layers, dropout=dropout)
    model = start_model(settings).to(device).train()
    collator = Collator(
        model.question_tokenizer,
        model.passage_tokenizer,
        seed=settings.train.seed,
        hard_negatives=1,
    )
    for parameter in model.parameters():
        # Written to: weights and gradients are then in memory before anything is measured.
        parameter.data = parameter.data.clone()
        parameter.grad = torch.empty_like(parameter).fill_(0)
    return Workload(
        model=model,
        batch=collator([(0, example) for example in examples]),
        device=torch.device(device),
        temperature=settings.train.temperature,
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
    work: Workload,
    *,
    question_tokens: int,
    passage_tokens: int,
    kept: int,
    masked: bool = True,
    autocast_dtype: torch.dtype | None = None,
) -> Step:
    """The toolkit's step: chunks of texts of similar length, up to a number of padded tokens.

    Sorting, padding and finding the known positives are part of it; the other variants have their
    padding and mask prepared. ``kept`` chunks of each side are not encoded twice. Not ``masked``,
    known positives count as negatives.
    """

    def step() -> Tensor:
        return batch_gradients(
            work.model,
            work.batch,
            question_budget=ChunkBudget(question_tokens, kept=kept),
            passage_budget=ChunkBudget(passage_tokens, kept=kept),
            device=work.device,
            temperature=work.temperature,
            mask_known_positives=masked,
            autocast_dtype=autocast_dtype,
        ).loss

    return step


def by_rows(work: Workload, *, rows: int, length: int | None, attention: str | None = None) -> Step:
    """Gradient cache in chunks of ``rows`` texts, all padded to ``length`` tokens.

    None pads to the longest of the side. ``attention`` is transformers' name of a kernel.
    """
    encoders = [encoder for encoder, _ in work.sides()]
    cache = GradCache(encoders, rows, work.loss)
    inputs = [_padded(*side, length=length, device=work.device) for side in work.sides()]

    def step() -> Tensor:
        with _attention(encoders, attention):
            return cache(*inputs)

    return step


@contextlib.contextmanager
def _attention(encoders: Sequence[TextEncoder], name: str | None) -> Iterator[None]:
    """Let the encoders use another kernel for a while."""
    transformers: list[Any] = [encoder.transformer for encoder in encoders]
    usual = [transformer.config._attn_implementation for transformer in transformers]
    for transformer in transformers if name else ():
        transformer.set_attn_implementation(name)
    try:
        yield
    finally:
        for transformer, kernel in zip(transformers, usual, strict=True):
            transformer.set_attn_implementation(kernel)


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
