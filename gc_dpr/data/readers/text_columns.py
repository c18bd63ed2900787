"""Training rows as tables of texts, as sentence-transformers takes them: pairs, triplets, n-tuples.

A row is (anchor, positive, negative_1, negative_2, …); the columns may have any names. CSV (commas)
and TSV have a header and csv's quoting; JSON Lines have one object a line, whose keys in the first
record are the columns; Parquet is read row group by row group. In JSON Lines and Parquet a cell
may be a list of texts. In CSV and TSV an empty cell of a negative is no negative, so that rows may
have fewer than the table has columns.
"""

from __future__ import annotations

import csv
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gc_dpr.data.readers.column_roles import (
    IGNORED_NAMES,
    LABEL_NAMES,
    ColumnNames,
    ColumnRoles,
    find_roles,
    row_example,
)
from gc_dpr.data.readers.compression import uncompressed_name
from gc_dpr.data.readers.csv_rows import CsvRows
from gc_dpr.data.readers.json_stream import iter_objects
from gc_dpr.data.readers.kinds import ID_NAMES
from gc_dpr.data.readers.parquet_rows import (
    PARQUET_MAGIC,
    check_types,
    has_parquet_magic,
    numbered_rows,
    open_parquet,
)
from gc_dpr.data.readers.paths import open_bytes
from gc_dpr.data.records import TrainingExample
from gc_dpr.errors import DataError

DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_ENDINGS = (".jsonl", ".json", ".ndjson")

_QUESTION_NAME = re.compile(
    r"(anchor|query|question|premise|title|(sentence|text|sent)([ _-]?(1|a))?)s?"
)
# Keys that other formats are known by; the first three of questions and corpora.
_OTHER_KEYS = ID_NAMES | {
    "answers",
    "contents",
    "question_id",
    "query_id",
    "qid",
    "positive_ctxs",
    "hard_negative_ctxs",
    "negative_ctxs",
    "ctxs",
    "positive_passages",
    "negative_passages",
    "pos",
    "neg",
}
_FIRST_KEY = re.compile(r'\{\s*"((?:[^"\\]|\\.)*)"\s*:\s*(?:\[\s*)?"')

_logger = logging.getLogger(__name__)


def ending_of(path: Path) -> str:
    """The end of a name that tells the format, such as ``".csv"`` for ``train.CSV.gz``."""
    return uncompressed_name(path).suffix.lower()


def numbered_text_columns(
    path: Path, *, columns: Mapping[str, ColumnNames] | None = None
) -> Iterator[tuple[int, TrainingExample]]:
    r"""Yield (line on which the row begins, example) of one table of texts.

    Args:
        path: A file whose name ends in ``.csv``, ``.tsv``, ``.jsonl`` (``.json``, ``.ndjson``) or
            ``.parquet``; of other names, JSON and Parquet are known by their beginning. The text
            formats may be packed.
        columns: Column names by role: ``question``, ``positive``, ``negatives``, ``title`` (of
            the positives), ``answers``, ``id``; columns that are not named are ignored. None: the
            order decides; ``dataset_name`` and ``prompt`` are ignored.

    Returns:
        A lazy iterator in file order; for Parquet the number is that of the row. An id is that of
        the id column, otherwise ``<file name>#<0-based position>``.

    Raises:
        DataError: A column is missing, named twice or of a type that holds no text; a cell is
            null, empty or not a text; a row does not fit the columns; the file is cut, damaged or
            not UTF-8. Names file, line (of Parquet: row) and column.
        ValueError: ``columns`` itself is wrong.

    Example:
        >>> import pathlib, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name, "train.csv")
        >>> _ = path.write_text('anchor,positive\nwho?,"Ada, Countess"\n')
        >>> [(line, example)] = numbered_text_columns(path)
        >>> line, example.id, example.positives[0].text
        (2, 'train.csv#0', 'Ada, Countess')
        >>> folder.cleanup()
    """
    for position, (line, row, roles) in enumerate(_rows(path, columns)):
        yield (
            line,
            row_example(row, roles, path, line=line, default_id=f"{path.name}#{position}"),
        )


_Rows = Iterator[tuple[int, dict[str, Any], ColumnRoles]]


def _rows(path: Path, columns: Mapping[str, ColumnNames] | None) -> _Rows:
    ending = ending_of(path)
    if ending in DELIMITERS:
        return _csv_rows(path, columns, delimiter=DELIMITERS[ending])
    if ending in JSON_ENDINGS:
        return _json_rows(path, columns)
    if path.suffix.lower() == ".parquet" or has_parquet_magic(path):
        return _parquet_rows(path, columns)
    with open_bytes(path) as handle:
        start = handle.peek().lstrip()
    if start.startswith((b"{", b"[")):
        return _json_rows(path, columns)
    raise DataError(
        "neither the end of the name nor the beginning tells the format; expected .csv, .tsv, "
        ".jsonl (plain, .gz or .zst) or .parquet",
        path=path,
    )


