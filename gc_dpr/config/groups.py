"""The groups of settings that commands share, one for each folder of presets in ``conf/``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gc_dpr.config.fields import at_least, auto_or_at_least, one_of, option, paths
from gc_dpr.errors import ConfigError
from gc_dpr.precision import PRECISIONS


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The two text encoders a training run starts from."""

    name_or_path: str | None = option(
        None,
        "Hub name or folder of the encoder to start from (transformers or "
        "sentence-transformers format)",
    )
    passage_name_or_path: str | None = option(
        None, "Another start for the passage tower; null = the same as name_or_path"
    )
    shared: bool = option(
        False, "true = one encoder for questions and passages; false = two towers"
    )
    pooling: str | None = option(
        None,
        "How token states become one representation: first_token (DPR) or mean; null = what "
        "the model folder says, else first_token",
    )
    normalize: bool | None = option(
        None,
        "Scale representations to length 1, so that scores are cosines; null = what the model "
        "folder says, else false",
    )
    title_format: str = option(
        "pair",
        "How title and text are joined: pair = two segments with a separator (DPR), space = "
        "one string (Tevatron, BEIR)",
    )
    max_question_length: int = option(
        256, "Longest question in tokens; the rest is cut and counted"
    )
    max_passage_length: int = option(256, "Longest passage in tokens; the rest is cut and counted")
    dropout: float | None = option(None, "Dropout probability everywhere; null = the model's own")
    num_layers: int | None = option(None, "Keep only the first so many layers; null = all")
    expected_sha256: str | None = option(
        None, "SHA-256 (or its beginning) that model.safetensors must have; null = not checked"
    )

    def check(self) -> None:
        """Refuse impossible values."""
        if self.pooling is not None:
            one_of("model.pooling", self.pooling, ("first_token", "mean"))
        one_of("model.title_format", self.title_format, ("pair", "space"))
        at_least("model.max_question_length", self.max_question_length, 3)
        at_least("model.max_passage_length", self.max_passage_length, 3)
        at_least("model.num_layers", self.num_layers, 1)
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ConfigError(f"model.dropout={self.dropout}: expected 0 or more and less than 1")
        if self.shared and self.passage_name_or_path is not None:
            raise ConfigError(
                "model.passage_name_or_path has no effect with model.shared=true: "
                "leave it out, or set model.shared=false"
            )


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """The files of one data set."""

    root: str = option("data", "Folder that the shipped data sets are read from")
    train_file: Any = option(
        None, "DPR training JSON or JSONL (also .gz): a path, a glob or a list of them"
    )
    passages_file: Any = option(
        None, "Passages TSV with id, text, title (also .gz): a path, a glob or a list of them"
    )
    questions_file: Any = option(
        None, "Questions: CSV of question TAB ['answer', …], or JSONL: a path, a glob or a list"
    )
    passages_quoting: str = option(
        "csv",
        "csv = fields may be quoted as in psgs_w100.tsv; none = quotes are ordinary characters",
    )
    on_missing_positives: str = option(
        "skip", "Training questions without any positive passage: skip (counted) or error"
    )
    answer_match: str = option(
        "string", "How an answer is found in a passage: string (DPR), regex (CuratedTREC) or kilt"
    )

    def check(self) -> None:
        """Refuse impossible values."""
        for name in ("train_file", "passages_file", "questions_file"):
            paths(f"data.{name}", getattr(self, name))
        one_of("data.passages_quoting", self.passages_quoting, ("csv", "none"))
        one_of("data.on_missing_positives", self.on_missing_positives, ("skip", "error"))
        one_of("data.answer_match", self.answer_match, ("string", "regex", "kilt"))


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """The objective and its optimisation. Nothing here depends on the hardware."""

    batch_size: int = option(128, "Questions per optimizer step, over all processes together")
    hard_negatives: int = option(1, "Hard negatives per question (fewer are used when fewer exist)")
    random_negatives: int = option(0, "Random negatives (DPR's negative_ctxs) per question")
    positive_choice: str = option(
        "first", "Which positive is trained on: first, or random (anew in each epoch)"
    )
    negative_choice: str = option(
        "first",
        "Which negatives are trained on: first, random (anew in each epoch), or rotate (the next "
        "ones in each epoch, so that all are used evenly)",
    )
    mask_known_positives: bool = option(
        True, "Do not count a passage as a negative of a question whose positives include it"
    )
    temperature: float = option(1.0, "Scores are divided by it before the softmax")
    epochs: int = option(10, "Passes over the training questions; 0 = save the model as it starts")
    max_steps: int | None = option(None, "Stop after so many optimizer steps; null = after epochs")
    last_batch: str = option(
        "keep", "The smaller batch that ends an epoch: keep (trained on) or drop (counted)"
    )
    learning_rate: float = option(2e-5, "Peak learning rate of AdamW; falls linearly to 0")
    warmup_steps: int = option(0, "Optimizer steps in which the learning rate rises from 0")
    weight_decay: float = option(0.0, "AdamW's decay; never applied to biases and norms")
    adam_epsilon: float = option(1e-8, "AdamW's epsilon")
    max_grad_norm: float | None = option(2.0, "Clip the gradient to this norm; null = never")
    seed: int = option(0, "Seed of order, choices and dropout")

    def check(self) -> None:
        """Refuse impossible values and options without effect."""
        one_of("train.positive_choice", self.positive_choice, ("first", "random"))
        one_of("train.negative_choice", self.negative_choice, ("first", "random", "rotate"))
        one_of("train.last_batch", self.last_batch, ("keep", "drop"))
        for name, low in (
            ("batch_size", 1), ("hard_negatives", 0), ("random_negatives", 0), ("epochs", 0),
            ("max_steps", 1), ("warmup_steps", 0), ("weight_decay", 0), ("learning_rate", 0),
        ):  # fmt: skip
            at_least(f"train.{name}", getattr(self, name), low)
        for name in ("temperature", "adam_epsilon", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"train.{name}={value}: expected more than 0")
        if self.max_steps is not None and self.epochs == 0:
            raise ConfigError("train.max_steps has no effect with train.epochs=0: leave one out")
        if self.batch_size + self.hard_negatives + self.random_negatives < 2:
            raise ConfigError(
                "train.batch_size=1 without negatives leaves one candidate per question: the loss "
                "is 0 and nothing is learned. Use a larger batch or add hard negatives"
            )
        no_negatives = self.hard_negatives == 0 and self.random_negatives == 0
        if no_negatives and self.negative_choice != "first":
            raise ConfigError(
                "train.negative_choice has no effect without negatives: set train.hard_negatives "
                "or train.random_negatives, or leave it out"
            )


