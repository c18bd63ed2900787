"""Which positive and which negatives an example brings into a batch.

Every draw has a generator of its own, seeded from (seed, epoch, example id): loader workers,
processes, the order of the examples and a resume cannot change it. Candidates are ranked by random
keys, so asking for one negative more adds one and keeps the others. Rotating needs no draw: the
epoch says where in the file's order to begin.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from gc_dpr.data.identity import marks
from gc_dpr.data.records import Passage, TrainingExample
from gc_dpr.seeding import derive_seed

Choice = Literal["first", "random"]
NegativeChoice = Literal["first", "random", "rotate"]


@dataclass(frozen=True, slots=True)
class ChosenPassages:
    """The passages of one example in one epoch.

    Attributes:
        positive: The passage to be ranked first.
        negatives: Hard negatives, then random negatives; may be fewer than asked for.
        passed_over: Candidates met and not taken because they are one of the example's positives
            (same id or same text) or a negative already taken. Rotating meets all candidates of
            a kind that is asked for.
        filled: How many of the random negatives stand in for hard ones that the example lacks.
    """

    positive: Passage
    negatives: tuple[Passage, ...]
    passed_over: int = 0
    filled: int = 0


def choose_passages(
    example: TrainingExample,
    *,
    seed: int,
    epoch: int,
    hard_negatives: int,
    random_negatives: int = 0,
    positive_choice: Choice = "first",
    negative_choice: NegativeChoice = "first",
    fill_with_random: bool = False,
) -> ChosenPassages:
    """Choose one positive and up to the asked number of negatives of an example.

    A pure function of its arguments. An example with fewer negatives gives fewer: nothing is
    repeated to fill up. Random negatives stand in for missing hard ones only where
    ``fill_with_random`` says so (DPR does that, GC-DPR does not).

    Args:
        example: With at least one positive.
        seed: The run's seed.
        epoch: 0-based.
        hard_negatives: Number asked for, from ``example.hard_negatives``.
        random_negatives: Number asked for, from ``example.random_negatives``.
        positive_choice: ``"first"`` of the file, or a ``"random"`` one in each epoch.
        negative_choice: The ``"first"`` ones of the file, ``"random"`` ones in each epoch, or
            ``"rotate"``: of m usable ones in the file's order, epoch e takes number e * n and the
            n - 1 that follow, round the end, so that m epochs use each of them n times. Usable is
            what is no positive and no copy of one before it; a random negative that is also a
            hard one counts as hard where hard ones are asked for. Draws nothing: ``seed`` has no
            part in it.
        fill_with_random: For every hard negative that is missing take one random negative more,
            after those asked for anyway.

    Raises:
        ValueError: The example has no positive, an argument is out of range, or
            ``fill_with_random`` has no effect because no hard negatives are asked for.

    Example:
        Three hard negatives, two in each epoch: after three epochs each was taken twice.

        >>> hard = tuple(Passage(name, "", name) for name in "abc")
        >>> example = TrainingExample("q", "?", (), (Passage("p", "", "p"),), hard)
        >>> for epoch in range(3):
        ...     chosen = choose_passages(
        ...         example, seed=0, epoch=epoch, hard_negatives=2, negative_choice="rotate"
        ...     )
        ...     print(*(passage.id for passage in chosen.negatives))
        a b
        c a
        b c
    """
    _check_choices(
        hard_negatives, random_negatives, positive_choice, negative_choice, fill_with_random
    )
    if not example.positives:
        raise ValueError(f"example {example.id!r} has no positive passage to train on")

    def draw(passages: Sequence[Passage], kind: str, choice: str) -> Sequence[Passage]:
        seeds = (seed, kind, epoch, example.id)
        return passages if choice != "random" else _shuffled(passages, derive_seed(*seeds))

    positive = draw(example.positives, "positive", positive_choice)[0]
    known: set[tuple[str, str]] = set().union(*map(marks, example.positives))

    def take(passages: Sequence[Passage], kind: str, number: int) -> tuple[list[Passage], int]:
        if number and negative_choice == "rotate":
            # First all usable ones, then their turn: the one after a copy has no second turn.
            usable, passed_over = _take(passages, len(passages), known)
            return _turn(usable, number, epoch), passed_over
        return _take(draw(passages, kind, negative_choice) if number else (), number, known)

    hard, hard_passed_over = take(example.hard_negatives, "hard negatives", hard_negatives)
    missing = hard_negatives - len(hard) if fill_with_random else 0
    others, others_passed_over = take(
        example.random_negatives, "random negatives", random_negatives + missing
    )
    return ChosenPassages(
        positive,
        (*hard, *others),
        passed_over=hard_passed_over + others_passed_over,
        filled=max(len(others) - random_negatives, 0),
    )


def _shuffled(passages: Sequence[Passage], seed: int) -> list[Passage]:
    # random() is the only draw whose sequence Python promises to keep between versions.
    generator = random.Random(seed)
    keys = [generator.random() for _ in passages]
    return [passages[i] for i in sorted(range(len(passages)), key=keys.__getitem__)]


def _turn(passages: Sequence[Passage], number: int, epoch: int) -> list[Passage]:
    """The passages whose turn it is: ``number`` of them from ``epoch * number`` on, in a circle."""
    count = len(passages)
    return [passages[(epoch * number + i) % count] for i in range(min(number, count))]


def _take(
    candidates: Sequence[Passage], number: int, known: set[tuple[str, str]]
) -> tuple[list[Passage], int]:
    """Up to ``number`` candidates without a known mark, and how many were met that had one.

    The marks of those taken are added to ``known``.
    """
    taken: list[Passage] = []
    passed_over = 0
    for candidate in candidates:
        if len(taken) == number:
            break
        candidate_marks = marks(candidate)
        if known.isdisjoint(candidate_marks):
            taken.append(candidate)
            known |= candidate_marks
        else:
            passed_over += 1
    return taken, passed_over


def _check_choices(
    hard_negatives: int,
    random_negatives: int,
    positive_choice: str,
    negative_choice: str,
    fill_with_random: bool,
) -> None:
    for name, number in (
        ("hard_negatives", hard_negatives),
        ("random_negatives", random_negatives),
    ):
        if number < 0:
            raise ValueError(f"{name}={number}: expected 0 or more")
    if positive_choice not in get_args(Choice):
        raise ValueError(f"positive_choice={positive_choice!r}: expected 'first' or 'random'")
    if negative_choice not in get_args(NegativeChoice):
        raise ValueError(
            f"negative_choice={negative_choice!r}: expected 'first', 'random' or 'rotate'"
        )
    if fill_with_random and hard_negatives == 0:
        raise ValueError(
            "fill_with_random=True has no effect with hard_negatives=0: ask for hard negatives, "
            "or for random_negatives themselves"
        )
