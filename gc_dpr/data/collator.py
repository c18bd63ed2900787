"""From examples to one process's share of a batch, tokenised but not yet padded.

Letters: Q questions, P passages of this process.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from gc_dpr.data.identity import passage_key
from gc_dpr.data.records import Passage, TrainingExample
from gc_dpr.data.sampling import Choice, NegativeChoice, choose_passages
from gc_dpr.ragged import RaggedTokens

T = TypeVar("T")


class Tokenized(Protocol):
    """What a tokenizing function returns."""

    @property
    def tokens(self) -> RaggedTokens:
        """One row per text."""

    @property
    def truncated_rows(self) -> Sequence[int]:
        """Which texts were cut to the maximum length."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One process's share of a batch.

    Attributes:
        example_ids: (Q,) in the order of the questions.
        questions: The distinct questions, one row each.
        question_rows: (Q,) int64, the row of each question in ``questions``.
        passages: The distinct passages, one row each; fewer than P when questions share passages.
        passage_rows: (P,) int64, the row of each candidate in ``passages``. The candidates are, per
            question, its positive, hard negatives, random negatives.
        positive_index: (Q,) int64, which of the P candidates is each question's positive.
        passage_keys: (P,) int64, the same number for the same title and text.
        known_positive_keys: (sum of counts,) int64, keys of all positives of question 0, then of
            question 1, ...; also of those that are not in this batch.
        known_positive_counts: (Q,) int64.
        truncated_questions: Questions cut to the maximum length.
        truncated_passages: Candidates cut to the maximum length: a passage of two questions counts
            twice, so that the number does not depend on how the batch is shared out.
        fewer_negatives: Questions with fewer negatives than asked for.
        passed_over_negatives: Negatives not taken because they are a positive of the same
            question, or a repetition.
    """

    example_ids: tuple[str, ...]
    questions: RaggedTokens
    question_rows: Tensor
    passages: RaggedTokens
    passage_rows: Tensor
    positive_index: Tensor
    passage_keys: Tensor
    known_positive_keys: Tensor
    known_positive_counts: Tensor
    truncated_questions: int
    truncated_passages: int
    fewer_negatives: int
    passed_over_negatives: int


class Collator:
    """Turns (epoch, example) pairs into a batch; no pairs give a batch without rows.

    Args:
        tokenize_questions: Takes question texts, returns their tokens and which were cut.
        tokenize_passages: The same for passages.
        seed: The run's seed; with the epoch and the example's id it decides every draw.
        hard_negatives: Hard negatives per question.
        random_negatives: Random negatives per question.
        positive_choice: ``"first"`` or ``"random"``; see ``choose_passages``.
        negative_choice: ``"first"``, ``"random"`` or ``"rotate"``.
    """

    def __init__(
        self,
        tokenize_questions: Callable[[Sequence[str]], Tokenized],
        tokenize_passages: Callable[[Sequence[Passage]], Tokenized],
        *,
        seed: int,
        hard_negatives: int,
        random_negatives: int = 0,
        positive_choice: Choice = "first",
        negative_choice: NegativeChoice = "first",
    ) -> None:
        self._tokenize_questions = tokenize_questions
        self._tokenize_passages = tokenize_passages
        self._negatives_asked = hard_negatives + random_negatives
        self._sampling: dict[str, Any] = {
            "seed": seed,
            "hard_negatives": hard_negatives,
            "random_negatives": random_negatives,
            "positive_choice": positive_choice,
            "negative_choice": negative_choice,
        }

    def __call__(self, pairs: Sequence[tuple[int, TrainingExample]]) -> Batch:
        """Draw the passages of every example and tokenise both sides."""
        passages: list[Passage] = []
        positive_index: list[int] = []
        fewer = passed_over = 0
        for epoch, example in pairs:
            chosen = choose_passages(example, epoch=epoch, **self._sampling)
            positive_index.append(len(passages))
            passages += [chosen.positive, *chosen.negatives]
            fewer += len(chosen.negatives) < self._negatives_asked
            passed_over += chosen.passed_over
        examples = [example for _, example in pairs]
        # Several questions may share a passage, and hard negatives repeat: each is encoded once.
        questions, question_rows = _distinct([(e.question, e.question) for e in examples])
        distinct, passage_rows = _distinct([((p.title, p.text), p) for p in passages])
        question_tokens, cut_questions = _tokens(self._tokenize_questions, questions)
        passage_tokens, cut_passages = _tokens(self._tokenize_passages, distinct)
        positives = [dict.fromkeys(map(passage_key, example.positives)) for example in examples]
        return Batch(
            example_ids=tuple(example.id for example in examples),
            questions=question_tokens,
            question_rows=_int64(question_rows),
            passages=passage_tokens,
            passage_rows=_int64(passage_rows),
            positive_index=_int64(positive_index),
            passage_keys=_int64([passage_key(passage) for passage in passages]),
            known_positive_keys=_int64([key for keys in positives for key in keys]),
            known_positive_counts=_int64([len(keys) for keys in positives]),
            truncated_questions=sum(row in cut_questions for row in question_rows),
            truncated_passages=sum(row in cut_passages for row in passage_rows),
            fewer_negatives=fewer,
            passed_over_negatives=passed_over,
        )


def _distinct(items: Sequence[tuple[Hashable, T]]) -> tuple[list[T], list[int]]:
    """The first item of each key, and for every item which of those stands for it."""
    row_of: dict[Hashable, int] = {}
    rows = [row_of.setdefault(key, len(row_of)) for key, _ in items]
    firsts = {row: item for row, (_, item) in zip(reversed(rows), reversed(items), strict=True)}
    return [firsts[row] for row in range(len(row_of))], rows


def _tokens(
    tokenize: Callable[[Any], Tokenized], texts: Sequence[Any]
) -> tuple[RaggedTokens, set[int]]:
    """Tokenise; tokenizers refuse an empty list, a process without a share has one."""
    if not texts:
        return RaggedTokens.from_lists([]), set()
    tokenized = tokenize(texts)
    return tokenized.tokens, set(tokenized.truncated_rows)


def _int64(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


class _EpochExamples(Dataset[tuple[int, TrainingExample]]):
    """Looks up an example by (epoch, position) and hands the epoch on."""

    def __init__(self, examples: Sequence[TrainingExample]) -> None:
        self._examples = examples

    def __getitem__(self, key: tuple[int, int]) -> tuple[int, TrainingExample]:
        epoch, position = key
        return epoch, self._examples[position]


def build_loader(
    examples: Sequence[TrainingExample],
    collator: Collator,
    sampler: Sampler[list[tuple[int, int]]],
    *,
    workers: int = 0,
) -> DataLoader[Batch]:
    """Make the loader that gives one Batch per batch of the sampler.

    Args:
        examples: The training set.
        collator: Makes the batches.
        sampler: Gives lists of (epoch, position); call its ``set_epoch`` before each epoch.
        workers: Processes that prepare batches ahead of time; 0 prepares them in this one. Any
            number gives the same batches.

    Raises:
        ValueError: ``workers`` is negative.
    """
    if workers < 0:
        raise ValueError(f"workers={workers}: expected 0 or more")
    ahead: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": 2} if workers else {}
    return DataLoader(
        _EpochExamples(examples),  # type: ignore[arg-type]  # the collator makes Batch of it
        batch_sampler=sampler,
        collate_fn=collator,
        num_workers=workers,
        **ahead,
    )
