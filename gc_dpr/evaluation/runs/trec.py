"""TREC runs: ``question Q0 passage rank score tag``, one line per retrieved passage.

*Source:* the format of trec_eval.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from gc_dpr.artifacts import atomic_file
from gc_dpr.errors import DataError
from gc_dpr.evaluation.runs.records import Run

logger = logging.getLogger(__name__)

_NumberT = TypeVar("_NumberT", int, float)


def write_trec(path: str | Path, run: Run, *, tag: str) -> Path:
    """Write a TREC run: ``question Q0 passage rank score tag``, rank from 1, atomically.

    Scores are written so that they read back as the same float64. Note that trec_eval orders
    equal scores by passage id, descending, whatever the rank column says; `read_trec` keeps the
    order of the ranks.

    Returns:
        The absolute path.

    Raises:
        DataError: An id is empty or holds white space (the columns are separated by it), a
            passage occurs twice for a question, a score is not finite or a list is not in
            descending order (readers of the format sort by score).
        ValueError: ``tag`` is empty or holds white space.
    """
    if len(tag.split()) != 1 or tag != tag.strip():
        raise ValueError(f"tag={tag!r}: expected one word, as TREC columns are split at blanks")
    empty = [question_id for question_id, ranking in run.items() if not ranking]
    with atomic_file(path) as handle:
        for question_id, ranking in run.items():
            _check_trec_id(question_id, what="question id", path=path)
            _check_ranking(question_id, ranking, path=path)
            for rank, (passage_id, score) in enumerate(ranking, start=1):
                _check_trec_id(passage_id, what="passage id", path=path)
                handle.write(f"{question_id} Q0 {passage_id} {rank} {float(score)!r} {tag}\n")
    if empty:
        logger.warning(
            "%s: %d question(s) without any passage, such as %r, are not in the file, since the "
            "TREC format cannot express them",
            *(Path(path).absolute(), len(empty), empty[0]),
        )
    return Path(path).absolute()


def _check_trec_id(value: str, *, what: str, path: str | Path) -> None:
    if value.split() != [value]:
        raise DataError(
            f"{what} {value!r} is empty or holds white space, which separates the columns of a "
            "TREC run; rename it, or write DPR's JSON instead",
            path=path,
        )


def _check_ranking(
    question_id: str, ranking: Sequence[tuple[str, float]], *, path: str | Path
) -> None:
    seen: set[str] = set()
    previous = math.inf
    for passage_id, score in ranking:
        if passage_id in seen:
            raise DataError(f"question {question_id!r} has passage {passage_id!r} twice", path=path)
        if not math.isfinite(score):
            raise DataError(
                f"question {question_id!r}, passage {passage_id!r}: score {score} is not a finite "
                "number",
                path=path,
            )
        if score > previous:
            raise DataError(
                f"question {question_id!r}: score {score} of passage {passage_id!r} is higher than "
                f"the one before it ({previous}); expected the best passage first (turn distances "
                "into scores by changing their sign)",
                path=path,
            )
        seen.add(passage_id)
        previous = score


def read_trec(path: str | Path) -> Run:
    """Read a TREC run; each list is sorted by score, descending, then by the file's rank.

    Raises:
        DataError: Missing file, a line without six columns, a rank or score that is no number,
            a NaN, a passage that occurs twice for a question. Names file and line.
    """
    rows: dict[str, dict[str, tuple[float, int]]] = {}
    for line, text in _lines(path):
        columns = text.split()
        if not columns:
            continue
        if len(columns) != 6:
            raise DataError(
                f"found {len(columns)} columns, expected 6: question Q0 passage rank score tag",
                path=path,
                line=line,
            )
        question_id, _, passage_id, rank, score, _ = columns
        ranking = rows.setdefault(question_id, {})
        if passage_id in ranking:
            raise DataError(
                f"passage {passage_id!r} occurs again for question {question_id!r}; a run lists a "
                "passage once. Remove one of the lines",
                path=path,
                line=line,
            )
        ranking[passage_id] = (
            _number(score, float, what="score", path=path, line=line),
            _number(rank, int, what="rank", path=path, line=line),
        )
    return {
        question_id: [
            (passage_id, score)
            for passage_id, (score, _) in sorted(
                ranking.items(), key=lambda item: (-item[1][0], item[1][1])
            )
        ]
        for question_id, ranking in rows.items()
    }


def _lines(path: str | Path) -> Iterator[tuple[int, str]]:
    line = 0
    try:
        with Path(path).open("rb") as handle:
            for line, raw in enumerate(handle, start=1):
                yield line, raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except (FileNotFoundError, IsADirectoryError):
        raise DataError("no such file; expected a TREC run. Check the path", path=path) from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"not UTF-8 ({error.reason}); save it as UTF-8", path=path, line=line
        ) from None


def _number(text: str, kind: type[_NumberT], *, what: str, path: str | Path, line: int) -> _NumberT:
    try:
        value = kind(text)
        usable = math.isfinite(value)
    except ValueError:
        usable = False
    if not usable:
        raise DataError(f"{what} is {text!r}, expected a finite number", path=path, line=line)
    return value
