"""Which questions of a training file make the batch of a benchmark. The same in every run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gc_dpr.data import load_training_set
from gc_dpr.data.records import Passage, TrainingExample
from gc_dpr.errors import ConfigError

SQUAD_SAMPLE = Path(__file__).resolve().parents[2] / "data" / "squad_sample" / "train.json"


def random_examples(train_file: str | Path, count: int) -> list[TrainingExample]:
    """``count`` questions drawn from the whole file without replacement.

    Raises:
        GcDprError: The file has fewer questions, or cannot be read.
    """
    return _draw(_load(train_file, at_least=count), count)


def numbered_examples(train_file: str | Path, count: int) -> list[TrainingExample]:
    """``count`` questions of which all texts differ, however few the file has.

    The file's questions are repeated in random order; the number of the example stands in front of
    its question and of each of its passages, so that no text occurs twice.
    """
    examples = _load(train_file, at_least=1)
    shuffled = _draw(examples, len(examples))
    return [_numbered(shuffled[i % len(shuffled)], i) for i in range(count)]


def neighbouring_examples(
    train_file: str | Path, count: int, *, distinct_share: float
) -> list[TrainingExample]:
    """``count`` questions that share passages to the wanted degree, or as nearly as can be.

    All questions if the file has fewer. They are drawn from the beginning of the file: questions on
    one paragraph stand together, so that fewer to draw from mean more shared passages.

    Args:
        train_file: DPR training JSON.
        count: Questions of the batch.
        distinct_share: Distinct passages / candidates, with one hard negative per question.
    """
    examples = _load(train_file, at_least=1)
    count = min(count, len(examples))
    fewest, most = count, len(examples)
    while fewest < most:  # bisection: the share grows with the number to draw from
        middle = (fewest + most) // 2
        if share_of_distinct_passages(_draw(examples[:middle], count)) < distinct_share:
            fewest = middle + 1
        else:
            most = middle
    return _draw(examples[:fewest], count)


def share_of_distinct_passages(examples: Sequence[TrainingExample]) -> float:
    """Distinct passages / candidates, for the first positive and the first hard negative."""
    candidates = [
        (passage.title, passage.text)
        for example in examples
        for passage in (example.positives[0], *example.hard_negatives[:1])
    ]
    return len(set(candidates)) / len(candidates)


def _load(train_file: str | Path, *, at_least: int) -> Sequence[TrainingExample]:
    examples = load_training_set(train_file).examples
    if len(examples) < at_least:
        raise ConfigError(f"a batch of {at_least}: {train_file} has {len(examples)} questions")
    return examples


def _draw(examples: Sequence[TrainingExample], count: int) -> list[TrainingExample]:
    return random.Random(0).sample(examples, count)


def _numbered(example: TrainingExample, number: int) -> TrainingExample:
    def mark(passages: tuple[Passage, ...]) -> tuple[Passage, ...]:
        return tuple(replace(passage, text=f"{number} {passage.text}") for passage in passages)

    return replace(
        example,
        id=f"{example.id}-{number}",
        question=f"{number} {example.question}",
        positives=mark(example.positives),
        hard_negatives=mark(example.hard_negatives),
    )
