"""FlagEmbedding's training rows, one object a line: a query and lists of texts.

Keys read: ``query``, ``pos`` and ``neg`` (lists of strings), ``pos_id`` and ``neg_id`` (the texts'
ids) and, as additions of this toolkit that FlagEmbedding ignores, ``id`` and ``answers``. A text
has no title apart, so titles are empty. The negatives are hard negatives.

Checked and not kept, because a training example has no place for them: ``pos_scores`` and
``neg_scores`` (as many finite numbers as texts), ``prompt`` and ``type`` (strings). These and all
other keys are counted and logged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any

from gc_dpr.data.readers.fields import Fields, numbered_fields
from gc_dpr.data.readers.writing import open_text_for_writing
from gc_dpr.data.records import Passage, TrainingExample
from gc_dpr.errors import DataError

_ID_KEYS = ("id", "query_id", "qid")
_KEPT = frozenset({*_ID_KEYS, "query", "answers", "pos", "neg", "pos_id", "neg_id"})


def numbered_flag_embedding(path: Path) -> Iterator[tuple[int, TrainingExample]]:
    """Yield (1-based line on which the record begins, example) of one file, plain or compressed.

    ``query`` and ``pos`` (which may be empty) must be there; a missing or null ``neg`` is empty.
    Without an ``id``, ``query_id`` or ``qid`` the example's id is
    ``<file name>#<0-based position>``.

    Args:
        path: The file. One JSON list of the same objects is read too.

    Raises:
        DataError: Broken or cut JSON, a missing key, a value of the wrong type, or ids or scores
            that are not as many as their texts; names the file, the line and the key.

    Example:
        >>> import pathlib, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name, "train.jsonl")
        >>> _ = path.write_text('{"query": "who?", "pos": ["Ada."], "neg": ["Bob.", "Eve."]}')
        >>> [(line, example)] = numbered_flag_embedding(path)
        >>> line, example.id, len(example.hard_negatives)
        (1, 'train.jsonl#0', 2)
        >>> folder.cleanup()
    """
    for position, (line, record) in enumerate(numbered_fields(path)):
        yield line, _example(record, f"{path.name}#{position}")


def _example(record: Fields, default_id: str) -> TrainingExample:
    record.count_others(_KEPT)
    record.optional_string("prompt")
    record.optional_string("type")
    return TrainingExample(
        id=record.identity(*_ID_KEYS) or default_id,
        question=record.string("query"),
        answers=record.optional_strings("answers"),
        positives=_passages(record, "pos", record.strings("pos")),
        hard_negatives=_passages(record, "neg", record.optional_strings("neg")),
    )


def _passages(record: Fields, key: str, texts: Sequence[str]) -> tuple[Passage, ...]:
    _check_length(record, f"{key}_scores", record.optional_numbers(f"{key}_scores"), key, texts)
    ids = record.optional_identities(f"{key}_id")
    _check_length(record, f"{key}_id", ids, key, texts)
    return tuple(
        Passage(id=passage_id, title="", text=text)
        for passage_id, text in zip(ids or [""] * len(texts), texts, strict=True)
    )


def _check_length(
    record: Fields, key: str, values: Sized | None, texts_key: str, texts: Sequence[str]
) -> None:
    if values is not None and len(values) != len(texts):
        raise record.fault(
            f"{record.key_path(key)}: found {len(values)} values, expected {len(texts)}: one for "
            f"each text of {texts_key}"
        )


def write_flag_embedding(
    path: str | Path,
    examples: Iterable[TrainingExample],
    *,
    join_titles: bool = False,
    random_as_hard: bool = False,
) -> int:
    """Write training examples as FlagEmbedding rows.

    ``numbered_flag_embedding`` reads the same examples back, ids and answers included, unless one
    of the two options changed them.

    Args:
        path: The file, written whole or not at all; its name's end decides about compression.
        examples: What to write, one by one.
        join_titles: The format has no titles. False refuses a passage that has one; True writes
            title and text joined by one space.
        random_as_hard: The format has one kind of negatives. False refuses an example that has
            random negatives; True writes them behind the hard ones, so they are read back as
            hard negatives.

    Returns:
        The number of examples written.

    Raises:
        DataError: An example has what the format cannot hold and the option for it is false.
    """
    written = 0
    with open_text_for_writing(path) as handle:
        for example in examples:
            _check_holdable(path, example, join_titles=join_titles, random_as_hard=random_as_hard)
            handle.write(json.dumps(_row(example), ensure_ascii=False) + "\n")
            written += 1
    return written


def _check_holdable(
    path: str | Path, example: TrainingExample, *, join_titles: bool, random_as_hard: bool
) -> None:
    if example.random_negatives and not random_as_hard:
        raise DataError(
            f"example {example.id!r} has random negatives, for which FlagEmbedding rows have no "
            "place; write them as hard negatives with random_as_hard=True, or write DPR JSON",
            path=path,
        )
    passages = example.positives + example.hard_negatives + example.random_negatives
    titled = next((passage for passage in passages if passage.title), None)
    if titled is not None and not join_titles:
        raise DataError(
            f"a passage of example {example.id!r} has the title {titled.title!r:.40}, for which "
            "FlagEmbedding rows have no place; put it before the text with join_titles=True, or "
            "write DPR JSON",
            path=path,
        )


def _row(example: TrainingExample) -> dict[str, Any]:
    row: dict[str, Any] = {"id": example.id, "query": example.question}
    if example.answers:
        row["answers"] = list(example.answers)
    negatives = example.hard_negatives + example.random_negatives
    for key, passages in (("pos", example.positives), ("neg", negatives)):
        row[key] = [_joined(passage) for passage in passages]
        if any(passage.id for passage in passages):
            row[f"{key}_id"] = [passage.id for passage in passages]
    return row


def _joined(passage: Passage) -> str:
    return f"{passage.title} {passage.text}" if passage.title else passage.text
