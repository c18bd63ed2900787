"""DPR's result file: a JSON list with every question and its retrieved passages, texts included.

*Source:* the output of DPR's ``dense_retriever.py``, which its reader takes as input.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gc_dpr.artifacts import atomic_file
from gc_dpr.data.records import Passage, Question
from gc_dpr.errors import DataError
from gc_dpr.evaluation.runs.records import ResultEntry, RetrievedPassage, Run

logger = logging.getLogger(__name__)


def write_dpr_json(
    path: str | Path,
    run: Run,
    questions: Sequence[Question],
    passages: Mapping[str, Passage],
    *,
    has_answer: Mapping[str, Sequence[bool]] | None = None,
) -> Path:
    """Write a result file as DPR's ``dense_retriever.py`` does, one question at a time, atomically.

    A JSON list in the order of ``questions``: ``question``, ``answers`` and ``ctxs`` (``id``,
    ``title``, ``text``, ``score`` as a string, ``has_answer``), indented by 4, non-ASCII escaped,
    final newline. DPR knows questions by position only; a question whose id is not its 0-based
    position also gets a key ``id``, which DPR's consumers ignore and `read_dpr_json` reads.

    Args:
        path: The file.
        run: The retrieved passages; a question without an entry gets an empty list.
        questions: All questions, in the order of the file.
        passages: At least the passages of the run, by id.
        has_answer: For each question id, one flag per retrieved passage; None leaves the key out.

    Returns:
        The absolute path.

    Raises:
        DataError: A passage or a question of the run is unknown, or question ids repeat.
        ValueError: The flags of a question are not as many as its passages.
    """
    _check_questions(run, questions, path=path)
    with atomic_file(path) as handle:
        for position, question in enumerate(questions):
            flags = None if has_answer is None else has_answer.get(question.id, ())
            entry: dict[str, Any] = {} if question.id == str(position) else {"id": question.id}
            entry["question"] = question.text
            entry["answers"] = list(question.answers)
            entry["ctxs"] = _contexts(question.id, run.get(question.id, []), passages, flags, path)
            # A line break within a text is escaped, so every real one may be indented.
            text = json.dumps(entry, indent=4).replace("\n", "\n    ")
            handle.write(("[\n    " if position == 0 else ",\n    ") + text)
        handle.write("\n]\n" if questions else "[]\n")
    return Path(path).absolute()


def _check_questions(run: Run, questions: Sequence[Question], *, path: str | Path) -> None:
    ids = {question.id for question in questions}
    if len(ids) < len(questions):
        raise DataError(f"{len(questions) - len(ids)} question id(s) repeat", path=path)
    unknown = [question_id for question_id in run if question_id not in ids]
    if unknown:
        raise DataError(
            f"{len(unknown)} question(s) of the run, such as {unknown[0]!r}, are not among the "
            "questions; does the run belong to another questions file?",
            path=path,
        )
    missing = len(questions) - len(run)
    if missing:
        logger.warning(
            "%s: %d of %d questions are not in the run and get no passages",
            *(Path(path).absolute(), missing, len(questions)),
        )


def _contexts(
    question_id: str,
    ranking: Sequence[tuple[str, float]],
    passages: Mapping[str, Passage],
    flags: Sequence[bool] | None,
    path: str | Path,
) -> list[dict[str, Any]]:
    if flags is not None and len(flags) != len(ranking):
        raise ValueError(
            f"has_answer[{question_id!r}] holds {len(flags)} flags for {len(ranking)} passages"
        )
    contexts = []
    for rank, (passage_id, score) in enumerate(ranking):
        passage = passages.get(passage_id)
        if passage is None:
            raise DataError(
                f"passage {passage_id!r} of question {question_id!r} is not in the corpus; is the "
                "run from another corpus?",
                path=path,
            )
        context: dict[str, Any] = {
            "id": passage_id,
            "title": passage.title,
            "text": passage.text,
            "score": _score_text(score),
        }
        if flags is not None:
            context["has_answer"] = bool(flags[rank])
        contexts.append(context)
    return contexts


def _score_text(score: float) -> str:
    """As DPR prints a float32; a score that is no float32 value keeps all its digits."""
    with np.errstate(over="ignore"):
        single = np.float32(score)
    return str(single) if float(single) == score else repr(float(score))


def read_dpr_json(path: str | Path) -> list[ResultEntry]:
    """Read a DPR result file.

    ``question`` and ``ctxs`` must be there, and the ``id`` of each passage; everything else may
    be missing. A question without ``id`` gets its 0-based position.

    Raises:
        DataError: Missing file, no JSON list, a wrong type, a score that is no finite number, a
            repeated question, or a passage that occurs twice for a question. Names the place as
            ``[3].ctxs[0].score``.
    """
    entries: list[ResultEntry] = []
    seen: set[str] = set()
    for position, item in enumerate(_read_list(path)):
        entry = _Fields(item, f"[{position}]", path)
        question_id = entry.identity("id", default=str(position))
        if question_id in seen:
            raise entry.fault(f"question id {question_id!r} occurs twice")
        seen.add(question_id)
        question = Question(question_id, entry.text("question"), entry.strings("answers"))
        entries.append(ResultEntry(question, list(_retrieved(entry))))
    return entries


def _read_list(path: str | Path) -> list[Any]:
    try:
        with Path(path).open(encoding="utf-8-sig") as handle:
            value = json.load(handle)
    except (FileNotFoundError, IsADirectoryError):
        raise DataError(
            "no such file; expected a DPR result file. Check the path", path=path
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 ({error.reason}); save it as UTF-8", path=path) from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"not JSON ({error.msg}, column {error.colno}); is the file complete?",
            path=path,
            line=error.lineno,
        ) from None
    if not isinstance(value, list):
        raise DataError(
            f"found a JSON {type(value).__name__}, expected DPR's list of questions", path=path
        )
    return value


def _retrieved(entry: _Fields) -> Iterator[RetrievedPassage]:
    seen: set[str] = set()
    for rank, item in enumerate(entry.items("ctxs")):
        context = _Fields(item, f"{entry.place}.ctxs[{rank}]", entry.path)
        passage_id = context.identity("id", default=None)
        if passage_id in seen:
            raise context.fault(f"passage {passage_id!r} occurs twice for this question")
        seen.add(passage_id)
        passage = Passage(
            passage_id, context.text("title", default=""), context.text("text", default="")
        )
        yield RetrievedPassage(passage, context.score(), context.flag("has_answer"))


class _Fields:
    """A JSON object whose fields are taken out with their type checked."""

    def __init__(self, value: Any, place: str, path: str | Path) -> None:
        self.place = place
        self.path = path
        if not isinstance(value, dict):
            raise self.fault(f"found {_shown(value)}, expected an object")
        self._value = value

    def fault(self, message: str, key: str | None = None) -> DataError:
        place = self.place if key is None else f"{self.place}.{key}"
        return DataError(f"{place}: {message}", path=self.path)

    def text(self, key: str, *, default: str | None = None) -> str:
        """A string; null counts as missing where there is a default."""
        value = self._value.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.fault(f"found {_shown(value)}, expected a string", key)
        return value

    def identity(self, key: str, *, default: str | None) -> str:
        """An id: a string, or a whole number as some tools write it."""
        value = self._value.get(key, default)
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or not value:
            raise self.fault(f"found {_shown(value)}, expected an id (a string)", key)
        return value

    def items(self, key: str) -> list[Any]:
        value = self._value.get(key)
        if not isinstance(value, list):
            raise self.fault(f"found {_shown(value)}, expected a list", key)
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        values = self.items(key) if self._value.get(key) is not None else []
        for position, value in enumerate(values):
            if not isinstance(value, str):
                raise self.fault(f"found {_shown(value)}, expected a string", f"{key}[{position}]")
        return tuple(values)

    def score(self) -> float | None:
        value = self._value.get("score")
        if value is None:
            return None
        try:
            score = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            score = math.nan
        if not math.isfinite(score):
            raise self.fault(f"found {_shown(value)}, expected a finite number", "score")
        return score

    def flag(self, key: str) -> bool | None:
        value = self._value.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.fault(f"found {_shown(value)}, expected true or false", key)
        return value


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
