"""Tevatron's training rows with the passages inside (its first format), one object a line.

Keys read: ``query_id``, ``query``, ``answers``, ``positive_passages`` and ``negative_passages``,
each passage with ``docid``, ``title`` and ``text``. The negatives are hard negatives: Tevatron
rows come from a retriever's results. Other keys are counted and logged. Tevatron's second format
names ids of a corpus instead and is refused with a message that says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gc_dpr.data.readers.fields import Fields, numbered_fields
from gc_dpr.data.readers.writing import open_text_for_writing
from gc_dpr.data.records import Passage, TrainingExample
from gc_dpr.errors import DataError

_KEYS = frozenset({"query_id", "query", "answers", "positive_passages", "negative_passages"})
_PASSAGE_KEYS = frozenset({"docid", "title", "text"})
_PASSAGE = "an object with docid, title and text"


def numbered_tevatron(path: Path) -> Iterator[tuple[int, TrainingExample]]:
    """Yield (1-based line on which the record begins, example) of one file, plain or compressed.

    ``query`` and ``positive_passages`` (which may be empty) must be there. Missing or null
    ``answers``, ``negative_passages``, ``title`` and ``docid`` are empty; without a ``query_id``
    the example's id is ``<file name>#<0-based position>``.

    Args:
        path: The file. One JSON list of the same objects is read too.

    Raises:
        DataError: Broken or cut JSON, a missing key or a value of the wrong type; names the file,
            the line and the key.

    Example:
        >>> import pathlib, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name, "train.jsonl")
        >>> _ = path.write_text(
        ...     '{"query_id": "q7", "query": "who?", "positive_passages": [{"text": "Ada."}]}'
        ... )
        >>> [(line, example)] = numbered_tevatron(path)
        >>> line, example.id, example.positives[0].text
        (1, 'q7', 'Ada.')
        >>> folder.cleanup()
    """
    for position, (line, record) in enumerate(numbered_fields(path)):
        yield line, _example(record, f"{path.name}#{position}")


def _example(record: Fields, default_id: str) -> TrainingExample:
    if "positive_passages" not in record and "positive_document_ids" in record:
        raise record.fault(
            "found positive_document_ids: these rows name passages of a corpus by id; expected "
            "rows that hold their passages under positive_passages"
        )
    record.count_others(_KEYS)
    return TrainingExample(
        id=record.identity("query_id") or default_id,
        question=record.string("query"),
        answers=record.optional_strings("answers"),
        positives=tuple(map(_passage, record.objects("positive_passages", _PASSAGE))),
        hard_negatives=tuple(map(_passage, record.optional_objects("negative_passages", _PASSAGE))),
    )


def _passage(item: Fields) -> Passage:
    item.count_others(_PASSAGE_KEYS)
    return Passage(
        id=item.identity("docid"), title=item.optional_string("title"), text=item.string("text")
    )


def write_tevatron(
    path: str | Path, examples: Iterable[TrainingExample], *, random_as_hard: bool = False
) -> int:
    """Write training examples as Tevatron rows; ``numbered_tevatron`` reads the same ones back.

    Args:
        path: The file, written whole or not at all; its name's end decides about compression.
        examples: What to write, one by one. ``answers`` is left out where there are none.
        random_as_hard: The format has one kind of negatives. False refuses an example that has
            random negatives; True writes them behind the hard ones, so they are read back as
            hard negatives.

    Returns:
        The number of examples written.

    Raises:
        DataError: An example has random negatives and ``random_as_hard`` is false.
    """
    written = 0
    with open_text_for_writing(path) as handle:
        for example in examples:
            if example.random_negatives and not random_as_hard:
                raise DataError(
                    f"example {example.id!r} has random negatives, for which Tevatron rows have "
                    "no place; write them as hard negatives with random_as_hard=True, or write "
                    "DPR JSON",
                    path=path,
                )
            handle.write(json.dumps(_row(example), ensure_ascii=False) + "\n")
            written += 1
    return written


def _row(example: TrainingExample) -> dict[str, Any]:
    negatives = example.hard_negatives + example.random_negatives
    return {
        "query_id": example.id,
        "query": example.question,
        **({"answers": list(example.answers)} if example.answers else {}),
        "positive_passages": [_passage_row(passage) for passage in example.positives],
        "negative_passages": [_passage_row(passage) for passage in negatives],
    }


def _passage_row(passage: Passage) -> dict[str, str]:
    return {"docid": passage.id, "title": passage.title, "text": passage.text}