def _csv_rows(path: Path, columns: Mapping[str, ColumnNames] | None, *, delimiter: str) -> _Rows:
    with open_bytes(path) as handle:
        rows = CsvRows(handle, path, delimiter=delimiter)
        roles = find_roles(rows.names, path, columns=columns, line=rows.header_line)
        may_lack = (*roles.negatives, *roles.answers)
        lacking = 0
        for line, cells in rows:
            row: dict[str, Any] = dict(zip(rows.names, cells, strict=True))
            empty = [name for name in may_lack if not row[name].strip()]
            row.update((name, []) for name in empty)
            lacking += bool(empty)
            yield line, row, roles
    if lacking:
        _logger.info("%s: %d rows have empty cells for negatives or answers", path, lacking)


def _json_rows(path: Path, columns: Mapping[str, ColumnNames] | None) -> _Rows:
    names: list[str] = []
    with open_bytes(path) as handle:
        for line, row in iter_objects(handle, path):
            if not names:
                names = list(row)
                roles = find_roles(names, path, columns=columns, line=line)
            if row.keys() != set(names):
                raise _other_keys(names, row, path, line)
            yield line, row, roles


def _other_keys(names: Sequence[str], row: dict[str, Any], path: Path, line: int) -> DataError:
    missing = [name for name in names if name not in row]
    extra = [name for name in row if name not in names]
    found = [
        *([f"{', '.join(missing)} missing"] if missing else []),
        *([f"{', '.join(extra)} added"] if extra else []),
    ]
    return DataError(
        f"the keys differ from those of the first record: {'; '.join(found)}; expected the same "
        f"keys in every record ({', '.join(names)})",
        path=path,
        line=line,
    )


def _parquet_rows(path: Path, columns: Mapping[str, ColumnNames] | None) -> _Rows:
    with open_parquet(path) as file:
        schema = file.schema_arrow
        roles = find_roles(schema.names, path, columns=columns)
        ids = () if roles.id is None else (roles.id,)
        check_types(schema, roles.used, path, whole_numbers=ids)
        for row_number, row in numbered_rows(file, roles.used, path):
            yield row_number, row, roles


def looks_like_text_columns(path: Path, head: bytes) -> bool:
    r"""Whether a file's name and beginning are those of a table of texts to train on.

    Args:
        path: The file; of Parquet the schema is read.
        head: Its first bytes, decompressed; a few KiB are enough.

    Returns:
        True for CSV, TSV and Parquet with at least two columns whose first is named like a
        question (anchor, query, question, sentence1, text, …) and for JSON Lines whose first
        record holds texts and lists of texts only; false when a column belongs to another format
        (``positive_ctxs``, ``positive_passages``, ``pos``, ``answers``, ids, …). A damaged Parquet
        file counts as one, so that the reader says what is wrong with it.

    Example:
        >>> looks_like_text_columns(Path("train.csv"), b"query,answer\\nwho?,Ada\n")
        True
        >>> looks_like_text_columns(Path("questions.csv"), b"question,answers\n")
        False
    """
    ending = ending_of(path)
    if path.suffix.lower() == ".parquet" or head.startswith(PARQUET_MAGIC):
        try:
            with open_parquet(path) as file:
                return _names_fit(file.schema_arrow.names)
        except DataError:
            return True
    text = head.decode("utf-8", errors="ignore").removeprefix("\ufeff").lstrip()
    if ending in DELIMITERS:
        return _names_fit(_header(text, DELIMITERS[ending]))
    return text.startswith("{") and _record_fits(text)


def _header(text: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader(text.splitlines()[:1], delimiter=delimiter), [])
    except csv.Error:
        return []


def _names_fit(names: Iterable[str]) -> bool:
    texts = [name.strip().lower() for name in names]
    texts = [name for name in texts if name not in IGNORED_NAMES]
    return (
        len(texts) >= 2
        and _QUESTION_NAME.fullmatch(texts[0]) is not None
        and _OTHER_KEYS.isdisjoint(texts)
    )


def _record_fits(text: str) -> bool:
    try:
        record, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):  # longer than what was read, or broken
        first = _FIRST_KEY.match(text)
        return (
            first is not None
            and _QUESTION_NAME.fullmatch(first[1].lower()) is not None
            and not any(f'"{key}"' in text for key in _OTHER_KEYS)
        )
    kept = {
        key: cell for key, cell in record.items() if key.lower() not in IGNORED_NAMES | LABEL_NAMES
    }
    return (
        len(kept) >= 2
        and _OTHER_KEYS.isdisjoint(key.lower() for key in kept)
        and all(
            type(item) is str
            for cell in kept.values()
            for item in (cell if type(cell) is list else (cell,))
        )
    )
