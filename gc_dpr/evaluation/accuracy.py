"""Top-k accuracy: the share of questions with an answer among their first k passages.

K top-k (length of the longest list of retrieved passages), Q questions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import regex

from gc_dpr.evaluation.answer_matching import (
    EMPTY_ANSWER_RULES,
    MATCH_MODES,
    check_answers,
    check_choice,
)
from gc_dpr.evaluation.question_matching import Block, Texts, log_report, match_questions

logger = logging.getLogger(__name__)

DEFAULT_KS = (1, 5, 20, 100)
_MANY = 0.1  # share of answers that look like patterns, above which the mode is doubted
# What people write in patterns and hardly ever in plain answers.
_LOOKS_LIKE_PATTERN = regex.compile(
    r"\\[dDwWsSbB.$()?+*]|\[[^\]]+\][+*?{]|\([^()]*\|[^()]*\)|\.[*+]|\w\?\w|\{\d+(?:,\d*)?\}"
)
_MISREAD_AS_PATTERN = regex.compile(r"[.()\[\]?+$*|^{}\\]")


@dataclass(frozen=True)
class TopKAccuracy:
    """The result of `top_k_accuracy`; all shares are of ``questions``.

    Attributes:
        accuracy: (K,) float64, top-1 to top-K accuracy.
        hits: (K,) int64, questions answered within the first k passages.
        per_question: For each question, for each of its passages: does it hold an answer?
        questions: Q, the denominator; questions without a usable answer are in it.
        questions_without_usable_answer: No answer at all, or only empty ones or invalid patterns.
        questions_with_empty_answer: With ``empty_answers="match"`` these are hits at rank 1.
        match: Matching mode.
        title_searched: Whether titles were searched too.
        pool_size: Number of passages that were searched, when it was given.
        ks: The cut-offs that `metrics` reports by default.
    """

    accuracy: npt.NDArray[np.float64]
    hits: npt.NDArray[np.int64]
    per_question: list[list[bool]]
    questions: int
    questions_without_usable_answer: int
    questions_with_empty_answer: int
    match: str
    title_searched: bool
    pool_size: int | None
    ks: tuple[int, ...]

    def at(self, k: int) -> float:
        """Top-k accuracy; beyond the longest list it stays what it is at that list's end."""
        if k < 1:
            raise ValueError(f"k={k}, expected 1 or more")
        return float(self.accuracy[min(k, len(self.accuracy)) - 1]) if len(self.accuracy) else 0.0

    def metrics(self, ks: Sequence[int] | None = None) -> dict[str, float]:
        """``{"top1_accuracy": …, "top5_accuracy": …}`` for the given cut-offs."""
        return {f"top{k}_accuracy": self.at(k) for k in (self.ks if ks is None else ks)}

    def description(self) -> dict[str, Any]:
        """What a reader must know beside the numbers: denominator, pool, mode."""
        return {
            "questions": self.questions,
            "questions_without_usable_answer": self.questions_without_usable_answer,
            "questions_with_empty_answer": self.questions_with_empty_answer,
            "match": self.match,
            "title_searched": self.title_searched,
            "pool_size": self.pool_size,
        }


