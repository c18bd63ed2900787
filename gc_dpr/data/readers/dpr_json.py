"""DPR's two JSON formats: training examples, and retrieval results read as training examples.

One list of objects, or one object a line; the first character tells which.

Keys read: ``question``, ``answers``, ``positive_ctxs``, ``hard_negative_ctxs``, ``negative_ctxs``
(DPR's name for random negatives) and, of a passage, ``title``, ``text`` and its id. Everything
else (scores, data set names) is dropped while reading. Differences from DPR and GC-DPR, on
purpose: a missing list is an empty one, and no character of a question is replaced.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gc_dpr.data.readers import kinds
from gc_dpr.data.readers.compression import uncompressed_name
from gc_dpr.data.readers.json_stream import iter_objects
from gc_dpr.data.readers.paths import PathLike, open_bytes
from gc_dpr.data.readers.writing import open_text_for_writing
from gc_dpr.data.records import Passage, TrainingExample
from gc_dpr.errors import DataError

_ID_KEYS = ("id", "question_id", "qid", "query_id")
_PASSAGE_ID_KEYS = ("passage_id", "psg_id", "id")
_LINES_SUFFIXES = (".jsonl", ".ndjson")
_ACCEPTED = frozenset({kinds.TRAINING_JSON, kinds.QUESTIONS_JSONL, kinds.OTHER_JSON})


class _Place(NamedTuple):
    path: Path
    line: int


def numbered_dpr_json(path: Path) -> Iterator[tuple[int, TrainingExample]]:
    """Yield (line on which the record begins, example) of one DPR training JSON or JSONL file.

    Examples without positives are among them: the training set counts and drops those. An id is
    the record's own ``id``, ``question_id``, ``qid`` or ``query_id``, otherwise
    ``<file name>#<0-based position in the file>``.

    Raises:
        DataError: Broken or cut JSON, a value of the wrong type (names the file, the record's
            line and the key), or a file of another kind.
    """
    with open_bytes(path) as handle:
        head = handle.peek()
        # Anything in brackets goes on to the parser, which says better what is wrong with it.
        json_like = head.lstrip().startswith((b"[", b"{"))
        kinds.check_kind(
            path,
            head,
            expected="DPR training JSON (a list of objects, or one object a line)",
            accepted=_ACCEPTED | {kinds.UNKNOWN} if json_like else _ACCEPTED,
        )
        for position, (line, record) in enumerate(iter_objects(handle, path)):
            yield line, _example(record, _Place(path, line), f"{path.name}#{position}")


def numbered_retrieval_results(path: Path) -> Iterator[tuple[int, TrainingExample]]:
    """Yield (line, example) of DPR retrieval results: a question and its ``ctxs`` in rank order.

    Passages with ``has_answer`` true (or Contriever's ``hasanswer``) become positives, the others
    hard negatives, both in rank order. Ids are as in ``numbered_dpr_json``; scores, which DPR
    writes as strings, are not read. One JSON list or one object a line.

    Raises:
        DataError: As ``numbered_dpr_json``; also when ``ctxs`` or ``has_answer`` is missing.

    Example:
        >>> import pathlib, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name, "results.json")
        >>> _ = path.write_text(
        ...     '[{"question": "who?", "answers": ["Ada"], "ctxs": ['
        ...     '{"id": "3", "text": "Bob.", "score": "9.5", "has_answer": false},'
        ...     '{"id": "1", "text": "Ada.", "score": "9.1", "has_answer": true}]}]'
        ... )
        >>> [(line, example)] = numbered_retrieval_results(path)
        >>> [passage.id for passage in example.positives + example.hard_negatives]
        ['1', '3']
        >>> folder.cleanup()
    """
    with open_bytes(path) as handle:
        for position, (line, record) in enumerate(iter_objects(handle, path)):
            place = _Place(path, line)
            if record.get("ctxs") is None:
                raise _wrong(place, "ctxs", record, "ctxs", "a list of passages")
            passages = _passages(record, "ctxs", place)
            answered = [_has_answer(item, i, place) for i, item in enumerate(record["ctxs"])]
            ranked = list(zip(passages, answered, strict=True))
            yield (
                line,
                TrainingExample(
                    id=_first_id(record, _ID_KEYS, place, "") or f"{path.name}#{position}",
                    question=_question(record, place),
                    answers=_answers(record, place),
                    positives=tuple(passage for passage, has_answer in ranked if has_answer),
                    hard_negatives=tuple(
                        passage for passage, has_answer in ranked if not has_answer
                    ),
                ),
            )


def write_dpr_json(path: PathLike, examples: Iterable[TrainingExample]) -> int:
    """Write examples as DPR training JSON, one by one; ``numbered_dpr_json`` reads them back.

    Args:
        path: Where to. A JSON list with one example a line, or JSON Lines when the name ends in
            ``.jsonl`` or ``.ndjson``; packed when ``.gz`` or ``.zst`` follows. Written whole or
            not at all.
        examples: What to write. Every field is kept, ids included; a passage or example without
            an id gets none (so reading gives such an example one from its new file).

    Returns:
        The number of examples written.

    Raises:
        DataError: The file cannot be written, or a text holds half of a character.
    """
    name = uncompressed_name(Path(path))
    start, between, end = (
        ("", "\n", "\n") if name.suffix.lower() in _LINES_SUFFIXES else ("[\n", ",\n", "\n]\n")
    )
    written = 0
    with open_text_for_writing(path) as handle:
        handle.write(start)
        for example in examples:
            handle.write(between if written else "")
            handle.write(json.dumps(_record(example), ensure_ascii=False))
            written += 1
        handle.write(end if written or start else "")
    return written


def _record(example: TrainingExample) -> dict[str, Any]:
    return {
        **({"id": example.id} if example.id else {}),
        "question": example.question,
        "answers": list(example.answers),
        "positive_ctxs": [_context(passage) for passage in example.positives],
        "negative_ctxs": [_context(passage) for passage in example.random_negatives],
        "hard_negative_ctxs": [_context(passage) for passage in example.hard_negatives],
    }


def _context(passage: Passage) -> dict[str, str]:
    named = {"passage_id": passage.id} if passage.id else {}
    return {"title": passage.title, "text": passage.text, **named}


def _example(record: dict[str, Any], place: _Place, default_id: str) -> TrainingExample:
    if "ctxs" in record and "positive_ctxs" not in record:
        raise DataError(
            "ctxs: found a retrieval result among training examples, expected positive_ctxs; "
            "name retrieval results in a file of their own",
            path=place.path,
            line=place.line,
        )
    return TrainingExample(
        id=_first_id(record, _ID_KEYS, place, "") or default_id,
        question=_question(record, place),
        answers=_answers(record, place),
        positives=_passages(record, "positive_ctxs", place),
        hard_negatives=_passages(record, "hard_negative_ctxs", place),
        random_negatives=_passages(record, "negative_ctxs", place),
    )


def _question(record: dict[str, Any], place: _Place) -> str:
    question = record.get("question")
    if type(question) is not str:
        raise _wrong(place, "question", record, "question", "a string")
    return question


def _answers(record: dict[str, Any], place: _Place) -> tuple[str, ...]:
    answers = record.get("answers")
    if answers is None:
        return ()
    if type(answers) is not list:
        raise _wrong(place, "answers", record, "answers", "a list of strings")
    for i, answer in enumerate(answers):
        if type(answer) is not str:
            raise _wrong(place, f"answers[{i}]", {"": answer}, "", "a string")
    return tuple(answers)


def _passages(record: dict[str, Any], key: str, place: _Place) -> tuple[Passage, ...]:
    items = record.get(key)
    if items is None:
        return ()
    if type(items) is not list:
        raise _wrong(place, key, record, key, "a list of passages")
    return tuple(_passage(item, key, i, place) for i, item in enumerate(items))


def _passage(item: Any, key: str, i: int, place: _Place) -> Passage:
    if type(item) is not dict:
        raise _wrong(place, f"{key}[{i}]", {"": item}, "", "an object with title and text")
    text, title = item.get("text"), item.get("title")
    if type(text) is not str:
        raise _wrong(place, f"{key}[{i}].text", item, "text", "a string")
    if title is not None and type(title) is not str:
        raise _wrong(place, f"{key}[{i}].title", item, "title", "a string or null")
    passage_id = _first_id(item, _PASSAGE_ID_KEYS, place, f"{key}[{i}].")
    return Passage(id=passage_id, title=title or "", text=text)


def _has_answer(item: dict[str, Any], i: int, place: _Place) -> bool:
    key = "hasanswer" if "hasanswer" in item and "has_answer" not in item else "has_answer"
    if type(item.get(key)) is not bool:
        raise _wrong(
            place,
            f"ctxs[{i}].{key}",
            item,
            key,
            "true or false (which passages are positives is read from it)",
        )
    return bool(item[key])


def _first_id(item: dict[str, Any], keys: tuple[str, ...], place: _Place, prefix: str) -> str:
    """The first of several id keys that is present and not null, as a string; "" if none is."""
    for key in keys:
        value = item.get(key)
        if value is None:
            continue
        if type(value) is str:
            return value
        if type(value) is int:
            return str(value)
        # Tables that were exported with missing ids turn whole numbers into 12.0.
        if type(value) is float and value.is_integer():
            return str(int(value))
        raise _wrong(place, f"{prefix}{key}", item, key, "a string or a whole number")
    return ""


def _wrong(
    place: _Place, key_path: str, holder: dict[str, Any], key: str, expected: str
) -> DataError:
    if key not in holder:
        known = ", ".join(list(holder)[:6]) or "nothing"
        found = f"it is missing (the object has: {known})"
    else:
        found = f"found {holder[key]!r:.40} ({type(holder[key]).__name__})"
    return DataError(f"{key_path}: {found}, expected {expected}", path=place.path, line=place.line)
