"""Which positive and which negatives an example brings into a batch.

Every draw has a generator of its own, seeded from (seed, epoch, example id): loader workers,
processes, the order of the examples and a resume cannot change it. Candidates are ranked by random
keys, so asking for one negative more adds one and keeps the others.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gc_dpr.data.identity import marks
from gc_dpr.data.records import Passage, TrainingExample
from gc_dpr.seeding import derive_seed

Choice = Literal["first", "random"]


@dataclass(frozen=True, slots=True)
class ChosenPassages:
    """The passages of one example in one epoch.

    Attributes:
        positive: The passage to be ranked first.
        negatives: Hard negatives, then random negatives; may be fewer than asked for.
        passed_over: Candidates met and not taken because they are one of the example's positives
            (same id or same text) or a negative already taken.
    """

    positive: Passage
    negatives: tuple[Passage, ...]
    passed_over: int = 0


def choose_passages(
    example: TrainingExample,
    *,
    seed: int,
    epoch: int,
    hard_negatives: int,
    random_negatives: int = 0,
    positive_choice: Choice = "first",
    negative_choice: Choice = "first",
) -> ChosenPassages:
    """Choose one positive and up to the asked number of negatives of an example.

    A pure function of its arguments. An example with fewer negatives gives fewer: nothing is
    repeated to fill up, and random negatives do not stand in for hard ones (DPR does that, GC-DPR
    does not).

    Args:
        example: With at least one positive.
        seed: The run's seed.
        epoch: 0-based.
        hard_negatives: Number asked for, from ``example.hard_negatives``.
        random_negatives: Number asked for, from ``example.random_negatives``.
        positive_choice: ``"first"`` of the file, or a ``"random"`` one in each epoch.
        negative_choice: The ``"first"`` ones of the file, or ``"random"`` ones in each epoch.

    Raises:
        ValueError: The example has no positive, or an argument is out of range.
    """
    _check_choices(hard_negatives, random_negatives, positive_choice, negative_choice)
    if not example.positives:
        raise ValueError(f"example {example.id!r} has no positive passage to train on")

    def ordered(passages: Sequence[Passage], kind: str, choice: Choice) -> Sequence[Passage]:
        if choice == "first" or len(passages) < 2:
            return passages
        # random() is the only draw whose sequence Python promises to keep between versions.
        generator = random.Random(derive_seed(seed, kind, epoch, example.id))
        keys = [generator.random() for _ in passages]
        return [passages[i] for i in sorted(range(len(passages)), key=keys.__getitem__)]

    positive = ordered(example.positives, "positive", positive_choice)[0]
    negatives: list[Passage] = []
    known: set[tuple[str, str]] = set().union(*map(marks, example.positives))
    passed_over = 0
    for passages, kind, number in (
        (example.hard_negatives, "hard negatives", hard_negatives),
        (example.random_negatives, "random negatives", random_negatives),
    ):
        candidates = ordered(passages, kind, negative_choice) if number else ()
        passed_over += _take(candidates, number, known, negatives)
    return ChosenPassages(positive, tuple(negatives), passed_over)


def _take(
    candidates: Sequence[Passage],
    number: int,
    known: set[tuple[str, str]],
    negatives: list[Passage],
) -> int:
    """Append up to ``number`` candidates without a known mark; returns how many had one."""
    wanted = len(negatives) + number
    passed_over = 0
    for candidate in candidates:
        if len(negatives) == wanted:
            break
        candidate_marks = marks(candidate)
        if known.isdisjoint(candidate_marks):
            negatives.append(candidate)
            known |= candidate_marks
        else:
            passed_over += 1
    return passed_over


def _check_choices(
    hard_negatives: int, random_negatives: int, positive_choice: str, negative_choice: str
) -> None:
    for name, number in (
        ("hard_negatives", hard_negatives),
        ("random_negatives", random_negatives),
    ):
        if number < 0:
            raise ValueError(f"{name}={number}: expected 0 or more")
    for name, choice in (
        ("positive_choice", positive_choice),
        ("negative_choice", negative_choice),
    ):
        if choice not in ("first", "random"):
            raise ValueError(f"{name}={choice!r}: expected 'first' or 'random'")
