"""DPR training JSON: one list of objects, or one object a line; the first character tells which.

Keys read: ``question``, ``answers``, ``positive_ctxs``, ``hard_negative_ctxs``, ``negative_ctxs``
(DPR's name for random negatives) and, of a passage, ``title``, ``text`` and its id. Everything
else (scores, data set names) is dropped while reading. Differences from DPR and GC-DPR, on
purpose: a missing list is an empty one, and no character of a question is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gc_dpr.data.readers import kinds
from gc_dpr.data.readers.json_stream import iter_objects
from gc_dpr.data.readers.paths import Paths, expand_paths, open_bytes
from gc_dpr.data.records import Passage, TrainingExample
from gc_dpr.errors import DataError

_ID_KEYS = ("id", "question_id", "qid", "query_id")
_PASSAGE_ID_KEYS = ("passage_id", "psg_id", "id")
_ACCEPTED = frozenset({kinds.TRAINING_JSON, kinds.QUESTIONS_JSONL, kinds.OTHER_JSON})


class _Place(NamedTuple):
    path: Path
    line: int


def read_training_examples(paths: Paths) -> Iterator[TrainingExample]:
    """Read training examples one by one from DPR JSON or JSONL files, plain or gzip-compressed.

    Args:
        paths: A file, a glob or a list of them; see ``expand_paths``.

    Returns:
        A lazy iterator in file order. Examples without positives are among them: the training
        set counts and drops those. An id is the record's own ``id``, ``question_id``, ``qid`` or
        ``query_id``, otherwise ``<file name>#<0-based position in the file>``.

    Raises:
        DataError: At once: a file is missing. While reading: broken or cut JSON, a value of the
            wrong type (names the file, the record's line and the key), or a file of another kind.

    Example:
        >>> import pathlib, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name, "train.json")
        >>> _ = path.write_text('[{"question": "who?", "positive_ctxs": [{"text": "Ada."}]}]')
        >>> [example] = read_training_examples(path)
        >>> example.id, example.positives[0].text
        ('train.json#0', 'Ada.')
        >>> folder.cleanup()
    """
    files = expand_paths(paths)
    return (example for path in files for _, example in numbered_training_examples(path))


def numbered_training_examples(path: Path) -> Iterator[tuple[int, TrainingExample]]:
    """Yield (line on which the record begins, example) of one file."""
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


def _example(record: dict[str, Any], place: _Place, default_id: str) -> TrainingExample:
    question = record.get("question")
    if type(question) is not str:
        raise _wrong(place, "question", record, "question", "a string")
    return TrainingExample(
        id=_first_id(record, _ID_KEYS, place, "") or default_id,
        question=question,
        answers=_answers(record, place),
        positives=_passages(record, "positive_ctxs", place),
        hard_negatives=_passages(record, "hard_negative_ctxs", place),
        random_negatives=_passages(record, "negative_ctxs", place),
    )


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