def top_k_accuracy(
    answers: Sequence[Sequence[str]],
    retrieved_texts: Texts,
    *,
    match: str = "string",
    ks: Sequence[int] | None = None,
    titles: Texts | None = None,
    empty_answers: str = "match",
    pool_size: int | None = None,
    workers: int = 0,
    progress: bool = False,
) -> TopKAccuracy:
    """Share of questions with at least one answer among the first k passages, for every k.

    The same numbers as DPR's, but for one fault of it: DPR cuts every list at the length of the
    first question's. Here lists may differ in length; a short list simply ends.

    Args:
        answers: Per question, the accepted answers.
        retrieved_texts: Per question, the texts of its passages, best first; None where unknown.
        match: ``"string"``, ``"regex"`` or ``"kilt"``, see `answer_matching`.
        ks: Cut-offs for `TopKAccuracy.metrics`; None: those of 1, 5, 20, 100 that the lists reach.
        titles: Shaped as ``retrieved_texts``: search ``title + " . " + text``. None (DPR's
            default): only the text is searched.
        empty_answers: ``"match"`` (as DPR) or ``"ignore"``, see `AnswerMatcher`.
        pool_size: How many passages were searched; kept beside the numbers.
        workers: Processes; 0 works in this one. The result is the same.
        progress: Show a bar where the error stream is a terminal.

    Raises:
        TypeError: The answers of a question are not a sequence of strings.
        ValueError: Unequal numbers of questions, no question, an unknown mode, k below 1.
        RuntimeError: A worker process died.

    >>> result = top_k_accuracy([["Paris"], ["10"]], [["Rome", "in Paris"], ["year 1910"]])
    >>> result.accuracy.tolist(), result.per_question
    ([0.0, 0.5], [[False, True], [False]])
    """
    check_choice(match, MATCH_MODES, name="match")
    check_choice(empty_answers, EMPTY_ANSWER_RULES, name="empty_answers")
    if workers < 0:
        raise ValueError(f"workers={workers}, expected 0 (in this process) or more")
    accepted = [
        check_answers(item, name=f"answers[{position}]") for position, item in enumerate(answers)
    ]
    _check_shapes(len(accepted), retrieved_texts, titles)
    _warn_about_mode(accepted, match=match)

    whole = Block(0, accepted, retrieved_texts, titles, match, empty_answers)
    report = match_questions(whole, workers=workers, progress=progress)
    log_report(report, empty_answers=empty_answers)
    depth = max(len(texts) for texts in retrieved_texts)
    hits = _cumulative_hits(report.flags, depth=depth)
    return TopKAccuracy(
        accuracy=hits / len(accepted),
        hits=hits,
        per_question=report.flags,
        questions=len(accepted),
        questions_without_usable_answer=report.without_usable_answer,
        questions_with_empty_answer=report.with_empty_answer,
        match=match,
        title_searched=titles is not None,
        pool_size=pool_size,
        ks=_cut_offs(ks, depth=depth, pool_size=pool_size),
    )


def _cumulative_hits(flags: Sequence[Sequence[bool]], *, depth: int) -> npt.NDArray[np.int64]:
    first_hits = np.zeros(depth, dtype=np.int64)  # (K,) questions whose first hit is at that rank
    for row in flags:
        if True in row:
            first_hits[row.index(True)] += 1
    return first_hits.cumsum()


def _check_shapes(questions: int, texts: Texts, titles: Texts | None) -> None:
    if questions == 0:
        raise ValueError("there is no question to measure; is the questions file empty?")
    for name, lists in (("retrieved_texts", texts), ("titles", titles)):
        if lists is None:
            continue
        if len(lists) != questions:
            raise ValueError(f"{name} has {len(lists)} lists for {questions} questions")
        for position, row in enumerate(lists):
            if isinstance(row, str):
                raise TypeError(f"{name}[{position}] is a string, expected a list of strings")
            if len(row) != len(texts[position]):
                raise ValueError(
                    f"{name}[{position}] has {len(row)} entries for {len(texts[position])} passages"
                )


def _cut_offs(ks: Sequence[int] | None, *, depth: int, pool_size: int | None) -> tuple[int, ...]:
    if ks is None:
        return tuple(k for k in DEFAULT_KS if k <= depth)
    beyond = [k for k in ks if k > depth]
    if any(k < 1 for k in ks):
        raise ValueError(f"ks={list(ks)}, expected numbers from 1")
    if beyond and (pool_size is None or depth < pool_size):
        logger.warning(
            "at most %d passages were retrieved for a question, so top-k accuracy at %s counts "
            "only those; retrieve more passages for the true figure",
            depth,
            ", ".join(map(str, beyond)),
        )
    return tuple(ks)


def _warn_about_mode(answers: Sequence[Sequence[str]], *, match: str) -> None:
    flat = [answer for item in answers for answer in item]
    patterns = [answer for answer in flat if _LOOKS_LIKE_PATTERN.search(answer)]
    if match == "regex":
        misread = [answer for answer in flat if _MISREAD_AS_PATTERN.search(answer)]
        if misread and not patterns:
            logger.warning(
                'match="regex", but no answer looks like a regular expression and %d of %d hold '
                'characters that one reads differently, such as %r; is match="string" meant?',
                *(len(misread), len(flat), misread[0]),
            )
    elif len(patterns) > _MANY * len(flat):
        logger.warning(
            'match="%s", but %d of %d answers look like regular expressions, such as %r; is '
            'match="regex" meant?',
            *(match, len(patterns), len(flat), patterns[0]),
        )
