"""Training examples as a table of texts; the reader is ``text_columns``.

Such a table holds questions, positives and hard negatives, nothing else. Titles, answers and
random negatives are refused, since a text without its title is another passage; ids are left out
(the reader numbers the rows) and counted in the log.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gc_dpr.data.readers.parquet_rows import write_rows
from gc_dpr.data.readers.paths import PathLike
from gc_dpr.data.readers.text_columns import DELIMITERS, ending_of
from gc_dpr.data.readers.writing import open_text_for_writing
from gc_dpr.data.records import Passage, TrainingExample
from gc_dpr.errors import DataError

_logger = logging.getLogger(__name__)

Row = list[str | list[str]]


def write_text_columns(
    path: PathLike, examples: Iterable[TrainingExample], *, negatives: int | None = None
) -> int:
    """Write examples as CSV, TSV, JSON Lines or Parquet; the file appears whole or not at all.

    Args:
        path: The end of its name tells the format: ``.csv``, ``.tsv``, ``.jsonl`` (each also with
            ``.gz`` or ``.zst``) or ``.parquet``.
        examples: Read once, in order.
        negatives: Write columns ``anchor``, ``positive``, ``negative_1`` to ``negative_N`` of
            single texts, which sentence-transformers trains on as they are: every example has
            exactly one positive and N negatives (in CSV and TSV at most N; the other cells are
            empty). None: in JSON Lines and Parquet lists of texts in columns ``anchor``,
            ``positive`` and ``negative``; in CSV and TSV the first example's number.

    Returns:
        The number of examples written.

    Raises:
        DataError: An example has what the table cannot hold (several positives, more negatives
            than columns, a title, answers, random negatives, an empty text), or the file cannot be
            written. Nothing is left behind.
        ValueError: ``negatives`` is negative, or the name's end is none of the above.
    """
    place = Path(path).expanduser().absolute()
    if negatives is not None and negatives < 0:
        raise ValueError(f"negatives={negatives}; expected None or a number from 0 on")
    ending = ending_of(place)
    checked = _checked(examples, place)
    if ending in DELIMITERS:
        return _write_csv(place, checked, DELIMITERS[ending], negatives)
    names = _names(negatives)
    rows = (_row(example, negatives, place) for example in checked)
    if ending == ".jsonl":
        return _write_jsonl(place, rows, names)
    if place.suffix.lower() == ".parquet":
        lists = negatives is None
        return write_rows(place, {name: lists and name != "anchor" for name in names}, rows)
    raise ValueError(
        f"{place.name} does not tell the format; expected a name that ends in .csv, .tsv, .jsonl "
        "(also .gz or .zst after it) or .parquet"
    )


def _names(negatives: int | None) -> list[str]:
    numbered = ["negative"] if negatives is None else _numbered(negatives)
    return ["anchor", "positive", *numbered]


def _numbered(negatives: int) -> list[str]:
    return [f"negative_{i + 1}" for i in range(negatives)]


def _checked(examples: Iterable[TrainingExample], path: Path) -> Iterator[TrainingExample]:
    """Refuse what no table of texts can hold; count the ids, which are left out."""
    position, own_ids, passage_ids = -1, 0, 0
    for position, example in enumerate(examples):
        if example.answers:
            raise _cannot_hold(example, "answers", path)
        if example.random_negatives:
            raise _cannot_hold(example, "random negatives", path)
        passages = (*example.positives, *example.hard_negatives)
        if any(passage.title for passage in passages):
            raise _cannot_hold(example, "titles of passages", path)
        if not all(text.strip() for text in (example.question, *_texts(passages))):
            raise _cannot_hold(example, "an empty question or passage", path)
        own_ids += example.id != f"{path.name}#{position}"
        passage_ids += sum(bool(passage.id) for passage in passages)
        yield example
    if own_ids or passage_ids:
        _logger.info(
            "%s: not written, since a table of texts has no place for them: ids of %d examples, "
            "ids of %d passages",
            path,
            own_ids,
            passage_ids,
        )


def _cannot_hold(example: TrainingExample, what: str, path: Path) -> DataError:
    return DataError(
        f"cannot be written: example {example.id!r} has {what}, which a table of texts does not "
        "hold; write DPR training JSON instead",
        path=path,
    )


def _texts(passages: Sequence[Passage]) -> list[str]:
    return [passage.text for passage in passages]


def _row(example: TrainingExample, negatives: int | None, path: Path) -> Row:
    positive, negative = _texts(example.positives), _texts(example.hard_negatives)
    if negatives is None:
        return [example.question, positive, negative]
    if len(positive) != 1 or len(negative) != negatives:
        raise DataError(
            f"cannot be written: example {example.id!r} has {len(positive)} positives and "
            f"{len(negative)} negatives, expected 1 and {negatives} (negatives={negatives}); leave "
            "negatives out to write lists",
            path=path,
        )
    return [example.question, *positive, *negative]


def _write_jsonl(path: Path, rows: Iterator[Row], names: Sequence[str]) -> int:
    written = 0
    with open_text_for_writing(path) as handle:
        for row in rows:
            record: dict[str, Any] = dict(zip(names, row, strict=True))
            handle.write(json.dumps(record, ensure_ascii=False) + "\n")
            written += 1
    return written


def _write_csv(
    path: Path, examples: Iterator[TrainingExample], delimiter: str, negatives: int | None
) -> int:
    written = 0
    with open_text_for_writing(path) as handle:
        for example in examples:
            if negatives is None:
                negatives = len(example.hard_negatives)
            if written == 0:
                handle.write(_csv_line(_names(negatives), delimiter))
            handle.write(_csv_line(_csv_cells(example, negatives, path), delimiter))
            written += 1
        if written == 0:
            handle.write(_csv_line(_names(negatives or 0), delimiter))
    return written


def _csv_cells(example: TrainingExample, negatives: int, path: Path) -> list[str]:
    positive, negative = _texts(example.positives), _texts(example.hard_negatives)
    if len(positive) != 1 or len(negative) > negatives:
        raise DataError(
            f"cannot be written: example {example.id!r} has {len(positive)} positives and "
            f"{len(negative)} negatives, expected 1 and at most {negatives} in this table; raise "
            "negatives, or write .jsonl or .parquet, which hold lists",
            path=path,
        )
    cells = [example.question, *positive, *negative]
    if any("\0" in cell for cell in cells):
        raise DataError(
            f"cannot be written: example {example.id!r} holds a zero byte, which no csv reader "
            "takes; write .jsonl or .parquet",
            path=path,
        )
    return cells + [""] * (negatives - len(negative))


def _csv_line(cells: Sequence[str], delimiter: str) -> str:
    return delimiter.join(_csv_cell(cell, delimiter) for cell in cells) + "\n"


def _csv_cell(text: str, delimiter: str) -> str:
    if any(mark in text for mark in (delimiter, '"', "\n", "\r")):
        return '"' + text.replace('"', '""') + '"'
    return text
