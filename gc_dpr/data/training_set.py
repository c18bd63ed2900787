"""All training examples that can be trained on, and the counts that the log must show."""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from gc_dpr.data.readers.paths import Paths, expand_paths
from gc_dpr.data.readers.training_formats import numbered_training_examples
from gc_dpr.data.records import TrainingExample
from gc_dpr.errors import DataError

_logger = logging.getLogger(__name__)

OnMissingPositives = Literal["skip", "error"]


class Available(NamedTuple):
    """How many passages of one kind the examples bring, per example."""

    min: int
    median: float
    max: int


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """The examples to train on, in file order, each with at least one positive.

    Attributes:
        examples: What is kept; ids are unique.
        read: Number of records read, kept or not.
        without_positives: Records left out because no passage answers their question.
        repeated_ids: Records read whose id was taken and got a suffix (``~2``, ``~3``, ...).
        paths: The files, absolute, in the order read.
        hard_negatives_available: Hard negatives per kept example.
        random_negatives_available: Random negatives per kept example.
    """

    examples: list[TrainingExample]
    read: int
    without_positives: int
    repeated_ids: int
    paths: list[Path]
    hard_negatives_available: Available
    random_negatives_available: Available

    def __len__(self) -> int:
        return len(self.examples)


def load_training_set(
    paths: Paths,
    *,
    on_missing_positives: OnMissingPositives = "skip",
    max_examples: int | None = None,
) -> TrainingSet:
    """Read training examples into memory, leaving out those without a positive passage.

    Args:
        paths: Files of any training format (``gc_dpr.data.readers.training_formats.FORMATS``): a
            file, a glob or a list of them.
        on_missing_positives: ``"skip"`` leaves such examples out and logs their number;
            ``"error"`` refuses the file.
        max_examples: Stop after this many kept examples; None reads everything.

    Returns:
        The examples. Ids do not change when other examples are left out: the suffix of a repeated
        id counts all records read.

    Raises:
        DataError: Nothing is left to train on, or an example has no positive and
            ``on_missing_positives`` is ``"error"``; and what the reader raises.
        ValueError: An argument is out of range.
    """
    if on_missing_positives not in ("skip", "error"):
        raise ValueError(f"on_missing_positives={on_missing_positives!r}: expected skip or error")
    if max_examples is not None and max_examples < 1:
        raise ValueError(f"max_examples={max_examples}: expected None or at least 1")
    files = expand_paths(paths)
    examples: list[TrainingExample] = []
    ids = _UniqueIds()
    read = 0
    for path, line, example in _records(files):
        read += 1
        unique_id = ids.unique(example.id)
        if example.positives:
            renamed = unique_id != example.id
            examples.append(replace(example, id=unique_id) if renamed else example)
        elif on_missing_positives == "error":
            raise DataError(
                "this example has no positive passage (of DPR JSON: positive_ctxs is empty or "
                "missing); add one, or leave such examples out with on_missing_positives=skip",
                path=path,
                line=line,
            )
        if len(examples) == max_examples:
            break
    return _summarised(examples, read, ids.repeated, files)


class _UniqueIds:
    """Gives the second bearer of an id the suffix ~2, the third ~3, skipping ids in use."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()
        self._taken: set[str] = set()
        self.repeated = 0

    def unique(self, example_id: str) -> str:
        self._seen[example_id] += 1
        candidate = example_id
        if example_id in self._taken:
            self.repeated += 1
            number = max(2, self._seen[example_id])
            while (candidate := f"{example_id}~{number}") in self._taken:
                number += 1
        self._taken.add(candidate)
        return candidate


def _records(files: Sequence[Path]) -> Iterator[tuple[Path, int, TrainingExample]]:
    for path in files:
        for line, example in numbered_training_examples(path):
            yield path, line, example


def _summarised(
    examples: list[TrainingExample], read: int, repeated_ids: int, files: list[Path]
) -> TrainingSet:
    without_positives = read - len(examples)
    where = f"{files[0]}" + (f" and {len(files) - 1} more files" if len(files) > 1 else "")
    if not examples:
        raise DataError(
            f"no training example left: {read} read from {where}, {without_positives} of them "
            "without a positive passage; expected at least one example with a positive"
        )
    _logger.log(
        logging.WARNING if without_positives else logging.INFO,
        "training examples: %d read, %d kept, %d dropped without a positive passage (%s)",
        read,
        len(examples),
        without_positives,
        where,
    )
    if repeated_ids:
        _logger.warning(
            "%d examples repeat an id; they are kept under ids ending in ~2, ~3, ...", repeated_ids
        )
    return TrainingSet(
        examples=examples,
        read=read,
        without_positives=without_positives,
        repeated_ids=repeated_ids,
        paths=files,
        hard_negatives_available=_available([len(e.hard_negatives) for e in examples]),
        random_negatives_available=_available([len(e.random_negatives) for e in examples]),
    )


def _available(counts: list[int]) -> Available:
    return Available(min(counts), float(statistics.median(counts)), max(counts))
