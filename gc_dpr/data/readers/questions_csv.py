"""Questions: DPR's QA csv (question, tab, Python list of answers) and JSON Lines.

The answers are read as a literal, never evaluated. Differences from DPR and GC-DPR, on purpose:
anything but a list or tuple of strings is refused, blank lines are skipped and counted, a file of
questions alone (one column) is accepted, and no character of a question is replaced.
"""

from __future__ import annotations

import ast
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gc_dpr.data.readers import kinds
from gc_dpr.data.readers.json_stream import refuse_lone_surrogates
from gc_dpr.data.readers.paths import Paths, expand_paths, numbered_lines, open_bytes
from gc_dpr.data.readers.tab_rows import is_blank, read_rows
from gc_dpr.data.records import Question
from gc_dpr.errors import DataError

_logger = logging.getLogger(__name__)

_EXPECTED = "a questions file: a question, a tab and a Python list of answers per line, or JSONL"
_ADVICE = 'Double the quotes inside a quoted cell ("") or remove the one at its start'
# The parser's memory grows with the literal; no real answer list comes near.
_MAX_LITERAL = 1_000_000
_LITERAL_FAULTS = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)

# One row: its line, its own id (None: the row number), question and answers (None: no column).
_Row = tuple[int, str | None, str, tuple[str, ...] | None]


def read_questions(paths: Paths) -> Iterator[Question]:
    r"""Read questions one by one from QA csv or JSONL files, plain or compressed.

    Args:
        paths: A file, a glob or a list of them; see ``expand_paths``. JSONL objects have
            ``question`` and optionally ``answers`` (list of strings) and ``id``.

    Returns:
        A lazy iterator in file order. The id is the record's own, otherwise the 0-based number of
        the question, counted through all files. Answers are empty when the file has no such column.

    Raises:
        DataError: At once: a file is missing. While reading: answers are not a list of strings,
            rows with and without answers are mixed, an id occurs twice, a quote goes wrong, or the
            file is of another kind.

    Example:
        >>> import pathlib, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name, "questions.csv")
        >>> _ = path.write_text("who wrote it\t['Ada', \"O'Hara\"]\n")
        >>> list(read_questions(path))
        [Question(id='0', text='who wrote it', answers=('Ada', "O'Hara"))]
        >>> folder.cleanup()
    """
    return _questions(expand_paths(paths))


def _questions(files: list[Path]) -> Iterator[Question]:
    places: dict[str, tuple[Path, int]] = {}
    for path in files:
        without_answers = 0
        for line, own_id, text, answers in _rows(path):
            question_id = str(len(places)) if own_id is None else own_id
            if question_id in places:
                first_path, first_line = places[question_id]
                raise DataError(
                    f"the question id {question_id!r} occurs a second time (first at "
                    f"{first_path}:{first_line}); ids must be unique over all files "
                    "(a question without an id gets its 0-based row number)",
                    path=path,
                    line=line,
                )
            places[question_id] = (path, line)
            without_answers += answers is None
            yield Question(id=question_id, text=text, answers=answers or ())
        if without_answers:
            _logger.warning(
                "%s: %d questions come without answers: they can be retrieved for, not evaluated",
                path,
                without_answers,
            )


def _rows(path: Path) -> Iterator[_Row]:
    accepted = frozenset({kinds.QUESTIONS_CSV, kinds.QUESTIONS_JSONL, kinds.UNKNOWN})
    with open_bytes(path) as handle:
        kind = kinds.check_kind(path, handle.peek(), expected=_EXPECTED, accepted=accepted)
        lines = numbered_lines(handle, path)
        yield from (_jsonl_rows if kind == kinds.QUESTIONS_JSONL else _csv_rows)(lines, path)


def _csv_rows(lines: Iterator[tuple[int, str]], path: Path) -> Iterator[_Row]:
    blank = extra = 0
    width: int | None = None  # 1: questions alone, 2: with answers; the first row decides
    for line, cells in read_rows(lines, path, advice=_ADVICE):
        if is_blank(cells):
            blank += 1
            continue
        _refuse_swallowed_row(cells, path, line)
        if width is None:
            width = min(len(cells), 2)
            if width == 2 and cells[1].strip() == "answers":
                continue
        if min(len(cells), 2) != width:
            raise DataError(
                f"found {len(cells)} tab-separated column(s), but the rows before have "
                f"{'a question only' if width == 1 else 'a question and its answers'}; "
                "write [] where a question has no answers",
                path=path,
                line=line,
            )
        extra += len(cells) > 2
        answers = None if width == 1 else _parse_answers(cells[1], path, line)
        yield line, None, cells[0], answers
    if blank:
        _logger.warning("%s: %d blank lines skipped", path, blank)
    if extra:
        _logger.warning("%s: columns after the second ignored in %d rows", path, extra)