@dataclass(kw_only=True, slots=True)
class HardwareConfig:
    """Memory and speed of this machine. A preset never changes the objective."""

    device: str = option("auto", "auto (CUDA when there is one), cpu or cuda")
    precision: str = option("fp32", "fp32, bf16 or fp16 (with a gradient scaler)")
    question_chunk_tokens: int | str = option(
        "auto",
        "Tokens, padding included, whose activations are in memory at once: question tower. auto = "
        "what fits, measured at the start (CUDA; elsewhere 2048). When memory runs out it is "
        "halved and the step done again, with the same result",
    )
    passage_chunk_tokens: int | str = option("auto", "The same for the passage tower")
    question_chunk_rows: int | None = option(None, "At most so many questions in a chunk")
    passage_chunk_rows: int | None = option(None, "At most so many passages in a chunk")
    kept_chunks: int | str = option(
        "auto",
        "So many chunks of each tower keep their activations from the first pass and are not "
        "encoded twice: faster, at the memory of so many more chunks. auto = as many as the free "
        "memory holds (CUDA; elsewhere 2)",
    )
    encode_batch_tokens: int = option(
        16384, "Tokens, padding included, per batch when texts are only embedded"
    )
    loader_workers: int = option(0, "Processes that tokenise training batches ahead; 0 = none")
    threads: int | None = option(None, "CPU threads of this process; null = the library's choice")

    def check(self) -> None:
        """Refuse impossible values."""
        one_of("hardware.device", self.device, ("auto", "cpu", "cuda"))
        one_of("hardware.precision", self.precision, PRECISIONS)
        at_least("hardware.encode_batch_tokens", self.encode_batch_tokens, 1)
        for name in ("question_chunk_tokens", "passage_chunk_tokens"):
            auto_or_at_least(f"hardware.{name}", getattr(self, name), 1)
        auto_or_at_least("hardware.kept_chunks", self.kept_chunks, 0)
        for name in ("question_chunk_rows", "passage_chunk_rows", "threads"):
            at_least(f"hardware.{name}", getattr(self, name), 1)
        at_least("hardware.loader_workers", self.loader_workers, 0)


@dataclass(kw_only=True, slots=True)
class IndexConfig:
    """The kind of FAISS index."""

    factory: str = option("Flat", "FAISS factory string; Flat is exact. Always inner product")
