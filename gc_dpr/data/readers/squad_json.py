"""SQuAD 1.1 and 2.0: one JSON object that holds articles, their paragraphs and the questions.

Each question becomes one example in file order; its positive is the paragraph it was asked about.
Titles are kept as they are written, underscores included. Not read: ``answer_start`` and
``version``; other keys (``plausible_answers`` of SQuAD 2.0 among them) are counted and logged.

The file is one object, so it is read whole before the first example; the published files have at
most 45 MB. There is no writer: SQuAD needs the place of every answer in its paragraph and the
grouping by article, neither of which training examples have.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gc_dpr.data.readers.fields import Fields, numbered_fields
from gc_dpr.data.records import Passage, TrainingExample
from gc_dpr.errors import DataError

_TOP_KEYS = frozenset({"version", "data"})
_ARTICLE_KEYS = frozenset({"title", "paragraphs"})
_PARAGRAPH_KEYS = frozenset({"context", "qas"})
_QUESTION_KEYS = frozenset({"id", "question", "answers", "is_impossible"})
_ANSWER_KEYS = frozenset({"text", "answer_start"})


def numbered_squad(path: Path) -> Iterator[tuple[int, TrainingExample]]:
    """Yield (line, example) for every question of one SQuAD file, plain or compressed.

    The line is the one on which the whole object begins; messages name the exact place by the key
    (``data[3].paragraphs[0].qas[7].question``). A question that is impossible, or whose list of
    answers is empty, gives an example without positives and answers. Answers are distinct, in the
    file's order. Without an ``id`` the example's id is ``<file name>#<0-based position>``.

    Args:
        path: The file.

    Raises:
        DataError: Broken or cut JSON, more than one object, a missing key, a value of the wrong
            type, or an impossible question with answers; names the file, the line and the key.

    Example:
        >>> import json, pathlib, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name, "squad.json")
        >>> question = {"id": "q", "question": "who?", "answers": [{"text": "Ada"}]}
        >>> paragraph = {"context": "Ada did.", "qas": [question]}
        >>> article = {"title": "Ada_Lovelace", "paragraphs": [paragraph]}
        >>> _ = path.write_text(json.dumps({"version": "1.1", "data": [article]}))
        >>> [(_, example)] = numbered_squad(path)
        >>> example.positives[0].title, example.answers
        ('Ada_Lovelace', ('Ada',))
        >>> folder.cleanup()
    """
    records = numbered_fields(path)
    first = next(records, None)
    if first is None:
        raise DataError("no object is in the file, expected SQuAD's with the key data", path=path)
    line, top = first
    top.count_others(_TOP_KEYS)
    for position, (question, passage) in enumerate(_questions(top)):
        yield line, _example(question, passage, f"{path.name}#{position}")
    for _, further in records:
        raise further.fault(
            "another object follows the first, expected one object with the key data"
        )


def _questions(top: Fields) -> Iterator[tuple[Fields, Passage]]:
    """Each question with the paragraph it was asked about."""
    for article in top.objects("data", "an object with title and paragraphs"):
        article.count_others(_ARTICLE_KEYS)
        title = article.optional_string("title")
        for paragraph in article.objects("paragraphs", "an object with context and qas"):
            paragraph.count_others(_PARAGRAPH_KEYS)
            passage = Passage(id="", title=title, text=paragraph.string("context"))
            for question in paragraph.objects("qas", "an object with question and answers"):
                question.count_others(_QUESTION_KEYS)
                yield question, passage


def _example(question: Fields, passage: Passage, default_id: str) -> TrainingExample:
    impossible = question.optional_flag("is_impossible")
    items = question.optional_objects if impossible else question.objects
    # A dict keeps the order and drops the repeats: several people gave the same answer.
    answers = tuple(dict.fromkeys(map(_answer, items("answers", "an object with text"))))
    if impossible and answers:
        raise question.fault(
            f"{question.key_path('is_impossible')}: found true and {len(answers)} answers, "
            "expected an impossible question to have none"
        )
    return TrainingExample(
        id=question.identity("id") or default_id,
        question=question.string("question"),
        answers=answers,
        positives=(passage,) if answers else (),
    )


def _answer(item: Fields) -> str:
    item.count_others(_ANSWER_KEYS)
    return item.string("text")