def _refuse_swallowed_row(cells: list[str], path: Path, line: int) -> None:
    """A question that runs over lines and holds a tab has eaten the row after it."""
    if "\n" in cells[0] and "\t" in cells[0]:
        raise DataError(
            'a double quote (") goes wrong in the row that begins here: the quoted question runs '
            f"on over the following rows. {_ADVICE}",
            path=path,
            line=line,
        )


def _parse_answers(literal: str, path: Path, line: int) -> tuple[str, ...]:
    """Read a list or tuple of strings written as a Python literal."""
    value = _literal(literal, path, line)
    if not isinstance(value, list | tuple):
        raise _answers_error(f"the answers are a {type(value).__name__}", literal, path, line)
    return _strings(value, literal, path, line)


def _literal(literal: str, path: Path, line: int) -> Any:
    if len(literal) > _MAX_LITERAL:
        raise DataError(
            f"the answers take {len(literal):,} characters; at most {_MAX_LITERAL:,} are read",
            path=path,
            line=line,
        )
    try:
        if "\\" not in literal:
            return ast.literal_eval(literal.strip())
        with warnings.catch_warnings():
            # '\d' in a pattern is a legal string that Python's compiler warns of.
            warnings.simplefilter("ignore")
            return ast.literal_eval(literal.strip())
    except _LITERAL_FAULTS:
        raise _answers_error("the answers are no Python literal", literal, path, line) from None


def _strings(
    values: list[Any] | tuple[Any, ...], source: str, path: Path, line: int
) -> tuple[str, ...]:
    for value in values:
        if not isinstance(value, str):
            raise _answers_error(
                f"the answers hold a {type(value).__name__} ({value!r:.40}), put it in quotes",
                source,
                path,
                line,
            )
    return tuple(values)


def _answers_error(problem: str, source: str, path: Path, line: int) -> DataError:
    shown = source if len(source) <= 60 else source[:57] + "..."
    return DataError(
        f"{problem}: found {shown!r}, expected a list of strings such as ['Ada', \"O'Hara\"]",
        path=path,
        line=line,
    )


def _jsonl_rows(lines: Iterator[tuple[int, str]], path: Path) -> Iterator[_Row]:
    blank = 0
    for line, text in lines:
        if not text.strip():
            blank += 1
            continue
        try:
            record = json.loads(text.rstrip())
        except json.JSONDecodeError as error:
            raise DataError(
                f"broken JSON at column {error.colno}: {error.msg}; expected one object a line",
                path=path,
                line=line,
            ) from None
        except (RecursionError, ValueError) as limit:  # nesting, or digits of a number
            raise DataError(f"JSON that cannot be read: {limit}", path=path, line=line) from None
        refuse_lone_surrogates(record, text, path, line)
        yield line, *_jsonl_fields(record, path, line)
    if blank:
        _logger.warning("%s: %d blank lines skipped", path, blank)


def _jsonl_fields(
    record: Any, path: Path, line: int
) -> tuple[str | None, str, tuple[str, ...] | None]:
    if not isinstance(record, dict) or not isinstance(record.get("question"), str):
        raise DataError(
            f"found {json.dumps(record, ensure_ascii=False)[:60]}, expected an object with the "
            "string key question",
            path=path,
            line=line,
        )
    own_id = record.get("id")
    if own_id is not None and (isinstance(own_id, bool) or not isinstance(own_id, str | int)):
        raise DataError(
            f"id: found {own_id!r}, expected a string or a whole number", path=path, line=line
        )
    answers = record.get("answers")
    if answers is not None and not isinstance(answers, list):
        raise _answers_error("answers is not a list", repr(answers), path, line)
    parsed = None if answers is None else _strings(answers, repr(answers), path, line)
    return (None if own_id is None else str(own_id)), record["question"], parsed
